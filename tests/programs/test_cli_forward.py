"""`slurmddp debug port` through the real node.sh, on a run of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.helpers import Desk
from tests.sshd import needs_sshd, started
from tests.strangers import needs_root, stranger

#: Python, with a torch that node.sh finds; but as the ranks' agent, it waits for the stop file.
PYTHON = f"""#!/bin/bash
export PYTHONPATH="$PYTHONPATH:${{0%/*}}"
[[ "$2" == slurmddp.runtime.agent ]] || exec {sys.executable} "$@"
echo begun
until [[ -e "$SLURMDDP_STOP_FILE" ]]; do sleep 0.1; done
"""


@pytest.fixture
def echo() -> Iterator[int]:
    """A service that sends back what it got once that has ended; its port."""

    class Echo(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(BrokenPipeError):  # of the one that left
                self.wfile.write(self.rfile.read())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def through(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        threading.Thread(target=lambda: (connection.sendall(data), connection.shutdown(socket.SHUT_WR))).start()
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@contextlib.contextmanager
def training(desk: Desk) -> Iterator[Path]:
    """A run that trains until it is asked to stop; its folder."""
    desk.write("train.py", "")
    desk.program("python", PYTHON)
    (desk.bin / "torch.py").touch()
    words = ("run", "train.py", "--site", "here", "--set", f"container.python={desk.bin}/python")
    process = subprocess.Popen(
        [sys.executable, "-m", "slurmddp", *words],
        cwd=desk.project, env=desk.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    (run,) = (desk.project / "runs").iterdir()
    try:
        yield run
    finally:
        (run / "stop").touch()
        process.communicate(timeout=240)


@contextlib.contextmanager
def forwarding(desk: Desk, *words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "slurmddp", *words]
    process = subprocess.Popen(command, cwd=desk.project, env=desk.environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


def test_a_port_of_the_node_is_a_port_of_this_machine(desk: Desk, echo: int) -> None:
    port, _ = free_ports()
    with training(desk) as run:
        with socket.create_server(("127.0.0.1", port)):
            refused = desk.command("debug", "port", run.name, str(echo), "--local-port", str(port))
        assert (refused.code, refused.out) == (2, "") and f"port {port} cannot be used on this machine" in refused.err
        with forwarding(desk, "debug", "port", "last", str(echo), "--local-port", str(port)) as process:
            assert said(process) == f"http://127.0.0.1:{port} leads to the node; Ctrl-C ends it\n"
            data = [os.urandom(size) for size in (0, 1, 3_000_000, 5_000_000)]
            with ThreadPoolExecutor(4) as pool:
                assert list(pool.map(lambda each: through(port, each), data)) == data
            with socket.create_connection(("127.0.0.1", port)) as left:
                left.sendall(b"x" * 30_000_000)  # more than sockets hold; and nobody reads what comes back
            assert through(port, b"after") == b"after"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0 and said(process) == ""
    over = desk.command("debug", "port", "last", str(echo))
    assert over.code == 2 and "is not running: " in over.err


def test_a_port_that_nobody_serves_and_the_end_of_the_run_are_told(desk: Desk) -> None:
    port, dead = free_ports()
    with training(desk), forwarding(desk, "debug", "port", "last", str(dead), "--local-port", str(port)) as process:
        said(process)
        assert through(port, b"") == b""
        assert f"has no program of yours on port {dead}: " in said(process)
        (started,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(started), signal.SIGKILL)  # what Slurm does to all of the job's steps
        assert process.wait(60) == 1
        assert said(process).startswith("slurmddp: the connection to the node has ended")


def bob_connects(pipe: Connection, port: int) -> None:
    try:
        pipe.send(through(port, b"from bob"))
    except ConnectionError:
        pipe.send(b"")
    pipe.recv()


def bob_listens(pipe: Connection, host: str, port: int) -> None:
    """Tell what each client sends, and answer it."""
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as accepts:
        pipe.send(b"listens")
        while True:
            connection, _ = accepts.accept()
            with connection, contextlib.suppress(ConnectionError):
                pipe.send(connection.recv(100))
                connection.sendall(b"from bob")


@needs_root
def test_no_other_user_is_at_either_end(desk: Desk, echo: int) -> None:
    port, other = free_ports()
    words = ("--local-port", str(port))
    who = "it belongs to another user, nobody (uid 65534)"
    with training(desk):
        with forwarding(desk, "debug", "port", "last", str(echo), *words) as process, contextlib.ExitStack() as stack:
            said(process)
            with stranger(bob_connects, port) as bob:
                assert bob.recv() == b""
            assert said(process) == f"slurmddp: refused a connection to port {port}: {who}\n"
            if "::1" in {each[4][0] for each in socket.getaddrinfo("localhost", echo)}:
                stack.enter_context(stranger(bob_listens, "::1", echo)).recv()
            assert through(port, b"mine") == b"mine"  # past bob, who listens on ::1
        with stranger(bob_listens, "127.0.0.1", other) as bob:
            assert bob.recv() == b"listens"
            with forwarding(desk, "debug", "port", "last", str(other), *words) as process:
                said(process)
                assert through(port, b"mine") == b""
                assert bob.recv() == b""  # nothing of ours
                line = said(process)
                assert f"has no program of yours on port {other}: " in line and f"127.0.0.1: {who}" in line


@needs_sshd
def test_it_reaches_across_to_a_laptop(desk: Desk, tmp_path: Path, echo: int) -> None:
    there, (port, _) = Desk(tmp_path / "there"), free_ports()
    path = f"export PATH={there.bin}:/usr/bin:/bin PYTHONPATH={there.environment['PYTHONPATH']}"
    (there.home / ".bash_profile").write_text(f"echo Welcome to the cluster\n{path}\n")
    there.program("slurmddp", f'#!/bin/bash\nexec {sys.executable} -m slurmddp "$@"\n')
    with training(there) as run, started(desk, tmp_path, f"SetEnv HOME={there.home}") as sshd:
        words = ("--host", "login", "debug", "port", str(run), str(echo), "--local-port", str(port))
        with forwarding(desk, *words) as process:
            while (line := said(process)) and not line.startswith("http"):  # the login node's greeting
                pass
            data = os.urandom(3_000_000)
            assert through(port, data) == data
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        wrong = sshd.run("debug", "port", str(run))
        assert wrong.code == 2 and "PORT" in wrong.err
