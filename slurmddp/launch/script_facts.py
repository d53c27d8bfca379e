"""The user's program of a job, read: its facts."""

from __future__ import annotations

import os
from typing import Any

from slurmddp.job.plan.model import Plan
from slurmddp.launch.modules import module_file
from slurmddp.launch.prepare import Prepared
from slurmddp.program.facts import Facts
from slurmddp.program.read import read_program
from slurmddp.program.sentences import sentences


def script_facts(plan: Plan) -> Facts | None:
    """Return what the user's Python program does; None for a bundled task, a bash script, or one that is not here."""
    program = plan.program
    if not program.own or program.bash:
        return None
    roots = [path for path in (program.project or "", *program.python_path) if path.startswith("/")]
    if program.script:
        return read_program(program.source, roots) if os.path.isfile(program.source) else None
    folder = program.project or plan.cwd
    file = module_file(folder, program.module)
    return read_program(str(file), [folder, *roots], program.module) if file else None


def script_dict(prepared: Prepared) -> dict[str, Any] | None:
    """Return the facts and sentences for `check`, without what the job file sets; docs/check-job.md has the keys."""
    plan, job = prepared.plan, prepared.resolved.job
    facts = script_facts(plan)
    if facts is None:
        return None
    given = {
        "train.resume_args": bool(job.train.resume_args),
        "checkpoint.watch": bool(job.checkpoint.watch),
        "train.workdir": job.train.workdir is not None,
    }
    # Where Slurm decides about the GPUs, the number of ranks is not known: several, then.
    said = [
        {"where": f"{each.place.file}:{each.place.line}" if each.place else "", "text": each.text, "todo": each.todo}
        for each in sentences(facts, plan.nodes.world or 2, resumes=given["train.resume_args"], copied=plan.snapshot)
    ]
    proposed = [each._asdict() for each in facts.proposals if not given[each.key]]
    return {**facts.as_dict(), "proposals": proposed, "sentences": said}
