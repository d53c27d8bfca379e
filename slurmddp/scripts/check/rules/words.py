"""Words that bash or a launcher takes for something else than what is meant."""

from __future__ import annotations

import re
from collections.abc import Iterator

from slurmddp.scripts.check.directives import SHORT
from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.recorded import unset_names
from slurmddp.scripts.check.rules.common import NAMES, launches
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.sandbox.evaluate import SRUN_FLAGS

_RANDOM_PORT = re.compile(
    r"(?:\b\w*PORT=|--(?:master|main[_-]process)[_-]port[= ])[\"']?\$\{?RANDOM\}?[\"']?(?=\s|$)", re.IGNORECASE
)
_ONE_WORD = re.compile(r"--?[A-Za-z][\w-]*\s+\S")


@rule
def exit_code_lost(script: Script) -> Iterator[Hit]:
    commands = [each for each in script.commands if not each.function and each.words]
    started = [at for at, each in enumerate(commands) if each.then == "&" and each.words[0] == "srun"]
    if not started or not any(each.step and each.step.background for each in script.found.launches):
        return
    behind = commands[started[-1] + 1 :]
    if behind and behind[-1].words == ["wait"] and not any(each.words[0] in ("exit", "trap") for each in behind):
        yield Hit(behind[-1].line, "wait without a process id returns 0, also if srun failed")


@rule
def random_port(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if not text.lstrip().startswith("#") and _RANDOM_PORT.search(text):
            yield Hit(line, "$RANDOM is a number from 0 to 32767: below 1024, no user may open the port")


@rule
def option_twice(script: Script) -> Iterator[Hit]:
    given: dict[str, str] = {}
    for each in script.directives:
        if each.name and given.get(each.name, each.value) != each.value:
            yield Hit(each.line, f"--{each.name} is given twice: {given[each.name]} is ignored")
        given[each.name] = each.value
    for launch in launches(script, "torchrun", "accelerate"):
        names = [word.partition("=")[0].lstrip("-").replace("_", "-") for word in _before_program(launch.command.words)]
        for name in sorted({name for name in names if names.count(name) > 1} & launch.options.keys()):
            yield Hit(launch.line, f"{NAMES[launch.kind]} is given --{name} twice: the first one is ignored")


def _before_program(words: list[str]) -> Iterator[str]:
    for word in words:
        if word.endswith(".py"):
            return
        if word.startswith("--"):
            yield word


@rule
def quoted_list(script: Script) -> Iterator[Hit]:
    for launch in launches(script):
        for before, word in zip(launch.program, launch.program[1:], strict=False):
            if _ONE_WORD.match(word) and "=" not in word.split()[0] and not before.startswith("-") and "\0" not in word:
                yield Hit(launch.line, f"'{word[:60]}' is one argument: the quotes keep the blanks in it")


@rule
def empty_option(script: Script) -> Iterator[Hit]:
    unset = set() if script.sourced else unset_names(script.text)
    for command in script.commands:
        if command.words[:1] != ["srun"]:
            continue
        for option, value in zip(command.words, command.words[1:], strict=False):
            name = SHORT.get(option[1:], "") if len(option) == 2 else option.removeprefix("--")
            match = re.fullmatch(r"\$\{?(\w+)\}?", value)
            if option[:1] == "-" and "=" not in option and name and name not in SRUN_FLAGS and match:
                if match[1] in unset:
                    yield Hit(command.line, f"where {match[1]} is not set, srun takes the next word as {option}")
