"""Cuts a Dockerfile into instructions as Docker does, and keeps the line that each one begins at.

Follows BuildKit's frontend/dockerfile/parser: directives, comments inside an instruction, continuation lines.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.errors import UserError, collecting


class Undecided(UserError):
    """What cannot be converted without the base's configuration."""


class Refused(UserError):
    """Several refusals of one Dockerfile, in the order of its lines."""

    def __init__(self, problems: list[UserError]) -> None:
        super().__init__(f"{len(problems)} problems", where=problems[0].where, todo=problems[0].todo)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join([*map(str, self.problems), f"{len(self.problems)} problems: nothing was converted"])


class Problems:
    """The UserErrors of a Dockerfile, so that a user sees all of them at once."""

    def __init__(self, found: Iterable[UserError] = ()) -> None:
        self.found = list(found)

    def check(self) -> UserError | None:
        """Raise what was found: the error itself, or one that holds all of them by line.

        Return it where the base's configuration would decide.
        """
        by_text = {str(error): error for error in self.found}  # a stage that several others start from is walked again
        errors = sorted(by_text.values(), key=_line)
        if not errors:
            return None
        error = errors[0] if len(errors) == 1 else Refused(errors)
        if all(isinstance(one, Undecided) for one in errors):
            return error
        raise error


def _line(error: UserError) -> int:
    number = (error.where or "").rpartition(":")[2]
    return int(number) if number.isdigit() else 0


_KEYWORDS = re.compile(
    "ADD|ARG|CMD|COPY|ENTRYPOINT|ENV|EXPOSE|FROM|HEALTHCHECK|LABEL|MAINTAINER|ONBUILD|RUN|SHELL|STOPSIGNAL|USER|"
    "VOLUME|WORKDIR"
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")

_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_IDLE = re.compile(r"\s*(#|$)")
_HEREDOC = re.compile(r"\d*<<(?P<dash>-?)(?P<word>[^<]+)")
_DELIMITER = re.compile(r"(?P<mark>['\"]?)(?P<name>[^'\"\\$]+)(?P=mark)")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(\S*))?(?:\s+|$)")


@dataclass(frozen=True)
class Heredoc:
    """The text between a `<<NAME` of an instruction and its end."""

    word: str  # what stands in the instruction, such as `<<EOF`
    name: str
    text: str  # as it stands in the file, each line with its break
    expand: bool  # whether NAME has no quotes, so that variables of the text are replaced
    content: str  # the text without the tabs at the begin of lines that `<<-NAME` takes away


@dataclass(frozen=True)
class Instruction:
    keyword: str  # in upper case
    text: str  # what follows it and its options, on one line, as Docker joins it
    pieces: tuple[str, ...]  # the same text, cut where the file has its line breaks
    line: int
    file: str
    flags: tuple[tuple[str, str], ...] = ()  # the options before the text, (name, value or "")
    escape: str = "\\"  # the character that continues a line and takes a meaning away
    heredocs: tuple[Heredoc, ...] = ()  # the texts behind it

    @property
    def where(self) -> str:
        """`Dockerfile:12`, for messages."""
        return f"{self.file}:{self.line}"

    def error(self, what: str, todo: str) -> UserError:
        """The error that this instruction cannot be converted."""
        return UserError(what, where=self.where, todo=todo)

    def array(self) -> list[str] | None:
        """The text as a JSON array of strings, Docker's exec form; None where it is none.

        Raises UserError for what no line of a definition file can hold.
        """
        try:
            words = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(words, list) or not all(isinstance(item, str) for item in words):
            return None
        for item in words:
            if not item.replace("\t", " ").isprintable():
                todo = "put these commands into a script, COPY it and run that"
                raise self.error(f"{item!r} contains a line break or a control character", todo)
        return words


#: Characters of a Dockerfile, and of one instruction: it has to fit into a section of a definition file, which has
#: 64 KiB at most (definition.py).
_LONGEST_FILE, _LONGEST = 256 << 10, 32 << 10
#: Instructions: a stage that starts from another repeats all of its instructions, so work grows with their square.
_MOST = 1000


def read(path: Path, problems: Problems) -> tuple[Instruction, ...]:
    """The instructions of the Dockerfile at `path`. Raises UserError where it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(_LONGEST_FILE + 1)
    except OSError as error:
        raise UserError(f"the Dockerfile {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"the Dockerfile {path} is not UTF-8 text") from None
    if len(text) > _LONGEST_FILE:
        todo = "is this a Dockerfile? Put long texts into files beside it, and COPY them"
        raise UserError(f"the Dockerfile is longer than {_LONGEST_FILE >> 10} KiB", where=str(path), todo=todo)
    return parse(text, str(path), problems)


def parse(text: str, file: str, problems: Problems) -> tuple[Instruction, ...]:
    """The instructions of a Dockerfile's text that can be read; `file` stands in messages. Raises UserError."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    for number, line in enumerate(lines, 1):
        if _CONTROL.search(line):
            todo = "write the line in plain text"
            raise UserError("the line contains a control character", where=f"{file}:{number}", todo=todo)
    escape = _escape(lines, file)
    todo = "put commands into a script beside the Dockerfile, COPY it, and RUN it"
    instructions: list[Instruction] = []
    position = 0
    while position < len(lines):
        if _IDLE.match(lines[position]):
            position += 1
            continue
        start, where = position + 1, f"{file}:{position + 1}"
        pieces, position = _join(lines, position, escape)
        if sum(map(len, pieces)) > _LONGEST:
            message = f"the instruction is longer than {_LONGEST >> 10} KiB, which a definition file does not hold"
            raise UserError(message, where=where, todo=todo)
        if len(instructions) == _MOST:
            raise UserError(f"the Dockerfile has more than {_MOST} instructions", where=where, todo=todo)
        with collecting(problems.found):
            read = _instruction(pieces, start, file, escape)
            heredocs, position = _heredocs(read, lines, position, problems)
            instructions.append(replace(read, heredocs=heredocs))
    if not instructions and not problems.found:
        raise UserError("the Dockerfile is empty", where=file, todo="it begins with FROM")
    return tuple(instructions)


