"""What a node's agent samples of its GPUs. pynvml is a stand-in: this machine has no GPU."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from .harness import HERE, PATIENCE, ROOT
from .test_rendezvous import SIGNED, agents, output, run  # noqa: F401 - fixtures

PATHS = {"PYTHONPATH": f"{ROOT}:{HERE / 'nvml'}", "SLURMDDP_NODE": "node1", "SLURMDDP_ATTEMPT": "2"}
#: A script that runs until two lines are there.
WAITS = """
import pathlib, sys, time
path = pathlib.Path(sys.argv[1])
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end and not (path.exists() and path.read_text().count("\\n") >= 2):
    time.sleep(0.05)
"""


def sampled(folder: Path) -> Path:
    return folder / "trace/gpus/attempt-002/node1.jsonl"


def start(agents: Any, folder: Path, seconds: float, **environment: str) -> tuple[int, str]:  # noqa: F811
    (folder / "script.py").write_text(WAITS)
    agent = agents(SIGNED, 1, **{**PATHS, "SLURMDDP_GPU_SECONDS": "0.02", **environment})
    return output(agent.start(0, str(sampled(folder)), str(seconds)))


@pytest.mark.ranks(1)
def test_the_agent_samples_the_gpus_of_the_job(agents: Any, run: Path) -> None:  # noqa: F811
    code, text = start(agents, run, PATIENCE / 2, CUDA_VISIBLE_DEVICES="0,GPU-22")
    assert code == 0, text
    first, second, *_ = [json.loads(line) for line in sampled(run).read_text().splitlines()]
    assert [each["gpu"] for each in first["gpus"]] == [0, 2], "GPU 1 belongs to another job"
    # The stand-in's use is 80, 82, 84, ... in the order of the questions: two samples of two GPUs, then twelve.
    assert [each["use"] for each in first["gpus"]] == [82, 84]
    assert [each["use"] for each in second["gpus"]] == [110, 112]
    figures = {"memory_gib": 61, "total_gib": 80, "watts": 412, "mhz": 1410, "celsius": None}
    assert first["gpus"][0].items() >= {**figures, "slowed": []}.items(), "an idle GPU is not slowed"
    assert first["gpus"][1]["slowed"] == ["power cap", "hw thermal slowdown"]
    assert abs(second["time"] - time.time()) < PATIENCE


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"NO_DRIVER": "1"}, ""),
        pytest.param({"SLURMDDP_GPU_SECONDS": "0"}, "", marks=pytest.mark.long),
        pytest.param(
            {"SLURMDDP_GPU_SECONDS": "often"},
            "SLURMDDP_GPU_SECONDS is not a number: GPUs are not sampled",
            marks=pytest.mark.long,
        ),
        pytest.param({"PYTHONPATH": str(ROOT)}, "", marks=pytest.mark.long),
        ({}, "GPUs are no longer sampled: NotADirectoryError"),
    ],
    ids=["no driver", "off", "not a number", "no pynvml", "cannot write"],
)
def test_a_job_without_samples_runs_as_well(agents: Any, run: Path, environment: dict[str, str], says: str) -> None:  # noqa: F811
    if not environment:
        (run / "trace").write_text("not a folder")
    code, text = start(agents, run, 0.5, **environment)
    assert code == 0, text
    assert not sampled(run).parent.is_dir() and says in text
    assert says or "GPUs" not in text
