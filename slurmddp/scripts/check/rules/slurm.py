"""#SBATCH lines, srun, and what Slurm does with the batch script."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator

from slurmddp.scripts.check.directives import FLAGS, OPTIONS, REMOVED, SRUN_ONLY, Directive, components
from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import AGENTS, PYTHON, Launch
from slurmddp.scripts.check.rules.common import PLACEHOLDER, launch_rule, launches
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import symbols

#: 12 hours or more, in the forms of --time.
_LONG = re.compile(r"0*[1-9]\d*-.*|0*(1[2-9]|[2-9]\d|\d{3,}):\d+:\d+|0*(7[2-9]\d|[89]\d\d|\d{4,})(:\d+)?")
_TIME = r"(\d+-)?\d+(:\d+){0,2}(\.\d+)?|-1|unlimited|infinite|UNLIMITED|INFINITE"
_MEMORY = r"\d+(\.\d+)?\s*([KMGTkmgt][Bb]?)?"
#: Options that sbatch refuses together.
_EXCLUSIVE = (
    {"mem", "mem-per-cpu", "mem-per-gpu"}, {"cpus-per-task", "cpus-per-gpu"}, {"gpus-per-task", "ntasks-per-gpu"},
)  # fmt: skip
#: What values look like; sbatch refuses others.
_FORMS = {
    "nodes": r"\d+[km]?(-\d+[km]?)?([:,][-\d:,]+)?", "time": _TIME, "time-min": _TIME,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("ntasks", "cpus-per-task", "ntasks-per-node", "ntasks-per-socket", "cpus-per-gpu"), r"\d+"),
}  # fmt: skip
_ITS_FOLDER = {"cd", "source", ".", "srun", "bash", "sh", "pushd", "exec"}


@rule
def sbatch_after_command(script: Script) -> Iterator[Hit]:
    if count := len(script.late):
        yield Hit(f"sbatch ignores {count} #SBATCH line{'s' * (count > 1)} below the first command", script.late[0])


@rule
def sbatch_option(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if text.startswith("#SBATCH ") and (match := re.search(r"\s-([NnctpA])=", text.partition(" #")[0])):
            yield Hit(f"-{match[1]} takes its value without =", line)
    for part, names in itertools.product(components(script.directives), _EXCLUSIVE):
        given = [each for each in part if each.name in names]
        if len({each.name for each in given}) > 1:
            yield Hit(f"sbatch refuses {' with '.join(sorted({'--' + each.name for each in given}))}", given[-1].line)
    for each in itertools.chain(*components(script.directives)):
        if not PLACEHOLDER.search(script.lines[each.line - 1]) and "$" not in each.value:
            yield from _refused(each)


def _refused(each: Directive) -> Iterator[Hit]:
    name, value, form = each.name, each.value, _FORMS.get(each.name)
    if not name:
        yield Hit(f"{value[:40]} is not an option: options start with -, values contain no blanks", each.line)
    elif value.startswith("="):
        yield Hit(f"--{name}: remove the blanks around =", each.line)
    elif name in REMOVED:
        yield Hit(f"Slurm has no --{name} any more; use --{REMOVED[name]}", each.line, "warning")
    elif name in OPTIONS:
        if not value and name not in FLAGS:
            refused = form or name in ("partition", "signal", "mail-type", "begin")
            yield Hit(f"--{name} has no value", each.line, None if refused else "warning")
        elif form and not re.fullmatch(form, value) and not re.search(r"[{}<>@%[\]]|xx", value):
            hint = ": sbatch reads minutes, HH:MM:SS or D-HH:MM:SS" if name in ("time", "time-min") else ""
            yield Hit(f"--{name} cannot be {value!r}{hint}", each.line)
    elif name in SRUN_ONLY:
        yield Hit(f"--{name} is an option of srun, not of sbatch", each.line)
    elif len(name) > 2 and not any(option.startswith(name) for option in OPTIONS):
        close = difflib.get_close_matches(name, sorted(OPTIONS), 1, 0.8)
        unknown = f"--{name} is not an option of sbatch"
        if name.startswith(("container-", "no-container-")):
            return  # of pyxis and enroot
        if close:
            yield Hit(f"{unknown}; did you mean --{close[0]}?", each.line)
        else:
            yield Hit(f"{unknown}, unless a plugin of this site adds it", each.line, "warning")


@rule
def sbatch_disabled(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if re.match(r"#\s+SBATCH\s+-|\s+#SBATCH\s+-|#SBATCH-", text):
            yield Hit(f"sbatch takes this line for a comment: {text.strip()[:40]}", line)
        elif re.match(r"#(SBTACH|SBACTH|SBACH|SABTCH|SBATCHE|SBATC|(?!SBATCH)(?i:sbatch)|SBATH|SLURM)\s+-", text):
            yield Hit(f"not #SBATCH: {text.strip()[:40]}", line)


@rule
def sbatch_variable(script: Script) -> Iterator[Hit]:
    found = [each for each in script.directives if re.search(r"\$\{?\w|\$\(|`", each.value)]
    template = len(found) > 3 or PLACEHOLDER.search(script.text)
    for each in found:
        harmless = each.name in ("job-name", "comment", "mail-user", "export", "wckey") or each.name not in OPTIONS
        message = f"--{each.name}={each.value} is taken literally"
        yield Hit(message, each.line, "warning" if harmless or template else None)


def _gives(script: Script, names: str) -> bool:
    """Tell whether one of these options is given, or may be: few #SBATCH lines mean that sbatch gets its options."""
    return len(script.directives) < 3 or any(script.option(name) is not None for name in names.split())


