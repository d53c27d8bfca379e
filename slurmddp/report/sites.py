"""The site profiles, for people."""

from __future__ import annotations

from slurmddp.errors import UserError
from slurmddp.sites.catalogue import Catalogue


def site_list(catalogue: Catalogue) -> str:
    """One line a profile; a broken one says so and hides no other."""
    lines = []
    for name in catalogue.names():
        try:
            site, _ = catalogue.load(name)
        except UserError as error:
            lines.append(f"{name:<14}broken: {str(error).splitlines()[0]}")
            continue
        lines.append(f"{name:<14}{site.title}{'  (experimental)' if site.experimental else ''}")
    return "\n".join(lines)


def site_page(catalogue: Catalogue, name: str) -> str:
    """The profile's file, its bases, and the sources of its values, unverified ones first."""
    site, _ = catalogue.load(name)
    path = catalogue.path(name)
    lines = [f"# {path}", path.read_text(encoding="utf-8").rstrip()]
    unverified = [f"{key}: {fact.source}" for key, fact in site.facts.items() if not fact.verified]
    if unverified:
        lines += ["", "# not verified in text of the site itself:", *(f"#   {line}" for line in unverified)]
    return "\n".join(lines)
