"""What job.sh does between the nodes' check and the ranks' start, for 4,096 nodes, and how soon it handles a signal.

    python -m benchmarks.preflight [--rounds N] [--write]

The verdict is one of a check that found 8 bad nodes. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
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
from slurmddp.runtime.preflight.findings import bad, verdict

SHELL = Path(__file__).resolve().parents[1] / "slurmddp" / "shell"
NODES = 4096
BAD = 8
#: CPU seconds, children included: on a quiet machine that is the time that passes.
JUDGE_TARGET = 1.0
#: Seconds from a signal to the first line of its trap. Slurm leaves KillWait, often 30 s, for all of it.
SIGNAL_TARGET = 2.0

#: What job.sh assigns, with stand-ins for what asks Slurm and the nodes.
SCRIPT = """
set -uo pipefail
source {shell}/messages.sh
source {shell}/cause.sh
source {shell}/nodes.sh
source {shell}/preflight.sh
scheduler=slurm nodes_max={nodes} nodes_min=1 preflight=yes join_timeout=600
attempt=0 host=n1 job_id=7 ending= run={run} logs={run}/logs
ask_slurm() {{ :; }}
allocated_nodes() {{ printf 'n%d\\n' {{1..{nodes}}}; }}
ask_nodes() {{ missed=(); }}
must_end() {{ [[ -n "$ending" ]]; }}
exec 3>&1
trap 'ending=cancelled; echo handled >&3' TERM
echo began
list_nodes
check_nodes >/dev/null
choose_nodes
echo "judged ${{#chosen[@]}} ${{#excluded[@]}}"
read -r _
"""


class Round(NamedTuple):
    """Seconds. handled: from the signal to its trap, None where none was sent."""

    cpu: float
    wall: float
    handled: float | None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preflight", description="Judging a preflight.")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="rounds of each (default: %(default)s)")
    page.options(parser)
    asked = parser.parse_args()
    about = f"bash and its children, {NODES:,} nodes of which {BAD} are bad, {asked.rounds} rounds"
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
        page.Figure("a signal, until its trap (each, not the median)", handled, "s", SIGNAL_TARGET),
    ]


def one_round(moment: float | None) -> Round:
    """moment: seconds after the start at which SIGTERM is sent. Raises RuntimeError where the judgment is wrong."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        (run / "logs" / "preflight").mkdir(parents=True)
        (run / "logs" / "preflight" / "verdict").write_text("\n".join(_verdict()) + "\n")
        script = run / "judge.sh"
        script.write_text(SCRIPT.format(shell=SHELL, nodes=NODES, run=run))
        before = _children()
        with subprocess.Popen(
            ["bash", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as bash:
            assert bash.stdin is not None and bash.stdout is not None
            _expect(bash.stdout.readline(), "began")
            began = time.perf_counter()
            handled = None
            if moment is not None:
                time.sleep(moment)
                sent = time.perf_counter()
                bash.send_signal(signal.SIGTERM)
                line = bash.stdout.readline()
                _expect(line, "handled", "judged")
                handled = time.perf_counter() - sent if line.startswith("handled") else None  # it came too late
            else:
                _expect(bash.stdout.readline(), f"judged {NODES - BAD} {BAD}")
            wall = time.perf_counter() - began
            bash.stdin.close()
            bash.wait()
        return Round(_children() - before, wall, handled)


def _verdict() -> list[str]:
    """As the head of a check writes it."""
    nodes = [f"n{number}" for number in range(1, NODES + 1)]
    broken = bad("GPU 3 has 12 uncorrectable ECC errors", "ask the site to reset it")
    return verdict(nodes, {node: [broken] for node in nodes[:: NODES // BAD]})


def _children() -> float:
    """CPU seconds of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _expect(line: str, *wanted: str) -> None:
    if not line.startswith(wanted):
        raise RuntimeError(f"the script printed {line!r}, not {' or '.join(wanted)}")


if __name__ == "__main__":
    sys.exit(main())
