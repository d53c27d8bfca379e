"""Arbitrary text in every free field: refused, or there byte for byte when the real scripts run, and never run as code.

node.sh and job.sh are executed by bash, with stand-ins for what they start: `apptainer` or a Python (runtime none)
write their arguments and environment down; `srun` runs node.sh.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.render.documents import job_json
from slurmddp.render.scripts import job_script, node_script
from tests.helpers import Desk, check_bash, has, make_code, yaml_of

DUMP = """#!/bin/bash
printf '%s\\0' "$0" "$@" > "$DUMP.argv"
cat /proc/self/environ > "$DUMP.env"
"""

SRUN = """#!/bin/bash
printf '%s\\0' "$@" > "$DUMP.srun"
while [ "$1" != bash ]; do shift; done
exec "$@"
"""

SCONTROL = """#!/bin/bash
echo "$HOSTNAME"
"""

#: Each would leave a file named CANARY in some shell, awk, printf or YAML.
INJECTIONS = [
    "\\\x7f$\x01",  # characters that bash uses for itself
    "$(touch CANARY)",
    "`touch CANARY`",
    "'; touch CANARY; '",
    '"; touch CANARY; "',
    "\\'; touch CANARY #",
    "\ntouch CANARY\n",
    "'\n#SBATCH --wrap='touch CANARY'\n'",
    "$'\\n'touch CANARY",
    "a & touch CANARY",
    "a | touch CANARY",
    ";>CANARY;",  # without a space, a quote or a dollar, which #SBATCH values cannot have
    "a&>CANARY",
    ") ; touch CANARY ; (",
    "${x:=$(touch CANARY)}",
    "{{ 7 * 7 }}{% raw %}",
    "%s%n\\x41",
    "<(touch CANARY)",
    "~root",
    "* ? [a-z] {a,b}",
    "!!",
    "=ls",
    "-e touch",
    "\u00e4\u20ac\U0001f600\u2028",
    "a\x01\x7f\x1b[31m\r",
    " ",
    "",
]

TEXTS = (
    st.sampled_from(INJECTIONS) | st.text("ab $`'\"\\;&|<>(){}[]*?!#~=%-\n\t:,/.0", max_size=24) | st.text(max_size=24)
)


class Stage:
    """A desk with stand-ins, a run folder, and one job at a time."""

    def __init__(self, root: Path) -> None:
        self.desk = Desk(root)
        for name, text in (("apptainer", DUMP), ("srun", SRUN), ("scontrol", SCONTROL), ("fake-python", DUMP)):
            self.desk.program(name, text)
        self.run = self.desk.root / "run"
        (self.run / "logs").mkdir(parents=True)
        make_code(self.run)
        self.dump = self.desk.root / "dump"

    def plan(self, job: dict[str, Any], *, inside: bool = False) -> Plan | None:
        """None: refused."""
        try:
            return self.desk.plan(yaml_of(job), inside=inside)
        except UserError:
            return None

    def node(self, plan: Plan) -> tuple[list[bytes], dict[bytes, bytes]]:
        """What node.sh starts: arguments and environment."""
        return self._run(["bash", self._node_sh(plan)])

    def job(self, plan: Plan) -> tuple[list[bytes], dict[bytes, bytes]]:
        """What job.sh starts through srun and node.sh."""
        self._node_sh(plan)
        return self._run(["bash", self._script("job.sh", job_script(plan)), str(self.run)])

    @property
    def srun(self) -> list[bytes]:
        """The newest srun's arguments."""
        return Path(f"{self.dump}.srun").read_bytes().split(b"\0")[:-1]

    def _node_sh(self, plan: Plan) -> str:
        return self._script("node.sh", node_script(plan._replace(node_folder=f"{self.dump}.disk")))

    def _script(self, name: str, text: str) -> str:
        path = self.run / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    def _run(self, command: list[str]) -> tuple[list[bytes], dict[bytes, bytes]]:
        for name in ("argv", "env"):
            Path(f"{self.dump}.{name}").unlink(missing_ok=True)
        environment = {
            **self.desk.environment,
            "DUMP": str(self.dump),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "here",
            "SLURMD_NODENAME": "here",
            "SLURMDDP_RUN": str(self.run),
            "SLURMDDP_LOGS": str(self.run / "logs"),
            "SLURMDDP_ATTEMPT": "0",
            "SLURMDDP_PORT": "61000",
            "SLURMDDP_NODES": "1",
            "SLURMDDP_RENDEZVOUS_ID": "id",
        }
        done = subprocess.run(
            command, cwd=self.desk.project, env=environment, capture_output=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        arguments = Path(f"{self.dump}.argv").read_bytes().split(b"\0")[:-1]
        pairs = Path(f"{self.dump}.env").read_bytes().split(b"\0")[:-1]
        assert not [path for path in self.desk.root.rglob("*") if path.name == "CANARY"], "text ran as code"
        return arguments, dict(pair.split(b"=", 1) for pair in pairs)


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage(tmp_path_factory.mktemp("stage"))


def gpu_job(**changes: Any) -> dict[str, Any]:
    job: dict[str, Any] = {"name": "x", "site": "gpus", "train": {"task": "lm", "data": {"path": "/data"}}}
    for dotted, value in changes.items():
        node = job
        *path, last = dotted.split("__")
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return job


def cores_job(**changes: Any) -> dict[str, Any]:
    return gpu_job(site="cores", train={"script": "train.py"}, container={"python": "fake-python"}, **changes)


thorough = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def b(text: str) -> bytes:
    return os.fsencode(text)


def every_injection(test: Callable[..., None]) -> Callable[..., None]:
    for text in INJECTIONS:
        test = example(text=text)(test)
    return test


@every_injection
@thorough
@given(text=TEXTS)
def test_arguments_and_variables_without_a_container(stage: Stage, text: str) -> None:
    job = cores_job(environment={"FREE": text, "PYTHONPATH": text}, network={"variables": {"NCCL_FREE": text}})
    job["train"]["args"] = [text, "--x", text]
    plan = stage.plan(job)
    if plan is None:
        assert "\0" in text or text == "<<"  # a merge key, which the reader refuses
        return
    arguments, environment = stage.node(plan)
    assert arguments[-3:] == [b(text), b"--x", b(text)]
    assert arguments[-4] == b(f"{stage.run}/code/project/train.py")
    assert (environment[b"FREE"], environment[b"NCCL_FREE"]) == (b(text), b(text))
    code = f"{stage.dump}.disk/slurmddp-{os.getuid()}/id/code"
    assert environment[b"PYTHONPATH"] == b(f"{code}:{stage.run}/code/project" + (f":{text}" if text else ""))


@every_injection
@thorough
@given(text=TEXTS)
def test_everything_that_a_container_gets(stage: Stage, text: str) -> None:
    job = gpu_job(environment={"FREE": text}, network={"variables": {"NCCL_FREE": text}})
    job["container"] = {"options": [f"--env=A={text}"]}
    job["train"]["task"] = "own.tasks:free"  # a bundled task knows its options, a task of the user's own is free
    job["train"]["data"]["word"] = text
    job["train"]["model"] = {"word": text, text: [text]}
    plan = stage.plan(job)
    if plan is None:
        assert "\0" in text or text == "<<"  # a merge key, which the reader refuses
        return
    arguments, environment = stage.node(plan)
    assert b(f"--env=A={text}") in arguments
    assert environment[b"APPTAINERENV_FREE"] == environment[b"APPTAINERENV_NCCL_FREE"] == b(text)
    assert environment[b"APPTAINER_NO_EVAL"] == b"1"  # else a shell in the container evaluates the variables
    read = json.loads(job_json(plan, "id") or "")["train"]
    assert (read["data"]["word"], read["model"]) == (text, {"word": text, text: [text]})


@every_injection
@thorough
@given(text=TEXTS)
@pytest.mark.parametrize("field", ["image", "source", "destination", "data", "python"])
def test_paths_into_a_container(stage: Stage, field: str, text: str) -> None:
    escaped = text.replace("$", "$$")
    job = gpu_job(container={"image": "/i.sif"})
    expected = {
        "image": f"/i/{text}.sif",
        "source": f"/s/{text}x:/d:ro",
        "destination": f"/s:/d/{text}x:ro",
        "data": f"/d/{text}x:/d/{text}x:ro",
        "python": f"/p/{text}",
    }[field]
    if field == "image":
        job["container"]["image"] = f"/i/{escaped}.sif"
    elif field == "data":
        job["train"]["data"]["path"] = f"/d/{escaped}x"
    elif field == "python":
        job["container"]["python"] = f"/p/{text}"
    else:
        bind = {"source": "/s", "destination": "/d", "mode": "ro", field: f"/{field[0]}/{escaped}x"}
        job["container"]["binds"] = [bind]
    plan = stage.plan(job)
    if plan is not None:
        arguments, _ = stage.node(plan)
        # A path is normalised ("//" and "/../"), which is no matter of quoting.
        plain = "/" not in text and "." not in text
        assert not plain or b(expected) in arguments
        assert arguments.count(b"--bind") == len(plan.container.binds) + 2
    else:
        assert text == "" or any(char in text for char in ':,"\\') or not text.isprintable(), text


@every_injection
@thorough
@given(text=TEXTS)
@pytest.mark.parametrize("field", ["script", "project", "runs", "cache"])
def test_paths_outside_of_one(stage: Stage, field: str, text: str) -> None:
    escaped = text.replace("$", "$$")
    job = cores_job(paths={})
    if field == "script":
        job["train"]["script"] = f"./{escaped}x.py"
    elif field == "project":
        job["train"] |= {"project": f"/p/{escaped}x", "script": f"/p/{escaped}x/t.py"}
    else:
        job["paths"] = {field: f"/p/{escaped}x"}
    plan = stage.plan(job)
    if plan is None:
        assert any(not char.isprintable() for char in text) or "/" in text, text
        return
    arguments, environment = stage.node(plan)
    if "/" in text or "." in text:
        return
    if field == "script":
        assert arguments[-1] == b(f"{stage.run}/code/project/{text}x.py")
    elif field == "project":
        assert (arguments[-1], plan.program.project) == (b(f"{stage.run}/code/project/t.py"), f"/p/{text}x")
    elif field == "cache":
        assert environment[b"HF_HOME"] == b(f"/p/{text}x/huggingface")
    else:
        assert plan.runs_root == f"/p/{text}x"


@every_injection
@thorough
@given(text=TEXTS)
@pytest.mark.parametrize("field", ["account", "partition", "qos", "constraint", "gpu_type", "sbatch_extra"])
def test_values_of_sbatch_lines(stage: Stage, field: str, text: str) -> None:
    job = gpu_job(resources={"gpus_per_node": 1, field: [f"--comment={text}"] if field == "sbatch_extra" else text})
    plan = stage.plan(job)
    if plan is None:
        return
    script = job_script(plan)
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    assert len(lines) == len(plan.sbatch)
    assert any(line.endswith(text) or f":{text}:" in line or f"={text}:" in line for line in lines)
    assert set(text).isdisjoint(" \n\t'\"$`\\#;" if field == "name" else " \n\t'\"$`\\#")


@every_injection
@thorough
@given(text=TEXTS)
@pytest.mark.parametrize("field", ["gpu_type", "sbatch_extra"])
def test_values_of_a_step_inside_an_allocation(stage: Stage, field: str, text: str) -> None:
    """`slurmddp run` has no #SBATCH lines: what they would ask for goes to srun."""
    value = [f"--gres={text}"] if field == "sbatch_extra" else text
    plan = stage.plan(gpu_job(resources={"gpus_per_node": 1, field: value}), inside=True)
    if plan is None:
        return
    stage.job(plan)
    assert b(f"--gres={text}" if field == "sbatch_extra" else f"--gpus-per-node={text}:1") in stage.srun


@every_injection
@thorough
@given(text=TEXTS)
@pytest.mark.parametrize("field", ["name", "interface", "site", "task"])
def test_what_is_a_word(stage: Stage, field: str, text: str) -> None:
    job = gpu_job(name=text) if field == "name" else gpu_job(network={"interface": text})
    job |= {"site": text} if field == "site" else {}
    job["train"] |= {"task": text} if field == "task" else {}
    plan = stage.plan(job)
    if plan is not None:
        arguments, _ = stage.node(plan)
        assert arguments[-1] == b(str(stage.run))
        if field == "name":
            assert text.encode() in job_script(plan).encode().splitlines()[1]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.sampled_from(INJECTIONS) | st.text(max_size=12), max_size=3))
