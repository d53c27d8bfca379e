"""MLflow, through its client, which keeps no run open."""

import os
from collections.abc import Sequence

from slurmddp.errors import UserError
from slurmddp.trackers.base import Facts, Point, library

#: The tag by which a run is found again.
_TAG = "slurmddp.run"
#: Limits of MLflow's servers for one request and one value.
_METRICS, _PARAMS, _LONGEST = 1000, 100, 500
_ENDED = {"done": "FINISHED", "stopped": "KILLED", "cancelled": "KILLED"}


class MLflow:
    """One run in the experiment MLFLOW_EXPERIMENT_NAME, else in that of the job's name."""

    durable = True

    def __init__(self, facts: Facts, key: str | None) -> None:
        mlflow, self._entities = library("mlflow", "mlflow-skinny"), library("mlflow.entities", "mlflow-skinny")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            raise UserError("MLFLOW_TRACKING_URI is not set", where="--to", todo="export MLFLOW_TRACKING_URI=ADDRESS")
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or facts.job_name
        self.key = key or self._found(name, facts) or self._created(name, facts)
        self._client.update_run(self.key, status="RUNNING")
        self.where = f"{uri} experiment {name}, run {self.key}"

    def send(self, points: Sequence[Point]) -> None:
        metrics = [
            self._entities.Metric(name, value, round(point.time * 1000), point.step)
            for point in points
            for name, value in point.values.items()
        ]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self.key, metrics=metrics[first : first + _METRICS])

    def close(self, state: str | None) -> None:
        if state is not None:
            self._client.set_terminated(self.key, status=_ENDED.get(state, "FAILED"))

    def _found(self, name: str, facts: Facts) -> str | None:
        """Return the run that an earlier sync made, if what it remembered was lost."""
        experiment = self._client.get_experiment_by_name(name)
        query = f"tags.`{_TAG}` = '{facts.run_id}'"
        runs = self._client.search_runs([experiment.experiment_id], query) if experiment else []
        return str(runs[0].info.run_id) if runs else None

    def _created(self, name: str, facts: Facts) -> str:
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        key = str(self._client.create_run(number, run_name=facts.run_id, tags={_TAG: facts.run_id}).info.run_id)
        params = [self._entities.Param(name, str(value)[:_LONGEST]) for name, value in facts.settings.items()]
        for first in range(0, len(params), _PARAMS):
            self._client.log_batch(key, params=params[first : first + _PARAMS])
        return key
