"""The virtual environments that the benchmarks use, in .cache/benchmarks, and how commands run in them."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
CACHE = CHECKOUT / ".cache" / "benchmarks"

#: The peer. It needs no torch for `torchx run --dryrun`.
TORCHX = "torchx==0.7.0"

_KEPT = ("HOME", "LANG", "LC_ALL", "PATH", "TMPDIR", "USER")


def environment() -> dict[str, str]:
    """What both sides get: no Python variables, so bytecode is written and read as for any user."""
    return {name: os.environ[name] for name in _KEPT if name in os.environ}


def ours() -> Path:
    """bin/ of an environment with this checkout installed as a user installs it, from a wheel."""
    # Again each time: the checkout may have changed, its version number has not.
    return _made("slurmddp", [str(CHECKOUT)], again=True)


def torchx() -> Path:
    """bin/ of an environment with torchx."""
    return _made(TORCHX.replace("==", "-"), [TORCHX], again=False)


def peers() -> Path:
    """bin/ of an environment with the training libraries that we compare with, and the torch of this one."""
    torch = importlib.metadata.version("torch").split("+")[0]
    return _made("peers", [f"torch=={torch}", "numpy", "lightning-fabric", "accelerate"], again=False)


def versions(python: Path, *names: str) -> str:
    """`name version` of installed packages, as the environment's Python knows them."""
    code = "import sys, importlib.metadata as m; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    return subprocess.run(
        [python, "-c", code, *names], check=True, capture_output=True, text=True, env=environment()
    ).stdout.strip()


def _made(name: str, packages: list[str], *, again: bool) -> Path:
    folder = CACHE / name
    python = folder / "bin" / "python"
    done = folder / "installed"
    if not done.exists():
        print(f"making {folder.relative_to(CHECKOUT)} with {', '.join(packages)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        _pip(python, *packages)
        done.touch()
    elif again:
        _pip(python, "--force-reinstall", "--no-deps", *packages)
    subprocess.run([python, "-m", "compileall", "-q", folder / "lib"], stdout=subprocess.DEVNULL, check=False)
    return folder / "bin"


def _pip(python: Path, *arguments: str) -> None:
    # pip's configuration (indexes, certificates) may stand in PIP_* variables: it gets the whole environment.
    whole = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True, env=whole)