def test_the_whole_way_through_job_sh(stage: Stage, texts: list[str]) -> None:
    job = cores_job(environment={f"FREE{index}": text for index, text in enumerate(texts)}, recovery__preflight=False)
    job["train"]["args"] = texts
    plan = stage.plan(job)
    if plan is None:
        assert any("\0" in text for text in texts)
        return
    arguments, environment = stage.job(plan)
    assert arguments[len(arguments) - len(texts) :] == [b(text) for text in texts]
    assert [environment[b(f"FREE{index}")] for index in range(len(texts))] == [b(text) for text in texts]


def test_setup_lines_are_code_and_run_before_the_rest(stage: Stage) -> None:
    """They are the one place where code is meant: each is one line, run in a shell that has `module`."""
    lines = ["module() { :; }", "export SET='a  b'", "module load x; export UNSET=${NOPE}y"]
    plan = stage.plan(cores_job(setup=lines))
    assert plan is not None
    stage.desk.environment["BASH_FUNC_module%%"] = "() { :; }"
    _, environment = stage.node(plan)
    assert (environment[b"SET"], environment[b"UNSET"]) == (b"a  b", b"y")


def test_names_of_variables_that_the_script_uses_itself(stage: Stage) -> None:
    names = ["host", "head", "address", "node_rank", "workdir", "nodes", "peer", "fail", "HOSTNAME", "RANDOM_X"]
    names += ["setup", "binds", "devices", "ranks", "image", "prefix", "runtime", "python", "scratch", "shell"]
    plan = stage.plan(cores_job(environment=dict.fromkeys(names, "mine"), resources={"cpus_per_node": 2}))
    assert plan is not None
    arguments, environment = stage.node(plan)
    assert {environment[name.encode()] for name in names} == {b"mine"}
    assert b"--local-addr=127.0.0.1" in arguments


@pytest.mark.skipif(not has("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say_on_any_text(stage: Stage, tmp_path: Path) -> None:
    texts = [*INJECTIONS, "it's", "$HOME", "a\\", "`", "''", '""', "\\'", "a=b c", "[x]=y", "--x='y'"]
    job = cores_job(environment={f"FREE{index}": text for index, text in enumerate(texts)})
    job["train"]["args"] = texts
    job["setup"] = ["export PATH=$HOME/bin:$PATH", "source 'a b'", 'x="$(date)"', "echo it\\'s"]
    plan = stage.plan(job)
    assert plan is not None
    check_bash(node_script(plan), "node.sh", tmp_path)
