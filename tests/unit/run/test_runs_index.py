"""Finding runs by whatever the user has at hand."""

import json
import multiprocessing
import os
import shutil
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.records.rehearsal import REQUEST
from slurmddp.records.submission import now as submitted_now
from slurmddp.run import index, submission
from slurmddp.run.events import read_lines
from slurmddp.run.gate import own
from slurmddp.run.index import Entry, entries, entry_of, find, index_file, rebuild, record
from slurmddp.run.layout import RunFolder


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def make(root: Path, run_id: str, created: str, job_id: str = "") -> RunFolder:
    run = RunFolder(root / run_id)
    run.path.mkdir(parents=True)
    facts = {"schema": 1, "run": run_id, "name": run_id.split("-")[0], "created": created, "slurmddp": "0"}
    run.manifest.write_text(json.dumps(facts))
    if job_id:
        submission.write(own(run, to="write"), submitted_now(job_id, "slurm", ["sbatch"]))
    return run


def known(run: RunFolder) -> RunFolder:
    entry = entry_of(run)
    assert entry and record(entry) is None
    return run


def test_state_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert index_file() == tmp_path / "state" / "slurmddp" / "runs.jsonl"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/alice")
    assert index_file() == Path("/home/alice/.local/state/slurmddp/runs.jsonl")


def test_newest_first_across_zones(tmp_path: Path) -> None:
    a = known(make(tmp_path, "a-1", "2025-11-20T10:00:00+01:00"))
    b = known(make(tmp_path, "b-1", "2025-11-20T09:30:00+00:00"))
    c = known(make(tmp_path, "c-1", "2025-11-20T11:00:00+09:00"))
    assert [entry.folder for entry in entries()] == [b, a, c]
    assert find("last") == b


def test_a_submission_that_was_refused_is_no_run_of_its_site(tmp_path: Path) -> None:
    """It was written down before sbatch was called, and its folder is gone. A run that was deleted still counts."""
    for number, job_id in ((1, ""), (2, "7"), (3, "")):
        created = f"2025-11-2{number}T10:00:00+00:00"
        record(Entry(f"a-{number}", str(tmp_path / f"a-{number}"), created, "a", "site", job_id))
    (tmp_path / "a-3").mkdir()
    assert [entry.id for entry in index.newest("site", 9)] == ["a-3", "a-2"]
    assert [entry.id for entry in index.newest("site", 1)] == ["a-3"]


def test_every_way_to_name_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = known(make(tmp_path / "x", "gpt-20251120-100000-aaaa", "2025-11-20T10:00:00+00:00", "123"))
    b = known(make(tmp_path / "y", "gpt-20251121-100000-bbbb", "2025-11-21T10:00:00+00:00", "124;alpha"))
    c = known(make(tmp_path / "y", "12-20251121-100000-cccc", "2025-11-22T10:00:00+00:00", "local-7-8"))
    for text, run in [
        (a.id, a), ("gpt-20251120", a), ("123", a), (str(a.path), a), (f"{a.path}/", a),
        ("gpt-20251121", b), ("124", b), ("124;alpha", b), ("local-7-8", c), ("12", c), ("last", c),
    ]:  # fmt: skip
        assert find(text) == run, text
    monkeypatch.chdir(a.path)
    assert find(".") == a
    monkeypatch.chdir(a.path.parent)
    assert find(a.id) == a


