"""slurmddp migrate: old keys get their new names, and not one other character changes."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.helpers import Desk, Result

Cli = Callable[..., Result]

JOB = """\
# every: 30m is what we had
name: gpt            # a name
site: gpus
train:
  task: lm
  data: {path: /data/every, 'held_out': 0.1}   # flow
  evaluate:
    &e every: 100    # steps
    at_end:   false

checkpoint: {keep: 3,  "every" : 30m, every_steps: 5}
environment: {every: "every", held_out: x}
"""
MIGRATED = """\
# every: 30m is what we had
name: gpt            # a name
site: gpus
train:
  task: lm
  data: {path: /data/every, 'validation_fraction': 0.1}   # flow
  evaluate:
    &e every_steps: 100    # steps
    at_end:   false

checkpoint: {keep: 3,  "interval" : 30m, every_steps: 5}
environment: {every: "every", held_out: x}
"""
SITE = "name: mine\ntitle: Mine\ndeadman: {partition: p}\njob:\n  checkpoint:\n    every: &t 5m\n"


def test_a_job_file(cli: Cli, desk: Desk) -> None:
    path = desk.write("job.yaml", JOB)
    path.chmod(0o640)
    done = cli("migrate", "job.yaml")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "job.yaml:6: train.data.held_out -> train.data.validation_fraction",
        "job.yaml:8: train.evaluate.every -> train.evaluate.every_steps",
        "job.yaml:11: checkpoint.every -> checkpoint.interval",
    ]
    assert path.read_text() == MIGRATED
    assert path.stat().st_mode & 0o777 == 0o640
    assert [item.name for item in desk.project.iterdir()] == ["job.yaml"]
    again = cli("migrate", "job.yaml")
    assert (again.code, again.out, again.err) == (0, "", "job.yaml: no old keys\n")
    assert desk.resolve_file(path).job.checkpoint.interval == 1800


def test_a_site_file_through_a_link(cli: Cli, desk: Desk) -> None:
    path = desk.write("deep/mine.yaml", SITE)
    (desk.project / "mine.yaml").symlink_to("deep/mine.yaml")
    done = cli("migrate", "mine.yaml")
    assert done.out.splitlines() == [
        "mine.yaml:3: deadman -> watchdog",
        "mine.yaml:6: job.checkpoint.every -> job.checkpoint.interval",
    ]
    assert path.read_text() == SITE.replace("deadman", "watchdog").replace("every", "interval")
    assert (desk.project / "mine.yaml").is_symlink()


@pytest.mark.parametrize("value", ["true", "false # all verified"])
def test_a_key_whose_values_differ(cli: Cli, desk: Desk, value: str) -> None:
    path = desk.write("mine.yaml", f"name: mine\ntitle: Mine\nexperimental: {value}\n")
    assert cli("migrate", "mine.yaml").out == "mine.yaml:3: experimental -> level\n"
    comment = value.removeprefix("true").removeprefix("false")
    assert path.read_text() == f"name: mine\ntitle: Mine\nlevel: documented{comment}\n"


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "byte order mark"])
@pytest.mark.parametrize("ends", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_line_ends_and_wide_characters_stay(cli: Cli, desk: Desk, start: str, ends: str) -> None:
    text = start + ends.join(
        ["name: gpt", "# \U0001f600 é", 'notes: {"é\U0001f600": 1}', "? checkpoint", ": every: 1m"]
    )
    path = desk.project / "job.yaml"
    path.write_bytes(text.encode())
    assert cli("migrate", "job.yaml").code == 0
    assert path.read_bytes().decode() == text.replace("every", "interval")


def test_check_changes_nothing(cli: Cli, desk: Desk) -> None:
    desk.write("job.yaml", JOB)
    desk.write("new.yaml", MIGRATED)
    before = desk.tree()
    done = cli("migrate", "--check", "job.yaml", "new.yaml")
    assert (done.code, done.err) == (1, "new.yaml: no old keys\n")
    lines = done.out.splitlines()
    assert lines[:2] == ["--- job.yaml", "+++ job.yaml"]
    assert '-checkpoint: {keep: 3,  "every" : 30m, every_steps: 5}' in lines
    assert '+checkpoint: {keep: 3,  "interval" : 30m, every_steps: 5}' in lines
    assert desk.tree() == before
    assert cli("migrate", "--check", "new.yaml").code == 0


def test_a_diff_of_a_last_line_without_its_end(cli: Cli, desk: Desk) -> None:
    desk.write("job.yaml", "checkpoint: {every: 1m}")
    end = "\\ No newline at end of file"
    assert cli("migrate", "--check", "job.yaml").out.splitlines()[3:] == [
        "-checkpoint: {every: 1m}", end, "+checkpoint: {interval: 1m}", end,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: &a {every: 1m}\ncheckpoint:\n  <<: *a\n",
            "job.yaml:3: contains a YAML merge key (<<)\n  -> write the keys out",
        ),
        ("a: &a {every: 1m}\ncheckpoint: *a\n", "job.yaml:2: contains a YAML alias (*name)\n  -> write the value out"),
        ('checkpoint: {"ev\\x65ry": 1m}\n', "job.yaml:1: checkpoint.every is written with escapes\n  -> rename it to"),
        ('checkpoint: {&every "\\x65very": 1m}\n', "job.yaml:1: checkpoint.every is written with escapes"),
        (
            "checkpoint:\n  every: 1m\n  interval: 2m\n",
            "job.yaml:2: checkpoint.every and its new name checkpoint.interval (line 3) are both set\n"
            "  -> remove checkpoint.every",
        ),
        ("checkpoint: {every: 1m\n", "job.yaml:2: is not valid YAML"),
    ],
)
def test_what_cannot_be_edited_safely(cli: Cli, desk: Desk, text: str, message: str) -> None:
    desk.write("job.yaml", text)
    desk.write("old.yaml", JOB)
    before = desk.tree()
    done = cli("migrate", "old.yaml", "job.yaml")
    assert (done.code, done.out) == (2, "")
    assert message in done.err
    assert desk.tree() == before, "no file is written where one is refused"


def test_the_files_of_a_run_are_left_alone(cli: Cli, desk: Desk) -> None:
    desk.write("runs/gpt-1/job.yaml", JOB)
    desk.write("runs/gpt-1/manifest.json", "{}")
    done = cli("migrate", "runs/gpt-1/job.yaml")
    assert done.code == 2
    assert "runs/gpt-1/job.yaml: belongs to a run: slurmddp reads its old keys as they are" in done.err


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(cli: Cli, desk: Desk) -> None:
    desk.write("here/job.yaml", JOB).parent.chmod(0o500)
    done = cli("migrate", "here/job.yaml")
    assert done.code == 2
    assert "here/job.yaml: cannot be written: Permission denied" in done.err


def test_a_file_that_is_not_there(cli: Cli) -> None:
    done = cli("migrate", "absent.yaml")
    assert done.code == 2 and "absent.yaml: no such file" in done.err


def test_options_of_a_task_of_the_users_own_stay(cli: Cli, desk: Desk) -> None:
    desk.write("job.yaml", "train:\n  task: mine:make\n  data: {held_out: 3}\n")
    assert cli("migrate", "job.yaml").err == "job.yaml: no old keys\n"
