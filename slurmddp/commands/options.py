"""The options that all commands on a job share, and what becomes of them."""

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slurmddp.errors import UserError
from slurmddp.styled import exact, join, labelled

if TYPE_CHECKING:
    from slurmddp.job.resolve import Request
    from slurmddp.launch.prepare import Prepared
    from slurmddp.run.layout import RunFolder


def site_names(incomplete: str) -> list[str]:
    from slurmddp.sites.catalogue import Catalogue

    return [name for name in Catalogue(os.environ).names() if name.startswith(incomplete)]


def run_names(incomplete: str) -> list[str]:
    from slurmddp.run import index

    return [name for name in ("last", *(entry.id for entry in index.entries())) if name.startswith(incomplete)]


def run_states(incomplete: str) -> list[str]:
    from slurmddp.run.state import EXIT_CODES

    return [name for name in EXIT_CODES if name.startswith(incomplete)]


def tracker_names(incomplete: str) -> list[str]:
    from slurmddp.trackers.sync import TRACKERS

    return [name for name in TRACKERS if name.startswith(incomplete)]


Site = Annotated[
    str | None,
    typer.Option(metavar="SITE", help="Site profile: a name, or a YAML file", autocompletion=site_names),
]
Explain = Annotated[str | None, typer.Option(metavar="KEY", help="Show where a setting comes from, then exit")]
Run = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Run id (or its first characters), job id, run folder, or last (of this folder)",
        autocompletion=run_names,
    ),
]
#: Which run is meant where none is named.
LAST = "last"
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask if `last` is a run of another folder")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout")]
Resume = Annotated[
    str | None,
    typer.Option(
        metavar="RUN", help="Continue from the newest checkpoint of RUN, in a new run", autocompletion=run_names
    ),
]


def value(metavar: str, help: str, *names: str, default: Any = None, **more: Any) -> Any:
    """Return an option for a parameter of a command. default: `...` for one that must be given."""
    return typer.Option(default, *names, metavar=metavar, help=help, **_named(more))


def flag(name: str, help: str, *names: str, **more: Any) -> Any:
    """Return an option without a value."""
    return typer.Option(False, name, *names, help=help, **_named(more))


def argument(metavar: str, help: str, default: Any = None, **more: Any) -> Any:
    """Return an argument. default: as for `value`."""
    return typer.Argument(default, metavar=metavar, help=help, **_named(more))


def _named(more: dict[str, Any]) -> dict[str, Any]:
    """Return settings by their names in typer. panel: the heading in the help; complete: returns what a word may be."""
    return {
        {"panel": "rich_help_panel", "complete": "autocompletion"}.get(name, name): each for name, each in more.items()
    }


def _setting(
    metavar: str, help: str, *names: str, kind: Any = str | None, panel: str = "Job settings", **more: Any
) -> Any:
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)]


def _rare(metavar: str, help: str, *names: str, **more: Any) -> Any:
    return _setting(metavar, help, *names, panel="More job settings", **more)


