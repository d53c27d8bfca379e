"""The gate to run folders: which runs are this user's, and what may be followed in them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.records.job_events import CancelRequested
from slurmddp.run import checkpoints, index, sweeps
from slurmddp.run.gate import own, own_or_none, stranger
from slurmddp.run.layout import RunFolder
from slurmddp.shared.files import read_plain
from tests.checkpoints import make_checkpoint, make_run

BOB = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "runs" / "gpt-1", 100, 200)


def test_a_run_of_this_user(run: RunFolder) -> None:
    ours = own(run, to="cancel it")
    ours.record(CancelRequested(now=True))
    ours.held.write(ours.stop, "now\n")
    assert b'"cancel_requested"' in read_plain(run.events, below=run.path) and run.stop.read_text() == "now\n"
    ours.held.remove(ours.stop)
    ours.held.remove(ours.stop)  # gone already
    assert not run.stop.exists() and stranger(run) is None
    ours.remove_all()
    assert not run.path.exists()


@as_root
@pytest.mark.parametrize("name", [".", "manifest.json", "code"])
def test_a_run_of_which_a_part_is_another_users(run: RunFolder, name: str) -> None:
    run.code.mkdir()
    os.chown(run.path / name, BOB, -1)
    assert own_or_none(run) is None
    with pytest.raises(UserError, match=r"run gpt-1 .*nobody.*, so you cannot cancel it"):
        own(run, to="cancel it")


@pytest.mark.parametrize("mode", [0o777, 0o1777, pytest.param(0o770, marks=as_root)])
def test_a_run_that_others_can_change(run: RunFolder, mode: int) -> None:
    if mode == 0o770:
        assert stranger(run) is None  # root's group has no other member
        os.chown(run.path, -1, BOB)
    run.path.chmod(mode)
    assert stranger(run) == "can be changed by other users (chmod go-w)"


def test_the_folder_is_held_and_not_its_name(run: RunFolder, tmp_path: Path) -> None:
    """Whoever puts another folder in its place changes nothing."""
    ours = own(run, to="cancel it")
    run.path.rename(tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    run.path.symlink_to(tmp_path / "elsewhere")
    ours.held.write(ours.stop, "now\n")
    assert (tmp_path / "moved" / "stop").exists() and not any((tmp_path / "elsewhere").iterdir())


ACTS: list[Callable[[RunFolder], None]] = [
    lambda run: own(run, to="x").held.write(run.path / "alerts" / "x", ""),
    lambda run: own(run, to="x").held.append_text(run.path / "alerts" / "x", ""),
    lambda run: own(run, to="x").held.make(run.path / "alerts" / "x"),
    lambda run: own(run, to="x").held.remove(run.path / "alerts" / "kept"),
    lambda run: own(run, to="x").held.remove_tree(run.path / "alerts" / "folder"),
    lambda run: own(run, to="x").held.move(run.path / "alerts" / "kept", run.path / "alerts" / "x"),
    lambda run: own(run, to="x").held.move(run.path / "alerts" / "kept", run.path / "x"),
]


@pytest.mark.parametrize("act", ACTS)
def test_nothing_is_changed_behind_a_link(run: RunFolder, tmp_path: Path, act: Callable[[RunFolder], None]) -> None:
    home = tmp_path / "home"
    (home / "folder").mkdir(parents=True)
    (home / "kept").touch()
    (run.path / "alerts").symlink_to(home)
    with pytest.raises(OSError, match="it is a link, and slurmddp changes nothing behind one"):
        act(run)
    assert sorted(path.name for path in home.iterdir()) == ["folder", "kept"]


def test_a_link_in_the_place_of_a_file(run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "bashrc").write_text("true\n")
    run.events.symlink_to(tmp_path / "bashrc")
    run.stop.symlink_to(tmp_path / "bashrc")
    ours = own(run, to="cancel it")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        ours.record(CancelRequested(now=False))
    ours.held.write(run.stop, "now\n")  # replaced, as a file is
    assert (tmp_path / "bashrc").read_text() == "true\n" and not run.stop.is_symlink()
    with pytest.raises(OSError, match="it is a link, which slurmddp does not follow"):
        read_plain(run.events, below=run.path)


class TestCheckpointsOnScratch:
    """RUN/checkpoints as a link that the user made."""

    @pytest.fixture
    def scratch(self, run: RunFolder, tmp_path: Path) -> Path:
        scratch = tmp_path / "scratch"
        run.checkpoints.rename(scratch)
        run.checkpoints.symlink_to(scratch)
        return scratch

    def test_they_are_found_and_verified(self, run: RunFolder, scratch: Path) -> None:
        found = checkpoints.survey(run)
        assert [item.step for item in found] == [200, 100]
        assert checkpoints.check(found[0]).fault is None

    def test_they_are_not_removed(self, run: RunFolder, scratch: Path) -> None:
        planned = checkpoints.plan_pruning(run, keep=1, keep_every=None)
        assert [item.path.name for item in planned.going] == ["step-00000100"]
        with pytest.raises(OSError, match="changes nothing behind one"):
            list(checkpoints.prune(own(run, to="prune it"), planned))
        assert len(list(scratch.iterdir())) == 2

    def test_a_target_that_others_can_change_is_not_followed(self, run: RunFolder, scratch: Path) -> None:
        scratch.chmod(0o777)
        with pytest.raises(UserError, match="it is a link to a folder that others can change"):
            checkpoints.survey(run)

    @as_root
    @pytest.mark.parametrize("whose", ["link", "target"])
    def test_another_users_link_or_target_is_not_followed(self, run: RunFolder, scratch: Path, whose: str) -> None:
        os.chown(run.checkpoints if whose == "link" else scratch, BOB, -1, follow_symlinks=False)
        with pytest.raises(UserError, match="it is a link"):
            checkpoints.survey(run)


@as_root
def test_the_index_takes_no_run_of_another_user(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bobs = make_run(tmp_path / "runs" / "bobs-1")
    bobs.manifest.write_text(bobs.manifest.read_text().replace("2026", "2099"))
    for entry in (bobs, run):
        index.record(index.entry_of(entry))  # bob's was this user's then
    os.chown(bobs.path, BOB, -1)
    assert [entry.id for entry in index.entries()] == ["gpt-1"] and index.find("last").id == "gpt-1"
    assert [entry.id for entry in index.rebuild([tmp_path / "runs"])] == ["gpt-1"]
    assert index.find("bobs-1", [tmp_path / "runs"]).path == bobs.path  # to read it, by its name


@as_root
def test_a_sweep_of_another_user_is_not_submitted(tmp_path: Path) -> None:
    folder = tmp_path / "sweep-1"
    sweep = sweeps.Sweep(folder, {"gpt": {"train.seed": "1"}})
    sweeps.write(sweep, {"gpt": "name: gpt\n"}, 0o755)
    assert sweeps.own(sweep).job_yaml("gpt").read_text() == "name: gpt\n"
    os.chown(folder / "points" / "gpt.yaml", BOB, -1)
    with pytest.raises(UserError, match="cannot be used: it belongs to another user"):
        sweeps.own(sweep).job_yaml("gpt")
    folder.chmod(0o777)
    with pytest.raises(UserError, match="sweep sweep-1 can be changed by other users"):
        sweeps.own(sweep)
    os.chown(folder, BOB, -1)
    with pytest.raises(UserError, match="sweep sweep-1 belongs to nobody"):
        sweeps.own(sweep)


def test_a_checkpoint_folder_keeps_its_name_until_it_goes(run: RunFolder) -> None:
    make_checkpoint(run.checkpoints, 300)
    planned = checkpoints.plan_pruning(run, keep=1, keep_every=None)
    gone = [item.path.name for item in checkpoints.prune(own(run, to="prune it"), planned)]
    assert gone == ["step-00000200", "step-00000100"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000300"]
