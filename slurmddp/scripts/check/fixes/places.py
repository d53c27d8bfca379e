"""Where in the text of a script something is written, and how it is changed there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
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
Place = tuple[int, re.Match[str]]
_Fix = Callable[[Draft, Finding, Launch], Iterator[Draft]]


def launch_fixes(*rules: str, kinds: tuple[str, ...] = (), changes: str = "") -> Callable[[_Fix], _Fix]:
    """Register a function as the fix of these rules for each launch of a finding's line; of all lines, if none starts
    there (the finding then names another line)."""

    def register(function: _Fix) -> _Fix:
        @fixes(*rules, changes=changes)
        def each_launch(draft: Draft, finding: Finding) -> Iterator[Draft]:
            found = list(launches(draft.script, *kinds))
            for launch in [each for each in found if each.line == finding.line] or found:
                yield from function(draft, finding, launch)

        return function

    return register


def code_lines(draft: Draft, launch: Launch) -> list[int]:
    """Return the lines that may hold what a launch is given: its own first, then the others above it, nearest first."""
    own = [*launch.command.lines, launch.line]
    end = max(own)
    while draft.line(end).endswith("\\"):
        end += 1
    first = min(launch.command.lines, default=launch.line)
    others = [at for at in reversed(range(1, first)) if draft.line(at).lstrip()[:1] not in ("", "#")]
    return [*range(min(own), end + 1), *others]


def places(draft: Draft, launch: Launch, pattern: str) -> Iterator[Place]:
    """Yield where a pattern is in the lines of a launch."""
    for line in code_lines(draft, launch):
        if match := re.search(pattern, draft.line(line)):
            yield line, match


def option(draft: Draft, launch: Launch, *names: str) -> Iterator[Place]:
    """Yield where an option of a launcher is written; group 1 is its name with the sign behind it, group 2 the value.
    names: with hyphens."""
    spelled = "|".join(name.replace("-", "[-_]") for name in names)
    return places(draft, launch, rf"(?<![\w-])(--?(?:{spelled})(?:=|\s+))({VALUE})")


def replaced(draft: Draft, launch: Launch, value: str, *names: str) -> Iterator[Draft]:
    """Yield drafts that give an option another value where it is written."""
    return (cut(draft, place, value) for place in option(draft, launch, *names))


def set_option(draft: Draft, launch: Launch, value: str, name: str) -> Iterator[Draft]:
    """Yield drafts that give an option another value, or the option itself behind the launcher."""
    yield from replaced(draft, launch, value, name)
    if name not in launch.options:
        yield from behind_launcher(draft, launch, f" --{name.replace('-', '_')}={value}")


def cut(draft: Draft, place: Place, new: str) -> Draft:
    """Replace the second group of a match, a value; quotes around the old one go around the new one."""
    line, match = place
    quoted = re.fullmatch(r'".*"', match[2]) and '"' not in new
    return draft.splice(line, *match.span(2), f'"{new}"' if quoted else new)


def without(draft: Draft, place: Place) -> Draft:
    """Remove what a match covers; a continuation on which nothing else stands goes with it."""
    line, match = place
    before, after = match.string[: match.start()].rstrip(), match.string[match.end() :].lstrip(" ")
    if not before and after == "\\":
        return draft.remove(line)
    return draft.put(line, (before or match.string[: match.start()]) + " " * bool(before and after) + after)


def launcher(draft: Draft, launch: Launch) -> Iterator[Place]:
    """Yield where the name of the launcher is written."""
    return places(draft, launch, _LAUNCHERS.get(launch.kind, "(?!)"))


def behind_launcher(draft: Draft, launch: Launch, words: str) -> Iterator[Draft]:
    """Yield drafts with further options behind the name of the launcher."""
    for line, match in launcher(draft, launch):
        yield draft.splice(line, match.end(), match.end(), words)


def assignments(draft: Draft, launch: Launch, name: str = r"[A-Za-z_]\w*") -> Iterator[Place]:
    """Yield the assignments above a launch, the nearest first; group 1 is the name, group 2 the value."""
    pattern = re.compile(rf"(?<![\w$-])({name})=({VALUE})(?=[\s;]|$)")
    for line, declared in places(draft, launch, r"^\s*(?:export\s|declare\s|[A-Za-z_]\w*=)"):
        yield from ((line, match) for match in pattern.finditer(declared.string))


def set_world_size(draft: Draft, launch: Launch) -> Iterator[Draft]:
    """Yield drafts in which WORLD_SIZE is the number of tasks that srun starts."""
    step = launch.step.resources if launch.step else None
    for place in assignments(draft, launch, "WORLD_SIZE") if step else ():
        if step and step.tasks and step.tasks == draft.script.job.tasks:
            yield cut(draft, place, "$SLURM_NTASKS")
        elif step and step.tasks_per_node:
            yield cut(draft, place, f"$((SLURM_NNODES * {step.tasks_per_node}))")


def below_directives(draft: Draft) -> int:
    """Return the line before which settings are added: the first one below the #SBATCH lines that sbatch reads."""
    late = set(draft.script.late)
    return max((each.line for each in draft.script.directives if each.line not in late), default=1) + 1


def head_variable(draft: Draft, launch: Launch) -> tuple[str, Callable[[Draft], Draft]]:
    """(variable with the first node's name, what adds its assignment to a draft where that is needed)."""
    found = draft.script.found
    for (_, name), value in found.assigned.items():
        if value == symbol("head") and name != "cd" and (launch.command.words[:1] == ["srun"] or launch.env(name)):
            if any(line < launch.line for line, _ in assignments(draft, launch, name)):
                return name, lambda after: after
    taken = {name for _, name in found.assigned}
    name = next(name for name in ("MASTER_ADDR", "HEAD_NODE", "FIRST_NODE") if name not in taken)
    at = below_directives(draft)
    texts = [*([""] if draft.line(at - 1).startswith("#") else []), f"export {name}={HEAD}"]
    return name, lambda after: after.insert(at, *texts)
