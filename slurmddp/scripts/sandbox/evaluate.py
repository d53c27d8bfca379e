"""What a batch script would start: bash evaluates it in the sandbox, as the first node of several imagined jobs would.

What is the same in all of these jobs is known; what differs is known only when the job runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
SUBMIT = "/.user/1/2/3/4/submit"  # deep, for scripts that go up from there
HOME = "/.home"
USER = "sandboxuser"
TMPDIR = "/tmp/.user"
UNKNOWN = "\0unknown"  # the text of a file that holds another number in each job
USER_ID = 48217  # in the sandbox: not root, so exec drops all capabilities
#: Bytes of the error output and of a word that are looked at.
_MOST_ERRORS, _LONGEST_WORD = 64 * 1024, 128 * 1024
#: Filters that are real: they read, and print.
_REAL = """
    awk basename bash cat comm cut dirname env expr egrep fgrep fold gawk grep head join mawk mktemp
    nl paste printenv printf pwd realpath rev sed seq sh sha1sum sha256sum md5sum shuf sort split
    tac tail tee tr uniq wc xargs cksum factor cmp diff
"""
#: Real, too, but recorded: what they do to files is a part of the job.
_RECORDED = ("chmod", "cp", "date", "ln", "mkdir", "mv", "readlink", "rm", "touch")
#: Programs that `exec`, `env` or `xargs` may start, where bash's own handler is not asked.
_STUBS = """
    srun sbatch scancel scontrol squeue sinfo sacct hostname nvidia-smi rocm-smi module ml python python3 torchrun
    accelerate deepspeed mpirun mpiexec orterun prun horovodrun ray composer apptainer singularity docker podman
    enroot shifter conda mamba micromamba uv poetry pixi timeout nohup nice ionice numactl taskset stdbuf setsid
    time nsys ncu strace ssh pdsh scp rsync curl wget git pip pip3 sleep whoami id nproc uname ip ifconfig ss
    netstat lsof fuser kill pkill df du free tar unzip dd mount umount unshare nsenter su sudo sync getent
    accelerate-launch wandb huggingface-cli jq bc nc ls find stat
"""
#: Options of sbatch and srun that take no value, or one behind `=` only.
FLAGS_OF_BOTH = {
    "consolidate-segments", "contiguous", "exclusive", "help", "hold", "nice", "no-kill", "oom-kill-step", "overcommit",
    "oversubscribe", "parsable", "propagate", "quiet", "reboot", "resv-ports", "spread-job", "spread-segments",
    "stepmgr", "test-only", "usage", "use-min-nodes", "verbose", "version",
}  # fmt: skip
#: Those of srun alone, and those of pyxis.
SRUN_ONLY_FLAGS = {
    "async", "bcast", "compress", "disable-status", "exact", "external-launcher", "immediate", "kill-on-bad-exit",
    "label", "multi-prog", "no-allocate", "overlap", "preserve-env", "pty", "quit-on-interrupt", "send-libs",
    "unbuffered", "wait-for-children", "whole", "x11",
}  # fmt: skip
SRUN_FLAGS = FLAGS_OF_BOTH | SRUN_ONLY_FLAGS | {
    "container-writable", "no-container-writable", "container-readonly", "container-remap-root",
    "no-container-remap-root", "container-mount-home", "no-container-mount-home", "no-container-entrypoint",
}  # fmt: skip
#: Options of apptainer and singularity with a value, which may stand behind a blank.
CONTAINER_VALUES = (
    "-B", "--bind", "--mount", "--pwd", "-W", "--env", "-H", "--home", "-o", "--overlay", "--workdir", "-S",
    "--scratch", "--env-file", "--app", "--add-caps", "--drop-caps", "--security",
)  # fmt: skip
#: What SANDBOX_TASK holds, behind the number of the step.
_TOLD = (
    "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_STEP_NUM_NODES", "SLURM_NTASKS", "SLURMD_NODENAME",
)  # fmt: skip
_OWN = re.compile(r"SANDBOX_\w+|BASH_ENV|_|SHLVL|OLDPWD|PWD|BASH_FUNC_.*")
_SLASH = re.compile(
    r"line \d+: (\S[^\n]{0,500}?): (?:No such file or directory|Permission denied|Is a directory)$", re.MULTILINE
)


#: What a filter says of a file that is not there: it is in the job, with something in it that nobody knows.
_READ = re.compile(
    r"^\w+: (?:fatal: )?(?:can't read |cannot open (?:file )?)?[\"'`]?(\S[^\n:\"']{0,500}?)[\"']?(?: for reading)?"
    r"(?:: | \()No such file or directory\)?$",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Started:
    """One program that the script starts. order: when; line: of the script; step: the srun around it, by its order.
    added: the environment beyond what the job has. task: what srun tells it, which a container may hide."""

    order: int
    words: tuple[str, ...]
    folder: str
    line: int
    streams: tuple[str, str, str]
    added: Mapping[str, str]
    environment: Mapping[str, str] = field(repr=False)
    step: int = 0
    procid: int | None = None
    contained: bool = False
    task: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the program's name without its folder."""
        return self.words[0].rpartition("/")[2] if self.words else ""


