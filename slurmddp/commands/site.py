"""site list, show, diff, detect, validate, init, bad-nodes: the profiles of sites, and the nodes that jobs avoid."""

import os
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
import yaml

from slurmddp.commands import options as opt
from slurmddp.commands.help import App, Group
from slurmddp.commands.listed import BY_NAME
from slurmddp.errors import UserError
from slurmddp.job.document import Key, Plain, typed
from slurmddp.job.site import Fact, Site
from slurmddp.job.types import seconds_of
from slurmddp.report.explain import leaves, raw, sources
from slurmddp.run import bad_nodes as known
from slurmddp.shared.units import clock
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import decide, select, survey
from slurmddp.sites.draft.live import look
from slurmddp.sites.draft.probe import probe as look_on_nodes
from slurmddp.sites.draft.write import Target
from slurmddp.sites.host import this_host
from slurmddp.sites.problems import problems
from slurmddp.styled import columns, exact
from slurmddp.visible import one_line

#: What differs between any two profiles, and says nothing about the clusters.
_OF_THE_FILE = ("name", "title", "documentation", "level", "bases", "detect", "facts")


def site_page(catalogue: Catalogue, name: str) -> str:
    """Return the profile as YAML, merged with its bases, and the sources of its unverified values."""
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
    facts = {
        "name": site.name,
        "file": str(catalogue.path(name)),
        "profile": _plain(catalogue.layered(name).tree),
    }
    return facts | ({"values": list(_explained(catalogue, name))} if explain else {})


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


Name = Annotated[str, typer.Argument(metavar="SITE", help="A name, or a YAML file", autocompletion=opt.site_names)]


class SitesGroup(Group):
    """`site` alone lists, and `site NAME` shows."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the command in that is left out."""
        words = [arg for arg in args if not arg.startswith("-")]
        if not words and not ctx.resilient_parsing and not {"-h", "--help"} & set(args):
            args = ["list", *args]
        elif len(words) == 1 and words[0] not in self.commands:
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        show = self.commands["show"]
        names = next(parameter for parameter in show.params if parameter.name == "name")
        return [*super().shell_complete(ctx, incomplete), *names.shell_complete(ctx, incomplete)]


def list_sites(as_json: opt.Json = False) -> None:
    """List the site profiles, and mark the active one: the one that a job without `site:` uses."""
    catalogue = Catalogue(os.environ)
    active, trouble = None, None
    try:
        active = select(catalogue, os.environ)
    except UserError as error:  # a tie, or a broken profile: the list helps to solve it
        trouble = str(error)
    rows: list[dict[str, Any]] = []
    lines = []
    width = max(14, *(len(name) + 2 for name in catalogue.names()))
    for name in catalogue.names():
        title, level, broken = None, None, None
        try:
            site, _ = catalogue.load(name)
            title, level = site.title, site.level
        except UserError as error:  # a broken profile is marked and hides no other
            broken = str(error)
        reason = active[1] if active is not None and active[0] == name else None
        row = {"name": name, "file": str(catalogue.path(name)), "active": reason is not None, "why": reason}
        rows.append({**row, "title": title, "level": level, "broken": broken})
        text = f"broken: {broken.splitlines()[0]}" if broken else f"{title}  ({level})"
        lines.append(f"{name:<{width}}{text}" + (f"  [active: {reason}]" if reason is not None else ""))
    opt.show(as_json, rows, lines)
    if trouble or active is None:
        opt.say(f"no active site: {trouble or 'none is selected, and no profile matches this host'}")
    elif not any(row["active"] for row in rows):
        opt.say(f"active site: {active[0]} ({active[1]})")


def show(
    name: Name,
    explain: bool = opt.flag("--explain", "Show each value with its file, line, source and date"),
    as_json: opt.Json = False,
) -> None:
    """Show a site profile merged with its bases, and its unverified values."""
    catalogue = Catalogue(os.environ)
    if as_json:
        typer.echo(opt.json_text(site_dict(catalogue, name, explain=explain)))
    else:
        typer.echo(site_explained(catalogue, name) if explain else exact(site_page(catalogue, name)))


