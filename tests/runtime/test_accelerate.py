"""launch.accelerate on a node. Accelerate is a stand-in here: tests/cluster/test_accelerate.py has the real one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmddp.run.create import write_key

from .harness import PATIENCE, ROOT, free_port

#: It has what slurmddp calls of Accelerate's own launcher.
LAUNCH = """\
import os
from types import SimpleNamespace

def launch_command_parser():
    return SimpleNamespace(parse_args=lambda words: words)

def _validate_launch_command(words):
    KIND = open(words[0].removeprefix("--config_file=")).read()
    if KIND == "wrong": raise ValueError("unknown keys (['a'])")
    if KIND == "stale": raise OSError(116, "Stale file handle")
    args = SimpleNamespace(words=words, use_deepspeed=KIND == "ds", use_fsdp=KIND == "fsdp", use_megatron_lm=False)
    args.multi_gpu = False
    return args, SimpleNamespace(deepspeed_config={"zero_stage": 3}), True

def made(args, kind):
    new = {"KIND": kind, "WORDS": " ".join(args.words[1:]), "MASTER_ADDR": "far", "KMP_AFFINITY": "compact"}
    return {**os.environ, **new, "FIELDS": getattr(args, "deepspeed_fields_from_accelerate_config", "")}

def prepare_deepspeed_cmd_env(args): return None, made(args, "deepspeed")
def prepare_multi_gpu_env(args): return made(args, "several")
def prepare_simple_launcher_cmd_env(args): return [], made(args, "simple")
def check_cuda_p2p_ib_support(): return False
"""
SCRIPT = "import json, os; print('SEEN ' + json.dumps(dict(os.environ)))"
OPTIONS = ("--nnodes=1", "--nproc-per-node=1", "--rdzv-backend=slurmddp-c10d", "--rdzv-id=a", "--rdzv-conf=is_host=1")


class Node:
    """One node of a run in this folder. `start` returns exit code, output, and what the markers say."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        write_key(folder / "rendezvous.key")
        (folder / "script.py").write_text(SCRIPT)
        self.package("__version__ = '1.2'", LAUNCH)

    def package(self, init: str, launch: str) -> None:
        commands = self.folder / "accelerate/commands"
        commands.mkdir(parents=True, exist_ok=True)
        (commands / "__init__.py").touch()
        (commands.parent / "__init__.py").write_text(init)
        (commands / "launch.py").write_text(launch)

    def start(self, config: str, **environment: str) -> tuple[int, str, str | None]:
        (self.folder / "accelerate.yaml").write_text(config)
        command = ["slurmddp.runtime.agent.accelerate", f"{self.folder}/accelerate.yaml", str(self.folder), *OPTIONS]
        command += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", f"{self.folder}/script.py"]
        variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{self.folder}", "SLURMDDP_NODE": "node1", **environment}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env={**variables, "SLURMDDP_ATTEMPT": "0", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        marker = self.folder / "markers/attempt-000.json"
        return done.returncode, done.stdout, json.loads(marker.read_text())["cause"] if marker.exists() else None


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ("ds", "deepspeed"),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("fsdp", "several"), ("cpu", "simple"))),
    ],
)
def test_torchrun_starts_the_ranks_with_the_variables(node: Node, config: str, kind: str) -> None:
    code, text, marker = node.start(config, KMP_AFFINITY="mine")
    assert (code, marker) == (0, None), text
    seen = json.loads(text.split("SEEN ", 1)[1])
    told = {"KIND": kind, "MASTER_ADDR": "127.0.0.1", "KMP_AFFINITY": "mine"}
    told["WORDS"] = "--num_machines=1 --num_processes=1 --main_process_port=0 --gpu_ids=all script"
    told["FIELDS"] = "zero_stage,mixed_precision" if config == "ds" else ""
    assert {name: seen[name] for name in told} == told
    assert ("NCCL_P2P_DISABLE" in seen) == (config != "cpu")
    assert f"slurmddp: node node1: from launch.accelerate: FIELDS={told['FIELDS']} KIND={kind} " in text


REJECTS = "launch.accelerate: Accelerate 1.2 rejects the config file: "
MISSING = "raise ModuleNotFoundError('no', name='accelerate')"
IMPORTS = "raise ImportError('libnccl.so: Input/output error')"


@pytest.mark.parametrize(
    ("init", "config", "says", "over"),
    [
        ("__version__ = '1.2'", "wrong", REJECTS + "ValueError: unknown keys (['a'])", True),
        ("__version__ = '1.2'", "stale", REJECTS + "OSError: [Errno 116] Stale file handle", False),
        (MISSING, "fsdp", f"no accelerate in {sys.executable}: install it in the image, or correct", True),
        (IMPORTS, "fsdp", "launch.accelerate: libnccl.so: Input/output error", False),
    ],
)
def test_only_what_another_start_cannot_mend_ends_the_run(
    node: Node, init: str, config: str, says: str, over: bool
) -> None:
    node.package(init, LAUNCH)
    code, text, marker = node.start(config)
    assert code == 1 and text.startswith(f"slurmddp: node node1: {says}") and len(text.splitlines()) == 1, text
    assert marker == (text.strip().removeprefix("slurmddp: node node1: ") if over else None)


def test_an_accelerate_without_these_functions_says_so(node: Node) -> None:
    node.package("__version__ = '9'", "")
    _, text, marker = node.start("fsdp")
    assert "with Accelerate 9 (seen with 1.15): module 'accelerate.commands.launch' has no" in text
    assert marker