def test_ambiguous(tmp_path: Path) -> None:
    a = known(make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00", "123"))
    b = known(make(tmp_path, "gpt-2", "2025-11-21T10:00:00+00:00", "123"))
    for text in ("gpt", "123"):
        with pytest.raises(UserError) as error:
            find(text)
        assert a.id in str(error.value) and b.id in str(error.value) and "2 runs" in str(error.value)
    assert find("gpt-1") == a, "a whole id is never ambiguous"
    longer = known(make(tmp_path, "gpt-11", "2025-11-22T10:00:00+00:00"))
    assert find("gpt-1") == a and find("gpt-11") == longer


def test_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no runs are known"):
        find("gpt", [tmp_path])
    with pytest.raises(UserError, match="no run 'last'"):
        find("last")
    a = known(make(tmp_path, "gpt-20251120-aaaa", "2025-11-20T10:00:00+00:00"))
    known(make(tmp_path, "images-1", "2025-11-21T10:00:00+00:00"))
    with pytest.raises(UserError) as error:
        find("gtp-20251120-aaab")
    assert a.id in str(error.value) and "images" not in str(error.value)
    with pytest.raises(UserError, match="does not exist"):
        find("./absent")
    with pytest.raises(UserError, match="is not a run folder"):
        find(str(tmp_path))
    for text in ("", "~nobody-has-this-name"):
        with pytest.raises(UserError):
            find(text)


def test_gone_folders_are_dropped(tmp_path: Path) -> None:
    a = known(make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00"))
    b = known(make(tmp_path, "gpt-2", "2025-11-21T10:00:00+00:00"))
    shutil.rmtree(b.path)
    assert [entry.id for entry in entries()] == ["gpt-1"]
    assert find("last") == find("gpt") == a


def test_a_gone_folder_still_tells_its_job(tmp_path: Path) -> None:
    created = "2025-11-20T10:00:00+00:00"
    cases = [
        ("gpt-1", "29", ("gpt-1", "29"), "its job was 29: if it still runs, `scancel 29` cancels it"),
        (
            "gpt-2",
            "30;beta",
            ("gpt-2", "30", "30;beta"),
            "its job was 30;beta: if it still runs, `scancel --clusters=beta 30",
        ),
        (
            "gpt-3",
            "local-7-8",
            ("gpt-3", "local-7-8"),
            "its job was local-7-8: if it still runs, `kill 7` on that machine stops it",
        ),
        ("gpt-4", "", ("gpt-4",), "it has no known job"),
    ]
    gone = {run_id: known(make(tmp_path, run_id, created, job_id)) for run_id, job_id, _, _ in cases}
    known(make(tmp_path, "29-other", created))
    known(make(tmp_path, "gpt-11", created))
    for run in gone.values():
        shutil.rmtree(run.path)
    for run_id, _, texts, said in cases:
        path = gone[run_id].path
        for text in (*texts, str(path)):
            for roots in ([], [tmp_path]):
                with pytest.raises(UserError) as error:
                    find(text, roots)
                assert str(error.value).startswith(f"the folder {path} of run {run_id} is gone; {said}"), text
    assert find("29-").id == "29-other", "the beginning of another id is none of a gone run"
    make(tmp_path / "moved", "gpt-1", created, "29")
    assert find("29", [tmp_path / "moved"]).path == tmp_path / "moved" / "gpt-1"


def _find_without_rights(texts: "list[str]", answer: Connection) -> None:
    if os.getuid() == 0:  # root may look everywhere
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    for text in texts:
        try:
            answer.send(str(find(text)))
        except UserError as error:
            answer.send(str(error))
        except OSError as error:
            answer.send(repr(error))
    answer.send(str([entry.id for entry in entries()]))


def test_a_folder_that_one_may_not_look_into(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        place = Path(name)
        place.chmod(0o755)
        monkeypatch.setenv("XDG_STATE_HOME", str(place / "state"))
        created = "2025-11-20T10:00:00+00:00"
        indexed = known(make(place / "runs", "gpt-1", created, "29"))
        other = make(place / "runs", "gpt-2", created)
        (place / "runs").chmod(0)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        texts = ["29", "gpt-1", str(indexed.path), str(other.path), "last", "nothing"]
        child = context.Process(target=_find_without_rights, args=(texts, theirs))
        child.start()
        said = [ours.recv() for _ in texts]
        listed = ours.recv()
        child.join()
        (place / "runs").chmod(0o755)
    for text in said[:3]:
        assert f"the folder {indexed.path} of run gpt-1 cannot be read: Permission denied; its job was 29" in text
    assert said[3].startswith(f"{other.path} cannot be read: Permission denied")
    assert said[4].startswith("no run 'last'") and said[5].startswith("no run 'nothing'")
    assert listed == "[]"


def test_the_newest_line_counts(tmp_path: Path) -> None:
    run = make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00")
    old = Entry("gpt-1", str(run.path), "2025-11-20T10:00:00+00:00", "gpt")
    record(old)
    record(Entry(**{**old.__dict__, "job_id": "77"}))
    assert [entry.job_id for entry in entries()] == ["77"]


def test_damaged_lines(tmp_path: Path) -> None:
    run = known(make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00"))
    with index_file().open("ab") as file:
        file.write(b'{"id": 1}\n{"id": "x"}\n\xff\n{"id": "torn", "pa')
    other = known(make(tmp_path, "gpt-2", "not a time"))
    assert [entry.folder for entry in entries()] == [run, other]


def test_lost_and_moved(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    run = known(make(runs, "gpt-1", "2025-11-20T10:00:00+00:00", "123"))
    make(runs / "deep", "gpt-2", "2025-11-21T10:00:00+00:00", "124")
    (runs / "other").mkdir()
    (runs / "other" / "manifest.json").write_text('{"name": "a web app"}')
    index_file().unlink()
    assert find("123", [runs]) == run, "found without the index"
    assert [entry.id for entry in entries()] == ["gpt-2", "gpt-1"], "and all are known again"
    lines = index_file().read_text()
    rebuild([runs])
    assert index_file().read_text() == lines, "nothing new, nothing written"
    (runs / "gpt-1").rename(tmp_path / "gpt-1")
    assert find("gpt-1", [tmp_path]).path == tmp_path / "gpt-1"
    assert find("123").path == tmp_path / "gpt-1"
    assert [entry.id for entry in rebuild([tmp_path / "absent"])] == []


def test_runs_of_a_rehearsal_are_not_found_by_themselves(tmp_path: Path) -> None:
    run = make(tmp_path / "runs", "gpt-1", "2025-11-20T10:00:00+00:00")
    rehearsed = make(tmp_path / "runs" / "rehearsal-gpt", "gpt-2", "2025-11-21T10:00:00+00:00")
    (rehearsed.path / REQUEST).write_text("{}")
    index_file().unlink(missing_ok=True)
    assert [entry.folder for entry in rebuild([tmp_path])] == [run]
    assert find(str(rehearsed.path)) == rehearsed


def test_a_huge_root_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_LOOKED_AT", 10)
    for number in range(30):
        (tmp_path / "many" / str(number)).mkdir(parents=True)
    assert rebuild([tmp_path]) == []


def test_a_home_that_takes_nothing_is_a_warning(tmp_path: Path, state: Path) -> None:
    state.write_text("a file in its place")
    run = make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00", "123")
    entry = entry_of(run)
    assert entry
    warning = record(entry)
    assert warning and str(run.path) in warning
    assert entries() == []
    assert find("123", [tmp_path]) == run
    assert find("last", [tmp_path]) == run


def _submit(path: str, number: int) -> None:
    for part in range(50):
        run_id = f"run-{number}-{part}"
        record(Entry(run_id, f"{path}/{run_id}", "2025-11-20T10:00:00+00:00", "run"))


def test_many_submits_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    submits = [context.Process(target=_submit, args=(str(tmp_path), number)) for number in range(4)]
    for submit in submits:
        submit.start()
    for submit in submits:
        submit.join()
    # As the index reads it: a writer that saw another's line half written puts an empty line between them.
    lines = read_lines(index_file())
    assert len({line["id"] for line in lines.records}) == 200 == len(lines.records)
    assert lines.damaged == 0


def test_modes_of_the_index(tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        known(make(tmp_path, "gpt-1", "2025-11-20T10:00:00+00:00"))
    finally:
        os.umask(old)
    assert index_file().stat().st_mode & 0o777 == 0o600
