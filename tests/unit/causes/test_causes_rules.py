"""The rules for causes: what lines of logs come to."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmddp.causes.find import find, node_logs
from slurmddp.causes.rules import PATTERNS, Rule, rules, rules_text, split_rules
from slurmddp.records.cause import CONSEQUENCE, GPU, USER, Cause
from slurmddp.run.cause import find_cause
from slurmddp.run.layout import RunFolder
from tests.programs.test_render_job import LOGS
from tests.unit.run.test_runs_cause import KILLED, TORCHRUN

KNOWN = rules()
#: Texts of one attempt's files, by name.
Texts = Mapping[str, bytes]


class Attempt:
    """The logs of one attempt."""

    def __init__(self, root: Path) -> None:
        self.run = root / "run"
        self.logs = self.run / "logs"
        self.logs.mkdir(parents=True)

    def write(self, texts: Texts, ranks: str = "") -> None:
        """Replace all files."""
        for path in [*self.logs.iterdir(), *self.run.glob("ranks")]:
            path.unlink()
        for name, text in texts.items():
            (self.logs / name).write_bytes(text)
        if ranks:
            (self.run / "ranks").write_text(ranks)

    def found(self, noted: str = "", *, tasks: bool = False) -> str:
        """Rank (or -), node and text of the cause; "" for nothing."""
        place = self.run / "ranks"
        ranks = place.read_text().splitlines() if place.exists() else []
        told = Cause(noted, kind=CONSEQUENCE) if noted else None
        found = find(node_logs(str(self.logs)), str(self.logs / "srun.err"), ranks, told, tasks_are_ranks=tasks)
        if found is None or found is told:
            return ""
        return f"{'-' if found.rank is None else found.rank} {found.node or '-'} {found.text}"


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    return Attempt(tmp_path)


def with_example(rule: Rule) -> Texts:
    """The files that a rule's own example is about."""
    name = "srun.err" if rule.source == "srun.err" else "node1.log"
    return {name: "".join(f"{line}\n" for line in rule.examples).encode()}


