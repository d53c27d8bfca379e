"""Docker's own small language of words: quotes, escapes and variables in ENV, ARG, FROM, COPY, WORKDIR and LABEL.

Follows BuildKit's frontend/dockerfile/shell. What a RUN or a CMD says is the shell's and does not come here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from slurmddp.images.dockerfile.lines import Instruction, Undecided, split
from slurmddp.render.engine import quote


def for_shell(pattern: str) -> str:
    """The pattern as a shell has it behind `#` or `%`. Raises ValueError for one that Docker refuses."""
    plain = re.compile(r"[\w./:,=+@-]")
    return "".join(token if token in "*?" or plain.fullmatch(token) else "\\" + token[-1] for token in _tokens(pattern))


def _tokens(pattern: str) -> list[str]:
    tokens = re.findall(r"(?s)\\.?|.", pattern)
    if any(token[0] == "\\" and token not in ("\\*", "\\?", "\\\\", "\\}", "\\/") for token in tokens):
        raise ValueError(pattern)
    return tokens


#: Places and lengths that Python's expressions may try; one more star multiplies them by the value's length.
_MOST_TRIES = 10_000_000


def substitute(value: str, operator: str, pattern: str, text: str) -> str:
    """The value without its begin (#) or end (%) that matches, or with a text in its place (/).

    A doubled operator takes the longest match, or all of them. Raises ValueError for a pattern that Docker refuses,
    and for one that would take long.
    """
    tokens = _tokens(pattern)
    if operator == "//" and set(tokens) <= {"*"}:  # Go and Python count the empty matches differently
        raise ValueError(pattern)
    if len(value) ** (tokens.count("*") + (operator[0] == "/")) > _MOST_TRIES:
        raise ValueError(pattern)
    star = ".*" if operator in ("##", "%%", "/", "//") else ".*?"
    if operator[0] == "%":  # the shortest end is the shortest begin of the value read backwards
        tokens.reverse()
    expression = "".join({"*": star, "?": "."}.get(token, re.escape(token[-1])) for token in tokens)
    if operator[0] == "/":
        return re.sub(expression, lambda _: text, value, count=0 if operator == "//" else 1)
    whole = value[::-1] if operator[0] == "%" else value
    match = re.match(expression, whole)
    rest = whole[match.end() :] if match else whole
    return rest[::-1] if operator[0] == "%" else rest


@dataclass(frozen=True)
class Reference:
    """A variable whose value only the build knows: `${name<operator><word>}`; a pattern belongs to the operator."""

    name: str
    operator: str = ""
    word: Parts = ()


Parts = tuple["str | Reference", ...]
# What a name stands for: its value, None where it is known to be unset, or a Reference
Lookup = Callable[[str], "str | Reference | None"]

_LONGEST, _DEEPEST = 32 << 10, 20
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SPECIAL = re.compile(r"[0-9@*#?!$-]")
_BRACED = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*|[0-9@*#?!$-])(?P<operator>:?[-+?]|##?|%%?|//?)?")


def pairs(instruction: Instruction) -> list[tuple[str, str]]:
    """The (name, raw value) of `A=1 B="2 3"`, or of the old form `A 1 2`. Raises UserError."""
    words = split(instruction.text, instruction.escape)
    if "=" not in words[0]:
        name, *rest = instruction.text.split(None, 1)
        if not rest:
            raise instruction.error(f"{instruction.keyword} {name} has no value", f"{instruction.keyword} {name}=VALUE")
        return [(name, rest[0])]
    values = []
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            todo = f'write NAME=VALUE, with "..." around a value that holds spaces: {instruction.keyword} A="b c"'
            raise instruction.error(f"{word!r} is not NAME=VALUE", todo)
        values.append((name, value))
    return values


def expand(text: str, lookup: Lookup, instruction: Instruction, quotes: bool = True) -> Parts:
    """The raw text with its quotes taken away and its variables replaced, or referred to. Raises UserError.

    quotes: False for the text of a heredoc, in which quotes are characters like others.
    """
    return _Expansion(text, lookup, instruction, quotes).parts()


def known(text: str, lookup: Lookup, instruction: Instruction) -> str:
    """Expand a word whose result must be known now, like `expand`. Raises UserError that names the variable."""
    parts = expand(text, lookup, instruction)
    for part in parts:
        if isinstance(part, Reference):
            message = f"${part.name} is set by no ARG or ENV before this line, so only the base image can set it"
            raise undecided(message, part.name, instruction)
    return "".join(map(str, parts))


def undecided(what: str, name: str, instruction: Instruction) -> Undecided:
    """The error that only the base's configuration says what `name` is."""
    todo = f"set it: ARG {name}=VALUE (a build asks the base's registry for it, a dry run does not)"
    return Undecided(what, where=instruction.where, todo=todo)


def plain(parts: Parts) -> str | None:
    """The text, or None where only the build knows all of it."""
    return None if any(isinstance(part, Reference) for part in parts) else "".join(map(str, parts))


def shell(text: str) -> str:
    """One word of the shell with exactly this text, in which Apptainer finds no build argument."""
    word = quote(text)
    return unbrace(word, word[0])


def shell_parts(parts: Parts) -> str:
    """One word of the shell; references are left to the shell."""
    text = plain(parts)
    return shell(text) if text is not None else unbrace(f'"{_doubled(parts)}"', '"')


def unbrace(text: str, mark: str) -> str:
    """Text that stands between two of the quotation mark `mark`, with each `{{` cut in two by an end and a begin."""
    return re.sub(r"\{(?=\{)", "{" + mark * 2, text)


def script(parts: Parts) -> str:
    """Expand lines of a heredoc, like `shell_parts`: two quotes precede what would open a section or a stage."""
    word = shell_parts(parts)
    return re.sub(r"\n(?=\s*%|bootstrap:)", "\n" + word[0] * 2, word, flags=re.IGNORECASE)


def _doubled(parts: Parts, also: str = "") -> str:
    """The parts for the inside of double quotes."""
    return "".join(
        f"${{{part.name}{part.operator}{_doubled(part.word, '}')}}}"
        if isinstance(part, Reference)
        else re.sub(rf'([\\"$`{also}])', r"\\\1", part)
        for part in parts
    )


@dataclass
class _Expansion:
    text: str
    lookup: Lookup
    instruction: Instruction
    quotes: bool
    at: int = 0
    depth: int = 0

    def parts(self, end: str = "", raw: bool = False) -> Parts:
        """Parts up to a bare `end`, which is passed over. raw: escapes stay, for a pattern."""
        merged: list[str | Reference] = []
        length = 0
        for part in self._parts(end, raw):
            length += len(part) if isinstance(part, str) else 0
            if length > _LONGEST:  # each line can double what the one before it has set
                todo = "nested variables make it long: write the value itself"
                raise self.instruction.error(f"a value is longer than {_LONGEST >> 10} KiB", todo)
            if isinstance(part, str) and merged and isinstance(merged[-1], str):
                merged[-1] += part
            elif part != "":
                merged.append(part)
        return tuple(merged)

    def _parts(self, end: str, raw: bool) -> Iterator[str | Reference]:
        escape = self.instruction.escape if self.quotes else "\\"
        quoted = False
        while self.at < len(self.text):
            char = self.text[self.at]
            self.at += 1
            if char == end and not quoted:
                return
            if char == "'" and not quoted and self.quotes:
                text, closed, _ = self.text[self.at :].partition("'")
                if not closed:
                    raise self._broken()
                self.at += len(text) + 1
                yield text
            elif char == '"' and self.quotes:
                quoted = not quoted
            elif char == escape:
                yield self._escaped(escape, quoted, raw)
            elif char == "$":
                yield from self._variable()
            else:
                yield char
        if quoted or end:
            raise self._broken()

    def _escaped(self, escape: str, quoted: bool, raw: bool) -> str:
        if self.at == len(self.text):
            return escape
        char = self.text[self.at]
        self.at += 1
        return escape + char if raw or (quoted and char not in f'"${escape}') else char

    def _variable(self) -> Parts:
        rest = self.text[self.at :]
        if not rest.startswith("{"):
            match = NAME.match(rest)
            if match:
                self.at += match.end()
                return self._value(match.group(), "", ())
            special = _SPECIAL.match(rest)
            self.at += 1 if special else 0
            return () if special else ("$",)
        match = _BRACED.match(rest, 1)
        self.depth += 1
        if not match or self.depth > _DEEPEST:
            raise self._broken()
        self.at += match.end()
        name, operator = match.group("name"), match.group("operator") or ""
        if operator[:1] in ("#", "%", "/"):
            parts: Parts = (self._replaced(name, operator),)
        else:
            word = self.parts("}")
            if word and not operator:
                raise self._broken()
            parts = self._value(name, operator, word)
        self.depth -= 1
        return parts

    def _value(self, name: str, operator: str, word: Parts) -> Parts:
        value = self.lookup(name)
        if isinstance(value, Reference):
            return (Reference(name, operator, word),)
        there = value is not None and (value != "" or not operator.startswith(":"))
        if operator.endswith("+"):
            return word if there else ()
        if operator.endswith("-") and not there:
            return word
        if operator.endswith("?") and not there:
            raise self.instruction.error(f"${name} is not set: {plain(word)}", f"give it a value: ARG {name}=VALUE")
        return (value or "",)

    def _replaced(self, name: str, operator: str) -> str | Reference:
        """The value of `${name#pattern}` and the like."""
        words = [self.parts("/" if operator[0] == "/" else "}", raw=True)]
        if operator[0] == "/":
            words.append(self.parts("}", raw=True))
        value, (pattern, *new) = self.lookup(name), map(plain, words)
        try:
            if pattern is None or (operator[0] == "/" and re.search(r"[\\$]|^None$", str(new[0]))):
                raise ValueError
            if not isinstance(value, Reference):
                return substitute(value or "", operator, pattern, "".join(map(str, new)))
            if operator[0] != "/":
                return Reference(name, operator + for_shell(pattern))
            message = f"${{{name}{operator}...}} is not converted: only the base image knows its value"
            raise undecided(message, name, self.instruction)
        except ValueError:
            message = f"the pattern of ${{{name}{operator}...}} is not converted"
            raise self.instruction.error(message, "write the value") from None

    def _broken(self) -> Exception:
        return self.instruction.error(f"{self.text!r} has an unclosed quote or brace", "close it")
