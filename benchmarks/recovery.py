"""Faults on the test cluster, several times each: what survived, and what it cost.

    python -m benchmarks.recovery [--runs N] [--only WORD | --chaos FAULTS] [--rivals FILE] [--seed S] [--write]

Brings up a cluster of its own (root only, see tests/cluster/README.md) and takes it down again. One run at a time, each
fault at a moment of chance; tests/cluster/proof.py says what has to hold for a run to have survived. --write puts the
table into docs/reliability.md, after each round. Exit code 1 where a run did not survive or a target is missed, 2
without a cluster.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import rivals
from benchmarks.environments import CHECKOUT
from tests.cluster.cluster import Cluster
from tests.cluster.errors import ClusterError
from tests.cluster.images import make_torch_image
from tests.cluster.proof import SCENARIOS, Bench, Outcome, Scenario, chaos, play

PAGE = CHECKOUT / "docs/reliability.md"
MARKS = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"
RIVALS_MARKS = "<!-- measured with rivals -->\n", "<!-- end of rivals -->\n"
#: A killed rank: the gap in training, in fresh starts of the same processes (with the checkpoint's reading added).
WORKER_TARGET = 1.2
#: A lost node: seconds of the gap beyond Slurm's own detection and the checkpoint's reading.
NODE_TARGET = 10.0


@dataclass
class Row:
    """One fault, over all its runs."""

    scenario: Scenario
    outcomes: list[Outcome] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return len(self.outcomes) + len(self.failures)

    def cells(self) -> list[str]:
        costs = [outcome.cost for outcome in self.outcomes]
        return [
            self.scenario.name,
            str(self.runs),
            str(len(self.outcomes)),
            _spread([cost.detection for cost in costs if cost.detection is not None]),
            _spread([cost.recovery for cost in costs if cost.recovery is not None]),
            _spread([float(cost.lost) for cost in costs if cost.recovery is not None], digits=0),
        ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery", description="Faults, and what they cost.")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each fault; default: %(default)s")
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name this regular expression finds")
    parser.add_argument("--chaos", type=int, metavar="FAULTS", help="so many faults of chance in one run, instead")
    parser.add_argument("--rivals", type=Path, metavar="FILE", help="other launchers, too: a line per run goes to FILE")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), metavar="S")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(CHECKOUT)}")
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    try:
        with Cluster.started(f"recovery-{os.getpid()}") as cluster:
            if options.rivals:
                text = rivals.text(rivals.measure(cluster, options.rivals, options.runs, options.only, options.seed))
                print(text)
                if options.write:
                    _write(PAGE, text, RIVALS_MARKS)
                return 0
            rows = _measure(cluster, options)
    except ClusterError as error:
        print(f"no measurement: {error}", file=sys.stderr)
        return 2
    targets = _targets(rows)
    print(_text(rows))
    return 1 if any(row.failures for row in rows) or not all(held for _, held in targets) else 0


def _measure(cluster: Cluster, options: argparse.Namespace) -> list[Row]:
    scenarios = [chaos(options.chaos)] if options.chaos else SCENARIOS
    rows = [Row(scenario) for scenario in scenarios if re.search(options.only, scenario.name)]
    bench = Bench.on(cluster, make_torch_image(cluster))
    try:
        for number in range(options.runs):
            for row in rows:
                cluster.reset()
                chance = random.Random(f"{options.seed} {number} {row.scenario.name}")
                _play(bench, row, chance)
            if options.write:  # a round is most of a quarter of an hour: what was seen is not lost
                _write(PAGE, _text(rows), MARKS)
    finally:
        bench.close()
    return rows


def _play(bench: Bench, row: Row, chance: random.Random) -> None:
    try:
        outcome = play(bench, row.scenario, chance)
    except (AssertionError, ClusterError):
        row.failures.append(traceback.format_exc())
        print(f"{row.scenario.name}: FAILED\n{row.failures[-1]}", file=sys.stderr, flush=True)
        return
    row.outcomes.append(outcome)
    load = f"load of the machine {os.getloadavg()[0]:.1f}"
    print(f"{row.scenario.name}: {outcome.injected} {outcome.cost} ({load})", file=sys.stderr, flush=True)


def _spread(values: Sequence[float], digits: int = 1) -> str:
    """`median (min to max)`."""
    if not values:
        return "-"
    least, middle, most = (f"{function(values):.{digits}f}" for function in (min, statistics.median, max))
    return middle if least == most else f"{middle} ({least} to {most})"


def _table(rows: Sequence[Row]) -> str:
    heads = ["fault", "runs", "survived", "detection, s", "recovery, s", "steps lost"]
    lines = [heads, ["---"] * len(heads), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _targets(rows: Sequence[Row]) -> list[tuple[str, bool]]:
    """Each target that something was measured for: a line for people, and whether it holds."""
    by_name = {row.scenario.name: [outcome.cost for outcome in row.outcomes] for row in rows}
    ratios = [
        cost.recovery / (cost.fresh + cost.reload)
        for cost in by_name.get("SIGKILL of a rank", [])
        if cost.recovery is not None
    ]
    beyond = [
        cost.recovery - cost.slurm - cost.reload
        for name in ("node lost, with a spare", "network of a node cut, fewer nodes continue")
        for cost in by_name.get(name, [])
        if cost.recovery is not None and cost.slurm is not None
    ]
    killed = "after SIGKILL of a rank, the gap in fresh starts of the same processes (plus reading the checkpoint)"
    lost = "after a lost node, the gap in seconds beyond Slurm's own detection (and reading the checkpoint)"
    found: list[tuple[str, bool]] = []
    _judge(found, killed, ratios, WORKER_TARGET, lambda values: _spread(values, 2))
    _judge(found, lost, beyond, NODE_TARGET, _spread)
    return found


def _text(rows: Sequence[Row]) -> str:
    """Where and when, the table, and a line for each target."""
    ranks = "two nodes of one rank each"
    where = f"On {os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}; {ranks}."
    return f"{where}\n\n{_table(rows)}\n" + "".join(f"- {line}\n" for line, _ in _targets(rows))


def _judge(
    found: list[tuple[str, bool]],
    what: str,
    values: Sequence[float],
    target: float,
    show: Callable[[Sequence[float]], str],
) -> None:
    if values:
        holds = statistics.median(values) <= target
        found.append((f"{what}: {show(values)}; target {target:g}: {'holds' if holds else 'MISSED'}", holds))


def _write(page: Path, text: str, marks: tuple[str, str]) -> None:
    """Put what was measured between the two marks of the page."""
    begin, end = marks
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(before + begin + "\n" + text + "\n" + end + rest.split(end)[1], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
