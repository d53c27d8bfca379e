"""Single functions of slurmddp/shell on real bash, in moments that seldom come: half lines, thousands of nodes."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from random import Random

import pytest

from slurmddp.records.progress import read_failures, stuck
from tests.helpers import SHELL

#: What job.sh assigns, and functions of other files.
VALUES = """
set -uo pipefail
scheduler=slurm nodes_max=4096 nodes_min=1 elastic= preflight=yes breaker=3 stop_lead= cancel_grace= own_script=
must_save= join_timeout=600
attempt=0 host=node1 job_id=7 slurm_job=7 ending= child= preempted_at= slurm_state=RUNNING
say() { :; }
alert() { :; }
"""


def bash(folder: Path, files: str, *lines: str, **variables: str) -> str:
    """Run lines after these files of slurmddp/shell (without .sh); `run` and `logs` lie in the folder."""
    (folder / "logs" / "preflight").mkdir(parents=True, exist_ok=True)
    sources = [f"source {SHELL}/{name}.sh" for name in files.split()]
    text = "\n".join([*sources, VALUES, f"run={folder} logs={folder}/logs", *lines])
    environment = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **variables}
    done = subprocess.run(["bash"], input=text, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("cut", [1, 12, 25, 36])
def test_a_half_written_event_is_read_once_it_is_whole(tmp_path: Path, cut: int) -> None:
    """Ranks write to the file while job.sh reads it."""
    line = json.dumps({"event": "rank_started", "rank": 0}) + "\n"
    assert cut < len(line)
    lines = [f"exec {{events}}<{tmp_path}/events.jsonl", "new_attempt"]
    for part in (line[:cut], line[cut:], line + line[:cut], line[cut:-1], "\n"):
        lines += [f"printf %s '{part}' >>{tmp_path}/events.jsonl", "read_events", "echo $starts"]
    (tmp_path / "events.jsonl").touch()
    assert bash(tmp_path, "messages watch cause", "best_cause() { :; }", *lines).split() == ["0", "1", "2", "2", "3"]


@pytest.mark.parametrize("before", ["say", "printf", "alert"])
def test_a_cancel_between_two_lines_of_another_request_stays(tmp_path: Path, before: str) -> None:
    """USR2 of the time limit and `slurmddp cancel` at once: the user's reason decides, and nobody requeues the job."""
    write = f"echo 'cancelled by the user' >{tmp_path}/part && mv {tmp_path}/part {tmp_path}/stop"
    lines = [f'inject() {{ [[ "$BASH_COMMAND" != "{before} "* ]] || {{ trap - DEBUG; {write}; }}; }}']
    lines += ["set -T", "trap inject DEBUG", "ask_to_stop 'time limit' 2>/dev/null"]
    bash(tmp_path, "messages signals", *lines)
    assert (tmp_path / "stop").read_text() == "cancelled by the user\n"


def test_signals_in_the_midst_of_expansions_are_not_lost(tmp_path: Path) -> None:
    """bash 5.2 runs a trap while it parses `$(...)`, and fails: "trap: line 2: unexpected EOF". See messages.sh."""
    (tmp_path / "events.jsonl").touch()
    storm = "for ((n = 0; n < 1000; n++)); do kill -TERM $$; sleep 0.001; done"
    lines = ["handled=0 excluded=(n2) nodes=(n1 n2)", "trap 'handled=$((handled + 1))' TERM", f"({storm}) &"]
    lines += [
        "storm=$!",
        'while kill -0 "$storm" 2>/dev/null; do event x "\\"a\\": `json "$handled"`"; drop_excluded; done',
    ]
    lines += ["trap - TERM", "((handled > 50)) || echo $handled", 'echo "${nodes[@]}"']
    assert bash(tmp_path, "messages nodes", *lines) == "n1\n"


#: It ignores signals before it expands anything.
DEAF = {"requeue/chain.sh"}


def test_what_has_traps_parses_nothing_at_run_time() -> None:
    sources = re.findall(r"\$shell/(\S+\.sh)", (SHELL / "supervisor.sh").read_text() + (SHELL / "guard.sh").read_text())
    files = {"supervisor.sh", "guard.sh", *sources} - DEAF
    assert len(files) > 15
    for name in files:
        code = re.sub(r"^\s*#.*$", "", (SHELL / name).read_text(), flags=re.MULTILINE)
        assert not re.findall(r"\$\((?!\().*|[<>]\(.*", re.sub(r"`[^`]*`", "", code)), name


def checked(tmp_path: Path, count: int, verdict: str) -> tuple[list[str], list[str]]:
    """The nodes that are left, and the excluded ones, after a preflight with that verdict."""
    (tmp_path / "logs/preflight").mkdir(parents=True)
    (tmp_path / "logs/preflight/verdict").write_text(verdict)
    lines = [
        "ask_nodes() { missed=(); }",
        "must_end() { false; }",
        f"mapfile -t nodes < <(printf 'n%d\\n' {{1..{count}}})",
    ]
    lines += ["check_nodes", 'echo "${nodes[*]}"', 'echo "${excluded[*]}"']
    left, excluded = bash(tmp_path, "messages cause nodes preflight", *lines).splitlines()
    return left.split(), excluded.split()


