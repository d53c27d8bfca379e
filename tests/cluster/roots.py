"""What the cluster is made of: the hosts' Debian root, what images start from, the login side's venv."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import debian
from .errors import ClusterUnavailable
from .variant import variant

CHECKOUT = Path(__file__).resolve().parents[2]
USERS = {"alice": 1000, "bob": 1001}  # alice runs the jobs; bob is another user of the same nodes

IMAGE_SUITES = ("bookworm",)
IMAGE_PYTHON = "3.11"
IMAGE_PACKAGES = ("python3", "python3-pip", "python3-venv", "python-is-python3", "procps")
IMAGE_REQUIREMENTS = ("torch==2.13.0", "numpy", "pillow")
# Where an index's plain torch is the CUDA build (gigabytes), "--index-url ADDRESS" leads to a CPU one.
PIP_ARGUMENTS_VARIABLE = "SLURMDDP_CLUSTER_PIP_ARGS"
LOCK = CHECKOUT / "requirements.lock"  # the versions of everything that pip installs

# Mount points and the users are part of the root, so that a host needs no set-up of its own for them.
HOST_FILES = Path(__file__).resolve().parent / "rootfs"  # laid over the root: every file in it is a program
HOST_HOOKS = (
    *(
        f'chroot "$1" useradd --uid {number} --user-group --no-create-home --shell /bin/bash {name}'
        for name, number in USERS.items()
    ),
    'mkdir -p "$1/opt/slurmddp" "$1/opt/slurmddp-venv" "$1/opt/images" "$1/var/spool/slurmd"',
)
# EXTERNALLY-MANAGED would refuse the `pip install` that a definition's %post may do; no training image does.
IMAGE_HOOKS = (f'rm -f "$1/usr/lib/python{IMAGE_PYTHON}/EXTERNALLY-MANAGED"',)
PLAIN_IMAGE, TORCH_IMAGE = "bookworm", "bookworm-torch"
PRUNED_FROM_TORCH = ("test", "include", "share/cmake", "bin/protoc*", "bin/test_*")


def login_requirements() -> tuple[str, ...]:
    """What the login side of slurmddp needs, as the checkout's pyproject.toml says."""
    if sys.version_info < (3, 11):
        raise ClusterUnavailable("the test cluster needs Python 3.11 or newer on the machine")
    import tomllib  # not in 3.10, where pytest still has to be able to say the above

    return tuple(tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"])


def make_host_root(target: Path) -> None:
    """The root that all hosts share: Debian with Slurm, munge, Apptainer, Python and the user."""
    debian.make_root(target, variant().suites, variant().packages, hooks=HOST_HOOKS)
    for source in host_files():
        program = target / source.relative_to(HOST_FILES)
        program.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, program)
        program.chmod(0o755)


def host_files() -> list[Path]:
    """The files that are laid over the hosts' root."""
    return sorted(path for path in HOST_FILES.rglob("*") if path.is_file())


def make_image_roots(target: Path) -> None:
    """What test images start from (`Bootstrap: localimage`): plain Debian with Python, and one with torch.

    The download runs beside the Debian part: one waits for the network, the other for the processor.
    """
    target.mkdir()
    wheels = target.with_name(target.name + ".wheels")
    download = start_wheel_download(wheels, IMAGE_REQUIREMENTS, IMAGE_PYTHON)
    plain, with_torch = target / PLAIN_IMAGE, target / TORCH_IMAGE
    try:
        debian.make_root(plain, IMAGE_SUITES, IMAGE_PACKAGES, hooks=IMAGE_HOOKS)
    finally:
        failure = finish(download)
    if failure:
        raise ClusterUnavailable(f"pip could not download {' '.join(IMAGE_REQUIREMENTS)}:\n{failure}")
    subprocess.run(["cp", "-a", str(plain), str(with_torch)], check=True)
    install_torch(with_torch, wheels)
    shutil.rmtree(wheels)
    for root in (plain, with_torch):
        empty_devices(root)
        make_readable(root)


