"""Help and shell completion: every command has both, and help is whole on a terminal of 80 columns."""

import os
import subprocess
import sys

import pytest
from typer.main import get_command

from slurmddp.commands.app import app
from slurmddp.commands.help import _Outline, _Unread
from slurmddp.commands.listed import COMMANDS, Listed
from tests.helpers import ROOT, Desk


def commands() -> list[tuple[str, ...]]:
    """Every command and group, as the words behind `slurmddp`."""
    found: list[tuple[str, ...]] = []
    pending: list[tuple[tuple[str, ...], object]] = [((), get_command(app))]
    while pending:
        words, command = pending.pop()
        found.append(words)
        pending += [((*words, name), part) for name, part in getattr(command, "commands", {}).items()]
    return sorted(found)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], str]:
    """The help of every command at 80 columns: one process for all of them."""
    code = (
        "import io, sys, contextlib\nfrom slurmddp.commands.app import app\n"
        f"for words in {commands()!r}:\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):\n"
        "        app([*words, '-h'], prog_name='slurmddp')\n"
        "    print('\\0'.join(words), out.getvalue(), sep='\\1', end='\\2')\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path_factory.mktemp("help"), capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {
        tuple(words.split("\0")) if words else (): text
        for words, text in (entry.split("\1") for entry in shown.split("\2")[:-1])
    }


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_is_whole_at_80_columns(texts: dict[tuple[str, ...], str], words: tuple[str, ...]) -> None:
    text = texts[words]
    assert text.startswith("Usage: slurmddp"), text
    lines = text.splitlines()
    assert not [line for line in lines if len(line) > 80 or line.rstrip().endswith(("...", "…"))][1:], text
    assert "<str>" not in text and "<path>" not in text and "int range" not in text
    assert "-h, --help" in text
    described = [line for line in lines if line.startswith("  ")]
    assert described, text


def test_help_is_in_groups(texts: dict[tuple[str, ...], str]) -> None:
    for group in ("Jobs:", "Runs:", "Images:", "Sites and alerts:", "Options:"):
        assert f"\n{group}\n" in texts[()]
    assert "\nJob settings:\n" in texts["submit",]
    assert "Example: slurmddp submit" in texts["submit",]


def test_examples_are_commands_with_options_that_exist(desk: Desk, texts: dict[tuple[str, ...], str]) -> None:
    for words, text in texts.items():
        example = text.partition("Example: ")[2].split()
        assert len([word for word in example if word.startswith("--") and word != "--"]) <= 4
        for word in example[: example.index("--") if "--" in example else None]:
            assert not word.startswith("-") or f" {word}" in text.partition("Example: ")[0], (words, word)


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script for bash. Typer would ask which shell is our parent process, which in a test may be none."""
    desk = Desk(tmp_path_factory.mktemp("completion"))
    done = desk.command("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.code == 0, done.err
    return done.out


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("slurmddp stat", ["status"]),
        ("slurmddp site gen", ["generic"]),
        ("slurmddp site val", ["validate"]),
        ("slurmddp site show gen", ["generic"]),
        ("slurmddp site diff generic leon", ["leonardo"]),
        ("slurmddp submit --site lum", ["lumi"]),
        ("slurmddp status la", ["last"]),
        ("slurmddp submit --dry", ["--dry-run"]),
    ],
)
def test_bash_completes(desk: Desk, completion: str, line: str, wanted: list[str]) -> None:
    """With the script that --show-completion prints, in bash, as at the Tab key."""
    desk.program("slurmddp", f'#!/bin/bash\nexec {sys.executable} -m slurmddp "$@"\n')
    complete = f"{completion}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(line.split()) - 1}\n"
    complete += '_slurmddp_completion slurmddp\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run(
        ["bash", "-c", complete], env=desk.environment, cwd=desk.project, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == wanted, done.stderr + completion


def test_completion_leaves_file_names_to_the_shell(completion: str) -> None:
    assert "complete -o default" in completion


def test_the_tests_know_every_command() -> None:
    assert {("submit",), ("checkpoint", "export"), ("image", "inspect"), ("alert", "test"), ("site", "diff")} <= set(
        commands()
    )


@pytest.mark.parametrize("kind", [_Outline, _Unread])
def test_a_command_is_made_when_it_is_asked_for(
    kind: type[_Outline | _Unread], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str | None] = []
    make = kind.command
    monkeypatch.setattr(kind, "command", lambda outline: made.append(outline.name) or make(outline))
    for words in (["-h"], ["site", "-h"], ["site", "detect", "-h"], ["runs", "-h"]):
        with pytest.raises(SystemExit):
            app(words, prog_name="slurmddp")
    assert made == (["detect"] if kind is _Outline else ["site", "site", "runs"])


def test_help_imports_no_command() -> None:
    code = "import sys; from slurmddp.commands.app import app\n"
    code += (
        "try: app(['-h'])\nexcept SystemExit: print(*(name for name in sys.modules if name.startswith('slurmddp.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours = {name.split(".")[-1] for name in done.stdout.splitlines()[-1].split()}
    assert ours == {
        "app",
        "commands",
        "errors",
        "help",
        "listed",
        "options",
        "records",
        "styled",
        "terminal",
        "text",
        "visible",
    }


@pytest.mark.parametrize("listed", COMMANDS, ids=[listed.name for listed in COMMANDS])
def test_the_list_says_of_a_command_what_it_says_itself(listed: Listed) -> None:
    command = get_command(app).commands[listed.name]  # type: ignore[attr-defined]
    assert command.get_short_help_str(1000).removesuffix(".") == listed.summary
    assert bool(listed.example) != hasattr(command, "commands")
