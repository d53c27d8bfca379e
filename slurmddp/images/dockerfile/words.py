"""Docker's own small language of words: quotes, escapes and variables in ENV, ARG, FROM, COPY, WORKDIR and LABEL.

Follows BuildKit's frontend/dockerfile/shell. What a RUN or a CMD says is the shell's and does not come here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurmddp.images.dockerfile.lines import Instruction, split
from slurmddp.render.engine import quote


@dataclass(frozen=True)
class Reference:
    """A variable whose value only the build knows, as `${name}` or `${name<operator><word>}`."""

    name: str
    operator: str = ""
    word: str = ""


Parts = tuple["str | Reference", ...]
# What a name stands for: its value, None where it is known to be unset, or a Reference
Lookup = Callable[[str], "str | Reference | None"]

_LONGEST = 32 << 10
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[0-9@*#?!$-]")
_BRACED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-])(?P<operator>:?[-+?])?")


def pairs(instruction: Instruction) -> list[tuple[str, str]]:
    """The (name, raw value) of `A=1 B="2 3"`, or of the old form `A 1 2`. Raises UserError."""
    words = split(instruction.text, instruction.escape)
    if "=" not in words[0]:
        name, *rest = instruction.text.split(None, 1)
        if not rest:
            raise instruction.error(f"{instruction.keyword} {name} has no value", f"{instruction.keyword} {name}=VALUE")
        return [(name, rest[0])]
    found = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            todo = f'write NAME=VALUE, with "..." around a value that holds spaces: {instruction.keyword} A="b c"'
            raise instruction.error(f"{word!r} is not NAME=VALUE", todo)
        found.append((name, value))
    return found


def expand(text: str, lookup: Lookup, instruction: Instruction) -> Parts:
    """The raw text with its quotes taken away and its variables replaced, or referred to. Raises UserError."""
    return _Expansion(text, lookup, instruction).parts()


def known(text: str, lookup: Lookup, instruction: Instruction) -> str:
    """As `expand`, where the result must be known now. Raises UserError that names the variable."""
    parts = expand(text, lookup, instruction)
    for part in parts:
        if isinstance(part, Reference):
            raise instruction.error(
                f"${part.name} is set by no ARG or ENV before this line, so its value is the base image's, if any",
                f"write the value out, or set it: ARG {part.name}=VALUE",
            )
    return "".join(part for part in parts if isinstance(part, str))


def shell(text: str) -> str:
    """One word of the shell with exactly this text, in which Apptainer finds no build argument."""
    word = quote(text)
    return unbrace(word, word[0])


def shell_parts(parts: Parts) -> str:
    """One word of the shell; references are left to the shell."""
    if all(isinstance(part, str) for part in parts):
        return shell("".join(part for part in parts if isinstance(part, str)))
    word = "".join(_doubled(part) if isinstance(part, str) else _reference(part) for part in parts)
    return unbrace(f'"{word}"', '"')


def unbrace(text: str, mark: str) -> str:
    """Text that stands between two of the quotation mark `mark`, with each `{{` cut in two by an end and a begin."""
    return re.sub(r"\{(?=\{)", "{" + mark * 2, text)


def _reference(part: Reference) -> str:
    return f"${{{part.name}{part.operator}{_doubled(part.word, also='}')}}}"


def _doubled(text: str, also: str = "") -> str:
    """The text for the inside of double quotes."""
    return re.sub(rf'([\\"$`{also}])', r"\\\1", text)


class _Expansion:
    def __init__(self, text: str, lookup: Lookup, instruction: Instruction) -> None:
        self._text = text
        self._lookup = lookup
        self._instruction = instruction
        self._at = 0

    def parts(self) -> Parts:
        merged: list[str | Reference] = []
        length = 0
        for part in self._parts(""):
            length += len(part) if isinstance(part, str) else 0
            if length > _LONGEST:  # each line can double what the one before it has set
                todo = "variables of variables make it long: write it out"
                raise self._instruction.error(f"a value is longer than {_LONGEST >> 10} KiB", todo)
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        return tuple(merged)

    def _parts(self, end: str) -> Iterator[str | Reference]:
        """Parts up to a bare `end`, which is passed over."""
        escape = self._instruction.escape
        quoted = False
        while self._at < len(self._text):
            char = self._text[self._at]
            self._at += 1
            if char == end and not quoted:
                return
            if char == "'" and not quoted:
                yield self._until_quote()
            elif char == '"':
                quoted = not quoted
            elif char == escape:
                yield self._escaped(quoted)
            elif char == "$":
                yield self._variable()
            else:
                yield char
        if quoted or end:
            raise self._broken()

    def _until_quote(self) -> str:
        close = self._text.find("'", self._at)
        if close < 0:
            raise self._broken()
        text, self._at = self._text[self._at : close], close + 1
        return text

    def _escaped(self, quoted: bool) -> str:
        escape = self._instruction.escape
        if self._at == len(self._text):
            return escape
        char = self._text[self._at]
        self._at += 1
        return escape + char if quoted and char not in f'"${escape}' else char

    def _variable(self) -> str | Reference:
        rest = self._text[self._at :]
        if not rest.startswith("{"):
            match = _NAME.match(rest)
            if match:
                self._at += match.end()
                return self._value(match.group(), "", "")
            special = _SPECIAL.match(rest)
            self._at += 1 if special else 0
            return "" if special else "$"
        match = _BRACED.match(rest, 1)
        if not match:
            raise self._broken()
        self._at += match.end()
        operator = match.group("operator") or ""
        word = list(self._parts("}"))
        if any(isinstance(part, Reference) for part in word) or (word and not operator):
            raise self._instruction.error(
                f"the form ${rest[: rest.find('}') + 1]} is not converted", "write the value out"
            )
        return self._value(match.group("name"), operator, "".join(part for part in word if isinstance(part, str)))

    def _value(self, name: str, operator: str, word: str) -> str | Reference:
        value = self._lookup(name)
        if isinstance(value, Reference):
            return Reference(name, operator, word)
        there = value is not None and (value != "" or not operator.startswith(":"))
        if operator.endswith("-"):
            return value if there and value is not None else word
        if operator.endswith("+"):
            return word if there else ""
        if operator.endswith("?") and not there:
            raise self._instruction.error(f"${name} is not set: {word}", f"give it a value: ARG {name}=VALUE")
        return value or ""

    def _broken(self) -> Exception:
        return self._instruction.error(f"{self._text!r} has a quote or a brace that is not closed", "close it")
