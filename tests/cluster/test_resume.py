"""A script of the user's own that saves beside its runs goes on over its time limit: checkpoint.watch, resume_args."""

from __future__ import annotations

import pytest

from .cluster import Cluster
from .runs import Alice, story

pytestmark = [pytest.mark.cluster, pytest.mark.long]

#: It saves every five steps, looks at no stop file, and loads what it is told to. 600 steps take 120 s at least.
SCRIPT = """\
import argparse, os, time
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
resume = parser.parse_args().resume
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
first = 1
if resume:
    state = torch.load(resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
os.makedirs("out", exist_ok=True)
for step in range(first, 601):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2)
    if step % 5 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "out/part.pt")
        os.replace("out/part.pt", "out/last.pt")
"""


def test_a_script_that_saves_elsewhere_goes_on_over_its_time_limit(cluster: Cluster, torch_image: str) -> None:
    alice = Alice(cluster, torch_image)
    cluster.write("/home/alice/scripts/saves.py", SCRIPT)
    run = alice.submit(
        "scripts/saves.py", "--site", "testcluster", "--image", torch_image, "--time", "1m", "--workdir", "run",
        "--set", "resources.ranks_per_node=1", "--set", "resources.cpus_per_node=1",
        "--set", "resources.mem_per_node=1500M", "--set", "recovery.preflight=false",
        "--set", "checkpoint.watch=[out]", "--set", "train.resume_args=[--resume, '{checkpoint}']",
    )  # fmt: skip
    run.wait("done", timeout=500)
    rows = run.lines("events.jsonl")
    requeued = [row["reason"] for row in rows if row["event"] == "requeued"]
    assert requeued and set(requeued) == {"time limit"}, story(run)
    told = [(row["how"], row["step"] > 5) for row in rows if row["event"] == "restarted"]
    assert told and set(told) == {("went on", True)}, story(run)
    (kept,) = [row for row in rows if row["event"] == "save_kept"]
    assert kept["kept"].endswith("/kept/001-last.pt") and not kept["why"], "later starts had proven that they load it"
    assert (run.folder / "kept/001-last.pt").exists()
