"""Help as plain text, in groups, and never cut off: typer's own pretty help imports a library that costs more time than
all the rest, and its plain help shortens what a command does."""

from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

#: (heading, name, text)
Row = tuple[str, str, str]


class Command(TyperCommand):
    """A command whose options are shown by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options."""
        _write(_parameters(self, ctx), formatter)


class Group(TyperGroup):
    """A group whose commands are shown by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the commands, then the group's own options."""
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                rows.append((heading, name, command.get_short_help_str(1000).removesuffix(".")))
        _write([*rows, *_parameters(self, ctx)], formatter)


class App(typer.Typer):
    """typer.Typer with this help, -h beside --help, and help where no command is given."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            cls=settings.pop("cls", Group),
            no_args_is_help=True,
            rich_markup_mode=None,
            pretty_exceptions_enable=False,
            context_settings={"help_option_names": ["-h", "--help"]},
            **settings,
        )

    def add(
        self,
        group: str | None,
        *functions: Callable[..., Any],
        name: str | None = None,
        example: str = "",
        aliases: Iterable[str] = (),
    ) -> None:
        """Make commands of functions. group: their heading in the help; example: a command line to show at the end;
        aliases: other names, which no help lists."""
        for function in functions:
            epilog = f"Example: {example}" if example else None
            self.command(name, cls=Command, rich_help_panel=group, epilog=epilog)(function)
            for alias in aliases:
                self.command(alias, cls=Command, hidden=True, epilog=epilog)(function)


def _parameters(command: Any, ctx: Any) -> Iterable[Row]:
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            is_option = parameter.param_type_name == "option"
            name = record[0] if is_option else parameter.metavar or record[0]
            heading = getattr(parameter, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
            yield heading, name, record[1]


def _write(rows: Iterable[Row], formatter: Any) -> None:
    """Write each group under its heading, in the order in which the headings appear first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for heading, name, text in rows:
        groups.setdefault(heading, []).append((name, text))
    for heading, group in groups.items():
        with formatter.section(heading):
            formatter.write_dl(group)
