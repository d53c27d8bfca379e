"""Characters, continuations, #SBATCH lines, options of srun, and what stands around a launch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import replace

from slurmddp.scripts.check.directives import OPTIONS, REMOVED, full
from slurmddp.scripts.check.finding import Finding
from slurmddp.scripts.check.fix import Draft, fixes
from slurmddp.scripts.check.fixes.places import below_directives, launch_fixes
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.text import TYPED
from slurmddp.scripts.check.shell import word_end

_TYPED = {ord(mark): typed for mark, typed in TYPED.items()}
#: Patterns of sbatch for what variables would hold.
_PATTERNS = {"SLURM_JOB_ID": "%j", "SLURM_JOBID": "%j", "SLURM_JOB_NAME": "%x", "SLURM_ARRAY_JOB_ID": "%A",
             "SLURM_ARRAY_TASK_ID": "%a", "USER": "%u"}  # fmt: skip

#: What is meant by other forms of an option.
_MEANT = (
    (r"(\s-[NnctpA])=", r"\1 "),
    (r"(--[\w-]+)(\s+=\s*|=\s+)(?=\S)", r"\1="),
    (r"(--mem[\w-]*[= ]\d+)\s+([KMGTkmgt][Bb]?\b)", r"\1\2"),
    (r"(--time[= ]|-t ?)(\d+)(?:h|hours?|hrs?)\b", r"\1\2:00:00"),
    (r"(--time[= ]|-t ?)(\d+)(?:d|days?)\b", r"\1\2-00:00:00"),
    (r"(--time[= ]|-t ?)(\d+)(?:m|mins?|minutes?)\b", r"\1\2"),
)


@fixes("crlf", changes=None)
def crlf(draft: Draft, finding: Finding) -> Iterator[Draft]:
    yield replace(draft, lines=tuple(each.removesuffix("\r") for each in draft.lines))


@fixes("invisible-character", changes=None)
def invisible_character(draft: Draft, finding: Finding) -> Iterator[Draft]:
    for each in draft.in_text:
        if each.rule.id == "invisible-character" and each.severity == "error":
            draft = draft.put(each.line, _typed(draft.line(each.line)))
    yield draft


def _typed(text: str) -> str:
    """The line as a keyboard types it; what stands in straight quotes, or in a comment, stays."""
    directive = text.startswith("#SBATCH")
    end = re.search(r"\s#", text[8:] if directive else text)
    at = (end.start() + 8 * directive) if end else len(text)
    if text[:1] == "\ufeff":
        return text[1:]
    parts = [text[:at]] if directive else re.split(r"(\"[^\"]*\"|'[^']*')", text[:at])
    for index in range(0, len(parts), 2):
        single = re.sub(r"[\u2013\u2014\u2212](?=[A-Za-z]?(?:[\s=\d]|$))", "-", parts[index])
        parts[index] = single.translate(_TYPED)
    return "".join(parts) + text[at:]


@fixes("no-shebang", changes=None)
def no_shebang(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if any(each.rule.id == "syntax" for each in draft.in_text):
        return  # it may be no shell script
    first = next((at for at, text in enumerate(draft.lines, 1) if text.strip()), 1)
    written = draft.line(first).lstrip("\ufeff \t")
    yield draft.remove(first).insert(1, written) if written.startswith("#!") else draft.insert(1, "#!/bin/bash")


@fixes("broken-continuation", changes=None)
def broken_continuation(draft: Draft, finding: Finding) -> Iterator[Draft]:
    at, text = finding.line, draft.line(finding.line)
    if finding.severity != "error":
        return
    if tail := re.search(r"\\([ \t]+)(#.*)?$", text):
        yield _above(draft.put(at, text[: tail.start() + 1]), at, [tail[2]] if tail[2] else [])
        return
    yield _joined(draft, at)


@fixes("no-program", changes=None)
def no_program(draft: Draft, finding: Finding) -> Iterator[Draft]:
    end = finding.line
    while draft.line(end).endswith("\\") and draft.line(end + 1).strip()[:1] not in ("", "#"):
        end += 1
    if draft.line(end).endswith("\\"):
        yield _joined(draft, end + 1)
    elif re.match(r"\s*(-m\s|[\w./$-]+\.py\b)", draft.line(end + 1)):
        yield draft.put(end, draft.line(end).rstrip() + " \\")


def _joined(draft: Draft, at: int) -> Draft:
    """Remove empty lines and comments that begin at a line and end a command."""
    comments = []
    while draft.line(at).strip()[:1] in ("", "#") and at < len(draft.lines):
        comments += [draft.line(at).strip()] if draft.line(at).strip() else []
        draft = draft.remove(at)
    return _above(draft, at - 1, comments)


def _above(draft: Draft, at: int, comments: list[str]) -> Draft:
    """Put comments above the command that a line belongs to."""
    while draft.line(at - 1).endswith("\\"):
        at -= 1
    indent = re.match(r"\s*", draft.line(at))
    return draft.insert(at, *((indent[0] if indent else "") + each for each in comments))


@fixes("blank-in-assignment", changes=None)
def blank_in_assignment(draft: Draft, finding: Finding) -> Iterator[Draft]:
    text = draft.line(finding.line)
    match = re.match(r"(\s*(?:export\s+)?[A-Za-z_]\w*)\s+=\s*(\S.*)", text, re.DOTALL)
    if match and re.fullmatch(r"\s*(#.*)?", match[2][word_end(match[2], 0) :]):
        yield draft.put(finding.line, f"{match[1]}={match[2]}")


@fixes("sbatch-after-command", changes=None)
def sbatch_after_command(draft: Draft, finding: Finding) -> Iterator[Draft]:
    late, at = draft.script.late, below_directives(draft)
    moved = [draft.line(line) for line in late]
    for line in reversed(late):
        draft = draft.remove(line)
    yield draft.insert(at, *moved)


@fixes("sbatch-option", changes=None)
def sbatch_option(draft: Draft, finding: Finding) -> Iterator[Draft]:
    at = finding.line
    for pattern, new in _MEANT:
        yield draft.sub(at, pattern, new)
    for old, new in REMOVED.items():
        yield draft.sub(at, rf"--{old}(?=[=\s]|$)", f"--{new}")
    if named := re.search(r"--([\w-]+) is not an option of sbatch; did you mean --([\w-]+)\?", finding.message):
        close = difflib.get_close_matches(named[1], sorted(OPTIONS), 4, 0.85)
        if {full(each, OPTIONS) for each in close} == {full(named[2], OPTIONS)}:  # nothing else is as near
            yield draft.swap(at, f"--{named[1]}", f"--{named[2]}")


@fixes("sbatch-disabled", changes=None)
def sbatch_disabled(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if finding.message.startswith("not #SBATCH"):  # a misspelling; what is commented out may be meant so
        yield draft.sub(finding.line, r"^#\w+", "#SBATCH")


@fixes("sbatch-variable", changes=None)
def sbatch_variable(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if re.match(r"--(output|error|input)=", finding.message):
        text = draft.line(finding.line)
        for name, pattern in _PATTERNS.items():
            text = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", pattern, text)
        yield draft.put(finding.line, text)


@fixes("ntasks-wins", changes="tasks")
def ntasks_wins(draft: Draft, finding: Finding) -> Iterator[Draft]:
    text = draft.line(finding.line)
    rest = re.sub(r"\s+(?:--ntasks[= ]|-n ?)\d+(?!\S)", "", text, count=1)
    if finding.severity == "error":
        yield draft.remove(finding.line) if rest.split("#")[1].strip() == "SBATCH" else draft.put(finding.line, rest)


@fixes("log-folder", changes=None)
def log_folder(draft: Draft, finding: Finding) -> Iterator[Draft]:
    """Move the job's number from the folder into the name of the file. No script can make the folder in time."""
    folder = (draft.script.option("output") or "").rpartition("/")[0]
    if re.search(r"%[jAJ]", folder):
        for each in draft.script.directives:
            if each.name in ("output", "error") and each.value.startswith(f"{folder}/"):
                before, _, numbered = folder.rpartition("/")
                if not re.search(r"%[jAJ]", before):
                    name = f"{before}/" * bool(before) + f"{numbered}-{each.value.rpartition('/')[2]}"
                    draft = draft.swap(each.line, each.value, name)
        yield draft


