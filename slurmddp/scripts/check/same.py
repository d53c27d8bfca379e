"""Proof of a correction: which words of the recorded launches it changes, and whether those are the ones it means."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.launches import around, launcher_options, programs
from slurmddp.scripts.check.recorded import record
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.sandbox.evaluate import Evaluated

_SAME_FOR_ALL = re.compile(
    r"--(rdzv-.*|master-.*|main-process-.*|nnodes|num-machines)|MASTER_ADDR|MASTER_PORT|WORLD_SIZE"
)
_OF_HEAD = re.compile("MASTER_ADDR|HEAD_NODE|FIRST_NODE|M")
_OF_TASK = re.compile(r"(SLURM|SANDBOX|CUDA_VISIBLE)\w*|HOSTNAME|GPU_DEVICE_ORDINAL")


def changed(before: Script, after: Script, finding: Finding, meant: str) -> set[str] | None:
    """Return which facts of the launches a correction changes without meaning to; None, if bash cannot evaluate them.
    A fact is an option of the launcher, a variable, an argument, or where and how often it starts; meant: a pattern of
    those that it means to change."""
    runs = [{(each.job.role, each.job.hosts): each for each in record(one) or ()} for one in (before, after)]
    places = [place for place in runs[0] if place in runs[1] and place[0] != "shown"]
    wrong, launched = set[str](), False
    for place in places:
        old, new = (_launches(each[place], finding, meant) for each in runs)
        launched |= bool(old)
        for one, other in ((old - new, new - old), (new - old, old - new)):
            for facts in one:
                nearest = min((facts ^ each for each in other), key=len, default=facts)
                wrong |= {name for name, _ in nearest}
    return wrong if launched else None


def _launches(run: Evaluated, finding: Finding, meant: str) -> set[frozenset[tuple[str, str]]]:
    """Return the facts of each task that starts a launcher, but those that a correction means to change. A host is like
    another one for corrections of launches, and a port that the finding names like the one that replaces it."""
    if finding.rule.id == "not-exported" or "is not exported" in finding.message:
        meant = "|".join(filter(None, [meant, re.escape(finding.message.split()[0])]))
    ports = {str(10000 + run.job.id % 20000), *re.findall(r"(?<!\d)\d{4,5}(?!\d)", finding.message)}
    port = re.compile(rf"(?<!\d)({'|'.join(ports)})(?!\d)")
    hosts = re.compile("|".join(map(re.escape, ("localhost", "127.0.0.1", *run.job.hosts))) + r"|10\.[09]\.0\.\d+")
    return {
        frozenset(
            (name, port.sub("#", hosts.sub("@", value) if meant else value))
            for name, value in facts.items() if not re.fullmatch(meant, name)
        )
        for facts in _facts(run)
    }  # fmt: skip


def _facts(run: Evaluated) -> Iterator[dict[str, str]]:
    """Yield what each task starts, by name."""
    starts = list(programs(run))
    times = Counter((each.step, each.task.get("SLURMD_NODENAME")) for each, _, _ in starts)
    for each, kind, arguments in starts:
        options, end, _ = launcher_options(kind, arguments)
        outer = around(run, each)
        inside = min(outer.index(word) for word in {each.words[0], "bash", "sh"} & set(outer))
        facts = {
            "program": f"{kind} {each.words[0]}", "folder": each.folder,
            "container": " ".join(outer[:inside]),
            "tasks": f"{each.task.get('SLURM_STEP_NUM_NODES', 1)} {times[each.step, each.task.get('SLURMD_NODENAME')]}",
            **{f"stream {at}": name.partition("[")[0] for at, name in enumerate(each.streams[:2])},
            **{f"--{name}": value for name, value in options.items()},
            **{name: value for name, value in each.added.items() if not _OF_TASK.fullmatch(name)},
        }  # fmt: skip
        words = arguments[end:]
        for word, before, behind in zip(words, ["", *words], [*words[1:], "-"], strict=False):
            name, equals, value = word.partition("=")
            if word[:1] == "-" or equals or before[:1] != "-" or "=" in before:  # no value of an option
                value = value if equals else behind if word[:1] == "-" and behind[:1] != "-" else ""
                facts[f"argument {name}"] = f"{facts.get(f'argument {name}', '')} {value}".strip()
        facts["number of arguments"] = str(len(words))
        yield facts


def disagreement(script: Script) -> str:
    """Return an option or variable in which the tasks of one step differ, by which they meet; empty, if they agree."""
    for run in record(script) or ():
        seen: dict[tuple[int, str, str], str] = {}
        for (each, kind, _), facts in zip(programs(run), _facts(run), strict=True):
            for name in filter(_SAME_FOR_ALL.fullmatch, facts if each.step else ()):
                if seen.setdefault((each.step, kind, name), facts[name]) != facts[name]:
                    return name
    return ""


def outcome(script: Script) -> object:
    """Return what all imagined jobs start, in a form that can be compared. A variable that holds the first node's name
    makes no difference where the launch has that name, too."""
    runs = [run for run in record(script) or () if run.job.role != "shown"]
    return [
        [{name: facts[name] for name in facts if not _OF_HEAD.fullmatch(name)} for facts in _facts(run)] for run in runs
    ]
