"""The batch host may have nothing newer than Python 3.6: there, the brain does the same."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from random import Random
from typing import Any

import pytest

from slurmddp.records import rank_events as ranks
from slurmddp.records.events import Event
from slurmddp.supervisor.brain import decide
from slurmddp.supervisor.brain.types import Around, Ledger, Marker, Moment, Settings
from slurmddp.supervisor.brain.watch import Watch
from tests.helpers import ROOT
from tests.unit.supervisor.ends import made

#: Reads cases, and writes what the brain makes of them.
PROGRAM = """
import pickle, sys
from slurmddp.supervisor.brain import decide, stopping
from slurmddp.supervisor.brain.watch import Watch
ends, (settings, ledger, seen) = pickle.load(sys.stdin.buffer)
watch = Watch(settings, ledger, 5000.0, seen[0][1])
actions = [watch.see(what, now) if hasattr(what, "facts") else watch.look(what, now) for what, now in seen]
found = [decide.decide(*end) for end in ends], actions, watch.ledger, watch.noted
sys.stdout.buffer.write(pickle.dumps(found, protocol=4))
"""


def seen(random: Random) -> list[tuple[Any, Moment]]:
    """Events and looks around, in any order."""
    facts = [
        ranks.RankStarted(1.0),
        ranks.RanksStopped(),
        ranks.RankExited(1, None, "SIGKILL"),
        ranks.Error("ValueError", "boom"),
        ranks.Hang("silent", (1,), ("node1",), "step", 9, 60.0, 60.0),
        ranks.FirstStep(1, 1.0),
        ranks.Restarted("from zero", 1, 9, 9, 9, "from zero"),
        ranks.Restarted("went on", 10, 9, 9, None, "went on"),
        ranks.StragglerBegins("node2", 3, "data", 2.0, 0.1),
        ranks.CheckpointSaved(5, 30.0, 0.1, 1, "x"),
    ]
    moments = [Moment(20.0 * number, 1000.0 + 20 * number) for number in range(400)]
    markers, stops = (None, None, Marker("done")), (None, None, "cancelled by the user")
    looks = [Around(random.choice(markers), random.choice(stops), random.randint(0, 4)) for _ in moments]
    events = [Event(random.choice(facts), now.unix, 0, "7", "node1", random.randint(0, 3)) for now in moments]
    return [(random.choice(pair), now) for *pair, now in zip(looks, events, moments, strict=True)]


def test_an_old_python_decides_the_same() -> None:
    found = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))
    if not found:
        pytest.skip("no Python 3.6 below ~/.pyenv/versions")
    random = Random(36)
    ends, events = [made(random) for _ in range(100)], seen(random)
    settings = Settings("/run", own_script=True, breaker_from_zero=2, cancel_grace=60, stop_lead=120)
    watch = Watch(settings, Ledger(), 5000.0, events[0][1])
    actions = [watch.see(what, now) if isinstance(what, Event) else watch.look(what, now) for what, now in events]
    given = pickle.dumps((ends, (settings, Ledger(), events)), protocol=4)
    done = subprocess.run([str(found[-1]), "-c", PROGRAM], input=given, capture_output=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    here = [decide.decide(*end) for end in ends], actions, watch.ledger, watch.noted
    assert pickle.loads(done.stdout) == here
    assert len({type(action) for each in actions for action in each}) >= 5
