"""One plain file of a checkpoint, and weights that a run starts from: by real ranks, whatever the mesh."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.runtime import export
from slurmddp.runtime.checkpoint import plain
from slurmddp.runtime.checkpoint.init_weights import load_given, resolve_given
from slurmddp.runtime.errors import UserError
from tests.helpers import Desk

from . import toy
from .harness import PATIENCE, ROOT, Ranks, Run
from .test_layout import flip

Tensors = dict[str, torch.Tensor]

#: Every type that safetensors has, odd lengths, nothing at all, a scalar.
MANY: Tensors = {
    "a.weight": torch.randn(3, 5),
    "b": torch.randn(7, dtype=torch.bfloat16),
    "c": torch.randn(2, 2, 2, dtype=torch.float64).transpose(0, 2),
    "d": torch.tensor(3),
    "e": torch.empty(0, 4),
    "f": torch.tensor([True, False, True]),
    "g": torch.arange(5, dtype=torch.uint8),
    "h": torch.randn(3).to(torch.float8_e4m3fn),
    "i": torch.randn(3, dtype=torch.float16),
    "j": torch.arange(3, dtype=torch.int16),
    "k": torch.randn(2, dtype=torch.complex64),
    "schön": torch.arange(3, dtype=torch.int8),
}


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(
        first[name].dtype == second[name].dtype
        and first[name].shape == second[name].shape
        and first[name].reshape(-1).tolist() == second[name].reshape(-1).tolist()
        for name in first
    )


def save(path: Path, tensors: Tensors) -> None:
    """In the format that the name tells."""
    if path.suffix == plain.SAFETENSORS:
        specs = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
        plain.write_safetensors(path, specs, lambda names: {name: tensors[name] for name in names}, {"step": "3"})
    else:
        plain.write_pt(path, tensors)


@pytest.fixture(scope="module")
def trained(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Run]:
    """A run of the toy task on so many ranks, with parameters sharded over so many."""
    made: dict[tuple[int, int], Run] = {}

    def run(size: int, shard: int) -> Run:
        if (size, shard) not in made:
            new = Run.create(tmp_path_factory.mktemp("run"), parallel__shard=shard, checkpoint__keep=3, train__steps=4)
            ranks.train(size, new)
            made[size, shard] = new
        return made[size, shard]

    return run


# --- the formats


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_round_trip(tmp_path: Path, name: str) -> None:
    save(tmp_path / name, MANY)
    assert same(plain.read(tmp_path / name), MANY)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_safetensors_is_what_its_format_says(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save(path, MANY)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"step": "3"}
    end = 0
    for item in sorted(header.values(), key=lambda item: item["data_offsets"]):
        begin, last = item["data_offsets"]
        assert begin == end, "no holes"
        end = last
    assert 8 + length + end == len(content)
    begin, last = header["a.weight"]["data_offsets"]
    assert (header["a.weight"]["dtype"], header["a.weight"]["shape"], last - begin) == ("F32", [3, 5], 60)
    found = torch.frombuffer(bytearray(content[8 + length + begin : 8 + length + last]), dtype=torch.float32)
    assert torch.equal(found.reshape(3, 5), MANY["a.weight"])


def test_the_safetensors_library_agrees(tmp_path: Path) -> None:
    theirs = pytest.importorskip("safetensors.torch")
    save(tmp_path / "ours.safetensors", MANY)
    assert same(theirs.load_file(tmp_path / "ours.safetensors"), MANY)
    theirs.save_file({name: value.contiguous() for name, value in MANY.items()}, tmp_path / "theirs.safetensors")
    assert same(plain.read(tmp_path / "theirs.safetensors"), MANY)


def test_a_header_that_is_not_padded(tmp_path: Path) -> None:
    path = tmp_path / "odd.safetensors"
    header = json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}})
    header += " " * (3 - len(header) % 4)
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes([0, 0, 128, 63, 0, 0, 0, 64]))
    assert plain.read(path)["x"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
@pytest.mark.parametrize("cut", [0, 5, 60, -1])
def test_a_file_that_is_cut(tmp_path: Path, name: str, cut: int) -> None:
    save(tmp_path / name, {"x": torch.randn(100)})
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[:cut])
    with pytest.raises(UserError, match=r"not a (file of torch\.save|safetensors file)"):
        plain.read(tmp_path / name)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F99", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [0, -2], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [0, 10**30], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2**62] * 300_000, "data_offsets": [0, 8]},
        7,
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: object) -> None:
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(UserError, match="damaged, or not a safetensors") as caught:
        plain.read(tmp_path / "x.safetensors")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["[" * 1_000_000, '{"x":' * 1_000_000, "9" * 1_000_000])
def test_a_deep_header(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    with pytest.raises(UserError, match="damaged, or not a safetensors"):
        plain.read(tmp_path / "x.safetensors")


def test_a_file_that_would_run_code_or_holds_something_else(tmp_path: Path) -> None:
    torch.save({"model": toy.create({}, {})}, tmp_path / "object.pt")
    with pytest.raises(UserError, match=r"object\.pt names runtime\.toy\.Toy: it holds more than tensors"):
        plain.read(tmp_path / "object.pt")
    torch.save({"weight": torch.zeros(1), "step": 3}, tmp_path / "mixed.pt")
    with pytest.raises(UserError, match="contains 'step', a int"):
        plain.read(tmp_path / "mixed.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(UserError, match="contains a list"):
        plain.read(tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(UserError, match="not a file of torch"):
        plain.read(tmp_path / "text.pt")
    with pytest.raises(UserError, match="cannot read"):
        plain.read(tmp_path / "gone.pt")


def test_the_old_format_of_torch_save(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert plain.read(tmp_path / "old.pt")["x"].tolist() == [1, 1]


def test_groups_are_small_and_in_order() -> None:
    specs = {name: ((count,), torch.float32) for name, count in {"a": 1, "b": 2, "c": 100, "d": 1, "e": 1}.items()}
    assert list(plain.groups("abcde", specs, limit=12)) == [["a", "b"], ["c"], ["d", "e"]]


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / name, {"x": torch.zeros(3)})
    before = (tmp_path / name).read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / name, MANY)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


# --- export


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("size", "shard"), [(2, 1), (3, 3)])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_the_weights_of_ranks_in_one_file(
    trained: Callable[[int, int], Run], tmp_path: Path, size: int, shard: int, form: str
) -> None:
    output = tmp_path / f"model.{form}"
    tensors, extent = export.write(trained(size, shard).checkpoint(4), output, form=form)
    assert extent == output.stat().st_size
    found = torch.load(output, weights_only=True) if form == "pt" else plain.read(output)
    model = toy.create({}, {}).build_model()
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in found.items()} == wanted
    assert len(found) == tensors
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in found.values())
    one = tmp_path / "one.pt"
    export.write(trained(2, 1).checkpoint(4), one, form="pt")
    for name, value in plain.read(one).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # the same training on other ranks


@pytest.mark.ranks(2)
def test_all_that_a_checkpoint_holds(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    checkpoint = trained(2, 1).checkpoint(4)
    for form in ("pt", "safetensors"):
        export.write(checkpoint, tmp_path / f"all.{form}", form=form, what="all")
    found = plain.read(tmp_path / "all.pt")
    assert same(found, plain.read(tmp_path / "all.safetensors"))
    assert {name.split(".")[0] for name in found} == {"model", "optimizer"}
    given = load_given(tmp_path / "all.pt", toy.create({}, {}).build_model())
    assert given.remarks == ("used only the tensors named model.*",)


def exported(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slurmddp.runtime.export", *arguments], cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=PATIENCE, **more,
    )  # fmt: skip


@pytest.mark.ranks(2)
def test_the_module_by_hand(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    checkpoint = tmp_path / "step-00000004"
    shutil.copytree(trained(2, 1).checkpoint(4), checkpoint)
    output = tmp_path / "model.safetensors"
    done = exported(str(checkpoint), "--output", str(output))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f"{output.stat().st_size} bytes, to {output}" in done.stdout
    with pytest.raises(UserError, match="exists: choose another file"):
        export.write(checkpoint, output, form="pt")
    flip(next(checkpoint.glob("*.distcp")))
    damaged = exported(str(checkpoint), "--output", str(output), "--force")
    assert damaged.returncode == 2
    assert damaged.stderr.startswith("slurmddp: error: ")
    assert ".distcp: has other content" in damaged.stderr


@pytest.mark.ranks(2)
def test_one_that_is_ended_leaves_nothing(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    checkpoint = trained(2, 1).checkpoint(4)
    # It waits, for ever, in the moment before the file gets its name.
    slow = "import os, sys, time; from slurmddp.runtime import export\nos.fsync = lambda descriptor: time.sleep(600)\n"
    code = f"{slow}export.main({[str(checkpoint), '--output', str(tmp_path / 'model.pt')]})"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        until = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob(".model.pt.*.part")):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.wait()
    assert list(tmp_path.iterdir()) == []


CONTAINER = """#!/bin/bash
# What apptainer exec does for us: the variables with its prefix, the folder, the command behind the image.
while [[ $1 != *.sif ]]; do
  [[ $1 != --pwd ]] || cd "$2" || exit
  shift
