"""Cleans up a node after an attempt: kills the processes that it left there, removes its shared memory and its folder
on the node's own disk, and writes what it found to logs/.../sweep/NODE.

SLURMDDP_SWEEP: the rendezvous id of the attempt; SLURMDDP_RUN, SLURMDDP_LOGS: as in its steps; SLURMDDP_STARTED: when
it began, in unix seconds; SLURMDDP_NODE_FOLDER: paths.node. Other attempts, runs and jobs of the same user may be on
this node: what is not certainly the attempt's stays.
"""

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from slurmddp.supervisor.ranks import environment as variables
from slurmddp.supervisor.ranks import read

#: What mounts a container's image. Where its parent was killed, it has lost its environment, not its session.
_MOUNTS = ("squashfuse", "squashfuse_ll", "fuse2fs", "fuse-overlayfs", "gocryptfs")
#: Of our own scripts, and what a log-in leaves: none of them uses shared memory.
_HARMLESS = (
    "bash", "sh", "slurm_script", "srun", "scontrol", "sleep", "curl", "timeout", "systemd", "(sd-pam)", "sshd",
)  # fmt: skip
#: Names of shared memory that torch, NCCL, Python's multiprocessing and OpenMP give.
_KNOWN = re.compile(r"torch_|nccl-|psm_|sem\.mp-|sem\.loky-|pym-|__KMP_REGISTERED_LIB_")
#: Rounds in which what is killed may still be there, and the seconds between two.
_ROUNDS, _PAUSE = 60, 0.1
#: The rendezvous id as node.sh hands it into a container.
_INTO_CONTAINER = ("APPTAINERENV_SLURMDDP_", "SINGULARITYENV_SLURMDDP_")
_CODE = "/code/slurmddp.zip"


class Process(NamedTuple):
    """A process of any user. mine: it is this user's, and lives: a zombie's parent has only not asked yet."""

    pid: int
    parent: int
    mine: bool
    session: int
    name: str


def processes() -> Dict[int, Process]:
    """Return the processes of this host by their numbers. They come and go while this reads."""
    by_pid = {}
    for name in os.listdir("/proc"):
        status = read("/proc/{}/status".format(name)) if name.isdigit() else None
        if not status:
            continue
        lines = dict(line.split(":", 1) for line in status.decode("utf-8", "replace").split("\n") if ":" in line)
        words = {key: (lines.get(key, "").split() or ["0"])[0] for key in ("State", "PPid", "Uid", "NSsid")}
        mine = words["Uid"] == str(os.getuid()) and words["State"] not in ("Z", "X")
        by_pid[int(name)] = Process(
            int(name), int(words["PPid"]), mine, int(words["NSsid"]), lines.get("Name", "").strip()
        )
    return by_pid


def began(pid: int) -> Optional[str]:
    """Return when a process began, in ticks: with it, its number is unique. None if it is gone."""
    text = read("/proc/{}/stat".format(pid))
    return text.rpartition(b")")[2].split()[19].decode() if text else None


class Environment(NamedTuple):
    """What the environment of a process says. id: its rendezvous id. job: of Slurm. ranks: whether node.sh or torchrun
    started it. sweeps: whether it is a sweep.
    """

    id: str
    job: str
    ranks: bool
    sweeps: bool


def environment(pid: int, attempt: str) -> Optional[Environment]:
    """Read a process's environment; None if it may not be read."""
    values = variables(pid)
    if not values:
        return None
    inside = [values[name + "RENDEZVOUS_ID"] for name in _INTO_CONTAINER if name + "RENDEZVOUS_ID" in values]
    elastic = values.get("TORCHELASTIC_RUN_ID") == attempt
    ids = [values.get("SLURMDDP_RENDEZVOUS_ID", ""), *inside, attempt if elastic else ""]
    names = ("SLURMDDP_NODE", "SLURMDDP_STEP", *(name + "NODE" for name in _INTO_CONTAINER))
    return Environment(
        next(filter(None, ids), ""),
        values.get("SLURM_JOB_ID", ""),
        elastic or any(name in values for name in names),
        "SLURMDDP_SWEEP" in values,
    )