#: What every command on a job takes, what people use most first: parameter -> how it stands on the command line.
_SHARED: dict[str, Any] = {
    "job": Annotated[
        str | None, typer.Argument(metavar="JOB.yaml|SCRIPT", help="Job file, or your training script (.py, .sh)")
    ],
    "args": Annotated[list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments for your script, after --")],
    "nodes": _setting("N", "Nodes: 4, 2-4 (a range), 4+1 (one spare)", "-N", "--nodes"),
    "gpus_per_node": _setting("N", "GPUs per node"),
    "time": _setting("TIME", "Time limit: 30m, 1h30m, 24:00:00", "-t", "--time"),
    "partition": _setting("NAME", "Slurm partition", "-p", "--partition"),
    "account": _setting("NAME", "Slurm account to charge", "-A", "--account"),
    "image": _setting("FILE", "Container image"),
    "venv": _setting("DIR", "Virtual environment, in place of an image [default: the active one]"),
    "name": _setting("NAME", "Job name", "-J", "--name"),
    "site": _setting("SITE", "Site profile: a name, or a YAML file", autocompletion=site_names),
    "set_": _setting("KEY=VALUE", "Set any key of the job file; may be repeated", "--set", kind=list[str] | None),
    "module": _rare("MODULE", "Start a Python module; the words after it are its arguments", "-m", "--module"),
    "conda": _rare("NAME|DIR", "Conda environment, in place of an image [default: the active one]"),
    "workdir": _rare("submit|run|DIR", "Where your script runs: relative paths start there", "--workdir"),
    "gpus": _rare("N", "", "-G", "--gpus", hidden=True),
    "gres": _rare("gpu:[TYPE:]N", "GPUs per node, as Slurm has it", "--gres"),
    "cpus_per_node": _rare("N", "Cores per node: each node gets one Slurm task", "-c", "--cpus-per-node"),
    "mem": _rare("SIZE", "Memory per node: 480G"),
    "qos": _rare("NAME", "Slurm quality of service", "-q", "--qos"),
    "exclude": _rare("NODES", "Nodes that the job must not get"),
    "reservation": _rare("NAME", "Slurm reservation"),
    "debug": _rare("", "Enable verbose logs of NCCL and PyTorch (slow)", "--debug", kind=bool),
}
#: The key that each of the named options sets.
_KEYS = {
    "site": "site",
    "name": "name",
    "nodes": "resources.nodes",
    "gpus_per_node": "resources.gpus_per_node",
    "gpus": "resources.gpus",  # no key of a job: its refusal says why (job/validate.py)
    "cpus_per_node": "resources.cpus_per_node",
    "mem": "resources.mem_per_node",
    "time": "resources.time",
    "partition": "resources.partition",
    "account": "resources.account",
    "qos": "resources.qos",
    "image": "container.image",
    "workdir": "train.workdir",
}
#: The key that each option without a value makes true.
_SWITCHES = {"debug": "network.debug"}
#: The options that become an #SBATCH line as they are.
_PASSED_ON = ("exclude", "reservation")
#: What only a new job can ask Slurm for, not one that runs inside an allocation.
OF_SUBMISSION = ("time", "partition", "account", "qos", *_PASSED_ON)
#: What `submit --plain` sets: the script runs where it lies, and nothing of ours restarts or checks it.
PLAIN = (("snapshot", "false"), ("recovery.requeue", "never"), ("recovery.preflight", "false"))


def job_command(*, without: Sequence[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a command of a function whose first parameter is a `Request`: the shared options come before its own."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        shared = {name: kind for name, kind in _SHARED.items() if name not in without}
        options = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        def command(**values: Any) -> None:
            function(_request({name: values.pop(name) for name in shared}), **values)

        parameters = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=False if name in _SWITCHES else None
            )
            for name, kind in shared.items()
        ]
        options = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in options]
        command.__name__, command.__doc__ = function.__name__, function.__doc__
        # Typer reads both: the signature for names and defaults, the annotations for the types.
        command.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {each.name: each.annotation for each in [*parameters, *options]}
        return command

    return decorate


def _request(values: dict[str, Any]) -> "Request":
    """Collect the named options, then --set in its order."""
    from slurmddp.job.resolve import Request

    options: list[tuple[str, Any, str]] = [
        (key, values[name], f"--{name.replace('_', '-')}")
        for name, key in _KEYS.items()
        if values.get(name) is not None
    ]
    options += _of_gres(values.get("gres"))
    options += _of_environment(values)
    options += [
        ("resources.sbatch_extra", [f"--{name}={values[name]}"], f"--{name}")
        for name in _PASSED_ON
        if values.get(name) is not None
    ]
    options += [(key, "true", f"--{name}") for name, key in _SWITCHES.items() if values.get(name)]
    for item in values["set_"] or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"--set {item!r} is not KEY=VALUE", todo="for example --set train.steps=1000")
        options.append((key, value, f"--set {key}"))
    return Request(values.get("job"), tuple(values.get("args") or ()), options, values.get("module"))


