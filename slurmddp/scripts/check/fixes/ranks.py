"""Ranks that srun starts itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import assignments, code_lines, cut, set_world_size, with_line, without
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.values import symbol_name

_PYTHON = re.compile(r"(?<![\w./-])[\w./-]*python[\d.]*(?=\s)")


@fixes("rank-in-batch-shell")
def rank_in_batch_shell(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, 0, "python"):
        if "srun" not in launch.command.words:
            continue
        ranks = {name: symbol_name(launch.env(name) or "", "early") for name in ("RANK", "LOCAL_RANK")}
        values = " ".join(f"{name}=${variable}" for name, variable in ranks.items() if variable)
        if argument := re.match(r"the batch shell expands \$(\w+),", finding.message):
            written = re.compile(rf"(--?[\w-]+)(=|\s+)\"?\$\{{?{argument[1]}\}}?\"?(?!\S)")
            for line in code_lines(draft, launch):
                if match := written.search(draft.line(line)):
                    moved = f'{match[1]}{match[2][:1]}"${argument[1]}"'
                    yield from _wrapped(without(draft, line, match), launch, f'exec "$@" {moved}')
        else:
            yield from _wrapped(draft, launch, f'export {values}; exec "$@"')


def _wrapped(draft: Draft, launch: Launch, shell: str) -> Iterator[Draft]:
    """Yield a draft in which a shell of the task starts the program."""
    for line in code_lines(draft, launch):
        text = draft.line(line)
        if match := _PYTHON.search(text):
            yield draft.put(line, f"{text[: match.start()]}bash -c '{shell}' bash {text[match.start() :]}")
            return


@fixes("world-size")
def world_size(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for launch in with_line(draft, 0, "python"):
        if finding.message.endswith("write $(( ))"):
            for line, match in assignments(draft, launch, "WORLD_SIZE"):
                yield cut(draft, line, match, 2, f"$(({match[2]}))")
        else:
            yield from set_world_size(draft, launch)


@fixes("lightning-devices")
def lightning_devices(draft: Draft, finding: Finding) -> Iterator[Draft]:
    match = re.match(r"(trainer\.(?:devices|num_nodes)) is (\d+), and --[\w-]+ is (\d+)", finding.message)
    for launch in with_line(draft, finding.line, "python"):
        for line in code_lines(draft, launch):
            if match:
                meant = "$SLURM_NNODES" if match[1].endswith("num_nodes") else match[3]
                pattern = rf"({re.escape(match[1])}[= ]){match[2]}(?!\S)"
                yield draft.put(line, re.sub(pattern, rf"\g<1>{meant}", draft.line(line)))