def diff(a: Name, b: Name, as_json: opt.Json = False) -> None:
    """Show the values in which two site profiles differ."""
    catalogue = Catalogue(os.environ)
    trees = [dict(_values(catalogue.load(name)[0].model_dump(mode="json", by_alias=True))) for name in (a, b)]
    written = [catalogue.layered(name).tree for name in (a, b)]
    differences: dict[str, dict[str, Any]] = {}  # key -> {a: value, b: value}; null: not set
    lines = []
    for key in dict.fromkeys([*trees[0], *trees[1]]):
        values = [tree.get(key) for tree in trees]
        if values[0] != values[1] and key[0] not in _OF_THE_FILE:
            shown = (_written(tree, key, value) for tree, value in zip(written, values, strict=True))
            sides = differences[".".join(key)] = dict(zip((a, b), shown, strict=True))
            lines.append(".".join(key))
            lines += [f"  {name:<{max(map(len, sides))}}  {_shown(value)}" for name, value in sides.items()]
    opt.show(as_json, differences, lines or "no differences")


def detect(as_json: opt.Json = False) -> None:
    """Show the evidence on this host for each site profile, and its score."""
    host = this_host(os.environ)
    seen = survey(Catalogue(os.environ), host, ask=True)
    facts = {
        "host": host.name,
        "cluster_name": seen.cluster and seen.cluster._asdict(),
        "site": seen.best[0].site if len(seen.best) == 1 else None,  # null for no match and for a tie
        "candidates": [
            {
                "site": candidate.site,
                "score": candidate.score,
                "excluded": candidate.excluded,
                "evidence": [item._asdict() for item in candidate.evidence],
            }
            for candidate in seen.candidates
        ],
    }
    cluster = f"{seen.cluster.value} (from {seen.cluster.source})" if seen.cluster else "unknown"
    lines = [f"host         {host.name}", f"ClusterName  {cluster}", ""]
    for candidate in seen.candidates:
        lines.append(f"{candidate.site}: {candidate.excluded or f'score {candidate.score}'}")
        lines += [f"  {item.score}  {item.text} (detect.{item.key}: {item.pattern})" for item in candidate.evidence]
    opt.show(as_json, facts, lines)
    decided = decide(seen)  # raises for a tie
    if not as_json:
        typer.echo(f"detected: {decided[0]}" if decided else "no profile matches this host")


def validate(
    files: list[str] = opt.argument("FILE", "Site files, or names of site profiles", default=...),
    as_json: opt.Json = False,
) -> None:
    """Check site files, and list all mistakes at once. Exit code: 0 all valid, 2 some mistakes."""
    catalogue = Catalogue(os.environ)
    by_file = {file: problems(catalogue, file) for file in files}
    wrong = [problem for listed in by_file.values() for problem in listed]
    if as_json:
        typer.echo(opt.json_text([{"file": file, "problems": listed} for file, listed in by_file.items()]))
        raise typer.Exit(2 if wrong else 0)
    for file, listed in by_file.items():
        if not listed:
            typer.echo(f"{file}: valid")
    if wrong:
        raise UserError("\n".join(wrong))


