"""The save that the next start loads, and its copy."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slurmddp.records import next_save
from slurmddp.records.events import Event
from slurmddp.records.next_save import Places, before_start
from slurmddp.records.rank_events import KeepingSave, RankStarted, Restarted, SaveKept
from slurmddp.records.saves import Save

BEGAN = 1_700_000_000.0
STARTED = Event(RankStarted(1.0), BEGAN, 0, node="n1", rank=0)
WENT_ON = Restarted("went on", 12, 11, 11, None, "")

Look = Callable[..., tuple[str, list[Any]]]


def saved(path: Path, steps: int, after: float = 10.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(list(range(steps)), protocol=2))
    os.utime(path, (BEGAN + after, BEGAN + after))
    return path


@pytest.fixture
def look(tmp_path: Path) -> Look:
    def look(*events: Event, earlier: Sequence[str] = ()) -> tuple[str, list[Any]]:
        written: list[Any] = []
        places = Places(str(tmp_path / "run"), [str(tmp_path / "out")], earlier)
        return before_start(places, events, written.append), written

    return look


def test_the_newest_save_of_this_run_is_named_and_kept(tmp_path: Path, look: Look) -> None:
    saved(tmp_path / "out/a.pt", 50, after=-1)
    assert look(STARTED) == ("", []), "it is older than the run's first start"
    assert look() == ("", [])
    newest = saved(tmp_path / "out/b.pt", 60)
    found, (begun, kept) = look(STARTED)
    assert found == str(newest) and begun == KeepingSave(found, newest.stat().st_size, next_save.PATIENCE)
    copy = tmp_path / "run/kept/001-b.pt"
    assert kept == SaveKept(found, str(copy), newest.stat().st_size, "")
    assert copy.read_bytes() == newest.read_bytes() and os.listdir(copy.parent) == [copy.name]
    assert look(STARTED) == (found, []), "it is kept once"
    saved(newest, 70, after=20)
    assert look(STARTED)[1][-1].kept.endswith("/kept/002-b.pt")


def test_nothing_is_copied_once_a_start_was_seen_to_go_on(tmp_path: Path, look: Look) -> None:
    newest = saved(tmp_path / "out/b.pt", 60)
    gone_on = Event(WENT_ON, BEGAN + 5, 1, node="n1", rank=0)
    assert look(STARTED, gone_on) == (str(newest), [])
    first = Event(WENT_ON._replace(before=None), BEGAN + 5, 1, node="n1", rank=0)
    assert len(look(STARTED, first)[1]) == 2, "there was no start before it"
    from_zero = Event(WENT_ON._replace(how="from zero"), BEGAN + 6, 2, node="n1", rank=0)
    saved(newest, 70, after=20)
    assert len(look(STARTED, gone_on, from_zero)[1]) == 2


def test_a_run_that_continues_others_may_find_theirs(tmp_path: Path, look: Look) -> None:
    old = saved(tmp_path / "older/checkpoints/a.pt", 50, after=-100)
    assert look(earlier=[str(old.parent)]) == (str(old), [])
    own = saved(tmp_path / "run/checkpoints/b.pt", 50, after=-50)
    assert look(STARTED, earlier=[str(old.parent)])[0] == str(own)


def test_copies_have_a_limit_of_space(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = saved(tmp_path / "out/b.pt", 100)
    size = newest.stat().st_size
    monkeypatch.setattr(next_save, "MOST_BYTES", size)
    assert look(STARTED)[1][-1].why == ""
    saved(newest, 100, after=20)
    (told,) = look(STARTED)[1]
    assert told == SaveKept(
        str(newest), "", size, f"{size / 1e6:.3g} MB, and all copies together may have {size / 1e6:.3g} MB"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**12, 0, 3 * 10**10))
    monkeypatch.setattr(next_save, "MOST_BYTES", 20 * 10**9)
    monkeypatch.setattr(next_save, "measure", lambda path: Save(path, time.time(), 3 * 10**9))
    assert look(STARTED)[1][-1].why == f"{size / 1e6:.3g} MB, and all copies together may have 3 GB"


def test_a_copy_that_fails_is_told_of_and_leaves_nothing(
    tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "out/b.pt", 60)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "cp").write_text('#!/bin/sh\n[ "$2" != --reflink=auto ] || exit 1\necho "cp: no space" >&2; exit 1\n')
    (programs / "cp").chmod(0o755)
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"{programs}:{path}")
    assert look(STARTED)[1][-1] == SaveKept(
        str(tmp_path / "out/b.pt"), "", (tmp_path / "out/b.pt").stat().st_size, "cp: no space"
    )
    (programs / "cp").write_text(f'#!/bin/sh\n[ "$2" != --reflink=auto ] || exit 1\nPATH={path} exec cp "$@"\n')
    assert look(STARTED)[1][-1].kept.endswith("/001-b.pt"), "busybox has no reflinks"
    shutil.rmtree(tmp_path / "run/kept")
    (programs / "cp").write_text('#!/bin/sh\nfor last; do :; done\necho half >"$last"\nexec sleep 60\n')
    monkeypatch.setattr(next_save, "PATIENCE", 1)
    assert look(STARTED)[1][-1].why == "the copy took longer than 1 s"
    assert os.listdir(tmp_path / "run/kept") == []
