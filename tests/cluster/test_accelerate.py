"""launch.accelerate: the ranks get what the real `accelerate launch` gives them; errors end the run at once."""

from __future__ import annotations

import json

import pytest

from .cluster import Cluster
from .frameworks import SCRIPTS, Environment, make_environment
from .host import LOGIN
from .runs import Alice, Run

pytestmark = [pytest.mark.cluster, pytest.mark.long]

#: By name: what `accelerate config` writes, without what has no effect here.
CONFIGS = {
    "fsdp": """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
  fsdp_version: 2
mixed_precision: bf16
parallelism_config: {parallelism_config_dp_shard_size: 2}
use_cpu: false
""",
    "precision": """\
compute_environment: LOCAL_MACHINE
debug: true
distributed_type: MULTI_GPU
dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: max-autotune, dynamo_use_dynamic: true}
mixed_precision: fp16
""",
    "megatron": """\
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
megatron_lm_config: {megatron_lm_pp_degree: 2, megatron_lm_tp_degree: 2, megatron_lm_gradient_clipping: 1.0}
mixed_precision: bf16
""",
}
DUMP = """\
import json, os, sys

if os.environ["RANK"] == "0":
    json.dump(dict(os.environ), open(sys.argv[1], "w"))
"""
#: What differs between two starts of torchrun.
OF_A_START = {"MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID"}


@pytest.fixture
def alice(fresh_cluster: Cluster, torch_image: str) -> Alice:
    fresh_cluster.write(f"{SCRIPTS}/dump.py", DUMP)
    for name, text in CONFIGS.items():
        fresh_cluster.write(f"{SCRIPTS}/{name}.yaml", text)
    return Alice(fresh_cluster, torch_image)


def test_the_variables_are_those_of_accelerate_launch(alice: Alice) -> None:
    environment = make_environment(alice.cluster, alice.image, ("accelerate",))
    plain, torchrun = submitted(alice, environment, "plain"), started(alice, environment, "plain")
    for name in CONFIGS:
        real, ours = started(alice, environment, name), submitted(alice, environment, name)
        of_the_file = {key: text for key, text in real.items() if torchrun.get(key) != text and key not in OF_A_START}
        assert len(of_the_file) > 5 and {key: ours.get(key) for key in of_the_file} == of_the_file
        assert ours.keys() - plain.keys() == of_the_file.keys() - plain.keys(), "and no others"


def submitted(alice: Alice, environment: Environment, name: str) -> dict[str, str]:
    """The variables of rank 0 in a job with this config file."""
    run = submit(alice, *environment.options, *config(name), "--", f"{SCRIPTS}/job-{name}.json")
    run.wait("done")
    return read(alice, f"job-{name}")


def submit(alice: Alice, *words: str) -> Run:
    size = ("resources.ranks_per_node=2", "resources.cpus_per_node=2", "resources.mem_per_node=2500M")
    resources = [word for setting in size for word in ("--set", setting)]
    return alice.submit(f"{SCRIPTS}/dump.py", "--site", "testcluster", "--image", alice.image, *resources, *words)


def config(name: str) -> list[str]:
    return ["--set", f"launch.accelerate={SCRIPTS}/{name}.yaml"] if name in CONFIGS else []


def started(alice: Alice, environment: Environment, name: str) -> dict[str, str]:
    """The variables of rank 0 under `accelerate launch` with this config file; under torchrun for any other name."""
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=29511"]
    if name in CONFIGS:
        launch = ["-m", "accelerate.commands.launch", f"--config_file={SCRIPTS}/{name}.yaml", "--num_processes=2"]
        launch += ["--num_machines=1", "--main_process_port=29511"]
    inside = ["apptainer", "exec", "--bind", environment.folder, alice.image, f"{environment.folder}/bin/python"]
    words = [*inside, *launch, f"{SCRIPTS}/dump.py", f"{SCRIPTS}/launched-{name}.json"]
    alice.cluster.run(LOGIN, words, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    return read(alice, f"launched-{name}")


def read(alice: Alice, name: str) -> dict[str, str]:
    return json.loads(alice.cluster.machine_path(f"{SCRIPTS}/{name}.json").read_text())


@pytest.mark.parametrize("preflight", ["true", "false"])
def test_an_image_without_accelerate_ends_the_run_at_once(alice: Alice, preflight: str) -> None:
    run = submit(alice, *config("fsdp"), "--set", f"recovery.preflight={preflight}", "--nodes", "2", "--", "unused")
    status = run.wait("failed")
    assert "no accelerate in /usr/bin/python3" in status["cause"], status
    assert [row["attempt"] for row in run.lines("events.jsonl") if row["event"] == "attempt_ended"] in ([], [0])


def test_a_file_that_accelerate_rejects_ends_the_run_at_once(alice: Alice) -> None:
    environment = make_environment(alice.cluster, alice.image, ("accelerate",))
    alice.cluster.write(f"{SCRIPTS}/fsdp.yaml", CONFIGS["fsdp"] + "no_such_key: 1\n")
    run = submit(alice, *environment.options, *config("fsdp"), "--nodes", "2", "--", "unused")
    status = run.wait("failed")
    assert "rejects the config file: ValueError: The config file at" in status["cause"], status
    assert "no_such_key" in status["cause"]
    assert [row["attempt"] for row in run.lines("events.jsonl") if row["event"] == "attempt_ended"] == [0]