def test_the_verdict_on_4096_nodes(tmp_path: Path) -> None:
    """One word per node; of two lines on one node, the first counts."""
    verdict = [f"n{number} ok" for number in range(1, 4097)]
    verdict[6] = "n7 bad GPU 3: \x1b[31mfell off the bus"
    verdict[4095] = ""
    left, excluded = checked(tmp_path, 4096, "\n".join([*verdict, "n7 ok", "strange"]) + "\n")
    assert excluded == ["n7", "n4096"] and len(left) == 4094
    rows = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    (told,) = (row for row in rows if row["event"] == "preflight")
    assert (told["bad"], told["checked"], told["warnings"]) == ("n7 n4096", 4096, [])
    assert [row["reason"] for row in rows if row["event"] == "node_excluded"] == [
        "preflight: GPU 3: [31mfell off the bus",
        f"preflight: no answer: see {tmp_path}/logs/preflight/n4096.log",
    ]


def test_the_warnings_are_an_event(tmp_path: Path) -> None:
    (tmp_path / "logs/preflight").mkdir(parents=True)
    (tmp_path / "logs/preflight/warnings.json").write_text('["n1: its clock is 60 s behind", "n2: \\u00e4"]\n')
    (tmp_path / "logs/preflight/verdict").write_text("n1 ok\n")
    lines = ["ask_nodes() { missed=(); }", "must_end() { false; }", "nodes=(n1)", "check_nodes"]
    bash(tmp_path, "messages cause nodes preflight", *lines)
    told = json.loads((tmp_path / "events.jsonl").read_text().splitlines()[-1])
    assert told["warnings"] == ["n1: its clock is 60 s behind", "n2: ä"]


def test_no_text_of_a_verdict_is_run(tmp_path: Path) -> None:
    left, _ = checked(tmp_path, 2, f"$(touch {tmp_path}/ran) ok\nx[$(touch {tmp_path}/ran)] ok\nn1 ok\nn2 ok\n")
    assert left == ["n1", "n2"] and not (tmp_path / "ran").exists()


