"""One plain file of a checkpoint, and weights that a run starts from: by real ranks, whatever the mesh."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurmddp.runtime.checkpoint import plain, shards
from slurmddp.runtime.checkpoint.init_weights import load_given, resolve_given
from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint import export
from slurmddp.shared.checkpoint.checkpoints import read_contents
from tests.checkpoints import make_run
from tests.helpers import Desk

from . import toy
from .harness import PATIENCE, Ranks, Run
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
    """By way of a checkpoint of step 3, in the format that the name tells."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "step-00000003"
        folder.mkdir()
        plan = shards.deal([shards._held(tensors)], 0)
        rows, _ = shards.write(folder, 0, {part: tensors[part[0]].contiguous() for part in plan.own})
        shards.finish(folder, plan.metadata, [rows])
        write(folder, path, "all")


def write(checkpoint: Path, output: Path, what: str = "model") -> int:
    """Export in the format that the name tells."""
    form = output.suffix.removeprefix(".")
    return export.write(checkpoint, read_contents(checkpoint), output, form=form, what=what)


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
    assert header.pop("__metadata__") == {"format": "pt", "step": "3", "what": "all"}
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
    tensors = write(trained(size, shard).checkpoint(4), output)
    found = torch.load(output, weights_only=True) if form == "pt" else plain.read(output)
    model = toy.create({}, {}).build_model()
    wanted = {name: value.shape for name, value in model.state_dict().items()}
    assert {name: value.shape for name, value in found.items()} == wanted
    assert len(found) == tensors
    assert all(type(value) is torch.Tensor and value.device.type == "cpu" for value in found.values())
    one = tmp_path / "one.pt"
    write(trained(2, 1).checkpoint(4), one)
    for name, value in plain.read(one).items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)  # the same training on other ranks


@pytest.mark.ranks(2)
def test_all_that_a_checkpoint_holds(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    checkpoint = trained(2, 1).checkpoint(4)
    for form in ("pt", "safetensors"):
        write(checkpoint, tmp_path / f"all.{form}", "all")
    found = plain.read(tmp_path / "all.pt")
    assert same(found, plain.read(tmp_path / "all.safetensors"))
    assert {name.split(".")[0] for name in found} == {"model", "optimizer"}
    given = load_given(tmp_path / "all.pt", toy.create({}, {}).build_model())
    assert given.remarks == ("used only the tensors named model.*",)


@pytest.mark.parametrize("block", [(2, 3, 4), (1, 3, 4), (2, 1, 4), (1, 2, 2), (2, 3, 1)])
def test_blocks_of_any_shape_are_put_together(tmp_path: Path, block: tuple[int, ...]) -> None:
    whole = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4)
    places = list(itertools.product(*(range(0, size, step) for size, step in zip(whole.shape, block, strict=True))))
    parts = {
        ("x", place): whole[tuple(slice(at, at + size) for at, size in zip(place, block, strict=True))].contiguous()
        for place in places
    }
    held = [("x", "int16", [2, 3, 4], [*place], [*part.shape]) for (_, place), part in parts.items()]
    rows, _ = shards.write(tmp_path, 0, parts)
    shards.finish(tmp_path, shards.deal([held], 0).metadata, [rows])
    write(tmp_path, tmp_path / "x.safetensors", "all")
    assert torch.equal(plain.read(tmp_path / "x.safetensors")["x"], whole)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(export.ExportError, match=r"x is of type complex128, which safetensors cannot store"):
        save(tmp_path / "x.safetensors", {"x": torch.zeros(2, dtype=torch.complex128)})
    save(tmp_path / "x.pt", {"x": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(export.ExportError, match=r"a tensor is named __metadata__"):
        save(tmp_path / "x.safetensors", {"__metadata__": torch.zeros(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_a_file_of_torch_save_can_be_mapped(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", MANY)
    found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert same(found, MANY)
    assert all(value.data_ptr() % 64 == 0 for value in found.values() if value.numel())


@pytest.mark.ranks(2)
def test_the_command_needs_no_torch(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    """Nor the run's image, setup lines or code: only its checkpoints are read."""
    desk = Desk(tmp_path / "desk")
    run = make_run(desk.project / "runs" / "gpt-1")
    shutil.copytree(trained(2, 1).root / "checkpoints", run.checkpoints)
    flip(next((run.checkpoints / "step-00000004").glob("*.distcp")))
    before = set(desk.project.iterdir())
    forbid = "import sys; sys.modules.update(torch=None, numpy=None); from slurmddp.commands.app import main; "
    command = [sys.executable, "-c", f"{forbid}sys.argv = ['slurmddp', 'checkpoint', 'export', 'gpt-1']; main()"]
    done = subprocess.run(
        command, cwd=desk.project, env=desk.environment, capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{desk.project}/model.pt\n"
    assert "warning: skipping step-00000004" in done.stderr
    assert set(desk.project.iterdir()) - before == {desk.project / "model.pt"}
    wanted = tmp_path / "wanted.pt"
    write(trained(2, 1).checkpoint(2), wanted)
    assert same(plain.read(desk.project / "model.pt"), plain.read(wanted))


@pytest.mark.ranks(2)
def test_one_that_is_ended_leaves_nothing(trained: Callable[[int, int], Run], tmp_path: Path) -> None:
    desk = Desk(tmp_path / "desk")
    run = make_run(desk.project / "runs" / "gpt-1")
    shutil.copytree(trained(2, 1).root / "checkpoints", run.checkpoints)
    before = set(desk.project.iterdir())
    # It waits, for ever, in the moment before the file gets its name.
    code = "import os, sys, time; from slurmddp.commands.app import main; os.fsync = lambda file: time.sleep(600); "
    code += "sys.argv = ['slurmddp', 'checkpoint', 'export', 'gpt-1']; main()"
    child = subprocess.Popen([sys.executable, "-c", code], cwd=desk.project, env=desk.environment)
    try:
        until = time.monotonic() + 60
        while not any(path.stat().st_size for path in desk.project.glob(".model.pt.*.part")):
            assert child.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 128 + signal.SIGTERM
    finally:
        child.kill()
        child.wait()
    assert set(desk.project.iterdir()) == before


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
    torch.save(weights, tmp_path / "w.pt")
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
    write(source.checkpoint(2), tmp_path / "two.pt")
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
    write(trained(2, 1).checkpoint(4), tmp_path / "w.pt")
    for found in ranks(3, _into_shards, trained(2, 1).checkpoint(4)):
        assert same(found, plain.read(tmp_path / "w.pt"))