class SharedMemory:
    """/dev/shm. An inode's number is unique on its device only: a container may have a /dev/shm of its own."""

    def __init__(self) -> None:
        try:
            self._device = os.stat("/dev/shm").st_dev
        except OSError:
            self._device = 0
        # As the kernel writes it in maps (makedev(3))
        self._in_maps = "{:02x}:{:02x}".format(os.major(self._device), os.minor(self._device))

    def mapped_by(self, pid: int) -> Iterator[Tuple[int, str]]:
        """Yield inode and name of what a process maps."""
        for line in (read("/proc/{}/maps".format(pid)) or b"").decode("utf-8", "replace").split("\n"):
            words = line.split()
            if len(words) > 5 and words[3] == self._in_maps and words[5].startswith("/dev/shm/"):
                yield int(words[4]), words[5][len("/dev/shm/") :]

    def opened_by(self, pid: int) -> Iterator[int]:
        """Yield the inodes of what a process holds open."""
        folder = "/proc/{}/fd".format(pid)
        try:
            names = os.listdir(folder)
        except OSError:
            return
        for name in names:
            try:
                facts = os.stat(os.path.join(folder, name))
            except OSError:
                continue
            if facts.st_dev == self._device:
                yield facts.st_ino


class Sweep:
    """One cleanup. found: a line for each thing that it has removed."""

    def __init__(self, attempt: str, run: str, job: str, started: int, sessions: Set[int]) -> None:
        self.attempt, self.run, self.job, self.started, self.sessions = attempt, run, job, started, sessions
        self.found: List[str] = []
        self.shared = SharedMemory()
        self._table: Dict[int, Process] = {}
        self._environments: Dict[int, Optional[Environment]] = {}
        self._above: Set[int] = set()  # this process, and those above it
        self._mapped: Set[Tuple[int, str]] = set()  # of processes that are killed here
        self._used: Set[int] = set()  # inodes that others use
        self._strangers = 0

    def say(self, kind: str, text: str) -> None:
        """Note what was found, in characters that need no quotes anywhere."""
        self.found.append("{} {}".format(kind, re.sub("[^A-Za-z0-9._:/+@ -]", "_", text)))

    # --- processes

    def end_processes(self) -> bool:
        """Kill what the attempt has left. Return False if something of it is still there."""
        killed: Dict[int, str] = {}
        starts: Dict[int, str] = {}
        gone = True
        for _ in range(_ROUNDS):
            self._look()
            doomed = self._doomed()
            starts.update(doomed)
            for pid, start in doomed.items():
                self._mapped.update(self.shared.mapped_by(pid))
                if began(pid) == start and _kill(pid):  # the number may be another process's by now
                    killed[pid] = self._table[pid].name
            # One that ends has no environment any more, but is not gone before it is a zombie.
            if not doomed and not any(self._is_mine(pid) and began(pid) == starts[pid] for pid in killed):
                break
            time.sleep(_PAUSE)
        else:
            gone = False
        for pid, name in killed.items():
            self.say("process", "{} {}".format(pid, name))
        return gone

    def _look(self) -> None:
        self._table, self._environments = processes(), {}
        self._above = set(self._ancestors(os.getpid()))

    def _is_mine(self, pid: int) -> bool:
        return pid in self._table and self._table[pid].mine

    def _mine(self) -> List[int]:
        return [pid for pid, process in self._table.items() if process.mine]

    def _environment(self, pid: int) -> Optional[Environment]:
        if pid not in self._environments:
            self._environments[pid] = environment(pid, self.attempt)
        return self._environments[pid]

    def _belongs(self, pid: int) -> bool:
        """Return whether a process is the attempt's by its own environment. job.sh and its helpers have the id as well,
        but not what node.sh adds; and a job that a rank has submitted inherits all of it but the number of the job.
        """
        own = self._environment(pid)
        return own is not None and own.id == self.attempt and own.ranks and not own.sweeps and self._of_job(own)

    def _is_foreign(self, pid: int) -> bool:
        """Return whether a process belongs to something else by its own environment."""
        own = self._environment(pid)
        return own is not None and ((own.id or self.attempt) != self.attempt or own.sweeps or not self._of_job(own))

    def _of_job(self, own: Environment) -> bool:
        return (own.job or self.job) == self.job

    def _ancestors(self, pid: int) -> Iterator[int]:
        seen: Set[int] = set()
        while pid in self._table and pid not in seen:
            seen.add(pid)
            yield pid
            pid = self._table[pid].parent

    def _is_shielded(self, pid: int) -> bool:
        """Return whether a process is this one, above or below it, or belongs to the guard of this run."""
        if pid in self._above:
            return True
        above = list(self._ancestors(pid))
        return os.getpid() in above or any(self._is_mine(each) and self._is_guard(each) for each in above)

    def _is_guard(self, pid: int) -> bool:
        words = _command(pid)
        programs = [number for number, word in enumerate(words) if word.endswith(_CODE)]
        return bool(programs) and words[programs[0] + 1 :][:2] == ["guard", self.run]

    def _is_orphaned_mount(self, pid: int) -> bool:
        process = self._table[pid]
        return process.name in _MOUNTS and process.session in self.sessions and not self._is_mine(process.parent)

    def _doomed(self) -> Dict[int, str]:
        """Return the attempt's processes, and what they started that says nothing else of itself; each with when it
        began.
        """
        mine = self._mine()
        doomed: Dict[int, str] = {}

        def doom(pid: int) -> bool:
            start = None if self._is_shielded(pid) else began(pid)
            if start is not None:
                doomed[pid] = start
            return start is not None

        for pid in mine:
            if self._belongs(pid) or self._is_orphaned_mount(pid):
                doom(pid)
        grown = True
        while grown:
            more = [pid for pid in mine if pid not in doomed and self._table[pid].parent in doomed]
            grown = sum(doom(pid) for pid in more if not self._is_foreign(pid)) > 0
        return doomed

    # --- shared memory

    def remove_shared_memory(self) -> None:
        segments, of_system_v = list(_segments()), list(_of_system_v())
        if not segments and not of_system_v:
            return
        self._find_users()
        for name in segments:
            self._remove_segment(name)
        for number, maker, made in of_system_v:
            if not (self._strangers or os.path.exists("/proc/{}".format(maker))) and self._since_start(made):
                if _run("ipcrm", "-m", number) is not None:
                    self.say("segment", "sysv:" + number)

    def _find_users(self) -> None:
        """Count the processes of this user that may use shared memory, now or by its name later on; and find the inodes
        that they map or hold open. What cannot be read may do that, too.
        """
        self._look()
        others = [pid for pid in self._mine() if self._may_use(pid)]
        self._strangers = len(others)
        if self._mapped:  # else nothing is certain enough to go
            for pid in others:
                self._used.update(inode for inode, _ in self.shared.mapped_by(pid))
                self._used.update(self.shared.opened_by(pid))

    def _may_use(self, pid: int) -> bool:
        own = self._environment(pid)
        if own is not None and own.id == os.environ.get("SLURMDDP_WARM"):  # see warming.py
            return False
        if self._table[pid].name in _HARMLESS or self._is_shielded(pid):
            return False
        ours = any(word.endswith(_CODE) for word in _command(pid))
        return not ours and os.path.exists("/proc/{}/stat".format(pid))

    def _remove_segment(self, name: str) -> None:
        path = os.path.join("/dev/shm", name)
        facts = _run("stat", "-c", "%i %W %Y", path)
        if facts is None:
            return
        inode, born, changed = map(int, facts.split())
        if inode in self._used:
            return
        of_nobody = not self._strangers and self._since_start(born if born > 0 else changed, changed)
        if (inode, name) in self._mapped or of_nobody:  # of a process that was killed here; or nobody is left
            os.unlink(path)
            self.say("segment", name)

    def _since_start(self, *moments: int) -> bool:
        """Return whether something was made since the attempt began; nothing was where nobody knows when that was."""
        return self.started > 0 and all(moment >= self.started for moment in moments)


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def _command(pid: int) -> List[str]:
    """Return the first words of a process's command line."""
    return (read("/proc/{}/cmdline".format(pid)) or b"").decode("utf-8", "surrogateescape").split("\0")[:5]


