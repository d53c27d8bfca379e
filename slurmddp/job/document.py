"""A strict YAML reader: text in, a tree of plain values and the location of each value out.

A plain (unquoted) scalar stays text, as `Plain`; the model's type decides what it means. So `24:00:00` is
never 86400, `no` is False only where a bool is wanted, and `account: 0123` keeps its zero.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import UserError, together
from slurmddp.shared.files import open_plain
from slurmddp.shared.run_folder import RunFolder

#: No honest job file or profile comes near; a data file given by mistake is refused before it is parsed.
MAX_BYTES = 1_000_000
MAX_DEPTH = 32
#: Longer ones are no numbers that anybody counts with (and beyond 4300 digits Python refuses to read them).
MAX_DIGITS = 100

Key = tuple[str, ...]

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_CORE_TAGS = {
    "Scalar": frozenset({"tag:yaml.org,2002:str", "!"}),
    "MappingStart": frozenset({"tag:yaml.org,2002:map", "!"}),
    "SequenceStart": frozenset({"tag:yaml.org,2002:seq", "!"}),
}


#: Syntax errors that are looked for in one file.
_MOST_SYNTAX_ERRORS = 20
_LINE_END = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
#: A key in the first column: where the next section begins after a syntax error.
_SECTION = re.compile(r"([A-Za-z_][\w-]*)\s*:")
#: Stands for the run folder, as the job sees it.
RUN = "{run}"


class Plain(str):
    """A scalar written without quotes: its type is not decided yet."""


class Word(Plain):
    """A plain value of the command line or of a variable, where quotes would be part of it."""


class Origin(NamedTuple):
    """Where a value came from: the layer's name, and the file and line or option that holds it.

    implied: a map that exists only because an option set a key below it; the option says nothing about its other keys.
    """

    layer: str
    where: str
    implied: bool = False

    def of(self, key: str) -> str:
        """Return `FILE:LINE: KEY` for a message about `key`; an option that names the key stands alone."""
        return self.where if self.where in (key, f"--set {key}") else f"{self.where}: {key}"


class Document(NamedTuple):
    """A tree of dict, list, str, Plain and None, and the origin of every node in it, by key path."""

    tree: dict[str, Any]
    origins: dict[Key, Origin]


class WrongValue(UserError):
    """A mistake in one value, or in the section that a key of the first column begins."""

    def __init__(self, what: str, key: Key, *, where: str | None = None, todo: str | None = None) -> None:
        super().__init__(what, where=where, todo=todo)
        self.key = key


class WrongYaml(UserError):
    """Mistakes in a file's YAML, each of them in `parts`. document: the file without the sections that have one."""

    def __init__(self, parts: Sequence[UserError], document: Document) -> None:
        super().__init__(str(together(parts)))
        self.parts = parts
        self.document = document


