"""The scripts of examples/frameworks: with a killed rank, a lost node, the signal before the time limit, and resumed.

`SLURMDDP_UPDATE_GOLDEN=1 pytest tests/cluster/test_frameworks.py` writes what was seen into docs/frameworks.md.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from .cluster import Cluster
from .frameworks import BREAK_SAVE, SCRIPTS, SLOWLY, Environment, make_environment
from .host import LOGIN
from .roots import CHECKOUT
from .runs import Alice, Run

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EXAMPLES = CHECKOUT / "examples/frameworks"
PAGE = CHECKOUT / "docs/frameworks.md"
BEGIN, END = "<!-- made by tests/cluster/test_frameworks.py -->\n", "<!-- end of the table -->\n"
HEAD = "| Program | Versions | Started with | Nodes x ranks | Survived |\n|---|---|---|---|---|\n"
SMALL = {
    "nodes": "{min: 2, max: 2, spares: 1}",
    "ranks_per_node": 2,
    "cpus_per_node": 2,
    "mem_per_node": "4000M",
    "time": "20m",
}
EVERY, STEPS, MORE = 20, 300, 320  # steps between the scripts' checkpoints; of the run; of the run that resumes it
PATIENCE = 300
SRUN = ("--set", "launch.mode=srun")
CONFIG = ("--set", f"launch.accelerate={SCRIPTS}/accelerate.yaml")


@dataclass(frozen=True)
class Framework:
    """A script, and the packages that it needs; the first one names it."""

    title: str
    script: str
    packages: tuple[str, ...]
    options: tuple[str, ...] = ()
    says: str = ""  # each start


FRAMEWORKS = [
    Framework("Lightning Trainer", "lightning_trainer.py", ("lightning",)),
    Framework("Lightning Trainer, without torchrun", "lightning_trainer.py", ("lightning",), SRUN),
    Framework("Hugging Face Trainer", "hf_trainer.py", ("transformers", "accelerate")),
    Framework("Accelerate", "accelerate_loop.py", ("accelerate",), says="precision no"),
    Framework("Accelerate, with a config file", "accelerate_loop.py", ("accelerate",), CONFIG, says="precision bf16"),
    Framework("DeepSpeed, ZeRO stage 1", "deepspeed_loop.py", ("deepspeed",)),
    Framework("PyTorch DDP", "ddp_snapshot.py", ("torch",)),
    Framework("A small GPT, with DDP", "tiny_gpt.py", ("torch",)),
]


@dataclass(frozen=True)
class Program:
    """A program that others wrote, by the words that start it; `said` is what it prints, in the end.

    saves: the file of its first checkpoint, from the folder of the scripts. Then a rank is killed.
    """

    title: str
    start: tuple[str, ...]
    packages: tuple[str, ...]
    said: str
    nodes: int = 2
    ranks: int = 2
    arguments: tuple[str, ...] = ()
    saves: str = ""


LITGPT_START = (
    *("-m", "litgpt", "--set", f"environment.PYTHONPATH={SCRIPTS}"),
    *("--set", "environment.TORCHDYNAMO_DISABLE=1"),  # it compiles its model, and the image has no compiler
    *("--set", "environment.TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"),  # its checkpoints contain its data loader
)
PROGRAMS = [
    Program(
        "Accelerate's own test script",
        ("-m", "accelerate.test_utils.scripts.test_script", "--set", "environment.ACCELERATE_USE_CPU=true"),
        ("accelerate",),
        "**Training integration test**",
        ranks=1,  # with four ranks on CPUs its test of tensors fails: it expects two
    ),
    Program("Lightning's demo modules", (f"{SCRIPTS}/demo.py",), ("lightning",), "`max_epochs=1` reached"),
    Program(
        "litgpt pretrain",
        LITGPT_START,
        ("litgpt", "requests"),  # it imports requests without asking for it
        "Resuming training from",
        nodes=1,  # on several ranks it uses FSDP, which Lightning has for GPUs only
        ranks=1,
        arguments=("pretrain", "--config", f"{SCRIPTS}/litgpt.yaml"),
        saves="out/step-00000800/lit_model.pth",
    ),
]
DEMO = """\
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

