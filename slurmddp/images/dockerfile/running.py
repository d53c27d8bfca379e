"""What the image runs: ENTRYPOINT and CMD as Docker puts them together; and the command line of a RUN."""

from dataclasses import dataclass

from slurmddp.images.dockerfile.lines import Instruction
from slurmddp.images.dockerfile.words import script, shell, unbrace

#: What a command in shell form is handed to, unless SHELL says otherwise.
SHELL = ("/bin/sh", "-c")


@dataclass(frozen=True)
class Running:
    """entrypoint, command: argument lists; None where the Dockerfile does not say. own: CMD is this stage's own."""

    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    own: bool = False

    @property
    def said(self) -> bool:
        """Return whether the Dockerfile says what is run at all; otherwise the base's own way stays."""
        return self.entrypoint is not None or self.command is not None


#: Where a heredoc that names its interpreter lies while it runs.
_SCRIPT = "/.slurmddp.heredoc"


def run_lines(instruction: Instruction, prefix: tuple[str, ...] = SHELL, before: str = "") -> list[str]:
    """The command of one RUN: a process of its own that gets exactly Docker's text, broken where the file is.

    prefix: what SHELL says; before: words of the shell in front of the command.
    """

    def process(command: str) -> str:
        """Return the command line. exec runs a command without a path: it could be a word of the shell, such as cd."""
        return f"{before} {command}" if before else command if command.startswith("/") else f"(exec {command})"

    array = instruction.array()
    if array is not None:
        command = " ".join(map(shell, array))
        return [process(command) if before else f"(exec {command})"]
    command = " ".join(map(shell, prefix))
    if not instruction.heredocs:
        return [process(f"{command} {_quoted(instruction, prefix == SHELL)}")]
    heredoc = instruction.heredocs[0]
    if instruction.text != heredoc.word:  # the shell reads them itself
        text = "\n".join([instruction.text, *(part.text + part.name for part in instruction.heredocs)])
        return [process(f"{command} {script((text,))}")]
    if not heredoc.text.startswith("#!"):
        return [process(f"{command} {script((heredoc.content,))}")]
    written = f"printf %s {script((heredoc.content,))} > {_SCRIPT}"
    return [written, f"chmod 755 {_SCRIPT}", process(f"{command} {_SCRIPT}"), f"rm {_SCRIPT}"]


def _quoted(instruction: Instruction, is_sh: bool) -> str:
    """The text as one word, broken where the file is."""
    pieces = [""]
    for piece in instruction.pieces:
        # A line that begins with % opens a section, one that begins with bootstrap: a stage
        if pieces == [""] or piece.lstrip().startswith("%") or piece.lower().startswith("bootstrap:"):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    text = instruction.text
    if is_sh and "'" not in text and "#" not in text and not any(piece.endswith("\\") for piece in pieces):
        # The inner shell takes the breaks away: there is no quote and no comment that would keep them
        return "'" + unbrace("\\\n".join(pieces), "'") + "'"
    # The outer shell takes the breaks away
    for special in '\\"$`':
        pieces = [piece.replace(special, "\\" + special) for piece in pieces]
    return '"' + unbrace("\\\n".join(pieces), '"') + '"'
