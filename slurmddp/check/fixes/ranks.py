"""Ranks that srun starts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.check.finding import Finding
from slurmddp.check.fix import Draft, fixes
from slurmddp.check.fixes.places import assignments, code_lines, cut, with_line
from slurmddp.check.values import symbol_name

_PYTHON = re.compile(r"(?<![\w./-])[\w./-]*python[\d.]*(?=\s)")


@fixes("rank-in-batch-shell")
def rank_in_batch_shell(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if "is 0 in all" not in finding.message or "=$" not in finding.message:
        return  # an argument of the program
    for launch in with_line(draft, 0, "python"):
        if "srun" not in launch.command.words:
            continue
        ranks = {name: symbol_name(launch.env(name) or "", "early") for name in ("RANK", "LOCAL_RANK")}
        values = " ".join(f"{name}=${variable}" for name, variable in ranks.items() if variable)
        for line in code_lines(draft, launch):
            text = draft.line(line)
            if match := _PYTHON.search(text):
                wrapped = f"bash -c 'export {values}; exec \"$@\"' bash "
                yield draft.put(line, text[: match.start()] + wrapped + text[match.start() :])
                break


@fixes("world-size")
def world_size(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, 0, "python"):
        step = launch.step.resources if launch.step else None
        for line, match in assignments(draft, launch, "WORLD_SIZE"):
            if finding.message.endswith("write $(( ))"):
                yield cut(draft, line, match, 2, f"$(({match[2]}))")
            elif step and step.tasks and step.tasks == draft.script.job.tasks:
                yield cut(draft, line, match, 2, "$SLURM_NTASKS")
            elif step and step.tasks_per_node:
                yield cut(draft, line, match, 2, f"$((SLURM_NNODES * {step.tasks_per_node}))")


@fixes("lightning-devices")
def lightning_devices(draft: Draft, finding: Finding) -> Iterator[Draft]:
    match = re.match(r"(trainer\.(?:devices|num_nodes)) is (\d+), and --[\w-]+ is (\d+)", finding.message)
    for launch in with_line(draft, finding.line, "python"):
        for line in code_lines(draft, launch):
            if match:
                meant = "$SLURM_NNODES" if match[1].endswith("num_nodes") else match[3]
                pattern = rf"({re.escape(match[1])}[= ]){match[2]}(?!\S)"
                yield draft.put(line, re.sub(pattern, rf"\g<1>{meant}", draft.line(line)))
