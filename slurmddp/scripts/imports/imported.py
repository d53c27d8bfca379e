"""What a batch script becomes: keys of the job file, and what is not carried over."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slurmddp.job.expand import unexpand
from slurmddp.job.sensitive import redacted, secrets_in_line
from slurmddp.job.types import WORKDIRS
from slurmddp.records.redact import REDACTED, is_secret_name
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.text import SECRET
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import GIVEN, SYMBOL, likely, symbol, symbol_name
from slurmddp.scripts.sandbox.evaluate import HOME, SUBMIT

#: Variables of the user's shell whose values a job file may show: a script of others may name any.
_SHOWN = re.compile(r"HOME|USER|LOGNAME|(\w*_)?(SCRATCH|WORK|PROJECT|HOME|PATH|ROOT|FOLDER|\w*DIR)")
_OF_LOGIN = re.compile(r"\w*(HOME|USER|LOGNAME|SCRATCH|WORK|PROJECT)")
#: Folders of another user, patterns, and the temporary folder, which differs between this machine and the nodes.
_UNKNOWN = re.compile(r"-|~[^/]|.*([*?\[]|\{[^{}]*,|\$\{\w*(TMP|TEMP))")
_USER_IN_URL = re.compile(r"://[^/\s@:]+:[^/\s@$]+@")
ABOVE = re.compile(r"/\.user(/\d)*(?![\w.])")


def shown_variable(name: str, *, prepared: bool = False) -> bool:
    """Return whether a job file may show the value that the user's shell has for a variable. prepared: the script loads
    modules or sources files, which may set others than those of the login."""
    return (_OF_LOGIN if prepared else _SHOWN).fullmatch(name) is not None and not is_secret_name(name)


class Left(NamedTuple):
    """Text of the script that is not carried over. lost: without it, another job starts."""

    line: int
    text: str
    why: str
    lost: bool


@dataclass
class Imported:
    """keys: path of a key -> its value. named: what the comments explain already, so that the proof need not. site:
    what the profile sets in a job."""

    script: Script
    origins: tuple[int, ...]
    site: Mapping[str, Any]
    run_name: str = "run.sh"
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    keys: dict[tuple[str, ...], Any] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    named: set[str] = field(default_factory=set)
    secrets: set[str] = field(default_factory=set)  # values of the script's variables that are named like secrets
    folder: str = ""  # in which the script launches, as seen from where you submit
    run_text: str = ""  # of run.sh, if the job needs one

    def set(self, dotted: str, value: Any) -> None:
        self.keys[tuple(dotted.split("."))] = value

    def add(self, dotted: str, value: Any) -> None:
        items = self.keys.setdefault(tuple(dotted.split(".")), [])
        if value not in items:
            items.append(value)

    def leave(self, line: int, text: str, why: str, *, lost: bool = True, about: str = "") -> None:
        """Say what is not carried over; what looks like a secret in it is not repeated. about: the fact or variable
        that it explains."""
        words = redacted(SYMBOL.sub("...", GIVEN.sub(r"$\1", text)).split(), self.secrets)
        self.left.append(Left(line, SECRET.sub(REDACTED, " ".join(words)), why, lost))
        self.named.add(about)

    def enter(self, path: str) -> None:
        """Set the folder in which the ranks start."""
        there = _from("SLURM_SUBMIT_DIR", path or ".")
        if _UNKNOWN.match(there):
            line = max((line for line, name in self.script.found.assigned if name == "cd"), default=1)
            changes = (each.words for each in self.script.commands if each.line == line)
            text = " ".join(next((words for words in changes if words[0] in ("cd", "pushd")), ["cd"]))
            self.leave(line, text, "a folder that only the job knows: set train.workdir", about="folder")
            return
        there = there if re.match(r"[$~]", there) else os.path.normpath(there)  # what is above a variable is not known
        self.folder = "" if there == "." else there
        if self.folder:
            self.set("train.workdir", f"./{there}" if there in WORKDIRS else there)

    def text(self, value: str) -> str | None:
        """Return a value as the job file can hold it: the user's folders as they are now; None if only the job knows
        it, or if it may be a secret of the user's shell."""
        text = value.replace(symbol("maybe"), "")
        for name in ("HOME", "USER"):
            text = text.replace(symbol(f"?:{name}"), self.environment.get(name) or symbol("?"))
        if text == "~" or text.startswith("~/"):
            text = self.environment.get("HOME", "~") + text[1:]
        text = text.replace(symbol("tilde"), "~")
        return None if "\0" in text else self.real(text)

    def path(self, value: str) -> str | None:
        """Return a path for the job file, where the user's variables may stay variables."""
        parts = SYMBOL.split(likely(value) or "")
        names = [name.partition(":")[2] if name.startswith("?:") else "" for name in parts[1::2]]
        if not all(names) or any(name.startswith("SLURM") and name != "SLURM_SUBMIT_DIR" for name in names):
            return None
        if ABOVE.match(parts[0]):  # above the folder of submission
            parts[0] = os.path.relpath(parts[0], SUBMIT)
        home = "~/" if re.match("~(/|$)", parts[0]) else ""  # which the job file expands as bash does
        parts[0] = parts[0][len(home) :] if home else parts[0]
        parts[::2] = [unexpand(part) for part in parts[::2]]
        parts[1::2] = [f"${{{name}}}" for name in names]
        return _from("PWD", home + "".join(parts))

    def inside(self, path: str) -> str:
        """Return a path of the script, as seen from the folder that you submit from."""
        submitted = _from("SLURM_SUBMIT_DIR", path)
        if submitted != path or not self.folder or path.startswith(("/", "$", "~")):
            return submitted
        rest = path[1:] if re.match(r"\.(:|$)", path) else f"/{path.removeprefix('./')}"
        return self.folder.rstrip("/") + rest

    def real(self, text: str) -> str:
        """Return a recorded text with the folders and the name of the user instead of the sandbox's."""
        text = text.replace(HOME, self.environment.get("HOME", HOME))
        there, here = SUBMIT, os.getcwd()
        while there != "/" and "/.user" in text:  # `cd ..` leaves the folder of both
            text = text.replace(there, here if here != "/" else "/.")
            there, here = os.path.dirname(there), os.path.dirname(here)
        return text.replace("sandboxuser", self.environment.get("USER", "sandboxuser"))

    def raw(self, launch: Launch, word: str, option: str = "", behind: str = "") -> str:
        """Return a word as the script has it. option: the word before it. behind: a word that comes earlier."""
        written: list[str] = [*launch.command.words, *(launch.step.command.words if launch.step else ())]
        at = next((at for at, each in enumerate(written) if behind and each.strip("'\"").endswith(behind)), -1)
        written = written[at + 1 :]
        name = symbol_name(word, "?")
        parts = [part for part in SYMBOL.split(word)[::2] if part]
        if option in written[:-1]:
            return written[written.index(option) + 1]
        open_words = {raw for raw in written if re.search("[$`]", raw)}
        for raw in written:
            holds = not name and "\0" in word and raw in open_words and all(part in raw for part in parts)
            holds &= bool(parts) or len(open_words) == 1  # else it may be another one
            if holds or (name and re.search(rf"\$\{{?{name}\b|\$[@*]", raw)) or word == raw.strip("'\""):
                return raw
        return word

    def line_of(self, launch: int, name: str) -> int:
        """Return the line that sets a variable: its last assignment, or the launch."""
        line = self.script.assigned(name)
        return line if line > 1 else launch

    def site_variables(self) -> dict[str, Any]:
        """Return the variables that the site's profile gives the ranks."""
        return {**(self.site.get("environment") or {}), **((self.site.get("network") or {}).get("variables") or {})}

    def withhold(self) -> None:
        """Take each secret out of what is written, and say on which line of the script it stands."""
        if any(SECRET.search(line) or secrets_in_line(line) for line in self.run_text.splitlines()):
            self.run_text = ""
            self.leave(1, self.run_name, "would hold a secret: let the script read it elsewhere")
        for key, value in list(self.keys.items()):
            items = value if isinstance(value, list) else [value]
            kept = [item for item in items if not (isinstance(item, str) and self._withheld(key, item))]
            if isinstance(value, list) and kept:
                self.keys[key] = kept
            elif not kept:
                del self.keys[key]

    def _withheld(self, key: tuple[str, ...], item: str) -> bool:
        names, found = secrets_in_line(item), SECRET.search(item) or _USER_IN_URL.search(item)
        if key[0] in ("environment", "network") and is_secret_name(key[-1]):
            names.append(key[-1])
        if not names and not found and not any(each in item for each in self.secrets if len(each) > 3):
            return False
        for name in names:
            self.add("environment_from", name)
        known = [f"{name}=" for name in names] or [found[0] if found else key[-1], key[-1]]
        lines = enumerate(self.script.lines, 1)
        line = next((at for at, text in lines if any(each in text for each in known)), 1)
        todo = f"export {names[0]} in your shell before you submit" if names else "let the script read it elsewhere"
        why, lost = f"a secret: revoke it, and {todo}", not names or key[0] != "environment"
        self.leave(line, f"{'.'.join(key)}: ...", why, lost=lost)
        self.named |= {key[-1], *names}
        return True


def _from(folder: str, path: str) -> str:
    """Return a path as seen from the folder that a variable names, if it begins there."""
    return re.sub(rf"^\$\{{{folder}\}}(?:(/)|(?=:|$))", lambda match: "" if match[1] else ".", path)
