"""What stands in front of a line: rank, host and time. Launchers, NCCL and PyTorch write them in many ways."""

import re
from typing import NamedTuple

#: Month, day, hour, minute, second. Many logs have no year, so none is kept.
Clock = tuple[int, int, int, int, float]

_COLOUR = re.compile("\x1b\\[[0-9;]*[A-Za-z]")
#: Frames of rich tracebacks, and quotes of mails and issues.
_FRAME = re.compile(r"^[\s>│|╭╰]+(?=\S)")
_RANK = re.compile(r"\[?\b(?:rank|Rank|RANK)[ :=]{0,2}(\d{1,6})\b\]?")
_LABEL = re.compile(
    r"^(?:"
    r"\[(?:default|rank|Rank )(?P<rank>\d+)\]:?\s?"
    r"|(?P<task>\d{1,5}): "
    r"|\[\d{1,7}\] "
    r"|\((?:[\w.:-]+,? )*(?:pid|ip)=[^)]*\) "
    r"|\[(?:stderr|stdout|INFO|ERROR)\]:? "
    r"|\[\d+,(?P<mpi>\d+)\]<std(?:out|err)>: ?"
    r"|(?:\[\S+\] \w+ )?\[rank=(?P<label>\d+)\] \|\| "
    r"|(?P<host>[A-Za-z][\w.-]*): (?=\[rank|\[default|Traceback|[\w.]*Error|\s+File \")"
    r"|[EF]\d{4} [\d:.]+ (?:\d+ )*\S+\] "
    r"|20\d\d-\d\d-\d\d [\d:,.]+ - [\w.]+ - (?:INFO|ERROR|CRITICAL) - "
    r"|(?:INFO|ERROR|CRITICAL) \d\d-\d\d [\d:]+ \[[^]]+\] "
    r")"
)
_NCCL = re.compile(r"^(?P<host>[A-Za-z0-9][\w.-]*):\d+:\d+ \[(?P<device>\d+)\]")
_GLOG = re.compile(r"\[[WEIF]\s?(\d{2}|\d)(\d{2}) (\d{2}):(\d{2}):(\d{2}(?:\.\d+)?)")
_ISO = re.compile(r"\b20\d\d[-/](\d{2})[-/](\d{2})[T_ ](\d{2}):(\d{2}):(\d{2}(?:[.,]\d+)?)")


class Line(NamedTuple):
    """One line without its prefix."""

    text: str
    rank: int | None
    host: str | None
    clock: Clock | None


def parse_line(raw: bytes) -> Line:
    """Take the prefix from a line, and read rank, host and time anywhere in it."""
    text = raw.decode("utf-8", errors="replace").rstrip("\r")
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    rank: int | None = None
    host: str | None = None
    whole = text
    for _ in range(4):
        label = _LABEL.match(text)
        if not label:
            break
        text = text[label.end() :]
        number = label["rank"] or label["mpi"] or label["label"] or (label["task"] if rank is None else None)
        rank = int(number) if number and not label[0].startswith("[default") else rank
        host = label["host"] or host
    if nccl := _NCCL.match(text):
        host = nccl["host"]
    if rank is None and (match := _RANK.search(text)):
        rank = int(match[1])
    return Line(text, rank, host, _clock(whole))


def unframed(text: str) -> str:
    """Return the text without the frame of a rich traceback or a quote."""
    bare = text.rstrip()
    return _FRAME.sub("", bare[:-1].rstrip() if bare.endswith(("│", "╮", "╯")) else text)


def _clock(text: str) -> Clock | None:
    match = _GLOG.search(text) or _ISO.search(text)
    if not match:
        return None
    month, day, hour, minute, second = match.groups()
    return int(month), int(day), int(hour), int(minute), float(second.replace(",", "."))
