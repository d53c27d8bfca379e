"""measure_network of slurmddp/shell/network.sh on real bash: what becomes of each verdict."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.helpers import SHELL

VALUES = """
set -uo pipefail
nodes_max=2 nodes_min=2 attempt=0 host=n1 job_id=7 exit_code=0 decision= cause= logs=$run/logs
nodes=(n1 n2 n3) chosen=(n1 n2) suspects=() excluded=()
say() { printf 'say %s\\n' "$*"; }
must_end() { false; }
mkdir -p "$logs/network"
"""


class Outcome(NamedTuple):
    """What measure_network came to: its exit code, decision, cause, nodes that train, what it said; the events."""

    lines: list[str]
    events: list[dict[str, object]]


def measure(run: Path, *verdicts: str, calls: int = 1, before: str = "") -> Outcome:
    """Call it with these verdicts, one per measurement; an empty one: the step left none."""
    for number, verdict in enumerate(verdicts):
        if verdict:
            (run / f"verdict-{number}").write_text(verdict)
    lines = [
        f"source {SHELL}/messages.sh; source {SHELL}/nodes.sh; source {SHELL}/network.sh; run={run}",
        VALUES,
        "asked=0",
        'ask_network() { echo "ask ${chosen[*]}"; rm -f "$logs/network/verdict"; '
        'cp "$run/verdict-$asked" "$logs/network/verdict" 2>/dev/null; asked=$((asked + 1)); }',
        before,
        *['measure_network; echo "code $?"'] * calls,
        'echo "decision $decision"; echo "cause $cause"; echo "chosen ${chosen[*]}"',
    ]
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    done = subprocess.run(
        ["bash"], input="\n".join(lines), env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    events = run / "events.jsonl"
    rows = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
    return Outcome(done.stdout.splitlines(), rows)


FACTS = 'facts {"result": "ok", "bus_gb_s": 187.4}\n'


def test_a_good_network_is_measured_once_for_the_same_nodes(tmp_path: Path) -> None:
    found = measure(tmp_path, "ok NCCL over IB mlx5_0..3, bus 187 GB/s\n" + FACTS, calls=2)
    text = "NCCL over IB mlx5_0..3, bus 187 GB/s"
    assert found.lines == [
        "ask n1 n2",
        f"say network: {text}",
        "code 0",
        "code 0",
        "decision ",
        "cause ",
        "chosen n1 n2",
    ]
    (event,) = found.events
    assert (event["event"], event["text"]) == ("network", text) and "seconds" in event
    assert event["measured"] == {"result": "ok", "bus_gb_s": 187.4}


def test_tcp_fails_the_run_with_its_reason(tmp_path: Path) -> None:
    found = measure(tmp_path, 'tcp NCCL uses TCP ("x") - do this\n' + FACTS)
    assert found.lines[-4:] == ["code 1", "decision failed", 'cause - - NCCL uses TCP ("x") - do this', "chosen n1 n2"]


def test_a_slow_node_is_replaced_by_a_spare_and_the_others_are_measured_again(tmp_path: Path) -> None:
    low = "low bus 12 GB/s; slow: n2\n" + FACTS + "bad n2 slow network: 5 GB/s with n1\n"
    found = measure(tmp_path, low, "ok fine\n" + FACTS)
    assert [line for line in found.lines if line.startswith("ask")] == ["ask n1 n2", "ask n1 n3"]
    assert found.lines[-4:] == ["code 0", "decision ", "cause ", "chosen n1 n3"]
    (excluded,) = [row for row in found.events if row["event"] == "node_excluded"]
    assert (excluded["excluded"], excluded["reason"]) == ("n2", "network: slow network: 5 GB/s with n1")


def test_a_slow_node_without_a_spare_is_kept(tmp_path: Path) -> None:
    low = "low bus 12 GB/s; slow: n2\n" + FACTS + "bad n2 slow network\n"
    found = measure(tmp_path, low, before="nodes=(n1 n2)")
    assert found.lines[-4:] == ["code 0", "decision ", "cause ", "chosen n1 n2"]
    assert [row["event"] for row in found.events] == ["network"]


def test_a_measurement_that_failed_stops_nothing(tmp_path: Path) -> None:
    found = measure(tmp_path, "")
    assert "code 0" in found.lines and found.events[0]["measured"] == {"result": "none"}
    assert found.events[0]["text"] == f"not measured: see {tmp_path}/logs/network"


def test_one_node_is_not_measured(tmp_path: Path) -> None:
    assert measure(tmp_path, before="chosen=(n1)").lines[0] == "code 0"
