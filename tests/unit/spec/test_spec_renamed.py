"""Keys that have a new name: the old one is refused wherever it is set, and still read in the files of a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from slurmddp.errors import UserError
from slurmddp.shared.task_options import OPTIONS
from slurmddp.spec.document import Key
from slurmddp.spec.job import Job
from slurmddp.spec.renamed import RENAMED, read_layer
from slurmddp.spec.site import Site
from slurmddp.spec.validate import known_keys
from tests.helpers import GPU_SITE, LM_JOB, Desk, refusal


def refused(desk: Desk, job: str, *options: str, **variables: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.resolve(job, *options, **variables)
    return refusal(caught.value)


def known(model: type[BaseModel]) -> Iterator[Key]:
    yield from known_keys(model)
    if model is Job:
        for parts in OPTIONS.values():
            yield from (("train", part, name) for part, options in parts.items() for name in options)


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: ".".join(row.old))
def test_the_table_leads_from_keys_that_are_gone_to_keys_that_exist(row: Any) -> None:
    keys = {*known(Job), *known(Site)}
    assert row.new in keys and row.old not in keys
    assert row.old[:-1] == row.new[:-1], "migrate edits one word"
    assert row.option == (row.old[:2] == ("train", "data"))


def test_an_old_key_in_the_job_file(desk: Desk) -> None:
    shown = refused(desk, LM_JOB + "  evaluate: {every: 5}\ncheckpoint:\n  keep: 2\n  every: 30m\n")
    assert shown == (
        f"{desk.project}/job.yaml:6: train.evaluate.every: renamed to train.evaluate.every_steps in 0.1.0\n"
        f"  -> slurmddp migrate {desk.project}/job.yaml\n"
        f"{desk.project}/job.yaml:9: checkpoint.every: renamed to checkpoint.interval in 0.1.0\n"
        f"  -> slurmddp migrate {desk.project}/job.yaml"
    )


def test_old_and_new_in_one_file(desk: Desk) -> None:
    shown = refused(desk, LM_JOB + "checkpoint:\n  every: 1m\n  interval: 2m\n")
    assert shown == (
        f"{desk.project}/job.yaml:7: checkpoint.every: renamed to checkpoint.interval in 0.1.0, and line 8 sets"
        " checkpoint.interval, too\n  -> remove checkpoint.every"
    )


def test_old_in_the_configuration_and_new_in_the_job_file(desk: Desk) -> None:
    (desk.config / "config.yaml").write_text("checkpoint: {every: 1m}\n")
    shown = refused(desk, LM_JOB + "checkpoint: {interval: 2m}\n")
    assert shown.startswith(f"{desk.config}/config.yaml:1: checkpoint.every: renamed to checkpoint.interval in 0.1.0\n")
    assert shown.endswith(f"  -> slurmddp migrate {desk.config}/config.yaml")


def test_an_old_key_on_the_command_line_and_in_the_environment(desk: Desk) -> None:
    assert refused(desk, LM_JOB, "checkpoint.every=5m") == (
        "--set checkpoint.every: renamed to checkpoint.interval in 0.1.0\n  -> write --set checkpoint.interval=VALUE"
    )
    assert refused(desk, LM_JOB, SLURMDDP_TRAIN__EVALUATE__EVERY="5") == (
        "$SLURMDDP_TRAIN__EVALUATE__EVERY: train.evaluate.every: renamed to train.evaluate.every_steps in 0.1.0\n"
        "  -> set SLURMDDP_TRAIN__EVALUATE__EVERY_STEPS instead"
    )


def test_old_keys_of_a_site(desk: Desk) -> None:
    text = GPU_SITE.replace("name: gpus", "name: mine") + "deadman: {partition: small}\n"
    desk.site(text)
    path = desk.config / "sites/mine.yaml"
    line = len(text.splitlines())
    assert refused(desk, LM_JOB.replace("gpus", "mine")).endswith(
        f"{path}:{line}: deadman: renamed to watchdog in 0.1.0\n  -> slurmddp migrate {path}"
    )
    desk.site("name: mine\ntitle: Mine\njob:\n  checkpoint: {every: 5m}\n")
    assert refused(desk, LM_JOB.replace("gpus", "mine")) == (
        f"{path}:4: checkpoint.every: renamed to checkpoint.interval in 0.1.0\n  -> slurmddp migrate {path}"
    )
    assert ":6: deadman: unknown key" in refused(desk, LM_JOB + "deadman: {}\n"), "it was never a job's"


def test_an_option_of_the_bundled_tasks(desk: Desk) -> None:
    data = "  data: {path: /d, held_out: 0.1}\n"
    shown = refused(desk, "site: gpus\ntrain:\n  task: lm\n" + data)
    assert ":4: train.data.held_out: renamed to train.data.validation_fraction in 0.1.0\n" in shown
    own = desk.resolve("site: gpus\ntrain:\n  task: mine:make\n" + data)
    assert own.job.train.data["held_out"] == 0.1, "a task of the user's own names its options itself"


OLD = "site: gpus\ntrain:\n  task: lm\n  data: {path: /d, held_out: 0.1}\ncheckpoint: {every: 5m, keep: 2}\n"


def test_a_file_of_a_run_is_read_with_its_old_keys(desk: Desk) -> None:
    path = desk.write("runs/gpt-1/job.yaml", OLD)
    assert "every" in read_layer(path, "job file").tree["checkpoint"], "not a run folder without a manifest"
    desk.write("runs/gpt-1/manifest.json", "{}")
    found = desk.resolve_file(path)
    assert found.job.checkpoint.interval == 300
    assert found.job.train.data["validation_fraction"] == 0.1
    assert found.location("checkpoint", "interval") == f"{path}:5: checkpoint.interval"
    assert list(read_layer(path, "job file").tree["checkpoint"]) == ["interval", "keep"], "in the same order"


def test_a_site_in_a_run_folder_is_read_with_its_old_keys(desk: Desk) -> None:
    path = desk.write("runs/gpt-1/site.yaml", GPU_SITE + "experimental: true\ndeadman: {partition: small}\n")
    desk.write("runs/gpt-1/manifest.json", "{}")
    found = desk.resolve(LM_JOB.replace("gpus", str(path)))
    assert found.site.watchdog is not None and found.site.watchdog.partition == "small"
    assert found.site.level == "documented"


def test_both_names_in_a_file_of_a_run_are_refused(desk: Desk) -> None:
    desk.write("runs/gpt-1/manifest.json", "{}")
    path = desk.write("runs/gpt-1/job.yaml", OLD.replace("keep: 2", "interval: 6m"))
    with pytest.raises(UserError, match=r"renamed to checkpoint.interval in 0.1.0, and line 5 sets"):
        desk.resolve_file(Path(path))
