"""What the user's own program does, as `check` and a dry run show it."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurmddp.job.plan.model import Plan
from slurmddp.launch.named_file import module_file
from slurmddp.launch.prepare import Prepared
from slurmddp.program.facts import Facts, corrected
from slurmddp.program.read import read_program
from slurmddp.program.sentences import sentences
from slurmddp.run.seen import seen
from slurmddp.styled import labelled
from slurmddp.visible import one_line


def _script_facts(plan: Plan) -> Facts | None:
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
    facts = _script_facts(plan)
    if facts is None:
        return None
    program = plan.program
    if program.in_snapshot and (showed := seen(Path(program.source), program.script)) is not None:
        facts = corrected(facts, showed._asdict(), showed.run)
    given = {
        "train.resume_args": bool(job.train.resume_args),
        "checkpoint.watch": bool(job.checkpoint.watch),
        "train.workdir": job.train.workdir is not None,
    }
    # Where Slurm decides about the GPUs, the number of ranks is not known: several, then.
    texts = [
        {"where": f"{each.place.file}:{each.place.line}" if each.place else "", "text": each.text, "todo": each.todo}
        for each in sentences(
            facts,
            plan.nodes.world or 2,
            resumes=given["train.resume_args"],
            watched=given["checkpoint.watch"],
            copied=plan.job.snapshot,
        )
    ]
    proposed = [each._asdict() for each in facts.proposals if not given[each.key]]
    return {**facts.as_dict(), "proposals": proposed, "sentences": texts}


def sentence_lines(script: dict[str, Any]) -> Iterator[str]:
    """Yield what the user's program does not do, or does otherwise than a job needs."""
    name = one_line(script["script"].rpartition("/")[2])
    for each in script["sentences"]:
        yield f"{one_line(each['where']) or name}: " + labelled("note", f"the script {one_line(each['text'])}")
        if each["todo"]:
            yield f"    fix: {each['todo']}"
