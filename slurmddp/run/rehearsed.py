"""What a rehearsal showed of a program: kept in the user's state folder, by its code and its arguments."""

from pathlib import Path

from slurmddp.job.plan.model import Plan
from slurmddp.records.rehearsal import Verdict, key_of, read_verdict
from slurmddp.run.index import state_folder
from slurmddp.shared.files import text_or_empty, write_whole


def keep(code_hash: str, plan: Plan, verdict: Verdict) -> None:
    """Keep a verdict; it replaces an older one. Raises OSError."""
    if not _is_hashed(plan):
        return
    path = _path(code_hash, plan)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, verdict.text())


def find(code_hash: str, plan: Plan) -> Verdict | None:
    """Return the verdict about this program; None if it was not rehearsed."""
    text = text_or_empty(_path(code_hash, plan)) if _is_hashed(plan) else ""
    return read_verdict(text) if text else None


def _is_hashed(plan: Plan) -> bool:
    """Return whether the program is a part of the code that is copied and hashed."""
    return plan.program.own and plan.program.in_snapshot and plan.program.project is not None


def _path(code_hash: str, plan: Plan) -> Path:
    program = plan.program
    started = [program.script, program.module, *program.args]
    return state_folder() / "rehearsals" / f"{key_of(code_hash, started, plan.job.train.resume_args)}.json"
