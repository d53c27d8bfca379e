"""How head and nodes talk: one JSON object per line over TCP, signed with the run's key."""

import asyncio
import json
import os
import socket
from pathlib import Path
from typing import Any

from slurmddp.runtime.preflight.node_settings import NodeSettings
from slurmddp.shared.files import text_or_empty

#: A report holds the names of all packages.
LONGEST = 8 << 20
BACKLOG = 4096

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

#: What to do where two nodes do not see each other, or not the same run folder.
PORTS = "open all ports between the nodes, or set network.interface"
SHARED = "the run folder must be on a file system that all nodes share: paths.runs"


async def send(settings: NodeSettings, writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Raises OSError."""
    writer.write(settings.key.seal(json.dumps(message).encode(), "preflight", settings.identity) + b"\n")
    await writer.drain()


async def receive(settings: NodeSettings, reader: asyncio.StreamReader) -> dict[str, Any]:
    """Return the next message. Raises OSError if the other end is gone, ValueError for anything that is no message.

    A message without the signature of this run and attempt is ForgedError, a ValueError.
    """
    line = await reader.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the connection was closed")
    message = json.loads(settings.key.open(line[:-1], "preflight", settings.identity))
    if not isinstance(message, dict):
        raise ValueError("not a message")
    return message


async def meet(settings: NodeSettings, address: str, port: int, name: str) -> str:
    """Connect to a port on which `name` answers with its name. Why that fails; empty if it does not."""
    try:
        answer = await asyncio.wait_for(_ask(settings, address, port), settings.patience)
    except asyncio.TimeoutError:
        return f"no answer within {settings.patience:.0f} s"
    except (OSError, ValueError) as error:
        return why(error)
    return "" if answer.get("node") == name else f"{answer.get('node')} answered instead: two nodes have this address"


async def _ask(settings: NodeSettings, address: str, port: int) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(address, port, limit=LONGEST, family=socket.AF_INET)
    try:
        return await receive(settings, reader)
    finally:
        writer.close()


def answers_with_name(settings: NodeSettings) -> Any:
    """Return a server's callback: says this node's name, and closes once the other end has."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await send(settings, writer, {"node": settings.node})
            await asyncio.wait_for(reader.read(), settings.patience)
        except (OSError, ValueError, asyncio.TimeoutError):
            pass
        finally:
            writer.close()

    return answer


async def sees(path: Path, token: str, seconds: float) -> bool:
    """Return whether this node comes to see the file that another one has written."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while await asyncio.to_thread(text_or_empty, path) != token:
        if loop.time() > deadline:
            return False
        await asyncio.sleep(0.25)
    return True


def token_file(folder: Path, node: str) -> Path:
    return folder / f"{node}.token"


def why(error: BaseException) -> str:
    """Return an error of the network in few words; asyncio's own text repeats the address."""
    code = error.errno if isinstance(error, OSError) else None
    if isinstance(error, socket.gaierror) or code is None or code < 0:
        return getattr(error, "strerror", None) or str(error) or type(error).__name__
    return os.strerror(code)
