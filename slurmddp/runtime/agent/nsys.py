"""Records this node's ranks with NVIDIA Nsight Systems, for a while: launch.nsys of the job.

`nsys launch` gives its program the variables that make CUDA, NVTX and the C library report to a session. `nsys start`
and `nsys stop` record it (Nsight Systems User Guide, "CLI command switches"). Here the program is a process that only
waits, and the ranks get its variables. So nsys is no parent of torchrun, whose signals and exit code it would swallow,
and the ranks continue if it fails.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.runtime.environment import own_node
from slurmddp.runtime.errors import RuntimeFailure, UserError
from slurmddp.runtime.journal import Events
from slurmddp.runtime.watch.process_exit import say
from slurmddp.shared.run_folder import RunFolder

_TRACE = "cuda,nvtx,osrt,cudnn,cublas"
#: Seconds for a session to begin, for a recording to be written, and for the process that waits to end.
_READY, _WRITE, _END = 60.0, 600.0, 10.0
#: On a busy machine, nsys may lose the connection to its own daemon ("Connection to the Agent lost").
_TRIES = 2
_TELL = "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps(dict(os.environ)) + '\\n'); sys.stdin.read()"


class Settings(NamedTuple):
    """What the job asks for: SLURMDDP_NSYS, an object of JSON; delay and duration in seconds."""

    command: str
    delay: float
    duration: float


def start(folder: RunFolder, attempt: int, events: Events) -> "Recording | None":
    """Begin a session, and set the ranks' variables for it; None where the job wants none, or the session fails.

    Raises UserError if there is no nsys.
    """
    if "SLURMDDP_NSYS" not in os.environ:
        return None
    settings = Settings(**json.loads(os.environ["SLURMDDP_NSYS"]))
    command = shutil.which(settings.command)
    if command is None:
        raise UserError(
            f"launch.nsys: there is no {settings.command} where the ranks run: "
            f"bind the host's into the container, and set launch.nsys.command to its path"
        )
    recording = Recording(settings._replace(command=command), folder.nsys_report(attempt, own_node()), events)
    if not recording.open(Path(os.environ["SLURMDDP_NSYS_FOLDER"])):
        return None
    recording.start()
    return recording


class Recording(threading.Thread):
    """Waits for the delay, records, and writes one report. Its failures are told; the ranks notice none of them."""

    def __init__(self, settings: Settings, report: Path, events: Events) -> None:
        super().__init__(name="slurmddp nsys", daemon=True)
        self._settings, self._report, self._events = settings, report, events
        self._session = f"slurmddp{os.getpid()}"
        self._environ = dict(os.environ)
        self._waiting: subprocess.Popen[bytes] | None = None
        self._closed = threading.Event()

    def open(self, folder: Path) -> bool:
        """Begin the session, and set the variables. Returns whether that worked. folder: on this node, for files."""
        error = ""
        for _ in range(_TRIES):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                self._report.parent.mkdir(parents=True, exist_ok=True)
                os.environ.update(self._launch(folder))
                return True
            except (RuntimeFailure, OSError) as failure:
                error = str(failure)
                self._end()
        self.tell(error)
        return False

    def run(self) -> None:
        """Record once."""
        try:
            if self._closed.wait(self._settings.delay):
                self.tell("the ranks ended before launch.nsys.delay was over")
                return
            output = f"--output={self._report}"
            self._nsys("start", output, "--force-overwrite=true", "--sample=none", "--cpuctxsw=none")
            say(f"slurmddp: node {own_node()}: nsys records for {self._settings.duration} s\n")
            self._closed.wait(self._settings.duration)
            self._nsys("stop")
            self.tell("")
        except (RuntimeFailure, OSError, subprocess.SubprocessError) as error:
            self.tell(str(error))

    def tell(self, error: str) -> None:
        """Say which files there are, or why there are none, and write the event `nsys_recorded`."""
        files = sorted(map(str, self._report.parent.glob(f"{self._report.name}.*")))
        error = error or ("" if files else "nsys wrote no report")
        self._events.write("nsys_recorded", files=files, error=error)
        say(f"slurmddp: node {own_node()}: nsys: {error or files[0]}\n")

    def close(self) -> None:
        """End the session when the ranks are over; a recording that has begun is written."""
        self._closed.set()
        if self.is_alive():
            self.join(_WRITE)
        self._end()

    def _end(self) -> None:
        if self._waiting is not None and self._waiting.stdin is not None:
            self._waiting.stdin.close()
            try:
                self._waiting.wait(_END)
            except subprocess.TimeoutExpired:
                self._waiting.kill()

    def _launch(self, folder: Path) -> Mapping[str, str]:
        """Start the process that waits, and return what nsys has changed in its environment."""
        self._environ["TMPDIR"] = str(folder)
        told, log = folder / f"{self._session}.json", folder / f"{self._session}.log"
        told.unlink(missing_ok=True)
        words = [self._settings.command, "launch", f"--session-new={self._session}", f"--trace={_TRACE}"]
        command = [*words, sys.executable, "-c", _TELL, str(told)]
        with log.open("wb") as output:
            self._waiting = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=self._environ
            )
        deadline = time.monotonic() + _READY
        while not (told.exists() and told.read_text().endswith("\n")):
            ended = self._waiting.poll() is not None
            if ended or time.monotonic() > deadline:
                said = log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
                raise RuntimeFailure(f"nsys launch {'failed' if ended else 'does not answer'}: {said[-1]}")
            time.sleep(0.1)
        found = json.loads(told.read_text())
        return {name: value for name, value in found.items() if self._environ.get(name) != value}

    def _nsys(self, *words: str) -> None:
        command = [self._settings.command, words[0], f"--session={self._session}", *words[1:]]
        ended = subprocess.run(
            command, env=self._environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_WRITE
        )
        if ended.returncode:
            said = (ended.stderr + ended.stdout).strip().splitlines()
            raise RuntimeFailure(f"nsys {words[0]} failed with code {ended.returncode}: {' '.join(said[-1:])}")
