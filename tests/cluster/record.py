"""python -m tests.cluster.record: run a job on the test cluster, kill a rank and a node, and draw what the user saw.

Writes docs/recovery.svg. Every line was printed by the command above it; only the name of the home folder is shortened.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from .cluster import Cluster
from .images import make_torch_image
from .runs import Alice, Run

PICTURE = Path(__file__).resolve().parents[2] / "docs" / "recovery.svg"
JOB = {
    "resources": {
        "nodes": {"min": 2, "max": 2, "spares": 1},
        "ranks_per_node": 1,
        "cpus_per_node": 1,
        "mem_per_node": "1500M",
    },
    "train": {"steps": 4000, "trace_samples": False},
}
WIDTH, LINE, MARGIN = 76, 18, 16
KEPT = ("state", "step", "recovered", "nodes", "excluded")


class Screen:
    """What a terminal shows."""

    def __init__(self, alice: Alice) -> None:
        self._alice = alice
        self.lines: list[tuple[str, str]] = []  # class and text

    def say(self, text: str) -> None:
        """What happens from outside."""
        self.lines += [("", ""), ("note", f"# {text}")]

    def run(self, *words: str, only: str = "") -> str:
        """Run a command of hers, and show its output. only: a pattern for the lines that are shown."""
        done = self._alice.command(*words, check=False)
        shown = [line for line in (done.stdout + done.stderr).splitlines() if re.search(only, line)]
        self.lines.append(("command", f"$ slurmddp {' '.join(words)}".replace("/home/alice", "~")))
        self.lines += [("", line.replace("/home/alice", "~")[:WIDTH]) for line in shown]
        return done.stdout


def play(cluster: Cluster) -> list[tuple[str, str]]:
    """Submit, kill a rank, lose a node, finish."""
    alice = Alice(cluster, make_torch_image(cluster))
    path = alice.job_file("gpt", **JOB)
    screen = Screen(alice)
    state = rf"^({'|'.join(KEPT)}) "
    screen.run("submit", path, only="^(run|job) ")
    run = newest(alice)
    run.wait_for_step(300)
    screen.run("status", "last", only=state)
    ((node, pid, _),) = run.processes("RANK=1")
    screen.say(f"kill -9 of rank 1 on {node}")
    cluster.run(node, ["kill", "-KILL", str(pid)], user="root")
    run.wait_for_event("resumed")
    run.wait_for_step(1200)
    screen.run("status", "last", only=state)
    screen.say(f"power cut on {node}")
    cluster.kill_host(node)
    lost = run.wait_for_event("attempt_started", lambda row: row["attempt"] == 1)
    run.wait_for_event("resumed", lambda row: row["attempt"] == 1)
    run.wait("done")
    screen.run("status", "last", only=state)
    assert node not in lost["nodes"].split()
    return screen.lines


def newest(alice: Alice) -> Run:
    """The run that was submitted last."""
    return Run(alice.cluster, alice.program(NEWEST))


NEWEST = """
import json
from slurmddp.run import index
entry = index.entries()[0]
print(json.dumps({"run_id": entry.id, "job_id": entry.job_id, "run_folder": str(entry.path)}))
"""


def draw(lines: list[tuple[str, str]]) -> str:
    """Return the SVG: text in a frame, light or dark as the reader's screen."""
    width, height = WIDTH * 8, 2 * MARGIN + LINE * len(lines)
    rows = [
        f'<text x="{MARGIN}" y="{MARGIN + LINE * row + 13}" class="{kind}" xml:space="preserve">{escape(text)}</text>'
        for row, (kind, text) in enumerate(lines)
        if text
    ]
    title = "A run that loses a rank and a node, and finishes"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">
<title>{title}</title>
<style>
rect {{ fill: #f6f8fa; stroke: #d0d7de }} text {{ font: 13px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }}
.command {{ fill: #0550ae; font-weight: bold }} .note {{ fill: #a40e26 }}
@media (prefers-color-scheme: dark) {{
rect {{ fill: #151b23; stroke: #3d444d }} text {{ fill: #f0f6fc }}
.command {{ fill: #79c0ff }} .note {{ fill: #ff7b72 }} }}
</style>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>
{chr(10).join(rows)}
</svg>
"""


if __name__ == "__main__":
    machine = Cluster("record")
    machine.up()
    try:
        PICTURE.write_text(draw(play(machine)), encoding="utf-8")
    finally:
        machine.down()
    print(PICTURE)
