"""Where in the text of a script something is written, and how it is changed there."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.fix import Draft
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import launches
from slurmddp.scripts.check.values import symbol

HEAD = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
PORT = "$((10000 + SLURM_JOB_ID % 20000))"
#: One value as it is written, also inside of quotes that began before it.
VALUE = (
    r"(?:\$\(\([^\n]*?\)\)|\$\((?:[^()\n]|\([^()\n]*\))*\)|\$\{[^}\n]*\}|`[^`\n]*`"
    r"|\"[^\"\n]*\"|'[^'\s]*'|\\\$|[^\s\"'\\;|&()`])+"
)
_LAUNCHERS = {
    "torchrun": r"(?<![\w./-])(?:python[\d.]*(?: -u)? -m torch\.distributed\.(?:run|launch)|[\w./-]*torchrun)(?=\s|$)",
    "accelerate": r"(?<![\w./-])(?:[\w./-]*accelerate launch|[\w./-]*accelerate-launch)(?=\s|$)",
}


def with_line(draft: Draft, line: int, *kinds: str) -> list[Launch]:
    """Return the launches of a line; all of them, if none starts there (the finding then names another line)."""
    found = list(launches(draft.script, *kinds))
    return [each for each in found if each.line == line] or found


def code_lines(draft: Draft, launch: Launch) -> list[int]:
    """Return the lines that may hold what a launch is given: its own first, then the others above it, nearest first."""
    own = sorted(set(launch.command.lines)) or [launch.line]
    end = own[-1]
    while draft.line(end).endswith("\\"):
        end += 1
    own = list(range(min(own[0], launch.line), end + 1))
    others = [at for at in reversed(range(1, own[0])) if draft.line(at).lstrip()[:1] not in ("", "#")]
    return [*own, *others]


def option(draft: Draft, launch: Launch, *names: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield where an option of a launcher is written; group 1 is its name with the sign behind it, group 2 the value.
    names: with hyphens."""
    spelled = "|".join(name.replace("-", "[-_]") for name in names)
    pattern = re.compile(rf"(?<![\w-])(--?(?:{spelled})(?:=|\s+))({VALUE})")
    for line in code_lines(draft, launch):
        if match := pattern.search(draft.line(line)):
            yield line, match


def set_option(draft: Draft, launch: Launch, value: str, *names: str) -> Iterator[Draft]:
    """Yield drafts that give an option another value, or the option itself behind the launcher."""
    for line, match in option(draft, launch, *names):
        yield cut(draft, line, match, 2, value)
    if not any(name in launch.options for name in names):
        name = names[0] if launch.kind == "torchrun" and names[0] == "standalone" else names[0].replace("-", "_")
        yield from behind_launcher(draft, launch, f" --{name}={value}")


def cut(draft: Draft, line: int, match: re.Match[str], group: int, new: str) -> Draft:
    """Replace a group of a match; quotes around the old value go around the new one."""
    text, old = draft.line(line), match[group]
    if old[:1] == '"' and old[-1:] == '"' and len(old) > 1 and '"' not in new:
        new = f'"{new}"'
    return draft.put(line, text[: match.start(group)] + new + text[match.end(group) :])


def without(draft: Draft, line: int, match: re.Match[str]) -> Draft:
    """Remove what a match covers; a continuation on which nothing else stands goes with it."""
    before, after = draft.line(line)[: match.start()].rstrip(), draft.line(line)[match.end() :].lstrip(" ")
    if not before and after == "\\":
        return draft.remove(line)
    space = " " if before and after else ""
    return draft.put(line, (before or draft.line(line)[: match.start()]) + space + after)


def behind_launcher(draft: Draft, launch: Launch, words: str) -> Iterator[Draft]:
    """Yield drafts with further options behind the name of the launcher."""
    for line, match in launcher(draft, launch):
        text = draft.line(line)
        yield draft.put(line, text[: match.end()] + words + text[match.end() :])


def launcher(draft: Draft, launch: Launch) -> Iterator[tuple[int, re.Match[str]]]:
    """Yield where the name of the launcher is written."""
    pattern = _LAUNCHERS.get(launch.kind)
    for line in code_lines(draft, launch) if pattern else ():
        if match := re.search(pattern or "", draft.line(line)):
            yield line, match


def srun(draft: Draft, launch: Launch) -> tuple[int, re.Match[str]] | None:
    """Return where the srun of a launch is written."""
    line = launch.step.line if launch.step else 0
    match = re.search(r"(?<![\w./-])srun(?=\s|$)", draft.line(line))
    return (line, match) if match else None


def assignments(draft: Draft, launch: Launch, name: str = r"[A-Za-z_]\w*") -> Iterator[tuple[int, re.Match[str]]]:
    """Yield the assignments above a launch, the nearest first; group 1 is the name, group 2 the value."""
    pattern = re.compile(rf"(?<![\w$-])({name})=({VALUE})(?=[\s;]|$)")
    for line in code_lines(draft, launch):
        text = draft.line(line)
        if re.match(r"\s*(?:export\s|declare\s|[A-Za-z_]\w*=)", text):
            for match in pattern.finditer(text):
                yield line, match


def set_world_size(draft: Draft, launch: Launch) -> Iterator[Draft]:
    """Yield drafts in which WORLD_SIZE is the number of tasks that srun starts."""
    step = launch.step.resources if launch.step else None
    for line, match in assignments(draft, launch, "WORLD_SIZE"):
        if step and step.tasks and step.tasks == draft.script.job.tasks:
            yield cut(draft, line, match, 2, "$SLURM_NTASKS")
        elif step and step.tasks_per_node:
            yield cut(draft, line, match, 2, f"$((SLURM_NNODES * {step.tasks_per_node}))")


def top(draft: Draft) -> int:
    """Return the line before which settings are added: the first one below the #SBATCH lines."""
    late = set(draft.script.late)
    return max((each.line for each in draft.script.directives if each.line not in late), default=1) + 1


def set_at_top(draft: Draft, text: str) -> Draft:
    """Add a line below the #SBATCH lines."""
    at = top(draft)
    return draft.insert(at, *([""] if draft.line(at - 1).startswith("#") else []), text)


def head_variable(draft: Draft, launch: Launch) -> tuple[Draft, str]:
    """(draft in which a variable holds the first node's name, that variable's name)."""
    found = draft.script.found
    for (_, name), value in found.assigned.items():
        if value == symbol("head") and name != "cd" and (launch.command.words[:1] == ["srun"] or launch.env(name)):
            if any(line < launch.line for line, match in assignments(draft, launch, name)):
                return draft, name
    taken = {name for _, name in found.assigned}
    name = next(name for name in ("MASTER_ADDR", "HEAD_NODE", "FIRST_NODE") if name not in taken)
    return set_at_top(draft, f"export {name}={HEAD}"), name
