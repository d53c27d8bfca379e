"""A rehearsal: what it asks of the ranks, what rank 0 saw at its steps, and what became of a killed script."""

import hashlib
import json
from typing import Any, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from slurmddp.records import json_lines
from slurmddp.records.values import number, whole

#: In the run folder: the request, and the folder with a file per start of the ranks.
REQUEST, STARTS = "rehearsal.json", "rehearsal"
#: In the run folder of a later job: the verdict about the same code and arguments.
VERDICT = "rehearsed.json"
KILL, STOP = "kill", "stop"


class Order(NamedTuple):
    """batches: of each data loader per epoch; None: all of them. act: what rank 0 does once, in the first start: KILL
    itself, or ask for a STOP. after: so many steps after the first save. at: not then, but at this step.
    """

    batches: Optional[int] = None
    act: str = ""
    after: int = 3
    at: Optional[int] = None

    def text(self) -> str:
        return json.dumps(self._asdict())


class Line(NamedTuple):
    """What rank 0 saw after a step of this start; step 0: before the first one. time: unix seconds.

    hash: of the parameters. sample: some of their values. loss: mean of the losses of this step. part: hash of the
    first value of each parameter, if other ranks have other parts of them (sharded): the same on any number of ranks.
    saved: the file that was saved after this step, each number a #. acted: the order was carried out. Both of these
    lines have no hash.
    """

    step: int
    time: float = 0.0
    hash: str = ""
    sample: Sequence[float] = ()
    loss: Optional[float] = None
    part: str = ""
    saved: str = ""
    acted: bool = False

    def line(self) -> bytes:
        return json_lines.dump(self._asdict())


class Verdict(NamedTuple):
    """resumes: whether a killed script went on from its save; None: not known. sentences: for people."""

    resumes: Optional[bool] = None
    sentences: Tuple[str, ...] = ()

    def text(self) -> str:
        return json_lines.dump(dict(self._asdict(), schema=1)).decode("utf-8", "replace")


def read_order(text: str) -> Order:
    """Return what the file asks for. Raises ValueError."""
    found = json.loads(text)
    return Order(**{name: found[name] for name in Order._fields})


def read_lines(content: bytes) -> "List[Line]":
    """Return the lines of one start; what is not sound is left out."""
    records = [json_lines.load(line) for line in content.splitlines()]
    return [_line(record) for record in records if record is not None and whole(record.get("step")) is not None]


def _line(record: Mapping[str, Any]) -> Line:
    sample = record.get("sample")
    values = [number(value) for value in sample] if isinstance(sample, list) else []
    # What is no finite number differs from everything.
    finite = [float("nan") if value is None else value for value in values]
    step, time = whole(record.get("step")) or 0, number(record.get("time")) or 0.0
    digest, part, saved = (str(record.get(name, "")) for name in ("hash", "part", "saved"))
    return Line(step, time, digest, finite, number(record.get("loss")), part, saved, record.get("acted") is True)


def read_verdict(text: str) -> Verdict:
    """Return what a verdict says; what is not sound is not known."""
    found = json_lines.load(text.encode("utf-8", "replace")) or {}
    resumes, sentences = found.get("resumes"), found.get("sentences")
    told = tuple(map(str, sentences)) if isinstance(sentences, list) else ()
    return Verdict(resumes if isinstance(resumes, bool) else None, told)


def key_of(code: str, *program: "Sequence[str]") -> str:
    """Return the name of a verdict: the same for the same code, and the same program with the same arguments."""
    return hashlib.sha256(json.dumps([code, *program]).encode("utf-8", "replace")).hexdigest()
