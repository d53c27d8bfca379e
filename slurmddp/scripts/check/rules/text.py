"""What the file consists of: first line, characters, continuations, syntax."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator

from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.rules.common import PLACEHOLDER
from slurmddp.scripts.check.script import Script

_INVISIBLE = {
    "\ufeff": "byte order mark", "\u00a0": "no-break space", "\u200b": "zero-width space",
    "\u200c": "zero-width joiner", "\u200d": "zero-width joiner", "\u2060": "word joiner",
    "\u202f": "narrow no-break space", "\u3000": "wide space", "\u2028": "line separator", "\u00ad": "soft hyphen",
}  # fmt: skip
_TYPOGRAPHIC = {"“": '"', "”": '"', "‘": "'", "’": "'", "–": "--", "—": "--", "−": "-"}  # noqa: RUF001
SECRET = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|glpat-[\w-]{20,}|sk-[\w-]{32,}|AKIA[A-Z0-9]{16}"
    r"|xox[bpars]-[\w-]{20,})|(?:WANDB_API_KEY=|wandb login\s(?:\s*--?[a-z-]+(?:=\S+)?\s|\s*https?://\S+\s)*\s*)['\"]?(?:local-)?([0-9a-f]{40,})\b"
    r"|\b\w*(?:API_?KEY|TOKEN|SECRET|PASSWORD)=['\"]?(?=\w*\d)(?=\w*[A-Za-z])([\w+/.-]{20,})\b",
)


@rule
def no_shebang(script: Script) -> Iterator[Hit]:
    if not script.lines[0].lstrip("\ufeff").startswith("#!"):
        yield Hit(1, "the first line is not a #! line")


@rule
def crlf(script: Script) -> Iterator[Hit]:
    line = next((at for at, text in enumerate(script.lines, 1) if text.endswith("\r")), 0)
    if line:
        yield Hit(line, "the lines end with CR LF")


@rule
def invisible_character(script: Script) -> Iterator[Hit]:
    code = {line for command in script.commands for line in command.lines}
    directives = {at for at, text in enumerate(script.lines, 1) if re.match(r"#SBATCH\s", text)}
    for line, text in enumerate(script.lines, 1):
        if text.isascii():
            continue
        comment = text.lstrip().startswith("#") and line not in directives
        read = re.sub(r"\s#.*", "", text) if not comment else text[:1] if line == 1 else ""
        bare = re.sub(r"\"[^\"]*\"|'[^']*'", "", read)
        printed = read.lstrip().startswith(("echo", "printf"))
        for mark, name in _INVISIBLE.items():
            if mark in read:
                certain = (mark in bare and not printed and line in code) or line in directives or line == 1
                yield Hit(line, f"{name} (U+{ord(mark):04X})", None if certain else "warning")
        for mark, meant in _TYPOGRAPHIC.items():
            if mark in bare and not printed:
                certain = re.search(rf"[\s=]{mark}\S", bare) is not None and line in code | directives
                message = f"{mark} (U+{ord(mark):04X}) where {meant} is meant"
                yield Hit(line, message, None if certain else "warning")


@rule
def broken_continuation(script: Script) -> Iterator[Hit]:
    skipped, lines = script.here_lines, [each.strip() for each in script.lines]
    for at, text in enumerate(script.lines):
        text = text.rstrip("\r")
        if at + 1 in skipped or text.lstrip().startswith("#"):
            continue
        if re.search(r"[^\\]\\[ \t]+(#.*)?$", text) and not re.search(r"\s#.*\\[ \t]+", text):
            option = lines[at + 1 : at + 2] != [] and lines[at + 1].startswith("-")
            yield Hit(at + 1, "blanks or a comment follow the backslash", None if option else "warning")
        elif text.endswith("\\") and len(lines) > at + 1 and lines[at + 1][:1] in ("", "#"):
            following = next((each for each in lines[at + 1 : at + 50] if each and not each.startswith("#")), "")
            if following.startswith("-"):
                kind = "a comment" if lines[at + 1] else "an empty line"
                yield Hit(at + 2, f"{kind} ends the command, so {following.split()[0]} is lost")


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
    near = "\n".join(script.lines[max(line - 2, 0) : line + 1])
    if not PLACEHOLDER.search(near):  # a template: the placeholder is what bash cannot read
        yield Hit(min(line, len(script.lines)), message)


@rule
def secret(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if SECRET.search(text) and not re.search(r"x{6}|your|example|placeholder|<", text, re.IGNORECASE):
            yield Hit(line, "a token or password is written in the script")
