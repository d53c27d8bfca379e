"""Checkpoints as a login node sees them: the same verdict as the ranks', and nothing removed that is needed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.records.checkpoint import VERSION
from slurmddp.run import checkpoints
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.shared.checkpoint import layout
from slurmddp.shared.checkpoint.checkpoints import Checkpoints
from tests.checkpoints import flip, make_checkpoint, make_run


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def newer_schema(path: Path) -> None:
    path.write_text(path.read_text().replace(f'"schema": {VERSION}', '"schema": 99'))
    layout.mark_complete(path.parent)


def no_files(path: Path) -> None:
    layout.write_json(path, {"schema": VERSION, "files": {"data.json": 3}})
    layout.mark_complete(path.parent)


#: What happened to which file, what the message says, and whether it shows without hashing.
DAMAGES: list[tuple[str, Callable[[Path], None], str, bool]] = [
    ("__0_0.distcp", flip, "__0_0.distcp has other content", False),
    ("__0_0.distcp", truncate, "__0_0.distcp has 999 bytes, not 1000", True),
    ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing", True),
    ("rng/rank-00000.pt", flip, "rng/rank-00000.pt has other content", False),
    ("data.json", as_folder, "data.json", True),
    ("manifest.json", flip, "manifest.json", True),
    ("manifest.json", truncate, "manifest.json does not match the hash in COMPLETE", True),
    ("manifest.json", Path.unlink, "manifest.json is missing", True),
    ("manifest.json", newer_schema, "manifest.json has schema 99", True),
    ("manifest.json", no_files, "manifest.json is not a manifest", True),
    ("COMPLETE", Path.unlink, "COMPLETE is missing: the checkpoint was never finished", True),
    ("COMPLETE", truncate, "", False),  # only the line's end: nothing is lost
    ("COMPLETE", as_folder, "COMPLETE cannot be read", True),
]


@pytest.mark.parametrize(("name", "damage", "message", "at_a_glance"), DAMAGES)
def test_damage_is_found_as_the_ranks_find_it(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str, at_a_glance: bool
) -> None:
    folder = make_run(tmp_path / "run", 1, 2)
    path = folder.checkpoints / "step-00000002"
    damage(path / name)
    newest, older = checkpoints.survey(folder)
    assert (newest.fault is not None) == at_a_glance
    fault = checkpoints.check(newest).fault
    assert (fault is not None) == bool(message)
    assert message in (fault or "")
    assert (older.fault, checkpoints.check(older).fault) == (None, None)
    try:
        Checkpoints.verify(path)
        refused = False
    except layout.Rejected:
        refused = True
    assert refused == bool(message), "the login side and the ranks agree"
    good = [item.step for item in map(checkpoints.check, (newest, older)) if item.fault is None]
    assert good == ([1] if message else [2, 1])


def test_what_is_known_of_one(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 7)
    (item,) = checkpoints.survey(folder)
    path = folder.checkpoints / "step-00000007"
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    assert (item.step, item.run, item.own, item.world) == (7, "run", True, 2)
    assert (item.files, item.bytes) == (6, sum(sizes))
    assert item.saved == (path / "COMPLETE").stat().st_mtime


def test_the_runs_that_a_run_continues_come_after_its_own(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", 10, 20)
    gone = tmp_path / "gone" / "checkpoints"
    second = make_run(tmp_path / "second", 15, job={"resume_from": [str(first.checkpoints), str(gone)]})
    found = checkpoints.survey(second)
    assert [(item.run, item.step, item.own) for item in found] == [
        ("second", 15, True),
        ("first", 20, False),
        ("first", 10, False),
    ]
    assert checkpoints.resumed_from(found) is found[0]
    (second.checkpoints / "step-00000015" / "COMPLETE").unlink()
    assert checkpoints.resumed_from(checkpoints.survey(second)) == found[1]
    shutil.rmtree(second.checkpoints)
    with pytest.raises(UserError, match="no checkpoints yet") as refused:
        checkpoints.own(second)
    assert "a checkpoint of first" in str(refused.value)


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    found = checkpoints.survey(make_run(tmp_path / "run", *range(1, 14)))
    assert checkpoints.at_step(found, 13) is found[0]
    with pytest.raises(UserError, match="no checkpoint of step 5000") as refused:
        checkpoints.at_step(found, 5000)
    assert "13, 12, 11" in str(refused.value)
    assert str(refused.value).endswith("...")


def test_a_script_of_the_users_own(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.job_json.unlink()
    for _ in range(2):
        with pytest.raises(UserError, match="ran your own script"):
            checkpoints.survey(folder)
        folder.checkpoints.mkdir(exist_ok=True)  # as a submission does
    make_checkpoint(folder.checkpoints, 3)  # by slurmddp.runtime's Checkpointer
    assert [item.step for item in checkpoints.survey(folder)] == [3]


@pytest.mark.parametrize("text", ["{", "[]", '{"resume_from": 3}', '{"resume_from": [3]}', "\xff"])
def test_a_damaged_job_json(tmp_path: Path, text: str) -> None:
    folder = make_run(tmp_path / "run", 1)
    folder.job_json.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="is damaged"):
        checkpoints.survey(folder)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    folder.checkpoints.write_text("")
    with pytest.raises(UserError, match="not a folder"):
        checkpoints.survey(folder)


# --- pruning


def pruned(folder: RunFolder, keep: int, keep_every: int | None = None, running: bool = False) -> list[str]:
    """Prune, and what is there afterwards."""
    planned = checkpoints.plan_pruning(folder, keep=keep, keep_every=keep_every, running=running)
    extent = sum(item.bytes for item in planned.going)
    before = size(folder)
    gone = list(checkpoints.prune(own(folder, to="prune it"), planned))
    assert gone == planned.going
    assert before - size(folder) == planned.bytes == extent
    return sorted(path.name for path in folder.checkpoints.iterdir())


def size(folder: RunFolder) -> int:
    return sum(path.stat().st_size for path in folder.checkpoints.rglob("*") if path.is_file())


def names(*steps: int) -> list[str]:
    return [layout.folder_name(step) for step in steps]


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [(1, None, (6,)), (2, None, (5, 6)), (6, None, (1, 2, 3, 4, 5, 6)), (99, 1, (1, 2, 3, 4, 5, 6)), (1, 2, (2, 4, 6)),
     (1, 4, (4, 6)), (2, 100, (5, 6))],
)  # fmt: skip
def test_what_stays(tmp_path: Path, keep: int, keep_every: int | None, left: tuple[int, ...]) -> None:
    folder = make_run(tmp_path / "run", 1, 2, 3, 4, 5, 6)
    assert pruned(folder, keep, keep_every) == names(*left)


@pytest.mark.parametrize("damage", [flip, truncate, Path.unlink])
def test_damaged_ones_do_not_count(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    folder = make_run(tmp_path / "run", 1, 2, 3, 4, 5, 6)
    for step in (6, 4):
        damage(folder.checkpoints / layout.folder_name(step) / "__0_0.distcp")
    planned = checkpoints.plan_pruning(folder, keep=2, keep_every=None)
    assert [item.step for item in planned.left] == [6]
    assert pruned(folder, 2) == names(3, 5, 6), "5 and 3 are the two newest good; 6 is newer than any good one"


def test_what_cannot_be_read_stays(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, 2, 3, 4)
    for step in (2, 4):
        as_folder(folder.checkpoints / layout.folder_name(step) / "COMPLETE")
    assert [item.step for item in checkpoints.plan_pruning(folder, keep=1, keep_every=None).left] == [4, 2]
    assert pruned(folder, 1) == names(2, 3, 4)


def test_nothing_goes_where_nothing_is_good(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, 2, 3)
    for path in folder.checkpoints.iterdir():
        flip(path / "__0_0.distcp")
    with pytest.raises(UserError, match="no good checkpoint: nothing is removed"):
        checkpoints.plan_pruning(folder, keep=1, keep_every=1)
    assert len(list(folder.checkpoints.iterdir())) == 3


def test_unfinished_saves_go_unless_the_run_is_writing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, 2)
    left = [layout.temporary_name("saving", 3, 0, "ab"), layout.temporary_name("old", 1, 0, "cd")]
    for name in left:
        (folder.checkpoints / name).mkdir()
        (folder.checkpoints / name / "x").write_bytes(b"123")
    (folder.checkpoints / "notes").mkdir()
    assert [(item.path.name, item.bytes) for item in checkpoints.leftovers(folder)] == [(n, 3) for n in sorted(left)]
    assert pruned(folder, 1, running=True) == sorted([*left, "notes", *names(2)])
    assert pruned(folder, 1) == ["notes", *names(2)]


def test_a_linked_checkpoint_stays(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2, 3)
    elsewhere = make_checkpoint(tmp_path / "archive", 1)
    (folder.checkpoints / "step-00000001").symlink_to(elsewhere)
    assert pruned(folder, 1) == names(1, 3)
    assert (elsewhere / "COMPLETE").is_file()
