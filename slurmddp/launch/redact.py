"""Takes secrets out of text that leaves the cluster: known values, what follows a secret's name, and what looks so."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from slurmddp.alerts import secrets
from slurmddp.job.sensitive import REDACTED, is_secret_name, redacted
from slurmddp.run.credentials import without_credentials

#: A value shorter than this stands in a text by chance.
_SHORTEST = 6
#: NAME="some words", and an option with its value: in a shell, in YAML's lists, in JSON.
_QUOTED = re.compile(
    r"(?<![A-Za-z_])([A-Za-z_][\w-]{0,200})([\"']?\s{0,9}[=:]\s{0,9})(\"(?:\\.|[^\"\\\n])*\"|'[^'\n]*')"
)
_OPTION = re.compile(r"(?<![\w-])(-{1,2}[A-Za-z][\w-]*)([\"',]*\s+(?:-\s+)?[\"']?)(?![-\"'])([^\s\"',\]]+)")
#: `NAME: some words`, up to the end of the line.
_LINE = re.compile(r"(?<![\w-])([A-Za-z_][\w-]*)([\"']?[ \t]*[:=][ \t]+)([^\s\"',{}\[\]][^\n]*)")
_HEADER = re.compile(
    r"(?i)(\bauthorization[\"']?\s*[:=]\s*[\"']?(?:bearer|basic|token)?\s*|\bbearer\s+)([^\s\"',]{6,})"
)
#: The end of a private key whose beginning was cut off.
_KEY_END = re.compile(r"(?<![A-Za-z0-9+/=])(?:[A-Za-z0-9+/=]{16,}\s{1,9}){1,99}(?=-----END [A-Z0-9 ]*PRIVATE KEY)")
_WORD = re.compile(r"\S+")
#: Searches in a line take the square of its length.
_LONG_LINE = re.compile(r"[^\n]{8192,}")


def secrets_of(run_id: str, environment: Mapping[str, str]) -> list[str]:
    """Return the values that are known: those of this shell, by their names, and those that are kept for the run."""
    found = [value for name, value in environment.items() if is_secret_name(name)]
    folder = secrets.of_run(run_id, environment)
    try:
        names = [entry.path for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        names = []  # they are removed after the run
    for name in names:
        if os.path.basename(name).startswith((".run", ".last")):
            continue
        with open(name, encoding="utf-8", errors="replace") as file:
            parts = re.split(r"[\0\n]", file.read())  # a line with an address; NAME=VALUE and a NUL
        found += [*parts, *(part.partition("=")[2] for part in parts)]
    found += [value.partition("://")[2].partition("/")[2] for value in found]  # an error may name the path alone
    unique = {value.strip() for value in found}
    return sorted((value for value in unique if len(value) >= _SHORTEST), key=len, reverse=True)


def redact(text: str, known: Iterable[str]) -> str:
    """Return the text without secrets. known: their values, the longest first."""
    text = text.encode("utf-8", "replace").decode("utf-8")  # half of a UTF-16 pair is no text
    for value in known:
        text = text.replace(value, REDACTED)
    text = _LONG_LINE.sub(lambda match: f"[a line of {len(match[0])} characters]", text)
    text = without_credentials(text)
    text = _KEY_END.sub(f"{REDACTED}\n", text)
    text = _HEADER.sub(lambda match: match[1] + REDACTED, text)
    for pattern in (_QUOTED, _LINE, _OPTION):
        text = pattern.sub(lambda match: match[1] + match[2] + REDACTED if is_secret_name(match[1]) else match[0], text)
    return _WORD.sub(_word, text)


def _word(match: re.Match[str]) -> str:
    """`redacted` knows NAME=value, NAME:value and users in addresses."""
    word = match[0]
    return redacted([word])[0] if "=" in word or ":" in word else word
