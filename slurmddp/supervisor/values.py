"""The values of the job, as job.sh hands them over."""

import json
import os
import socket
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from slurmddp.supervisor.brain.types import Settings


def host(environment: Mapping[str, str]) -> str:
    """Return the node's name, by which Slurm knows it."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def slurm_job(environment: Mapping[str, str]) -> str:
    """Return what commands call the job; empty outside of one. SLURM_JOB_ID of a task is that of the whole array."""
    array = environment.get("SLURM_ARRAY_JOB_ID")
    if array:
        return "{}_{}".format(array, environment.get("SLURM_ARRAY_TASK_ID", ""))
    return environment.get("SLURM_JOB_ID", "")


def program(run: str, python: str, name: str) -> List[str]:
    """Return the batch script, with its arguments, that starts a program of slurmddp/supervisor on any node."""
    code = run + "/code/"
    return [code + "python.sh", python, code + "slurmddp.zip", name]


#: What job.sh leaves out where it is empty.
OPTIONAL = (
    "expedite", "counts_gpus", "own_script", "must_save", "from_zero", "watch", "saves", "tasks_per_node", "heartbeats",
    "warm", "standby",
)  # fmt: skip


class Values(NamedTuple):
    """What job.sh says of the job, and where it runs."""

    run: str
    folder: str  # of this script on the node's disk, where job.sh and the supervisor leave each other word
    words: Dict[str, str]  # by name; empty: no, none or unknown
    step_options: Tuple[str, ...]  # of the ranks' srun
    rank_options: Tuple[str, ...]  # further ones of launch.mode srun

    def number(self, name: str) -> Optional[int]:
        text = self.words[name]
        return int(text) if text else None

    def yes(self, name: str) -> bool:
        return bool(self.words[name])

    def watched(self) -> List[str]:
        """Return where an own script saves, besides the folder of checkpoints."""
        folders: List[str] = json.loads(self.words["watch"] or "[]")
        return folders

    def program(self, name: str) -> List[str]:
        """Return the command that starts a program of slurmddp/supervisor on any node."""
        return [*self._own(), *program(self.run, self.words["python"], name)]

    def node_script(self) -> List[str]:
        """Return the command that starts node.sh on any node."""
        return [*self._own(), self.run + "/node.sh"]

    def _own(self) -> List[str]:
        """Nothing is run of a folder that another user has put in the place of the run's."""
        return ["bash", "-c", '[[ -O "$0" ]] || exit 98; exec bash "$@"', self.run]

    def settings(self) -> Settings:
        words = self.words
        return Settings(
            self.run, words["scheduler"], self.yes("own_script"), words["requeue_policy"], self.yes("must_save"),
            words["preflight"], self.number("breaker") or 3, self.number("stop_lead"), self.number("cancel_grace"),
            nodes_min=self.number("nodes_min") or 1, nodes_max=self.number("nodes_max") or 1,
            max_gpu_hours=float(words["max_gpu_hours"]) if words["max_gpu_hours"] else None,
            breaker_from_zero=self.number("from_zero"),
            checkpoints=(self.run + "/checkpoints", *self.watched()),
        )  # fmt: skip

    def write(self) -> List[str]:
        """Return the arguments that `read` takes."""
        words = ["{}={}".format(name, text) for name, text in self.words.items()]
        return [self.run, self.folder, *words, "--", *self.step_options, "--", *self.rank_options]


def read(arguments: Sequence[str]) -> Values:
    """Read RUN FOLDER NAME=VALUE... -- STEP_OPTION... -- RANK_OPTION..."""
    run, folder, *rest = arguments
    parts: List[List[str]] = [[]]
    for word in rest:
        if word == "--" and len(parts) < 3:
            parts.append([])
        else:
            parts[-1].append(word)
    parts += [[]] * (3 - len(parts))
    words = dict(dict.fromkeys(OPTIONAL, ""), **dict(word.split("=", 1) for word in parts[0]))
    return Values(os.path.abspath(run), folder, words, tuple(parts[1]), tuple(parts[2]))