trainer = Trainer(num_nodes=2, devices=2, accelerator="cpu", max_epochs=1, logger=False)
trainer.fit(BoringModel(), datamodule=BoringDataModule())
"""
LITGPT = f"""\
model_name: pythia-14m
model_config: {{n_layer: 1, n_embd: 32, n_head: 2, block_size: 64, padded_vocab_size: 128}}
data: rows.Rows
train: {{max_tokens: 700000, save_interval: 800, log_interval: 100, max_seq_length: 64, lr_warmup_steps: 1,
  global_batch_size: 8, micro_batch_size: 4}}
out_dir: {SCRIPTS}/out
resume: auto
logger_name: csv
"""
ROWS = """\
import torch
from litgpt.data import DataModule
from torch.utils.data import DataLoader


class Rows(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=-1):
        self.batch_size, self.length = batch_size, max_seq_length + 1

    def train_dataloader(self):
        return DataLoader((torch.arange(256)[:, None] + torch.arange(self.length)) % 128, self.batch_size)

    val_dataloader = train_dataloader
"""


@pytest.fixture
def alice(fresh_cluster: Cluster, torch_image: str) -> Alice:
    fresh_cluster.write(f"{SCRIPTS}/slowly.py", SLOWLY)
    for name, text in {"demo.py": DEMO, "litgpt.yaml": LITGPT, "rows.py": ROWS}.items():
        fresh_cluster.write(f"{SCRIPTS}/{name}", text)
    for path in EXAMPLES.glob("*.*"):
        fresh_cluster.write(f"{SCRIPTS}/{path.name}", path.read_text())
    return Alice(fresh_cluster, torch_image)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.title.replace(" ", "-"))
def test_it_survives(framework: Framework, alice: Alice) -> None:
    environment = make_environment(alice.cluster, alice.image, framework.packages)
    run = submit(alice, framework, environment)
    after(run, EVERY + 5)
    for fault in FAULTS.values():
        fault(run)
    run.wait("done", timeout=PATIENCE)
    assert starts(run)[-1][-1] == STEPS
    resumed = [event for event in run.lines("events.jsonl") if event["event"] == "restarted"]
    assert {event["how"] for event in resumed} <= {"went on", "unknown"} and resumed, "none began at zero"
    assert {event["step"] for event in resumed if event["step"]} <= {start[0] for start in starts(run)}, resumed
    job = f"{run.answer['run_folder']}/job.yaml"
    half = ("--set", "resources.ranks_per_node=1")
    more = alice.submit("--resume", run.id, job, *half, "--", f"{SCRIPTS}/{framework.script}", "--steps", str(MORE))
    more.wait("done", timeout=PATIENCE)
    assert starts(more) == [list(range(STEPS + 1, MORE + 1))], "it began with the checkpoint of the run before"
    for each in (run, more):
        begun = [line for line in each.logs().splitlines() if " begins with " in line]
        assert all(framework.says in line for line in begun) and (begun or not framework.says), begun
    command = " ".join([framework.script, *framework.options]).replace(f"{SCRIPTS}/", "")
    command = re.sub(r"(\w+\.(py|yaml))", r"examples/frameworks/\1", f"{command} --nodes 2")
    note(framework.title, environment, command, ", ".join([*FAULTS, "`--resume` on half the ranks"]))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.packages[0])
def test_a_program_of_others_runs(program: Program, alice: Alice) -> None:
    environment = make_environment(alice.cluster, alice.image, program.packages)
    arguments = ("--", *program.arguments) if program.arguments else ()
    sizes = ("--set", f"resources.nodes={program.nodes}", "--set", f"resources.ranks_per_node={program.ranks}")
    run = alice.submit(*program.start, *options(alice, environment), *sizes, *arguments)
    if program.saves:
        wait_for(run, alice.cluster.machine_path(f"{SCRIPTS}/{program.saves}").exists, "a checkpoint")
        kill(run, 0, program.packages[0])
    run.wait("done", timeout=2 * PATIENCE)
    assert program.said in run.logs()
    survived = "killed rank" if program.saves else "not tried: it saves no checkpoints"
    command = " ".join([*program.start, f"--nodes {program.nodes}", *arguments])
    command = command.replace(f"{SCRIPTS}/", "").replace(SCRIPTS, "$PWD")
    note(program.title, environment, command, survived, f"{program.nodes} x {program.ranks}")


def submit(alice: Alice, framework: Framework, environment: Environment) -> Run:
    arguments = [f"{SCRIPTS}/{framework.script}", "--steps", str(STEPS)]
    return alice.submit(f"{SCRIPTS}/slowly.py", *options(alice, environment), *framework.options, "--", *arguments)


def options(alice: Alice, environment: Environment) -> list[str]:
    """What tells `submit` of nodes, image and venv."""
    settings = [word for key, value in SMALL.items() for word in ("--set", f"resources.{key}={value}")]
    return ["--site", "testcluster", "--image", alice.image, *settings, *environment.options]


def starts(run: Run) -> list[list[int]]:
    """The steps of rank 0, by start of the ranks."""
    found: dict[str, list[int]] = {}
    path = run.folder / "steps"
    for line in path.read_text().splitlines() if path.exists() else []:
        start, _, step = line.partition(" ")
        found.setdefault(start, []).append(int(step))
    return list(found.values())


def after(run: Run, step: int) -> None:
    """Wait until the newest start has done this step."""
    wait_for(run, lambda: (starts(run) or [[0]])[-1][-1] >= step, f"step {step}")


def wait_for(run: Run, condition: Callable[[], bool], what: str) -> None:
    """Wait for it; the failure shows all logs of the run."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s: {what}\n{run.logs()}"
        time.sleep(0.2)


