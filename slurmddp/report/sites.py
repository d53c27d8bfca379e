"""The site profiles, for people."""

from __future__ import annotations

from slurmddp.errors import UserError
from slurmddp.sites.catalogue import Catalogue


def site_list(catalogue: Catalogue) -> str:
    """Return one line per profile; a broken one is marked and hides no other."""
    lines = []
    for name in catalogue.names():
        try:
            site, _ = catalogue.load(name)
        except UserError as error:
            lines.append(f"{name:<14}broken: {str(error).splitlines()[0]}")
            continue
        lines.append(f"{name:<14}{site.title}  ({site.level})")
    return "\n".join(lines)


def site_page(catalogue: Catalogue, name: str) -> str:
    """Return the profile's file, its bases, and the sources of its unverified values."""
    site, _ = catalogue.load(name)
    path = catalogue.path(name)
    lines = [f"# {path}", path.read_text(encoding="utf-8").rstrip()]
    unverified = [f"{key}: {fact.source}" for key, fact in site.facts.items() if not fact.verified]
    if unverified:
        lines += ["", "# not verified in the site's own documentation:", *(f"#   {line}" for line in unverified)]
    return "\n".join(lines)
