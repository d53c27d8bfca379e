"""Which words of a job look like a secret, by their names: what a job says is written to files and command lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from slurmddp.errors import UserError
from slurmddp.job.job import Job
from slurmddp.job.resolve import Resolved

_SECRET = re.compile(r"(?:.*_)?(?:TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|SECRET_KEY|SECRET_ACCESS_KEY)")
#: A token of a text, which language models are trained on, and units such as dollars per token.
_OF_TEXT = re.compile(
    r"(?:.*_)?(?:PAD|PADDING|EOS|BOS|EOT|UNK|MASK|SEP|CLS|STOP|START|BEGIN|END|FIRST|LAST|NEXT|NEW|PREV|SPECIAL|PER"
    r"|IMAGE|IMG|VIDEO|AUDIO|SPEECH|VISION|TEXT|PROMPT|THINK|TOOL|DECODER_START)_TOKEN"
)
#: Values that nobody has to hide: flags, and nothing at all.
_HARMLESS = frozenset(("", "true", "false", "yes", "no", "on", "off", "none", "null", "0", "1"))

#: `--name=value`, `name=value`, `+group.name=value` (Hydra): one whole word of a command line.
_ASSIGNED = re.compile(r"[-+~]*([A-Za-z_][\w./:@-]*)=(.*)", re.DOTALL)
#: `"name": "value"` in a word that is JSON.
_MEMBER = re.compile(r"[\"']([A-Za-z_][\w.-]*)[\"']\s*:\s*[\"']([^\"']*)")
#: NAME=value in a shell line or in --env=NAME=value. A value from a variable or a command is none that stands there.
_IN_SHELL = re.compile(r"(?:^|[\s;&|,=])([A-Za-z_]\w*)=(?![\"']?[$`])[\"']?([^\s;&|,\"']*)")
#: What is taken out of a recorded command line: whatever follows such a name, in any of these forms.
_ANY_PAIR = re.compile(r"(?<![A-Za-z_])([A-Za-z_][\w-]{0,200})([\"']?\s{0,9}[=:]\s{0,9}[\"']?)([^\s,;&{}\[\]\"']+)")
_USER_IN_URL = re.compile(r"(?<=://)[^/\s@]+(?=@)")

REDACTED = "[redacted]"
#: A value shorter than this stands in a text by chance.
_LONG_ENOUGH = 8
#: Pairs within the value of a pair; what is behind more of them is hidden.
_DEEPEST = 20


def is_secret_name(name: str) -> bool:
    """Return whether a variable, an option or a key of this name holds a secret: HF_TOKEN, --api-key, apiKey."""
    text = _normal(name)
    return _SECRET.fullmatch(text) is not None and _OF_TEXT.fullmatch(text) is None


def _normal(name: str) -> str:
    text = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.strip("-+~"))
    return re.split(r"[./:@]", text)[-1].replace("-", "_").upper()


def refuse_secrets(resolved: Resolved) -> None:
    """Raises one UserError that names all that looks like a secret; no value is shown."""
    allowed = {_normal(name) for name in resolved.job.not_secret}
    messages = [
        f"{resolved.location(*key)}: {name} looks like a secret, and its value would be written to the run folder\n"
        f"  -> {_advice(name)}"
        for key, name in _found(resolved.job)
        if _normal(name) not in allowed
    ]
    if messages:
        raise UserError("\n".join(dict.fromkeys(messages)))


def _advice(name: str) -> str:
    variable = name if re.fullmatch(r"[A-Z_][A-Z0-9_]*", name) else _normal(name)
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
    return value.lower() not in _HARMLESS and is_secret_name(name)


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
        text = REDACTED if behind and not word.startswith("-") and word.lower() not in _HARMLESS else word
        for value in values:
            text = text.replace(value, REDACTED)
        text = _hidden(_USER_IN_URL.sub(REDACTED, text), 0)
        behind = word.startswith("-") and "=" not in word and is_secret_name(word)
        kept.append(text)
    return kept


def _hidden(text: str, depth: int) -> str:
    def hide(match: re.Match[str]) -> str:
        name, between, value = match.groups()
        # A value may itself be a pair: --set=environment.NAME=VALUE.
        secret = _is_secret(name, value) or depth == _DEEPEST
        return name + between + (REDACTED if secret else _hidden(value, depth + 1))

    return _ANY_PAIR.sub(hide, text)


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
