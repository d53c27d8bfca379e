"""Sends one message to one address, with curl: it knows the host's proxies and certificates, and needs no Python."""

import os
import re
import selectors
import subprocess
import time
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from slurmddp.records.address import may_be_sent_to
from slurmddp.records.alert import Message
from slurmddp.supervisor.compose import plain, redacted

Text = Union[str, bytes]
#: What became of a message: it may be tried again if it waits, and never if it was refused.
ARRIVED, WAITS, REFUSED = "arrived", "waits", "refused"
_RETRY_AFTER = re.compile(rb"\nretry-after: *([0-9]{1,6})", re.IGNORECASE)
#: Bytes that are kept of an answer: older versions of curl do not bound headers.
_ANSWER, _ERROR = 65536, 500


class Sent(NamedTuple):
    """What became of a message. status: of the last answer, 000 without one; tries: 0 if none was made; error: what
    curl said; why: what failed, for people; neither has secrets. pause: for how many seconds the server asks."""

    outcome: str
    status: str = "000"
    seconds: float = 0.0
    tries: int = 0
    why: str = ""
    error: str = ""
    pause: Optional[int] = None


def deliver(
    message: Message,
    url: str,
    seconds: float,
    proxy: str = "",
    secrets: Sequence[str] = (),
    rest: Callable[[float], None] = time.sleep,
) -> Sent:
    """Try until the message has arrived, is refused, or the time is over."""
    end, delay, tries, sent = time.monotonic() + seconds, 1, 0, Sent(WAITS, why="no time left")
    while time.monotonic() < end:
        tries += 1
        sent = once(message, url, end - time.monotonic(), proxy, secrets)._replace(tries=tries)
        pause = delay if sent.pause is None else sent.pause
        # A redirect names another server, which must not get the message.
        if sent.outcome != WAITS or sent.status.startswith("3") or time.monotonic() + pause >= end:
            break
        rest(pause)
        delay *= 2
    return sent


def once(message: Message, url: str, seconds: float, proxy: str = "", secrets: Sequence[str] = ()) -> Sent:
    """Try once. No command line has the address: curl reads it, and the message, from its standard input."""
    if not may_be_sent_to(url, insecure=message.insecure):
        return Sent(REFUSED, why="its address is not https")
    text = config(("url", url), *request(message, proxy))
    command = ["curl", "--disable", "--config", "-", "--silent", "--show-error", "--globoff", "--proto", "=http,https"]
    command += ["--connect-timeout", "8", "--max-time", f"{max(seconds, 0.1):.1f}", "--output", os.devnull]
    command += ["--dump-header", "-", "--write-out", "\\n%{http_code} %{time_total}\\n"]
    try:
        answer, error = _run(command, text, seconds + 1)
    except FileNotFoundError:
        return Sent(WAITS, why="curl is not installed on this host")
    except OSError as failure:
        return Sent(WAITS, why=f"curl: {failure.strerror}")
    status, _, took = answer.rstrip(b"\n").rpartition(b"\n")[2].decode("ascii", "ignore").partition(" ")
    status = status if re.fullmatch("[0-9]{3}", status) else "000"
    pause = _RETRY_AFTER.search(answer)
    body = redacted(plain(error.decode("utf-8", "ignore")).replace("\n", " ").strip(), secrets)
    reason = f"status {status}" + (f" ({body})" if body else "")
    return Sent(_outcome(status), status, _number(took), 1, reason, body, int(pause.group(1)) if pause else None)


def request(message: Message, proxy: str) -> Iterator[Tuple[str, Text]]:
    """Yield what curl's configuration says of a message, without its address."""
    if proxy:
        yield "proxy", proxy
    for header in message.headers:
        yield "header", header
    yield "data-raw", message.body


def config(*values: Tuple[str, Text]) -> bytes:
    """Return a configuration of curl's."""
    encoded = [(word, value.encode("utf-8") if isinstance(value, str) else value) for word, value in values]
    return b"".join(b'%s = "%s"\n' % (word.encode(), _quoted(value)) for word, value in encoded)


def _outcome(status: str) -> str:
    if status.startswith("2"):
        return ARRIVED
    return REFUSED if status.startswith("4") and status not in ("408", "429") else WAITS


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,9})?", text) else 0.0


def _quoted(value: bytes) -> bytes:
    value = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
    return value.replace(b"\n", b"\\n").replace(b"\t", b"\\t").replace(b"\r", b"\\r")


def _run(command: List[str], config: bytes, seconds: float) -> Tuple[bytes, bytes]:
    """Run curl: the end of its output, and the start of its errors. Raises OSError."""
    end = time.monotonic() + seconds
    kept: Dict[str, bytes] = {"answer": b"", "error": b""}
    ready = selectors.DefaultSelector()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin and child.stdout and child.stderr
        try:
            child.stdin.write(config)
            child.stdin.close()
        except BrokenPipeError:
            pass  # its answer says why
        ready.register(child.stdout, selectors.EVENT_READ, "answer")
        ready.register(child.stderr, selectors.EVENT_READ, "error")
        while ready.get_map() and time.monotonic() < end:
            for key, _ in ready.select(max(end - time.monotonic(), 0)):
                part = os.read(key.fd, _ANSWER)
                kept[key.data] += part
                if not part:
                    ready.unregister(key.fileobj)
            kept = {"answer": kept["answer"][-_ANSWER:], "error": kept["error"][:_ERROR]}
        child.kill()
    ready.close()
    return kept["answer"], kept["error"]
