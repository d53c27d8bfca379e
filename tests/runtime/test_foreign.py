"""A checkpoint of somebody who means harm, whose hashes are right: whatever loads it runs nothing of it."""

import io
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata

from slurmddp import errors
from slurmddp.job.resolve import Request
from slurmddp.launch.prepare import resolved_job
from slurmddp.launch.resumed import resumed_of
from slurmddp.run import checkpoints
from slurmddp.run.layout import RunFolder
from slurmddp.runtime.checkpoint import plain
from slurmddp.runtime.checkpoint.init_weights import load_given
from slurmddp.runtime.errors import UserError
from slurmddp.shared.checkpoint import contents, export, layout
from slurmddp.shared.checkpoint.checkpoints import read_contents
from tests.checkpoints import Touch, replace
from tests.helpers import Desk, change_code

from . import toy
from .harness import Failed, Ranks, Run


@pytest.fixture(scope="module")
def good(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run.create(tmp_path_factory.mktemp("run"), checkpoint__keep=3, train__steps=4)
    ranks.train(2, run)
    return run


def in_metadata(folder: Path, evil: Touch) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = evil
    replace(folder, ".metadata", pickle.dumps(metadata))


def in_tensors(folder: Path, evil: Touch) -> None:
    """What torch.save makes of it, in the place of every tensor."""
    content = torch_saved(evil)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content)
    replace(folder, ".metadata", pickle.dumps(metadata))
    for path in folder.glob("*.distcp"):
        replace(folder, path.name, content)


def in_old_tensors(folder: Path, evil: Touch) -> None:
    """A bare pickle there, which old torch takes for its first format."""
    in_tensors(folder, evil)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    content = pickle.dumps(evil)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(content)
    replace(folder, ".metadata", pickle.dumps(metadata))
    for path in folder.glob("*.distcp"):
        replace(folder, path.name, content)


def in_randomness(folder: Path, evil: Touch) -> None:
    replace(folder, "rng/rank-00000.pt", torch_saved(evil))


def torch_saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


Plant = Callable[[Path, Touch], None]
#: How, the file that the message names, and what it says of it.
PLANTED = [
    (in_metadata, ".metadata", "names posix.system"),
    (in_tensors, "distcp", "names posix.system"),
    (in_old_tensors, "distcp", "is damaged: torch.save did not write what is at byte 0"),
]


@pytest.fixture
def planted(good: Run, tmp_path: Path) -> Callable[[Plant], tuple[Run, Path]]:
    """A copy of the good run in which somebody has changed both checkpoints, and the file that must not appear."""

    def make(plant: Plant) -> tuple[Run, Path]:
        shutil.copytree(good.root, tmp_path / "foreign")
        run, sign = Run(tmp_path / "foreign"), tmp_path / "sign"
        for step in (2, 4):
            plant(run.checkpoint(step), Touch(sign))
            manifest = layout.read_manifest(run.checkpoint(step))
            assert all(
                layout.facts(run.checkpoint(step) / name).sha256 == item.sha256 for name, item in manifest.files.items()
            )
        return run, sign

    return make


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("plant", "file", "what"), PLANTED)
def test_weights_to_start_from(
    planted: Callable[[Plant], tuple[Run, Path]], plant: Plant, file: str, what: str
) -> None:
    run, sign = planted(plant)
    for path in (run.root, run.checkpoint(4)):
        with pytest.raises(UserError) as caught:
            load_given(path, toy.create({}, {}).build_model())
        assert file in str(caught.value) and what in str(caught.value) and "step-00000004" in str(caught.value)
    assert not sign.exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("plant", "file", "what"), [*PLANTED[:2], (in_old_tensors, "distcp", "is damaged at byte 0: BadZipFile")]
)
def test_the_export(planted: Callable[[Plant], tuple[Run, Path]], plant: Plant, file: str, what: str) -> None:
    run, sign = planted(plant)
    folder = run.checkpoint(4)
    with pytest.raises(layout.Rejected) as caught:
        export.write(folder, read_contents(folder), run.root / "x.pt", form="pt")
    assert caught.value.folder == folder and file in caught.value.file and what in caught.value.why
    assert not sign.exists() and not (run.root / "x.pt").exists()


