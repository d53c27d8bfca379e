"""Help as plain text, in groups, and never cut off: typer's own pretty help imports a library that costs more time than
all the rest, and its plain help shortens what a command does."""

import importlib
import inspect
import io
import shlex
from collections import UserDict
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from slurmddp.commands.listed import Listed
from slurmddp.errors import UserError
from slurmddp.styled import styled

_RUNS = "slurmddp runs lists your runs, and why one waits"
_SUBMIT = "slurmddp submit train.py submits a job; slurmddp run train.py runs it here"
#: Commands of other tools, with what to type here.
_OTHER_TOOLS = {
    **dict.fromkeys(("queue", "squeue", "list", "jobs", "history"), _RUNS),
    **dict.fromkeys(("start", "launch", "sbatch", "train"), _SUBMIT),
    **dict.fromkeys(("kill", "scancel", "abort"), "slurmddp cancel RUN lets a run save a checkpoint, then stops it"),
    **dict.fromkeys(("why", "explain"), "slurmddp doctor RUN says why a run failed; slurmddp runs, why one waits"),
    **dict.fromkeys(("tail", "log", "output"), "slurmddp logs RUN -f follows the logs of a run"),
    **dict.fromkeys(("info", "show"), "slurmddp status RUN shows the state of a run"),
    **dict.fromkeys(("restart", "retry"), "slurmddp resume RUN continues a run; slurmddp rerun RUN starts it again"),
    **dict.fromkeys(("rm", "delete"), "slurmddp clean removes old runs"),
    **dict.fromkeys(("shell", "exec", "ssh", "attach"), "slurmddp debug shell RUN opens a shell beside the ranks"),
    **dict.fromkeys(("forward", "port", "tunnel"), "slurmddp debug port RUN PORT reaches a port of a node"),
    "stacks": "slurmddp debug stacks RUN shows where each rank is in its code",
    "profile": "slurmddp debug profile RUN profiles some steps",
    **dict.fromkeys(("plan", "validate", "verify", "lint", "dry-run"), "slurmddp check JOB.yaml shows what it will do"),
    **dict.fromkeys(("render", "generate"), "slurmddp check JOB.yaml --write DIR writes the scripts of a job"),
    "preflight": "slurmddp check JOB.yaml --preflight checks the nodes of a job and their network",
    "rehearse": "slurmddp check JOB.yaml --rehearse breaks a short run on purpose",
    **dict.fromkeys(("goodput", "time", "usage"), "slurmddp status RUN --time shows where a run's time went"),
    **dict.fromkeys(("du", "disk", "gc", "prune"), "slurmddp clean lists the disk space of runs, and removes some"),
    **dict.fromkeys(("sites", "cluster", "clusters"), "slurmddp site lists the site profiles"),
    **dict.fromkeys(("alerts", "watch-alerts"), "slurmddp alert watch sends the alerts that nodes could not"),
    **dict.fromkeys(("images", "build"), "slurmddp build-image builds an image; slurmddp image list lists them"),
    **dict.fromkeys(("checkpoints", "export"), "slurmddp checkpoint lists, verifies and exports what a run saved"),
}
#: The base of click's errors: of click's own, or of typer's copy of it.
ClickError: type[Exception] = typer.BadParameter.mro()[2]
#: Typer's own options, which docs/start.md names.
_UNLISTED = ("install_completion", "show_completion")
#: (heading, name, text)
Row = tuple[str, str, str]


