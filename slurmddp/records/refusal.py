"""Why a node cannot start: logs/attempt-NNN/preflight/NODE.failed, of two lines, for node.sh may have to write it."""

from typing import NamedTuple

from slurmddp.records.job_events import USER
from slurmddp.records.text import first_line

VERSION = 1


class Refused(Exception):
    """This node cannot start its ranks. The text says why, for people. fault: as in Refusal."""

    def __init__(self, text: str, fault: str = "") -> None:
        super().__init__(text)
        self.fault = fault


class Refusal(NamedTuple):
    """What node.sh said. fault: user, if it would be the same on another node; empty: not known."""

    text: str
    fault: str = ""

    def write(self) -> str:
        return "{} {}\n{}\n".format(VERSION, self.fault, self.text)


def read(text: str) -> Refusal:
    """Return what the text of the file says. It may be half of it, or somebody else's: then `text` is empty."""
    head, _, rest = text.partition("\n")
    version, _, fault = head.partition(" ")
    if version != str(VERSION):
        return Refusal("")
    return Refusal(first_line(rest), USER if fault == USER else "")
