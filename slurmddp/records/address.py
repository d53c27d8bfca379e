"""Addresses that alerts go to. They are secrets: who has one can post, and on ntfy read."""

import ipaddress
import re
from typing import Iterable, List, Tuple

#: One word of plain ASCII that curl's configuration can hold, and short enough that a log's excerpt which is cut
#: somewhere never holds half of it.
_ADDRESS = re.compile(r"(?P<scheme>https?)://(?:[^/?#@]*@)?(?P<host>\[[0-9A-Fa-f:.]+\]|[^/?#:@]+)(?::\d+)?(?:[/?#].*)?")
LONGEST = 2000
_ALLOWED = frozenset(map(chr, range(0x21, 0x7F))) - set('"\\')


def is_loopback(host: str) -> bool:
    """Return whether a host (without port) is this machine: localhost, 127.0.0.0/8 or ::1, with or without brackets."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Return whether a text is an address that a message can be sent to."""
    return len(text) <= LONGEST and set(text) <= _ALLOWED and _ADDRESS.fullmatch(text) is not None


def may_be_sent_to(url: str, *, insecure: bool) -> bool:
    """Return whether a message may go to this address: it is https, or on this host, or http was asked for
    (`insecure`).
    """
    match = _ADDRESS.fullmatch(url)
    return match is not None and (insecure or match.group("scheme") == "https" or is_loopback(match.group("host")))


def secret_parts(urls: Iterable[str]) -> Tuple[str, ...]:
    """Return what no message may hold: each address, its path, and each of its long parts; the longest first."""
    parts: List[str] = []
    for url in urls:
        match = _ADDRESS.fullmatch(url)
        rest = url.partition("://")[2]
        path = rest.partition("/")[2]
        topic = "" if "?" in path else path.rpartition("/")[2]  # of ntfy
        parts += [url, rest, *([path] if len(path) >= 8 else []), *([topic] if len(topic) >= 6 else [])]
        host = match.group("host") if match else ""
        parts += [part for part in re.split("[/?&=#@:]", rest) if len(part) >= 16 and part != host]
    return tuple(sorted(set(parts), key=len, reverse=True))
