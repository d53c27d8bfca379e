"""Converts a Dockerfile into the text of a definition file; refuses with its line what cannot be converted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.images.base import Base, Pin
from slurmddp.images.context.ignore import read_ignore
from slurmddp.images.context.sources import STAGING
from slurmddp.images.context.staging import FOLDER, Item
from slurmddp.images.context.tree import Context
from slurmddp.images.dockerfile.copying import FILES, KEPT
from slurmddp.images.dockerfile.interpret import SCRATCH, Interpreter, Sections, Setting
from slurmddp.images.dockerfile.lines import Instruction, read, trigger
from slurmddp.images.dockerfile.problems import Problems
from slurmddp.images.dockerfile.running import Running
from slurmddp.images.dockerfile.stages import Stage, chain, find_stage, image_base, shared_stages, split_stages
from slurmddp.images.dockerfile.words import Parts, shell, shell_parts
from slurmddp.images.sections import render_sections

if TYPE_CHECKING:
    from slurmddp.images.registry.image import RegistryImage

#: Stages that copy from each other in a row: each one is a handful of Python's own calls, of which it allows 1000.
_DEEPEST = 50


@dataclass(frozen=True)
class Converted:
    """A Dockerfile as a definition file.

    labelled:   (pins of bases in registries, commit or None) -> the whole text.
    bases:      the images that the stages start from; the last is the final stage's, through other stages where its
                FROM names one.
    items:      files and folders of the build context that go in.
    notes:      for the user: what has no effect under Apptainer, or may differ.
    undecided:  what cannot be converted without the base's configuration; there is no text then.
    with_bases: what registries say of the bases, by their names -> the same Dockerfile, not read again, with what
                follows from it.
    """

    labelled: Callable[[str, Mapping[str, Pin], str | None], str]
    bases: tuple[Base, ...]
    items: tuple[Item, ...]
    notes: tuple[str, ...]
    undecided: UserError | None
    with_bases: Callable[[Mapping[str, RegistryImage]], Converted]

    @property
    def sources(self) -> tuple[Path, ...]:
        """Local files and folders whose content goes in."""
        return tuple(dict.fromkeys(item.path for item in self.items if item.whole and not item.url))

    @property
    def definition(self) -> str:
        """The text without digests and commit."""
        return self.labelled(__version__, {}, None)

    @property
    def base(self) -> Base:
        """The image that the final stage starts from."""
        return self.bases[-1]


def convert(
    path: Path,
    *,
    context: Path | None = None,
    arguments: Mapping[str, str] = MappingProxyType({}),
    secrets: Collection[str] = (),
    target: str | None = None,
    bases: Mapping[str, RegistryImage] = MappingProxyType({}),
) -> Converted:
    """Convert the Dockerfile at `path`.

    context:   the folder that COPY takes files from; the Dockerfile's own without it.
    arguments: values for its ARGs, as `docker build --build-arg` takes them.
    secrets:   ids of those that RUN --mount=type=secret may ask for.
    target:    the stage to build, by name or number; the last one without it.
    bases:     what registries say of the bases, by their names; WORKDIR and ENTRYPOINT of others are assumed, with a
               note.

    Raises UserError, with file and line, for what cannot be converted: all of it at once.
    """
    _check_arguments(arguments)
    problems = Problems()
    instructions = read(path, problems)
    path = path.absolute()
    folder = (context or path.parent).absolute()
    stages, declared = split_stages(instructions, arguments, problems)
    final = _target(stages, target, path)
    whole = Context(folder, read_ignore(path, folder))
    return _Parsed(path, instructions, stages, declared, final, arguments, tuple(secrets), whole, problems).converted(
        bases
    )


@dataclass(frozen=True)
class _Parsed:
    """A Dockerfile and its .dockerignore, read once.

    declared: its ARGs before the first FROM.
    problems: of its text, found so far.
    """

    path: Path
    instructions: tuple[Instruction, ...]
    stages: tuple[Stage, ...]
    declared: Mapping[str, str | None]
    final: Stage
    arguments: Mapping[str, str]
    secrets: tuple[str, ...]
    context: Context
    problems: Problems

    def converted(self, bases: Mapping[str, RegistryImage]) -> Converted:
        problems = Problems(self.problems.found)
        setting = Setting(self.context, self.arguments, self.declared, bases, problems, self.secrets)
        setting.used.update(name for name in self.declared if name in self.arguments)
        conversion = _Conversion(self.stages, setting, shared_stages(self.stages, self.final))
        with problems:
            running, workdir = conversion.walk(self.final)
        undecided = problems.check()
        if undecided and bases:
            raise undecided
        notes = setting.notes
        if not self.context.ignore.file:
            _note_context(self.instructions, self.context.folder, notes)
        for name in sorted(set(self.arguments) - setting.used):
            notes.append(f"the build argument {name} has no ARG in {self.path.name}")
        for name in sorted(set(self.secrets) - setting.used_secrets):
            notes.append(f"no RUN uses the secret {name} in {self.path.name}")
        for stage in self.stages:
            if stage.number not in conversion.visited:
                notes.append(f"{stage.begin.where}: the stage {stage.name or stage.number} is not needed and left out")
        for name, assumed in setting.assumed.items():
            notes.append(f"the registry of the base {name} was not asked; assumed: {', '.join(assumed)}")
        folder = FOLDER if setting.items else ""
        labelled = partial(_text, undecided, conversion.made, running, workdir, folder)
        if not undecided:
            labelled(__version__, {}, None)  # refuses here what a definition file cannot hold
        used, items = tuple(part.base for part in conversion.made), tuple(setting.items)
        return Converted(labelled, used, items, tuple(dict.fromkeys(notes)), undecided, self.converted)


def _text(
    undecided: UserError | None,
    stages: list[Sections],
    running: Running,
    workdir: Parts | None,
    folder: str,
    version: str,
    pins: Mapping[str, Pin],
    commit: str | None,
) -> str:
    if undecided:
        raise undecided
    own = pins.get(stages[-1].base.source)
    return render_sections(
        "container/dockerfile.def.j2",
        version=version,
        stages=stages,
        staging=STAGING,
        kept=KEPT,
        files=FILES,
        folder=folder,
        runs=running.said,
        workdir=shell_parts(workdir) if workdir else "",
        entrypoint=" ".join(map(shell, running.entrypoint or ())),
        command=" ".join(map(shell, running.command or ())),
        pins=pins,
        digest=own.digest if own else None,
        commit=commit,
    )


def _check_arguments(arguments: Mapping[str, str]) -> None:
    for name, value in arguments.items():
        if not value.replace("\t", " ").isprintable():
            raise UserError(
                f"the build argument {name} contains a line break or a control character", todo="write it in one line"
            )


def _target(stages: tuple[Stage, ...], target: str | None, path: Path) -> Stage:
    if target is None:
        return stages[-1]
    found = find_stage(stages, target)
    if found is None:
        names = ", ".join(stage.name or str(stage.number) for stage in stages)
        raise UserError(f"no stage {target!r}", where=str(path), todo=f"name one of: {names}")
    return found


def _note_context(instructions: tuple[Instruction, ...], folder: Path, notes: list[str]) -> None:
    """A COPY of the whole folder takes .git, data and secrets along."""
    for instruction in instructions:
        if instruction.keyword in ("COPY", "ADD") and not dict(instruction.flags).get("from"):
            first = (instruction.array() or instruction.text.split())[0]
            if first.rstrip("/") in (".", "*", ""):
                notes.append(
                    f"{instruction.where}: the image gets all of {folder}, including .git and data; "
                    "a .dockerignore in that folder excludes files"
                )


@dataclass
class _Conversion:
    """Finds the stages that the wanted one needs while it walks over it, those first.

    shared:  the numbers of the stages that others start from by a copy of their files.
    made:    the stages of the definition file, in its order.
    visited: the numbers of those of the Dockerfile that went in.
    """

    stages: tuple[Stage, ...]
    setting: Setting
    shared: Collection[int]
    made: list[Sections] = field(default_factory=list)
    visited: set[int] = field(default_factory=set)
    _found: dict[str, Sections] = field(default_factory=dict)
    _walking: list[Stage] = field(default_factory=list)

    def walk(self, stage: Stage) -> tuple[Running, Parts | None]:
        """Convert the stage after those that it copies from; return what it runs, and its WORKDIR."""
        if len(self._walking) == _DEEPEST:
            raise stage.begin.error(f"more than {_DEEPEST} stages copy from each other in a row", "join some of them")
        self._walking.append(stage)
        whole = chain(self.stages, stage)
        self.visited.update(part.number for part in whole)
        try:
            root = whole[0].image == "scratch" and len(self._walking) > 1
            helper = next((one for one in self.stages if one.parent is None and one.image != "scratch"), whole[0])
            begin = helper if root else whole[0]
            base = image_base(begin.image, begin.begin)
            start = next((part for part in reversed(whole[:-1]) if part.number in self.shared), None)
            built = self._built(start) if start else None
            interpreter = Interpreter(base, self.setting, self.find, SCRATCH if root else "", built)
            triggers: list[Instruction] = []
            for part in whole:
                interpreter.stage((*triggers, *part.body), start is not None and part.number <= start.number)
                triggers = []
                for instruction in (one for one in part.body if one.keyword == "ONBUILD" and part != stage):
                    with self.setting.problems:
                        triggers.append(trigger(instruction))
        finally:
            self._walking.pop()
        running = interpreter.running if self._walking else interpreter.finish()
        self._add(interpreter.sections, f"stage {stage.number}", stage.name or f"stage-{stage.number}")
        return running, interpreter.workdir

    def find(self, wanted: str, instruction: Instruction) -> tuple[Sections, str]:
        """The stage or image that COPY --from names, as the definition file has it, and the folder that it is in."""
        stage = find_stage(self.stages, wanted)
        if stage is None and wanted.isdigit():
            raise instruction.error(f"no stage {wanted}", "stages are counted from 0")
        if stage is None:
            if f"image {wanted}" not in self._found:
                self._add(Sections(image_base(wanted, instruction)), f"image {wanted}", f"image-{len(self._found)}")
            return self._found[f"image {wanted}"], ""
        if stage.number >= self._walking[-1].number:
            raise instruction.error(f"the stage {wanted} does not come before this line", "move it up")
        return self._built(stage), SCRATCH if chain(self.stages, stage)[0].image == "scratch" else ""

    def _built(self, stage: Stage) -> Sections:
        """The stage, which is built once however often it is used."""
        if f"stage {stage.number}" not in self._found:
            self.walk(stage)
        return self._found[f"stage {stage.number}"]

    def _add(self, sections: Sections, key: str, name: str) -> None:
        taken = {FILES, *(made.name for made in self.made), *({stage.name for stage in self.stages} - {name})}
        while name in taken:
            name += "-1"
        sections.name = name
        self._found[key] = sections
        self.made.append(sections)
