"""The stages of a Dockerfile: which there are, which the wanted one needs, what each one starts from."""

import platform
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

from slurmddp.errors import UserError, collecting
from slurmddp.images.base import Base, parse_base
from slurmddp.images.dockerfile.lines import Instruction, Problems, split
from slurmddp.images.dockerfile.words import NAME, Lookup, known
from slurmddp.images.registry.documents import ARCHITECTURES

_NAME = re.compile(r"[a-z][a-z0-9._-]*")
_MOUNTED = re.compile(r"(?:^|,)from=([^,]+)")
#: What takes time, and what a stage has from the one that it starts from.
WORK = ("RUN", "COPY", "ADD")


@dataclass(frozen=True)
class Stage:
    """One FROM and what follows it."""

    number: int
    name: str  # as FROM ... AS names it, in lower case; "" where it does not.
    image: str  # what it starts from: an image in a registry, or the name of another stage
    parent: int | None  # number of the stage that it starts from, None where it starts from an image
    begin: Instruction
    body: tuple[Instruction, ...]  # its instructions without FROM


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
    head = list(takewhile(lambda one: one.keyword == "ARG", instructions))
    for instruction in head:
        with collecting(problems.found):
            for name, value in read_arguments(instruction):
                default = None if value is None else known(value, _lookup(declared), instruction)
                declared[name] = arguments.get(name, default)
    begins = [number for number, one in enumerate(instructions) if one.keyword == "FROM"]
    if begins[:1] != [len(head)]:
        problems.check()
        first = instructions[min(len(head), len(instructions) - 1)]
        raise first.error("only ARG can come before the first FROM", "begin with FROM IMAGE")
    stages: list[Stage] = []
    read = len(problems.found)
    for begin, end in pairwise([*begins, len(instructions)]):
        with collecting(problems.found):
            stages.append(_stage(instructions[begin], instructions[begin + 1 : end], stages, declared))
    if len(problems.found) > read:  # without one of the stages, those that follow would be counted wrongly
        problems.check()
    return tuple(stages), declared


def read_arguments(instruction: Instruction) -> list[tuple[str, str | None]]:
    """The (name, raw default or None) of an ARG."""
    arguments = []
    for word in split(instruction.text, instruction.escape):
        name, equals, value = word.partition("=")
        if NAME.fullmatch(name):  # Docker takes the rest, as of a comment, and nothing uses it
            arguments.append((name, value if equals else None))
    return arguments


def _lookup(declared: Mapping[str, str | None]) -> Lookup:
    known_ones: dict[str, str | None] = {**platform_arguments(), **declared}
    return known_ones.get


def _stage(
    begin: Instruction, body: tuple[Instruction, ...], stages: list[Stage], declared: Mapping[str, str | None]
) -> Stage:
    words, lookup = split(begin.text, begin.escape), _lookup(declared)
    if len(words) not in (1, 3) or (len(words) == 3 and words[1].upper() != "AS"):
        raise begin.error(f"cannot read FROM {begin.text}", "write FROM IMAGE or FROM IMAGE AS NAME")
    name = words[2].lower() if len(words) == 3 else ""
    if name and (not _NAME.fullmatch(name) or any(stage.name == name for stage in stages)):
        message = f"{name!r} is not a valid stage name, or is used twice"
        raise begin.error(message, "use a letter, then letters and digits")
    here = platform_arguments()["TARGETPLATFORM"]
    for machine in (known(value, lookup, begin) for _, value in begin.flags):
        if machine != here and not machine.startswith(f"{here}/"):
            message = f"the stage is for {machine}, but this machine is {here}"
            raise begin.error(message, "build it on a machine of that kind")
    image = known(words[0], lookup, begin)
    empty = [name for name in re.findall(r"\$\{?(\w+)", words[0]) if not lookup(name)]
    if empty and re.search(r"^$|^[/:@]|[/:@]$", image):
        todo = f"--build-arg {empty[0]}=VALUE, or ARG {empty[0]}=VALUE before the first FROM"
        raise begin.error(f"FROM {words[0]}: the argument {empty[0]} has no value", todo)
    if not image:
        raise begin.error(f"FROM {words[0]} is empty", "write FROM IMAGE or FROM IMAGE AS NAME")
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


def find_stage(stages: tuple[Stage, ...], name: str) -> Stage | None:
    return next((one for one in stages if one.name == name.lower() != "" or str(one.number) == name), None)


def chain(stages: tuple[Stage, ...], stage: Stage) -> tuple[Stage, ...]:
    """The stage and those it is built on, the one with the image first."""
    built_on: tuple[Stage, ...] = (stage,)
    while built_on[0].parent is not None:
        built_on = (stages[built_on[0].parent], *built_on)
    return built_on


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
        sources = {source.number for name in names if (source := find_stage(stages[: stage.number], name))}
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