def install_torch(root: Path, wheels: Path) -> None:
    """Install torch into an image's root, without what only a developer of torch needs, and compiled."""
    pip = ["python3", "-m", "pip", "install", "-q", "--no-compile", "--no-index", "--no-warn-script-location"]
    pip += ["--root-user-action=ignore", "--find-links", "/mnt", *IMAGE_REQUIREMENTS]
    run_in_root(root, pip, binds={wheels: "/mnt"})
    packages = f"/usr/local/lib/python{IMAGE_PYTHON}/dist-packages"
    for pattern in PRUNED_FROM_TORCH:
        for path in (root / packages.lstrip("/") / "torch").glob(pattern):
            remove(path)
    # Compiled here once, on all cores: in a read-only image every import would compile again.
    # Some packages carry files for other versions of Python, which do not compile: hence no check.
    run_in_root(root, ["python3", "-m", "compileall", "-q", "-j", "0", packages], check=False)


def make_login_venv(target: Path, host_root: Path) -> None:
    """The venv at /opt/slurmddp-venv on the hosts: slurmddp's own requirements and a path to the checkout."""
    wheels = target.with_name(target.name + ".wheels")
    requirements = login_requirements()
    if failure := finish(start_wheel_download(wheels, requirements, variant().python)):
        raise ClusterUnavailable(f"pip could not download {' '.join(requirements)}:\n{failure}")
    target.mkdir()
    binds = {target: "/opt/slurmddp-venv", wheels: "/mnt"}
    venv = "/opt/slurmddp-venv"
    run_in_root(host_root, ["python3", "-m", "venv", venv], binds=binds)
    pip = [f"{venv}/bin/python", "-m", "pip", "install", "-q", "--no-index", "--root-user-action=ignore"]
    run_in_root(host_root, [*pip, "--find-links", "/mnt", *requirements], binds=binds)
    (target / f"lib/python{variant().python}/site-packages/slurmddp-checkout.pth").write_text("/opt/slurmddp\n")
    shutil.rmtree(wheels)


def python_with_pip() -> str:
    """A Python of this machine that has pip, and with it the machine's own index configuration."""
    for candidate in (sys.executable, shutil.which("python3"), "/usr/bin/python3"):
        if candidate is None or not Path(candidate).exists():
            continue
        if subprocess.run([candidate, "-m", "pip", "--version"], capture_output=True).returncode == 0:
            return candidate
    raise ClusterUnavailable("no Python on this machine has pip, which downloads the wheels for the cluster")


def start_wheel_download(folder: Path, requirements: Sequence[str], python: str) -> subprocess.Popen[str]:
    """Start `pip download` of wheels for that Python into `folder`, in the machine's own network."""
    folder.mkdir()
    command = [
        python_with_pip(),
        "-m",
        "pip",
        "download",
        "-q",
        "--only-binary=:all:",
        "--python-version",
        python,
    ]
    command += [
        "--dest",
        str(folder),
        "--constraint",
        str(LOCK),
        *shlex.split(os.environ.get(PIP_ARGUMENTS_VARIABLE, "")),
        *requirements,
    ]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def finish(download: subprocess.Popen[str]) -> str:
    """Wait for a download; the end of what it said where it failed, else nothing."""
    _, said = download.communicate()
    return (debian.tail(said) or f"exit code {download.returncode}") if download.returncode else ""


def run_in_root(
    root: Path, command: Sequence[str], *, binds: dict[Path, str] | None = None, check: bool = True
) -> None:
    """Run a command as root inside `root`, with its mounts in a namespace that goes with it."""
    mounts = [["--bind", "/dev", f"{root}/dev"], ["-t", "proc", "proc", f"{root}/proc"]]
    mounts += [["--bind", str(source), f"{root}{inside}"] for source, inside in (binds or {}).items()]
    script = " && ".join(shlex.join(["mount", *mount]) for mount in mounts)
    clean = [
        "env",
        "-i",
        "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin",
        "HOME=/root",
        "LANG=C.UTF-8",
        "PIP_DISABLE_PIP_VERSION_CHECK=1",
    ]
    script += " && exec " + shlex.join([*clean, "chroot", str(root), *command])
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "sh", "-c", script],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode != 0:
        raise ClusterUnavailable(f"{shlex.join(command)} failed in {root}:\n{debian.tail(done.stdout + done.stderr)}")


def empty_devices(root: Path) -> None:
    """Remove the device nodes of a root, which an unprivileged build could not make again."""
    for path in (root / "dev").iterdir():
        remove(path)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def make_readable(root: Path) -> None:
    """Let everyone read all of a root: an unprivileged build copies it as the user."""
    subprocess.run(["chmod", "-R", "a+rX", str(root)], check=True)
