"""What bash does not see, or not as it is meant: characters, lines, words, and what stands behind a launch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Iterator

from slurmddp.scripts.check.directives import SHORT
from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.recorded import unset_names
from slurmddp.scripts.check.rules.common import PLACEHOLDER
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.shell import Command
from slurmddp.scripts.sandbox.evaluate import SRUN_FLAGS

#: What a keyboard types for a character that looks like it, or like nothing.
TYPED = {
    **dict.fromkeys("\u00a0\u202f\u3000\u2028", " "), **dict.fromkeys("\ufeff\u200b\u200c\u200d\u2060\u00ad", ""),
    "“": '"', "”": '"', "‘": "'", "’": "'", "–": "--", "—": "--", "−": "-",  # noqa: RUF001
}  # fmt: skip
SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|glpat-[\w-]{20,}|sk-[\w-]{32,}|AKIA[A-Z0-9]{16}"
    r"|xox[bpars]-[\w-]{20,})|(?:WANDB_API_KEY=|wandb login\s(?:\s*--?[a-z-]+(?:=\S+)?\s|\s*https?://\S+\s)*\s*)['\"]?(?:local-)?([0-9a-f]{40,})\b"
    r"|\b\w*(?:API_?KEY|TOKEN|SECRET|PASSWORD)=['\"]?(?=\w*\d)(?=\w*[A-Za-z])([\w+/.-]{20,})\b",
)
_RANDOM_PORT = re.compile(
    r"(?:\b\w*PORT=|--(?:master|main[_-]process)[_-]port[= ])[\"']?\$\{?RANDOM\}?[\"']?(?=\s|$)", re.IGNORECASE
)


@rule
def no_shebang(script: Script) -> Iterator[Hit]:
    if not script.lines[0].lstrip("\ufeff").startswith("#!"):
        yield Hit("the first line is not a #! line", 1)


@rule
def crlf(script: Script) -> Iterator[Hit]:
    if line := next((at for at, text in enumerate(script.lines, 1) if text.endswith("\r")), 0):
        yield Hit("the lines end with CR LF", line)


@rule
def invisible_character(script: Script) -> Iterator[Hit]:
    code = {line for command in script.commands for line in command.lines}
    for line, text in enumerate(script.lines, 1):
        directive = re.match(r"#SBATCH\s", text) is not None
        comment = text.lstrip().startswith("#") and not directive
        read = re.sub(r"\s#.*", "", text) if not comment else text[:1] if line == 1 else ""
        bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", read)
        printed = read.lstrip().startswith(("echo", "printf"))
        for mark in TYPED.keys() & set(read):
            invisible, in_code = not TYPED[mark].strip(), directive or (line in code and not printed)
            if invisible:
                message = f"{unicodedata.name(mark).lower()} (U+{ord(mark):04X})"
                sure = directive or line == 1 or (mark in bare and in_code)
            else:
                message = f"{mark} (U+{ord(mark):04X}) where {TYPED[mark]} is meant"
                sure = re.search(rf"[\s=]{mark}\S", bare) is not None and in_code
            if invisible or (mark in bare and not printed):
                yield Hit(message, line, None if sure else "warning")


@rule
def broken_continuation(script: Script) -> Iterator[Hit]:
    skipped, lines = script.here_lines, [each.strip() for each in script.lines] + [""]
    for at, text in enumerate(script.lines, 1):  # so lines[at] is the one below
        text = text.rstrip("\r")
        if at in skipped or text.lstrip().startswith("#"):
            continue
        if re.search(r"[^\\]\\[ \t]+(#.*)?$", text) and not re.search(r"\s#.*\\[ \t]+", text):
            sure = lines[at].startswith("-")
            yield Hit("blanks or a comment follow the backslash", at, None if sure else "warning")
        elif text.endswith("\\") and lines[at][:1] in ("", "#"):
            following = next((each for each in lines[at : at + 49] if each and not each.startswith("#")), "")
            if following.startswith("-"):
                kind = "a comment" if lines[at] else "an empty line"
                yield Hit(f"{kind} ends the command, so {following.split()[0]} is lost", at + 1)
    for each in (one for command in script.commands for one in [command, *script.inside(command)]):
        word = each.words[0] if each.words and each.line not in skipped else ""
        if re.match(r"--[a-z][\w-]*(=|$)", word) and lines[each.line - 2][:1] not in ("", "#"):
            yield Hit(f"no backslash ends the line above, so {word} is run as a program", each.line)


@rule
def syntax(script: Script) -> Iterator[Hit]:
    bash = shutil.which("bash")
    if bash is None or not script.is_shell or re.search(r"[kz]sh", script.lines[0]) or "\r" in script.text:
        return
    environment = {"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"}
    try:
        done = subprocess.run(
            [bash, "--norc", "--noprofile", "-n", "/dev/stdin"],
            input=script.text.encode(errors="replace"), capture_output=True, timeout=5, env=environment, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return
    if done.returncode == 0:
        return
    match = re.search(r"line (\d+): (.*)", done.stderr.decode(errors="replace"))
    line, message = (int(match[1]), match[2]) if match else (1, "bash cannot read the script")
    near = [*script.lines[line - 1 : line + 1], *script.lines[max(line - 2, 0) : line - 1]]
    left = PLACEHOLDER.search("\n".join(near))  # which bash cannot read
    if left:
        message = f"{left[0]} is to be filled in: {message}"
    yield Hit(message, min(line, len(script.lines)), "warning" if left else None)


@rule
def secret(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if SECRET.search(text) and not re.search(r"x{6}|your|example|placeholder|<", text, re.IGNORECASE):
            yield Hit("a token or password is written in the script", line)


@rule
def random_port(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if not text.lstrip().startswith("#") and _RANDOM_PORT.search(text):
            yield Hit("$RANDOM is a number from 0 to 32767: below 1024, no user may open the port", line)


@rule
def blank_in_assignment(script: Script) -> Iterator[Hit]:
    for command in script.commands:
        first, second, third, *_ = [*command.words, "", "", ""]
        if re.fullmatch(r"[A-Z][A-Z0-9_]+", first) and second.startswith("="):
            yield Hit(f"{first} is run as a command", command.line)
        elif first == "export" and third.startswith("="):
            yield Hit(f"{second} is not assigned", command.line)


@rule
def conda_activate(script: Script) -> Iterator[Hit]:
    if re.search(r"\s-\S*l", script.lines[0]) or script.option("get-user-env") is not None:
        return
    for command in script.commands:
        words = command.words or [""]
        if words[0] in ("source", ".", "module", "ml", "eval") or "hook" in words:
            return
        if words[0] in ("conda", "mamba", "micromamba") and words[1:2] == ["activate"]:
            yield Hit(f"{words[0]} activate without its shell functions", command.line)
            return


@rule
def empty_option(script: Script) -> Iterator[Hit]:
    unset = set() if script.sourced else unset_names(script.text)
    for command in (each for each in script.commands if each.words[:1] == ["srun"]):
        for option, value in zip(command.words, command.words[1:], strict=False):
            name = SHORT.get(option[1:], "") if len(option) == 2 else option.removeprefix("--")
            empty = re.fullmatch(r"\$\{?(\w+)\}?", value)
            takes_value = option[:1] == "-" and "=" not in option and name and name not in SRUN_FLAGS
            if takes_value and empty and empty[1] in unset:
                yield Hit(f"where {empty[1]} is not set, srun takes the next word as {option}", command.line)


def _last_in_background(commands: list[Command]) -> tuple[Command, list[Command]] | None:
    """(the last command with an & behind it, those below it), if that is a srun."""
    last = next((at for at in reversed(range(len(commands))) if commands[at].background), None)
    return (commands[last], commands[last + 1 :]) if last is not None and commands[last].words[:1] == ["srun"] else None


@rule
def wait_missing(script: Script) -> Iterator[Hit]:
    if found := _last_in_background(script.commands):
        srun, behind = found
        after = " ".join(word for each in behind for word in each.words)
        waits = any(each.words[:1] == ["wait"] for each in script.commands)
        if not waits and not re.search(r"\b(wait|srun|sleep|tail|kill)\b", after):
            yield Hit("srun runs in the background, and no wait follows", srun.line)


@rule
def exit_code_lost(script: Script) -> Iterator[Hit]:
    found = _last_in_background([each for each in script.commands if not each.function and each.words])
    if found and any(each.step and each.step.command.background for each in script.found.launches):
        behind = [each.words for each in found[1]]
        if behind[-1:] == [["wait"]] and not any(words[0] in ("exit", "trap") for words in behind):
            yield Hit("wait without a process id returns 0, also if srun failed", found[1][-1].line)


@rule
def signal_to_steps(script: Script) -> Iterator[Hit]:
    signal = script.option("signal")
    if not signal or signal.upper().startswith(("B:", "RB:", "BR:")):
        return
    name = signal.partition("@")[0].upper().removeprefix("R:").removeprefix("SIG")
    for command in script.commands:
        if command.words[:1] == ["trap"] and any(name in word.upper() for word in command.words[1:]):
            yield Hit(f"--signal={signal} does not reach this trap", command.line)