def _run(*words: str) -> Optional[str]:
    """Return what a command writes; None if it fails, or is not there."""
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    except OSError:
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _segments() -> Iterator[str]:
    """Yield the names of shared memory of this user that may be the attempt's."""
    try:
        names = os.listdir("/dev/shm")
    except OSError:
        return
    for name in filter(_KNOWN.match, names):
        try:
            facts = os.lstat(os.path.join("/dev/shm", name))
        except OSError:
            continue
        if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
            yield name


def _of_system_v() -> Iterator[Tuple[str, str, int]]:
    """Yield System V's segments of this user that nobody has attached: number, the process that made it, and when."""
    for line in (read("/proc/sysvipc/shm") or b"").decode().split("\n")[1:]:
        words = line.split()
        if len(words) > 13 and words[6] == "0" and words[7] == str(os.getuid()):
            yield words[1], words[4], int(words[13])


def _remove_folder(node_folder: str, attempt: str) -> None:
    """Remove /tmp and the home of a contained container."""
    scratch = os.path.join(node_folder, "slurmddp-{}".format(os.getuid()))
    try:
        facts = os.lstat(scratch)
    except OSError:
        return
    if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
        subprocess.run(["rm", "-rf", "--one-file-system", "--", os.path.join(scratch, attempt)], check=False)


