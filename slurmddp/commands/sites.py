"""site: which profiles there are, what one says, and which one this host uses; schema: the formats of the files."""

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.follow import Json
from slurmddp.commands.help import App, Group
from slurmddp.errors import UserError

if TYPE_CHECKING:
    from slurmddp.sites.catalogue import Catalogue

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
        """Complete commands and names of sites."""
        show = self.commands["show"]
        names = next(parameter for parameter in show.params if parameter.name == "name")
        return [*super().shell_complete(ctx, incomplete), *names.shell_complete(ctx, incomplete)]


def register(app: App) -> None:
    """Put the group's commands on the app."""
    group = App(
        cls=SitesGroup,
        help="List, show, compare, detect and validate site profiles",
        epilog="Without a command: list. `slurmddp site NAME` is short for `slurmddp site show NAME`",
    )
    group.add(None, list_sites, name="list")
    group.add(None, show, example="slurmddp site show leonardo --explain")
    group.add(None, diff, example="slurmddp site diff leonardo snellius")
    group.add(None, detect)
    group.add(None, validate, example="slurmddp site validate mine.yaml")
    group.add(None, init, example="slurmddp site init --probe --account physics")
    group.add(None, bad_nodes, name="bad-nodes", example="slurmddp site bad-nodes --add node17 --reason 'slow disk'")
    app.add_typer(group, name="site", rich_help_panel="Sites and alerts")
    app.add(None, schema, hidden=True, example="slurmddp schema job > job.schema.json")


def _catalogue() -> "Catalogue":
    from slurmddp.sites.catalogue import Catalogue

    return Catalogue(os.environ)


def list_sites(as_json: Json = False) -> None:
    """List the site profiles, and mark the active one: the one that a job without `site:` uses."""
    from slurmddp.report.sites import site_list, site_rows
    from slurmddp.sites.select import select

    catalogue = _catalogue()
    active, trouble = None, None
    try:
        active = select(catalogue, os.environ)
    except UserError as error:  # a tie, or a broken profile: the list helps to solve it
        trouble = str(error)
    rows = site_rows(catalogue, active)
    if as_json:
        typer.echo(opt.json_text(rows))
    else:
        typer.echo(site_list(rows))
    if trouble or active is None:
        opt.say(f"no active site: {trouble or 'none is selected, and no profile matches this host'}")
    elif not any(row["active"] for row in rows):
        opt.say(f"active site: {active[0]} ({active[1]})")


def show(
    name: Name,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show each value with its file, line, source and date")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show a site profile merged with its bases, and its unverified values."""
    from slurmddp.report import sites as report

    catalogue = _catalogue()
    if as_json:
        typer.echo(opt.json_text(report.site_dict(catalogue, name, explain=explain)))
    else:
        typer.echo(report.site_explained(catalogue, name) if explain else report.site_page(catalogue, name))


def diff(a: Name, b: Name, as_json: Json = False) -> None:
    """Show the values in which two site profiles differ."""
    from slurmddp.report.sites import differences, differences_text

    found = differences(_catalogue(), a, b)
    typer.echo(opt.json_text(found) if as_json else differences_text(found))


def detect(as_json: Json = False) -> None:
    """Show the evidence on this host for each site profile, and its score."""
    from slurmddp.report.sites import survey_dict, survey_text
    from slurmddp.sites.detect import decide, survey
    from slurmddp.sites.host import this_host

    host = this_host(os.environ)
    found = survey(_catalogue(), host, ask=True)
    typer.echo(opt.json_text(survey_dict(host, found)) if as_json else survey_text(host, found))
    decided = decide(found)  # raises for a tie
    if not as_json:
        typer.echo(f"detected: {decided[0]}" if decided else "no profile matches this host")


def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Site files, or names of site profiles")],
    as_json: Json = False,
) -> None:
    """Check site files, and list all mistakes at once. Exit code: 0 all valid, 2 some mistakes."""
    from slurmddp.sites.problems import problems

    catalogue = _catalogue()
    found = {file: problems(catalogue, file) for file in files}
    wrong = [problem for listed in found.values() for problem in listed]
    if as_json:
        typer.echo(opt.json_text([{"file": file, "problems": listed} for file, listed in found.items()]))
        raise typer.Exit(2 if wrong else 0)
    for file, listed in found.items():
        if not listed:
            typer.echo(f"{file}: valid")
    if wrong:
        raise UserError("\n".join(wrong))


