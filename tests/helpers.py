"""What the tests of the login side share: a desk (a user's home, profiles and project) and arbitrary text as YAML."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmddp.errors import UserError, together
from slurmddp.job.plan.build import make_plan
from slurmddp.job.plan.model import Allocation, Context, Plan
from slurmddp.job.resolve import Request, Resolved, resolve
from slurmddp.records.events import Event, read
from slurmddp.render.scripts import job_script, node_script
from slurmddp.run.events import append_line
from slurmddp.run.layout import RunFolder
from slurmddp.run.snapshot import copy_runtime
from slurmddp.sites.catalogue import Catalogue

ROOT = Path(__file__).resolve().parents[1]
#: The functions of job.sh and node.sh, and what runs beside them: the same for every job.
SHELL = ROOT / "slurmddp" / "shell"

#: A cluster with GPUs; most tests that need Slurm run on it.
GPU_SITE = """\
name: gpus
title: a cluster with GPUs
gpu_request: gpus-per-node
partitions:
  main: {gpus_per_node: 4, gpu_type: a100, cpus_per_node: 64, mem_per_node: 480G, max_time: 24h, max_nodes: 64}
  large: {gpus_per_node: 8, cpus_per_node: 128, ask: {constraint: "big&new", qos: long}}
job:
  resources: {partition: main}
  container: {runtime: apptainer, image: /images/torch.sif}
"""

#: A cluster without GPUs and without a container.
CPU_SITE = """\
name: cores
title: a cluster of cores
gpu_vendor: none
partitions:
  main: {gpus_per_node: 0, cpus_per_node: 16, max_time: 2h}
job:
  resources: {partition: main}
  container: {runtime: none}
"""

#: One machine without Slurm.
HERE_SITE = """\
name: here
title: one machine
scheduler: local
gpu_vendor: none
job:
  container: {runtime: none}
"""

LM_JOB = """\
name: gpt
site: gpus
train:
  task: lm
  data: {path: /data/books}
