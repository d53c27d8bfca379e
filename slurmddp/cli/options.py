"""The options that all commands on a job share, and what becomes of them."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from slurmddp.launch.prepare import Prepared

JobArgument = Annotated[
    str | None, typer.Argument(metavar="JOB.yaml|SCRIPT.py", help="Job file, or a script of your own.")
]
ArgsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the script, behind --.")
]
Site = Annotated[str | None, typer.Option(help="Site profile: a name, or the path of a YAML file.")]
Name = Annotated[str | None, typer.Option(help="Name of the job.")]
Nodes = Annotated[str | None, typer.Option(metavar="N", help="resources.nodes")]
Gpus = Annotated[str | None, typer.Option(metavar="N", help="resources.gpus_per_node")]
Time = Annotated[str | None, typer.Option(help="resources.time: 30m, 12h, 24:00:00, 1-12:00:00")]
Partition = Annotated[str | None, typer.Option(help="resources.partition")]
Account = Annotated[str | None, typer.Option(help="resources.account")]
Image = Annotated[str | None, typer.Option(help="container.image")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any key; may be repeated.")]
Debug = Annotated[bool, typer.Option("--debug", help="network.debug: verbose NCCL and PyTorch logs; slow.")]
Explain = Annotated[str | None, typer.Option(metavar="KEY", help="Say which layer set this key, and end.")]
Resume = Annotated[
    str | None,
    typer.Option(metavar="RUN", help="Continue from this run's newest checkpoint, in a new run folder."),
]

_KEYS = {
    "site": "site",
    "name": "name",
    "nodes": "resources.nodes",
    "gpus": "resources.gpus_per_node",
    "time": "resources.time",
    "partition": "resources.partition",
    "account": "resources.account",
    "image": "container.image",
}


def collect(set_: list[str] | None, debug: bool, **named: str | None) -> list[tuple[str, Any, str]]:
    """The command line's layer: named options first, then --set in its order."""
    from slurmddp.errors import UserError

    options: list[tuple[str, Any, str]] = [
        (_KEYS[name], value, f"--{name}") for name, value in named.items() if value is not None
    ]
    if debug:
        options.append(("network.debug", "true", "--debug"))
    for item in set_ or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise UserError(f"--set {item!r} is not KEY=VALUE", todo="for example --set train.steps=1000")
        options.append((key, value, f"--set {key}"))
    return options


def say(text: str) -> None:
    """A message: stderr, so that stdout holds results alone."""
    typer.echo(text, err=True)


def json_text(value: Any) -> str:
    """A result for programs."""
    import json

    return json.dumps(value)


def show_notes(prepared: "Prepared") -> None:
    """Warnings and notes of the plan."""
    for note in prepared.plan.notes:
        say(f"{note.level}: {note.text}")
    if prepared.plan.experimental:
        name = prepared.plan.site
        say(f"note: the profile of site {name} is experimental; its unverified values: slurmddp sites {name}")


def show_explanation(prepared: "Prepared", key: str) -> None:
    """`--explain KEY` on stdout."""
    from slurmddp.report.explain import explain

    typer.echo(explain(prepared.resolved, key))
