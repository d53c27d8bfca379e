"""What tests on the cluster do with `slurmddp`, as alice on the login host."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmddp.run.events import read_lines

from .cluster import Cluster
from .roots import IMAGE_PYTHON
from .variant import variant

#: Less work where a second rank per node would prove nothing more: most of a test's time is the import of torch.
ONE_RANK_A_NODE = {"ranks_per_node": 1, "cpus_per_node": 1, "mem_per_node": "1500M"}
#: For `recovery`, where the check of the nodes is not what is tested: it starts Python on each node at each start.
NO_PREFLIGHT = {"preflight": False}
#: A job small enough that starting its processes is what takes the time.
JOB: dict[str, Any] = {
    "site": "testcluster",
    "resources": {"nodes": 2, "ranks_per_node": 2, "cpus_per_node": 2, "mem_per_node": "2500M", "time": "10m"},
    "train": {
        "task": "lm",
        "data": {"path": "/home/alice/text", "glob": "**/*.py", "context": 32},
        "model": {"layers": 1, "heads": 2, "width": 32},
        "batch": {"global": 12, "micro": 3},
        "steps": 40,
        "optimizer": {"lr": 3e-3},
        # The default schedule is as long as the run; these runs differ in length and are to be compared.
        "schedule": {"kind": "constant"},
        "evaluate": {"batches": 4},
        "trace_samples": True,
        "log_every": 10,
    },
    "checkpoint": {"every_steps": 10},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with `changes` laid over it, maps merged."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


@dataclass
class Run:
    """One submitted run, seen from outside through the shared home."""

    cluster: Cluster
    answer: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.answer["run_id"])

    @property
    def job_id(self) -> str:
        return str(self.answer["job_id"])

    @property
    def folder(self) -> Path:
        return self.cluster.machine_path(self.answer["run_folder"])

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and JSON of `slurmddp status`."""
        done = self.cluster.run("login", ["slurmddp", "status", self.id, "--json"], check=False)
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    def wait(self, *states: str, timeout: float = 300) -> dict[str, Any]:
        """Wait until the run's state is one of these; the failure shows all its logs."""
        deadline = time.monotonic() + timeout
        while True:
            _, status = self.status()
            if status["state"] in states:
                return status
            over = status["state"] not in ("pending", "running", "requeued", "stopping")
            assert time.monotonic() < deadline and not over, f"{status}\n{self.logs()}"
            self._wait_for_news(seconds=2)

    def wait_for_step(self, step: int, timeout: float = 300) -> None:
        """Wait until the metrics show this step."""
        begin = asked = time.monotonic()
        while not any(row["step"] >= step for row in self.metrics()):
            time.sleep(0.2)
            if time.monotonic() > asked + 3:
                code, status = self.status()
                asked = time.monotonic()
                assert asked < begin + timeout and code in (0, 3), f"{status}\n{self.logs()}"

    def _wait_for_news(self, seconds: float) -> None:
        """Wait for the next event, at most so long: each `slurmddp status` takes half a second of a core."""
        events, end = self.folder / "events.jsonl", time.monotonic() + seconds
        size = events.stat().st_size if events.exists() else 0
        while time.monotonic() < end and (not events.exists() or events.stat().st_size == size):
            time.sleep(0.2)

    def wait_for_event(
        self, event: str, fits: Callable[[dict[str, Any]], bool] = lambda row: True, timeout: float = 180
    ) -> dict[str, Any]:
        """The first event of that name that fits; the failure shows all events and logs."""
        deadline = time.monotonic() + timeout
        while True:
            rows = self.lines("events.jsonl")
            found = [row for row in rows if row["event"] == event and fits(row)]
            if found:
                return found[0]
            seen = "\n".join(map(str, rows))
            assert time.monotonic() < deadline, f"no {event}:\n{seen}\n{self.cluster.job(self.job_id)}\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return self.cluster.run("login", ["slurmddp", "logs", self.id], check=False).stdout

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The whole JSON lines of a file in the run folder; a full disk may have cut one."""
        return list(read_lines(self.folder / name).records)

    def metrics(self) -> list[dict[str, Any]]:
        return self.lines("metrics.jsonl")

    def samples(self) -> dict[int, list[int]]:
        """Sample ids that all ranks together fed to the model, by step, in the order of the ranks."""
        steps: dict[int, list[int]] = {}
        for path in sorted((self.folder / "trace").glob("attempt-*/rank-*.jsonl")):
            for row in self.lines(str(path.relative_to(self.folder))):
                steps.setdefault(row["step"], []).extend(row["ids"])
        return steps

    def processes(self, variable: str | None = None) -> list[tuple[str, int, str]]:
        """(node, pid, command line) of what has the job's id in its environment, whatever it is called now.

        variable: and also this, as RANK=3.
        """
        also = f" && grep -qzsx {variable} $p" if variable else ""
        script = (
            f"for p in $(grep -lzsx 'SLURM_JOB_ID={self.job_id}' /proc/[0-9]*/environ); do d=${{p%/environ}};"
            f" [ $d != /proc/$$ ]{also} && echo ${{d#/proc/}} $(tr '\\0' ' ' <$d/cmdline); done; true"
        )
        found = []
        for node in self.cluster.nodes:
            for line in self.cluster.sh(node, script, user="root").stdout.splitlines():
                pid, _, command = line.partition(" ")
                found.append((node, int(pid), command))
        return found


#: All runs of this session; a test that fails shows the story of the newest.
submitted: list[Run] = []


class Alice:
    """The user's commands on the login host; she has some real text in ~/text."""

    def __init__(self, cluster: Cluster, image: str) -> None:
        self.cluster = cluster
        self.image = image
        text = cluster.machine_path("/home/alice/text")
        text.mkdir(exist_ok=True)
        for source in sorted(Path(sysconfig.get_path("stdlib")).glob("a*.py")):
            shutil.copyfile(source, text / source.name)

    def command(self, *words: str, check: bool = True, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        return self.cluster.run("login", ["slurmddp", *words], check=check, timeout=timeout)

    def job_file(self, name: str, **changes: Any) -> str:
        """Write a job file and return its path on the hosts."""
        job = merged({"name": name, **JOB, **self.software()}, changes)
        path = f"/home/alice/jobs/{name}.yaml"
        self.cluster.write(path, yaml.safe_dump(job))
        return path

    def software(self) -> dict[str, Any]:
        """The job's keys for torch: the image, or the hosts' own Python where they have no Apptainer."""
        if variant().apptainer:
            return {"container": {"image": self.image}}
        packages = f"{self.cluster.torch_image_root}/usr/local/lib/python{IMAGE_PYTHON}/dist-packages"
        return {"container": {"runtime": "none"}, "setup": [f"export PYTHONPATH={packages}"]}

    def program(self, code: str, *words: str, timeout: float = 60) -> Any:
        """Return what a Python program of hers prints as JSON."""
        command = ["/opt/slurmddp-venv/bin/python", "-c", code, *words]
        return json.loads(self.cluster.run("login", command, timeout=timeout).stdout)

    def submit(self, *words: str) -> Run:
        run = Run(self.cluster, json.loads(self.command("submit", "--json", *words).stdout))
        submitted.append(run)
        return run


def story(run: Run) -> str:
    """All that a run left, for a failure's message."""
    parts = [run.folder / "events.jsonl", run.folder / "logs/job.log", *sorted(run.folder.glob("logs/attempt-*/*.log"))]
    texts = [
        f"--- {path.relative_to(run.folder)}\n{path.read_text(errors='replace')[-6000:]}"
        for path in parts
        if path.exists()
    ]
    job = run.cluster.run("login", ["scontrol", "show", "job", run.job_id], check=False)  # may be forgotten by now
    return "\n".join([*texts, f"--- job\n{job.stdout}{job.stderr}"])
