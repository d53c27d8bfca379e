"""A line of events.jsonl: a head that all lines share, and the facts of one event, which are a type of their own.

job_events.py has the types of what the job's script, its helpers and commands write, rank_events.py those of the ranks
and their agents. A type's name is the event's (`FirstStep`: `first_step`), its fields are the keys (`count_` is
`count`: tuples have a method of that name). A field with a default is left out of a line where it has that value.
"""

import re
from typing import Any, Callable, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Tuple, Type, TypeVar

from slurmddp.records import job_events, json_lines, rank_events
from slurmddp.records.values import number, whole

#: docs/files.md says when it rises.
VERSION = 4

#: The types of facts, in the order of docs/files.md.
JOB = job_events.OF_JOB
ALERTS = job_events.OF_ALERTS
COMMANDS = job_events.OF_COMMANDS
RANKS = rank_events.OF_RANKS

Facts = Tuple[Any, ...]  # of one of the types above, or Unknown
Kind = TypeVar("Kind")


class Unknown(NamedTuple):
    """An event that this version has no type for: of a later version, or of somebody else."""

    name: str
    keys: Mapping[str, Any]


class Event(NamedTuple):
    """A line. What is not known, or not sound, is None."""

    facts: Facts
    time: Optional[float] = None  # unix seconds
    attempt: Optional[int] = None  # of the job's script
    job_id: Optional[str] = None  # of Slurm
    node: Optional[str] = None  # node, rank: of the writer; where `facts` has a field of that name, as that says
    rank: Optional[int] = None
    lines_lost: Optional[int] = None  # how many lines are missing before this one, after a full disk

    @property
    def name(self) -> str:
        """Return the event's name, as in the file."""
        return self.facts.name if isinstance(self.facts, Unknown) else NAMES[type(self.facts)]

    def write(self) -> Dict[str, Any]:
        """Return the line's object."""
        time = None if self.time is None else round(self.time, 3)
        head = {"time": time, "event": self.name, "attempt": self.attempt, "job_id": self.job_id, "node": self.node}
        head.update(rank=self.rank, lines_lost=self.lines_lost)
        return dict({key: value for key, value in head.items() if value is not None}, **keys_of(self.facts))


def read(line: Mapping[str, Any]) -> Optional[Event]:
    """Return what a line's object says; None if it names no event."""
    name = line.get("event")
    if not isinstance(name, str):
        return None
    made = TYPES.get(name)
    facts = Unknown(name, {key: value for key, value in line.items() if key not in _HEAD})  # type: Any
    if made is not None:
        facts = read_facts(made, line)
    job_id, node = (text if isinstance(text, str) else None for text in (line.get("job_id"), line.get("node")))
    attempt, rank, lost = (whole(line.get(key)) for key in ("attempt", "rank", "lines_lost"))
    return Event(facts, number(line.get("time")), attempt, job_id, node, rank, lost)


def parse(line: bytes) -> Optional[Event]:
    """Return what a line of the file says; None if it is no event."""
    record = json_lines.load(line)
    return None if record is None else read(record)


def of(events: Iterable[Event], kind: Type[Kind]) -> Iterator[Tuple[Event, Kind]]:
    """Yield the events of one type, each with its facts."""
    for event in events:
        if isinstance(event.facts, kind):
            yield event, event.facts


def newest(events: "Iterable[Event]", kind: Type[Kind]) -> Optional[Kind]:
    """Return the facts of the last event of one type; None if there is none. A sequence is read from its end."""
    backwards = reversed(events) if isinstance(events, (list, tuple)) else reversed(list(events))
    return next((facts for _, facts in of(backwards, kind)), None)


def names(*kinds: type) -> List[str]:
    return [NAMES[kind] for kind in kinds]


def keys_of(facts: Facts) -> Dict[str, Any]:
    """Return the keys of an event as its line has them."""
    if isinstance(facts, Unknown):
        return dict(facts.keys)
    defaults = getattr(type(facts), "_field_defaults", {})
    keys = {}  # type: Dict[str, Any]
    for name in getattr(facts, "_fields", ()):
        value = getattr(facts, name)
        if name == _OPEN:
            keys.update(value)
        elif name not in defaults or value != defaults[name]:
            keys[name.rstrip("_")] = keys_of(value) if hasattr(value, "_fields") else value
    return keys


#: Keys of the head. The field that takes all keys of a line that no other field has: the figures of a task.
_HEAD = frozenset(("time", "event", "attempt", "job_id", "node", "rank", "lines_lost"))
_OPEN = "figures"


def _plain(*kinds: type) -> Callable[[Any], Any]:
    return lambda value: value if isinstance(value, kinds) else None


def _number(value: Any) -> Any:
    return value if number(value) is not None else None


def _many(sound: Callable[[Any], Any]) -> Callable[[Any], Tuple[Any, ...]]:
    def each(value: Any) -> Tuple[Any, ...]:
        items = [sound(one) for one in value] if isinstance(value, list) else []
        return tuple(one for one in items if one is not None)

    return each


def _numbers(value: Any) -> Dict[str, float]:
    items = value.items() if isinstance(value, dict) else ()
    return {name: one for name, one in items if number(one) is not None}


#: What is kept of a value, by the type of its field.
_SOUND = {
    str: lambda value: value if isinstance(value, str) else "",
    Optional[str]: _plain(str),
    Optional[int]: whole,
    Optional[float]: _number,
    Optional[bool]: _plain(bool),
    Tuple[str, ...]: _many(_plain(str)),
    Tuple[int, ...]: _many(whole),
    Mapping[str, float]: _numbers,
    Mapping[str, Any]: lambda value: value if isinstance(value, dict) else {},
    Optional[job_events.Measured]: lambda value: read_facts(job_events.Measured, value),
    Optional[rank_events.Validation]: lambda value: read_facts(rank_events.Validation, value),
}  # type: Dict[Any, Callable[[Any], Any]]


def read_facts(made: Any, line: Any) -> Any:
    """Return the facts of a type; None if the line is no object. What is not sound counts as absent."""
    if not isinstance(line, dict):
        return None
    values = []
    for name, key, sound in _FIELDS[made]:
        if name == _OPEN:
            known_keys = {key for _, key, _ in _FIELDS[made]} | _HEAD
            values.append({key: value for key, value in line.items() if key not in known_keys})
        elif key in line:
            values.append(sound(line[key]))
        else:
            values.append(made._field_defaults[name] if name in made._field_defaults else sound(None))
    return made(*values)


def _snake(kind: type) -> str:
    return re.sub("(?<!^)([A-Z])", r"_\1", kind.__name__).lower()


#: Types by the events' names, and the other way round.
TYPES = {_snake(kind): kind for kinds in (JOB, ALERTS, COMMANDS, RANKS) for kind in kinds}  # type: Dict[str, Any]
NAMES = {kind: name for name, kind in TYPES.items()}
_FIELDS = {
    kind: [(name, name.rstrip("_"), _SOUND[hint]) for name, hint in kind.__annotations__.items()]
    for kind in (*TYPES.values(), job_events.Measured, rank_events.Validation)
}  # type: Dict[Any, Any]
