"""Weights & Biases."""

import os
from collections.abc import Sequence

from slurmddp.errors import UserError
from slurmddp.trackers.base import Facts, Point, library


class Wandb:
    """One run, whose id is that of slurmddp's run.

    The number of a point is wandb's own step: wandb drops what it has already, for example after a sync that was
    killed. The optimizer step is the x-axis, because it goes back after a restart.
    """

    durable = False

    def __init__(self, facts: Facts, key: str | None) -> None:
        wandb = library("wandb", "wandb")
        quiet = wandb.Settings(
            console="off", disable_code=True, disable_git=True,
            x_disable_stats=True, x_disable_meta=True, x_save_requirements=False,
        )  # fmt: skip
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or facts.job_name,
            id=facts.run_id,
            name=facts.run_id,
            resume="allow",
            dir=str(facts.folder),
            config=dict(facts.settings),
            settings=quiet,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        if self._run.disabled:
            raise UserError("wandb is disabled", where="$WANDB_MODE", todo="unset WANDB_MODE, or set it to offline")
        self.where = str(self._run.settings.sync_dir if self._run.offline else self._run.url)
        self.key = facts.run_id

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            if point.number >= self._run.step:  # wandb warns of each other one
                self._run.log({**point.values, "step": point.step, "_timestamp": point.time}, step=point.number)

    def close(self, state: str | None) -> None:
        self._run.finish(exit_code=0 if state in (None, "done", "stopped") else 1)
