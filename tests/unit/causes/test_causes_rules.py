"""The rules for causes: one file, two readers (awk in the job, Python on the login node), the same answers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slurmddp.causes.find import find, node_logs
from slurmddp.causes.rules import PATTERNS, RULES, Rule, rules, split_rules
from slurmddp.records.cause import CONSEQUENCE, USER, Cause
from slurmddp.runs.cause import find_cause
from slurmddp.runs.layout import RunFolder
from tests.helpers import SHELL
from tests.programs.test_render_job import LOGS
from tests.unit.runs.test_runs_cause import KILLED, TORCHRUN

KNOWN = rules()
AWKS = [
    pytest.param(name, marks=pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed"))
    for name in ("mawk", "gawk")
]
#: Texts of one attempt's files, by name.
Texts = Mapping[str, bytes]


class Attempt:
    """The logs of one attempt, judged by cause.sh with one awk, and by Python."""

    def __init__(self, root: Path, awk: str) -> None:
        self.tasks = False
        self.run = root / "run"
        self.logs = self.run / "logs"
        self.logs.mkdir(parents=True)
        programs = root / "bin"
        programs.mkdir()
        (programs / "awk").symlink_to(str(shutil.which(awk)))
        self.environment = {"PATH": f"{programs}:{os.environ['PATH']}", "LANG": "C.UTF-8"}

    def write(self, texts: Texts, ranks: str = "") -> None:
        """Replace all files."""
        for path in [*self.logs.iterdir(), *self.run.glob("ranks")]:
            path.unlink()
        for name, text in texts.items():
            (self.logs / name).write_bytes(text)
        if ranks:
            (self.run / "ranks").write_text(ranks)

    def by_bash(self, noted: str = "") -> str:
        """What job.sh finds: RANK NODE TEXT, "" for nothing."""
        lines = [f"source {SHELL}/messages.sh", f"source {SHELL}/cause.sh", "set -uo pipefail"]
        lines += [f"run={self.run} logs={self.logs}", f"cause_in_logs '{noted}'"]
        lines[:0] = ["tasks_per_node=2"] * self.tasks
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)], env=self.environment, stdin=subprocess.DEVNULL, capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode().removesuffix("\n")

    def by_python(self, noted: str = "") -> str:
        """The same by Python; bash counts rank and node among its 400 bytes."""
        place = self.run / "ranks"
        ranks = place.read_text().splitlines() if place.exists() else []
        told = Cause(noted, kind=CONSEQUENCE) if noted else None
        found = find(node_logs(str(self.logs)), str(self.logs / "srun.err"), ranks, told, tasks_are_ranks=self.tasks)
        if found is None or found is told:
            return ""
        line = f"{'-' if found.rank is None else found.rank} {found.node} {found.text}"
        return line.encode()[:400].decode(errors="ignore")


@pytest.fixture(params=AWKS)
def attempt(request: pytest.FixtureRequest, tmp_path: Path) -> Attempt:
    return Attempt(tmp_path, request.param)


def with_example(rule: Rule) -> Texts:
    """The files that a rule's own example is about."""
    name = "srun.err" if rule.source == "srun.err" else "node1.log"
    return {name: "".join(f"{line}\n" for line in rule.examples).encode()}


