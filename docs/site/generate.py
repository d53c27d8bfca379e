"""Write the pages that are made from the code: commands and sites. docs/site/conf.py calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from slurmddp.commands.app import app
from slurmddp.commands.site import site_explained, site_page
from slurmddp.sites.catalogue import Catalogue

ROOT = Path(__file__).resolve().parents[2]
_WIDTH = 100


def write_pages(folder: Path) -> None:
    """Write all pages into `folder`. A page that has not changed keeps its time, so Sphinx does not read it again."""
    for name, text in pages().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def pages() -> dict[str, str]:
    """Return file name -> Markdown."""
    catalog = Catalogue({"HOME": str(ROOT / "docs")})  # the shipped profiles alone
    sites = {f"sites/{name}.md": _site(catalog, name) for name in catalog.names()}
    index = ["# Sites, one page each", "", "What does slurmddp know of my cluster, and where is each value from?", ""]
    index += ["    slurmddp site show NAME --explain", "", "```{toctree}", ":maxdepth: 1", ""]
    return {
        "commands.md": "\n".join(_commands()),
        **sites,
        "sites.md": "\n".join([*index, *(f"sites/{name}" for name in catalog.names()), "```", ""]),
    }


def _commands() -> Iterator[str]:
    yield "# Commands"
    yield "\nWhich commands and options are there? Each page of help is also printed by `slurmddp COMMAND --help`.\n"
    yield from _help(typer.main.get_command(app), None, "slurmddp")


def _help(command: Any, parent: Any, name: str) -> Iterator[str]:
    context = command.make_context(name.split()[-1], [], parent=parent, resilient_parsing=True)
    context.terminal_width = context.max_content_width = _WIDTH
    yield f"## {name}\n"
    yield _block(command.get_help(context))
    if hasattr(command, "list_commands"):
        for each in command.list_commands(context):
            below = command.get_command(context, each)
            if not below.hidden:
                yield from _help(below, context, f"{name} {each}")


def _site(catalog: Catalogue, name: str) -> str:
    title = catalog.load(name)[0].title
    parts = [f"# {_plain(title)}", _block(site_page(catalog, name)), "## Where each value is from"]
    return "\n\n".join([*parts, _block(site_explained(catalog, name))])


def _block(text: str) -> str:
    """Return an indented block, in which Markdown means nothing, without this machine's paths."""
    lines = text.strip("\n").replace(f"{ROOT}/", "").splitlines()
    return "\n".join(f"    {line}".rstrip() for line in lines) + "\n"


def _plain(text: str) -> str:
    """Return text in which no character means anything to Markdown, but code and addresses stay."""
    return text.replace("<", "&lt;").replace("*", r"\*").replace("_", r"\_").replace("[", r"\[")
