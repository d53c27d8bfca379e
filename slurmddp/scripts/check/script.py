"""A batch script, read: text, #SBATCH options, commands with their variables, and what it launches."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from slurmddp.errors import UserError
from slurmddp.scripts.check.directives import Directive, Resources, asked, read_directives, slurm_variables
from slurmddp.scripts.check.shell import Command, commands
from slurmddp.shared.files import read_plain

if TYPE_CHECKING:
    from slurmddp.scripts.check.launches import Found

_LARGEST = 256 * 1024  # bytes; real scripts have a tenth of this


@dataclass(frozen=True)
class Script:
    """One batch script."""

    path: Path
    text: str
    lines: list[str]
    directives: list[Directive]
    late: list[int]  # #SBATCH lines that sbatch ignores
    job: Resources
    slurm: dict[str, str]  # Slurm's variables in the batch shell

    @cached_property
    def found(self) -> Found:
        """Return what bash starts when it evaluates the script; nothing, where no sandbox can be made."""
        from slurmddp.scripts.check.find import Finder
        from slurmddp.scripts.check.launches import Found
        from slurmddp.scripts.check.recorded import record

        runs = record(self)
        return Finder(self, runs).find() if runs else Found()

    @cached_property
    def commands(self) -> list[Command]:
        return commands(self.text.replace("\r\n", "\n")) if self.is_shell else []

    @property
    def sourced(self) -> bool:
        """Tell whether another file may set variables."""
        words = [each.words for each in self.commands if each.words[:1] in (["source"], ["."])]
        return any(not re.search(r"activate|conda\.sh", " ".join(each)) for each in words)

    def inside(self, command: Command) -> list[Command]:
        """Return the commands in the text that a command has for another bash: bash -c TEXT, or a here-document."""
        found = commands(command.here.text, command.here.line) if command.here else []
        for before, word, line in zip(command.words, command.words[1:], command.lines[1:], strict=False):
            if re.fullmatch(r"-[a-z]*c", before) and word[:1] in ("'", '"'):
                text = word[1:-1] if word[0] == "'" else re.sub(r'\\(["$`\\])', r"\1", word[1:-1])
                found += commands(text, line)
        return found

    def option(self, name: str) -> str | None:
        """Return the value of a #SBATCH option: the last one counts."""
        return next((each.value for each in reversed(self.directives) if each.name == name), None)

    @property
    def is_shell(self) -> bool:
        """Tell whether bash can read the script: csh, Python and others cannot."""
        words = self.lines[0].lstrip("\ufeff#! ").split()
        named = any(re.search(r"(^|/)(ba|da|k|z)?sh$", each) for each in words)
        return named or not words or not self.lines[0].startswith("#!")

    @property
    def here_lines(self) -> set[int]:
        """Return the lines of here-documents."""
        documents = [command.here for command in self.commands if command.here]
        return {line for each in documents for line in range(each.line, each.line + each.text.count("\n"))}

    def assigned(self, name: str) -> int:
        """Return the line of the last assignment of a variable; 1, if there is none."""
        assigns = re.compile(rf"(?!\s*#)(?:.*[\s;'\"])?{name}=")
        return max((at for at, text in enumerate(self.lines, 1) if assigns.match(text)), default=1)

    def line_of(self, *names: str) -> int:
        """Return the line of a #SBATCH option; 1, if it is not there."""
        return next((each.line for each in reversed(self.directives) if each.name in names), 1)


def parse(text: str, path: Path = Path("job.sbatch")) -> Script:
    """Read the text of a script."""
    lines = text.split("\n")
    directives, late = read_directives(lines)
    if late:  # those in a here-document are another script's
        others = Script(path, text, lines, [], [], Resources(), {}).here_lines
        late = [line for line in late if line not in others]
    if late and not directives:  # what they ask for shows what is meant
        directives, _ = read_directives([each if each.startswith("#SBATCH") else "" for each in lines])
    options = {each.name: each.value for each in directives}
    if re.search(r"^#SBATCH\s+(het|pack)job", text, re.MULTILINE):
        options = {}  # several jobs in one, each with nodes of its own
    return Script(path, text, lines, directives, late, asked(options), slurm_variables(options))


def read(path: Path, errors: str = "replace") -> Script:
    """Read a script from a file; errors: what becomes of bytes that are no UTF-8. Raises UserError."""
    why = ""
    try:
        content = read_plain(path, _LARGEST + 1)
    except OSError as error:
        content, why = b"", "this is a directory" if path.is_dir() else f"cannot read the script ({error.strerror})"
    if len(content) > _LARGEST:
        why = f"this is larger than {_LARGEST >> 10} KiB, too large for a batch script"
    elif b"\0" in content:
        why = "this is a binary file"
    elif not content.strip():
        why = why or "the file is empty"
    if why:
        todo = "name a batch script, for example: slurmddp check --script train.sbatch"
        raise UserError(why, where=str(path), todo=todo)
    return parse(content.decode("utf-8", errors=errors), path)