def _of_environment(values: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return the keys that `--venv` and `--conda` set. Raises UserError."""
    given = one_of(
        {f"--{name}": values.get(name) is not None for name in ("image", "venv", "conda")}, todo="remove one of them"
    )
    if given in (None, "--image"):
        return []
    from slurmddp.launch.python_environment import conda_options, venv_options

    return venv_options(values["venv"]) if given == "--venv" else conda_options(values["conda"], os.environ)


def _of_gres(text: str | None) -> list[tuple[str, Any, str]]:
    """Return the keys that `--gres` sets. Raises UserError for a resource other than GPUs."""
    import re

    if text is None:
        return []
    gpus = re.fullmatch(r"gpu(?::([A-Za-z][^:,=]*))?(?:[:=]([0-9]+))?", text)
    if gpus is None:
        todo = f"--gres=gpu:4 or --gres=gpu:a100:4; all else: --set 'resources.sbatch_extra=[--gres={text}]'"
        raise UserError(f"--gres={text} is not a number of GPUs", todo=todo)
    kind, count = gpus.groups()
    options = [("resources.gpus_per_node", count or "1", "--gres")]
    return [*options, ("resources.gpu_type", kind, "--gres")] if kind else options


def one_of(options: Mapping[str, object], *, todo: str = "run the command twice") -> str | None:
    """Return the option that is given, if one is. Raises UserError for two of them."""
    given = [option for option, value in options.items() if value]
    if len(given) > 1:
        raise UserError(f"{given[0]} and {given[1]} cannot be combined", todo=todo)
    return given[0] if given else None


def needs(*rules: tuple[object, str, object, str]) -> None:
    """Raise UserError for an option without the one that it needs: (value, name, the other's value and name)."""
    for value, option, other, needed in rules:
        if value and not other:
            raise UserError(f"{option} needs {needed}", todo=f"add {needed}, or remove {option}")


def say(text: str) -> None:
    """Print a message to stderr, so that stdout has only results."""
    typer.echo(text, err=True)


def drop_output() -> None:
    """Let what is still buffered for a reader that has gone (head, less) vanish: Python exits with 120 otherwise."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def json_text(value: Any) -> str:
    """Return a result as JSON. The keys that each `as_dict` gives are stable."""
    import json

    return exact(json.dumps(value))


def show(as_json: bool, facts: Any, text: str | Iterable[str]) -> None:
    """Print a result on stdout: as JSON, or as text or lines for people."""
    typer.echo(json_text(facts) if as_json else text if isinstance(text, str) else join("\n", text))


def show_notes(prepared: "Prepared", known: "Sequence[UserError]" = ()) -> None:
    """Print the warnings and notes of the plan. known: errors that are said anyway, and need no warning, too."""
    for note in prepared.plan.notes:
        if any(error.what in note.text for error in known):
            continue
        say(labelled(note.level, note.text))
    if any(not fact.verified for fact in prepared.resolved.site.facts.values()):
        name, level = prepared.plan.site.name, prepared.resolved.site.level
        say(f"note: the profile of {name} ({level}) has unverified values: `slurmddp site {name}` lists them")


def show_explanation(prepared: "Prepared", key: str) -> None:
    """Print the answer to `--explain KEY`."""
    from slurmddp.report.explain import explain

    typer.echo(explain(prepared.resolved, key))
    if key == "timeouts.stop":
        from slurmddp.job.plan.recovery import explain_stop_lead

        job = prepared.resolved.job
        typer.echo(f"  {explain_stop_lead(job.resources.time, job.timeouts.stop, prepared.resumed.longest_save)}")


def confirm(run: str, folder: "RunFolder", action: str, *, yes: bool) -> None:
    """Name the run before something is done to it; ask if `last` means one that was not submitted from this folder.

    Raises UserError where nobody can be asked, or the answer is no.
    """
    from slurmddp.run import index

    say(f"run     {folder.id}\nfolder  {folder.path}")
    if run != LAST or yes or index.is_here(folder):
        return
    todo = f"slurmddp {action} {folder.id}, or add --yes"
    message = f"the last run was submitted from another folder: {folder.id}"
    if not sys.stdin.isatty():
        raise UserError(message, where="last", todo=todo)
    if not typer.confirm(f"It was submitted from another folder: {action} it?", err=True):
        raise UserError(f"nothing was done: {message}", todo=todo)


def send_waiting(folders: "Iterable[RunFolder]") -> None:
    """Send delayed alerts, in two seconds at most, and say so: other commands do this on their way."""
    from slurmddp.alerts.spool import deliver_all

    done = deliver_all(folders)
    if done.sent:
        say(f"note: sent {done.sent} delayed alert{'s' if done.sent > 1 else ''}")