GONE = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:5"
LOST = f"[rank0]: {GONE}\n".encode()
EXIT = KILLED.format(code=1, name="?").encode()
START = "E1122 20:{:02}:00.000000 1 api.py:1] failed (exitcode: -{}) local_rank: {} (pid: 7) of binary: python\n"
BOOM = "3 node1 ValueError: boom"
#: Files of an attempt -> the answer.
TABLE: dict[str, tuple[Texts, str]] = {
    **{rule.name: (with_example(rule), rule.finds) for rule in KNOWN.rules},
    **{
        kind: (
            {"node1.log": text.replace("node N:", "node node1:").encode()},
            f"{'-' if rank is None else rank} node1 {cause}",
        )
        for kind, (text, rank, cause) in LOGS.items()
    },
    "tasks that srun killed itself": (
        {"srun.err": b"srun: Job step aborted: Waiting up to 32 seconds\nsrun: error: node1: task 0: Killed\n"},
        "",
    ),
    "nothing": ({"node1.log": b"step 1\nErrors: 3\nErrorProne ready\nError\n"}, ""),
    "no file": ({}, ""),
    "an empty file": ({"node1.log": b"", "srun.err": b""}, ""),
    "torchrun's traceback": ({"node1.log": TORCHRUN.encode()}, BOOM),
    "a cascade on an earlier node": ({"node0.log": LOST, "node1.log": TORCHRUN.encode()}, BOOM),
    "a cascade alone": ({"node1.log": LOST}, f"0 node1 {GONE}"),
    "a killed rank after a cascade": (
        {"node0.log": LOST, "node2.log": KILLED.format(code=-9, name="SIGKILL").encode()},
        "5 node2 killed by SIGKILL (out of memory?)",
    ),
    "a signal without a name": (
        {"node2.log": KILLED.format(code=-40, name="?").encode()},
        "5 node2 killed by signal 40",
    ),
    "no signal at all": ({"node2.log": KILLED.format(code=-99, name="?").encode()}, ""),
    "ended by torchrun": ({"node2.log": KILLED.format(code=-15, name="SIGTERM").encode()}, ""),
    "an exit code": ({"node2.log": EXIT}, "5 node2 exited with code 1"),
    "a cascade before an exit code": (
        {"node0.log": LOST, "node2.log": EXIT},
        f"0 node0 {GONE}",
    ),
    "an exception of a report's rank": (
        {"node1.log": TORCHRUN.encode() + KILLED.format(code=-9, name="SIGKILL").encode()},
        BOOM,
    ),
    "a report without an end": ({"node1.log": b"Root Cause\n" + b"\n" * 10 + b"exitcode : -9 (\n"}, ""),
    "a report of ten lines": (
        {"node1.log": b"Root Cause\n rank : 4\n" + b"\n" * 8 + b"exitcode : -9 (\n"},
        "4 node1 killed by SIGKILL (out of memory?)",
    ),
    "the newest start that failed": (
        {
            "node1.log": START.format(30, 9, 0).encode(),
            "node2.log": START.format(40, 11, 1).encode() + START.format(50, 15, 0).encode(),
            "node3.log": START.format(20, 7, 0).encode(),
        },
        "3 node2 killed by SIGSEGV",
    ),
    "srun's other messages": (
        {"srun.err": b"srun: error: node1: task 0: Terminated\nsrun: error: node2: tasks 1-3: Exited with exit code 1"},
        "",
    ),
    "lines that end as on Windows": ({"node1.log": b"[rank3]: ValueError: boom\r\nKeyboardInterrupt\r\n"}, BOOM),
    "bytes that are no text": (
        {"node1.log": b"\xff\x00\n[rank3]: ValueError: b\xff\x1b[31mo\xc3\xa4\n"},
        "3 node1 ValueError: boä",
    ),
    "a rank of many digits": ({"node1.log": b"[rank0000000012]: ValueError: x\n"}, "- node1 ValueError: x"),
    "a rank with zeros": ({"node1.log": b"[rank007]: ValueError: x\n"}, "7 node1 ValueError: x"),
    "an exit code of many digits": ({"node1.log": b"Root Cause\n exitcode : 12345678901\n"}, ""),
    "a long line": ({"node1.log": b"x" * 1_500_000 + b"\n" + b"a" * 1996 + b"Error: x\n" + LOST}, f"0 node1 {GONE}"),
    "NCCL's own log": ({"nccl.node1.7.log": TORCHRUN.encode(), "node1.log": LOST}, f"0 node1 {GONE}"),
    "a cascade that is also the agent's signal": (
        {"node1.log": LOST + b"SignalException: Connection reset\nAttributeError: no _str\n"},
        f"0 node1 {GONE}",
    ),
    "a flood of cascades": ({"node1.log": LOST * 9000 + TORCHRUN.encode()}, BOOM),
}
RANKS = "node1\nnode1\nnode2\nnode2\n"


@pytest.mark.parametrize("kind", TABLE)
def test_what_the_logs_say(attempt: Attempt, kind: str) -> None:
    texts, cause = TABLE[kind]
    attempt.write(texts, RANKS if kind in (*LOGS, "the newest start that failed") else "")
    assert attempt.found() == cause


def test_with_a_task_for_each_rank_srun_names_the_rank(attempt: Attempt) -> None:
    attempt.write({"srun.err": b"srun: error: node2: tasks 3-4: Killed\n"})
    assert attempt.found(tasks=True) == "3 node2 srun's task: Killed"


@pytest.mark.parametrize("kind", ["a cascade alone", "an exit code", "a cascade before an exit code", "a signal"])
def test_beside_a_cascade_of_an_event_only_what_is_better_counts(attempt: Attempt, kind: str) -> None:
    texts, cause = TABLE[kind]
    attempt.write(texts, RANKS)
    assert attempt.found("0 node1 x") == (cause if kind == "a signal" else "")


#: Lines that mean something, and some that only look like it.
LINES = sorted(
    {line for rule in KNOWN.rules for line in rule.examples}
    | {
        line
        for texts, _ in TABLE.values()
        for text in texts.values()
        for line in text[:5000].decode("latin-1").split("\n")
    }
    | {START.format(*each)[:-1] for each in ((10, 9, 0), (59, 40, 1), (20, 99, 0))}
    | {"SignalException: Process 7 got signal: 15", "SignalException: Connection reset", "Root Cause Connection reset"}
    | {
        "[rank1]: SignalException",
        " exitcode: -9 Broken pipe",
        " rank: 3",
        "[rank2]: PeerError: rank 1 on node1 failed",
    }
)
#: Two of them may stand in one line, cut anywhere.
MIXED = st.builds(
    lambda first, end, second: (first[:end] + second).encode("latin-1"),
    st.sampled_from(LINES),
    st.integers(0, 80),
    st.sampled_from(["", "", "", "\r", *LINES]),
)
LOG = st.lists(st.one_of(st.sampled_from([line.encode("latin-1") for line in LINES]), MIXED), max_size=30).map(
    b"\n".join
)
SLOW = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(one=LOG, two=LOG, errors=LOG, ranks=st.sampled_from(["", RANKS]), noted=st.sampled_from(["", "0 node1 x"]))
def test_any_mixture_of_lines_has_an_answer(
    attempt: Attempt, one: bytes, two: bytes, errors: bytes, ranks: str, noted: str
) -> None:
    """One line, of a node that has a log or that srun names; the same with the logs in another order."""
    attempt.write({"node1.log": one, "node2.log": two, "srun.err": errors}, ranks)
    found = attempt.found(noted)
    assert "\n" not in found and found == attempt.found(noted)
    assert not found or re.match(r"(-|[0-9]{1,9}) \S* \S", found)


