"""Split bash into simple commands: continuations joined, quotes and substitutions kept, here-documents apart.

It reads what batch scripts contain. It is no full parser: it never fails, and bash itself judges the syntax."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

_TOKEN = re.compile(
    r"(?P<skipped>[ \t\r]+|\\\n|#[^\n]*)|(?P<redirect>(?![<>]\()(?:\d*(?:<<<|<<-?|<>|>>|>\||[<>]&|[<>])|&>>?))[ \t]*"
    r"|&&|\|\||\|&|;;&?|;&|[;|&()\n]"
)
_TEST = re.compile(r"\[\[\s.*?(?<=\s)\]\](?=[\s;&|)]|\Z)", re.DOTALL)
_EMPTY_BRACKETS = re.compile(r"\s*\)")
_LOOP_VARIABLE = re.compile(r"(?:\(\(\s*)?([A-Za-z_]\w*)")
_CLOSES = {"(": ")", "{": "}"}
_PLAIN = re.compile(r"[^\\'\"`<>$=(){} \t\n;|&]+")
_DEEPEST = 100  # blocks in blocks
_STARTS = {"then", "do", "else", "elif", "!", "{", "}", "time", "coproc"}
_BEFORE_EXPRESSION = _STARTS | {"if", "while", "until", "for"}
_BLOCKS = {"if": "branch", "case": "branch", "for": "loop", "select": "loop", "while": "loop", "until": "loop"}


class HereDocument(NamedTuple):
    """The text that a command reads, and the line it starts at."""

    text: str
    line: int


@dataclass
class Command:
    """One simple command, with its words as written."""

    words: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    background: bool = False  # an & stands behind it
    loops: tuple[str, ...] = ()  # variables of the loops around it; "" for while and until
    branch: bool = False  # inside if or case, or behind || or a test and &&
    function: str = ""
    output: str = ""
    here: HereDocument | None = None

    @property
    def line(self) -> int:
        """Return the line of the first word."""
        return self.lines[0] if self.lines else 0

    @property
    def last(self) -> int:
        """Return the line of its end."""
        return self.lines[-1] + self.words[-1].count("\n") if self.lines else 0


def closing(text: str, at: int, end: str) -> int:
    """Return the index behind the `end` that closes what was opened before `at`. end: one of ) } " and a backtick."""
    ends = [end]
    while at < len(text) and ends:
        mark, inside = text[at], ends[-1]
        at += 1
        if mark == "\\":
            at += 1
        elif mark == inside:
            ends.pop()
        elif inside == "`":
            continue
        elif mark == "$" and text[at : at + 1] in ("(", "{"):
            ends.append(_CLOSES[text[at]])
            at += 1
        elif mark == "`" or (mark == '"' and inside != '"'):
            ends.append(mark)
        elif inside == '"':
            continue
        elif mark == "'":
            at = quoted(text, at - 1)
        elif _CLOSES.get(mark) == inside:
            ends.append(inside)
    return min(at, len(text))


def quoted(text: str, at: int) -> int:
    """Return the index behind the quotes, backticks or escaped character that start at `at`."""
    mark = text[at]
    if mark == "\\":
        return at + 2
    if mark == "'":
        found = text.find("'", at + 1)
        return found + 1 if found >= 0 else len(text)
    return closing(text, at + 1, mark)


