"""#SBATCH lines, srun, and what Slurm does with the batch script."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from slurmddp.scripts.check.directives import FLAGS, OPTIONS, REMOVED, SRUN_ONLY, Directive
from slurmddp.scripts.check.finding import Hit, rule
from slurmddp.scripts.check.launches import PYTHON as _PYTHON
from slurmddp.scripts.check.launches import Launch
from slurmddp.scripts.check.rules.common import PLACEHOLDER, launches, several_nodes
from slurmddp.scripts.check.script import Script
from slurmddp.scripts.check.values import symbols

_LONG_HOURS = 12
_TIME = r"(\d+-)?\d+(:\d+){0,2}(\.\d+)?|-1|unlimited|infinite|UNLIMITED|INFINITE"
_MEMORY = r"\d+(\.\d+)?\s*([KMGTkmgt][Bb]?)?"
#: Options that sbatch refuses together.
_EXCLUSIVE = (
    {"mem", "mem-per-cpu", "mem-per-gpu"},
    {"cpus-per-task", "cpus-per-gpu"},
    {"gpus-per-task", "ntasks-per-gpu"},
)
#: What values look like; sbatch refuses others.
_FORMS = {
    "nodes": r"\d+[km]?(-\d+[km]?)?([:,][-\d:,]+)?", "time": _TIME, "time-min": _TIME,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
    **dict.fromkeys(("ntasks", "cpus-per-task", "ntasks-per-node", "ntasks-per-socket", "cpus-per-gpu"), r"\d+"),
}  # fmt: skip


@rule
def sbatch_after_command(script: Script) -> Iterator[Hit]:
    if script.late:
        count = len(script.late)
        yield Hit(script.late[0], f"sbatch ignores {count} #SBATCH line{'s' * (count > 1)} below the first command")


@rule
def sbatch_option(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if text.startswith("#SBATCH ") and (match := re.search(r"\s-([NnctpA])=", text.partition(" #")[0])):
            yield Hit(line, f"-{match[1]} takes its value without =")
    for names in _EXCLUSIVE:
        given = [each for each in script.directives if each.name in names]
        if len({each.name for each in given}) > 1:
            yield Hit(given[-1].line, f"sbatch refuses {' with '.join(sorted({'--' + each.name for each in given}))}")
    for each in script.directives:
        if PLACEHOLDER.search(script.lines[each.line - 1]) or "$" in each.value:
            continue
        if not each.name:
            if each.value not in ("hetjob", "packjob"):
                yield Hit(
                    each.line, f"{each.value[:40]} is not an option: options start with -, values contain no blanks"
                )
        elif each.value.startswith("="):
            yield Hit(each.line, f"--{each.name}: remove the blanks around =")
        elif each.name in OPTIONS - REMOVED.keys():
            yield from _values(each)
        elif each.name in REMOVED:
            yield Hit(each.line, f"Slurm has no --{each.name} any more; use --{REMOVED[each.name]}", "warning")
        elif each.name in SRUN_ONLY:
            yield Hit(each.line, f"--{each.name} is an option of srun, not of sbatch")
        elif len(each.name) > 2 and not any(option.startswith(each.name) for option in OPTIONS):
            yield from _unknown(each)


def _values(each: Directive) -> Iterator[Hit]:
    form = _FORMS.get(each.name)
    if not each.value and each.name not in FLAGS:
        refused = form or each.name in ("partition", "signal", "mail-type", "begin")
        yield Hit(each.line, f"--{each.name} has no value", None if refused else "warning")
    elif form and not re.fullmatch(form, each.value) and not re.search(r"[{}<>@%[\]]|xx", each.value):
        hint = ": sbatch reads minutes, HH:MM:SS or D-HH:MM:SS" if each.name in ("time", "time-min") else ""
        yield Hit(each.line, f"--{each.name} cannot be {each.value!r}{hint}")


def _unknown(each: Directive) -> Iterator[Hit]:
    close = difflib.get_close_matches(each.name, sorted(OPTIONS), 1, 0.8)
    if each.name.startswith(("container-", "no-container-")):
        return  # of pyxis and enroot
    if close:
        yield Hit(each.line, f"--{each.name} is not an option of sbatch; did you mean --{close[0]}?")
    else:
        yield Hit(
            each.line, f"--{each.name} is not an option of sbatch, unless a plugin of this site adds it", "warning"
        )


@rule
def sbatch_disabled(script: Script) -> Iterator[Hit]:
    for line, text in enumerate(script.lines, 1):
        if re.match(r"#\s+SBATCH\s+-|\s+#SBATCH\s+-|#SBATCH-", text):
            yield Hit(line, f"sbatch takes this line for a comment: {text.strip()[:40]}")
        elif re.match(r"#(SBTACH|SBACTH|SBACH|SABTCH|SBATCHE|SBATC|sbatch|Sbatch|SBATH|SLURM)\s+-", text):
            yield Hit(line, f"not #SBATCH: {text.strip()[:40]}")


@rule
def sbatch_variable(script: Script) -> Iterator[Hit]:
    found = [each for each in script.directives if re.search(r"\$\{?\w|\$\(|`", each.value)]
    template = len(found) > 3 or PLACEHOLDER.search(script.text)
    for each in found:
        harmless = each.name in ("job-name", "comment", "mail-user", "export", "wckey") or each.name not in OPTIONS
        yield Hit(
            each.line, f"--{each.name}={each.value} is taken literally", "warning" if harmless or template else None
        )


@rule
def cpus_not_inherited(script: Script) -> Iterator[Hit]:
    if not script.option("cpus-per-task") or script.option("cpus-per-task") == "1":
        return
    for launch in launches(script):
        if launch.step and not _passes_cpus(launch):
            yield Hit(launch.step.line, "srun of Slurm 22.05 and 23.02 does not inherit --cpus-per-task")


def _passes_cpus(launch: Launch) -> bool:
    options = launch.step.options if launch.step else {}
    return (
        bool({"cpus-per-task", "cpus-per-gpu", "exclusive"} & set(options))
        or "none" in options.get("cpu-bind", "") + options.get("cpu_bind", "")
        or launch.env("SRUN_CPUS_PER_TASK") is not None
        or any("?" in symbols(name) for name in options)
    )


def _gives(script: Script, *names: str) -> bool:
    """Tell whether one of these options is given, or may be: few #SBATCH lines mean that sbatch gets its options."""
    return len(script.directives) < 3 or any(script.option(name) is not None for name in names)