EVENTS = {
    "a lost connection in a later line": {"kind": "RuntimeError", "message": "[pair.cc:553] broken\n Connection reset"},
    "a lost connection": {"kind": "RuntimeError", "message": "Connection reset by peer"},
    "an error that a connection lost": {"kind": "ValueError", "message": 'no "book"\nConnection reset?'},
    "another error": {"kind": "ValueError", "message": "no book"},
}


WEIGHED = {
    ("a lost connection", "nothing"): "rank 0 on node0: RuntimeError: Connection reset by peer",
    ("a lost connection", "torchrun's traceback"): "rank 3 on node1: ValueError: boom",
    ("a lost connection", "a signal without a name"): "rank 5 on node2: killed by signal 40",
    ("a lost connection", "an exit code"): "rank 0 on node0: RuntimeError: Connection reset by peer",
    ("a lost connection in a later line", "torchrun's traceback"): "rank 3 on node1: ValueError: boom",
    ("an error that a connection lost", "torchrun's traceback"): "rank 3 on node1: ValueError: boom",
    ("another error", "torchrun's traceback"): "rank 0 on node0: ValueError: no book",
    ("an error that a connection lost", "an exit code"): 'rank 0 on node0: ValueError: no "book"',
    ("another error", "nothing"): "rank 0 on node0: ValueError: no book",
}


@pytest.mark.parametrize(("event", "log"), WEIGHED)
def test_an_event_is_weighed_against_the_logs(tmp_path: Path, event: str, log: str) -> None:
    attempt = Attempt(tmp_path)
    folder = RunFolder(attempt.run)
    folder.attempt_logs(0).mkdir()
    texts, _ = TABLE[log]
    for name, text in texts.items():
        (folder.attempt_logs(0) / name).write_bytes(text)
    line = json.dumps({"event": "error", "attempt": 0, "rank": 0, "node": "node0", **EVENTS[event]})
    folder.events.write_text(line + "\n")
    cause = find_cause(folder, 0)
    assert cause is not None and re.sub(r" \(more in [^()]*\)$", "", cause.line()) == WEIGHED[event, log]


@pytest.mark.parametrize("rule", KNOWN.rules, ids=[rule.name for rule in KNOWN.rules])
def test_a_rule_is_whole(rule: Rule) -> None:
    assert rule.finds and rule.examples and rule.source in ("log", "srun.err", "text")
    assert rule.source != "text" or rule.kind in (CONSEQUENCE, USER, GPU)
    keys = {"in", "kind", "order", "take", "says", "says_of_task", *PATTERNS}
    assert set(rule.keys) <= keys, set(rule.keys) - keys
    for key in set(PATTERNS) & set(rule.keys):
        pattern = rule.keys[key]
        assert pattern.isascii() and pattern.isprintable() and pattern == pattern.strip()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)


def test_the_file_is_in_order() -> None:
    text = split_rules(rules_text())[0]
    assert len(re.findall("^rule ", text, re.MULTILINE)) == len(KNOWN.rules) == len({rule.name for rule in KNOWN.rules})
    for block in text.split("\n\n"):
        names = [line.split(" ")[0] for line in block.splitlines() if not line.startswith("#")]
        assert names[:1] in ([], ["rule"], ["signal_name"])
    assert len({rule.order for rule in KNOWN.of_lines("text") if rule.kind == CONSEQUENCE}) == 1
    orders = [rule.order for rule in KNOWN.rules if rule.source != "text"]
    assert all(orders.count(rule.order) == 1 for rule in KNOWN.rules if rule.newest)
