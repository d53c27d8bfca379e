"""What is known of a training script: one answer per fact, with its evidence."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple


class Answer(enum.Enum):
    """UNKNOWN is never an error, and changes no default."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "cannot tell"


YES, NO, UNKNOWN = Answer.YES, Answer.NO, Answer.UNKNOWN

#: Each fact, and the question that it answers.
QUESTIONS = {
    "process_group": "makes a process group, itself or by a framework",
    "wraps_model": "shares gradients between ranks: DDP, FSDP, fully_shard, or a framework",
    "local_rank_device": "takes its GPU from LOCAL_RANK, itself or by a framework",
    "fixed_device": "always takes the same GPU, for example cuda:0",
    "shards_data": "gives each rank its own part of the data",
    "set_epoch": "shuffles anew in each epoch: set_epoch, itself or by a framework",
    "saves": "saves its model while or after it trains",
    "saves_every_rank": "writes the same save on every rank",
    "saves_optimizer": "saves the optimizer",
    "saves_scheduler": "saves the learning-rate schedule",
    "saves_step": "saves the step or epoch",
    "saves_random": "saves random states",
    "save_name_changes": "saves under a name with a date, process id or random part",
    "saves_in_run": "saves in the run folder ($SLURMDDP_RUN)",
    "loads": "loads a save and continues from it",
    "loads_alone": "looks for its newest save at each start, without an argument",
    "stops": "saves and exits when asked: should_stop, a signal handler, or a framework's",
    "rank_in_name": "has the rank in the name of a save",
    "data_beside_script": "reads files beside __file__",
    "data_in_tmp": "reads $TMPDIR, or makes temporary folders",
    "data_from_internet": "downloads data or models",
    "seeds": "seeds its random numbers",
    "requeues": "requeues its own job: submitit, or Lightning's auto_requeue",
    "starts_ranks": "starts ranks itself: mp.spawn, torchrun, or another launcher",
    "workers": "uses worker processes of DataLoader",
    "sets_omp": "sets OMP_NUM_THREADS",
    "sets_visible_devices": "sets CUDA_VISIBLE_DEVICES",
}


class Place(NamedTuple):
    """A line of the user's code. file: relative to the script's folder where it is below it; text: shortened."""

    file: str
    line: int
    text: str


class Fact(NamedTuple):
    """detail: the framework, argument or value that decides; for UNKNOWN, on what it depends. seen: the run that showed
    the answer, while the program's text says something else or nothing. Both may be empty.
    """

    name: str
    answer: Answer
    places: tuple[Place, ...] = ()
    detail: str = ""
    seen: str = ""


class Unread(NamedTuple):
    """A file or module that could not be read, and why."""

    name: str
    why: str


class Proposal(NamedTuple):
    """A setting for the job file. why: the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Facts:
    """What is known of a script. script: as given; files: how many were read."""

    script: str
    files: int
    facts: tuple[Fact, ...]
    proposals: tuple[Proposal, ...]
    unread: tuple[Unread, ...]

    def __getitem__(self, name: str) -> Fact:
        """Return a fact by its name."""
        return next(each for each in self.facts if each.name == name)

    def as_dict(self) -> dict[str, Any]:
        """Return the facts for --json; docs/check-job.md lists the keys."""
        return {
            "script": self.script,
            "files": self.files,
            "facts": {
                each.name: {
                    "answer": each.answer.value,
                    "places": [place._asdict() for place in each.places],
                    "detail": each.detail,
                    "seen": each.seen,
                }
                for each in self.facts
            },
            "proposals": [each._asdict() for each in self.proposals],
            "not_read": [each._asdict() for each in self.unread],
        }


def corrected(facts: Facts, showed: Mapping[str, bool | None], run: str) -> Facts:
    """Return the facts, with those that a run of the script has shown; None: not shown."""

    def of(fact: Fact) -> Fact:
        answer = {True: YES, False: NO, None: fact.answer}[showed.get(fact.name)]
        # A script that loads a save if an argument says so begins anew without it.
        if answer is fact.answer or (fact.name == "loads" and fact.answer is YES and fact.detail):
            return fact
        return fact._replace(answer=answer, seen=run)

    return replace(facts, facts=tuple(map(of, facts.facts)))
