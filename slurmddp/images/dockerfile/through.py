"""The way through spython: steps -> a plain Dockerfile -> spython's recipe -> the sections of a definition file.

spython decides what of an instruction belongs into which section, and in which order. It would mangle free text (see
spython_recipe.py), so what it reads are words without any meaning to it, such as `step-7`, whose texts are put back
into the sections afterwards. Where a word does not come back from where it must, nothing is converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from slurmddp.errors import ExternalError
from slurmddp.images.base import Base
from slurmddp.images.dockerfile.interpret import Step
from slurmddp.images.dockerfile.words import shell
from slurmddp.images.spython_recipe import Layer, parse_layers

# How often spython's recipe names a word: WORKDIR is mkdir, cd and the recipe's own; ENV is install and environ
_TIMES = {"path": 3, "value": 2, "step": 1, "file": 1, "label": 1}


@dataclass(frozen=True)
class Source:
    """A stage to be written: its name in the definition file, its base, its steps."""

    name: str
    base: Base
    steps: tuple[Step, ...]


@dataclass
class Section:
    """One stage for the template; everything as it stands in the definition file.

    files:      lines of %files.
    files_from: (stage, lines).
    post:       (comment or "", lines).
    """

    name: str
    base: Base
    files: list[str] = field(default_factory=list)
    files_from: list[tuple[str, list[str]]] = field(default_factory=list)
    post: list[tuple[str, list[str]]] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)


@dataclass
class _Words:
    """The words that stand for texts: of each its step, and its text."""

    steps: dict[str, Step] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def word(self, kind: str, step: Step, text: str = "") -> str:
        word = f"{kind}-{len(self.texts)}"
        self.steps[word], self.texts[word] = step, text
        return word


def sections(sources: Sequence[Source]) -> list[Section]:
    """The sections of each stage. Raises ExternalError where spython does not read what it was given."""
    words = _Words()
    lines: list[str] = []
    for number, source in enumerate(sources):
        lines.append(f"FROM base-{number} AS {source.name}")
        for step in source.steps:
            lines += _plain(step, words)
    layers = parse_layers(lines)
    expected = [(source.name, f"base-{number}") for number, source in enumerate(sources)]
    if [(layer.name, layer.base) for layer in layers] != expected:
        raise ExternalError("spython read other stages than the Dockerfile has: install another version of it")
    _check(layers, words)
    return [_section(source, layer, words) for source, layer in zip(sources, layers, strict=True)]


def _plain(step: Step, words: _Words) -> list[str]:
    """The step as instructions that spython reads right."""
    if step.kind == "run":
        return [f"RUN {words.word('step', step)}"]
    if step.kind == "env":
        return ["ENV " + " ".join(f"{name}={words.word('value', step, text)}" for name, text in step.values)]
    if step.kind == "workdir":
        return [f"WORKDIR {words.word('path', step, step.path)}"]
    if step.kind == "label":
        return [f"LABEL {words.word('label', step, f'{name} {text}'.strip())}" for name, text in step.values]
    option = f"--from={step.stage} " if step.stage else ""
    return [
        f"COPY {option}{words.word('file', step, source)} {words.word('file', step, destination)}"
        for source, destination in step.files
    ]


def _check(layers: Sequence[Layer], words: _Words) -> None:
    """Raise ExternalError unless each word is back, as often as it must be."""
    found: Counter[str] = Counter()
    for layer in layers:
        for text in (*layer.install, *layer.environ, *layer.labels, layer.workdir or ""):
            found[text.split(" ")[-1].rpartition("=")[2]] += 1
        for pair in (*layer.files, *(pair for _, files in layer.files_from for pair in files)):
            found.update(pair)
    for word in words.texts:
        times = _TIMES[word.partition("-")[0]]
        # Of several WORKDIRs the recipe keeps the last one
        if found[word] != times and not (times == 3 and found[word] == 2):
            raise ExternalError(
                "spython read a Dockerfile otherwise than it was written: install another version of it"
            )


def _section(source: Source, layer: Layer, words: _Words) -> Section:
    made = Section(source.name, source.base)
    made.files = [_transfer(pair, words) for pair in layer.files]
    made.files_from = [(stage, [_transfer(pair, words) for pair in files]) for stage, files in layer.files_from]
    made.labels = [words.texts[word] for word in layer.labels]
    # HOME and the folder are Apptainer's to set when the image runs
    made.environment = _exports([line for line in layer.environ if not line.startswith(("HOME=", "PWD="))], words)
    pending: list[str] = []
    last: Step | None = None
    for line in layer.install:
        word = line.split(" ")[-1].rpartition("=")[2]
        step = words.steps[word]
        if step.kind == "env":
            pending.append(line)
            if len(pending) < len(step.values):
                continue
            lines, pending = _exports(pending, words), []
        elif step.kind == "workdir":
            lines = [line.replace(word, shell(words.texts[word]))]
        else:
            lines = list(step.lines)
        if step is last:
            made.post[-1][1].extend(lines)
        else:
            made.post.append((f"line {step.line}: {step.keyword}" if step.line else "", lines))
        last = step
    return made


def _exports(entries: Sequence[str], words: _Words) -> list[str]:
    """`export A=1 B=2`, one line for each ENV."""
    lines: list[tuple[Step, list[str]]] = []
    for entry in entries:
        name, _, word = entry.partition("=")
        step = words.steps[word]
        if not lines or lines[-1][0] is not step:
            lines.append((step, []))
        lines[-1][1].append(f"{name}={words.texts[word]}")
    return ["export " + " ".join(found) for _, found in lines]


def _transfer(pair: tuple[str, str], words: _Words) -> str:
    return " ".join(f'"{text}"' if " " in text else text for text in (words.texts[word] for word in pair))
