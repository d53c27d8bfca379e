"""Read a script: all facts, or why it could not be read; and whether it trains at all."""

from __future__ import annotations

import os
from collections.abc import Sequence

from slurmddp.program import data, ranks
from slurmddp.program.facts import QUESTIONS, Answer, Fact, Facts, Place, Unread
from slurmddp.program.judge import Judge
from slurmddp.program.libraries import TRAINING
from slurmddp.program.loads import Loads
from slurmddp.program.names import last
from slurmddp.program.saves import Saves
from slurmddp.program.source import CannotReadError, Sources, parse, read_sources, runs


def read_program(script: str, roots: Sequence[str] = (), module: str = "") -> Facts:
    """Return what a script does, by its text alone. roots: further folders from which it imports; module: of `-m`.

    Never raises for what the script contains: what cannot be read is `cannot tell`, with the reason in `unread`.
    """
    sources = read_sources(script, roots, module)
    if not sources.read or sources.read[0].module != "__main__":
        return _unknown(script, sources)
    try:
        return _judge(script, sources)
    except (RecursionError, MemoryError):  # a few KB of text can be nested deeper than any program that works
        sources.unread.append(Unread(script, "too deeply nested"))
        return _unknown(script, sources)


def is_training_program(script: str, roots: Sequence[str] = ()) -> Answer:
    """Return whether a file trains a model where it is run: a module that only defines how is no program."""
    try:
        if not any(map(runs, parse(script)[0].body)):
            return Answer.NO
    except CannotReadError:
        return Answer.UNKNOWN
    sources = read_sources(script, roots)
    if not TRAINING.intersection(sources.foreign):
        return Answer.NO
    try:
        judge = Judge(sources)
    except (RecursionError, MemoryError):
        return Answer.UNKNOWN
    framework = [each for events in judge.frameworks.values() for each in events]
    fits = any(last(each.node.func) in ("fit", "train") or "LightningCLI" in " ".join(each.names) for each in framework)
    if fits or judge.methods("backward", "zero_grad"):
        return Answer.YES
    return Answer.UNKNOWN if judge.unseen or judge.configured or judge.methods("fit") else Answer.NO


def _unknown(script: str, sources: Sources) -> Facts:
    facts = tuple(Fact(name, Answer.UNKNOWN) for name in QUESTIONS)
    return Facts(script, len(sources.read), facts, (), tuple(sources.unread))


def _judge(script: str, sources: Sources) -> Facts:
    judge = Judge(sources)
    saves = Saves(judge)
    loads = Loads(saves)
    found = [
        ranks.process_group(judge), ranks.wraps_model(judge), *ranks.device(judge), *data.shares(judge),
        *saves.facts(), *loads.facts(), ranks.stops(judge), data.beside_script(judge), data.in_tmp(judge),
        data.internet(judge), judge.by_call("seeds"), ranks.requeues(judge), ranks.starts_ranks(judge),
        data.workers(judge), judge.sets("sets_omp", "OMP_NUM_THREADS"),
        judge.sets("sets_visible_devices", "CUDA_VISIBLE_DEVICES"),
    ]  # fmt: skip
    by_name = {fact.name: fact for fact in found}
    proposed = tuple(loads.proposals(by_name))
    folder = os.path.dirname(os.path.abspath(script))
    facts = tuple(_shortened(by_name[name], folder) for name in QUESTIONS)
    return Facts(script, len(sources.read), facts, proposed, tuple(sources.unread))


def _shortened(fact: Fact, folder: str) -> Fact:
    places = (Place(_relative(place.file, folder), place.line, place.text) for place in fact.places)
    return fact._replace(places=tuple(places))


def _relative(path: str, folder: str) -> str:
    absolute = os.path.abspath(path)
    return os.path.relpath(absolute, folder) if absolute.startswith(f"{folder}/") else path
