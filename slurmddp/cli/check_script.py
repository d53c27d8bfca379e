"""check --script, --fix: what is wrong with batch scripts that slurmddp did not write."""

from pathlib import Path

import typer

from slurmddp.cli import options as opt
from slurmddp.errors import UserError


def is_batch_script(name: str | None) -> bool:
    """Return whether this names a batch script, and not a job file or a training script."""
    from slurmddp.launch.named_file import BATCH_SUFFIXES, batch_line
    from slurmddp.plan.model import BASH_SUFFIX

    if name is None:
        return False
    return name.endswith(BATCH_SUFFIXES) or (name.endswith(BASH_SUFFIX) and batch_line(Path(name)) is not None)


def _names(asked: opt.Asked) -> list[str]:
    if asked.options:
        raise UserError(f"{asked.options[0][2]} needs a job file", todo="remove it: a batch script has its own options")
    names = [*([asked.job] if asked.job else []), *asked.args]
    if not names:
        raise UserError("no batch script given", todo="slurmddp check train.sbatch")
    return names


def fix_script(asked: opt.Asked, output: Path | None, *, force: bool, as_json: bool) -> set[str]:
    """Print or write the corrected script. Return the severities of what is left. Raises UserError."""
    from slurmddp.cli.terminal import write_exactly
    from slurmddp.launch.new_file import write_new
    from slurmddp.report.check import as_dict, fix_lines
    from slurmddp.scripts.check.fix import fix_script as fix
    from slurmddp.scripts.check.script import read

    names = _names(asked)
    if len(names) > 1:
        raise UserError(f"--fix takes one script, not {len(names)}", todo="run it once per script")
    script = read(Path(names[0]), errors="surrogateescape")
    fixed = fix(script)
    if output:
        write_new(output, fixed.text, force=force, todo="choose another name, or add --force")
    if as_json:
        told = as_dict([script], fixed.left)
        done = {"fixed": [each.as_dict() for each in fixed.done], "stopped": fixed.stopped, "doubt": fixed.doubt}
        typer.echo(opt.json_text(told | done | {"script": fixed.text}))
    else:
        for line in fix_lines(script, fixed):
            opt.say(line)
        if not output:
            write_exactly(fixed.text.encode("utf-8", errors="surrogateescape"))
    return {each.severity for each in fixed.left}


def check_scripts(asked: opt.Asked, *, as_json: bool) -> set[str]:
    """Print what is wrong with the scripts. Return the severities. Raises UserError."""
    from slurmddp.report.check import as_dict, lines
    from slurmddp.scripts.check.finding import check_script
    from slurmddp.scripts.check.recorded import record
    from slurmddp.scripts.check.script import read
    from slurmddp.scripts.sandbox.evaluate import available
    from slurmddp.visible import one_line

    scripts = [read(Path(name)) for name in _names(asked)]
    found = [finding for each in scripts for finding in check_script(each)]
    if not available():
        opt.say("note    no sandbox could be made here (user namespaces?): only the text of the script was read")
    else:
        for each in scripts:
            if each.is_shell and record(each) is None:
                name = one_line(each.path.name)
                opt.say(f"note    bash could not evaluate {name} to its end: only its text was read")
    if as_json:
        typer.echo(opt.json_text(as_dict(scripts, found)))
    else:
        for line in lines(scripts, found):
            typer.echo(line)
    return {each.severity for each in found}
