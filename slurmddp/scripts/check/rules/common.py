"""Questions that several rules ask about a launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from operator import attrgetter

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.shell import Command

#: What a template leaves to be filled in: the script is not submitted as it stands.
PLACEHOLDER = re.compile(r"<[A-Za-z_][^<>\n()]*>|\{\{|\{%|@\w+@|%\(\w+\)s")
#: What watches a launch from the background.
_WATCH = {"nvidia-smi", "rocm-smi", "dcgmi", "sleep", "tail", "watch", "vmstat", "echo"}
_Check = Callable[[Script, Launch], Iterator[Hit]]


def launches(script: Script, *kinds: str) -> Iterator[Launch]:
    """Yield the launches of these kinds that the script surely makes, on nodes and in tasks that are known."""
    for each in script.found.launches:
        # In a branch, it may never start, or on one node only; beside services, the other nodes are for those.
        unread = each.branch or (each.step.resources.unread if each.step else bool(services(script)))
        if not unread and (not kinds or each.kind in kinds):
            yield each


def launch_rule(*kinds: str, where: str = "kind") -> Callable[[_Check], _Check]:
    """Register a function as a rule that is asked about each launch of these kinds. where: what else holds for it."""

    def register(check: _Check) -> _Check:
        def each_launch(script: Script) -> Iterator[Hit]:
            for launch in filter(attrgetter(where), launches(script, *kinds)):
                for hit in check(script, launch):
                    yield hit._replace(line=hit.line or launch.line)

        each_launch.__name__ = check.__name__
        rule(each_launch)
        return check

    return register


def services(script: Script) -> list[Command]:
    """Return the commands in the background that start something else than the last launch: servers, or other parts."""
    found = script.found.launches
    ours = [each for each in found if each.program[:1] == found[-1].program[:1]]
    lines = {each.line for one in ours for each in (one.command, one.step and one.step.command) if each}
    background = (each for each in script.commands if each.background and each.words)
    return [each for each in background if each.words[0] not in _WATCH and each.line not in lines]
