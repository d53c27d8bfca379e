"""`slurmddp check` of batch scripts that slurmddp did not write, and their correction."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.terminal import write_exactly, write_new
from slurmddp.errors import UserError
from slurmddp.job.plan.model import BASH_SUFFIX
from slurmddp.job.resolve import Request
from slurmddp.launch.named_file import BATCH_SUFFIXES, batch_line
from slurmddp.scripts.check.finding import Finding, check_script
from slurmddp.scripts.check.fix import Fixed
from slurmddp.scripts.check.fix import fix_script as fix
from slurmddp.scripts.check.recorded import record
from slurmddp.scripts.check.rule import SEVERITIES
from slurmddp.scripts.check.script import Script, read
from slurmddp.scripts.sandbox.evaluate import available
from slurmddp.styled import labelled, styled
from slurmddp.visible import one_line


def fix_lines(script: Script, fixed: Fixed) -> Iterator[str]:
    """Yield each correction as `FILE:LINE: fixed: message [rule]`, then what is left. Lines are those of the file."""
    path = one_line(str(script.path))
    for each in fixed.done:
        yield f"{path}:{each.line}: " + styled("fixed:", "good") + f" {one_line(each.message)} [{each.rule.id}]"
    yield from _explained(fixed.left)
    for choice in fixed.choices:
        many = f"{len(choice.corrections)} corrections are possible, none is made [{choice.finding.rule.id}]"
        yield f"{path}:{choice.finding.line}: {many}"
        for number, lines in enumerate(choice.corrections, 1):
            yield from (f"    {number}. line {line}: {one_line(text)}" for line, text in lines)
    left = total(Counter(each.severity for each in fixed.left)) if fixed.left else "none"
    yield f"{len(fixed.done)} fixed, not fixed: {left}"
    if fixed.doubt:
        yield f"{path}: no {'other line' if fixed.done else 'line'} was corrected: {fixed.doubt}."
    if fixed.stopped:
        yield f"{path}: not every fix was tried: too many findings. Correct some by hand, then run it again."


def _explained(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield each finding as `FILE:LINE: severity: message [rule]`. Each rule is explained once."""
    explained: set[str] = set()
    for each in findings:
        yield f"{one_line(each.path)}:{each.line}: " + labelled(
            each.severity, f"{one_line(each.message)} [{each.rule.id}]"
        )
        if each.rule.id not in explained:
            explained.add(each.rule.id)
            yield f"    why: {each.rule.reason}"
            yield f"    fix: {each.rule.fix}"
            yield f"    see: {each.rule.source}"


def total(counts: Mapping[Any, int]) -> str:
    """Return the counts by severity: `2 errors, 1 note`."""
    return (
        ", ".join(f"{counts[name]} {name}{'s' * (counts[name] != 1)}" for name in SEVERITIES if counts[name])
        or "nothing found"
    )


def as_dict(scripts: Sequence[Script], findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings for --json; docs/check.md lists the keys."""
    counts = Counter(each.severity for each in findings)
    return {
        "schema": 1,
        "files": [str(each.path) for each in scripts],
        "counts": {name: counts[name] for name in SEVERITIES},
        "findings": [each.as_dict() for each in findings],
    }


def is_batch_script(name: object) -> bool:
    """Return whether this names a batch script, and not a job file or a training script."""
    if not isinstance(name, str):
        return False
    return name.endswith(BATCH_SUFFIXES) or (name.endswith(BASH_SUFFIX) and batch_line(Path(name)) is not None)


def _names(request: Request) -> list[str]:
    if request.options:
        todo = "remove it: a batch script has its own options"
        raise UserError(f"{request.options[0][2]} needs a job file", todo=todo)
    names = [*([str(request.job)] if request.job else []), *request.args]
    if not names:
        raise UserError("no batch script given", todo="slurmddp check train.sbatch")
    return names


def fix_script(request: Request, output: Path | None, *, force: bool, as_json: bool) -> set[str]:
    """Print or write the corrected script. Return the severities of what is left. Raises UserError."""
    names = _names(request)
    if len(names) > 1:
        raise UserError(f"--fix takes one script, not {len(names)}", todo="run it once per script")
    script = read(Path(names[0]), errors="surrogateescape")
    fixed = fix(script)
    if output:
        write_new(output, fixed.text, force=force, todo="choose another name, or add --force")
    if as_json:
        done = {"fixed": [each.as_dict() for each in fixed.done], "stopped": fixed.stopped, "doubt": fixed.doubt}
        done["choices"] = [each.as_dict() for each in fixed.choices]
        typer.echo(opt.json_text(as_dict([script], fixed.left) | done | {"script": fixed.text}))
    else:
        for line in fix_lines(script, fixed):
            opt.say(line)
        if not output:
            write_exactly(fixed.text.encode("utf-8", errors="surrogateescape"))
    return {each.severity for each in fixed.left}


def check_scripts(request: Request, *, as_json: bool) -> set[str]:
    """Print what is wrong with the scripts. Return the severities. Raises UserError."""
    scripts = [read(Path(name)) for name in _names(request)]
    findings = [finding for each in scripts for finding in check_script(each)]
    if not available():
        opt.say("note    no sandbox could be made here (user namespaces?): only the text of the script was read")
    else:
        for each in scripts:
            if each.is_shell and record(each) is None:
                name = one_line(each.path.name)
                opt.say(f"note    bash could not evaluate {name} to its end: only its text was read")
    checked = f"{len(scripts)} script{'s' * (len(scripts) != 1)} checked"
    counts = total(Counter(each.severity for each in findings))
    opt.show(as_json, as_dict(scripts, findings), [*_explained(findings), f"{checked}: {counts}"])
    return {each.severity for each in findings}
