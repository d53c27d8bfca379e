"""PID 1 of a host: starts its daemons, reaps what dies. `host_init.py fabric`: PID 1 of the whole cluster.

Standard library only, and no import from this package: it runs inside a host, with the host's own Python.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
CONTROLLER = "ctl"
CONTROLLER_PORT = 6817
ACCOUNTING_PORT = 6819
ACCOUNTING_CONFIGURATION = Path("/etc/slurm/slurmdbd.conf")
DATABASE, DATABASE_SOCKET = Path("/var/lib/mysql"), Path("/run/mysqld/mysqld.sock")


def say(text: str) -> None:
    """A line in the host's log, /var/log/host.log."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def make_run_folders() -> None:
    """The folders in /run that systemd-tmpfiles would make: /run is fresh at every start."""
    for name, owner in (("munge", "munge"), ("slurm", "root"), ("mysqld", "slurm")):
        folder = Path("/run") / name
        folder.mkdir(mode=0o755)
        subprocess.run(["chown", owner, str(folder)], check=True)
    lock = Path("/run/lock")
    lock.mkdir()
    lock.chmod(0o1777)


def start(command: list[str], user: str | None = None) -> subprocess.Popen[bytes]:
    """Start a daemon in the foreground, so that its end is seen here."""
    say(f"starting {' '.join(command)}")
    group = user if user else None
    return subprocess.Popen(
        command,
        user=user,
        group=group,
        extra_groups=[] if user else None,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def wait_until(condition: Callable[[], bool], what: str, timeout: float = 10) -> None:
    """Wait for a condition; when the time is up, say so and go on as a real host would."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            say(f"not within {timeout:.0f} s: {what}")
            return
        time.sleep(0.02)


def answers(port: int) -> bool:
    """True where something listens on that port of the controller's host."""
    try:
        socket.create_connection((CONTROLLER, port), timeout=1).close()
    except OSError:
        return False
    return True


def start_accounting() -> dict[int, str]:
    """The database and slurmdbd; {pid: name}. Nobody but slurmdbd reaches the database: it listens on a socket only."""
    if not DATABASE.exists():
        DATABASE.mkdir(mode=0o700)
        subprocess.run(["chown", "slurm", str(DATABASE)], check=True)
        install = ["mariadb-install-db", "--user=slurm", f"--datadir={DATABASE}", "--skip-test-db"]
        subprocess.run([*install, "--auth-root-authentication-method=normal"], check=True, stdin=subprocess.DEVNULL)
    options = [f"--datadir={DATABASE}", f"--socket={DATABASE_SOCKET}", "--skip-networking", "--skip-grant-tables"]
    started = {start(["mariadbd", "--no-defaults", *options], user="slurm").pid: "mariadbd"}
    wait_until(DATABASE_SOCKET.exists, "the database has a socket", timeout=30)
    # slurmdbd would make it, over a connection that failed before. MariaDB's client 11.8.9 forgets its limits then, and
    # refuses the first answer ("exceeds maximum allowed number of columns (=0)").
    client = ["mariadb", "--no-defaults", f"--socket={DATABASE_SOCKET}"]
    subprocess.run([*client, "-e", "CREATE DATABASE IF NOT EXISTS slurm"], check=True, stdin=subprocess.DEVNULL)
    started[start(["slurmdbd", "-D"], user="slurm").pid] = "slurmdbd"
    wait_until(lambda: answers(ACCOUNTING_PORT), "slurmdbd answers", timeout=30)
    return started


def start_daemons(host: str) -> dict[int, str]:
    """munged on every host, the controller on one, slurmd on the nodes; {pid: name}."""
    daemons = {start(["munged", "--foreground"], user="munge").pid: "munged"}
    wait_until(MUNGE_SOCKET.exists, "munged has a socket")
    if host == CONTROLLER:
        if ACCOUNTING_CONFIGURATION.exists():
            daemons.update(start_accounting())
        daemons[start(["slurmctld", "-D"]).pid] = "slurmctld"
    elif host.startswith("node"):
        # A slurmd that finds no controller tries again only seconds later.
        wait_until(lambda: answers(CONTROLLER_PORT), "the controller answers", timeout=60)
        daemons[start(["slurmd", "-D", "-N", host]).pid] = "slurmd"
    return daemons


def reap(daemons: dict[int, str]) -> None:
    """Collect every dead process for ever. A daemon that ends stays ended: a test wants to see it."""
    # Blocked, so that a child's death that falls between two waits is not lost.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            pid, status = 0, 0
        if pid:
            if pid in daemons:
                say(f"{daemons.pop(pid)} ended with {os.waitstatus_to_exitcode(status)}")
            continue
        signal.sigwait({signal.SIGCHLD})


def main() -> None:
    host = sys.argv[1]
    if host == "fabric":
        # /proc is the machine's here: the name by which the machine knows this process.
        print(Path("/proc/self").readlink(), flush=True)
        reap({})
    make_run_folders()
    reap(start_daemons(host))


if __name__ == "__main__":
    main()