def continued(run: Run, before: int, lost: int) -> None:
    """Wait for the next start, which has to do at most `lost` steps again, and for its next checkpoint."""
    wait_for(run, lambda: len(starts(run)) > before, "the ranks train again")
    *_, old, new = starts(run)
    assert 0 <= old[-1] + 1 - new[0] <= lost, (old, new)
    after(run, new[0] + EVERY + 5)


def kill_rank(run: Run) -> None:
    before = len(starts(run))
    kill(run, 3, "slowly.py")
    continued(run, before, lost=2 * EVERY)


def kill(run: Run, rank: int, word: str) -> None:
    """SIGKILL for a rank, whose command line has the word."""
    node, process, _ = next(found for found in run.processes(f"RANK={rank}") if word in found[2])
    run.cluster.run(node, ["kill", "-KILL", str(process)], user="root")


def kill_in_a_save(run: Run) -> None:
    """Rank 0 dies, and its file is half written. The ranks must begin with the checkpoint before."""
    before = len(starts(run))
    (run.folder / BREAK_SAVE).touch()
    continued(run, before, lost=EVERY)
    *_, old, new = starts(run)
    assert (old[-1] % EVERY, old[-1] + 1 - new[0]) == (0, EVERY), (old, new)


def lose_node(run: Run) -> None:
    """A power cut on a node that trains, and is not the one of job.sh. The spare replaces it."""
    before = len(starts(run))
    lost = next(node for node in ("node3", "node2", "node1") if trains(run, node) and node != batch_host(run))
    run.cluster.kill_host(lost)
    try:
        continued(run, before, lost=2 * EVERY)
    finally:
        run.cluster.restart_host(lost)


def trains(run: Run, node: str) -> bool:
    return any(each == node for each, _, _ in run.processes("LOCAL_RANK=0"))


def batch_host(run: Run) -> str:
    return run.cluster.job(run.job_id)["BatchHost"]


def reach_the_time_limit(run: Run) -> None:
    """What Slurm sends ahead of the time limit. The ranks save, so no step is done again."""
    before = len(starts(run))
    run.cluster.run(LOGIN, ["scancel", "--batch", "--signal=USR2", run.job_id])
    requeued = run.wait_for_event("requeued")
    assert (requeued["how"], requeued["reason"]) == ("requeue", "time limit")
    continued(run, before, lost=0)


#: In this order, in one run.
FAULTS: dict[str, Callable[[Run], None]] = {
    "killed rank": kill_rank,
    "kill in the middle of a save": kill_in_a_save,
    "time limit and requeue": reach_the_time_limit,
    "lost node": lose_node,
}


def note(title: str, environment: Environment, command: str, survived: str, shape: str = "2 x 2") -> None:
    """Write a row into the page; other rows stay as they are. Without that wish, the page must say the same."""
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    row = f"| {title} | {versions} | `slurmddp submit {command}` | {shape} | {survived} |\n"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    table, _, rest = rest.partition(END)
    rows = [line for line in table.splitlines(keepends=True) if line.startswith("| ")][1:]
    others = [line for line in rows if not line.startswith(f"| {title} |")]
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}\n{HEAD}{''.join(sorted([*others, row]))}\n{END}{rest}", encoding="utf-8")
        return
    claimed = [line.rpartition(" | ")[2] for line in rows if line not in others]
    assert claimed == [f"{survived} |\n"], f"{PAGE} does not say what was seen: {row}"
