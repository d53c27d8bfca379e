"""Facts about ranks and jobs: process group, GPU, starts, requests to stop."""

from __future__ import annotations

import ast
import re

from slurmddp.program.facts import NO, UNKNOWN, YES, Fact
from slurmddp.program.judge import RANK_WORD, Judge
from slurmddp.program.libraries import CALL, DISTRIBUTED, DOES
from slurmddp.program.names import is_value, last
from slurmddp.program.trace import strings
from slurmddp.program.walk import Event

_LOCAL_RANK = re.compile(
    r"LOCAL_?RANK|device_count|get_local_rank|SLURM_LOCALID|local_process_index|horovod.*local_rank"
)
_PROCESS = re.compile(r"(?:torch\.)?multiprocessing(?:\.\w+|\(\))*\.(?:Process|Pool(?:\(\)\.\w+)?)")
_SHELL = re.compile(r"subprocess\.\w+|os\.(?:system|exec\w+|spawn\w+)")
_LAUNCHER = re.compile(r"torchrun|torch\.distributed|accelerate|srun|mpirun")
_SIGNALS = {"SIGTERM", "SIGUSR1", "SIGUSR2"}


def process_group(judge: Judge) -> Fact:
    """Answer process_group. Lightning on one device makes none."""
    for event in judge.frameworks.get("Lightning", ()):
        devices = event.argument("devices") or event.argument("gpus")
        if isinstance(devices, ast.Constant) and devices.value in (1, "1"):
            return judge.unknown("process_group", [event], "Lightning with devices=1: not on one rank")
    return judge.by_call("process_group")


def wraps_model(judge: Judge) -> Fact:
    """Answer wraps_model; a collective on gradients counts as cannot tell."""
    found = judge.by_call("wraps_model")
    reduces = judge.methods("all_reduce", "reduce_scatter_tensor", "reduce_scatter")
    if found.answer is NO and reduces:
        return judge.unknown("wraps_model", reduces, "it reduces something itself")
    return found


def device(judge: Judge) -> tuple[Fact, Fact]:
    """Answer local_rank_device and fixed_device."""
    local, fixed = "local_rank_device", "fixed_device"
    for framework in DOES[local] & set(judge.frameworks):
        other = Fact(fixed, UNKNOWN if judge.unseen else NO)
        return judge.yes(local, judge.frameworks[framework], framework), other
    by_rank, unclear, fixed_at = judge.calls(DISTRIBUTED), [], []
    for event in judge.events:
        for value in _devices(event):
            origin = judge.trace.origin(event.unit, value)
            text, chosen = " ".join(origin.words | origin.calls), origin.unknown or origin.options or origin.chosen
            if _LOCAL_RANK.search(text):
                by_rank.append(event)
            elif (
                "torch.accelerator" in text
                or any(RANK_WORD.search(word) or "local_rank" in word.lower() for word in origin.words)
                or chosen
            ):
                unclear.append(event)
            elif "cuda" in text or {str(each) for each in judge.trace.texts(event.unit, value)} <= set("0123"):
                fixed_at.append(event)
    if by_rank:
        return judge.yes(local, by_rank), Fact(fixed, NO)
    visible = judge.sets("sets_visible_devices", "CUDA_VISIBLE_DEVICES").answer is not NO
    if unclear or judge.unseen or visible or judge.calls(CALL["starts_ranks"]):
        words = {word for unit in judge.program.reached for word in strings([unit.node or unit.source.tree])}
        ranked = any(RANK_WORD.search(word) or _LOCAL_RANK.search(word) for word in words)
        return judge.fact(local, UNKNOWN if judge.hidden or visible or ranked else NO, unclear), Fact(fixed, UNKNOWN)
    return Fact(local, NO), judge.fact(fixed, YES if fixed_at else NO, fixed_at)


def _devices(event: Event) -> list[ast.expr]:
    """Return the expressions in a call that name a device."""
    name, args = last(event.node.func), event.node.args
    found = [event.argument("device_ids")]
    if name == "to":
        found += args[:1]
    elif name == "set_device" or "torch.device" in event.names:
        found.append(event.argument("device", 0))
    elif name == "cuda" and isinstance(event.node.func, ast.Attribute):
        found += args[:1] or [ast.Constant("cuda")]
    return [each for each in found if each is not None]


def starts_ranks(judge: Judge) -> Fact:
    """Answer starts_ranks: calls of launchers, processes of its own, and torchrun as a subprocess."""
    found = judge.by_call("starts_ranks")
    own = [event for event in judge.calls(_SHELL) if _LAUNCHER.search(" ".join(judge.words(event)))]
    own += [event for event in judge.calls(_PROCESS) if _starts_group(judge, event)]
    if own and found.answer is not YES:
        found = judge.yes("starts_ranks", own)
    events = [*own, *judge.calls(CALL["starts_ranks"])]
    if found.answer is YES and events and all(_has_condition(judge, event) for event in events):
        return judge.unknown("starts_ranks", events, "it depends on a condition")  # perhaps: without torchrun
    return found


def _starts_group(judge: Judge, event: Event) -> bool:
    """Return whether a process that a call starts makes a process group."""
    target = event.argument("target", 1) or event.argument("func", 0)
    names = judge.program.names.dotted(event.unit.source.module, target) if target is not None else set()
    waiting = [each.unit for each in judge.calls(CALL["process_group"])]
    above = set(waiting)
    while waiting:
        unit = waiting.pop()
        if f"@{unit.source.module}:{unit.name}" in names:
            return True
        new = {caller for caller, _ in judge.program.callers.get(unit, ())} - above
        above |= new
        waiting += new
    return False


def _has_condition(judge: Judge, event: Event) -> bool:
    """Return whether a call stands under any condition but that of a main program."""
    return any("__name__" not in set(strings([test])) for test in judge.program.conditions(event.unit, event.guards))


def stops(judge: Judge) -> Fact:
    """Answer stops: should_stop; of a signal handler, nobody knows whether it leads to a save."""
    for unit in judge.program.reached:
        for node in ast.walk(unit.node or unit.source.tree):
            if is_value(node, "SLURMDDP_STOP_FILE"):
                return Fact("stops", YES, (judge.program.place(unit, node),))
    handlers = []
    for event in judge.calls(CALL["stops"]):
        if not any(name.startswith("signal.") for name in event.names):
            return judge.yes("stops", [event])
        words = {last(arg) for arg in event.node.args}
        named = any(word.startswith("SIG") for word in words)
        if (words & _SIGNALS or not named) and not words & {"SIG_DFL", "SIG_IGN"}:
            handlers.append(event)
    if handlers:
        return judge.unknown("stops", handlers, "it has a signal handler")
    if "Lightning" in judge.frameworks:
        return judge.unknown("stops", judge.frameworks["Lightning"], "it depends on Lightning's plugins")
    return judge.no("stops")


def requeues(judge: Judge) -> Fact:
    """Answer requeues: submitit, scontrol requeue, Lightning's SLURMEnvironment."""
    plugins = judge.methods("SLURMEnvironment")
    events = judge.calls(CALL["requeues"]) + [e for e in plugins if not is_value(e.argument("auto_requeue", 0), False)]
    jobs = []
    for event in judge.calls(_SHELL):
        words = " ".join(judge.words(event))
        if "scontrol" in words and "requeue" in words:
            events.append(event)
        elif "sbatch" in words:  # the same job again, or one that follows
            jobs.append(event)
    if jobs and not events:
        return judge.unknown("requeues", jobs, "it submits jobs")
    return judge.yes("requeues", events) if events else judge.no("requeues")
