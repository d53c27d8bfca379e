"""What one may do next with a run, as commands: for programs, in every JSON answer about a run."""

from __future__ import annotations

from slurmddp.run.state import EXIT_CODES

_AFTER = {
    "done": ("report {}", "checkpoint list {}"),
    "cancelled": ("resume {}", "report {}"),
    "stopped": ("resume {}", "report {}"),
}
_GOING = ("status {}", "logs {} --follow", "cancel {}")
_FAILED = ("doctor {}", "logs {} --tail 100", "resume {}", "debug bundle {}")
_GOES_ON = EXIT_CODES["running"]


def next_commands(run_id: str, state: str) -> list[str]:
    """Return them, the most useful first. state: a key of EXIT_CODES."""
    words = _GOING if EXIT_CODES[state] == _GOES_ON else _AFTER.get(state, _FAILED)
    return [f"slurmddp {each.format(run_id)}" for each in words]
