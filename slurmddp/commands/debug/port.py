"""`slurmddp debug port`: a port of a node of a running job, such as TensorBoard's, on this machine."""

import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from slurmddp.commands import options as opt
from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.find import find_own_run
from slurmddp.launch.inside import attach_command, become
from slurmddp.run.gate import OwnRun
from slurmddp.shared import relay
from slurmddp.shared.peer import distrust

#: Seconds in which the node's end has ended after SIGTERM.
_PATIENCE = 10
#: Only Linux shows whose a connection is. Elsewhere, which is a laptop in most cases, a check would refuse all of them.
_CHECKS = sys.platform == "linux"
#: Seconds after which Ctrl-C is noticed at the latest.
_INTERVAL = 0.2


def command(
    folder: OwnRun, node: str | None, port: int, environment: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command line, and its environment, that is the node's end of the stream (slurmddp.shared.relay).

    node: the attempt's first if None. Raises UserError, ExternalError.
    """
    words = ("-m", "slurmddp.shared.relay", str(port))
    # srun keeps what a program writes until a line is full, and frames have no lines.
    return attach_command(folder, node, words, environment, "--unbuffered")


def listen(port: int) -> socket.socket:
    """Return a socket that listens on this port of this machine alone. Raises UserError if another process does."""
    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError as error:
        todo = "choose another with --local-port"
        raise UserError(f"port {port} cannot be used on this machine: {error.strerror}", todo=todo) from None


def forward(
    accepts: socket.socket, words: Sequence[str], environment: Mapping[str, str] | None, begun: Callable[[], None]
) -> None:
    """Serve connections until Ctrl-C. words: the command whose standard input and output are the stream.

    begun: called when the node's end answers. Raises UserError if the command is not here, ExternalError if it ends.
    """
    try:
        # A session of its own: Ctrl-C is for this process, which then ends the other one in order.
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True
        )
    except FileNotFoundError:
        raise UserError(f"{words[0]} is not on this machine", todo="use a login node of the cluster") from None
    assert process.stdin and process.stdout
    stream = relay.Stream(process.stdout, process.stdin)
    reads = threading.Thread(target=_serve, args=(accepts, stream, begun), daemon=True)
    reads.start()
    try:
        while reads.is_alive():  # Not by reading here: a Ctrl-C just before a read waits for the end of the read.
            reads.join(_INTERVAL)
        raise ExternalError(
            f"the connection to the node has ended with exit code {process.wait()}: did the attempt end?\n"
            "  -> see: slurmddp status"
        )
    except KeyboardInterrupt:
        pass
    finally:
        _end(process)


def say_address(accepts: socket.socket) -> None:
    """Say where the port is on this machine."""
    opt.say(f"http://127.0.0.1:{accepts.getsockname()[1]} leads to the node; Ctrl-C ends it")
    if not _CHECKS:
        opt.say("note: this system does not show who connects, so other users of this machine can use the port, too")


def _serve(accepts: socket.socket, stream: relay.Stream, begun: Callable[[], None]) -> None:
    for _ in stream.frames():  # READY, once
        begun()
        threading.Thread(target=_accept, args=(accepts, stream), daemon=True).start()


def _accept(accepts: socket.socket, stream: relay.Stream) -> None:
    numbers = itertools.count()
    while True:
        connection, _ = accepts.accept()
        if _CHECKS and (reason := distrust(connection)):
            connection.close()
            print(f"slurmddp: refused a connection to port {accepts.getsockname()[1]}: {reason}", file=sys.stderr)
            continue
        try:
            stream.join(next(numbers), connection, new=True)
        except OSError:
            return  # the stream has ended, and forward() says so


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # not by closing its standard input: a thread may be writing to it
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def port(
    run: opt.Run,
    number: int = opt.argument("PORT", "Port on the node", default=..., min=1, max=65535),
    node: str | None = opt.value("NAME", "Node of the port  [default: the first of the attempt]"),
    local_port: int | None = opt.value("PORT", "Port on this machine  [default: the same]", min=1, max=65535),
    stdio: bool = opt.flag("--stdio", "", hidden=True),
) -> None:
    """Reach a port of a running job's node, such as TensorBoard's, from this machine, until Ctrl-C."""
    folder = find_own_run(run, os.environ, to="look into its job")
    words, environment = command(folder, node, number, os.environ)
    if stdio:  # the end of `slurmddp --host ... debug port` on the login node
        become(words, environment)
    accepts = listen(local_port or number)
    forward(accepts, words, environment, lambda: say_address(accepts))