@dataclass(frozen=True)
class Limits:
    """What one run may take: seconds of a clock (the machine may be busy), and of processor time for each process."""

    seconds: float = 8
    processor: int = 4


LIMITS = Limits()


@dataclass(frozen=True)
class Job:
    """An imagined job, whose first node evaluates the script."""

    id: int
    hosts: tuple[str, ...]
    nodelist: str
    tasks_per_node: int
    gpus: int
    files: bool
    now: int
    unknown: int
    folder: str = ""  # of --chdir
    variables: Mapping[str, str] = field(default_factory=dict)
    slurm: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()  # of the script, behind its name on sbatch's command line
    role: str = ""  # what it is imagined for


@dataclass(frozen=True)
class Evaluated:
    """What one imagined job started, in order. ended: the script ended by itself, within its limits. assigned: line,
    name and value of each assignment of the batch shell; `cd` and the argument of each change of folder."""

    job: Job
    started: tuple[Started, ...]
    ended: bool
    errors: str = ""
    assigned: tuple[tuple[int, str, str], ...] = ()


class Unavailable(Exception):
    """No sandbox can be made here: the text rules alone are asked."""


def evaluate(
    text: str, jobs: Iterable[Job], name: str = "job.sbatch", files: Mapping[str, str] | None = None,
    limits: Limits = LIMITS,
) -> list[Evaluated]:  # fmt: skip
    """Return what the script starts in each of the jobs. files: those beside it that it reads, by their relative path.
    Raises Unavailable."""
    jobs = list(jobs)
    if not available():
        raise Unavailable
    missing: dict[str, str] = {}
    found: list[Evaluated] = []
    for _ in range(4):
        try:
            answers = _run([_spec(text, job, name, {**(files or {}), **missing}, limits) for job in jobs])
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise Unavailable from error
        found = list(map(_read, jobs, answers))
        known = len(missing)
        for pattern, content in ((_SLASH, stub()), (_READ, UNKNOWN)):
            _add_missing(missing, {path for each in found for path in pattern.findall(each.errors)}, content)
        if len(missing) == known or not all(each.ended for each in found):
            break
    return found


_OURS = re.compile(r"/(dev|proc|sys|usr|lib\w*|s?bin|var|\.sandbox|\.keep)(/|$)")


def _add_missing(missing: dict[str, str], paths: set[str], content: str) -> None:
    """Add what to put in the place of paths that were not there: a folder for them first, then a file."""
    before = set(missing)
    for path in sorted(paths)[:40]:
        whole = os.path.normpath(os.path.join(SUBMIT, path)).replace("//", "/", 1)
        folder = f"{os.path.dirname(whole)}/.keep"
        if _OURS.match(whole) or "\0" in path or len(path) > 500:
            continue
        if folder not in before and os.path.dirname(whole) not in ("/", SUBMIT):
            missing[folder] = ""
        else:
            missing.setdefault(whole, content)


def available() -> bool:
    """Tell whether this machine lets us make a sandbox; with SLURMDDP_NO_SANDBOX, as if it did not."""
    return sys.platform.startswith("linux") and not os.environ.get("SLURMDDP_NO_SANDBOX") and _probed()


@lru_cache(maxsize=1)
def _probed() -> bool:
    try:
        found = _run([_spec("#!/bin/bash\nsrun true\n", _PROBE, "probe", {})])
    except (OSError, subprocess.SubprocessError, ValueError):
        return False
    return "error" not in found[0] and any(each.name == "srun" for each in _read(_PROBE, found[0]).started)


_PROBE = Job(1, ("n1",), "n1", 1, 1, True, 1, 1)