class Command(TyperCommand):
    """A command whose options are shown by their `rich_help_panel`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. Raises UserError for an option of the user's script that does not stand after --."""
        words = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # By its name: the class is click's, or that of typer's own copy of click.
            option = getattr(error, "option_name", "") if type(error).__name__ == "NoSuchOption" else ""
            if not option or not any(parameter.name == "args" for parameter in self.params):
                raise
            import difflib

            at = next((index for index, word in enumerate(words) if word.startswith(option)), len(words))
            near = difflib.get_close_matches(option, getattr(error, "possibilities", None) or (), 1, 0.7)
            mine = shlex.join(["slurmddp", ctx.info_name, *words[:at], "--", *words[at:]])
            raise UserError(
                f"{ctx.info_name} has no option {option}" + (f"; did you mean {near[0]}?" if near else ""),
                todo=f"arguments of your script go after --: {mine}",
            ) from None

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write(_parameters(self, ctx), formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the example in one line, to be pasted."""
        if self.epilog:
            formatter.write(f"\n  {self.epilog}\n")


def _command(function: Callable[..., Any], name: str | None, epilog: str | None, *, hidden: bool = False) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    alone.command(name, cls=Command, epilog=epilog, hidden=hidden)(function)
    return typer.main.get_command(alone)


class _Outline(TyperCommand):
    """What a list of commands shows of one, without its parameters: typer needs a millisecond to make them."""

    def __init__(self, function: Callable[..., Any], name: str, epilog: str | None) -> None:
        super().__init__(name, help=inspect.getdoc(function), rich_markup_mode=None, epilog=epilog)
        self._function = function

    def command(self) -> Any:
        return _command(self._function, self.name, self.epilog)


class _Unread(TyperCommand):
    """A command whose module is not imported yet."""

    def __init__(self, listed: Listed, name: str, *, hidden: bool) -> None:
        super().__init__(
            name, help=listed.summary, rich_markup_mode=None, rich_help_panel=listed.panel or None, hidden=hidden
        )
        self._listed = listed

    def command(self) -> Any:
        module = importlib.import_module(f"slurmddp.commands.{self._listed.module}")
        if not self._listed.example:
            return typer.main.get_group(module.group)
        function = getattr(module, self._listed.module)
        return _command(function, self.name, f"Example: {self._listed.example}", hidden=self.hidden)


class _Commands(UserDict[str, Any]):
    """The commands of a group by name, each made when somebody asks for it."""

    def __getitem__(self, name: str) -> Any:
        command = self.data[name]
        if isinstance(command, _Outline | _Unread):
            command = self.data[name] = command.command()
        return command


class Group(TyperGroup):
    """A group whose commands are shown by their `rich_help_panel`. outlines: its commands, but for groups below it."""

    outlines: dict[str, _Outline | _Unread]
    _completes = False

    def __init__(self, *, commands: dict[str, Any], **settings: Any) -> None:
        super().__init__(commands=_Commands({**self.outlines, **commands}), **settings)  # type: ignore[arg-type]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words. `slurmddp help COMMAND` is `slurmddp COMMAND --help`."""
        if ctx.parent is None and args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete a name of the list: no command is made for that."""
        self._completes = True
        return super().shell_complete(ctx, incomplete)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or what the list says of it while a name is completed."""
        if self._completes:
            return self.commands.data.get(cmd_name)  # type: ignore[attr-defined]
        return super().get_command(ctx, cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """List the names, in the order in which the commands were added."""
        return list(self.commands)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command. Raises UserError for a word of other tools, and names ours."""
        if ctx.parent is None and args and args[0] in _OTHER_TOOLS and args[0] not in self.commands:
            raise UserError(f"no command {args[0]!r}", todo=_OTHER_TOOLS[args[0]])
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name, command in self.commands.data.items():  # type: ignore[attr-defined]
            if not command.hidden:
                heading = command.rich_help_panel or "Commands"
                rows.append((heading, name, command.get_short_help_str(1000).removesuffix(".")))
        _write([*rows, *_parameters(self, ctx)], formatter)


class App(typer.Typer):
    """typer.Typer with this help, -h beside --help, and help where no command is given."""

    def __init__(self, cls: type[Group] = Group, **settings: Any) -> None:
        self._outlines: dict[str, _Outline | _Unread] = {}
        super().__init__(
            cls=type(cls.__name__, (cls,), {"outlines": self._outlines}),
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def add(self, function: Callable[..., Any], name: str | None = None, example: str = "") -> None:
        """Make a command of a function. example: a command line to show at the end."""
        command_name = name or function.__name__.replace("_", "-")
        self._outlines[command_name] = _Outline(function, command_name, f"Example: {example}" if example else None)

    def list(self, listed: Listed) -> None:
        """Make a command of a module, which is imported when somebody asks for the command."""
        self._outlines[listed.name] = _Unread(listed, listed.name, hidden=not listed.panel)
        for alias in listed.aliases:
            self._outlines[alias] = _Unread(listed, alias, hidden=True)


def usage_error_text(error: Any) -> str:
    """Return what click prints of an error of its own, with the style of the other errors."""
    printed = io.StringIO()
    error.show(printed)
    text, end = printed.getvalue(), f" {error.format_message()}\n"
    if not text.endswith(f"Error:{end}"):  # the help of a group without a command
        return text
    return text.removesuffix(f"Error:{end}") + styled("Error:", "bad") + end


def _parameters(command: Any, ctx: Any) -> Iterable[Row]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None and parameter.name not in _UNLISTED:
            is_option = parameter.param_type_name == "option"
            name = record[0] if is_option else parameter.metavar or record[0]
            heading = getattr(parameter, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
            yield heading, name, record[1]


def _write(rows: Iterable[Row], formatter: Any) -> None:
    """Write each group under its heading, in the order in which the headings appear first, but what is rare last."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for heading, name, text in rows:
        groups.setdefault(heading, []).append((name, text))
    for heading, group in sorted(groups.items(), key=lambda item: item[0].startswith("More ")):
        with formatter.section(heading):
            formatter.write_dl(group)