@rule
def no_cpus(script: Script) -> Iterator[Hit]:
    names = "cpus-per-task cpus-per-gpu exclusive mincpus ntasks-per-core extra-node-info cores-per-socket"
    if _gives(script, *names.split()):
        return
    launch = next(
        (each for each in launches(script) if not each.step or "cpus-per-task" not in each.step.options), None
    )
    if launch and (script.job.gpus_per_node or launch.kind != "python"):
        yield Hit(launch.line, "the job asks for no CPUs per task")


@rule
def no_gpus(script: Script) -> Iterator[Hit]:
    asks = "gpus gpus-per-node gpus-per-task gres exclusive gpus-per-socket tres-per-task ntasks-per-gpu"
    if _gives(script, *asks.split()):
        return
    for launch in launches(script, "torchrun", "accelerate"):
        if "cpu" not in launch.options and not re.search(r"gloo|--cpu\b|device[= ]cpu", script.text):
            yield Hit(launch.line, "the job asks for no GPU")
            return


@rule
def spool_path(script: Script) -> Iterator[Hit]:
    for command in script.commands:
        itself = any(word.strip('"') in ("$0", "${0}", "$BASH_SOURCE", "${BASH_SOURCE[0]}") for word in command.words)
        if itself and "srun" in command.words and (script.job.nodes or 1) > 1:
            yield Hit(command.line, "srun runs $0, Slurm's copy of the script, which only the first node has")
            return
    if "SLURM_SUBMIT_DIR" in script.text or "scontrol show job" in script.text or not script.directives:
        return
    starts = {"cd", "source", ".", "srun", "bash", "sh", "pushd", "exec"}
    for line, words in script.found.started:
        if any("spool" in symbols(word) for word in words):
            certain = words[0] in starts or _PYTHON.match(words[0])
            where = f"{' '.join(script.commands_at(line))[:50] or words[0]} points to Slurm's spool folder"
            yield Hit(line, where, None if certain else "warning")
            return