#: What runs recorded, by all that they depend on: a correction, its check and an import look at the same script.
_known: dict[str, dict[str, Any]] = {}
_MOST_KNOWN = 256


def _run(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what each run records."""
    keys = [json.dumps(each) for each in specs]
    new = {key: each for key, each in zip(keys, specs, strict=True) if key not in _known}
    answers = dict(zip(new, _in_jail(list(new.values())), strict=True)) if new else {}
    found = [answers.get(key) or _known[key] for key in keys]
    if len(_known) + len(answers) > _MOST_KNOWN:
        _known.clear()
    _known.update({key: answer for key, answer in answers.items() if "error" not in answer})
    return found


def _in_jail(specs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Let the jail run them. What it says is data of others: it is parsed, never trusted."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_HERE / "jail.py")],
        input=json.dumps(specs), capture_output=True, text=True,
        timeout=sum(3 * each["seconds"] + 1 for each in specs), env={}, cwd="/", check=False,
    )  # fmt: skip
    answers = json.loads(done.stdout or "[]")
    return answers if len(answers) == len(specs) else [{"error": done.stderr[-300:]}] * len(specs)


@lru_cache(maxsize=1)
def stub() -> str:
    """Return the text of the program that stands for all others."""
    text = (_HERE / "stub.sh").read_text(encoding="utf-8")
    flags = [f"--{each}" for each in sorted(SRUN_FLAGS)] + [f"-{each}" for each in "luKEIXZOsQvHVhk"]
    return text.replace("@FLAGS@", f" {' '.join(flags)} ").replace("@CONTAINER@", "|".join(CONTAINER_VALUES))


def _answers(job: Job, script: str) -> str:
    """Return what programs that look at the job say: lines of a pattern of the command, and its output."""
    addresses = "".join(rf"{host}: 10.0.0.{at}:6818\n" for at, host in enumerate(job.hosts, 1))
    of_job = rf"JobId={job.id} JobName=name{job.id}\n   Command={script}\n   WorkDir={SUBMIT}\n"
    of_job += rf"   NodeList={job.nodelist}\n"
    listed = r"GPU {0}: GPU (UUID: GPU-{0})\n"
    gpus = {"*-L*": listed, "*--list*": listed, "*--query-gpu=index*": r"{0}\n", "*": rf"{job.unknown}\n"}
    answers = [
        *((f"{name} *", "") for name in ("sleep", "wait", "true", "echo")), ("whoami *", rf"{USER}\n"),
        ("scontrol *show job*", of_job), ("scontrol *getaddrs*", addresses),
        *((f"nvidia-smi {words}", "".join(map(text.format, range(job.gpus)))) for words, text in gpus.items()),
    ]  # fmt: skip
    return "".join(f"{pattern}\t{answer}\n" for pattern, answer in answers)


@lru_cache(maxsize=1)
def _binds() -> list[tuple[str, str]]:
    there = {name: f"/usr/bin/{name}" for name in _REAL.split()}
    there |= {name: f"/.sandbox/real/{name}" for name in _RECORDED}
    found = ((shutil.which(name, path="/usr/bin:/bin"), path) for name, path in there.items())
    return [(os.path.realpath(program), path) for program, path in found if program]


def _spec(text: str, job: Job, name: str, files: Mapping[str, str], limits: Limits = LIMITS) -> dict[str, Any]:
    name = re.sub(r"[^\w./-]", "_", name) or "job"
    spool = f"/var/spool/slurmd/job{job.id}/slurm_script"
    words = {match for match in re.findall(r"\bexec\s+([A-Za-z][\w.+-]*)", text) if match not in _REAL.split()}
    beside = {
        path if path.startswith("/") else f"{SUBMIT}/{path}": f"{job.unknown}\n" if content == UNKNOWN else content
        for path, content in files.items()
    }
    nodes, cpus = len(job.hosts), 40 + job.id % 97  # other ones in each job
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": HOME, "USER": USER, "LOGNAME": USER,
        "SHELL": "/bin/bash",
        "LANG": "C", "TMPDIR": TMPDIR, "HOSTNAME": job.hosts[0], "SLURMD_NODENAME": job.hosts[0],
        "SLURM_JOB_ID": str(job.id), "SLURM_JOBID": str(job.id), "SLURM_JOB_NAME": f"name{job.id}",
        "SLURM_SUBMIT_DIR": SUBMIT,
        "SLURM_SUBMIT_HOST": "login1", "SLURM_JOB_NODELIST": job.nodelist, "SLURM_NODELIST": job.nodelist,
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes), "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": f"{job.tasks_per_node}" + (f"(x{nodes})" if nodes > 1 else ""),
        "SLURM_JOB_PARTITION": f"part{job.id}", "SLURM_JOB_ACCOUNT": f"acct{job.id}",
        "SLURM_CLUSTER_NAME": f"cluster{job.id}",
        "SLURM_GPUS_ON_NODE": str(job.gpus),
        "SLURM_CPUS_ON_NODE": str(cpus), "SLURM_JOB_CPUS_PER_NODE": f"{cpus}(x{nodes})",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(job.gpus))),
        **job.slurm, **job.variables,
        "BASH_ENV": "/.sandbox/prelude", "SANDBOX_HOSTS": " ".join(job.hosts), "SANDBOX_TPN": str(job.tasks_per_node),
        "SANDBOX_GPUS": str(job.gpus), "SANDBOX_FILES": str(int(job.files)), "SANDBOX_NOW": str(job.now),
        "SANDBOX_UNKNOWN": str(job.unknown), "SANDBOX_SCRIPT": os.path.join(SUBMIT, name),
    }  # fmt: skip
    return {
        "files": {
            "/.sandbox/stub": stub(), "/.sandbox/answers": _answers(job, environment["SANDBOX_SCRIPT"]),
            "/.sandbox/prelude": (_HERE / "prelude.sh").read_text(encoding="utf-8"),
            spool: text, os.path.join(SUBMIT, name): text, f"{HOME}/.keep": "", f"{TMPDIR}/.keep": "",
            "/.conda/.keep": "", **beside,
        },
        "binds": _binds(),
        "links": {f"/usr/bin/{each}": "/.sandbox/stub" for each in {*_STUBS.split(), *_RECORDED, *words}}
        | {"/.sandbox/closed": "closed"},
        "env": environment, "argv": ["/bin/bash", spool, *job.arguments], "folder": os.path.join(SUBMIT, job.folder),
        "host": job.hosts[0], "user": USER_ID, "seconds": limits.seconds, "processor": limits.processor,
    }  # fmt: skip


def variables_of(job: Job) -> Mapping[str, str]:
    """Return the environment in which a script begins."""
    return dict(_spec("", job, "job", {})["env"])


def _read(job: Job, answer: Mapping[str, Any]) -> Evaluated:
    if "error" in answer:
        return Evaluated(job, (), False, str(answer["error"]))
    records = {str(name): str(text) for name, text in dict(answer["records"]).items()}
    errors = records.pop("stderr", "")[-_MOST_ERRORS:]
    parts = records.pop("assigned", "").split("\0")
    assigned = [
        (line, name, value)
        for at, name, value in zip(parts[::3], parts[1::3], parts[2::3], strict=False)
        if (line := number(at)) and re.fullmatch(r"[A-Za-z_]\w{0,99}", name) and len(value) < _LONGEST_WORD
    ]
    started = sorted(_started(job, records), key=lambda each: each.order)
    return Evaluated(job, tuple(started), bool(answer["ended"]), errors, tuple(assigned))


def number(text: str | None) -> int | None:
    """Return the whole number that a text surely is: what a script has recorded may be anything."""
    return int(text) if text and re.fullmatch("[0-9]{1,9}", text) else None


def _started(job: Job, records: Mapping[str, str]) -> Iterator[Started]:
    given = variables_of(job)
    for name, text in records.items():
        parts = text.split("\0")
        order, count = number(name), number(parts[0])
        if order is None or count is None or len(parts) < count + 5 or max(map(len, parts)) > _LONGEST_WORD:
            continue
        words, rest = parts[1 : count + 1], parts[count + 1 :]
        pairs = dict(each.partition("=")[::2] for each in rest[4:] if "=" in each)
        step, *told = pairs.get("SANDBOX_TASK", "").split(":")
        task = dict(zip(_TOLD, told, strict=False))
        shown = {key: value for key, value in pairs.items() if not _OWN.fullmatch(key)}
        yield Started(
            order, tuple(words), rest[0], number(pairs.get("SANDBOX_LINE", "")) or 0, (rest[1], rest[2], rest[3]),
            {key: value for key, value in shown.items() if given.get(key) != value}, shown,
            number(step) or 0, number(task.get("SLURM_PROCID")), "SANDBOX_CONTAINER" in pairs, task,
        )  # fmt: skip
