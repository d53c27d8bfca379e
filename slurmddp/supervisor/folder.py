"""The run folder, by way of one child process: a mount that hangs stops whoever touches it, signals included.

The loop asks with a deadline, and hands over what is to be written; that waits in memory until it is written.
"""

import json
import os
import signal
import socket
import sys
import time
from typing import Any, Callable, Dict, List, Optional, Set

from slurmddp.supervisor.files import Files
from slurmddp.supervisor.lease import Lease, new_holder
from slurmddp.supervisor.loop import SIGNALS, Loop

#: Seconds that an answer may take, and that nobody waits longer than where an earlier one is still missing.
PATIENCE, HURRY = 10.0, 0.2
#: Seconds between two tries to write what could not be written.
_AGAIN = 2.0
#: Seconds after which a folder that is gone does not come back.
_GONE = 60.0


class Unavailable(Exception):
    """The run folder did not answer in time, or what was asked for failed there."""


class Gone(Unavailable):
    """There is no run folder."""


class Folder:
    """Asks the child, and hands over what is to be written. complain: called once for each kind of write that fails for
    another reason than the disk.

    With a lease, the child renews it right before whatever it reads or writes; superseded: called if another process
    leads. in_touch: whether this node is not cut off.
    """

    def __init__(self, loop: Loop, run: str) -> None:
        self._loop, self._run = loop, run
        self._number = 0
        self._answers: Dict[int, Dict[str, Any]] = {}
        self._unanswered: Set[int] = set()
        self._late: Set[int] = set()  # of the unanswered: nobody waits for them any more
        self._unwritten: Dict[int, List[Any]] = {}
        self._lost: Set[str] = set()
        self.complain: Callable[[str], None] = lambda text: None
        self.superseded: Callable[[], None] = lambda: None
        self.in_touch: Callable[[], bool] = lambda: True
        self._lease: Optional[Lease] = None
        self._renewing = 0
        self._gone = 0.0  # when the folder was first missed
        self._begin()

    def ask(self, name: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """Return the answer of a method of Files. Raises Unavailable.

        patience: where it is longer than usual, an error of the disk is no answer: it is asked again, this long.
        """
        end, patient = time.monotonic() + patience, patience > PATIENCE
        # What an earlier question waits for holds up this one, too: nothing piles up behind a mount that hangs.
        if not self._loop.run_until(lambda: not self._unanswered, patience if patient else HURRY):
            raise Unavailable("{} does not answer".format(self._run))
        while True:
            answer = self._answer(self._send(name, arguments), end - time.monotonic())
            if "error" not in answer:
                return answer["is"]
            if not (patient and answer["of_the_disk"]) or time.monotonic() + _AGAIN > end:
                raise (Gone if answer["gone"] else Unavailable)(answer["error"])
            self._loop.rest(_AGAIN)

    def _answer(self, number: int, seconds: float) -> Dict[str, Any]:
        self._unanswered.add(number)
        if not self._loop.run_until(lambda: number in self._answers, seconds):
            self._late.add(number)
            raise Unavailable("{} does not answer".format(self._run))
        return self._answers.pop(number)

    def known(self, default: Any, name: str, *arguments: Any, patience: float = PATIENCE) -> Any:
        """Return the answer of a method of Files, or the default where there is none."""
        try:
            return self.ask(name, *arguments, patience=patience)
        except Unavailable:
            return default

    def tell(self, name: str, *arguments: Any) -> None:
        """Have a method of Files write something, as soon as the folder can be written."""
        number = self._send(name, arguments, keep=True)
        self._unwritten[number] = [name, list(arguments)]

    def begin_lease(self, host: str) -> None:
        """Lead from now on, at the start of a job. Raises Unavailable."""
        self._lease = Lease(*self.ask("begin_lease", new_holder(host), patience=60))

    def take_lease(self, seen: Lease, host: str) -> bool:
        """Lead from now on, unless the leader that was seen lives, or another process was quicker. Raises Unavailable:
        this process must exit then, since its child may lead.
        """
        taken = self.ask("take_lease", seen, new_holder(host))
        self._lease = Lease(*taken) if taken else None
        return self._lease is not None

    def renew(self) -> None:
        """Have the lease renewed, which any question does. Nobody waits for the answer."""
        if self._lease is not None and not self._renewing:
            self._renewing = self._send("leader", [])

    def confirm(self) -> None:
        """Return once it is certain that this process leads: call this before what only the leader may do.

        It does, too, if the folder was deleted: nobody can take a lease there.
        """
        while self._lease is not None:
            try:
                if self.in_touch() and self.ask("leader") is not None:
                    self._gone = 0.0
                    return
            except Gone:
                self._gone = self._gone or time.monotonic()
                if time.monotonic() - self._gone > _GONE:
                    return
            except Unavailable:
                pass  # who leads is not known
            self._loop.rest(1)

    def settle(self, seconds: float) -> bool:
        """Wait until all is written, this long at most. Return whether it is."""
        return self._loop.run_until(lambda: not self._unwritten, seconds)

    @property
    def behind(self) -> bool:
        """Return whether something is not written yet."""
        return bool(self._unwritten)

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(theirs, self._run, self._lease)
        theirs.close()
        self._socket = ours
        ours.setblocking(False)
        self._outgoing = self._incoming = b""
        self._loop.watch(ours.fileno(), self._read)

    def _send(self, name: str, arguments: Any, keep: bool = False) -> int:
        self._number += 1
        self._put(self._number, name, list(arguments), keep)
        return self._number

    def _put(self, number: int, name: str, arguments: List[Any], keep: bool) -> None:
        call = [number, name, arguments, keep, not self.in_touch()]
        self._outgoing += json.dumps(call).encode("ascii") + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[self._socket.send(self._outgoing) :]
        except BlockingIOError:
            pass  # with the next answer, or the next request
        except OSError:
            pass  # the child is gone: _read sees it, and begins another one

    def _read(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._unanswered.clear()
            self._late.clear()
            self._renewing = 0
            self._begin()
            for number, (name, arguments) in self._unwritten.items():
                self._put(number, name, arguments, True)
            return
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        for line in lines:
            answer = json.loads(line.decode("ascii"))
            number = answer["number"]
            if number == self._renewing:
                self._renewing = 0
            if "superseded" in answer:
                self.superseded()
            call = self._unwritten.pop(number, None)
            if call is not None and "error" in answer and call[0] not in self._lost:
                self._lost.add(call[0])
                self.complain("the run folder's {} failed, and is not tried again: {}".format(call[0], answer["error"]))
            if number in self._unanswered:
                self._unanswered.discard(number)
                if number not in self._late:
                    self._answers[number] = answer
                self._late.discard(number)
        self._flush()


def _serve(connection: socket.socket, run: str, lease: Optional[Lease]) -> None:
    """Answer requests until the other end is closed. What cannot be written is tried again, in its order."""
    files = Files(run, lease)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all processes of the job
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kept: List[Any] = []
    data = b""
    while True:
        connection.settimeout(_AGAIN if kept else None)
        try:
            part = connection.recv(1 << 20)
            if not part:
                break
        except socket.timeout:
            part = b""
        *lines, data = (data + part).split(b"\n")
        requests = [json.loads(line.decode("ascii")) for line in lines]
        for request in requests:
            files.held = request.pop()
        if kept and not part:
            requests, kept = kept, []
        for number, name, arguments, keep in requests:
            if keep and kept:
                kept.append([number, name, arguments, keep])
                continue
            answer: Dict[str, Any] = {"number": number}
            try:
                if name != "say" or files.lease:
                    files.enter()
                if files.leads():
                    answer["is"] = getattr(files, name)(*arguments)
                else:
                    answer.update(superseded=True, error="another process leads", of_the_disk=False, gone=False)
            except Exception as error:  # noqa: BLE001 - this process must answer whatever happens in it
                files.look_again()
                if keep and isinstance(error, OSError):
                    kept.append([number, name, arguments, keep])
                    continue
                answer["error"] = "{}: {}".format(type(error).__name__, error)
                answer["of_the_disk"] = isinstance(error, OSError)
                answer["gone"] = isinstance(error, FileNotFoundError) and error.filename == run
            connection.settimeout(None)
            connection.sendall(json.dumps(answer).encode("ascii") + b"\n")
    os._exit(0)