def clean(variables: Mapping[str, str], host: str) -> None:
    """Clean up, and write the report."""
    attempt, logs = variables["SLURMDDP_SWEEP"], variables["SLURMDDP_LOGS"]
    sessions = (read(os.path.join(logs, "sessions", host)) or b"").split()  # which node.sh has noted
    started = variables.get("SLURMDDP_STARTED", "")
    sweep = Sweep(
        attempt,
        variables["SLURMDDP_RUN"],
        variables.get("SLURM_JOB_ID", ""),
        int(started) if started.isdigit() else 0,
        {int(number) for number in sessions if number.isdigit()},
    )
    if not sweep.end_processes():
        print("slurmddp: node {}: processes of {} are still running".format(host, attempt), file=sys.stderr)
    sweep.remove_shared_memory()
    _remove_folder(variables["SLURMDDP_NODE_FOLDER"], attempt)
    folder = os.path.join(logs, "sweep")
    os.makedirs(folder, exist_ok=True)
    part = os.path.join(folder, ".{}.part".format(host))
    with open(part, "w") as file:
        file.write("".join(line + "\n" for line in sweep.found))
    os.rename(part, os.path.join(folder, host))


def main(arguments: Sequence[str]) -> int:
    """Clean up after the attempt that the environment names."""
    variables = os.environ
    attempt = variables.get("SLURMDDP_SWEEP", "")
    if not attempt or "/" in attempt:
        print("slurmddp: SLURMDDP_SWEEP={} is no rendezvous id".format(attempt), file=sys.stderr)
        return 2
    local = variables.get("SLURMDDP_SCHEDULER", "slurm") != "slurm"
    host = socket.gethostname() if local else variables.get("SLURMD_NODENAME") or socket.gethostname()
    clean(variables, host)
    return 0
