"""A message to people, and the form in which it waits on a disk until its receiver has taken it."""

import re
from typing import Any, Dict, Mapping, NamedTuple, Optional, Tuple

from slurmddp.records.values import whole

#: Of the JSON message; docs/alerts.md says when it rises.
VERSION = 1
#: These may happen more than once in an attempt, so the time is a part of their key.
_REPEATED = ("hang", "straggler", "recovered", "warning")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_HEADER = re.compile(r'[A-Za-z-]+: [^"\\\x00-\x1f\x7f]*')
_HEAD_LINES = 20


class Alert(NamedTuple):
    """What happened to a run. docs/alerts.md explains each field.

    cause and next are sentences for people; rank and node are never read out of them. time: unix seconds. attempt: None
    for the newest one.
    """

    kind: str
    state: str = ""
    cause: str = ""
    next: str = ""
    rank: Optional[int] = None
    node: str = ""
    run: str = ""
    folder: str = ""
    job_id: str = ""
    attempt: Optional[int] = None
    time: int = 0
    step: Optional[int] = None
    steps: Optional[int] = None
    log: str = ""
    log_tail: str = ""

    @property
    def key(self) -> str:
        """What repeats of one message have in common."""
        more = f".{self.time}" if self.kind in _REPEATED else ""
        if self.kind == "stopping":  # it is asked to stop, and has stopped
            more = "." + re.sub(r"[^A-Za-z0-9_+-]+", "-", self.state)
        return f"{self.run}.{self.attempt or 0}.{self.kind}{more}"

    def write(self) -> Dict[str, Any]:
        """Return the keys of the JSON message that do not depend on its site and job."""
        record = dict(self._asdict(), schema=VERSION, key=self.key, attempt=self.attempt or 0)
        return {name: None if value == "" and name != "log_tail" else value for name, value in record.items()}


def read(record: Mapping[str, Any]) -> Optional[Alert]:
    """Return the alert of a JSON message; None if it is of another version, or has no kind and no run."""
    texts = {name: record.get(name) for name in ("kind", "state", "cause", "next", "node", "run", "folder", "job_id")}
    texts.update((name, record.get(name)) for name in ("log", "log_tail"))
    if record.get("schema") != VERSION or not isinstance(texts["kind"], str) or not isinstance(texts["run"], str):
        return None
    sound = {name: text for name, text in texts.items() if isinstance(text, str)}
    numbers = {name: whole(record.get(name)) for name in ("rank", "attempt", "step", "steps")}
    return Alert(time=whole(record.get("time")) or 0, **sound, **numbers)  # type: ignore[arg-type]


class Message(NamedTuple):
    """An alert as one receiver takes it. Each waits in a folder of its own: a file `head`, and the body."""

    target: str
    key: str
    kind: str
    insecure: bool  # whether it may go to an http address
    headers: Tuple[str, ...]
    body: bytes
    until: int = 0  # unix seconds; before, its sender may still be busy with it

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.key}.{self.target}"

    def head(self) -> str:
        """Return the text of the file `head`."""
        words = (("target", self.target), ("key", self.key), ("kind", self.kind), ("insecure", str(int(self.insecure))))
        lines = [f"{word} {value}\n" for word, value in (*words, ("until", str(self.until)))]
        return "".join(["slurmddp-alert 1\n", *lines, *(f"header {header}\n" for header in self.headers)])


def is_header(text: str) -> bool:
    """Return whether this is a header that we send."""
    return _HEADER.fullmatch(text) is not None


def read_message(head: str, body: bytes) -> Optional[Message]:
    """Return a message that waits; None if its head is damaged, or not of our making."""
    lines = [line.partition(" ")[::2] for line in head.split("\n")[:_HEAD_LINES]]
    one = dict(lines)
    target, key, kind = (one.get(word, "") for word in ("target", "key", "kind"))
    if not all(_NAME.fullmatch(text) for text in (target, key, kind)):
        return None
    headers = tuple(value for word, value in lines if word == "header" and is_header(value))
    until = one.get("until", "")
    return Message(target, key, kind, one.get("insecure") == "1", headers, body, int(until) if until.isdigit() else 0)
