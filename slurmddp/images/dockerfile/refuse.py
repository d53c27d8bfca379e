"""What no definition file can say, whatever stands around it: each refusal with what to write instead."""

from __future__ import annotations

from collections.abc import Iterator

from slurmddp.errors import UserError
from slurmddp.images.dockerfile.lines import Instruction

_RUN_FLAGS = {
    "network": "take the option away: a build has the network of the machine that it runs on",
    "security": "take the option away: a build has no more rights than its user",
}
_FLAGS = {
    "FROM": {"platform"},
    "RUN": {"mount"},
    "COPY": {"from", "chown", "chmod", "link", "parents", "exclude"},
    "ADD": {"chown", "chmod", "link", "exclude"},
    "HEALTHCHECK": {"interval", "timeout", "start-period", "start-interval", "retries"},
}


def refusals(instruction: Instruction) -> Iterator[UserError]:
    """The errors of a keyword or an option that cannot be converted."""
    keyword = instruction.keyword
    for name, _ in instruction.flags:
        if keyword == "RUN" and name != "mount":
            todo = _RUN_FLAGS.get(name, "take the option away")
            yield instruction.error(f"RUN --{name} is BuildKit's own and is not converted", todo)
        elif name not in _FLAGS.get(keyword, ()):
            yield instruction.error(f"{keyword} --{name} is not converted", "take the option away")
