"""The commands that look at runs: a metrics.jsonl of a million lines, and a thousand run folders.

    python -m benchmarks.runs [--lines N] [--folders N] [--pairs N] [--before PROGRAM] [--write]

PROGRAM: the `slurmddp` of an older version, to compare with; each of its commands may take a minute.
Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import page
from benchmarks.environments import environment
from benchmarks.measure import Comparison, Cost, in_turn, run

ZERO = 1_793_491_200
#: CPU seconds and MiB: of `status`, `goodput` and `logs` for any length of the file, of `runs` for a thousand folders,
#: and of `report` for a million lines.
TARGETS: Mapping[str, tuple[float, float] | None] = {
    "status": (0.5, 100), "logs": (0.5, 100), "runs": (0.5, 100), "goodput": (0.5, 100),
    "report": (5.0, 100),
}  # fmt: skip

#: Slurm that has forgotten every job.
FORGOTTEN = {
    "scontrol": "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1",
    "squeue": "exit 0",
    "sacct": "exit 0",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.runs", description="The commands that look at runs.")
    parser.add_argument("--lines", type=int, default=1_000_000, metavar="N", help="of metrics.jsonl (%(default)s)")
    parser.add_argument("--folders", type=int, default=1000, metavar="N", help="run folders (%(default)s)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="runs of each command (%(default)s)")
    parser.add_argument("--before", metavar="PROGRAM", help="the slurmddp of an older version")
    page.options(parser)
    asked = parser.parse_args()
    found = figures(asked.lines, asked.folders, asked.pairs, asked.before)
    about = (
        f"Python {sys.version.split()[0]}, {asked.lines:,} lines, {asked.folders:,} folders, {asked.pairs} runs of each"
    )
    return page.finish("runs", found, about, write=asked.write)


def figures(lines: int, folders: int, pairs: int, before: str | None = None) -> list[page.Figure]:
    """Measure the table. before: the slurmddp of an older version, which is compared, and shown on the way."""
    rows: list[page.Figure] = []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        programs(home / "bin")
        long = make_run(home / "long", lines)
        many = [make_run(home / "runs" / f"run-{number:04d}", 20) for number in range(folders)]
        index(home, many)
        commands = {
            "status": ["status", str(long)],
            "logs": ["logs", str(long)],
            "goodput": ["status", str(long), "--time"],
            "runs": ["runs", "-n", str(folders)],
            "report": ["report", str(long), "-o", "report.html", "--force"],
        }
        kept = environment()
        start = partial(
            run, cwd=home, environment={**kept, "HOME": str(home), "PATH": f"{home / 'bin'}:{kept['PATH']}"}
        )
        ours = str(Path(sys.executable).with_name("slurmddp"))
        for title, command in commands.items():
            if before:
                mine, theirs = in_turn(partial(start, [ours, *command]), partial(start, [before, *command]), pairs)
                for unit, name_of in (("s of CPU", "cpu"), ("MiB", "memory")):
                    values = ([getattr(cost, name_of) for cost in costs] for costs in (mine, theirs))
                    print(f"\n{Comparison(f'{title}: {unit}', unit, *values).report()}")
            else:
                start([ours, *command])
                mine = [start([ours, *command]) for _ in range(pairs)]
            rows += rows_of(title, mine, TARGETS[title])
        rows.append(page.Figure("size of the report", [(home / "report.html").stat().st_size / 1e6], "MB", 5.0))
    return rows


def rows_of(title: str, costs: Sequence[Cost], target: tuple[float, float] | None) -> list[page.Figure]:
    """Return the rows of a command."""
    cpu, memory = target or (None, None)
    return [
        page.Figure(f"`{title}`, CPU", [cost.cpu for cost in costs], "s", cpu),
        page.Figure(f"`{title}`, memory", [cost.memory for cost in costs], "MiB", memory),
    ]


def programs(folder: Path) -> None:
    folder.mkdir()
    for name, text in FORGOTTEN.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)


def make_run(folder: Path, lines: int) -> Path:
    """Write the folder of a run that is done: a line per step, a checkpoint every thousand steps."""
    (folder / "markers").mkdir(parents=True)
    (folder / "logs" / "attempt-000").mkdir(parents=True)
    write(folder / "manifest.json", {"schema": 1, "run": folder.name, "name": "gpt", "created": created(), "site": "x"})
    (folder / "job.json").write_text("{}")
    (folder / "logs" / "job.log").write_text("slurmddp: started\n")
    (folder / "logs" / "attempt-000" / "n1.log").write_text("step 1\n" * 100)
    sent = {"job_id": "4711", "scheduler": "slurm", "command": ["sbatch"], "time": created(), "host": "login"}
    write(folder / "submission.json", {"schema": 1, **sent})
    write(folder / "markers" / "attempt-000.json", {"state": "done", "step": lines, "steps": lines})
    at = float(ZERO + 90)
    with (folder / "events.jsonl").open("w") as events, (folder / "metrics.jsonl").open("w") as metrics:

        def event(name: str, time: float, **facts: Any) -> None:
            told = {"time": round(time, 3), "event": name, "attempt": 0, "node": "n1", **facts}
            events.write(json.dumps(told) + "\n")

        event("job_started", ZERO + 60, job_id="4711", nodes="n[1-4]")
        event("rank_started", ZERO + 80, rank=0, seconds=5)
        event("ready", ZERO + 90, rank=0, step=0)
        totals: dict[str, float] = {}
        for step in range(1, lines + 1):
            parts = {"data": 0.02, "forward": 0.15, "backward": 0.2, "overlap": 0.05, "network": 0.03, "other": 0.05}
            at += 0.5
            if step % 1000 == 0:
                parts["checkpoint"] = 0.2
                at += 0.2
                event("checkpoint_saved", at, rank=0, step=step, seconds=3, stall=0.2, bytes=10, path="x")
            totals = {part: round(totals.get(part, 0.0) + parts.get(part, 0.0), 5) for part in {**totals, **parts}}
            metrics.write(json.dumps(line(at, step, totals)) + "\n")
        event("finished", at + 1, rank=0, state="done", step=lines, steps=lines)
        event("job_ended", at + 2, job_id="4711", exit_code=0, signal="", slurm_state="RUNNING", decision="done")
    return folder


def line(at: float, step: int, parts: Mapping[str, float]) -> dict[str, Any]:
    """Return a line as the bundled entrypoint writes it."""
    return {
        "time": round(at, 3), "attempt": 0, "step": step, "start": ZERO + 90, "epoch": round(step / 1e5, 6),
        "loss": round(10 / step, 4), "lr": 0.0003, "grad_norm": 1.2345, "samples": step * 512,
        "samples_per_second": 1024.123, "tokens_per_second": 1048576.5, "mfu": 0.41234, "seconds": dict(parts),
    }  # fmt: skip


def index(home: Path, runs: Sequence[Path]) -> None:
    """Write the user's index of runs."""
    state = home / ".local" / "state" / "slurmddp"
    state.mkdir(parents=True)
    with (state / "runs.jsonl").open("w") as file:
        for path in runs:
            entry = {
                "id": path.name,
                "path": str(path),
                "created": created(),
                "name": "gpt",
                "site": "x",
                "job_id": "4711",
            }
            file.write(json.dumps(entry) + "\n")


def created() -> str:
    return "2026-11-01T00:00:00+00:00"


def write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value))


if __name__ == "__main__":
    sys.exit(main())