done
shift
for name in $(compgen -e | grep ^APPTAINERENV_); do export "${name#APPTAINERENV_}=${!name}"; done
[[ $1 == python3 ]] && shift
exec PYTHON "$@"
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "runtime", ["none", pytest.param("apptainer", marks=pytest.mark.long)]
)  # tests/cluster/test_training.py has a real one
def test_the_command_uses_the_runs_own_environment(
    trained: Callable[[int, int], Run], tmp_path: Path, runtime: str
) -> None:
    desk = Desk(tmp_path / "desk")
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    desk.program("apptainer", CONTAINER.replace("PYTHON", sys.executable))
    desk.write("image.sif", "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0")
    desk.write("books/a.txt", "text")
    container = f"{{runtime: none, python: {sys.executable}}}" if runtime == "none" else "{image: image.sif}"
    site = "cores" if runtime == "none" else "gpus"
    job = f"name: gpt\nsite: {site}\ncontainer: {container}\ntrain: {{task: lm, data: {{path: books}}}}\n"
    desk.write("job.yaml", job)
    assert desk.command("submit", "job.yaml").code == 0
    run = next((desk.project / "runs").iterdir())
    shutil.copytree(trained(2, 1).root / "checkpoints", run / "checkpoints", dirs_exist_ok=True)
    flip(next((run / "checkpoints" / "step-00000004").glob("*.distcp")))
    before = set(desk.tree())
    done = desk.command("checkpoint", "export", "last")
    assert done.code == 0, done.err
    assert done.out == f"{desk.project}/model.pt\n"
    assert "warning: skipping step-00000004" in done.err
    assert set(desk.tree()) - before == {"project/model.pt"}
    wanted = tmp_path / "wanted.pt"
    export.write(trained(2, 1).checkpoint(2), wanted, form="pt")
    assert same(plain.read(desk.project / "model.pt"), plain.read(wanted))
    if runtime == "none":
        return
    (run / "code" / "slurmddp.zip").unlink()
    again = desk.command("checkpoint", "export", "last", "--force", "-o", "x.safetensors")
    assert again.code == 0, again.err
    assert same(plain.read(desk.project / "x.safetensors"), plain.read(wanted))


