"""What a batch script becomes: keys of the job file, and what is not carried over."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmddp.job.expand import unexpand
from slurmddp.job.sensitive import REDACTED, is_secret_name, redacted, secrets_in_line
from slurmddp.job.types import WORKDIRS
from slurmddp.scripts.check.rules.text import SECRET
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import likely

_SYMBOL = re.compile("\0([^\0]*)\0")
#: Variables of the user's shell whose values a job file may show: a script of others may name any.
_SHOWN = re.compile(r"HOME|USER|LOGNAME|(\w*_)?(SCRATCH|WORK|PROJECT|HOME|PATH|ROOT|FOLDER|\w*DIR)")
#: Folders of another user, patterns, and the temporary folder, which differs between this machine and the nodes.
_UNKNOWN = re.compile(r"-|~[^/]|.*([*?\[]|\{[^{}]*,|\$\{\w*(TMP|TEMP))")
_USER_IN_URL = re.compile(r"://[^/\s@:]+:[^/\s@$]+@")


def shown_variable(name: str) -> bool:
    """Return whether a job file may show the value that the user's shell has for a variable."""
    return _SHOWN.fullmatch(name) is not None and not is_secret_name(name)


@dataclass
class Imported:
    """keys: path of a key -> its value. left: (line, text of the script, why it is not carried over). site: what the
    profile sets in a job."""

    script: Script
    origins: tuple[int, ...]
    site: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    keys: dict[tuple[str, ...], Any] = field(default_factory=dict)
    left: list[tuple[int, str, str]] = field(default_factory=list)
    lost: list[tuple[int, str, str]] = field(default_factory=list)  # those without which another job would start
    prints: list[int] = field(default_factory=list)  # lines that only print or check something
    export_all: bool = False  # since set -a
    folder: str = ""  # which the script has changed to, as seen from where you submit
    used: set[str] = field(default_factory=set)  # variables that the launch consists of

    def set(self, dotted: str, value: Any) -> None:
        """Set a key."""
        self.keys[tuple(dotted.split("."))] = value

    def add(self, dotted: str, value: Any) -> None:
        """Add to a list."""
        items = self.keys.setdefault(tuple(dotted.split(".")), [])
        if value not in items:
            items.append(value)

    def leave(self, line: int, text: str, why: str, *, lost: bool = True) -> None:
        """Say what is not carried over; what looks like a secret in it is not repeated. lost: the launch would differ
        in program, arguments, interpreter, container, ranks, folder, environment, files or limits."""
        words = redacted(_SYMBOL.sub("...", text).split())
        entry = (line, SECRET.sub(REDACTED, " ".join(words)), why)
        self.left.append(entry)
        if lost:
            self.lost.append(entry)

    def enter(self, line: int, text: str, folder: str) -> None:
        """Change the folder in which the ranks would start."""
        path = self.path(folder)
        self.keys.pop(("train", "workdir"), None)
        if path is None or _UNKNOWN.match(path):
            self.folder = ""
            self.leave(line, text, "a folder that only the job knows: set train.workdir")
            return
        there = self.inside("~/" if path == "~" else path or ".")
        there = there if re.match(r"[$~]", there) else os.path.normpath(there)  # what is above a variable is not known
        self.folder = "" if there == "." else there
        if self.folder:
            self.set("train.workdir", f"./{there}" if there in WORKDIRS else there)

    def text(self, value: str) -> str | None:
        """Return a value as the job file can hold it: the user's folders as they are now; None if only the job knows
        it, or if it may be a secret of the user's shell."""
        unknown = False

        def found(match: re.Match[str]) -> str:
            nonlocal unknown
            name = match[1].partition(":")[2]
            shown = match[1].startswith("?:") and not name.startswith("SLURM") and _SHOWN.fullmatch(name)
            known = self.environment.get(name) if shown and not is_secret_name(name) else None
            unknown |= known is None or known.split() != [known]  # bash may make several words of it
            return known or ""

        text = _SYMBOL.sub(found, likely(value) or "")
        if text == "~" or text.startswith("~/"):
            text = self.environment.get("HOME", "~") + text[1:]
        return None if unknown else text

    def path(self, value: str) -> str | None:
        """Return a path for the job file, where the user's variables may stay variables."""
        parts = _SYMBOL.split(likely(value) or "")
        names = [name.partition(":")[2] if name.startswith("?:") else "" for name in parts[1::2]]
        if not all(names) or any(name.startswith("SLURM") and name != "SLURM_SUBMIT_DIR" for name in names):
            return None
        home = "~/" if parts[0].startswith("~/") else ""  # which the job file expands as bash does
        parts[0] = parts[0].removeprefix(home)
        parts[::2] = [unexpand(part) for part in parts[::2]]
        parts[1::2] = [f"${{{name}}}" for name in names]
        text = home + "".join(parts)
        return _from("PWD", text)

    def withhold(self) -> None:
        """Take each secret out of what is written, and say on which line of the script it stands."""
        for key, value in list(self.keys.items()):
            items = value if isinstance(value, list) else [value]
            kept = [item for item in items if not (isinstance(item, str) and self._withheld(key, item))]
            if isinstance(value, list) and kept:
                self.keys[key] = kept
            elif not kept:
                del self.keys[key]

    def _withheld(self, key: tuple[str, ...], item: str) -> bool:
        names = secrets_in_line(item)
        if key[0] in ("environment", "network") and is_secret_name(key[-1]):
            names.append(key[-1])
        found = SECRET.search(item) or _USER_IN_URL.search(item)
        if not names and not found:
            return False
        for name in names:
            self.add("environment_from", name)
        known = [f"{name}=" for name in names] or [found[0] if found else "", key[-1]]
        lines = enumerate(self.script.lines, 1)
        line = next((at for at, text in lines if any(each in text for each in known)), 1)
        todo = f"export {names[0]} in your shell before you submit" if names else "let the script read it elsewhere"
        self.leave(line, f"{'.'.join(key)}: ...", f"a secret: revoke it, and {todo}", lost=key[0] != "environment")
        return True

    def inside(self, path: str) -> str:
        """Return a path of the script, as seen from the folder that you submit from."""
        submitted = _from("SLURM_SUBMIT_DIR", path)
        if submitted != path or not self.folder or path.startswith(("/", "$", "~")):
            return submitted
        folder = self.folder.rstrip("/")
        return f"{folder}{path[1:]}" if re.match(r"\.(:|$)", path) else f"{folder}/{path.removeprefix('./')}"


def _from(folder: str, path: str) -> str:
    """Return a path as seen from the folder that a variable names, if it begins there."""
    return re.sub(rf"^\$\{{{folder}\}}(?:(/)|(?=:|$))", lambda match: "" if match[1] else ".", path)