def split(text: str, escape: str = "\\") -> list[str]:
    """The words of `text`, cut at white space outside of quotes; quotes and escapes stay in them."""
    escaped = rf"{re.escape(escape)}."
    return re.findall(rf"""(?s:{escaped}|'[^']*'?|"(?:{escaped}|[^"])*"?|\S)+""", text)


def _escape(lines: list[str], file: str) -> str:
    """The escape character that a directive at the head names."""
    escape = "\\"
    for number, line in enumerate(lines, 1):
        match = _DIRECTIVE.fullmatch(line.strip())
        if not match:
            break
        name, value, where = match.group(1).lower(), match.group(2), f"{file}:{number}"
        if name == "escape":
            if value not in ("\\", "`"):
                raise UserError(f"the escape character cannot be {value!r}", where=where, todo="\\ or `")
            escape = value
        elif name == "syntax" and not re.match(r"(docker\.io/)?docker/dockerfile(-upstream)?([:@]|$)", value):
            todo = "write it in Docker's own syntax and remove the line"
            raise UserError(f"this Dockerfile is written for another frontend, {value}", where=where, todo=todo)
        elif name not in ("syntax", "check"):
            break
    return escape


def _join(lines: list[str], position: int, escape: str) -> tuple[list[str], int]:
    """The pieces of the instruction at `position`, and the line after it."""
    mark = re.escape(escape)
    continued = re.compile(rf"(?P<kept>|.*[^{mark}]){mark}[ \t]*")
    pieces: list[str] = []
    while position < len(lines):
        line = lines[position]
        position += 1
        if pieces and _IDLE.match(line):
            continue
        match = continued.fullmatch(line)
        pieces.append(match.group("kept") if match else line)
        if not match:
            break
    return pieces, position


def _instruction(pieces: list[str], line: int, file: str, escape: str) -> Instruction:
    words = "".join(pieces).split(None, 1)
    keyword = words[0].upper() if words else ""
    bare = Instruction(keyword, "", (), line, file, (), escape)
    if not _KEYWORDS.fullmatch(keyword):
        message = f"{words[0] if words else escape!r} is not a Dockerfile instruction"
        raise bare.error(message, "see Docker's reference of Dockerfiles")
    text = words[1].strip() if len(words) > 1 else ""
    flags: list[tuple[str, str]] = []
    while match := _FLAG.match(text):
        flags.append((match.group(1), match.group(2) or ""))
        text = text[match.end() :]
    if not text:
        raise bare.error(f"{keyword} has no arguments", "add them, or remove the line")
    return replace(bare, text=text, pieces=_tail(pieces, text), flags=tuple(flags))


def trigger(instruction: Instruction) -> Instruction:
    """Return what an ONBUILD says, for a stage that starts from its own. Raises UserError."""
    triggered = _instruction(list(instruction.pieces), instruction.line, instruction.file, instruction.escape)
    if triggered.keyword in ("FROM", "ONBUILD", "MAINTAINER"):
        raise instruction.error(f"ONBUILD cannot contain {triggered.keyword}", "move it into the stage that needs it")
    return triggered


def _heredocs(
    instruction: Instruction, lines: list[str], position: int, problems: Problems
) -> tuple[tuple[Heredoc, ...], int]:
    """The heredocs that begin at line `position`, and the line after them. Raises UserError."""
    heredocs: list[Heredoc] = []
    if instruction.keyword not in ("RUN", "COPY", "ADD") or instruction.array() is not None:
        return (), position
    for word in split(instruction.text, instruction.escape):
        match = _HEREDOC.fullmatch(word)
        if not match:
            continue
        delimiter = _DELIMITER.fullmatch(match.group("word"))
        if not delimiter or word in [heredoc.word for heredoc in heredocs]:
            raise instruction.error(f"cannot read {word}", "write <<NAME, with a different name for each")
        name, dash = delimiter.group("name"), bool(match.group("dash"))
        begin = position
        while position < len(lines) and (lines[position].lstrip("\t") if dash else lines[position]) != name:
            position += 1
        if position == len(lines):
            todo = f"end it with a line that is just {name}"
            problems.found.append(instruction.error(f"the heredoc {word} has no end", todo))
        text = "".join(f"{line}\n" for line in lines[begin:position])
        content = re.sub(r"(?m)^\t+", "", text) if dash else text
        heredocs.append(Heredoc(word, name, text, not delimiter.group("mark"), content))
        position += 1
    return tuple(heredocs), position


def _tail(pieces: list[str], text: str) -> tuple[str, ...]:
    """The last pieces, which make up `text`."""
    skip = len("".join(pieces).rstrip()) - len(text)
    kept: list[str] = []
    for piece in pieces:
        kept.append(piece[skip:])
        skip = max(0, skip - len(piece))
    kept = [piece for piece in kept if piece.strip()] or [text]
    kept[-1] = kept[-1].rstrip()
    return tuple(kept) if "".join(kept) == text else (text,)
