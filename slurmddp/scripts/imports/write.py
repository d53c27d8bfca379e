"""The job file of an imported script, and whether it is complete."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from slurmddp.errors import UserError
from slurmddp.job.job import Resources
from slurmddp.job.resolve import Request
from slurmddp.job.sensitive import redacted
from slurmddp.launch.named_file import JOB_SUFFIXES, job_name
from slurmddp.launch.prepare import Prepared, prepare
from slurmddp.launch.schemas import schema_file
from slurmddp.records.redact import is_secret_name
from slurmddp.scripts.check.find import Finder
from slurmddp.scripts.check.fix import fix_script
from slurmddp.scripts.check.launches import Launch, base
from slurmddp.scripts.check.recorded import imagined, record, unset_names
from slurmddp.scripts.check.script import parse, read
from slurmddp.scripts.imports.imported import Imported, shown_variable
from slurmddp.scripts.imports.launch import carry_launch, main_launch, refuse_others
from slurmddp.scripts.imports.options import carry_options
from slurmddp.scripts.imports.proof import prove
from slurmddp.scripts.sandbox.evaluate import Evaluated, variables_of
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.draft.choose import Made, address, choose_site
from slurmddp.visible import one_line

#: What bash or sbatch cannot read is corrected first; how the script launches is read as it stands.
_UNREADABLE = {
    "crlf", "invisible-character", "no-shebang", "broken-continuation", "blank-in-assignment", "no-program",
    "sbatch-option", "sbatch-after-command", "sbatch-variable", "conda-activate",
}  # fmt: skip
_RESTARTS = re.compile(r"--auto-resume(=\d+)?")  # of srun on HyperPod
#: What changes nothing that the ranks see, or what the recorded launch shows.
_BUILTIN = re.compile(
    r"(echo|printf|exit|return|break|continue|wait|sleep|true|false|set|shift|read|let|test|trap|local|date|hostname|:)\b|"
    r"[\[(:]|(export |declare |readonly |typeset )?-?\w+\+?=|(export|declare|cd|pushd|popd|eval|nvidia-smi|cat|head)\b"
)
#: A condition, and what starts behind it; behind `&&` and `||`, what sets a variable.
_CONDITION = re.compile(r"\s*(?:(?:el)?if|case|while|until)\s+(?P<test>.*?)(;|\bthen\b|\bdo\b|\sin\b|$)(?P<body>.*)")
_SHORT = re.compile(r"\s*(?P<test>.*?)(&&|\|\|)\s*\{?\s*(?P<body>(export\s+)?[A-Za-z_]\w*\+?=.*)")
_TEST = re.compile(r"(!\s+)?(\[\[?|\(\(|test|:|true|false|let)(\s|\b|(?<=\())")
_ONLY_SAYS = re.compile(r"(echo|printf|exit|return)\b.*|#.*|\s*$")
_OF_RUN = re.compile(
    r"\$\((?!\()|`|[<>]\(|(?:^|[\s!(])-[abcdefghkprstuwxGLNOS]\s+(?=[\"'$\w./~])|\$\{?S?RANDOM|\$\{?(?:SECONDS|EPOCH\w+|E?UID|PPID)"
)
#: Text whose value bash alone knows, as the job runs.
_NEVER_KNOWN = re.compile(
    r"%\([^)]*\)T|\$\{?(?:PPID|BASHPID|SRANDOM)\b|\bexport\s+[\"']?(?:\$\(|`)|=\([^)\"']*[*?][^)]*\)|\bfor\s+\w+\s+in\s[^;]*[*?]|"
    r"(?:^|[\s;])(?:source|\.)\s+<\("
)
_ORDER = ("name", "site", "resources", "container", "environment", "environment_from", "setup", "network", "launch",
          "timeouts", "recovery", "train")  # fmt: skip
_RESOURCES = tuple(Resources.model_fields)
_ADDED = (
    "requeue (recovery.requeue)", "a stop before the time limit (timeouts.stop)",
    "restarts of ranks (launch.max_restarts)",
)  # fmt: skip
_LONGEST = 120  # characters of a line that is shown in a comment


class JobText(NamedTuple):
    """text: the job file; run_text: run.sh beside it, if it needs one; problems: why slurmddp would not submit it yet;
    valid: they are not the file's, but depend on the shell that submits it, or on you; lost: lines of the script
    without which another job would start."""

    text: str
    made: Made
    left: int
    lost: list[str]
    problems: list[str]
    valid: bool
    run_name: str = ""
    run_text: str = ""


def import_script(path: Path, site: str | None, shown: str) -> JobText:
    """Read a batch script and return its job file. shown: the name that the file will have. Raises UserError."""
    _refuse_others(path)
    catalogue = Catalogue(os.environ)
    made = choose_site(catalogue, os.environ, site)
    if made.guessed:  # not `local`, where sbatch is not in PATH: a batch script is for a cluster
        made = made._replace(site="generic")
    _, layer = catalogue.load(made.site)
    fixed = fix_script(read(path), only=_UNREADABLE)
    text = _RESTARTS.sub("", fixed.text)
    job = Imported(parse(text, path), fixed.origins, layer.tree, str(Path(shown).with_name("run.sh")))
    for line, had in enumerate(fixed.text.split("\n"), 1):
        if _RESTARTS.search(had):
            job.leave(line, "--auto-resume", "slurmddp restarts the ranks by itself", lost=False)
    defaults, runs = evaluated(job)
    refuse_others(job, runs)
    job.set("name", job_name(path))
    job.set("site", made.site)
    carry_options(job)
    launch = main_launch(job) if runs else None
    if launch:
        carry_launch(job, launch, runs)
        _leave_unseen(job, launch, runs)
    job.withhold()
    prepared, refused, missing = _judge(job, path, shown, defaults)
    if prepared and launch:
        prove(job, launch.line, runs, prepared)
    none = "no launch of torchrun, accelerate, deepspeed or python was found: set train.script"
    if runs and (last := next((each for each in reversed(runs[0].started) if each.name != "srun"), None)):
        unread = last.words[0] == str(runs[0].job.unknown)  # the text of a file that is not here
        words = job.script.lines[last.line - 1].split() if unread else [job.real(last.words[0])]
        text = " ".join(redacted(words, job.secrets))
        none += f". The last program that the script starts: {text} (line {_origin(job, last.line)})"
    problems = [*([] if launch else [none]), *refused, *missing]
    if not runs:
        job.leave(1, "the whole script", "not proven: bash could not evaluate it here (no user namespaces, or no end)")
    left = sorted(set(job.left))
    lost = [f"line {_origin(job, line)}: {one_line(text)} -> {one_line(why)}" for line, text, why, lost in left if lost]
    written, valid = _text(job, path, shown, defaults), not refused and launch is not None
    return JobText(written, made, len(left), lost, problems, valid, job.run_name, job.run_text)


def evaluated(job: Imported) -> tuple[list[str], tuple[Evaluated, ...]]:
    """(variables whose defaults count, what the script starts from this shell, in several jobs; nothing, if bash cannot
    evaluate it). A variable that only the shell may set is another one in one of the jobs: what follows from it is not
    known to a job file. One that the script has a default for, and this shell does not set, has its default."""
    script, environment, names = job.script, job.environment, unset_names(job.script.text)
    prepared = script.sourced or any(each.words[:1] in (["module"], ["ml"]) for each in script.commands)  # may set them
    here = {name: environment[name] for name in names & environment.keys() if shown_variable(name, prepared=prepared)}
    pattern = r"\$\{{{0}:?[-=]|-[znv]\s+[\"']?\$?\{{?{0}\b"  # a default, or a test of whether it is set
    unset = () if script.sourced else names - environment.keys()
    defaults = {name for name in unset if re.search(pattern.format(name), script.text)}
    folders = set(re.findall(r"\$\{?(\w+)\}?/", script.text))
    given = {
        name: f"{'/.' * (name in folders or shown_variable(name))}@{name}@" for name in names - here.keys() - defaults
    }
    runs = record(script, here, given) or ()
    if len(runs) < 2 or {each.role for each in imagined(script, here, given)} - {each.job.role for each in runs}:
        return [], ()
    vars(script)["found"] = Finder(script, runs).find()  # what it starts from this shell
    job.secrets |= {value for _, name, value in runs[0].assigned if is_secret_name(name) and value}
    return sorted(defaults), runs


def _leave_unseen(job: Imported, launch: Launch, runs: tuple[Evaluated, ...]) -> None:
    """Leave what the recording does not show: files that the batch shell writes, branches that nothing has taken, and
    branches that depend on what a program returns, which in the sandbox does nothing."""
    started = [(each.line, each.name) for each in runs[0].started if not each.step]
    written = [(each.line, base(each.words[0])) for each in job.script.commands if each.words]
    own = [(each.words, each.lines) for each in (launch.command, launch.step and launch.step.command) if each]
    for command in job.script.commands:
        words, text = command.words or [""], " ".join(command.words).replace("\n", " ")
        if (command.words, command.lines) in own or command.line > launch.line:
            continue
        if words[0] == "tee" or (words[0] == "sed" and re.search(r"\s(-[nErsz]*i|--in-place)", text)):
            job.leave(command.line, text, "writes a file on the first node only")
        elif words[0] == "trap":
            job.leave(command.line, text, "job.sh stops, saves and requeues the job itself", lost=False)
        elif command.output not in ("", "/dev/null", "/dev/stderr", "/dev/stdout") and words[0] != "exec":
            job.leave(command.line, f"{text} > {command.output}", "writes a file on the first node only")
        elif command.branch and "$" not in words[0] and not _BUILTIN.match(text):
            places = [(line, base(words[0])) for line in range(command.line, command.last + 1)]
            if sum(map(started.count, places)) < written.count(places[0]):
                job.leave(command.line, text, "in a branch that is not taken here")
    lines = [each.strip() for each in job.script.lines]
    for line, text in enumerate(lines[: max(launch.line, launch.command.last)], 1):
        if not text.startswith("#") and _NEVER_KNOWN.search(text):
            job.leave(line, text, "known only when the job runs")
        if line < launch.line and line not in job.script.here_lines:
            match = _CONDITION.match(text)
            if match and _only_prints("\n".join([match["body"], *lines[line:]])):
                continue
            if (match := match or _SHORT.match(text)) and (what := _unknown(job, runs, line, match["test"])):
                job.leave(line, text, f"a branch that depends on {what}")


def _only_prints(behind: str) -> bool:
    """Return whether the commands of a branch only print something, or end the script. behind: its condition."""
    body = re.split(r"(?:^|[\n;])\s*(?:fi|esac|done)\b", behind)[0]
    return all(map(_ONLY_SAYS.match, re.split(r"[\n;]\s*(?:then\b|else\b|do\b)?\s*", f";{body}")))


def _unknown(job: Imported, runs: tuple[Evaluated, ...], line: int, test: str) -> str:
    """Return what is known only when the job runs, of what a condition depends on; empty, if there is nothing."""
    program = not job.script.lines[line - 1].lstrip().startswith("case") and not _TEST.match(test)
    if program:
        return f"what {test.split()[0] if test.split() else 'a program'} returns"
    if found := _OF_RUN.search(test):
        return "files" if found[0].strip()[:1] == "-" else "what a program prints"
    given = [variables_of(each.job) for each in runs if not each.job.role]
    inside = re.search(r"\(\((.*)", test)
    for name in re.findall(r"\$\{?#?([A-Za-z_]\w*)", test) + re.findall(r"[A-Za-z_]\w*", inside[1] if inside else ""):
        values = [value for (at, each), value in job.script.found.assigned.items() if each == name and at < line]
        there = {each.get(name) for each in given}
        only_set = re.search(rf"-[nz]\s+\"?\$\{{?{name}\b", test) and None not in there
        slurm = name.startswith(("SLURM", "CUDA", "HOSTNAME")) and name not in job.script.slurm and not values
        if any("\0" in value for value in values) or (slurm and not only_set and (None in there or len(there) > 1)):
            return f"${name}"
    return ""


def _refuse_others(path: Path) -> None:
    name = one_line(str(path))
    if path.suffix in JOB_SUFFIXES:
        raise UserError("is a job file, not a batch script", where=name, todo=f"slurmddp check {name}")
    if path.suffix == ".py":
        todo = f"slurmddp init job.yaml --script {name}"
        raise UserError("is a Python script, not a batch script", where=name, todo=todo)


def _text(job: Imported, path: Path, shown: str, defaults: list[str]) -> str:
    import yaml

    tree: dict[str, Any] = {name: {} for name in _ORDER}
    for key, value in job.keys.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = value
    lines = [
        f"# Made by `slurmddp import {one_line(str(path))}`. Preview it:  slurmddp submit {shown} --dry-run",
        f"# yaml-language-server: $schema={address(schema_file('job'))}",
        f"# What slurmddp adds to the script: {', '.join(_ADDED[job.keys.get(('recovery', 'requeue')) == 'never' :])}.",
        *([f"# Not set in this shell, so their defaults count: {', '.join(defaults)}."] if defaults else []),
        *_comments(job),
        "",
    ]
    tree["resources"] = {name: tree["resources"][name] for name in _RESOURCES if name in tree["resources"]}
    body = {name: value for name, value in tree.items() if value not in ({}, [])}
    return "\n".join(lines) + yaml.safe_dump(body, sort_keys=False, width=10**6, allow_unicode=True)


def _comments(job: Imported) -> list[str]:
    """Return what is not carried over, each with line and text."""
    lines = []
    for line, text, why, _ in sorted(job.left):
        cut = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
        lines.append(f"#   line {_origin(job, line)}: {one_line(cut)}  ->  {one_line(why)}")
    return ["#", "# Not imported:", *dict.fromkeys(lines)] if lines else []


def _origin(job: Imported, line: int) -> int:
    return job.origins[min(max(line, 1), len(job.origins)) - 1]


def _judge(job: Imported, path: Path, shown: str, defaults: list[str]) -> tuple[Prepared | None, list[str], list[str]]:
    """(the job as it would be submitted, why the job file is not valid, what else `submit` would miss)."""
    prepared, refused, missing = None, list[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "job.yaml"
        written.write_text(_text(job, path, shown, defaults), encoding="utf-8")
        for strict in (False, True):
            try:
                prepared = prepare(Request(str(written)), strict=strict)
            except UserError as error:
                told = [str(part).replace(str(written), shown) for part in error.parts]
                refused, missing = (refused, told) if strict else (told, missing)
        if refused:  # perhaps for want of GPUs, which are not the launch's
            gpus = ("resources.gpus_per_node", job.keys.get(("resources", "ranks_per_node"), 1), "")
            with contextlib.suppress(UserError):
                prepared = prepare(Request(str(written), options=[gpus]), strict=False)
    here = not job.run_text  # run.sh is written with the job file
    return prepared, refused, [each for each in missing if not refused and (here or job.run_name not in each)]
