"""The site profiles, for people and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slurmddp.errors import UserError
from slurmddp.job.document import Key, Plain, typed
from slurmddp.job.site import Fact, Site
from slurmddp.report.explain import leaves, raw, sources
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import Survey
from slurmddp.sites.host import Host

#: What differs between any two profiles, and says nothing about the clusters.
_OF_THE_FILE = ("name", "title", "documentation", "level", "bases", "detect", "facts")


def site_rows(catalogue: Catalogue, active: tuple[str, str] | None) -> list[dict[str, Any]]:
    """Return one row per profile. A broken one is marked and hides no other. active: (site, why)."""
    rows = []
    for name in catalogue.names():
        row: dict[str, Any] = {"name": name, "file": str(catalogue.path(name)), "active": False, "why": None}
        if active is not None and active[0] == name:
            row |= {"active": True, "why": active[1]}
        try:
            site, _ = catalogue.load(name)
        except UserError as error:
            row |= {"title": None, "level": None, "broken": str(error)}
        else:
            row |= {"title": site.title, "level": site.level, "broken": None}
        rows.append(row)
    return rows


def site_list(rows: list[dict[str, Any]]) -> str:
    """Return one line per row."""
    width = max(14, *(len(row["name"]) + 2 for row in rows))
    lines = []
    for row in rows:
        text = f"broken: {row['broken'].splitlines()[0]}" if row["broken"] else f"{row['title']}  ({row['level']})"
        text += f"  [active: {row['why']}]" if row["active"] else ""
        lines.append(f"{row['name']:<{width}}{text}")
    return "\n".join(lines)


def site_page(catalogue: Catalogue, name: str) -> str:
    """Return the profile as YAML, merged with its bases, and the sources of its unverified values."""
    import yaml

    site, _ = catalogue.load(name)
    tree = {key: value for key, value in catalogue.layered(name).tree.items() if key not in ("bases", "facts")}
    over = f", with its bases: {', '.join(site.bases)}" if site.bases else ""
    text = yaml.dump(_plain(tree), Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True, width=100)
    lines = [f"# {catalogue.path(name)}{over}", text.rstrip()]
    unverified = [f"{key}: {fact.source}" for key, fact in site.facts.items() if not fact.verified]
    if unverified:
        lines += ["", "# not verified in the site's own documentation:", *(f"#   {line}" for line in unverified)]
    return "\n".join(lines)


def site_explained(catalogue: Catalogue, name: str) -> str:
    """Return each value of the profile with its file and line, and where the fact comes from."""
    lines = []
    for value in _explained(catalogue, name):
        lines += [
            f"{value['key']} = {_shown(value['value'])}",
            f"  {value['where']}",
            *(f"  over {old}" for old in value["over"]),
        ]
        if fact := value["fact"]:
            more = [str(detail) for key, detail in fact.items() if key not in ("source", "verified")]
            lines.append(f"  {'' if fact['verified'] else 'not '}verified: {'; '.join([fact['source'], *more])}")
    return "\n".join(lines)


def site_dict(catalogue: Catalogue, name: str, *, explain: bool) -> dict[str, Any]:
    """Return the profile merged with its bases; explain: and the origin of each value."""
    site, _ = catalogue.load(name)
    tree = _plain(catalogue.layered(name).tree)
    found = {"name": site.name, "file": str(catalogue.path(name)), "profile": tree}
    return found | ({"values": list(_explained(catalogue, name))} if explain else {})


def _explained(catalogue: Catalogue, name: str) -> Iterator[dict[str, Any]]:
    site, _ = catalogue.load(name)
    layered = catalogue.layered(name)
    for path in leaves(layered):
        if path[0] not in ("bases", "facts"):
            fact = _fact(site, path)
            where, *over = sources(layered, path)
            yield {
                "key": ".".join(path),
                "value": _plain(raw(layered.tree, path)),
                "where": where,
                "over": over,
                "fact": fact and fact.model_dump(mode="json", exclude_none=True),
            }


def _fact(site: Site, path: Key) -> Fact | None:
    """Return the fact that covers a value: that of the value, or of the nearest key above it."""
    keys = (".".join(path[:end]) for end in range(len(path), 0, -1))
    return next((site.facts[key] for key in keys if key in site.facts), None)


def differences(catalogue: Catalogue, a: str, b: str) -> dict[str, dict[str, Any]]:
    """Return key -> {a: value, b: value} of the values that differ, in the order of the keys; null: not set."""
    found = {}
    trees = [dict(_values(catalogue.load(name)[0].model_dump(mode="json", by_alias=True))) for name in (a, b)]
    written = [catalogue.layered(name).tree for name in (a, b)]
    for key in dict.fromkeys([*trees[0], *trees[1]]):
        first, second = (tree.get(key) for tree in trees)
        if first != second and key[0] not in _OF_THE_FILE:
            shown = (_written(tree, key, value) for tree, value in zip(written, (first, second), strict=True))
            found[".".join(key)] = dict(zip((a, b), shown, strict=True))
    return found


def differences_text(found: dict[str, dict[str, Any]]) -> str:
    """Return the differences, each below its key."""
    lines = []
    for key, sides in found.items():
        width = max(map(len, sides))
        lines.append(key)
        lines += [f"  {name:<{width}}  {_shown(value)}" for name, value in sides.items()]
    return "\n".join(lines) or "no differences"


def _values(tree: dict[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield the values that are set; a list is one value."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _values(value, (*above, name))
        elif value not in (None, []):
            yield (*above, name), value


def _written(tree: Any, key: Key, value: Any) -> Any:
    """Return a value as the profile writes it, with its unit; a default as the model has it."""
    try:
        return _plain(raw(tree, key))
    except (KeyError, TypeError):
        return value


def survey_text(host: Host, found: Survey) -> str:
    """Return what detection saw, the best candidate first."""
    cluster = f"{found.cluster.value} (from {found.cluster.source})" if found.cluster else "unknown"
    lines = [f"host         {host.name}", f"ClusterName  {cluster}", ""]
    for candidate in found.candidates:
        lines.append(f"{candidate.site}: {candidate.excluded or f'score {candidate.score}'}")
        lines += [f"  {item.score}  {item.text} (detect.{item.key}: {item.pattern})" for item in candidate.evidence]
    return "\n".join(lines)


def survey_dict(host: Host, found: Survey) -> dict[str, Any]:
    """Return what detection saw. site: the detected one; null for no match and for a tie."""
    return {
        "host": host.name,
        "cluster_name": found.cluster and found.cluster._asdict(),
        "site": found.best[0].site if len(found.best) == 1 else None,
        "candidates": [
            {
                "site": candidate.site,
                "score": candidate.score,
                "excluded": candidate.excluded,
                "evidence": [item._asdict() for item in candidate.evidence],
            }
            for candidate in found.candidates
        ],
    }


def _shown(value: Any) -> str:
    if value is None:
        return "(not set)"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(value: Any) -> Any:
    """Return values that YAML and JSON write as the profile does: 24h stays 24h, 0123 stays text."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, Plain):
        return value
    read = typed(value)
    return read if isinstance(read, bool) or str(read) == value else str(value)
