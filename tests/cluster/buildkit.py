"""Docker's own builder, BuildKit, as the judge of what a Dockerfile means: Debian's dockerd, not installed.

No service starts, no bridge and no firewall rule is made; all that it has is below one folder, and gone with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from .errors import ClusterUnavailable

PACKAGES = ("docker.io", "containerd", "runc")
#: Of Debian 13 and later, where docker.io has neither.
_MORE = ("docker-cli", "docker-buildx")
_START = 60.0


class Docker:
    """A running dockerd. `command` runs its client."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self.socket = folder / "docker.sock"
        path = f"{programs}/usr/sbin:{programs}/usr/bin:{os.environ['PATH']}"
        plugins = programs / "usr/libexec/docker/cli-plugins"
        (folder / "home/cli-plugins").mkdir(parents=True)
        for plugin in plugins.glob("*"):
            (folder / "home/cli-plugins" / plugin.name).symlink_to(plugin)
        client = {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": f"{folder}/home", "DOCKER_BUILDKIT": "1"}
        self.environment = {"PATH": path, "HOME": f"{folder}/home", **client}

    def command(self, *words: str, timeout: float = 300) -> str:
        """Run `docker WORDS`; return what it says. An error has its stderr."""
        done = subprocess.run(
            ["docker", *words], env=self.environment, text=True, capture_output=True, timeout=timeout, check=False
        )
        assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"
        return done.stdout

    def build(self, tag: str, context: Path, *options: str) -> None:
        """Build context/Dockerfile with BuildKit."""
        self.command("build", "--progress=plain", "--network=host", "--tag", tag, *options, str(context))


@contextlib.contextmanager
def started() -> Iterator[Docker]:
    """Start dockerd with all it has in a folder of its own, and end it. Raises ClusterUnavailable if it cannot."""
    # The paths of its sockets have 107 characters at most
    with tempfile.TemporaryDirectory(prefix="docker-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield from _started(Path(folder))


def _started(folder: Path) -> Iterator[Docker]:
    programs = folder / "programs"
    _unpack(programs, folder / "packages")
    docker = Docker(programs, folder)
    (folder / "daemon.json").write_text("{}")
    options = {
        "config-file": f"{folder}/daemon.json", "data-root": f"{folder}/data", "exec-root": f"{folder}/exec",
        "pidfile": f"{folder}/pid", "host": f"unix://{docker.socket}", "bridge": "none", "iptables": "false",
        "ip6tables": "false",
    }  # fmt: skip
    # In a mount namespace of its own: a test that is killed leaves no mounts behind
    command = ["unshare", "--mount", "dockerd", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        daemon = subprocess.Popen(command, env=docker.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + _START
        while not docker.socket.exists() or _fails(docker):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise ClusterUnavailable(f"dockerd does not start here:\n{(folder / 'log').read_text()[-2000:]}")
            time.sleep(0.2)
        yield docker
    finally:
        daemon.terminate()
        try:
            daemon.wait(timeout=60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _fails(docker: Docker) -> bool:
    return (
        subprocess.run(["docker", "version"], env=docker.environment, capture_output=True, check=False).returncode > 0
    )


def _unpack(target: Path, folder: Path) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise ClusterUnavailable("Debian's dockerd needs root and apt-get")
    folder.mkdir()
    for name in (*PACKAGES, *_MORE):
        done = subprocess.run(
            ["apt-get", "download", "-q", name], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode != 0 and name in PACKAGES:
            raise ClusterUnavailable(f"apt-get download {name} failed:\n{done.stderr[-500:]}")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "--extract", str(package), str(target)], check=True)