@pytest.mark.ranks(2)
def test_verify(
    good: Run, planted: Callable[[Plant], tuple[Run, Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the login side, whose code loads nothing by torch."""
    (item, *_) = checkpoints.survey(RunFolder(good.root))
    assert checkpoints.check(item).fault is None
    for plant, file, what in [*PLANTED, (in_randomness, "rng/rank-00000.pt", "names posix.system")]:
        run, sign = planted(plant)
        (item, *_) = checkpoints.survey(RunFolder(run.root))
        fault = checkpoints.check(item).fault
        assert fault is not None and file in fault and what.partition(": ")[0] in fault, plant
        assert not sign.exists()
        shutil.rmtree(run.root)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("plant", "file", "what"), [*PLANTED, (in_randomness, "rng/rank-00000.pt", "names posix.system")]
)
def test_a_run_that_resumes(
    ranks: Ranks,
    planted: Callable[[Plant], tuple[Run, Path]],
    tmp_path: Path,
    plant: Plant,
    file: str,
    what: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run, sign = planted(plant)
    new = Run.create(tmp_path / "new", train__steps=5, resume_from=[str(run.root / "checkpoints")])
    with pytest.raises(Failed) as caught:
        ranks.train(2, new)
    said = "".join(text for _, text in caught.value.failures.values())
    if plant is in_metadata:
        # Refused while it is verified: the one before is looked at, which is refused, too.
        assert "none of the checkpoints to resume from is good" in said
        rejected = new.events("checkpoint_rejected")
        assert [Path(event["path"]).name for event in rejected] == ["step-00000004", "step-00000002"]
        said = "".join(event["file"] + " " + event["why"] for event in rejected)
    else:
        assert "step-00000004" in said
    assert file in said and what in said
    assert not sign.exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("field", "value"),
    [("length", -1), ("offset", "0"), ("offset", 1.5), ("relative_path", "../x"), ("sizes", (-1,)), ("size", (True,))],
)
def test_numbers_and_names_that_lie(good: Run, tmp_path: Path, field: str, value: Any) -> None:
    metadata = pickle.loads((good.checkpoint(4) / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        if hasattr(info, field):
            setattr(info, field, value)
    for stored in metadata.state_dict_metadata.values():
        for item in (stored, *stored.chunks):
            if hasattr(item, field):
                object.__setattr__(item, field, value)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(contents.Refused, match=r"is damaged|is not in the checkpoint's folder"):
        contents.read(tmp_path / ".metadata")


@pytest.mark.ranks(2)
def test_enums_as_the_first_releases_of_python_3_11_write_them(good: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """They name getattr, which the reader does not call. Debian 12's Python is one of them."""
    folder = good.checkpoint(4)
    metadata, expected = pickle.loads((folder / ".metadata").read_bytes()), contents.read(folder / ".metadata")
    member = dcp_metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(member, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    old = pickle.dumps(metadata)
    assert b"getattr" in old
    monkeypatch.undo()
    path = folder.parent / "old"
    path.write_bytes(old)
    assert contents.read(path) == expected
    path.unlink()


@pytest.fixture
def theirs(good: Run, tmp_path: Path) -> tuple[Desk, RunFolder, Path]:
    """A run whose every part makes a file where it is executed, in a folder."""
    signs = tmp_path / "signs"
    signs.mkdir()
    desk = Desk(tmp_path / "desk")
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    desk.write("books/a.txt", "text")
    evil = desk.write("evil", "").resolve()
    evil.write_text(f'#!/bin/bash\ntouch {signs}/python\nexec {sys.executable} "$@"\n')
    evil.chmod(0o755)
    sourced = desk.write("sourced", f"touch {signs}/environment\n").resolve()
    desk.write(
        "job.yaml",
        f"name: gpt\nsite: cores\ncontainer: {{runtime: none, python: {evil}}}\n"
        f"setup: ['touch {signs}/setup']\nenvironment: {{BASH_ENV: {sourced}}}\n"
        "train: {task: lm, data: {path: books}}\n",
    )
    done = desk.command("submit", "job.yaml")
    assert done.code == 0, done.err
    folder = RunFolder(next((desk.project / "runs").iterdir()))
    shutil.copytree(good.root / "checkpoints", folder.checkpoints, dirs_exist_ok=True)
    change_code(folder.path, "runtime/train.py", lambda text: f"open({str(signs / 'code')!r}, 'w')\n{text}")
    return desk, folder, signs


@pytest.mark.ranks(2)
def test_the_export_executes_nothing_that_the_run_names(theirs: tuple[Desk, RunFolder, Path]) -> None:
    desk, folder, signs = theirs
    done = desk.command("checkpoint", "export", str(folder.path), "-o", "x.pt")
    assert done.code == 0, done.err
    assert list(signs.iterdir()) == []
    assert plain.read(desk.project / "x.pt").keys() == toy.create({}, {}).build_model().state_dict().keys()


@pytest.mark.ranks(2)
def test_another_users_job_is_not_resumed_by_the_name_of_its_run(
    theirs: tuple[Desk, RunFolder, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, folder, _ = theirs
    assert resolved_job(Request(environment=desk.environment), resumed_of([folder]))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(
        errors.UserError, match=r"belongs to .*, so you cannot run its commands and image with your account"
    ):
        resolved_job(Request(environment=desk.environment), resumed_of([folder]))
    assert resolved_job(Request(str(folder.job_yaml), environment=desk.environment), resumed_of([folder]))


def test_the_tests_own_pickles_do_what_they_should(tmp_path: Path) -> None:
    sign = tmp_path / "sign"
    torch.load(io.BytesIO(torch_saved(Touch(sign))), weights_only=False)
    assert sign.exists()


def test_a_tar_archive_is_not_unpacked(tmp_path: Path) -> None:
    """torch before 2.6 unpacks one even with weights_only (CVE-2025-32434)."""
    import tarfile

    with tarfile.open(tmp_path / "old.pt", "w") as archive:
        archive.add(__file__, "storages")
    with pytest.raises(UserError, match=r"old\.pt holds more than tensors"):
        plain.read(tmp_path / "old.pt")