@launch_rule()
def cpus_not_inherited(script: Script, launch: Launch) -> Iterator[Hit]:
    options = launch.step.options if launch.step else {}
    passed = {"cpus-per-task", "cpus-per-gpu", "exclusive"} & options.keys() or "none" in options.get("cpu-bind", "")
    if passed or launch.env("SRUN_CPUS_PER_TASK") is not None or any("?" in symbols(name) for name in options):
        return
    if launch.step and script.option("cpus-per-task") not in (None, "", "1"):
        yield Hit("srun of Slurm 22.05 and 23.02 does not inherit --cpus-per-task", launch.step.line)


@rule
def no_cpus(script: Script) -> Iterator[Hit]:
    if _gives(script, "cpus-per-task cpus-per-gpu exclusive mincpus ntasks-per-core extra-node-info cores-per-socket"):
        return
    several = (script.job.tasks_per_node or 1) > 1  # whose CPUs a launch without srun has
    found = [each for each in launches(script) if not ("cpus-per-task" in each.step.options if each.step else several)]
    if found and (script.job.gpus_per_node or found[0].kind != "python"):
        yield Hit("the job asks for no CPUs per task", found[0].line)


@rule
def no_gpus(script: Script) -> Iterator[Hit]:
    names = "gpus gpus-per-node gpus-per-task gres exclusive gpus-per-socket tres-per-task ntasks-per-gpu"
    if _gives(script, names) or re.search(r"gloo|--cpu\b|device[= ]cpu", script.text):
        return
    for launch in [each for each in launches(script, *AGENTS) if "cpu" not in each.options][:1]:
        yield Hit("the job asks for no GPU", launch.line)


@rule
def spool_path(script: Script) -> Iterator[Hit]:
    knows = "SLURM_SUBMIT_DIR" in script.text or "scontrol show job" in script.text or not script.directives
    for line, words in script.found.started:
        itself = words[0] == "srun" and any(word.endswith("spool\0/slurm_script") for word in words)
        if itself and (script.job.nodes or 1) > 1:
            yield Hit("srun runs $0, Slurm's copy of the script, which only the first node has", line)
        elif not knows and not itself and any("spool" in symbols(word) for word in words):
            sure = words[0] in _ITS_FOLDER or PYTHON.match(words[0])
            text = script.lines[line - 1].strip()
            yield Hit(f"{text[:50]} points to Slurm's spool folder", line, None if sure else "warning")
            return


@rule
def no_time(script: Script) -> Iterator[Hit]:
    if not _gives(script, "time"):
        yield Hit("no --time", 1)


@rule
def no_requeue(script: Script) -> Iterator[Hit]:
    time = script.option("time") or ""
    saves = any(script.option(name) is not None for name in ("requeue", "signal", "array"))
    if _LONG.fullmatch(time) and not saves and any(each.several_nodes for each in launches(script)):
        message = f"--time={time} on several nodes, and nothing saves or requeues the job at its limit"
        yield Hit(message, script.line_of("time"))


@rule
def log_overwritten(script: Script) -> Iterator[Hit]:
    output = script.option("output")
    if output and not re.search(r"%\d*[jAJxNn]|\$|/dev/null", output) and script.option("open-mode") != "append":
        yield Hit(f"each job writes to {output}", script.line_of("output"))


@rule
def log_folder(script: Script) -> Iterator[Hit]:
    output = script.option("output") or ""
    folder = output.rpartition("/")[0]
    if re.search(r"%[jAJ]", folder):
        yield Hit(f"the folder {folder} cannot exist before the job has its number", script.line_of("output"))
        return
    for command in script.commands if folder else ():
        names = [word.rstrip("/").removeprefix("./") for word in command.words]
        if names[:1] == ["mkdir"] and folder.removeprefix("./") in names:
            yield Hit(f"the folder of --output={output} is created too late", command.line, "note")


@rule
def export_without_all(script: Script) -> Iterator[Hit]:
    for step in script.found.steps:
        export = step.options.get("export", "ALL")
        if "=" in export and "ALL" not in export.split(","):
            yield Hit(f"srun --export={export.partition('=')[0]}=... drops the environment", step.line)
