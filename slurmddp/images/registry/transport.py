"""HTTP GET with what registries need: proxies, redirects that lose the credentials, limits, and clear failures.

The standard library's http.client, because urllib carries an Authorization header to wherever it is redirected.
"""

from __future__ import annotations

import base64
import http.client
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from urllib.parse import quote, urljoin, urlsplit

from slurmddp import __version__
from slurmddp.errors import UserError
from slurmddp.images.registry.failures import NO_REGISTRY, outside
from slurmddp.images.registry.settings import Proxy, RegistrySettings, is_loopback
from slurmddp.images.registry.unreachable import unreachable

_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Origin:
    """Whom a request goes to; credentials for one origin are never sent to another."""

    scheme: str
    host: str
    port: int

    @property
    def name(self) -> str:
        """HOST, or HOST:PORT where the port is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Answer:
    """A response, read whole; `redirected`: it comes from another origin than the one that was asked."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes
    origin: Origin
    redirected: bool = False


class Transport:
    """Keeps one connection to each host, and closes them at its end."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._open: dict[Origin, http.client.HTTPConnection] = {}
        self._tls: ssl.SSLContext | None = None

    def get(
        self, url: str, *, limit: int, what: str, authorization: str | None = None, accept: Iterable[str] = ()
    ) -> Answer:
        """The answer at the end of all redirects.

        limit:         bytes of the body, above which it is refused.
        what:          is asked for, for messages: "the manifest of IMAGE".
        authorization: sent to the origin of `url` alone.

        Raises ExternalError, and UserError for plain HTTP with a host for which it is not allowed.
        """
        target = _printable(url)
        first = origin_of(target)
        if first is None:
            raise outside(f"{what} is to come from an address that is none", "check the host: is it a registry?")
        origin = first
        for _ in range(_MOST_REDIRECTS + 1):
            headers = {"Accept": ", ".join(accept) or "*/*", "User-Agent": f"slurmddp/{__version__}"}
            if authorization and origin == first:
                headers["Authorization"] = authorization
            answer = self._once(origin, target, headers, limit, what)
            if answer.status not in _REDIRECTS:
                return replace(answer, redirected=origin != first)
            target = urljoin(target, _printable(answer.headers.get("Location", "")))
            onward = origin_of(target)
            if onward is None:
                raise outside(f"{origin.name} redirects to an address that is none, for {what}")
            if is_loopback(onward.host) and not is_loopback(first.host):
                raise outside(f"{origin.name} redirects to this machine itself, {onward.name}, for {what}", NO_REGISTRY)
            origin = onward
        raise outside(f"{first.name} redirects more than {_MOST_REDIRECTS} times, for {what}")

    def _once(self, origin: Origin, url: str, headers: Mapping[str, str], limit: int, what: str) -> Answer:
        if origin.scheme == "http" and not self._settings.plain_allowed(origin.name):
            raise UserError(
                f"{what} would come over plain HTTP from {origin.name}, which is not allowed for that host",
                todo="if you trust the way to it: list it among the site's insecure registries",
            )
        proxy = self._settings.proxy_for(origin.scheme, origin.name)
        known = self._open.pop(origin, None)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if origin.scheme == "http" and proxy:
            path = f"http://{origin.name}{path}"
            headers = {**headers, **_proxy_headers(proxy)}
        try:
            try:
                return self._exchange(known or self._connect(origin, proxy), origin, path, headers, limit, what)
            except (http.client.RemoteDisconnected, ConnectionError):
                if known is None:
                    raise
                # A connection that was kept may have been closed by the other side meanwhile
                return self._exchange(self._connect(origin, proxy), origin, path, headers, limit, what)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise unreachable(error, origin.name, proxy.name if proxy else None, self._settings.patience) from None

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        origin: Origin,
        path: str,
        headers: Mapping[str, str],
        limit: int,
        what: str,
    ) -> Answer:
        """One request and its answer; the connection is kept where the other side keeps it."""
        keep = False
        try:
            connection.request("GET", path, headers=dict(headers))
            with connection.getresponse() as response:
                body = self._read(response, limit, origin, what)
                keep = not response.will_close
        finally:
            if keep:
                self._open[origin] = connection
            else:
                connection.close()
        return Answer(response.status, response.msg, body, origin)

    def _connect(self, origin: Origin, proxy: Proxy | None) -> http.client.HTTPConnection:
        timeout = self._settings.patience
        host, port = (proxy.host, proxy.port) if proxy else (origin.host, origin.port)
        if origin.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout)
        self._tls = self._tls or ssl.create_default_context()
        connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._tls)
        if proxy:
            connection.set_tunnel(origin.host, origin.port, headers=_proxy_headers(proxy))
        return connection

    def _read(self, response: http.client.HTTPResponse, limit: int, origin: Origin, what: str) -> bytes:
        """The body. Raises ExternalError above `limit`, and http.client's and socket's errors."""
        announced = response.length
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > limit:
                raise outside(f"{what} has more than {limit >> 20} MiB, which none has; {origin.name} sent it")
        if announced is not None and len(body) != announced:
            raise http.client.IncompleteRead(bytes(body), announced - len(body))
        return bytes(body)

    def close(self) -> None:
        """Close all connections."""
        for connection in self._open.values():
            connection.close()
        self._open.clear()

    def __enter__(self) -> Transport:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def origin_of(url: str) -> Origin | None:
    """Whom this address belongs to; None where it is no http or https address."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not host or not host.isascii():
        return None
    return Origin(parts.scheme, host, _PORTS[parts.scheme] if port is None else port)


def _printable(location: str) -> str:
    """As an address may be sent: what a header may hold but an address may not is percent-encoded."""
    return quote(location, safe="%!#$&'()*+,/:;=?@[]~", encoding="latin-1", errors="replace")


def _proxy_headers(proxy: Proxy) -> dict[str, str]:
    if proxy.userinfo is None:
        return {}
    return {"Proxy-Authorization": "Basic " + base64.b64encode(proxy.userinfo.encode()).decode("ascii")}
