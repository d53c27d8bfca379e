"""What the measurement of the network found: RUN/logs/attempt-NNN/network/verdict.json, which rank 0 of it writes."""

from typing import Any, Dict, List, Mapping, NamedTuple

from slurmddp.records.events import keys_of, read_facts
from slurmddp.records.job_events import Measured

VERSION = 1
#: Results. The run must not start on the last one.
OK, LOW, GROUPS, NONE, TCP = "ok", "low", "groups", "none", "tcp"


class Verdict(NamedTuple):
    """What it means for the run. text: for people. bad: why a node should be replaced, by node."""

    text: str
    measured: Measured
    bad: Mapping[str, str] = {}

    def lines(self) -> List[str]:
        first = "{} {}".format(self.measured.result, self.text)
        return [first, *("bad {} {}".format(node, text) for node, text in self.bad.items())]

    def write(self) -> Dict[str, Any]:
        return {"schema": VERSION, "text": self.text, "measured": keys_of(self.measured), "bad": dict(self.bad)}


def read(record: Any) -> Verdict:
    """Return what an object says. Raises ValueError if it is no verdict."""
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError("is no verdict of a measurement")
    measured, bad = record.get("measured"), record.get("bad")
    nodes = {node: str(text) for node, text in bad.items()} if isinstance(bad, dict) else {}
    return Verdict(record["text"], read_facts(Measured, measured if isinstance(measured, dict) else {}), nodes)


def not_measured(why: str) -> Verdict:
    """Return the verdict without a measurement: the run continues."""
    return Verdict("not measured: " + why, Measured(NONE))
