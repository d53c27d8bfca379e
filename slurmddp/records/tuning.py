"""What `slurmddp tune` asks of the ranks, and what they measured: files in the run folder."""

import json
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

#: In the run folder: the request, and the answer of rank 0.
REQUEST, RESULT = "tune.json", "tuned.json"


class Order(NamedTuple):
    """margin: share of the memory that stays free. memory: bytes per rank; None: the GPU's, or unknown."""

    margin: float = 0.1
    memory: Optional[int] = None

    def text(self) -> str:
        return json.dumps(self._asdict())


class Trial(NamedTuple):
    """Some steps of one rank alone. peak: bytes; None: not measured, such as after running out of memory."""

    micro: int
    recompute: bool  # activation checkpointing
    fits: bool
    samples_per_second: Optional[float] = None
    peak: Optional[int] = None


class Point(NamedTuple):
    """Steps of the whole global batch on some of the ranks. parts: seconds of a step by part."""

    nodes: int
    ranks: int
    samples_per_second: float
    parallel: str = "DDP"
    micro: int = 0
    accumulation: int = 0
    recompute: bool = False
    parts: Mapping[str, float] = {}
    peak: Optional[int] = None
    all_reduce: Optional[float] = None  # seconds of one over all gradients, alone


class Tuned(NamedTuple):
    """All that was measured. What is None or empty was not, and a note says why.

    batch: the global batch. limit: bytes of memory per rank. parameters, state: bytes of the model's, and of the
    optimizer's for them. activations: bytes that forward keeps per sample, by activation checkpointing ("off", "on").
    loader: samples per second of rank 0's loader alone. noise: squared norms of gradients, (small, big) per step, over
    noise_batches samples.
    """

    device: str
    batch: Optional[int]
    margin: float = 0.0
    limit: Optional[int] = None
    parameters: int = 0
    state: int = 0
    activations: Mapping[str, int] = {}
    trials: Tuple[Trial, ...] = ()
    points: Tuple[Point, ...] = ()
    loader: Optional[float] = None
    noise: Tuple[Tuple[float, float], ...] = ()
    noise_batches: Tuple[int, int] = (0, 0)
    notes: Tuple[str, ...] = ()

    def write(self) -> Dict[str, Any]:
        lists: Dict[str, List[Dict[str, Any]]] = {
            "trials": [dict(each._asdict()) for each in self.trials],
            "points": [dict(each._asdict()) for each in self.points],
        }
        return dict(self._asdict(), schema=1, **lists)


def read_order(text: str) -> Order:
    """Return what the file asks for. Raises ValueError."""
    found = json.loads(text)
    return Order(**{name: found[name] for name in Order._fields})


def read(text: str) -> Tuned:
    """Return what rank 0 wrote. Raises ValueError, also for the file of another version."""
    found = json.loads(text)
    try:
        known = {name: found[name] for name in Tuned._fields}
        known["trials"] = tuple(Trial(**each) for each in known["trials"])
        known["points"] = tuple(Point(**each) for each in known["points"])
        known["noise"] = tuple((small, big) for small, big in known["noise"])
        small, big = known["noise_batches"]
        return Tuned(**dict(known, noise_batches=(small, big), notes=tuple(known["notes"])))
    except (KeyError, TypeError) as error:
        raise ValueError("is no result of slurmddp tune: {!r}".format(error)) from error
