"""slurmddp init: a job file from what is found in a folder and on a cluster."""

import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from slurmddp.commands.init import Written, training_scripts, write_job_file
from tests.helpers import SIF, Desk, Result

Cli = Callable[..., Result]

TRAINS = "import torch\nloss.backward()\n"


def with_torch(desk: Desk, name: str) -> Path:
    """A virtual environment whose Python says that it has torch."""
    folder = desk.root / name
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/activate").touch()
    python = folder / "bin/python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    return folder


@pytest.fixture
def cluster(desk: Desk, slurm: Callable[..., None]) -> Desk:
    """A login node of a cluster that no profile matches, and a script that trains."""
    slurm()
    for program in ("sbatch", "srun"):
        desk.program(program, "#!/bin/sh\necho 7\n")
    for name in ("gpus", "cores", "here"):
        (desk.config / "sites" / f"{name}.yaml").unlink()
    desk.write("train.py", TRAINS)
    return desk


def test_where_no_profile_fits_one_is_drafted_and_the_job_submits(cluster: Desk, cli: Cli) -> None:
    venv = with_torch(cluster, "venv")
    done = cli("init", "--yes", VIRTUAL_ENV=str(venv), SLURM_CLUSTER_NAME="Alps 2")
    profile = cluster.config / "sites" / "Alps-2.yaml"
    assert (done.code, done.out) == (0, "job.yaml\n"), done.err
    assert done.err == (
        f"site    Alps-2 (drafted from what Slurm says: {profile})\nscript  train.py\n"
        f"python  {venv} (VIRTUAL_ENV)\ngpus    4 per node of partition gpu\nnext    slurmddp check job.yaml\n"
    )
    text = (cluster.project / "job.yaml").read_text()
    for line in (
        '  partition: "gpu" # or cores.long, odd',
        f'  - "source {venv}/bin/activate"',
        '  script: "train.py"',
    ):
        assert f"\n{line}\n" in text, text
    assert "  # gpus_per_node: 4 " in text and "image" not in text.replace("no image", "")
    done = cli("submit", "job.yaml", "--nodes", "2", "--json", SLURM_CLUSTER_NAME="Alps 2")
    assert json.loads(done.out)["site"] == "Alps-2" and done.code == 0, done.err


NODE = "NodeName={} Arch=x86_64 CPUTot=8 RealMemory=9000 {}State=IDLE Partitions={}\n"
ROW = "PartitionName={} State=UP Default={} MaxTime=1-00:00:00 Nodes=x TotalNodes=1\n"


@pytest.mark.parametrize(
    ("nodes", "told", "line"),
    [
        (("Gres=gpu:a100:4 ", "Gres=gpu:8 "), "4 to 8 per node of partition cpu (Slurm)", "  gpus_per_node: 4 "),
        (("", ""), "none in partition cpu (Slurm); partitions with GPUs: big (2)", "  gpus_per_node: 0 "),
    ],
)
def test_the_gpus_are_those_that_slurm_counts(
    cluster: Desk, cli: Cli, slurm: Callable[..., None], nodes: tuple[str, str], told: str, line: str
) -> None:
    rows = ROW.format("cpu", "YES") + ROW.format("big", "NO")
    one, two = nodes
    slurm(partitions=rows, nodes=NODE.format("n1", one, "cpu") + NODE.format("n2", two, "cpu")
          + NODE.format("n3", "Gres=gpu:2 ", "big"))  # fmt: skip
    done = cli("init", "--site", "generic")
    assert f"gpus    {told}\n" in done.err, done.err
    text = (cluster.project / "job.yaml").read_text()
    assert f"\n{line}" in text and "name: project-train\n" in text, text
    done = cli("submit", "job.yaml", "--dry-run", "--set", "container.runtime=none")
    assert done.code == 0, done.err


def test_where_slurm_does_not_answer_the_gpus_are_to_be_set(cluster: Desk, cli: Cli) -> None:
    cluster.program("scontrol", "#!/bin/sh\nexit 1\n")
    assert "gpus    unknown: Slurm did not say; set gpus_per_node\n" in cli("init", "--site", "generic").err
    assert "  gpus_per_node: 4            # CHANGE THIS" in (cluster.project / "job.yaml").read_text()


def test_an_image_of_the_folder_is_taken_and_a_profile_is_drafted_once(cluster: Desk, cli: Cli) -> None:
    cluster.write("images/torch.sif", SIF)
    cluster.write("broken.sif", "x")
    done = cli("init", "--json", SLURM_CLUSTER_NAME="Alps 2")
    told = json.loads(done.out)
    assert (told["image"], told["environment"], told["script"]) == ("images/torch.sif", None, "train.py"), told
    assert told["next"] == ["slurmddp check job.yaml", "slurmddp submit job.yaml"]
    assert '  image: "images/torch.sif"\n' in (cluster.project / "job.yaml").read_text()
    again = json.loads(cli("init", "b.yaml", "--json", SLURM_CLUSTER_NAME="Alps 2").out)
    assert again["site"] == "Alps-2" and "drafted" not in again["why"]
    hidden = json.loads(cli("init", "c.yaml", "--json", SLURM_CLUSTER_NAME="other").out)
    assert hidden["site"] == "generic" and "Alps-2.yaml exists" in hidden["notes"][0]


SAVES = """
import argparse
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--resume")
resume = parser.parse_args().resume
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
first = 1
if resume:
    state = torch.load(resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["step"] + 1
for step in range(first, 601):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, "out/last.pt")
"""


