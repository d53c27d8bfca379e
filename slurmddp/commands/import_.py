"""import: the job file of a batch script."""

from pathlib import Path

import typer

from slurmddp.commands import options as opt
from slurmddp.commands.init import say_site
from slurmddp.commands.terminal import write_exactly, write_new
from slurmddp.scripts.imports.write import import_script


def import_(
    script: Path = opt.argument("FILE.sbatch", "Batch script that slurmddp did not write", default=...),
    output: Path | None = opt.value("JOB.yaml", "File to write; default: stdout", "-o", "--output"),
    site: opt.Site = None,
    as_json: opt.Json = False,
) -> None:
    """Write the job file of a batch script. Words of the launch that only the job knows go into run.sh beside it.
    Comments in the job file list what was not imported. Exit codes: 0 the job file starts what the script starts,
    1 something is missing in it, 2 slurmddp cannot run what is in the file."""
    draft = import_script(script, site, str(output or "job.yaml"))
    if output:
        if draft.run_text and not output.exists():
            write_new(Path(draft.run_name), draft.run_text)
        write_new(output, draft.text)
    if as_json:
        facts = {"file": output and str(output), "job": draft.text, "valid": draft.valid, "not_imported": draft.lost}
        facts["run"] = draft.run_text
        typer.echo(opt.json_text({**facts, "comments": draft.left, "problems": [str(each) for each in draft.problems]}))
    elif output:
        typer.echo(output)
    else:
        write_exactly(draft.text.encode("utf-8", errors="replace"))
    say_site(draft.made, "import")
    if draft.left:
        count = f"{draft.left} line or option is" if draft.left == 1 else f"{draft.left} lines or options are"
        opt.say(f"skipped {count} not imported: comments at the top of the job file list them with the reasons")
    for line in draft.lost:
        opt.say(f"not imported: {line}")
    unwritten = bool(draft.run_text) and not (output or as_json)
    if unwritten:
        opt.say("missing run.sh, which starts the program with what only the job knows: add -o FILE, which writes both")
    for problem in draft.problems:
        opt.say(f"{'to do  ' if draft.valid else 'missing'} {problem}")
    if draft.valid and draft.problems:
        opt.say("The job file is valid, but `submit` rejects it until you do this in the shell that submits.")
    opt.say(f"next    slurmddp check {output or 'job.yaml'}")
    if draft.lost:
        opt.say("The job file starts another job than the script: do these lines by hand before you submit it.")
    if draft.lost or unwritten or not draft.valid:
        raise typer.Exit(1)