# --- starting from given weights


def fresh(width: int = 8) -> nn.Module:
    torch.manual_seed(99)
    return toy.create({}, {"width": width}).build_model()


@pytest.fixture
def weights() -> Tensors:
    torch.manual_seed(5)
    return {name: torch.randn_like(value) for name, value in fresh().state_dict().items()}


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_given_by_a_file(tmp_path: Path, weights: Tensors, name: str) -> None:
    save(tmp_path / name, weights)
    model = fresh()
    given = load_given(str(tmp_path / name), model)
    assert (given.path, given.tensors, given.remarks) == (tmp_path / name, 6, ())
    assert same(dict(model.state_dict()), weights)


@pytest.mark.parametrize("key", ["model", "state_dict"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_given_by_a_wrapped_state(tmp_path: Path, weights: Tensors, key: str, prefix: str) -> None:
    torch.save({key: {prefix + name: value for name, value in weights.items()}, "step": 3}, tmp_path / "w.pt")
    model = fresh()
    given = load_given(tmp_path / "w.pt", model)
    assert len(given.remarks) == prefix.count(".")
    assert all(part + "." in " ".join(given.remarks) for part in prefix.split(".") if part)
    assert same(dict(model.state_dict()), weights)
    wrapped = nn.ModuleDict({"module": fresh()})  # as DDP names them
    load_given(tmp_path / "w.pt", wrapped)
    assert same(dict(wrapped["module"].state_dict()), weights)


def test_a_submodule_that_was_compiled(tmp_path: Path, weights: Tensors) -> None:
    torch.save({name.replace("0.", "0._orig_mod."): value for name, value in weights.items()}, tmp_path / "w.pt")
    model = fresh()
    assert load_given(tmp_path / "w.pt", model).remarks == ("_orig_mod. removed from the names",)
    assert same(dict(model.state_dict()), weights)


def test_other_types_are_converted(tmp_path: Path, weights: Tensors) -> None:
    half = {name: value.to(torch.bfloat16) for name, value in weights.items()}
    save(tmp_path / "w.safetensors", half)
    model = fresh()
    assert load_given(tmp_path / "w.safetensors", model).remarks == ("converted from bfloat16",)
    assert same(dict(model.state_dict()), {name: value.float() for name, value in half.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("0.weight"), r"0.weight: not there there, \[8, 4\] in the model"),
        (lambda w: w.update({"0.weight": torch.zeros(9, 4)}), r"0.weight: \[9, 4\] there, \[8, 4\] in the model"),
        (lambda w: w.update(extra=torch.zeros(2)), r"extra: \[2\] there, not there in the model"),
        (lambda w: w.clear(), r"0.weight: not there there.*and 1 more"),
    ],
)
def test_weights_of_another_model_change_nothing(
    tmp_path: Path, weights: Tensors, change: Callable[[Tensors], None], message: str
) -> None:
    change(weights)
    save(tmp_path / "w.pt", weights)
    model = fresh()
    with pytest.raises(UserError, match=message):
        load_given(tmp_path / "w.pt", model)
    assert same(dict(model.state_dict()), dict(fresh().state_dict()))


@pytest.mark.ranks(3)
@pytest.mark.parametrize("shard", [1, 3])
def test_given_by_a_run_its_newest_good_checkpoint(
    trained: Callable[[int, int], Run], tmp_path: Path, shard: int
) -> None:
    source = trained(3, shard)
    run = tmp_path / "run"
    shutil.copytree(source.root / "checkpoints", run / "checkpoints")
    flip(next((run / "checkpoints" / "step-00000004").glob("*.distcp")))
    export.write(source.checkpoint(2), tmp_path / "two.pt", form="pt")
    for place in (run, run / "checkpoints", run / "checkpoints" / "step-00000002"):
        model = fresh()
        given = load_given(place, model)
        assert given.path == run / "checkpoints" / "step-00000002"
        assert same(dict(model.state_dict()), plain.read(tmp_path / "two.pt"))
    with pytest.raises(UserError, match="has other content"):
        load_given(run / "checkpoints" / "step-00000004", fresh())
    with pytest.raises(UserError, match=r"0.weight: \[8, 4\] there, \[9, 4\] in the model"):
        load_given(run, fresh(width=9))
    flip(next((run / "checkpoints" / "step-00000002").glob("*.distcp")))
    with pytest.raises(UserError, match=r"no checkpoint in .* is good; the newest: .*step-00000004"):
        load_given(run, fresh())


def test_what_is_nothing_to_start_from(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        resolve_given(tmp_path / "gone")
    with pytest.raises(UserError, match="contains no checkpoints"):
        resolve_given(tmp_path)
    (tmp_path / "step-00000001").mkdir()
    with pytest.raises(UserError, match="COMPLETE: is missing"):
        resolve_given(tmp_path / "step-00000001")


def _into_shards(joined: Any, path: Path) -> Tensors:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        from torch.distributed._composable.fsdp import fully_shard

    model = fresh()
    fully_shard(model, mesh=init_device_mesh("cpu", (joined.size,)))
    load_given(path, model)
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.ranks(3)
def test_given_to_sharded_parameters(
    ranks: Ranks, trained: Callable[[int, int], Run], tmp_path: Path, weights: Tensors
) -> None:
    save(tmp_path / "w.safetensors", weights)
    for found in ranks(3, _into_shards, tmp_path / "w.safetensors"):
        assert same(found, weights)
    export.write(trained(2, 1).checkpoint(4), tmp_path / "w.pt", form="pt")
    for found in ranks(3, _into_shards, trained(2, 1).checkpoint(4)):
        assert same(found, plain.read(tmp_path / "w.pt"))
