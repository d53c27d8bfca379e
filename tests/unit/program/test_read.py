"""A training script is read, not run: each fact is yes, no or cannot tell, with its line."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmddp.program import source
from slurmddp.program.facts import QUESTIONS, Answer, Facts
from slurmddp.program.read import is_training_program, read_program
from slurmddp.program.sentences import sentences

YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN

PLAIN = """\
import argparse, os, time, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
import helper

parser = argparse.ArgumentParser()
parser.add_argument("--resume", default="")
parser.add_argument("--out", default="results")
args = parser.parse_args()

def main():
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    model = torch.nn.Linear(1, 1).to(local)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    first = 0
    if args.resume:
        state = torch.load(args.resume)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epoch"] + 1
    model = DDP(model, device_ids=[local])
    sampler = DistributedSampler(range(10))
    loader = DataLoader(range(10), sampler=sampler, num_workers=3)
    for epoch in range(first, 10):
        sampler.set_epoch(epoch)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        helper.save_on_master(state, os.path.join(args.out, f"epoch_{epoch}.pt"))

if __name__ == "__main__":
    main()
"""
HELPER = """\
import torch, torch.distributed as dist
def is_main_process():
    return dist.get_rank() == 0
def save_on_master(*args, **kwargs):
    if is_main_process():
        torch.save(*args, **kwargs)
