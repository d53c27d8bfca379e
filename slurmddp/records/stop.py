"""The stop file, RUN/stop, which asks the ranks to save and exit. A person may make it, too: touch RUN/stop."""

from typing import NamedTuple

from slurmddp.records import json_lines
from slurmddp.records.text import first_line

VERSION = 1
#: The reason after `slurmddp cancel`: nothing starts the run again, whatever ends it.
CANCELLED = "cancelled by the user"
#: The reason where nobody has written one.
BY_HAND = "stop file"


class StopRequest(NamedTuple):
    """A request to stop. signal: whether the reason is the name of a signal that ended the job."""

    reason: str
    signal: bool = False

    def text(self) -> str:
        return json_lines.dump(dict(self._asdict(), schema=VERSION)).decode("utf-8", "replace")


def read(text: str) -> StopRequest:
    """Return what the text of the file says. What a person wrote into it is the reason; what is not sound is none."""
    fields = json_lines.load(text.encode("utf-8", "replace"))
    if fields is None:
        fields = {} if text.lstrip().startswith("{") or first_line(text) == CANCELLED else {"reason": text}
    reason = fields.get("reason")
    known = first_line(reason) if isinstance(reason, str) else ""
    return StopRequest(known or BY_HAND, known != "" and fields.get("signal") is True)
