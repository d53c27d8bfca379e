"""The stages of a Dockerfile: which there are, which the wanted one needs, what each one starts from."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.images.base import Base, parse_base
from slurmddp.images.dockerfile.lines import Instruction, split
from slurmddp.images.dockerfile.problems import Problems
from slurmddp.images.dockerfile.words import Lookup, known
from slurmddp.images.registry.documents import ARCHITECTURES

_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_MOUNTED = re.compile(r"(?:^|,)from=([^,]+)")
#: What takes time, and what a stage has from the one that it starts from.
WORK = ("RUN", "COPY", "ADD")


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it.

    name:   as FROM ... AS names it, in lower case; "" where it does not.
    image:  what it starts from: an image in a registry, or the name of another stage.
    parent: number of the stage that it starts from, None where it starts from an image.
    body:   its instructions without FROM.
    """

    number: int
    name: str
    image: str
    parent: int | None
    begin: Instruction
    body: tuple[Instruction, ...]


def platform_arguments() -> dict[str, str]:
    """The arguments that BuildKit predefines: TARGETARCH and the others, for this machine."""
    architecture = ARCHITECTURES.get(platform.machine(), platform.machine())
    values = {"PLATFORM": f"linux/{architecture}", "OS": "linux", "ARCH": architecture, "VARIANT": ""}
    return {side + name: value for side in ("TARGET", "BUILD") for name, value in values.items()}


def split_stages(
    instructions: tuple[Instruction, ...], arguments: Mapping[str, str], problems: Problems
) -> tuple[tuple[Stage, ...], dict[str, str | None]]:
    """The stages, and the arguments declared before the first FROM: None where they have no value. Raises UserError."""
    declared: dict[str, str | None] = {}
    position = 0
    while position < len(instructions) and instructions[position].keyword == "ARG":
        with problems:
            for name, value in read_arguments(instructions[position]):
                default = None if value is None else known(value, _lookup(declared), instructions[position])
                declared[name] = arguments.get(name, default)
        position += 1
    if position == len(instructions) or instructions[position].keyword != "FROM":
        problems.check()
        first = instructions[min(position, len(instructions) - 1)]
        raise first.error("only ARG can come before the first FROM", "begin with FROM IMAGE")
    stages: list[Stage] = []
    read = len(problems.found)
    while position < len(instructions):
        end = position + 1
        while end < len(instructions) and instructions[end].keyword != "FROM":
            end += 1
        with problems:
            stages.append(_stage(instructions[position], instructions[position + 1 : end], stages, declared))
        position = end
    if len(problems.found) > read:  # without one of the stages, those that follow would be counted wrongly
        problems.check()
    return tuple(stages), declared


def read_arguments(instruction: Instruction) -> list[tuple[str, str | None]]:
    """The (name, raw default or None) of an ARG."""
    found = []
    for word in split(instruction.text, instruction.escape):
        name, equals, value = word.partition("=")
        if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):  # Docker takes the rest, as of a comment, and nothing uses it
            found.append((name, value if equals else None))
    return found


def _lookup(declared: Mapping[str, str | None]) -> Lookup:
    known_ones: dict[str, str | None] = {**platform_arguments(), **declared}
    return known_ones.get


def _stage(
    begin: Instruction, body: tuple[Instruction, ...], stages: list[Stage], declared: Mapping[str, str | None]
) -> Stage:
    words = split(begin.text, begin.escape)
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise begin.error(f"cannot read FROM {begin.text}", "write FROM IMAGE or FROM IMAGE AS NAME")
    name = words[2].lower() if len(words) == 3 else ""
    if name and (not _NAME.fullmatch(name) or any(stage.name == name for stage in stages)):
        raise begin.error(
            f"{name!r} is not a valid stage name, or is used twice", "use a letter, then letters and digits"
        )
    _check_platform(begin, declared)
    image = known(words[0], _lookup(declared), begin)
    if not image:
        raise begin.error(f"FROM {words[0]} is empty: its ARG has no value", "give the argument a value")
    parent = next((stage.number for stage in stages if stage.name == image.lower()), None)
    return Stage(len(stages), name, image, parent, begin, body)


def image_base(image: str, instruction: Instruction) -> Base:
    """The base of an image in a registry, as FROM and COPY --from name it. Raises UserError."""
    if image == "scratch":
        todo = "start from a small base, or build the stage that its files come from: --stage NAME"
        raise instruction.error("the image scratch is empty: it has no shell for the build", todo)
    try:
        return parse_base(f"docker://{image}", Path("/"))
    except UserError as error:
        raise UserError(error.what, where=instruction.where, todo="write HOST/NAME:TAG") from None


def _check_platform(begin: Instruction, declared: Mapping[str, str | None]) -> None:
    here = platform_arguments()["TARGETPLATFORM"]
    for _, value in begin.flags:
        wanted = known(value, _lookup(declared), begin)
        if wanted != here and not wanted.startswith(f"{here}/"):
            raise begin.error(
                f"the stage is for {wanted}, but this machine is {here}", "build it on a machine of that kind"
            )


def find_stage(stages: tuple[Stage, ...], name: str) -> Stage | None:
    """The stage of that name or number."""
    for stage in stages:
        if (stage.name and stage.name == name.lower()) or str(stage.number) == name:
            return stage
    return None


def chain(stages: tuple[Stage, ...], stage: Stage) -> tuple[Stage, ...]:
    """The stage and those it is built on, the one with the image first."""
    found: tuple[Stage, ...] = (stage,)
    while found[0].parent is not None:
        found = (stages[found[0].parent], *found)
    return found


def shared_stages(stages: tuple[Stage, ...], final: Stage) -> frozenset[int]:
    """The numbers of the stages that `final` needs more than once, and at least once to start another from.

    Each of them is built once, and copied. Those without a RUN, COPY or ADD cost nothing and are not among them.
    """
    started: Counter[int] = Counter()
    copied: set[int] = set()
    needed, todo = {final.number}, [final]
    while todo:
        stage = todo.pop()
        flags = [flag for instruction in stage.body for flag in instruction.flags if flag[0] in ("from", "mount")]
        names = [value if name == "from" else "".join(_MOUNTED.findall(value)) for name, value in flags]
        sources = {found.number for name in names if (found := find_stage(stages[: stage.number], name))}
        copied |= sources
        if stage.parent is not None:
            started[stage.parent] += 1
            sources.add(stage.parent)
        todo += [stages[number] for number in sources - needed]
        needed |= sources
    twice = [chain(stages, stages[number]) for number in started if started[number] + (number in copied) > 1]
    return frozenset(
        whole[-1].number
        for whole in twice
        if whole[0].image != "scratch" and any(one.keyword in WORK for part in whole for one in part.body)
    )