GONE = "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:5"
LOST = f"[rank0]: {GONE}\n".encode()
EXIT = KILLED.format(code=1, name="?").encode()
START = "E1122 20:{:02}:00.000000 1 api.py:1] failed (exitcode: -{}) local_rank: {} (pid: 7) of binary: python\n"
BOOM = "3 node1 ValueError: boom"
#: Files of an attempt -> the answer of both.
TABLE: dict[str, tuple[Texts, str]] = {
    **{rule.name: (with_example(rule), rule.finds) for rule in KNOWN.rules},
    **{
        kind: (
            {"node1.log": text.replace("node N:", "node node1:").encode()},
            f"{'-' if rank is None else rank} node1 {cause}",
        )
        for kind, (text, rank, cause) in LOGS.items()
    },
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
        "3 node1 ValueError: b[31moä",
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
def test_both_find_the_same_cause(attempt: Attempt, kind: str) -> None:
    texts, cause = TABLE[kind]
    attempt.write(texts, RANKS if kind in (*LOGS, "the newest start that failed") else "")
    assert (attempt.by_bash(), attempt.by_python()) == (cause, cause)


def test_with_a_task_for_each_rank_both_name_the_rank(attempt: Attempt) -> None:
    attempt.tasks = True
    attempt.write({"srun.err": b"srun: error: node2: tasks 3-4: Killed\n"})
    assert attempt.by_bash() == attempt.by_python() == "3 node2 srun's task: Killed"


@pytest.mark.parametrize("kind", ["a cascade alone", "an exit code", "a cascade before an exit code", "a signal"])
def test_beside_a_cascade_of_an_event_only_what_is_better_counts(attempt: Attempt, kind: str) -> None:
    texts, cause = TABLE[kind]
    attempt.write(texts, RANKS)
    cause = cause if kind == "a signal" else ""
    assert (attempt.by_bash("0 node1 x"), attempt.by_python("0 node1 x")) == (cause, cause)


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
def test_both_agree_on_any_mixture_of_lines(
    attempt: Attempt, one: bytes, two: bytes, errors: bytes, ranks: str, noted: str
) -> None:
    attempt.write({"node1.log": one, "node2.log": two, "srun.err": errors}, ranks)
    assert attempt.by_bash(noted) == attempt.by_python(noted)


EVENTS = {
    "a lost connection in a later line": {"kind": "RuntimeError", "message": "[pair.cc:553] broken\n Connection reset"},
    "a lost connection": {"kind": "RuntimeError", "message": "Connection reset by peer"},
    "an error": {"kind": "ValueError", "message": 'no "book"\nConnection reset?'},
    "another error": {"kind": "ValueError", "message": "no book"},
}


@pytest.mark.parametrize("log", ["nothing", "torchrun's traceback", "a signal without a name", "an exit code"])
@pytest.mark.parametrize("event", EVENTS)
def test_both_weigh_an_event_against_the_logs_the_same_way(tmp_path: Path, event: str, log: str) -> None:
    attempt = Attempt(tmp_path, "awk")
    folder = RunFolder(attempt.run)
    folder.attempt_logs(0).mkdir()
    texts, _ = TABLE[log]
    for name, text in texts.items():
        (folder.attempt_logs(0) / name).write_bytes(text)
    line = json.dumps({"event": "error", "attempt": 0, "rank": 0, "node": "node0", **EVENTS[event]})
    folder.events.write_text(line + "\n")
    lines = [f"source {SHELL}/{name}.sh" for name in ("messages", "cause", "watch")]
    lines += ["set -uo pipefail", f"run={attempt.run} logs={folder.attempt_logs(0)}"]
    lines += ['note "$(<"$run/events.jsonl")"', 'cause_text "$(best_cause "$noted")"']
    done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    by_python = find_cause(folder, 0)
    assert by_python is not None and re.sub(r" \(more in [^()]*\)$", "", by_python.line()) == done.stdout[:-1]


#: Patterns that a line contains or does not: where their match ends does not matter.
YES_OR_NO = ("match", "unless", "until", "after")
BRACKET = re.compile(r"\[(\^?\]?[^\]]*)\]")


@pytest.mark.parametrize("rule", KNOWN.rules, ids=[rule.name for rule in KNOWN.rules])
def test_a_rule_stays_within_the_dialect_of_all_readers(rule: Rule) -> None:
    assert rule.finds and rule.examples and rule.source in ("log", "srun.err", "text")
    assert rule.source != "text" or rule.kind in (CONSEQUENCE, USER)
    keys = {"in", "kind", "order", "take", "says", "says_of_task", *PATTERNS}
    assert set(rule.keys) <= keys, set(rule.keys) - keys
    for key in set(PATTERNS) & set(rule.keys):
        pattern = rule.keys[key]
        assert pattern.isascii() and pattern.isprintable() and pattern == pattern.strip()
        for inside in BRACKET.findall(pattern):
            assert not re.search(r"\[[:.=]|\\", inside) and "-" not in re.sub(
                "[a-z]-[a-z]|[A-Z]-[A-Z]|[0-9]-[0-9]", "", inside
            )
        bare = BRACKET.sub("x", pattern)
        assert not re.search(r"[\\{}\[\]/]|[*+?][*+?]|\([?*+)|]|\|[|)*+?]|^[|*+?]|\|$|\^[*+?]", bare), pattern
        assert not re.search(r"(?<![(|])(?<!^)\^|\$(?![)|])(?!$)", bare), pattern
        assert key in YES_OR_NO or not re.search(r"[()|]", bare), pattern
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(pattern)


def test_each_place_of_a_key_is_where_its_readers_expect_it() -> None:
    """bash reads `kind` before `match`; awk and bash use one pattern, and one order, for all cascades."""
    text = split_rules(RULES.read_text())[0]
    assert len(re.findall("^rule ", text, re.MULTILINE)) == len(KNOWN.rules) == len({rule.name for rule in KNOWN.rules})
    for block in text.split("\n\n"):
        names = [line.split(" ")[0] for line in block.splitlines() if not line.startswith("#")]
        assert names[:1] in ([], ["rule"], ["signal_name"])
        assert "kind" not in names or names.index("kind") < names.index("match")
    assert len({rule.order for rule in KNOWN.consequences}) == 1
    orders = [rule.order for rule in KNOWN.rules if rule.source != "text"]
    assert all(orders.count(rule.order) == 1 for rule in KNOWN.rules if rule.newest)
    assert not any("^" in rule.keys["match"] for rule in KNOWN.consequences), (
        "cause.sh also matches them on whole lines"
    )


#: Every pattern, and whether it says where a value begins: then its end counts, too.
ENDS = {rule.keys[key]: key not in YES_OR_NO for rule in KNOWN.rules for key in PATTERNS if key in rule.keys}
POSITIONS = r"""
BEGIN {
  count = split(ENVIRON["patterns"], pattern, "\n")
  while ((getline line < ENVIRON["file"]) > 0) {
    for (i = 1; i <= count; i++) { match(line, pattern[i]); printf "%d %d;", RSTART, RSTART + RLENGTH - 1 }
    print ""
  }
}
"""


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW)
@given(log=LOG)
def test_each_pattern_matches_the_same_bytes_in_awk_and_in_python(attempt: Attempt, log: bytes) -> None:
    """And in bash, the patterns of texts."""
    file = attempt.run / "lines"
    file.write_bytes(log.replace(b"\0", b"") + b"\n")
    variables = {"LC_ALL": "C", "patterns": "\n".join(ENDS), "file": str(file)}
    done = subprocess.run(
        ["awk", POSITIONS], env={**attempt.environment, **variables}, stdin=subprocess.DEVNULL, capture_output=True
    )
    for line, row in zip(file.read_bytes().split(b"\n"), done.stdout.decode().splitlines(), strict=False):
        for (pattern, ends), place in zip(ENDS.items(), row.split(";"), strict=False):
            found = re.search(pattern.encode(), line)
            begin, end = map(int, place.split(" "))
            assert (begin > 0) == bool(found), (pattern, line)
            assert not found or (begin, end if ends else found.end()) == (found.start() + 1, found.end()), (
                pattern,
                line,
            )
    lines = [f"source {SHELL}/cause.sh", 'while IFS= read -r line; do [[ "$line" =~ $consequence ]]; echo $?']
    lines += ['[[ "$line" =~ $user_error ]]; echo $?', f"done <{file}"]
    told = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    texts = [line.decode("latin-1") for line in file.read_bytes().split(b"\n")[:-1]]
    expected = []
    for text in texts:
        for kind in (CONSEQUENCE, USER):
            matches = [
                re.search(rule.keys["match"], text)
                for rule in KNOWN.rules
                if rule.source == "text" and rule.kind == kind
            ]
            expected.append("0" if any(matches) else "1")
    assert told.stdout.split() == expected
