"""Which words of a job look like a secret, by their names: what a job says is written to files and command lines."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slurmddp.errors import UserError
from slurmddp.job.job import Job
from slurmddp.job.resolve import Resolved
from slurmddp.records.redact import HARMLESS, REDACTED, hide_pairs, is_secret_name, normal_name, without_kinds

#: `--name=value`, `name=value`, `+group.name=value` (Hydra): one whole word of a command line.
_ASSIGNED = re.compile(r"[-+~]*([A-Za-z_][\w./:@-]*)=(.*)", re.DOTALL)
#: `"name": "value"` in a word that is JSON.
_MEMBER = re.compile(r"[\"']([A-Za-z_][\w.-]*)[\"']\s*:\s*[\"']([^\"']*)")
#: NAME=value in a shell line or in --env=NAME=value. A value from a variable or a command is none that stands there.
_IN_SHELL = re.compile(r"(?:^|[\s;&|,=])([A-Za-z_]\w*)=(?![\"']?[$`])[\"']?([^\s;&|,\"']*)")
#: A value shorter than this stands in a text by chance.
_LONG_ENOUGH = 8


def refuse_secrets(resolved: Resolved) -> None:
    """Raises one UserError that names all that looks like a secret; no value is shown."""
    allowed = {normal_name(name) for name in resolved.job.not_secret}
    messages = [
        f"{resolved.location(*key)}: {name} looks like a secret, and its value would be written to the run folder\n"
        f"  -> {_advice(name)}"
        for key, name in _found(resolved.job)
        if normal_name(name) not in allowed
    ]
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))


def _advice(name: str) -> str:
    variable = name if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) else normal_name(name)
    read = "" if variable == name else f" and let the script read {variable} from its environment"
    return (
        f"export {variable}=... in your shell and set `environment_from: [{variable}]`{read}. "
        f"If it is not a secret, set `not_secret: [{name}]`"
    )


def _found(job: Job) -> Iterator[tuple[tuple[str, ...], str]]:
    """(key path, name) of all in a job that has a secret's name and a value."""
    for key, variables in ((("environment",), job.environment), (("network", "variables"), job.network.variables)):
        yield from (((*key, name), name) for name, value in variables.items() if _is_secret(name, value))
    yield from ((("train", "args"), name) for name in _in_words(job.train.args))
    for key, lines in ((("setup",), job.setup), (("container", "options"), job.container.options)):
        for index, line in enumerate(lines):
            yield from (((*key, str(index)), name) for name in secrets_in_line(line))
    for part, values in (("data", job.train.data), ("model", job.train.model)):
        yield from ((("train", part), name) for name in _in_tree(values))


def secrets_in_line(line: str) -> list[str]:
    """Return the names in a shell line, or in --env=NAME=value, whose value is a secret."""
    return [name for name, value in _IN_SHELL.findall(line) if _is_secret(name, value)]


def _is_secret(name: str, value: str) -> bool:
    return value.lower() not in HARMLESS and is_secret_name(name)


def _in_words(words: Sequence[str]) -> Iterator[str]:
    """Names of the options and assignments among a script's arguments that hold a secret, as they are written."""
    for word, value in zip(words, [*words[1:], "-"], strict=False):
        assigned = _ASSIGNED.fullmatch(word)
        if assigned:
            name, text = assigned.groups()
            if _is_secret(name, text):
                yield word[: word.index("=")]
        elif word.startswith("-") and not value.startswith("-") and _is_secret(word, value):
            yield word
        yield from (name for name, text in _MEMBER.findall(word) if _is_secret(name, text))


def _in_tree(value: Any, name: str = "") -> Iterator[str]:
    """Names of the keys in a free map that hold a secret text."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _in_tree(item, str(key))
    elif isinstance(value, list):
        for item in value:
            yield from _in_tree(item, name)
    elif isinstance(value, str) and _is_secret(name, value):
        yield name


def redacted(words: Iterable[str], secrets: Iterable[str] = ()) -> list[str]:
    """A command line to be recorded: without these secrets' values, and without what follows a secret's name."""
    values = [value for value in secrets if len(value) >= _LONG_ENOUGH]
    kept: list[str] = []
    behind = False  # whether the word before is an option that holds a secret
    for word in words:
        text = REDACTED if behind and not word.startswith("-") and word.lower() not in HARMLESS else word
        for value in values:
            text = text.replace(value, REDACTED)
        text = hide_pairs(without_kinds(text))
        behind = word.startswith("-") and "=" not in word and is_secret_name(word)
        kept.append(text)
    return kept


def refuse_values(secrets: Mapping[str, str], texts: Mapping[str, str]) -> None:
    """Raises UserError where the value of a secret stands in a text that is about to be written to a file."""
    for name, value in secrets.items():
        where = next(
            (location for location, text in texts.items() if len(value) >= _LONG_ENOUGH and value in text), None
        )
        if where is not None:
            raise UserError(
                f"the value of {name}, a secret from environment_from, would be written to {where} in the run folder",
                todo=f"remove it from the job and its arguments: the ranks get it as the variable {name}",
            )
