"""The Jinja environment: undefined names are errors, a filter quotes values for a shell, and HTML is escaped."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from slurmddp.assets import asset_folder

if TYPE_CHECKING:
    from jinja2 import Environment

# A leading "=" is left out: bash and its checkers read `NAME==value` as a slip.
_SAFE = re.compile(r"[A-Za-z0-9_@%+:,./-][A-Za-z0-9_@%+=:,./-]*")

#: Stands for the run folder, in what a script passes on; not where its braces are doubled.
_RUN = re.compile(r"(?<!\{)\{run\}|\{run\}(?!\})")


def quote(value: object) -> str:
    """One word for bash, whatever it holds: as it is where that is safe, else in quotes.

    Where single quotes would look like a slip (shellcheck's SC2016: a `$` that does not expand), double ones are
    taken, with a backslash before the four characters that mean something in them; but not around the characters
    that bash uses for itself (1 and 127): in double quotes, inside an array's parentheses, it changes them.

    Raises ValueError for a NUL, which no bash word can hold.
    """
    text = str(value)
    if "\0" in text:
        raise ValueError("a NUL character cannot reach a shell")
    if _SAFE.fullmatch(text):
        return text
    if any(char in text for char in "$`\\") and not any(char in text for char in "\x01\x7f"):
        return '"' + re.sub(r'([\\"$`])', r"\\\1", text) + '"'
    return "'" + text.replace("'", "'\"'\"'") + "'"


def with_run(text: str, run: str, literal: Callable[[str], str] = str) -> str:
    """Return a text with `run` in the place of {run}, and {run} in that of {{run}}. literal: applied to all else."""
    parts = [part.replace("{{run}}", "{run}") for part in _RUN.split(text)]
    return run.join(literal(part) if part else "" for part in parts)


def names_run(text: str) -> bool:
    """Return whether {run} stands in a text."""
    return _RUN.search(text) is not None


def quote_run(value: object) -> str:
    """One word for bash, in which {run} is the value of its variable `run`."""
    return with_run(str(value), '"$run"', quote) or "''"


def yaml_text(value: str) -> str:
    """Return a text as a YAML scalar in double quotes: JSON's form is YAML's too."""
    import json

    return json.dumps(value, ensure_ascii=False)


@cache
def environment() -> Environment:
    """Templates come from templates/ and are plain text, but for those of HTML, where every value is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        loader=FileSystemLoader(asset_folder("templates")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        optimized=False,  # which takes longer than it saves, where each template is rendered once
        # Jinja's own "{#" begins a comment in the middle of bash's ${#array[@]}.
        comment_start_string="{##",
        comment_end_string="##}",
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
    )
    made.filters["quote"] = quote
    made.filters["quote_run"] = quote_run
    made.filters["yaml"] = yaml_text
    made.filters["template"] = made.from_string  # a part that a container runtime brings
    return made


def render(template: str, **values: object) -> str:
    """Return the text of one template below templates/."""
    return environment().get_template(template).render(**values)
