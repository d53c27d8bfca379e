"""What node.sh checks before its ranks start: the binds, the image, and Python in the container."""

import os
import subprocess
import zlib
from typing import List, Mapping, Sequence, Tuple

from slurmddp.records.job_events import USER
from slurmddp.records.refusal import Refused
from slurmddp.supervisor.node import answer

#: Bytes of an image's head, which holds a number of its own, and of its tail, which holds what lies last.
_PART = 1 << 20

#: For any Python, however old: whether it is new enough, what it lacks, its version and its path.
_LOOK = """
import importlib.util, sys
lacks = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
print(sys.version_info >= (3, 10), (lacks + ["nothing"])[0], "%d.%d" % sys.version_info[:2], sys.executable)"""


def mounts(arguments: Sequence[str]) -> int:
    """Print what the preflight compares of the image. Refuse binds that are missing: TOGETHER IMAGE BIND..."""
    together, image, *binds = arguments
    return answer(together, lambda: _mounts(image, binds))


def _mounts(image: str, binds: Sequence[str]) -> str:
    lacks = _missing([bind.partition(":")[0] for bind in binds if bind != "--bind"])
    if lacks:
        raise Refused(
            "cannot bind {} - mount or create it on this node, or correct container.binds".format(", ".join(lacks))
        )
    if not image:
        return ""
    path = image + "/.singularity.d/labels.json" if os.path.isdir(image) else image
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(_PART)
            file.seek(max(size - _PART, 0))
            checksum = zlib.crc32(head + file.read(_PART))
    except OSError as error:
        raise Refused("cannot read the image {}: {}".format(path, error.strerror)) from error
    return "{} bytes, checksum {}".format(size, checksum)


def _missing(sources: Sequence[str]) -> List[str]:
    """Return the sources of binds that are missing, each with why: the container would not start, and name only one."""
    lacks, patience = [], 10.0  # seconds, for the first that does not answer
    for source in sources:
        words = ["stat", "-L", "-c", "yes", "--", source]
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            said = process.communicate(timeout=patience)[0].decode("utf-8", "surrogateescape").strip()
        except subprocess.TimeoutExpired:
            said, patience = "no answer", 1.0  # on a dead mount, it cannot be interrupted: nobody waits for it
        except OSError as error:
            said = "stat cannot be started, {}".format(error.strerror)
        if said != "yes":
            lacks.append("{} ({})".format(source, said.rpartition(": ")[2]))
    return lacks


def python(arguments: Sequence[str]) -> int:
    """Refuse a Python that cannot run the ranks: TOGETHER RUNTIME PYTHON NAME=PYTHONPATH RUN CONTAINER..."""
    together, runtime, program, path, run, *container = arguments
    modules = ["torch", "accelerate"] if os.path.exists(run + "/accelerate.yaml") else ["torch"]
    return answer(together, lambda: _python(runtime, program, path, modules, container))


def _python(runtime: str, program: str, path: str, modules: Sequence[str], container: Sequence[str]) -> str:
    where, todo = "in the image: correct it", "install it in the image, or correct container.python"
    if runtime == "none":
        where = "on this node: correct it, or load or activate it in setup"
        todo = "name its Python, --set container.python=FILE"
        todo += ", or add `setup: [source .../activate]`, or conda or module lines"
    name, _, value = path.partition("=")
    code, said = _last_line([*container, program, "-c", _LOOK, *modules], dict(os.environ, **{name: value}))
    if code:
        # Is it Python, or does the container itself not start?
        there, _ = _last_line([*container, "/bin/sh", "-c", 'command -v "$0"', program], os.environ)
        if there == 0:
            raise Refused("container.python: {} does not work: {}".format(program, said), USER)
        if there in (1, 127):
            raise Refused("container.python: there is no {} {}".format(program, where), USER)
        raise Refused("cannot start {}: {}".format(program, said))
    new, lacks, version, found = (said.split(None, 3) + [""] * 4)[:4]
    if new == "False":
        raise Refused("container.python: {} is Python {}; the ranks need 3.10 or newer".format(found, version), USER)
    if lacks in modules:
        raise Refused("no {} in {}: {}".format(lacks, found, todo), USER)
    return ""


def _last_line(command: Sequence[str], environment: Mapping[str, str]) -> Tuple[int, str]:
    """Return a command's exit code, as a shell has it, and the last line that it prints."""
    try:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    except OSError as error:
        return 127, str(error.strerror)
    lines = done.stdout.decode("utf-8", "surrogateescape").rstrip("\n").split("\n")
    return done.returncode, lines[-1]
