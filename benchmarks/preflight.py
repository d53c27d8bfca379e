"""What the supervisor does between the nodes' check and the ranks' start, for 4,096 nodes; when it handles a signal.

    python -m benchmarks.preflight [--rounds N] [--write]

The verdict is one of a check that found 8 bad nodes. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks import page
from slurmddp.records.preflight import Verdict, bad

ROOT = Path(__file__).resolve().parents[1]
NODES = 4096
BAD = 8
#: CPU seconds, children included: on a quiet machine that is the time that passes.
JUDGE_TARGET = 1.0
#: Seconds from a signal to its handler. Slurm leaves KillWait, often 30 s, for all of it.
SIGNAL_TARGET = 2.0

#: The supervisor itself, up to the ranks' start; a stand-in for what asks Slurm and the nodes.
PROGRAM = """
import signal, sys
sys.path.insert(0, {root!r})
from slurmddp.supervisor import values
from slurmddp.supervisor.job import Job
from slurmddp.supervisor.preflight import check_nodes
words = "scheduler=slurm nodes_max={nodes} nodes_min=1 requeue_policy=none preflight=yes join_timeout=600 " \
    "watch=[] max_gpu_hours= gpus_per_node=4 " \\
    "own_script= must_save= breaker=3 stop_lead= cancel_grace= elastic= singleton= tasks_per_node="
job = Job(values.read([{run!r}, {run!r}, *words.split()]))
job.scheduler.nodes = lambda: ["n%d" % number for number in range(1, {nodes} + 1)]
job.on_nodes = lambda *_, **__: 0
job.choose_port = lambda head: None
job.say = lambda text: None
job.logs = {run!r} + "/logs"
def stop():
    job.ending = "cancelled"
    print("handled", flush=True)
job.loop.on_signal(signal.SIGTERM, stop)
print("began", flush=True)
job.nodes.renew(job.scheduler.nodes())
check_nodes(job, lambda: None)
job.nodes.choose()
job.folder.settle(60)
print("judged", len(job.nodes.chosen), len(job.nodes.excluded), flush=True)
sys.stdin.read()
"""


class Round(NamedTuple):
    """Seconds. handled: from the signal to its handler, None where none was sent."""

    cpu: float
    wall: float
    handled: float | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preflight", description="Judging a preflight.")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="rounds of each (default: %(default)s)")
    page.options(parser)
    asked = parser.parse_args()
    about = f"{NODES:,} nodes of which {BAD} are bad, {asked.rounds} rounds"
    code = page.finish("preflight", found := figures(asked.rounds), about, write=asked.write)
    return code or int(max(found[-1].values) > SIGNAL_TARGET)


def figures(rounds: int) -> list[page.Figure]:
    """Measure the table."""
    one_round(None)  # warm-up
    plain = [one_round(None) for _ in range(rounds)]
    longest = min(each.wall for each in plain)
    moments = random.Random(0)
    stopped = [one_round(moments.uniform(0, longest)) for _ in range(rounds)]
    handled = [each.handled for each in stopped if each.handled is not None]
    if not handled:
        raise RuntimeError(f"no signal of {rounds} came before the end: more rounds, please")
    return [
        page.Figure("judging, CPU", [each.cpu for each in plain], "s", JUDGE_TARGET),
        page.Figure("judging, wall clock", [each.wall for each in plain], "s"),
        page.Figure("a signal, until it is handled (each, not the median)", handled, "s", SIGNAL_TARGET),
    ]


def one_round(moment: float | None) -> Round:
    """moment: seconds after the start at which SIGTERM is sent. Raises RuntimeError where the judgment is wrong."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "logs" / "preflight").mkdir(parents=True)
        (run / "logs" / "preflight" / "verdict.json").write_text(json.dumps(_verdict().write()))
        words = [sys.executable, "-I", "-c", PROGRAM.format(root=str(ROOT), nodes=NODES, run=str(run))]
        of_job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": f"n[1-{NODES}]", "SLURMD_NODENAME": "n1"}
        before = _children()
        with subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **of_job},
        ) as judge:
            assert judge.stdin is not None and judge.stdout is not None
            _expect(judge.stdout.readline(), "began")
            began = time.perf_counter()
            handled = None
            if moment is not None:
                time.sleep(moment)
                sent = time.perf_counter()
                judge.send_signal(signal.SIGTERM)
                line = judge.stdout.readline()
                _expect(line, "handled", "judged")
                handled = time.perf_counter() - sent if line.startswith("handled") else None  # it came too late
            else:
                _expect(judge.stdout.readline(), f"judged {NODES - BAD} {BAD}")
            wall = time.perf_counter() - began
            judge.stdin.close()
            judge.wait()
        return Round(_children() - before, wall, handled)


def _verdict() -> Verdict:
    """As the head of a check writes it."""
    nodes = [f"n{number}" for number in range(1, NODES + 1)]
    broken = bad("GPU 3 has 12 uncorrectable ECC errors", "ask the site to reset it")
    return Verdict({node: (broken,) if number % (NODES // BAD) == 0 else () for number, node in enumerate(nodes)})


def _children() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _expect(line: str, *wanted: str) -> None:
    if not line.startswith(wanted):
        raise RuntimeError(f"the program printed {line!r}, not {' or '.join(wanted)}")


if __name__ == "__main__":
    sys.exit(main())
