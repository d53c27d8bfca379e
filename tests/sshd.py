"""A real sshd of a test's own on a loopback port, and a laptop that knows it as `login`."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers import Desk, Result

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
_MISSING = [name for name, path in (("sshd", SSHD), ("rsync", shutil.which("rsync"))) if path is None]
needs_sshd = pytest.mark.skipif(bool(_MISSING), reason=f"not installed: {' '.join(_MISSING)} (make system)")


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it is true, at most two minutes."""
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


class Sshd:
    """The server, with the folder of its keys and log, and the commands of the laptop."""

    def __init__(self, laptop: Desk, folder: Path, sockets: Path, *settings: str) -> None:
        self.laptop, self.log = laptop, folder / "sshd.log"
        for name in ("host_key", "key"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        basic = (
            f"Port {port}", "ListenAddress 127.0.0.1", f"HostKey {folder}/host_key", "PidFile none", "StrictModes no",
            f"AuthorizedKeysFile {folder}/key.pub", "PasswordAuthentication no", "KbdInteractiveAuthentication no",
            "PermitRootLogin yes", "UsePAM no",
        )  # fmt: skip
        (folder / "sshd_config").write_text("\n".join((*basic, *settings, "")))
        key = (folder / "host_key.pub").read_text()
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {key}")
        (folder / "ssh_config").write_text(
            f"Host login\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n"
            f"  IdentityFile {folder}/key\n  IdentitiesOnly yes\n  UserKnownHostsFile {folder}/known_hosts\n"
        )
        # ssh finds ~/.ssh by the user's entry in the system, not by HOME.
        laptop.program("ssh", f'#!/bin/bash\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
        laptop.environment["XDG_RUNTIME_DIR"] = str(sockets)
        if os.getuid() == 0:
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd of root does not start without this folder
        self.process = subprocess.Popen([str(SSHD), "-D", "-f", str(folder / "sshd_config"), "-E", str(self.log)])
        wait_for(lambda: self.log.is_file() and "listening" in self.log.read_text())

    def run(self, *words: str, **variables: str) -> Result:
        """Run `slurmddp --host login WORDS` on the laptop."""
        return self.laptop.command("--host", "login", *words, **variables)

    def cut(self) -> None:
        """Kill what sshd started for each connection."""
        for child in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split():
            os.kill(int(child), signal.SIGKILL)

    def close(self) -> None:
        """End the connections, then sshd."""
        if self.process.poll() is None:
            self.cut()
            self.process.terminate()
        self.process.wait(timeout=30)


@contextmanager
def started(laptop: Desk, folder: Path, *settings: str) -> Iterator[Sshd]:
    """A server for the length of a with block. settings: more lines of sshd_config."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="s") as sockets:  # short, as sockets need it
        server = Sshd(laptop, folder, Path(sockets), *settings)
        try:
            yield server
        finally:
            server.close()
