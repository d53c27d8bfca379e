"""One loop over children, signals and time: what happens in the supervisor happens here, one after the other."""

import os
import select
import signal
import subprocess
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

#: Signals that Slurm and people send to the job. A signal that comes while its handler runs is handled afterwards.
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
#: What children must not heed: Slurm and a terminal send these to all processes of a job.
_FOR_US = {"ranks": (signal.SIGINT,), "tool": SIGNALS}


class Output(NamedTuple):
    """What a command wrote. code: its exit code (128 + N after signal N); None: it did not exit in time."""

    code: Optional[int]
    text: str


class Child:
    """A process of ours. code: its exit code as bash puts it (128 + N after signal N); None while it runs."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def code(self) -> Optional[int]:
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    def kill(self, number: int = signal.SIGTERM) -> None:
        """Send a signal; nothing, if it has exited."""
        if self._process.poll() is None:
            self._process.send_signal(number)


class Loop:
    """Waits for what was asked for, and meanwhile handles signals and what arrives at watched descriptors."""

    def __init__(self) -> None:
        self._handlers: Dict[int, Callable[[], None]] = {}
        self._arrived: List[int] = []
        self._handling = False
        self._watched: Dict[int, Callable[[], None]] = {}
        self._parent = os.getppid()
        self._orphaned: Optional[Callable[[], None]] = None
        self._regular: Optional[Callable[[], None]] = None
        self._pause, self._due = 0.0, float("inf")
        self._awake, writer = os.pipe()
        for end in (self._awake, writer):
            os.set_blocking(end, False)
        for number in (*SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # the number arrives in the pipe
        signal.set_wakeup_fd(writer)

    def on_signal(self, number: int, handler: Callable[[], None]) -> None:
        self._handlers[number] = handler

    def on_parents_end(self, handler: Callable[[], None]) -> None:
        """Call this once, as soon as the process that has started us is gone: before anything that follows from it."""
        self._orphaned = handler

    def every(self, seconds: float, handler: Callable[[], None]) -> None:
        """Call this so often, beside whatever is waited for."""
        self._regular, self._pause, self._due = handler, seconds, time.monotonic()

    def be_deaf(self) -> None:
        """Take no signal any more."""
        self._handlers.clear()
        self._arrived.clear()

    def deliver(self, number: int) -> None:
        """Handle a signal that somebody else has received for us, if it is one that we still take."""
        if number in self._handlers:
            self._arrived.append(number)

    def watch(self, descriptor: int, arrived: Callable[[], None]) -> None:
        """Call `arrived` whenever the descriptor can be read."""
        self._watched[descriptor] = arrived

    def forget(self, descriptor: int) -> None:
        self._watched.pop(descriptor, None)

    def run_until(self, done: Callable[[], Any], seconds: float) -> bool:
        """Wait until `done()` is true, this long at most. Return whether it is."""
        end = time.monotonic() + seconds
        while True:
            if self._orphaned is not None and os.getppid() != self._parent:
                handler, self._orphaned = self._orphaned, None
                handler()
            self._handle_signals()
            if self._regular is not None and time.monotonic() >= self._due:
                self._due = time.monotonic() + self._pause
                self._regular()
            if done():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._wait(left)

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self.run_until(lambda: False, seconds)

    def _wait(self, seconds: float) -> None:
        # At most 1 s: a child's end is seen then, even where SIGCHLD was lost.
        seconds = max(min(seconds, 1.0, self._due - time.monotonic()), 0)
        ready, _, _ = select.select([self._awake, *self._watched], [], [], seconds)
        for descriptor in ready:
            if descriptor == self._awake:
                self._arrived += [number for number in os.read(self._awake, 4096) if number in self._handlers]
            elif descriptor in self._watched:
                self._watched[descriptor]()

    def _handle_signals(self) -> None:
        if self._handling:
            return
        self._handling = True
        try:
            while self._arrived:
                self._handlers[self._arrived.pop(0)]()
        finally:
            self._handling = False

    def start(
        self, words: Sequence[str], env: Optional[Dict[str, str]] = None, heeds: str = "ranks", **options: Any
    ) -> Child:
        """Start a process. heeds: as whom it takes signals: ranks, or a tool, which nothing but SIGKILL interrupts.

        Raises OSError.
        """
        ignored = _FOR_US[heeds]

        def prepare() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(words, env=env, preexec_fn=prepare, **options)
        return Child(process)

    def run(
        self,
        words: Sequence[str],
        seconds: float,
        env: Optional[Dict[str, str]] = None,
        errors: int = subprocess.DEVNULL,
    ) -> Output:
        """Run a command, which is killed after this time. errors: where its stderr goes; STDOUT: into the text, too."""
        reader, writer = os.pipe()
        parts: List[bytes] = []

        def arrived() -> None:
            part = os.read(reader, 65536)
            parts.append(part)
            if not part:
                self.forget(reader)

        try:
            child = self.start(words, env, "tool", stdout=writer, stderr=errors)
        except OSError as error:
            os.close(writer)
            os.close(reader)
            return Output(127, str(error))
        os.close(writer)
        self.watch(reader, arrived)
        if not self.run_until(lambda: child.code is not None, seconds):
            child.kill(signal.SIGKILL)
            self.run_until(lambda: child.code is not None, 1.0)
            code = None
        else:
            code = child.code
            self.run_until(lambda: reader not in self._watched, 0.5)  # its own children may hold the pipe open
        self.forget(reader)
        os.close(reader)
        return Output(code, b"".join(parts).decode("utf-8", "replace"))
