"""Starts a rank behind the command of launch.wrap: python -m slurmddp.runtime.wrap COUNT [WORD ...] PROGRAM ...

COUNT: of the command's words; PROGRAM: what stands behind `python` without it. This process becomes the command (exec),
which starts this module again, with COUNT 0, and that becomes the program. So the rank's signals and exit code are the
command's. The command has no RANK: `stacks` and `rehearse` find a rank by that variable. Standard library only.
"""

import os
import sys
from typing import NoReturn

from slurmddp.runtime import begin
from slurmddp.runtime.environment import own_node
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.watch import usererrors


def main(words: list[str]) -> NoReturn:
    """Become the command, or behind it the program. words: the command line behind this module's name."""
    if not words or not words[0].isdecimal() or len(words) < int(words[0]) + 2:
        print("slurmddp: error: usage: python -m slurmddp.runtime.wrap COUNT [WORD ...] PROGRAM ...", file=sys.stderr)
        raise SystemExit(2)
    command, program = words[1 : int(words[0]) + 1], words[int(words[0]) + 1 :]
    python = [sys.executable, *begin.interpreter_options(words)]
    if not command:
        os.environ["RANK"] = os.environ[begin.WRAPPED]
        os.execv(sys.executable, [*python, *program])
    if begin.has_agent():
        begin.stay_with_agent()
    rank = os.environ["RANK"]
    command = [_filled(word) for word in command]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {begin.WRAPPED: rank}
    try:
        os.execvpe(command[0], [*command, *python, "-m", "slurmddp.runtime.wrap", "0", *program], environment)
    except OSError as error:
        failed = UserError(f"launch.wrap: {command[0]} cannot be started where the ranks run: {error.strerror}")
        print(f"slurmddp: rank {rank} on node {own_node()}: {failed}", file=sys.stderr, flush=True)
        usererrors.note(failed)
        raise SystemExit(1) from None


def _filled(word: str) -> str:
    values = {
        "rank": os.environ["RANK"],
        "node": own_node(),
        "attempt": os.environ.get("SLURMDDP_ATTEMPT", "0"),
        "restart": os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    }
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


if __name__ == "__main__":
    main(sys.argv[1:])