def test_a_verdict_without_iconv(tmp_path: Path) -> None:
    """Not every minimal image has it: then what is not ASCII is left out."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("tr", "cut", "head", "bash"):
        (programs / name).symlink_to(f"/usr/bin/{name}")
    said = bash(tmp_path, "messages", "printf 'n1 ok \\303\\244\\nsecond' | plain", PATH=str(programs))
    assert said == "n1 ok \n"


#: Text of an error, and what is left of it in one line of UTF-8.
TEXTS = {
    **{text: text for text in ('KeyError: "a"', "no C:\\new", 'say "\\"', "plain", "a/b", "C:\\u00e9", "end\\")},
    **{text: text for text in ("Zażółć", "日本語", "no \U0001f600")},
    "two\nlines": "two",
    "a\tb": "a b",
    "\x1b[31mred": "[31mred",
    "lone \ud83d half": "lone  half",
}


@pytest.mark.parametrize("escaped", [True, False])
def test_the_text_of_a_marker_is_escaped_once(tmp_path: Path, escaped: bool) -> None:
    (tmp_path / "markers").mkdir()
    texts = {text: said for text, said in TEXTS.items() if escaped or "\ud83d" not in text}
    for attempt, text in enumerate(texts):
        marker = {"restart": False, "state": "failed", "cause": text, "attempt": attempt}
        written = json.dumps(marker, indent=2, ensure_ascii=escaped)
        (tmp_path / f"markers/attempt-{attempt:03d}.json").write_text(written, encoding="utf-8")
    loop = f"for ((attempt = 0; attempt < {len(texts)}; attempt++)); do"
    said = bash(tmp_path, "messages breaker", loop, 'json "$(from_marker cause)"; echo; done')
    assert [json.loads(line) for line in said.splitlines()] == list(texts.values())


def test_the_message_of_an_error_is_escaped_once(tmp_path: Path) -> None:
    facts = {"event": "error", "rank": 3, "node": "n2", "kind": "ValueError"}
    (tmp_path / "rows").write_text("".join(json.dumps({**facts, "message": text}) + "\n" for text in TEXTS))
    loop = 'while IFS= read -r line; do noted=; note "$line"; printf "%s\\n" "$noted"; done'
    said = bash(tmp_path, "messages cause watch", "new_attempt", f"{loop} <{tmp_path}/rows")
    assert said.splitlines() == [f"3 n2 ValueError: {text}" for text in TEXTS.values()]


def test_the_signal_that_killed_a_rank_is_the_cause(tmp_path: Path) -> None:
    """Before what other ranks see of it; not the signals with which torchrun ends the others."""
    lost = {"event": "error", "rank": 0, "node": "n1", "kind": "RuntimeError", "message": "Connection closed by peer"}
    killed = {"event": "rank_exited", "attempt": 0, "node": "n2", "rank": 3, "exit_code": None, "signal": "SIGKILL"}
    ended = {**killed, "rank": 2, "signal": "SIGTERM"}
    failed = {**killed, "rank": 1, "exit_code": 1, "signal": None}
    for rows in ([lost, ended, killed, failed], [failed, killed, lost]):
        (tmp_path / "rows").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines = ["chosen=(n1 n2)", "new_attempt", f"exec {{events}}<{tmp_path}/rows"]
        lines += ["read_events", 'cause_text "$noted"']
        assert bash(tmp_path, "messages cause watch", *lines) == "rank 3 on n2: killed by SIGKILL (out of memory?)\n"


@pytest.mark.parametrize(("state", "first"), [("done", 46), ("stopped", 46), ("failed", 46), ("no progress", 16)])
def test_what_is_left_of_an_attempt_that_is_over_is_ended(tmp_path: Path, state: str, first: int) -> None:
    """Sooner where nothing is to save; never a second time while torchrun ends its ranks."""
    (tmp_path / "markers").mkdir()
    (tmp_path / "markers/attempt-000.json").write_text(json.dumps({"state": state, "cause": "x"}, indent=1))
    loop = "unset SECONDS; for second in {0..110}; do SECONDS=$second; end_leftovers; done"
    said = bash(tmp_path, "messages breaker watch", "child=9", 'kill() { echo "$second $*"; }', "new_attempt", loop)
    assert said.splitlines() == [f"{second} -TERM 9" for second in range(first, 111, 46)]


def test_two_nodes_lost_at_once_are_two(tmp_path: Path) -> None:
    lines = ["list_nodes() { lost_nodes='n3 n4'; }", "noted=", "abandoned=", "best_cause() { :; }"]
    said = bash(tmp_path, "messages cause nodes decide", *lines, "decide_after_failure", 'cause_text "$cause"')
    assert said == "n3: Slurm lost the node (NodeFail), together with n4\n"


def test_what_ends_a_hold_can_reach_slurm_and_has_nothing_else(tmp_path: Path) -> None:
    """Where slurm.conf is, who serves it, and the token: none of them as an argument, which `ps` shows to all."""
    seen = tmp_path / "seen"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/bash\nenv >{seen}.part\nmv {seen}.part {seen}\necho JobState=COMPLETED\n")
    scontrol.chmod(0o755)
    kept = {"SLURM_CONF": "/a", "SLURM_CONF_SERVER": "b", "SLURM_JWT": "c", "HOME": "/home/alice"}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_RESTART_COUNT": "2", "SLURM_NNODES": "3", **kept}
    lines = [
        "excluded=(n2)",
        "release_hold",
        f"for ((i = 0; i < 300; i++)); do [[ ! -e {seen} ]] || break; sleep 0.1; done",
    ]
    bash(tmp_path, "requeue/requeue", *lines, **environment)
    got = dict(line.split("=", 1) for line in seen.read_text().splitlines() if "=" in line)
    assert {name: got.get(name) for name in kept} == kept
    assert not [name for name in got if name.startswith("SLURM_") and name not in kept]


def test_job_sh_and_rank_0_decide_alike_whether_a_run_makes_progress(tmp_path: Path) -> None:
    """job.sh decides after an attempt, where no Python may be; rank 0 where torchrun starts the ranks anew in one."""
    random, expected, lines = Random(4), [], []
    for number in range(60):
        steps = [random.choice((0, 10, 57, 57, 60)) for _ in range(random.randint(1, 6))]
        failures = [f"0 {step}" for step in steps]
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "failures").write_text("".join(f"{line}\n" for line in failures[:-1]))  # no_progress adds the last
        (folder / "progress").write_text(f"{steps[-1]} 100\n")
        limit = random.randint(1, 4)
        lines.append(f"run={folder} breaker={limit}; no_progress && echo stop || echo on")
        expected.append("on" if stuck(read_failures("\n".join(failures)), limit) is None else "stop")
    assert bash(tmp_path, "breaker", *lines).split() == expected
    assert set(expected) == {"on", "stop"}


def test_a_start_that_somebody_else_ended_does_not_count(tmp_path: Path) -> None:
    """Ten times per job: whoever can do that must not keep it in a loop."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "n1.log").write_text(
        "x\nslurmddp: node n1: somebody else changed the state of rendezvous 7 (not signed)\n"
    )
    lines = [
        "decision=next",
        'for start in 1 2 3; do cause="- - unknown"; break_after_failures; done; echo "$decision: $cause"',
        'for start in {4..10} 1 2 3; do cause="- - unknown"; break_after_failures; done; echo "$decision: $cause"',
    ]
    first, last = bash(tmp_path, "messages breaker cause decide", *lines).splitlines()
    assert first == (
        "next: - n1 somebody else changed the state of rendezvous 7 (not signed) "
        "(another user, or another job: this start does not count as a failure)"
    )
    assert last == "failed: - - unknown; 3 starts in a row crashed before step 1"
    assert (tmp_path / "failures").read_text() == "0 0\n" * 3