"""

#: What a file needs to be taken for a SIF image: a launch line of 32 bytes, and the magic word.
SIF = "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0and the rest"


@dataclass(frozen=True)
class Result:
    """What a command ended with."""

    code: int
    out: str
    err: str


@dataclass
class Desk:
    """A user's place: `home` with configuration and profiles, `project` as the current folder, an environment."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.home = self.root / "home"
        self.project = self.root / "project"
        self.bin = self.root / "bin"
        self.config = self.home / ".config" / "slurmddp"
        for folder in (self.project, self.bin, self.config / "sites"):
            folder.mkdir(parents=True, exist_ok=True)
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(ROOT),
            **self.environment,
        }
        for text in (GPU_SITE, CPU_SITE, HERE_SITE):
            self.site(text)

    def site(self, text: str, name: str = "") -> None:
        """A profile of the user's own; the file's name is its `name`, if no other is given."""
        name = name or text.split("name: ", 1)[1].splitlines()[0]
        (self.config / "sites" / f"{name}.yaml").write_text(text, encoding="utf-8")

    def write(self, relative: str, text: str = "") -> Path:
        """A file below the project folder."""
        path = self.project / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def program(self, name: str, text: str) -> Path:
        """An executable that stands first on PATH."""
        path = self.bin / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
        return path

    def resolve(self, job: str, *options: str, strict: bool = True, **variables: str) -> Resolved:
        """The resolved job of a job file's text; options as for --set."""
        path = self.write("job.yaml", job)
        return self.resolve_file(path, *options, strict=strict, **variables)

    def resolve_file(self, path: Path | None, *options: str, strict: bool = True, **variables: str) -> Resolved:
        sets = [(key, value, f"--set {key}") for key, _, value in (option.partition("=") for option in options)]
        environment = {**self.environment, **variables}
        user = self.config / "config.yaml"
        request = Request(path, options=sets, environment=environment)
        configured = [user] if user.exists() else []
        found = resolve(request, configured, Catalogue(environment).load, lambda: None, strict=strict)
        if found.mistakes:
            raise together(found.mistakes)
        return found

    def plan(self, job: str, *options: str, inside: bool = False, strict: bool = True, **variables: str) -> Plan:
        return plan_of(self.resolve(job, *options, strict=strict, **variables), self.project, inside=inside)

    def scripts(self, job: str, *options: str, inside: bool = False) -> tuple[str, str]:
        """job.sh and node.sh."""
        plan = self.plan(job, *options, inside=inside)
        return job_script(plan), node_script(plan)

    def command(self, *arguments: str, cwd: Path | None = None, **variables: str) -> Result:
        """`slurmddp ARGUMENTS` as a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "slurmddp", *arguments],
            cwd=cwd or self.project,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=120,
            check=False,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    def tree(self, *, times: bool = True) -> dict[str, tuple[int, int, bytes]]:
        """Everything that lies here: mode, time of change (folders' only with `times`) and content, by path."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            if "__pycache__" in path.parts:
                continue
            status = path.lstat()
            content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
            time = status.st_mtime_ns if times or not path.is_dir() else 0
            found[str(path.relative_to(self.root))] = (status.st_mode, time, content)
        return found


def make_code(run: Path) -> None:
    """What the scripts of a run folder need of its code/."""
    if not (run / "code" / "slurmddp.zip").exists():
        copy_runtime(run / "code")


def on_disk(desk: Desk, node_sh: str) -> str:
    """node.sh with a disk of this test's own: what is unpacked below /tmp may be of another test."""
    assert node_sh.count("node_folder=/tmp ") <= 1
    return node_sh.replace("node_folder=/tmp ", f"node_folder={desk.root}/disk ")


def change_code(run: Path, name: str, change: Callable[[str], str] | None) -> None:
    """Change a file of the package in a run's archive; None: remove it."""
    archive = run / "code" / "slurmddp.zip"
    with zipfile.ZipFile(archive) as before:
        files = {item: before.read(item) for item in before.namelist()}
    text = files.pop(f"slurmddp/{name}").decode()
    if change is not None:
        files[f"slurmddp/{name}"] = change(text).encode()
    with zipfile.ZipFile(archive, "w") as after:
        for item, content in files.items():
            after.writestr(item, content)


def supervisor(program: str, python: str = sys.executable, code: Path | str = ROOT) -> list[str]:
    """Return the words that start a program of the supervisor, as python.sh does. code: an archive, or a checkout."""
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from slurmddp.supervisor.__main__ import main; main()"
    return [python, "-IBc", start, str(code), program]


def shape(plan: Plan) -> tuple[int | None, ...]:
    """Nodes; GPUs, ranks, cores and MiB per node; threads per rank."""
    nodes, layout = plan.nodes, plan.layout
    node = (layout.gpus_per_node, nodes.ranks_per_node, layout.cpus_per_node, layout.mem_per_node)
    return (nodes.max, *node, layout.threads_per_rank)


def plan_of(resolved: Resolved, cwd: Path | str, *, inside: bool = False, allocation: Allocation | None = None) -> Plan:
    return make_plan(resolved, Context(str(cwd), "/usr/bin/python3", (), inside, allocation))


def refusal(error: BaseException) -> str:
    """The whole message of a refusal, which must be a user's mistake."""
    assert isinstance(error, UserError), repr(error)
    return str(error)


def yaml_text(text: str) -> str:
    """Any text as a YAML scalar in double quotes, all but letters and digits as escapes."""
    return '"' + "".join(c if c.isascii() and c.isalnum() else f"\\U{ord(c):08x}" for c in text) + '"'


def yaml_of(value: Any) -> str:
    """Any tree as YAML in flow style; texts are quoted, so they arrive as texts."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"? {yaml_text(key)} : {yaml_of(item)}" for key, item in value.items()) + "}"
    if isinstance(value, str):
        return yaml_text(value)
    if isinstance(value, Iterable):
        return "[" + ", ".join(yaml_of(item) for item in value) + "]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def check_bash(script: str, name: str, folder: Path) -> None:
    """bash parses it, and shellcheck (where it is there) finds nothing."""
    path = folder / name
    path.write_text(script, encoding="utf-8")
    for command in (["bash", "-n", str(path)], ["shellcheck", "-x", "-P", str(SHELL), str(path)]):
        if command[0] == "shellcheck" and not has("shellcheck"):
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def has(program: str) -> bool:
    return any(os.access(os.path.join(folder, program), os.X_OK) for folder in os.environ["PATH"].split(":"))


def typed(*records: Mapping[str, Any]) -> tuple[Event, ...]:
    """Return the events that lines with these objects say."""
    return tuple(event for record in records if (event := read(record)) is not None)


def node_log(run: RunFolder, attempt: int, node: str) -> Path:
    """Return the path of one node's log of one attempt."""
    return run.attempt_logs(attempt) / f"{node}.log"


def append_event(path: Path, event: str, **fields: Any) -> None:
    """Append an event with any keys, as any version of any writer may have done."""
    append_line(path, {"time": round(time.time(), 3), "event": event, **fields})