def init(
    output: str | None = opt.value(
        "FILE", "File to write, or - for stdout  [default: in your site folder]", "-o", "--output"
    ),
    force: bool = opt.flag("--force", "Replace an existing file"),
    partition: str | None = opt.value("NAMES", "Describe only these partitions, separated by commas"),
    probe: bool = opt.flag(
        "--probe", "Submit one short job per node type, to inspect the nodes (at most 5 minutes each)"
    ),
    account: str | None = opt.value("NAME", "Slurm account to charge the probes to"),
    wait: str | None = opt.value("TIME", "Cancel probes that have not run by then [default: 10m]"),
    as_json: opt.Json = False,
) -> None:
    """Draft a site profile from what this cluster's Slurm says. Submits nothing without --probe."""
    for name, value in (("--account", account), ("--wait", wait)):
        if value is not None and not probe:
            raise UserError(f"{name} works only with --probe", todo=f"add --probe, or remove {name}")
    try:
        seconds = seconds_of(wait or "10m")
    except ValueError as error:
        raise UserError(f"{wait!r} {error}", where="--wait") from None
    target = Target(output, force, os.environ)
    target.refuse()
    live = look([name for name in (partition or "").split(",") if name], os.environ)
    target.path(live)
    seen = look_on_nodes(live, account, seconds, opt.say) if probe else []
    text, path = target.write(live, seen)
    site = None if path is None else path.stem if output is None else str(path)
    if as_json:
        next_ = [f"slurmddp init job.yaml --site {site}"] if site else []
        notes = target.notes(path) if path else []
        file = path and str(path)
        typer.echo(opt.json_text({"file": file, "site": site, "profile": text, "notes": notes, "next": next_}))
    elif path is None:
        typer.echo(exact(text), nl=False)
    else:
        for line in (f"wrote {path}", *(f"note: {note}" for note in target.notes(path))):
            opt.say(line)
        opt.say(f"Read it, then try: slurmddp init job.yaml --site {site}")


def bad_nodes(
    add: str | None = opt.value("NODE", "Avoid this node, too; needs --reason"),
    reason: str | None = opt.value("TEXT", "Reason for --add"),
    forget: str | None = opt.value("NODE", "Let jobs use this node again"),
    site: opt.Site = None,
    as_json: opt.Json = False,
) -> None:
    """List the nodes that new jobs of a site avoid, because a run found them bad."""
    if (add is None) != (reason is None):
        raise UserError("--add and --reason work only together", todo="give both, or neither")
    opt.one_of({"--add": add is not None, "--forget": forget is not None})
    if reason is not None and not reason.strip():
        raise UserError("--reason is empty", todo="say what is wrong with the node: --reason 'slow disk'")
    catalogue = Catalogue(os.environ)
    selected = select(catalogue, os.environ, site)
    if selected is None:
        raise UserError("no site selected, and none matches this host", todo="select one with --site")
    profile, _ = catalogue.load(selected[0])
    if add is not None and reason is not None:
        known.add(profile.name, add, reason)
    bad = known.bad_nodes(profile.name, profile.exclude_bad_nodes_for, time.time())
    if forget is not None:
        if forget not in [each.node for each in bad]:
            raise UserError(f"{forget} is not a bad node of site {profile.name}", todo="`slurmddp site bad-nodes`")
        known.forget(profile.name, forget)
        bad = [each for each in bad if each.node != forget]
    now = time.time()
    rows = [("NODE", "AGE", "EXPIRES IN", "RUN", "REASON")]
    for each in bad:
        times = clock(now - each.time), clock(each.expires - now)
        rows.append((each.node, *times, each.run or "(added by you)", one_line(each.reason)))
    lines = columns(rows) if bad else f"no bad nodes at site {profile.name}"
    opt.show(as_json, [each.as_dict() for each in bad], lines)


group = App(
    name="site",
    cls=SitesGroup,
    help=BY_NAME["site"].summary,
    epilog="Without a command: list. `slurmddp site NAME` is short for `slurmddp site show NAME`",
)
group.add(list_sites, "list")
group.add(show, example="slurmddp site show leonardo --explain")
group.add(diff, example="slurmddp site diff leonardo snellius")
group.add(detect)
group.add(validate, example="slurmddp site validate mine.yaml")
group.add(init, example="slurmddp site init --probe --account physics")
group.add(bad_nodes, "bad-nodes", "slurmddp site bad-nodes --add node17 --reason 'slow disk'")