def test_the_job_file_says_where_the_script_saves_and_how_it_loads(cluster: Desk, cli: Cli) -> None:
    cluster.write("train.py", SAVES)
    assert cli("init", "--yes", SLURM_CLUSTER_NAME="Alps 2").code == 0
    text = (cluster.project / "job.yaml").read_text()
    assert '\n  resume_args: ["--resume", "{checkpoint}"] ' in text and '\n  watch: ["out"] ' in text, text
    cluster.write("torch.sif", SIF)
    done = cli("submit", "job.yaml", "--image", "torch.sif", "--dry-run", SLURM_CLUSTER_NAME="Alps 2")
    assert done.code == 0 and "/out" in done.out, done.err


def test_a_file_that_exists_is_refused_before_anything_is_drafted(cluster: Desk, cli: Cli) -> None:
    cluster.write("job.yaml")
    assert cli("init").code == 2 and not (cluster.config / "sites" / "Alps-2.yaml").exists()


def test_without_image_and_environment_the_next_command_builds_one(cluster: Desk, cli: Cli) -> None:
    done = cli("init")
    assert done.err.endswith("next    slurmddp build-image --job job.yaml\n"), done.err


def test_a_large_folder_below_hides_no_script_of_this_one(cluster: Desk) -> None:
    for number in range(300):
        cluster.write(f"data/{number:03}.py")
    assert training_scripts(cluster.project) == ["train.py"]


def test_what_else_was_found_is_noted_where_nobody_is_asked(cluster: Desk, cli: Cli) -> None:
    for name in ("src/model.py", "tests/train.py", "test_train.py", "src/pretrain.py"):
        cluster.write(name, TRAINS)
    cluster.write("src/pretrain.py", TRAINS + "torch.distributed.init_process_group()\n")
    cluster.write("tools.py", "print(1)\n")
    cluster.write("defined.py", "import torch\ndef train():\n    loss.backward()\n")
    assert training_scripts(cluster.project) == ["train.py", "src/pretrain.py", "src/model.py"]
    venv = with_torch(cluster, "project/.venv")
    cluster.write("torch.sif", SIF)
    done = cli("init", "--yes")
    assert "note: other training scripts: src/pretrain.py, src/model.py\n" in done.err
    assert f"note: other images and environments: virtual environment {venv}\n" in done.err, done.err
    assert "script  train.py\nimage   torch.sif\n" in done.err


def asked(desk: Desk, monkeypatch: pytest.MonkeyPatch, answers: Sequence[str], site: str = "generic") -> list[str]:
    """The questions of `init` on a terminal; answers: to each of them."""
    monkeypatch.chdir(desk.project)
    for name, value in desk.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    questions: list[str] = []

    def ask(question: str, choices: Sequence[str]) -> str:
        questions.append(question)
        return answers[len(questions) - 1]

    made: Written = write_job_file(Path("asked.yaml"), site, None, None, ask)
    assert made.notes == ()
    return questions


def test_at_most_three_questions_are_asked(cluster: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write("other.py", TRAINS)
    cluster.write("a.sif", SIF)
    venv = with_torch(cluster, "project/.venv")
    questions = asked(cluster, monkeypatch, ("other.py", f"virtual environment {venv}", "2-4"))
    assert questions == ["Which script trains?", "What do the ranks run in?", "How many nodes?"]
    text = (cluster.project / "asked.yaml").read_text()
    for line in ('  script: "other.py"', f'  - "source {venv}/bin/activate"', '  nodes: "2-4" '):
        assert line in text, text
    options = ("--partition", "gpu", "--gpus-per-node", "4", "--dry-run")
    assert "#SBATCH --nodes=2-4\n" in cli("submit", "asked.yaml", *options).out


def test_a_number_of_nodes_that_is_none_is_asked_again(cluster: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.write("train.py", TRAINS)
    questions = asked(cluster, monkeypatch, ("two", "4-2", "", "2+1"))
    assert questions == ["How many nodes?", *["How many nodes (2, 2-4 or 4+1)?"] * 3]
    assert '  nodes: "2+1" ' in (cluster.project / "asked.yaml").read_text()


def test_the_questions_on_a_terminal(cluster: Desk) -> None:
    """Enter takes the first answer; a number that none has is asked again."""
    for name in ("b.py", "c.py"):
        cluster.write(name, TRAINS)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "slurmddp", "init"]
    child = subprocess.Popen(
        command, cwd=cluster.project, env=cluster.environment, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, b"7\n3\n\n")
    shown = b""
    with contextlib.suppress(OSError):  # Linux's end of file
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert child.wait(timeout=60) == 0, shown
    assert b"  1  train.py\r\n  2  b.py\r\n  3  c.py\r\n" in shown and b"script  c.py" in shown, shown
    assert shown.count(b"Which script trains? [1]: ") == 2 and b"How many nodes? [1]: " in shown


def test_a_site_that_requires_an_account_asks_for_it(cluster: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.site("name: strict\ntitle: t\nrequired: [resources.account]\npartitions: {p: {gpus_per_node: 1}}\n")
    assert asked(cluster, monkeypatch, ("physics",), site="strict") == ["Which Slurm account pays?"]
    text = (cluster.project / "asked.yaml").read_text()
    assert '\n  account: "physics"\n' in text and "# account" not in text