def word_end(text: str, at: int) -> int:
    """Return the index behind the word that starts at `at`."""
    begin = at
    while at < len(text):
        if plain := _PLAIN.match(text, at):
            at = plain.end()
        elif text[at] in "\\'\"`":
            at = quoted(text, at)
        elif text.startswith(("$(", "<(", ">("), at):
            at = closing(text, at + 2, ")")
        elif text.startswith("${", at):
            at = closing(text, at + 2, "}")
        elif text[at] == "(" and at > begin and text[at - 1] == "=":
            at = closing(text, at + 1, ")")
        elif text[at] in " \t\n;|&()<>":
            break
        else:
            at += 1
    return min(at, len(text))


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.found: list[Command] = []
        self.command = Command()
        self.blocks: list[tuple[str, str]] = []
        self.condition = False  # behind || or a test and &&
        self.pattern = False  # a pattern of a case follows
        self.waiting: list[tuple[Command, str]] = []  # here-documents that begin at the next line
        self.first, self.ends = line, [each.end() for each in re.finditer("\n", text)]

    def line(self, at: int) -> int:
        return self.first + bisect_right(self.ends, at)

    def read(self) -> list[Command]:
        at = 0
        while at < len(self.text):
            end = self._expression(at)
            if (token := _TOKEN.match(self.text, at)) and not end:
                at = self._redirect(token) if token["redirect"] else self._operator(token)
            else:
                end = end or max(word_end(self.text, at), at + 1)
                self.command.words.append(self.text[at:end])
                self.command.lines.append(self.line(at))
                at = end
        self._end("")
        return self.found

    def _expression(self, at: int) -> int:
        """Return the index behind `((...))` or `[[ ... ]]`, in which no commands stand; 0, if none starts there."""
        if self.text.startswith(("((", "[["), at) and set(self.command.words) <= _BEFORE_EXPRESSION:
            if test := _TEST.match(self.text, at):
                return test.end()
            end = closing(self.text, at + 1, ")")
            return end if self.text[at] == "(" and closing(self.text, at + 2, ")") == end - 1 else 0
        return 0

    def _redirect(self, match: re.Match[str]) -> int:
        end = word_end(self.text, match.end())
        target, sign = self.text[match.end() : end], match["redirect"].lstrip("0123456789")
        if sign in ("<<", "<<-"):
            self.waiting.append((self.command, re.sub(r"['\"\\]", "", target)))
        elif sign[0] != "<" and sign[-1] != "&":
            self.command.output = target
        return end

    def _operator(self, token: re.Match[str]) -> int:
        sign, at = token.group(), token.end()
        if token["skipped"]:
            return at
        names = sign == "(" and len(self.command.words) == 1
        if names and (brackets := _EMPTY_BRACKETS.match(self.text, at)):
            self.blocks.append(("function", self.command.words[0]))
            self.command = Command()
            return brackets.end()
        self._end(sign)
        self.pattern |= sign in (";;", ";&", ";;&") and bool(self.blocks)
        return self._here_documents(at) if sign == "\n" else at

    def _here_documents(self, at: int) -> int:
        for command, delimiter in self.waiting:
            closed = re.compile(rf"^[^\S\n]*{re.escape(delimiter)}[^\S\n]*(\n|\Z)", re.MULTILINE).search(self.text, at)
            end, behind = closed.span() if closed else (len(self.text), len(self.text))
            inside = self.text[at:end]
            command.here = HereDocument(inside if inside.endswith("\n") else inside + "\n", self.line(at))
            at = behind
        self.waiting = []
        return at

    def _end(self, sign: str) -> None:
        """Finish the current command: take shell keywords off its front, and keep the blocks they open or close."""
        command, self.command = self.command, Command()
        if command == Command():
            return
        command.background, words = sign == "&", command.words
        del self.blocks[_DEEPEST:]
        if self.pattern:
            self.pattern = sign != ")" and words[:1] != ["esac"]
            if words[:1] != ["esac"]:
                return
        while words and self._keyword(words, command.lines, sign):
            del words[0], command.lines[0]
        if words or command.here:
            command.loops = tuple(name for kind, name in self.blocks if kind == "loop")
            command.branch = self.condition or any(kind == "branch" for kind, _ in self.blocks)
            command.function = next((name for kind, name in reversed(self.blocks) if kind == "function"), "")
            self.found.append(command)
        test = words and (words[0] in ("[", "test") or words[0].startswith(("[[", "((")))
        self.condition = sign == "||" or (sign == "&&" and bool(test or self.condition))

    def _keyword(self, words: list[str], lines: list[int], sign: str) -> bool:
        """Tell whether the first word is one of the shell's, behind which a command may stand; take what it names."""
        first = words[0]
        if first in _BLOCKS:
            name = _LOOP_VARIABLE.match(words[1]) if first in ("for", "select") and len(words) > 1 else None
            self.blocks.append((_BLOCKS[first], name[1] if name else ""))
            self.pattern = first == "case" and sign != ")"
            if first in ("case", "for", "select"):
                del words[1:], lines[1:]
        elif first in ("fi", "esac", "done") or (first == "}" and self.blocks and self.blocks[-1][0] == "function"):
            self.blocks[-1:] = []
        elif first == "function" and len(words) > 1:
            self.blocks.append(("function", words.pop(1)))
            lines.pop(1)
        else:
            return first in _STARTS
        return True


def commands(text: str, line: int = 1) -> list[Command]:
    """Return the simple commands of a script in the order in which they are written."""
    return _Reader(text, line).read()
