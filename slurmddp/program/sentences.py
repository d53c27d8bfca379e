"""What the facts of a script mean for its job, as sentences: what is missing, with lines, and what happens then."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from slurmddp.program.facts import NO, YES, Fact, Facts, Place


class Sentence(NamedTuple):
    """place: None where nothing stands in the script. todo: what to do, or empty."""

    place: Place | None
    text: str
    todo: str = ""


#: For a job of any size: the fact, its answer, what it means, what to do.
_ALWAYS = (
    ("saves", NO, "saves nothing: after a fault it trains again from step 1",
     "save with slurmddp's Checkpointer (docs/survive.md)"),
    ("save_name_changes", YES, "saves under a name that differs at each start: later starts do not find it by name",
     "save under a fixed name in $SLURMDDP_RUN/checkpoints"),
    ("stops", NO, "does not look for a request to stop: what it trained since its last save is lost at the time limit",
     "save and exit when should_stop() is true"),
    ("requeues", YES, "requeues jobs itself: two requeues of one job conflict", "leave it to slurmddp"),
    ("starts_ranks", YES, "starts ranks itself, and slurmddp starts the ranks, too: there would be too many",
     "let it use RANK, LOCAL_RANK and WORLD_SIZE, which each process has"),
    ("data_from_internet", YES, "downloads: compute nodes often have no internet",
     "download before you submit"),
    ("data_in_tmp", YES, "uses temporary folders: each node has its own", ""),
    ("data_beside_script", YES, "reads files beside itself: it runs from a copy in the run folder",
     "check that the copy has them, or give an absolute path"),
    ("sets_visible_devices", YES, "sets CUDA_VISIBLE_DEVICES: this can hide the GPU that LOCAL_RANK names", ""),
)  # fmt: skip
#: For a job of several ranks.
_RANKS = (
    ("process_group", NO, "makes no process group: each rank trains its own model", "see docs/survive.md"),
    ("fixed_device", YES, "takes the same GPU on every rank: with several ranks per node, they share it",
     "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"),
    ("saves_every_rank", YES, "writes this save on every rank: they replace each other's file while it is written",
     "save on rank 0 only"),
)  # fmt: skip


def sentences(
    facts: Facts, ranks: int, *, resumes: bool = False, watched: bool = False, copied: bool = True
) -> Iterator[Sentence]:
    """Yield what a job of so many ranks has to expect of the script. resumes, watched: whether train.resume_args and
    checkpoint.watch are set. copied: whether it runs from a copy.
    """
    for name, answer, text, todo in (*(_RANKS if ranks > 1 else ()), *_ALWAYS):
        fact = facts[name]
        if fact.answer is answer and (copied or name != "data_beside_script"):
            yield Sentence(fact.places[0] if fact.places else None, text + _seen(fact), todo)
    yield from _of_ranks(facts) if ranks > 1 else ()
    yield from _of_saves(facts, resumes)
    if resumes and not watched and facts["saves_in_run"].answer is not YES:
        yield Sentence(
            None,
            "gets train.resume_args once a save is in $SLURMDDP_RUN/checkpoints: no other place is looked at",
            "name where it saves in checkpoint.watch",
        )


def _seen(fact: Fact) -> str:
    return f" (seen in run {fact.seen})" if fact.seen else ""


def _of_ranks(facts: Facts) -> Iterator[Sentence]:
    if facts["process_group"].answer is not YES:
        return
    place = facts["process_group"].places[0]
    if facts["wraps_model"].answer is NO:
        yield Sentence(place, "makes a process group, but nothing shares the gradients: each rank trains its own model")
    if facts["shards_data"].answer is NO:
        yield Sentence(None, "gives every rank all of the data: no DistributedSampler, and no framework's")
    elif facts["shards_data"].answer is YES and facts["set_epoch"].answer is NO:
        shard = facts["shards_data"].places[0]
        yield Sentence(shard, "never calls set_epoch: a sampler that shuffles deals the same order in each epoch",
                       "sampler.set_epoch(epoch)")  # fmt: skip


def _of_saves(facts: Facts, resumes: bool) -> Iterator[Sentence]:
    saves, loads = facts["saves"], facts["loads"]
    if saves.answer is not YES:
        return
    place = saves.places[0] if saves.places else None
    words = (("optimizer", "optimizer"), ("step", "step or epoch"))
    lacks = [word for kind, word in words if facts[f"saves_{kind}"].answer is NO]
    if lacks:
        yield Sentence(place, f"saves no {', no '.join(lacks)}: a resumed run starts that anew", "add it to the save")
    if loads.answer is NO:
        yield Sentence(
            place,
            "loads no save: a start after a fault begins at step 1" + _seen(loads),
            "load the newest save at the start",
        )
    elif loads.answer is YES and not loads.seen and loads.detail and not resumes and facts["loads_alone"].answer is NO:
        text = f"loads a save only with {loads.detail}: without train.resume_args, it begins at step 1 after a fault"
        yield Sentence(loads.places[0], text)