def init(
    output: Annotated[
        str | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="File to write, or - for stdout  [default: in your site folder]"
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file")] = False,
    partition: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Describe only these partitions, separated by commas")
    ] = None,
    probe: Annotated[
        bool,
        typer.Option(
            "--probe", help="Submit one short job per node type, to inspect the nodes (at most 5 minutes each)"
        ),
    ] = False,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="Slurm account to charge the probes to")] = None,
    wait: Annotated[
        str | None, typer.Option(metavar="TIME", help="Cancel probes that have not run by then [default: 10m]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Draft a site profile from what this cluster's Slurm says. Submits nothing without --probe."""
    from slurmddp.sites.draft.live import look
    from slurmddp.sites.draft.probe import probe as look_on_nodes
    from slurmddp.sites.draft.write import Target

    for name, value in (("--account", account), ("--wait", wait)):
        if value is not None and not probe:
            raise UserError(f"{name} works only with --probe", todo=f"add --probe, or remove {name}")
    seconds = _seconds("--wait", wait or "10m")
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
        typer.echo(text, nl=False)
    else:
        for line in (f"wrote {path}", *(f"note: {note}" for note in target.notes(path))):
            opt.say(line)
        opt.say(f"Read it, then try: slurmddp init job.yaml --site {site}")


def _seconds(option: str, text: str) -> int:
    from slurmddp.job.types import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise UserError(f"{text!r} {error}", where=option) from None


def bad_nodes(
    add: Annotated[str | None, typer.Option(metavar="NODE", help="Avoid this node, too; needs --reason")] = None,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Reason for --add")] = None,
    forget: Annotated[str | None, typer.Option(metavar="NODE", help="Let jobs use this node again")] = None,
    site: opt.Site = None,
    as_json: Json = False,
) -> None:
    """List the nodes that new jobs of a site avoid, because a run found them bad."""
    import time

    from slurmddp.report.bad_nodes import bad_nodes_table
    from slurmddp.run import bad_nodes as known
    from slurmddp.sites.select import select

    if (add is None) != (reason is None):
        raise UserError("--add and --reason work only together", todo="give both, or neither")
    if add is not None and forget is not None:
        raise UserError("--add and --forget cannot be combined", todo="run the command twice")
    if reason is not None and not reason.strip():
        raise UserError("--reason is empty", todo="say what is wrong with the node: --reason 'slow disk'")
    catalogue = _catalogue()
    selected = select(catalogue, os.environ, site)
    if selected is None:
        raise UserError("no site selected, and none matches this host", todo="select one with --site")
    profile, _ = catalogue.load(selected[0])
    if add is not None and reason is not None:
        known.add(profile.name, add, reason)
    found = known.bad_nodes(profile.name, profile.exclude_bad_nodes_for, time.time())
    if forget is not None:
        if forget not in [each.node for each in found]:
            raise UserError(f"{forget} is not a bad node of site {profile.name}", todo="`slurmddp site bad-nodes`")
        known.forget(profile.name, forget)
        found = [each for each in found if each.node != forget]
    if as_json:
        typer.echo(opt.json_text([each.as_dict() for each in found]))
    else:
        typer.echo(bad_nodes_table(profile.name, found, time.time()))


def schema(
    kind: Annotated[str, typer.Argument(metavar="job|site|recipe", help="Kind of file")],
    path: Annotated[bool, typer.Option("--path", help="Print the path of a file with the schema instead")] = False,
) -> None:
    """Print the JSON Schema of job, site or recipe files, for editors and other programs."""
    from slurmddp.job.schema import schema_text
    from slurmddp.launch.schemas import schema_file

    typer.echo(schema_file(kind) if path else schema_text(kind), nl=path)