@launch_fixes("export-without-all", changes=r"\w+")
def export_without_all(draft: Draft, finding: Finding, launch: Launch) -> Iterator[Draft]:
    for line in range(finding.line, max([*launch.command.lines, finding.line]) + 1):
        yield draft.swap(line, "--export=", "--export=ALL,")


@fixes("wait-missing")
def wait_missing(draft: Draft, finding: Finding) -> Iterator[Draft]:
    end = len(draft.lines)
    while end > 1 and not draft.line(end).strip():
        end -= 1
    at = end if re.match(r"exit\b", draft.line(end)) else end + 1
    yield draft.insert(at, "wait")


@fixes("signal-to-steps")
def signal_to_steps(draft: Draft, finding: Finding) -> Iterator[Draft]:
    steps = [each.step for each in draft.script.found.launches if each.step]
    if any(each.command.background for each in steps):  # or the trap is too late
        yield draft.sub(draft.script.line_of("signal"), r"(--signal[= ]['\"]?)(R?:?)", r"\1B:")


@fixes("conda-activate", changes=None)
def conda_activate(draft: Draft, finding: Finding) -> Iterator[Draft]:
    text = draft.line(finding.line)
    indent = text[: len(text) - len(text.lstrip())]
    if text.lstrip().startswith("conda activate"):
        yield draft.insert(finding.line, f'{indent}source "$(conda info --base)/etc/profile.d/conda.sh"')


@fixes("loopback-interface", changes=r"\w+_SOCKET_IFNAME")
def loopback_interface(draft: Draft, finding: Finding) -> Iterator[Draft]:
    if re.fullmatch(r"\s*(export\s+)?\w+_SOCKET_IFNAME==?['\"]?lo['\"]?\s*(#.*)?", draft.line(finding.line)):
        yield draft.remove(finding.line)
