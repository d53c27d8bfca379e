"""A node's side: reach the head on both ports, look around, report, try other nodes, and hear what became of it."""

import asyncio
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from slurmddp.records.preflight import Finding, bad, plain
from slurmddp.runtime.preflight.judge import Report
from slurmddp.runtime.preflight.local_checks import look, show, take_away
from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.runtime.preflight.protocol import (
    LONGEST,
    PORTS,
    SHARED,
    Streams,
    answers_with_name,
    meet,
    receive,
    sees,
    send,
    token_file,
    why,
)
from slurmddp.shared.files import write_whole

#: The part of the time after which a node stops trying a head that never answered.
_PATIENCE = 0.75


class HeadFailedError(Exception):
    """The head has said that it failed: nothing of this node's."""


class UnreachedError(Exception):
    """The head cannot be reached from here."""


async def report(settings: NodeSettings) -> int:
    """Return the exit code: 0 once the head knows, through the network or by a file; 1 where neither was possible."""
    token = secrets.token_hex(8)
    own = asyncio.create_task(look(settings))
    written = await asyncio.to_thread(show, settings, token)
    try:
        reader, writer = await _reach(settings)
    except HeadFailedError:
        print(f"slurmddp: preflight: the head {settings.nodes[0]} failed; see its log")
        await asyncio.to_thread(take_away, settings)
        return 0
    except UnreachedError as error:
        return await asyncio.to_thread(_write_status, settings, str(error))
    try:
        await _converse(settings, reader, writer, own, written, token)
    except (OSError, ValueError, asyncio.TimeoutError) as error:
        # Either the head has ended without a verdict, or it knows that it has lost this node: nothing to add.
        print(f"slurmddp: preflight: lost the head {settings.nodes[0]}: {why(error)}", file=sys.stderr)
    finally:
        writer.close()
        await asyncio.to_thread(take_away, settings)
    return 0


async def _converse(
    settings: NodeSettings,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    own: "asyncio.Task[Report]",
    written: list[Finding],
    token: str,
) -> None:
    """Report, and print what the head makes of it. Raises OSError, ValueError, TimeoutError."""
    await send(settings, writer, {"node": settings.node})
    hello = await asyncio.wait_for(receive(settings, reader), settings.seconds)
    skew = time.time() - float(hello["time"])
    listener, port, unheard = await _listen(settings)
    # Both take their time only where something is wrong.
    reached, shared = await asyncio.gather(
        meet(settings, str(hello["address"]), int(hello["port"]), settings.nodes[0]),
        sees(token_file(settings.folder, settings.nodes[0]), str(hello["token"]), settings.patience),
    )
    mine = await own
    links: dict[str, Finding] = {}
    if reached:
        where = f"{settings.nodes[0]} on a random port ({hello['address']}:{hello['port']})"
        links["port"] = bad(f"reaches the rendezvous port, but not {where}: {reached}", PORTS)
    if not shared:
        links["folder"] = bad(f"does not see the files of {settings.nodes[0]} in the run folder", SHARED)
    message: dict[str, Any] = {
        "findings": [*written, *unheard, *mine.findings],
        "links": links,
        "facts": mine.facts,
        "interface": mine.interface,
        "network": mine.network,
        "skew": skew,
        "token": None if written else token,
        "speeds": mine.speeds,
        "address": settings.address,
        "port": port,
    }
    await send(settings, writer, message)
    while "lines" not in (heard := await asyncio.wait_for(receive(settings, reader), 2 * settings.seconds)):
        await send(settings, writer, {"unreached": await _unreached(settings, heard["peers"])})
    print("\n".join(f"slurmddp: preflight: {line}" for line in heard["lines"]), flush=True)
    if listener is not None:
        listener.close()


async def _listen(settings: NodeSettings) -> tuple[asyncio.Server | None, int, list[Finding]]:
    """A random port on this node's own address, as the ranks will have."""
    try:
        listener = await asyncio.start_server(answers_with_name(settings), settings.address, 0, family=socket.AF_INET)
    except OSError as error:
        where = f"{settings.address} ({settings.interface})" if settings.interface else settings.address
        return None, 0, [bad(f"cannot listen on its own address {where}: {why(error)}", PORTS)]
    return listener, int(listener.sockets[0].getsockname()[1]), []


async def _unreached(settings: NodeSettings, peers: Sequence[Sequence[Any]]) -> dict[str, str]:
    """Connect to all these nodes at once. Return those that cannot be reached, each with the reason."""
    failed = await asyncio.gather(*(meet(settings, str(address), int(port), name) for name, address, port in peers))
    return {str(name): reason for (name, _, _), reason in zip(peers, failed, strict=True) if reason}


async def _reach(settings: NodeSettings) -> Streams:
    """The connection to the head, which may start later than this node.

    Raises HeadFailedError, and UnreachedError: once the head is known to listen, or after a part of the time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _PATIENCE * settings.seconds
    listening = False
    pause = 0.05
    while True:
        try:
            opening = asyncio.open_connection(settings.head, settings.port, limit=LONGEST, family=socket.AF_INET)
            return await asyncio.wait_for(opening, settings.patience)
        except asyncio.TimeoutError:
            reason = f"no answer within {settings.patience:.0f} s"
        except socket.gaierror as error:
            reason = f"the container cannot resolve the name: {why(error)}"
        except OSError as error:
            reason = why(error)
        if await asyncio.to_thread((settings.folder / f"{settings.nodes[0]}.failed").exists):
            raise HeadFailedError
        if not listening and await asyncio.to_thread(token_file(settings.folder, settings.nodes[0]).exists):
            # It listened before it wrote that: what fails from now on is not a matter of time.
            listening = True
            deadline = min(deadline, loop.time() + settings.patience)
        if loop.time() > deadline:
            raise UnreachedError(
                f"cannot reach the head {settings.head} on the rendezvous port {settings.port}: {reason}"
            )
        await asyncio.sleep(pause)
        pause = min(1.0, 2 * pause)


def _write_status(settings: NodeSettings, reason: str) -> int:
    """NODE.unreached, which the head finds in the run folder; it knows whether others have the same trouble."""
    print(f"slurmddp: preflight: {reason}", file=sys.stderr)
    try:
        write_whole(settings.folder / f"{settings.node}.unreached", plain(reason) + "\n")
        take_away(settings)
    except OSError as error:
        print(f"slurmddp: preflight: cannot write its result to {settings.folder}: {error}", file=sys.stderr)
        return 1
    return 0
