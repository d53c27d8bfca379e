"""What the image runs: ENTRYPOINT and CMD as Docker puts them together; and the command line of a RUN."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurmddp.images.dockerfile.lines import Instruction
from slurmddp.images.dockerfile.words import shell, unbrace


@dataclass(frozen=True)
class Running:
    """entrypoint, command: argument lists; None where the Dockerfile does not say. own: CMD is this stage's own."""

    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    own: bool = False

    def with_command(self, instruction: Instruction) -> Running:
        """After a CMD."""
        return replace(self, command=_argv(instruction), own=True)

    def with_entrypoint(self, instruction: Instruction) -> Running:
        """After an ENTRYPOINT, which takes away a CMD that the base brought."""
        return replace(self, entrypoint=_argv(instruction), command=self.command if self.own else ())

    @property
    def said(self) -> bool:
        """Whether the Dockerfile says what is run at all; otherwise the base's own way stays."""
        return self.entrypoint is not None or self.command is not None


def _argv(instruction: Instruction) -> tuple[str, ...]:
    array = instruction.array()
    return ("/bin/sh", "-c", instruction.text) if array is None else tuple(array)


def run_lines(instruction: Instruction) -> list[str]:
    """The command of one RUN: a process of its own that gets exactly Docker's text, broken where the file is."""
    array = instruction.array()
    if array is not None:
        return [f"(exec {' '.join(map(shell, array))})"]  # not a word of this shell, such as cd or exit
    pieces = [""]
    for piece in instruction.pieces:
        # A line that begins with % opens a section, one that begins with bootstrap: a stage
        if pieces == [""] or piece.lstrip().startswith("%") or piece.lower().startswith("bootstrap:"):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    text = instruction.text
    if "'" not in text and "#" not in text and not any(piece.endswith("\\") for piece in pieces):
        # The inner shell takes the breaks away: there is no quote and no comment that would keep them
        return ["/bin/sh -c '" + unbrace("\\\n".join(pieces), "'") + "'"]
    # The outer shell takes the breaks away
    for special in '\\"$`':
        pieces = [piece.replace(special, "\\" + special) for piece in pieces]
    return ['/bin/sh -c "' + unbrace("\\\n".join(pieces), '"') + '"']
