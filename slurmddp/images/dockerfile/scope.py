"""Which variables a line of a stage knows: ENV and ARG so far, and that the rest is the base image's."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmddp.errors import UserError
from slurmddp.images.dockerfile.lines import Instruction
from slurmddp.images.dockerfile.stages import platform_arguments, read_arguments
from slurmddp.images.dockerfile.words import NAME, Parts, Reference, expand, pairs, plain, shell, shell_parts

# Docker takes these as build arguments without any ARG, and keeps them out of the image
PROXIES = tuple(
    form(name)
    for name in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy", "all_proxy")
    for form in (str, str.upper)
)
_SECRET = re.compile(r"(TOKEN|PASSWORD|PASSWD|SECRET|APIKEY|API_KEY|CREDENTIAL)", re.IGNORECASE)
#: Bash does not let anybody set them.
_BASH = ("UID", "EUID", "PPID", "BASHOPTS", "BASH_VERSINFO", "SHELLOPTS")
#: Docker's own, for a base that sets none.
_PATH = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@dataclass
class Scope:
    """Variables of one stage."""

    given: Mapping[str, str]  # the build's arguments
    declared: Mapping[str, str | None]  # those that an ARG before the first FROM names, with their values
    used: set[str]  # names of the build's arguments that an ARG took
    base: Mapping[str, str] | None = None  # the variables of the base image; None where no registry was asked
    _arguments: dict[str, str | Reference | None] = field(default_factory=dict)
    _environment: dict[str, str | Reference] = field(default_factory=dict)

    def lookup(self, name: str) -> str | Reference | None:
        """Return what the name stands for on this line."""
        value = self._environment.get(name, self._arguments.get(name))
        if value is not None:
            return value
        if self.base is not None:
            return {**_PATH, **self.base}.get(name)
        return None if name in self._arguments else Reference(name)

    def home(self) -> str:
        """HOME as a word of the shell; "" where neither the Dockerfile nor its base sets it."""
        return '"$HOME"' if "HOME" in self._environment else shell((self.base or {}).get("HOME", ""))

    def env(self, instruction: Instruction) -> list[tuple[str, Parts]]:
        """Take over an ENV: its names and values. Raises UserError."""
        values = []
        for name, raw in pairs(instruction):
            if not NAME.fullmatch(name):
                message = f"{name!r} is not a valid name of a shell variable"
                raise instruction.error(message, "use letters, digits and _")
            values.append((name, expand(raw, self.lookup, instruction)))
        for name, parts in values:  # all values of a line are those before it
            self._environment[name] = _value(name, parts)
        return values

    def arg(self, instruction: Instruction, notes: list[str]) -> list[tuple[str, Parts]]:
        """Take over an ARG: the names and values that the commands after it see. Raises UserError."""
        values = []
        for name, raw in read_arguments(instruction):
            outer = self.declared.get(name, platform_arguments().get(name))
            if name in self.given:
                self.used.add(name)
                parts: Parts | None = (self.given[name],)
                if _SECRET.search(name):
                    notes.append(f"{instruction.where}: everyone who has the image can read the argument {name} in it")
            elif raw is None:
                parts = None if outer is None else (outer,)
            else:
                try:
                    parts = expand(raw, self.lookup, instruction)
                except UserError:
                    self._arguments[name] = ""  # so that the lines that use it are not refused, too
                    raise
            self._arguments[name] = None if parts is None else _value(name, parts)
            if parts is not None and name not in self._environment:
                values.append((name, parts))
            elif parts is not None and plain(parts) != self._environment[name]:
                note = f"ARG {name} has no effect: the ENV of that name before it wins, as Docker's reference says"
                notes.append(f"{instruction.where}: {note}")
        return values


def exports(values: list[tuple[str, Parts]]) -> list[str]:
    """The commands that set these variables. What is bash's own stays so where /bin/sh is bash, as in Docker."""
    words = {name: f"{name}={shell_parts(parts)}" for name, parts in values}
    own = [f"if (export {words[name]}) 2>/dev/null; then export {words[name]}; fi" for name in _BASH if name in words]
    rest = [word for name, word in words.items() if name not in _BASH]
    return [*(["export " + " ".join(rest)] if rest else []), *own]


def _value(name: str, parts: Parts) -> str | Reference:
    text = plain(parts)
    return Reference(name) if text is None else text
