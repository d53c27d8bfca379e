"""Split bash into simple commands: continuations joined, quotes and substitutions kept, here-documents apart.

It reads what batch scripts contain. It is no full parser: it never fails, and bash itself judges the syntax."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_REDIRECT = re.compile(r"\d*(<<<|<<-?|<>|>>|>\||[<>]&|[<>])|&>>?")
_OPERATOR = re.compile(r"&&|\|\||\|&|;;&?|;&|[;|&()\n]")
_BLANKS = re.compile(r"[ \t\r]+")
_CLOSES = {"(": ")", "{": "}"}
_PLAIN = re.compile(r"[^\\'\"`<>$=(){} \t\n;|&]+")
_DEEPEST = 100  # blocks in blocks
_STARTS = {"then", "do", "else", "elif", "!", "{", "}", "time", "coproc"}
_BEFORE_EXPRESSION = _STARTS | {"if", "while", "until", "for"}


@dataclass(frozen=True)
class HereDocument:
    """The text that a command reads, and the line it starts at. literal: bash expands nothing in it."""

    text: str
    line: int
    literal: bool


@dataclass
class Command:
    """One simple command, with its words as written."""

    words: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    then: str = ""  # the operator behind it
    loops: tuple[str, ...] = ()  # variables of the loops around it; "" for while and until
    branch: bool = False  # inside if or case, or behind || or a test and &&
    function: str = ""
    input: str = ""
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


_EMPTY = Command()


class _Reader:
    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.first = line
        self.found: list[Command] = []
        self.command = Command()
        self.blocks: list[tuple[str, str]] = []
        self.condition = False  # behind || or a test and &&
        self.pattern = False  # a pattern of a case follows
        self.waiting: list[tuple[Command, str, bool]] = []  # here-documents that begin at the next line
        self._known = (0, line)

    def line(self, at: int) -> int:
        before, line = self._known
        self._known = (at, line + self.text.count("\n", before, at))
        return self._known[1]

    def read(self) -> list[Command]:
        at = 0
        while at < len(self.text):
            at = self._step(at)
        self._end("")
        return self.found

    def _step(self, at: int) -> int:
        text = self.text
        if blanks := _BLANKS.match(text, at):
            return blanks.end()
        if text.startswith("\\\n", at):
            return at + 2
        if text[at] == "#":
            end = text.find("\n", at)
            return end if end >= 0 else len(text)
        if (end := self._expression(at)) > at:
            self.command.words.append(text[at:end])
            self.command.lines.append(self.line(at))
            return end
        if not text.startswith(("<(", ">("), at) and (match := _REDIRECT.match(text, at)):
            return self._redirect(match)
        if match := _OPERATOR.match(text, at):
            return self._operator(match)
        end = max(word_end(text, at), at + 1)
        self.command.words.append(text[at:end])
        self.command.lines.append(self.line(at))
        return end

    def _expression(self, at: int) -> int:
        """Return the index behind `((...))` or `[[ ... ]]`, in which no commands stand; `at`, if none starts there."""
        if not set(self.command.words) <= _BEFORE_EXPRESSION:
            return at
        if self.text.startswith("((", at):
            end = closing(self.text, at + 1, ")")
            return end if closing(self.text, at + 2, ")") == end - 1 else at
        if re.compile(r"\[\[\s").match(self.text, at):
            match = re.compile(r"(?<=\s)\]\](?=[\s;&|)]|\Z)").search(self.text, at)
            return match.end() if match else at
        return at

    def _redirect(self, match: re.Match[str]) -> int:
        text, at = self.text, match.end()
        while text[at : at + 1] in (" ", "\t"):
            at += 1
        end = word_end(text, at)
        target, sign = text[at:end], match.group().lstrip("0123456789")
        if sign in ("<<", "<<-"):
            self.waiting.append((self.command, re.sub(r"['\"\\]", "", target), target[:1] in "'\"\\"))
        elif sign.startswith("<"):
            self.command.input = target
        elif not sign.endswith("&"):
            self.command.output = target
        return end

    def _operator(self, match: re.Match[str]) -> int:
        sign, at = match.group(), match.end()
        if sign == "(" and len(self.command.words) == 1 and re.compile(r"\s*\)").match(self.text, at):
            self._open("function", self.command.words[0])
            self.command = Command()
            return self.text.index(")", at) + 1
        self._end(sign)
        if sign in (";;", ";&", ";;&") and self.blocks:
            self.pattern = True
        if sign == "\n" and self.waiting:
            at = self._here_documents(at)
        return at

    def _here_documents(self, at: int) -> int:
        for command, delimiter, literal in self.waiting:
            start, lines = self.line(at), []
            while at < len(self.text):
                end = self.text.find("\n", at)
                end = end if end >= 0 else len(self.text)
                line, at = self.text[at:end], end + 1
                if line.strip() == delimiter:
                    break
                lines.append(line)
            command.here = HereDocument("\n".join(lines) + "\n", start, literal)
        self.waiting = []
        return min(at, len(self.text))

    def _open(self, kind: str, name: str = "") -> None:
        self.blocks.append((kind, name))

    def _end(self, sign: str) -> None:
        """Finish the current command: take shell keywords off its front, and keep the blocks they open or close."""
        if not self.command.words and self.command == _EMPTY:
            return
        command, self.command = self.command, Command()
        command.then = sign.strip()
        words, lines = command.words, command.lines
        del self.blocks[_DEEPEST:]
        if self.pattern:
            self.pattern = sign != ")" and words[:1] != ["esac"]
            if words[:1] != ["esac"]:
                return
        while words:
            first = words[0]
            if first == "if":
                self._open("branch")
            elif first == "case":
                self._open("branch")
                self.pattern = sign != ")"
                words.clear()
                break
            elif first in ("for", "select"):
                name = re.match(r"(?:\(\(\s*)?([A-Za-z_]\w*)", words[1]) if len(words) > 1 else None
                self._open("loop", name[1] if name else "")
                words.clear()
                break
            elif first in ("while", "until"):
                self._open("loop")
            elif first in ("fi", "esac", "done") or (first == "}" and self.blocks and self.blocks[-1][0] == "function"):
                self.blocks[-1:] = []
            elif first == "function" and len(words) > 1:
                self._open("function", words.pop(1))
                lines.pop(1)
            elif first not in _STARTS:
                break
            del words[0], lines[0]
        if words or command.here:
            command.loops = tuple(name for kind, name in self.blocks if kind == "loop")
            command.branch = self.condition or any(kind == "branch" for kind, _ in self.blocks)
            command.function = next((name for kind, name in reversed(self.blocks) if kind == "function"), "")
            self.found.append(command)
        test = words and (words[0] in ("[", "test") or words[0].startswith(("[[", "((")))
        if sign == "||" or (sign == "&&" and test):
            self.condition = True
        elif sign != "&&":
            self.condition = False


def commands(text: str, line: int = 1) -> list[Command]:
    """Return the simple commands of a script in the order in which they are written."""
    return _Reader(text, line).read()