def unused():
    torch.multiprocessing.spawn(print)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a plain DDP script and its helper."""
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


def read(folder: Path, text: str | bytes, name: str = "train.py") -> Facts:
    """Read a script of this text."""
    (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)
    return read_program(str(folder / name))


def test_plain_ddp(folder: Path) -> None:
    facts = read_program(str(folder / "train.py"))
    wanted = {
        "process_group", "wraps_model", "local_rank_device", "shards_data", "set_epoch", "saves", "saves_optimizer",
        "saves_step", "loads", "seeds", "workers",
    }  # fmt: skip
    assert {fact.name for fact in facts.facts if fact.answer is YES} == wanted
    assert {fact.name for fact in facts.facts if fact.answer is UNKNOWN} == set()
    assert (facts["process_group"].places[0].line, facts["loads"].places[0].line) == (13, 21)
    assert facts["workers"].detail == "3"
    assert {each.key: each.value for each in facts.proposals} == {
        "train.resume_args": ["--resume", "{checkpoint}"],
        "checkpoint.watch": ["results"],
    }


def test_sentences_of_a_plain_script(folder: Path) -> None:
    texts = [each.text for each in sentences(read_program(str(folder / "train.py")), 4)]
    assert len(texts) == 2
    assert "request to stop" in texts[0] and "only with --resume" in texts[1]


def test_arguments_for_a_resume_need_a_place_that_is_looked_at(folder: Path) -> None:
    facts = read_program(str(folder / "train.py"))
    (text,) = [each for each in sentences(facts, 4, resumes=True) if "resume_args" in each.text]
    assert text.todo == "name where it saves in checkpoint.watch"
    assert not [each for each in sentences(facts, 4, resumes=True, watched=True) if "resume_args" in each.text]


@pytest.mark.parametrize(
    ("old", "new", "fact", "answer"),
    [
        ("helper.save_on_master", "torch.save", "saves_every_rank", YES),
        ("        sampler.set_epoch(epoch)\n", "", "set_epoch", NO),
        ("sampler=sampler, ", "", "shards_data", YES),
        ("dist.init_process_group", "print", "process_group", NO),
        ("DDP(model, device_ids=[local])", "model", "wraps_model", NO),
        ("local = int(os.environ[\"LOCAL_RANK\"])", "local = 0", "local_rank_device", NO),
        ("local = int(os.environ[\"LOCAL_RANK\"])", "local = 0", "fixed_device", YES),
        ("local = int(os.environ[\"LOCAL_RANK\"])", "local = args.gpu", "local_rank_device", UNKNOWN),
        ('f"epoch_{epoch}.pt"', 'f"{os.getpid()}.pt"', "save_name_changes", YES),
        ('"optimizer": optimizer.state_dict(), ', "", "saves_optimizer", NO),
        ("    torch.manual_seed(1)\n", "", "seeds", NO),
        ("import helper\n", "import helper, strange\nstrange.go()\n", "stops", UNKNOWN),
        ("import helper\n", "import helper, signal\nsignal.signal(signal.SIGTERM, print)\n", "stops", UNKNOWN),
        ("import helper\n", "import helper\nfrom slurmddp.runtime import should_stop as s\ns()\n", "stops", YES),
        ("import helper\n", "import helper\nhelper.unused()\n", "starts_ranks", YES),
        ("import helper\n", "import helper\nos.environ['OMP_NUM_THREADS'] = '1'\n", "sets_omp", YES),
        ("import helper\n", "import helper\nexec(args.out)\n", "requeues", UNKNOWN),
        ("import helper\n", "import helper, submitit\nsubmitit.AutoExecutor('x')\n", "requeues", YES),
        ("import helper\n", "import helper\nopen(os.path.dirname(__file__) + '/x')\n", "data_beside_script", YES),
        ("import helper\n", "import helper, subprocess as s\ns.run(['scontrol', 'show', 'x'])\n", "requeues", NO),
        ("import helper\n", "import helper, subprocess as s\ns.run(['scontrol', 'requeue', '7'])\n", "requeues", YES),
        ("import helper\n", "import helper, subprocess as s\ns.run(['sbatch', 'x.sh'])\n", "requeues", UNKNOWN),
        ("    main()\n", "    main()\nos.path.exists(os.environ['SLURMDDP_STOP_FILE'])\n", "stops", YES),
        ("import helper\n", "import helper, signal as s\nfor n in [s.SIGTERM]: s.signal(n, print)\n", "stops", UNKNOWN),
        ("    main()\n", "    import torch.multiprocessing as mp\n    mp.spawn(main)\n", "starts_ranks", YES),
        ("    main()\n", "    import torch.multiprocessing as mp\n    if 'RANK' not in os.environ: mp.spawn(main)\n",
         "starts_ranks", UNKNOWN),
        ("import helper\n", "import helper, datasets as d\nd.load_dataset('json', data_files='/x')\n",
         "data_from_internet", UNKNOWN),
        ("import helper\n", "import helper, datasets as d\nd.load_dataset('wikitext')\n", "data_from_internet", YES),
        ("import helper\n", "import helper, strange\nstrange.read('x')\n", "stops", NO),
        ("import helper\n", "import helper, strange\nstrange.use(args)\n", "stops", UNKNOWN),
        ('f"epoch_{epoch}.pt"', 'time.strftime(args.out)', "save_name_changes", UNKNOWN),
        ('f"epoch_{epoch}.pt"', 'time.strftime("%H")', "save_name_changes", YES),
        ('default="results"', 'default=str(os.getpid())', "save_name_changes", UNKNOWN),
        ("import helper\n", "import helper, io\ntorch.save(args, io.BytesIO())\n", "saves_every_rank", NO),
        ("        helper.save_on_master", "        if args.resume or dist.get_rank() == 0: torch.save",
         "saves_every_rank", UNKNOWN),
        ("        helper.save_on_master", "        if not dist.is_initialized() or dist.get_rank() == 0: torch.save",
         "saves_every_rank", NO),
        ("    main()\n", "    import multiprocessing as m\n    m.Process(target=main).start()\n", "starts_ranks", YES),
        ("    main()\n", "    main()\n    import multiprocessing as mp\n    mp.Process(target=print).start()\n",
         "starts_ranks", NO),
        ('args.resume:', 'args.resume and dist.get_rank() == 0:', "loads", YES),
    ],
)  # fmt: skip
def test_one_change(folder: Path, old: str, new: str, fact: str, answer: Answer) -> None:
    assert old in PLAIN
    facts = read(folder, PLAIN.replace(old, new))
    assert facts[fact].answer is answer, facts[fact]


LIBRARY = """
import os, torch
from slurmddp.runtime import Checkpointer, GlobalSampler, distributed, should_stop
@distributed()
def main(model, optimizer, scheduler):
    sampler = GlobalSampler(100, global_batch=4)
    model = torch.nn.parallel.DistributedDataParallel(model)
    checkpointer = Checkpointer(model, optimizer, scheduler=scheduler, sampler=sampler)
    for step in range(checkpointer.resume() + 1, 100):
        optimizer.step()
        if should_stop():
            checkpointer.save(step)
            break
    torch.save(model.state_dict(), "model.pt")