@rule
def wait_missing(script: Script) -> Iterator[Hit]:
    commands = script.commands
    last = next((at for at in reversed(range(len(commands))) if commands[at].then == "&"), None)
    if last is None or "srun" not in commands[last].words[:1]:
        return
    after = [word for command in commands[last + 1 :] for word in command.words]
    if not {"wait", "srun", "sleep", "tail", "kill"} & set(after) and not re.search(
        r"\bwait\b|\btail -f\b", " ".join(after)
    ):
        if not re.search(r"^\s*(wait\b|.*[;&]\s*wait\b)", script.text, re.MULTILINE):
            yield Hit(commands[last].line, "srun runs in the background, and no wait follows")


@rule
def signal_to_steps(script: Script) -> Iterator[Hit]:
    signal = script.option("signal")
    if not signal or signal.upper().startswith(("B:", "RB:", "BR:")):
        return
    name = signal.partition("@")[0].upper().removeprefix("R:").removeprefix("SIG")
    for command in script.commands:
        if command.words[:1] == ["trap"] and any(name in word.upper() for word in command.words[1:]):
            yield Hit(command.line, f"--signal={signal} does not reach this trap")


@rule
def no_time(script: Script) -> Iterator[Hit]:
    if not _gives(script, "time"):
        yield Hit(1, "no --time")


@rule
def no_requeue(script: Script) -> Iterator[Hit]:
    hours = _hours(script.option("time") or "")
    if hours >= _LONG_HOURS and script.option("requeue") is None and script.option("signal") is None:
        if any(several_nodes(script, launch) for launch in launches(script)) and script.option("array") is None:
            yield Hit(
                script.line_of("time"),
                f"{hours:.0f} hours on several nodes, and nothing saves or requeues the job at its limit",
            )


def _hours(time: str) -> float:
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", time)
    if not match:
        return 0
    days, first, second, _ = (int(each or 0) for each in match.groups())
    if match[1]:
        return days * 24 + first + second / 60
    return first + second / 60 if match[4] else (first + second / 60) / 60


@rule
def log_overwritten(script: Script) -> Iterator[Hit]:
    output = script.option("output")
    if output and not re.search(r"%\d*[jAJxNn]|\$|/dev/null", output) and script.option("open-mode") != "append":
        yield Hit(script.line_of("output"), f"each job writes to {output}")


@rule
def log_folder(script: Script) -> Iterator[Hit]:
    output = script.option("output") or ""
    folder = output.rpartition("/")[0]
    if re.search(r"%[jAJ]", folder):
        yield Hit(script.line_of("output"), f"the folder {folder} cannot exist before the job has its number")
        return
    for command in script.commands:
        words = command.words
        if (
            folder
            and words[:1] == ["mkdir"]
            and any(word.rstrip("/").removeprefix("./") == folder.removeprefix("./") for word in words)
        ):
            yield Hit(command.line, f"the folder of --output={output} is created too late", "note")


@rule
def export_without_all(script: Script) -> Iterator[Hit]:
    for step in script.found.steps:
        export = step.options.get("export", "ALL")
        if "=" in export and "ALL" not in export.split(","):
            yield Hit(step.line, f"srun --export={export.partition('=')[0]}=... drops the environment")
