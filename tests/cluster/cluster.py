"""The cluster as one object: up, run on a host, break a host, see what is left, down."""

import os
import secrets
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from . import host, network, preflight
from .build import Parts, build, locked
from .errors import ClusterError
from .host import ADDRESSES, CONTROLLER, LOGIN, NODES, USER_IDS
from .process import ProcessId, processes_of
from .roots import USERS
from .state import Layout, State, state_base

# Inside the hosts: what a definition with `Bootstrap: localimage` starts from.
TORCH_IMAGE_ROOT = "/opt/images/bookworm-torch"
PLAIN_IMAGE_ROOT = "/opt/images/bookworm"
# The states that a job does not leave again, unless it is requeued.
FINISHED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"})


class Cluster:
    """One instance, found by its name: a new object for the name of a running instance drives that instance.

    Hosts: ctl (slurmctld), login, node1 to node3 (slurmd). The user is alice, and bob is
    a second one who attacks her; /home is shared by all hosts.
    """

    hosts = tuple(ADDRESSES)
    nodes = NODES
    torch_image_root = TORCH_IMAGE_ROOT
    plain_image_root = PLAIN_IMAGE_ROOT

    def __init__(self, name: str = "default", *, accounting: bool = False) -> None:
        """accounting: whether up() starts slurmdbd as well, so that sacct knows what was; else it knows nothing."""
        self.name = name
        self.accounting = accounting
        self.layout = Layout(state_base() / name)
        self._launched: list[subprocess.Popen[str]] = []

    # --- the whole cluster ---

    @classmethod
    @contextmanager
    def started(cls, name: str = "default", *, accounting: bool = False) -> Iterator["Cluster"]:
        """A cluster for the length of a with block."""
        cluster = cls(name, accounting=accounting)
        cluster.up(owned=True)
        try:
            yield cluster
        finally:
            cluster.down()

    def up(self, *, owned: bool = False, report: Callable[[str], None] = lambda line: None) -> None:
        """Build what is not built yet, start every host, wait until Slurm has all nodes idle.

        owned: the instance is this process's; once that is gone, the next up of any instance removes it.
        Raises ClusterUnavailable where this machine cannot, ClusterError where the cluster does not come up.
        """
        preflight.check_machine(state_base())
        parts = build(report)
        remove_orphans(report)
        if self.is_up():
            raise ClusterError(f"the cluster {self.name} is up already")
        with locked(state_base() / "lock"):
            self._clear()
            try:
                self._start(parts, owned)
            except BaseException:
                self._clear()
                raise

    def _start(self, parts: Parts, owned: bool) -> None:
        self.layout.folder.mkdir(parents=True)
        host.write_shared(self.layout, parts, secrets.token_bytes(128), self.accounting)
        fabric, process = host.start_fabric(self.layout)
        self._launched.append(process)
        state = State(fabric, ProcessId.of(os.getpid()) if owned else None, parts)
        state.save(self.layout.state)
        with ThreadPoolExecutor() as pool:
            started = list(pool.map(lambda name: host.start_host(name, fabric, self.layout, parts), self.hosts))
        for name, (init, launcher) in zip(self.hosts, started, strict=True):
            state.hosts[name] = init
            self._launched.append(launcher)
        state.save(self.layout.state)
        self.wait_nodes(timeout=90 if self.accounting else 30)

    def down(self) -> None:
        """Kill everything of this instance and remove its folder; nothing to do is no error."""
        with locked(state_base() / "lock"):
            self._clear()

    def _clear(self) -> None:
        if self.layout.state.is_file():
            self.state().fabric.kill()  # and the kernel kills all below it
        for process in self._launched:
            process.wait(60)
        self._launched.clear()
        host.remove_cgroups(self.layout)
        if self.layout.folder.exists():
            subprocess.run(["rm", "-rf", "--one-file-system", str(self.layout.folder)], check=True)

    def is_up(self) -> bool:
        """True while this instance runs, whatever state its hosts are in."""
        return self.layout.state.is_file() and self.state().fabric.alive()

    def reset(self, timeout: float = 180) -> None:
        """As good as new for the next test: cables mended, hosts up, slurmctld there, no jobs, all nodes idle.

        No test asserts how long this takes: on a busy machine Slurm takes minutes to see a job's end on each node.
        """
        for name in self.hosts:
            if not self.host_is_up(name):
                self.restart_host(name)
            self.mend_network(name)
            network.drop_nothing(self.init_of(name).pid)
            self.slow_link(name, None)
        if not self.controller_answers():
            self.restart_controller()
        for user in USERS:  # scancel takes one at a time
            self.run(LOGIN, ["scancel", f"--user={user}"], user=user)
        resume = ["scontrol", "update", f"NodeName={','.join(NODES)}", "State=RESUME"]
        self.run(LOGIN, resume, user="root", check=False)  # an error for each node that needs none

        def queue_is_empty() -> bool:
            return not self.run(LOGIN, ["squeue", "--noheader"]).stdout.strip()

        self.wait_for(queue_is_empty, "the queue is empty", timeout)
        self.wait_nodes(timeout=timeout)

    # --- commands ---

    def run(
        self,
        host_name: str,
        argv: Sequence[str],
        *,
        user: str = "alice",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: str | None = None,
        timeout: float | None = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host, as a fresh login of that user would; cwd is the home where not given.

        Raises ClusterError (with what the command said) where it fails and `check` is true, and
        subprocess.TimeoutExpired after `timeout` seconds, when everything below it is dead.
        """
        done = host.run_entered(self.entry(host_name, argv, user=user, cwd=cwd, env=env), stdin, timeout)
        if check and done.returncode != 0:
            raise ClusterError(
                f"{shlex.join(argv)} on {host_name} ended with {done.returncode}\n"
                f"stdout: {done.stdout}\nstderr: {done.stderr}"
            )
        return done

    def sh(
        self,
        host_name: str,
        script: str,
        *,
        user: str = "alice",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = 60,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """run() of a piece of bash."""
        return self.run(host_name, ["bash", "-c", script], user=user, cwd=cwd, env=env, timeout=timeout, check=check)

    def popen(
        self,
        host_name: str,
        argv: Sequence[str],
        *,
        user: str = "alice",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a command on a host and go on; its streams are pipes. Ending it is the caller's."""
        command = self.entry(host_name, argv, user=user, cwd=cwd, env=env)
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def entry(
        self,
        host_name: str,
        argv: Sequence[str],
        *,
        user: str = "alice",
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """The machine's command line that runs `argv` on a host."""
        return host.entry(self.init_of(host_name), argv, user, cwd, env or {})

    def machine_path(self, path: str) -> Path:
        """Where the machine sees a path below the hosts' /home or /scratch, to prepare files and to read results."""
        if Path(path).is_relative_to("/scratch"):
            inside = self.layout.scratch / Path(path).relative_to("/scratch")
            return Path(f"/proc/{self.state().fabric.pid}/root{inside}")
        return self.layout.home / Path(path).relative_to("/home")

    def write(self, path: str, text: str, *, mode: int = 0o644) -> None:
        """Write a file below /home/USER, owned by that user (/scratch: alice), with the folders it needs."""
        target = self.machine_path(path)
        owner = USERS.get(Path(path).parts[2], USERS["alice"])
        for folder in reversed(target.parents):
            if not folder.exists():
                folder.mkdir()
                os.chown(folder, owner, owner)
        target.write_text(text)
        target.chmod(mode)
        os.chown(target, owner, owner)

    # --- faults ---

    def host_is_up(self, name: str) -> bool:
        """True while the host's init lives."""
        return self.init_of(name).alive()

    def kill_host(self, name: str) -> None:
        """A power cut: everything on the host dies at once and says no goodbye on the network."""
        network.set_link(self.state().fabric.pid, name, up=False)
        self.init_of(name).kill()
        network.disconnect(self.state().fabric.pid, name)

    def restart_host(self, name: str) -> None:
        """Boot a host again on its old disk; one that runs is killed first. Does not wait for its daemons."""
        if self.host_is_up(name):
            self.kill_host(name)
        state = self.state()
        state.hosts[name], process = host.start_host(name, state.fabric, self.layout, state.parts)
        self._launched.append(process)
        state.save(self.layout.state)

    def restart_controller(self) -> None:
        """End slurmctld, as an operator does, and start it again; returns once it answers.

        A crash would be another matter: it forgets what began within the last seconds. It comes to that where
        slurmctld does not end within 10 s of a SIGTERM: now and then its threads wait for each other for ever.
        """
        for signal in ("TERM", "KILL"):
            for pid in self.daemons(CONTROLLER, "slurmctld"):
                self.run(CONTROLLER, ["kill", f"-{signal}", str(pid)], user="root", check=False)
            with suppress(ClusterError):
                self.wait_for(lambda: not self.daemons(CONTROLLER, "slurmctld"), "slurmctld is gone", 10)
                break
        self.run(CONTROLLER, ["slurmctld"], user="root")
        self.wait_for(self.controller_answers, "slurmctld answers", 30)

    def daemons(self, name: str, daemon: str) -> list[int]:
        """Process ids, as the host sees them, of what is called by that name there."""
        return [pid for pid, argv in self.processes(name, user=None) if argv[0].startswith(daemon)]

    def controller_answers(self) -> bool:
        """Whether jobs can be submitted; takes its time where it is there and silent."""
        return "is UP" in self.run(LOGIN, ["scontrol", "ping"], check=False).stdout

    def cut_network(self, name: str) -> None:
        """Pull the host's cable: it runs on, and nobody hears of it."""
        network.set_link(self.state().fabric.pid, name, up=False)

    def mend_network(self, name: str) -> None:
        """Put the cable back."""
        network.set_link(self.state().fabric.pid, name, up=True)

    def part(self, one: str, other: str) -> None:
        """Two hosts no longer reach each other, while every other host still reaches both."""
        network.drop(self.init_of(one).pid, ADDRESSES[other])
        network.drop(self.init_of(other).pid, ADDRESSES[one])

    def slow_link(self, name: str, delay: str | None, *, rate: str | None = None) -> None:
        """Delay (`100ms`, netem) or throttle (rate `1mbit`, tbf) what goes to a host; None for both ends it.

        Raises ClusterUnavailable where the kernel lacks the queueing discipline, as many lack netem.
        """
        if delay is not None:
            rules = f"netem delay {delay}" + (f" rate {rate}" if rate else "")
        else:
            rules = f"tbf rate {rate} burst 32kbit latency 400ms" if rate else ""
        network.shape(self.state().fabric.pid, name, rules)

    def processes(self, host_name: str, user: str | None = "alice") -> list[tuple[int, list[str]]]:
        """(pid, argv) of what this user (None: everyone) runs on a host, also in containers; no zombies."""
        if not self.host_is_up(host_name):
            return []
        return processes_of(self.init_of(host_name).pid, None if user is None else USER_IDS[user])

    # --- what Slurm thinks ---

    def node_states(self, *, check: bool = True) -> dict[str, str]:
        """{node: state} in sinfo's short form: idle, mix, alloc, down*, ... (check: see run)"""
        command = ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %t"]
        done = self.run(LOGIN, command, check=check)
        return dict(line.split() for line in done.stdout.splitlines())

    def wait_nodes(self, states: Mapping[str, str] | None = None, timeout: float = 60) -> None:
        """Wait until nodes have these states ({node: state}; None: all are idle). "down" is "down*" as well.

        A star is sinfo's sign for a node that does not answer: "idle*" is not idle.
        """
        wanted = dict(states or dict.fromkeys(NODES, "idle"))

        def reached() -> bool:
            found = self.node_states(check=False)
            return all(found.get(name, "").replace("down*", "down") == state for name, state in wanted.items())

        self.wait_for(reached, f"nodes are {wanted}", timeout)

    def job_state(self, job_id: int | str) -> str:
        """A job's state as scontrol says it (RUNNING, COMPLETED, ...)."""
        return self.job(job_id)["JobState"]

    def job(self, job_id: int | str) -> dict[str, str]:
        """What `scontrol show job` says, as {key: value}. A controller that is being restarted is asked again."""
        command = ["scontrol", "--oneliner", "show", "job", str(job_id)]
        deadline = time.monotonic() + 10
        while (done := self.run(LOGIN, command, check=False)).returncode != 0 and time.monotonic() < deadline:
            time.sleep(0.5)
        text = done.stdout if done.returncode == 0 else self.run(LOGIN, command).stdout
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait_job(
        self, job_id: int | str, states: Sequence[str] | frozenset[str] = FINISHED, timeout: float = 60
    ) -> str:
        """Wait until a job is in one of these states (as default: until it is over); the state it is in."""
        what = f"job {job_id} is in {'/'.join(sorted(states))}"
        self.wait_for(lambda: self.job_state(job_id) in states, what, timeout)
        return self.job_state(job_id)

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float, every: float = 0.2) -> None:
        """Wait until a condition holds; the error says what the hosts' logs say."""
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                raise ClusterError(f"not within {timeout:.0f} s: {what}\n{self.logs()}")
            time.sleep(every)

    def logs(self, lines: int = 15) -> str:
        """The ends of the hosts' logs, for a message."""
        found = []
        for name in self.hosts:
            logs = sorted((self.layout.disk(name) / "upper/var/log").glob("slurm/*.log"))
            for path in [self.layout.log(name), self.layout.disk(name) / "upper/var/log/host.log", *logs]:
                if path.is_file():
                    text = path.read_text(errors="replace").splitlines()[-lines:]
                    found += [f"--- {name} {path.name}", *text]
        return "\n".join(found)

    # --- state ---

    def init_of(self, name: str) -> ProcessId:
        """A host's PID 1, as the machine sees it."""
        hosts = self.state().hosts
        if name not in hosts:
            raise ClusterError(f"no host {name} in the cluster {self.name}; it has {', '.join(hosts) or 'none'}")
        return hosts[name]

    def state(self) -> State:
        """The instance's processes and parts, as whoever changed them last has written them down."""
        try:
            return State.load(self.layout.state)
        except FileNotFoundError:
            raise ClusterError(f"the cluster {self.name} is not up") from None


def instances() -> list[Cluster]:
    """Every instance on this machine that has a state."""
    return [Cluster(path.parent.name) for path in sorted(state_base().glob("*/state.json"))]


def remove_orphans(report: Callable[[str], None] = lambda line: None) -> None:
    """Bring down the instances of test sessions that were killed before they could."""
    for cluster in instances():
        try:
            owner = cluster.state().owner
        except ClusterError:
            continue  # another session has removed it meanwhile
        if owner and not owner.alive():
            report(f"removing the cluster {cluster.name}, whose owner is gone")
            cluster.down()