main()
"""


def test_slurmddps_own_library(folder: Path) -> None:
    facts = read(folder, LIBRARY)
    wanted = {
        "process_group", "wraps_model", "local_rank_device", "shards_data", "set_epoch", "saves", "saves_optimizer",
        "saves_scheduler", "saves_step", "saves_random", "saves_in_run", "saves_every_rank", "loads", "loads_alone",
        "stops",
    }  # fmt: skip
    assert {fact.name for fact in facts.facts if fact.answer is YES} == wanted
    assert {fact.name for fact in facts.facts if fact.answer is UNKNOWN} == set()
    assert facts.proposals == ()
    assert [each.text for each in sentences(facts, 4) if "every rank" not in each.text] == []


@pytest.mark.parametrize(
    ("old", "new", "fact", "answer"),
    [
        ("scheduler=scheduler, ", "", "saves_scheduler", NO),
        ("scheduler=scheduler, sampler=sampler)\n",
         "sampler=sampler)\n    checkpointer.save(0, {'s': scheduler.state_dict()})\n", "saves_scheduler", UNKNOWN),
        ("optimizer, scheduler=scheduler, ", "optimizer, 'out', ", "saves_in_run", NO),
        ("if should_stop():", "if step == 9:", "stops", NO),
        ("if should_stop():", "if checkpointer.after(step):", "stops", YES),
        ("checkpointer.save(step)", "pass", "saves_optimizer", NO),
        ("checkpointer.resume()", "0", "loads", NO),
        ("checkpointer.resume()", "(checkpointer.resume() if os.environ.get('X') else 0)", "loads", YES),
    ],
)  # fmt: skip
def test_one_change_to_the_use_of_the_library(folder: Path, old: str, new: str, fact: str, answer: Answer) -> None:
    assert old in LIBRARY
    assert read(folder, LIBRARY.replace(old, new))[fact].answer is answer


LOADS = """
import {0}, glob, os, torch
def start(model, optimizer, resume=None):
    {1}
        state = torch.load({2})
        optimizer.load_state_dict(state["optimizer"])
{3}
"""


@pytest.mark.parametrize(
    ("library", "condition", "path", "end", "alone"),
    [
        ("argparse", "if os.path.isfile('last.pt'):", "'last.pt'", "start(a, b)", YES),
        ("argparse", "if (files := glob.glob('*.pt')):", "max(files)", "start(a, b)", YES),
        ("argparse", "if resume:", "resume", "start(a, b)", UNKNOWN),
        ("fire", "if resume:", "resume", "fire.Fire(start)", NO),
    ],
)
def test_how_a_start_finds_its_save(
    tmp_path: Path, library: str, condition: str, path: str, end: str, alone: Answer
) -> None:
    facts = read(tmp_path, LOADS.format(library, condition, path, end))
    assert (facts["loads"].answer, facts["loads_alone"].answer) == (YES, alone)


def test_click_options_are_arguments(tmp_path: Path) -> None:
    text = (
        LOADS.format("click", "if resume:", "resume", "").replace("\ndef", "\n@click.option('--resume')\ndef")
        + "start()\n"
    )
    facts = read(tmp_path, text)
    assert [each.value for each in facts.proposals] == [["--resume", "{checkpoint}"]]


def test_workers_by_a_dict_and_by_a_function(tmp_path: Path) -> None:
    text = (
        "from torch.utils.data import DataLoader\ndef make(**more):\n    DataLoader(1, **more)\nmake(num_workers=2)\n"
    )
    assert read(tmp_path, text)["workers"].detail == "2"
    text = "import torch_geometric.loader as l\nmore = dict(num_workers=4)\nl.NeighborLoader(1, **more)\n"
    assert read(tmp_path, text)["workers"].detail == "4"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("import torch\ndef train():\n    loss.backward()\n", NO),
        ("import torch\ndef train():\n    loss.backward()\ntrain()\n", YES),
        ("import torch\nprint(torch.load('x'))\n", NO),
        ("import numpy\nloss.backward()\n", NO),
        ("import transformers as t\nt.Trainer(model).train()\n", YES),
        ("import hydra, torch\nhydra.utils.instantiate(c).go()\n", UNKNOWN),
        ("def (:\n", UNKNOWN),
    ],
)
def test_what_a_training_program_is(tmp_path: Path, text: str, answer: Answer) -> None:
    (tmp_path / "a.py").write_text(text)
    assert is_training_program(str(tmp_path / "a.py")) is answer


def test_frameworks(tmp_path: Path) -> None:
    accelerate = """
from accelerate import Accelerator
def train():
    accelerator = Accelerator()
    model, optimizer, loader = accelerator.prepare(net, opt, train_loader)
    accelerator.save_state("out")
