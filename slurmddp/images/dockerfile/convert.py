"""Converts a Dockerfile into the text of a definition file; refuses with its line what cannot be converted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

from slurmddp import __version__
from slurmddp.errors import UserError, collecting
from slurmddp.images.base import Pin
from slurmddp.images.context.ignore import read_ignore
from slurmddp.images.context.sources import STAGING
from slurmddp.images.context.staging import FOLDER, Item
from slurmddp.images.context.tree import Context
from slurmddp.images.definition import render_sections
from slurmddp.images.dockerfile.copying import FILES, KEPT
from slurmddp.images.dockerfile.interpret import SCRATCH, Interpreter, Sections, Setting
from slurmddp.images.dockerfile.lines import Instruction, Problems, read, trigger
from slurmddp.images.dockerfile.running import Running
from slurmddp.images.dockerfile.stages import Stage, chain, find_stage, image_base, shared_stages, split_stages
from slurmddp.images.dockerfile.words import Parts, shell, shell_parts
from slurmddp.images.image_spec import Wanted
from slurmddp.images.registry.image import RegistryImage
from slurmddp.images.workspace import unpacked

#: Stages that copy from each other in a row: each one is a handful of Python's own calls, of which it allows 1000.
_DEEPEST = 50


def convert(
    path: Path,
    *,
    context: Path | None = None,
    arguments: Mapping[str, str] = MappingProxyType({}),
    secrets: Mapping[str, Item] = MappingProxyType({}),
    target: str | None = None,
    bases: Mapping[str, RegistryImage] = MappingProxyType({}),
) -> Wanted:
    """Return the image that the Dockerfile at `path` makes.

    context:   the folder that COPY takes files from; the Dockerfile's own without it.
    arguments: values for its ARGs, as `docker build --build-arg` takes them.
    secrets:   those that RUN --mount=type=secret may ask for, by their ids.
    target:    the stage to build, by name or number; the last one without it.
    bases:     what registries say of the bases, by their names; WORKDIR and ENTRYPOINT of others are assumed, with a
               note.

    Raises UserError, with file and line, for what cannot be converted: all of it at once.
    """
    for name, value in arguments.items():
        if not value.replace("\t", " ").isprintable():
            message = f"the build argument {name} contains a line break or a control character"
            raise UserError(message, todo="write it in one line")
    problems = Problems()
    instructions = read(path, problems)
    path = path.absolute()
    folder = (context or path.parent).absolute()
    stages, declared = split_stages(instructions, arguments, problems)
    final = _target(stages, target, path)
    whole = Context(folder, read_ignore(path, folder))

    def converted(bases: Mapping[str, RegistryImage]) -> Wanted:
        setting = Setting(whole, arguments, declared, bases, Problems(problems.found), secrets)
        conversion = _Conversion(stages, setting, shared_stages(stages, final))
        with collecting(setting.problems.found):
            running, workdir = conversion.walk(final)
        undecided = setting.problems.check()
        if undecided and bases:
            raise undecided
        notes = dict.fromkeys([*setting.notes, *_notes(path.name, stages, setting, conversion)])
        made = tuple(conversion.made.values())
        text = partial(_text, undecided, made, running, workdir, FOLDER if setting.items else "")
        if not undecided:
            text(__version__, {}, None)  # refuses here what a definition file cannot hold
        return Wanted(
            "".join(char if char.isalnum() or char in "._-" else "-" for char in path.parent.name).strip("-.")
            or "image",
            tuple(part.base for part in made),
            tuple(dict.fromkeys(item.path for item in setting.items if item.whole and not item.url)),
            (),
            plain="" if undecided else text("", {}, None),
            labelled=partial(text, __version__),
            notes=tuple(notes),
            folder=path.parent,
            items=(*setting.items, *secrets.values()),
            informed=informed,
            undecided=undecided,
        )

    def informed(bases: Mapping[str, RegistryImage]) -> Wanted:
        known = converted(bases)
        return known if image.undecided else replace(known, plain=image.plain)

    image = converted(bases)
    return image


def _text(
    undecided: UserError | None,
    stages: tuple[Sections, ...],
    running: Running,
    workdir: Parts | None,
    folder: str,
    version: str,
    pins: Mapping[str, Pin],
    commit: str | None,
) -> str:
    if undecided:
        raise undecided
    pin = pins.get(stages[-1].base.source)
    return render_sections(
        "container/dockerfile.def.j2",
        version=version, stages=stages, staging=STAGING, kept=KEPT, files=FILES, folder=folder, runs=running.said,
        workdir=shell_parts(workdir) if workdir else "",
        entrypoint=" ".join(map(shell, running.entrypoint or ())),
        command=" ".join(map(shell, running.command or ())),
        pins=pins, digest=pin.digest if pin else None, commit=commit,
    )  # fmt: skip


def _target(stages: tuple[Stage, ...], target: str | None, path: Path) -> Stage:
    if target is None:
        return stages[-1]
    chosen = find_stage(stages, target)
    if chosen is None:
        names = ", ".join(stage.name or str(stage.number) for stage in stages)
        raise UserError(f"no stage {target!r}", where=str(path), todo=f"name one of: {names}")
    return chosen


def _notes(name: str, stages: tuple[Stage, ...], setting: Setting, conversion: _Conversion) -> Iterator[str]:
    """Yield notes on the whole Dockerfile. A COPY of the whole folder also copies .git, data and secrets."""
    for instruction in (one for stage in stages for one in stage.body if not setting.context.ignore.file):
        if instruction.keyword in ("COPY", "ADD") and not dict(instruction.flags).get("from"):
            first = (instruction.array() or instruction.text.split())[0]
            if first.rstrip("/") in (".", "*", ""):
                note = f"{instruction.where}: the image gets all of {setting.context.folder}, including .git and data"
                yield f"{note}; a .dockerignore in that folder excludes files"
    for argument in sorted({*setting.given} - setting.used - {*setting.declared}):
        yield f"the build argument {argument} has no ARG in {name}"
    for secret in sorted({*setting.secrets} - setting.used_secrets):
        yield f"no RUN uses the secret {secret} in {name}"
    for stage in stages:
        if stage.number not in conversion.visited:
            yield f"{stage.begin.where}: the stage {stage.name or stage.number} is not needed, so it is not built"
    for copy in (part for part in conversion.made.values() if part.start):
        base_of = setting.bases.get(copy.base.source)
        size = unpacked(base_of.size) if base_of and base_of.size else "an unknown amount (a build asks the registry)"
        note = f"the stage {copy.name} starts with a full copy of the stage {copy.start}"
        yield f"{note}, which takes {size} of disk space"
    for base, assumed in setting.assumed.items():
        yield f"the registry of the base {base} was not asked; assumed: {', '.join(assumed)}"


@dataclass
class _Conversion:
    """Finds the stages that the wanted one needs while it walks over it, those first."""

    stages: tuple[Stage, ...]
    setting: Setting
    shared: Collection[int]  # the numbers of the stages that others start from by a copy of their files
    #: the stages of the definition file, in its order, by what the Dockerfile says that they are
    made: dict[str, Sections] = field(default_factory=dict)
    visited: set[int] = field(default_factory=set)  # the numbers of those of the Dockerfile that went in
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
                    with collecting(self.setting.problems.found):
                        triggers.append(trigger(instruction))
        finally:
            self._walking.pop()
        running = interpreter.running if self._walking else interpreter.finish()
        self._add(interpreter.sections, f"stage {stage.number}", stage.name or f"stage-{stage.number}")
        return running, interpreter.workdir

    def find(self, reference: str, instruction: Instruction) -> tuple[Sections, str]:
        """The stage or image that COPY --from names, as the definition file has it, and the folder that it is in."""
        stage = find_stage(self.stages, reference)
        if stage is None and reference.isdigit():
            raise instruction.error(f"no stage {reference}", "stages are counted from 0")
        if stage is None:
            if f"image {reference}" not in self.made:
                self._add(Sections(image_base(reference, instruction)), f"image {reference}", f"image-{len(self.made)}")
            return self.made[f"image {reference}"], ""
        if stage.number >= self._walking[-1].number:
            raise instruction.error(f"the stage {reference} does not come before this line", "move it up")
        return self._built(stage), SCRATCH if chain(self.stages, stage)[0].image == "scratch" else ""

    def _built(self, stage: Stage) -> Sections:
        """The stage, which is built once however often it is used."""
        if f"stage {stage.number}" not in self.made:
            self.walk(stage)
        return self.made[f"stage {stage.number}"]

    def _add(self, sections: Sections, key: str, name: str) -> None:
        taken = {FILES, *(made.name for made in self.made.values()), *({stage.name for stage in self.stages} - {name})}
        while name in taken:
            name += "-1"
        sections.name = name
        self.made[key] = sections