def typed(value: Any) -> Any:
    """The value of a free field (a task's own options): plain scalars by YAML 1.2's core rules, 3e-4 a float."""
    if isinstance(value, dict):
        return {str(key): typed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [typed(item) for item in value]
    if not isinstance(value, Plain):
        return value
    text = str(value)
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INT.fullmatch(text) and len(text) <= MAX_DIGITS:
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def is_null(text: str) -> bool:
    """Return whether a plain scalar stands for no value."""
    return text in _NULLS


def read_file(path: Path, layer: str, shown: str | None = None, below: Path | None = None) -> Document:
    """Read one YAML file. below: the run folder that holds it, if any (`slurmddp.shared.files.open_plain`).

    Raises UserError for all that is not a UTF-8 mapping of at most 1 MB.
    """
    name = shown or str(path)
    if below is None and RunFolder(path.parent).exists:
        below = path.parent
    return read_text(text_of(path, name, below), layer, name)


def text_of(path: Path, name: str, below: Path | None = None) -> str:
    """The text of a YAML file, line ends as they are; `name` stands for it in messages. Raises UserError."""
    try:
        with open_plain(path, below) if below else open(path, "rb") as handle:
            data = handle.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError("no such file", where=name, todo=f"slurmddp init {name} writes one") from None
    except IsADirectoryError:
        raise UserError("is a directory, not a job file", where=name, todo="give the YAML file in it") from None
    except (OSError, ValueError) as error:
        raise UserError(f"cannot be read: {getattr(error, 'strerror', error)}", where=repr(name)[1:-1]) from None
    if len(data) > MAX_BYTES:
        todo = "check that it is a job file"
        raise UserError(f"is larger than {MAX_BYTES // 1000} kB, the limit for a job file", where=name, todo=todo)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        todo = "save it as UTF-8"
        raise UserError(f"is not UTF-8 (byte 0x{data[error.start]:02x})", where=f"{name}:{line}", todo=todo) from None


def read_text(text: str, layer: str, name: str) -> Document:
    """Parse YAML text; `name` stands for the file in messages and origins.

    Raises WrongYaml for all its mistakes: after a syntax error, it goes on at the next key of the first column.
    """
    lines, wrong = _LINE_END.split(text), list[UserError]()
    for _ in range(_MOST_SYNTAX_ERRORS):
        reader = _Reader(layer, name, "\n".join(lines) if wrong else text)
        tree = reader.document()
        if reader.error is None:
            break
        wrong.append(_syntax_error(reader.error, name, lines))
    wrong += reader.wrong
    document = Document(tree if isinstance(tree, dict) and reader.error is None else {}, reader.origins)
    if wrong:
        raise WrongYaml(wrong, document)
    if tree is None:
        raise UserError("is empty", where=name, todo="`slurmddp init FILE` writes a commented job file")
    if not isinstance(tree, dict):
        todo = "`slurmddp init FILE` writes a valid one"
        raise UserError("is not a mapping of keys to values", where=name, todo=todo)
    return document


def _syntax_error(error: Any, name: str, lines: list[str]) -> UserError:
    """Return the message of a syntax error, and empty the lines of the section that has it."""
    mark, context = getattr(error, "problem_mark", None), str(getattr(error, "context", None) or "")
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    if mark is None:
        lines[:] = [""] * len(lines)
        return WrongValue(f"is not valid YAML: {problem}", (), where=name)
    line = min(mark.line, len(lines) - 1)
    # A quote or a bracket that nothing closes is found at the end of the file: the mistake is where it begins.
    opened = getattr(error, "context_mark", None) if "block" not in context else None
    begins = _section(lines, min(line, line if opened is None else opened.line))
    ends = next((at for at in range(begins + 1, len(lines)) if _SECTION.match(lines[at])), len(lines))
    match = _SECTION.match(lines[begins])
    where, key = f"{name}:{line + 1}", (match[1],) if match else ()
    tab = "\t" in lines[line]
    since = "" if opened is None or opened.line == line else f", in what begins in line {opened.line + 1}"
    lines[begins:ends] = [""] * (ends - begins)
    if tab:
        todo = "replace each tab by spaces, as your editor indents"
        return WrongValue("a tab is not allowed in YAML", key, where=where, todo=todo)
    return WrongValue(f"is not valid YAML: {problem}{since}", key, where=where)


def _section(lines: Sequence[str], line: int) -> int:
    """Return the line in which the section of a line begins."""
    return next((at for at in range(line, -1, -1) if _SECTION.match(lines[at])), 0)


def read_value(text: str, layer: str, where: str) -> Any:
    """The value of `--set KEY=VALUE`: [..] and {..} are YAML, all else is taken as it stands, {run}/out too."""
    if text[:1] in ("[", "{") and not text.startswith(RUN):
        tree = read_text("value: " + text, layer, where).tree
        if len(tree) > 1:
            raise UserError(f"{text!r} is more than one value", where=where)
        return tree["value"]
    return None if is_null(text) else Word(text)


def read_data(data: Mapping[Any, Any], layer: str, where: str) -> Document:
    """Read what a YAML file would hold; `where` stands for it in messages. Raises UserError."""
    document = read_text(as_text(data, where), layer, where)
    return Document(document.tree, dict.fromkeys(document.origins, Origin(layer, where)))


def as_text(value: Any, where: str) -> str:
    """Return a value as `--set` reads it: a text or path as it is, all else as JSON. Raises UserError."""
    if isinstance(value, str | os.PathLike):
        return os.fspath(value)
    try:
        return json.dumps(value, default=os.fspath, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"cannot be written as YAML: {error}", where=where) from None


class _Reader:
    """Turns the parser's events into values, and keeps the origin of each value.

    error: the syntax error, at which the events end. wrong: what YAML allows and a job file does not.
    """

    def __init__(self, layer: str, name: str, text: str) -> None:
        self.layer = layer
        self.name = name
        self.events = self.parsed(text)
        self.origins: dict[Key, Origin] = {}
        self.error: Exception | None = None
        self.wrong: list[UserError] = []

    def parsed(self, text: str) -> Iterator[Any]:
        """The events of the parser; `compose` would recurse in C, and a deep enough file would end the process."""
        import yaml

        try:
            yield from yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError as error:
            self.error = error

    def document(self) -> Any:
        """The value of the only document; None if there is none, or nothing in it."""
        value, documents = None, 0
        for event in self.events:
            kind = _kind(event)
            if kind == "DocumentStart":
                documents += 1
                if documents > 1:
                    self.refuse("contains a second YAML document (---)", event, (), "remove one")
                    break
            elif kind not in ("StreamStart", "StreamEnd", "DocumentEnd"):
                value = self.value(event, ())
        return value

    def location(self, event: Any) -> str:
        return f"{self.name}:{event.start_mark.line + 1}"

    def refuse(self, what: str, event: Any, key: Key, todo: str | None = None) -> None:
        self.wrong.append(WrongValue(what, key, where=self.location(event), todo=todo))

    def check(self, event: Any, key: Key) -> str:
        """The kind of a key or value, which has neither alias nor foreign tag, or is refused."""
        kind = _kind(event)
        if kind == "Alias":
            self.refuse("contains a YAML alias (*name)", event, key, "write the value out")
        elif event.tag is not None and event.tag not in _CORE_TAGS[kind]:
            self.refuse(f"contains a YAML tag ({event.tag})", event, key, "write the plain value")
        return kind

    def value(self, event: Any, key: Key) -> Any:
        kind, location = self.check(event, key), self.location(event)
        if len(key) > MAX_DEPTH:
            raise UserError(f"is nested deeper than {MAX_DEPTH} levels", where=location)
        self.origins[key] = Origin(self.layer, location)
        if kind == "MappingStart":
            return self.mapping(key)
        if kind == "SequenceStart":
            return self.sequence(key)
        if kind == "Alias":
            return None
        text: str = event.value
        # Quoted or a block has a style (the C parser gives '' for a plain scalar, the Python one None).
        if event.style or event.tag is not None:
            return text
        return None if is_null(text) else Plain(text)

    def sequence(self, key: Key) -> list[Any]:
        result: list[Any] = []
        for event in self.events:
            if _kind(event) == "SequenceEnd":
                break
            result.append(self.value(event, (*key, str(len(result)))))
        return result

    def mapping(self, key: Key) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for event in self.events:
            if _kind(event) == "MappingEnd":
                break
            path = self.key(event, key, result)
            value = next(self.events, None)
            if value is None:
                break
            if path is None:
                self.value(value, (*key, ""))
                continue
            result[path[-1]] = self.value(value, path)
            self.origins[path] = Origin(self.layer, self.location(event))
        return result

    def key(self, event: Any, above: Key, siblings: Mapping[str, Any]) -> Key | None:
        """The path of a key; None if it is refused."""
        kind = self.check(event, above)
        if kind != "Scalar":
            if kind != "Alias":
                self.refuse("has a key that is not text", event, above)
                self.value(event, (*above, ""))
            return None
        name: str = event.value
        if name == "<<" and not event.style:  # in quotes it is a key as any other
            self.refuse("contains a YAML merge key (<<)", event, above, "write the keys out")
            return None
        path = (*above, name)
        if name in siblings:
            first = self.origins[path].where.rsplit(":", 1)[-1]
            message = f"key {json.dumps(name)} is given twice (first in line {first})"
            self.refuse(message, event, path, "remove one")
            return None
        return path


def _kind(event: Any) -> str:
    return type(event).__name__.removesuffix("Event")