train()
"""
    facts = read(tmp_path, accelerate)
    for name in (
        "process_group",
        "wraps_model",
        "local_rank_device",
        "shards_data",
        "set_epoch",
        "saves",
        "saves_random",
    ):
        assert facts[name].answer is YES, name
    assert facts["saves_step"].answer is UNKNOWN
    lightning = "import lightning as L\ntrainer = L.Trainer(devices='auto')\ntrainer.fit(model, ckpt_path=None)\n"
    facts = read(tmp_path, lightning)
    assert (facts["saves"].answer, facts["saves_random"].answer, facts["loads"].answer) == (YES, NO, UNKNOWN)
    hugging = "from transformers import Trainer\nclass Mine(Trainer):\n    pass\nMine(model).train()\n"
    facts = read(tmp_path, hugging)
    assert (facts["wraps_model"].answer, facts["saves_random"].answer) == (YES, YES)


def test_what_an_unknown_object_does_is_open(tmp_path: Path) -> None:
    text = "from composer import Trainer\nTrainer(model, save_folder='x').fit()\n"
    facts = read(tmp_path, text)
    assert {facts[name].answer for name in ("saves", "loads", "saves_optimizer", "saves_every_rank")} == {UNKNOWN}
    facts = read(
        tmp_path, "import torch\ndef f(thing):\n    thing.save('x')\n    thing.restore('x')\n    thing.seed(1)\nf(a)\n"
    )
    assert {facts[name].answer for name in ("saves", "loads", "seeds")} == {UNKNOWN}
    facts = read(tmp_path, "import torch\nimport webdataset as wds\nwds.WebLoader(x, nodesplitter=wds.split_by_node)\n")
    assert facts["shards_data"].answer is UNKNOWN


def test_hydra_is_not_guessed(tmp_path: Path) -> None:
    text = """
import hydra
from lightning import Trainer
@hydra.main(config_path="c")
def main(cfg):
    trainer: Trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(hydra.utils.instantiate(cfg.model))
main()
"""
    facts = read(tmp_path, text)
    assert {fact.answer for fact in facts.facts} == {UNKNOWN}


def test_a_package_is_read_by_path(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import torch.distributed as dist\ndist.init_process_group()\nraise SystemExit\n"
    )
    (package / "train.py").write_text("from . import other\nfrom .other import go\ngo()\n")
    (package / "other.py").write_text("import torch\ndef go():\n    torch.manual_seed(0)\n")
    facts = read_program(str(package / "train.py"), [str(tmp_path)], "pkg.train")
    assert facts["seeds"].places[0].file == "other.py"
    assert facts.unread == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("print 'x'\n", "Python 2"),
        ("def (:\n", "line 1"),
        (b"x = '\xff\xfe'\n", "not Python"),
        (b"x = 1\0", "null bytes"),
        ("(" * 5000, "not Python"),
        ("x = " + "-" * 200_000 + "1", ""),
        ("x = 1\n" * 200_000, "larger than"),
    ],
)
def test_unreadable(tmp_path: Path, text: str | bytes, why: str) -> None:
    begin = time.monotonic()
    facts = read(tmp_path, text)
    assert time.monotonic() - begin < 20
    assert {fact.answer for fact in facts.facts} == {UNKNOWN} and len(facts.facts) == len(QUESTIONS)
    assert why in facts.unread[0].why


def test_notebook_and_fifo(tmp_path: Path) -> None:
    assert "notebook" in read(tmp_path, "{}", "a.ipynb").unread[0].why
    os.mkfifo(tmp_path / "train.py")
    assert "not a regular file" in read_program(str(tmp_path / "train.py")).unread[0].why


def test_deep_attributes_end(tmp_path: Path) -> None:
    facts = read(tmp_path, "import torch\nx = a" + ".b" * 900 + "\ny = " + "+".join(["x"] * 900) + "\n")
    assert len(facts.facts) == len(QUESTIONS)


def test_cycles_and_loops(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("import b\nfrom b import y as x\n")
    (tmp_path / "b.py").write_text("import a\nfrom a import x as y\n")
    os.symlink("loop.py", tmp_path / "loop.py")
    os.symlink(tmp_path, tmp_path / "again")
    text = "import a, loop, again.again.a\nfrom a import x\nx()\nt = u\nu = t\nt()\ndef f():\n    f()\nf()\nloop.go()\n"
    facts = read(tmp_path, text)
    assert facts.files == 3
    assert facts["process_group"].answer is UNKNOWN  # loop cannot be read


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FILES", 5)
    for index in range(20):
        (tmp_path / f"m{index}.py").write_text(f"import m{index + 1}\n")
    facts = read(tmp_path, "import m0\n")
    assert facts.files == 5 and "limit" in facts.unread[0].why
    assert facts["process_group"].answer is UNKNOWN


def test_what_is_too_long_to_follow_is_open(tmp_path: Path) -> None:
    text = f"import torch\npath = '/'.join([{'1, ' * 2500}])\ntorch.save(model.state_dict(), path)\n"
    assert read(tmp_path, text)["save_name_changes"].answer is UNKNOWN
    assert read(tmp_path, text.replace("1, " * 2400, ""))["save_name_changes"].answer is NO


def test_the_script_does_not_run(folder: Path) -> None:
    read(folder, "import helper\nopen('made', 'w')\nraise SystemExit(3)\n")
    assert not (folder / "made").exists() and not list(folder.rglob("__pycache__"))
