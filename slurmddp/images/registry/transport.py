"""HTTP GET with what registries need: proxies, redirects that lose the credentials, limits, and clear failures.

urllib3 carries the bytes. It follows no redirect, retries nothing and unpacks nothing: whom a request may reach, how
often, and how large an answer may be are rules of ours.
"""

import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from http.client import HTTPException
from typing import BinaryIO
from urllib.parse import quote, urljoin, urlsplit

from urllib3 import HTTPHeaderDict, PoolManager, ProxyManager
from urllib3.exceptions import HTTPError, LocationValueError, ProtocolError
from urllib3.exceptions import TimeoutError as Late

from slurmddp import __version__
from slurmddp.errors import ExternalError, UserError
from slurmddp.images.registry.failures import NO_REGISTRY, outside
from slurmddp.images.registry.settings import Proxy, RegistrySettings, is_loopback

_NO_INTERNET = (
    "if this machine needs a proxy, export HTTPS_PROXY=http://HOST:PORT, or set a proxy or mirror in the site "
    "profile; otherwise build on a machine that reaches the registry"
)


def unreachable(error: BaseException, host: str, proxy: str | None, timeout: float) -> ExternalError:
    """Return the error for what urllib3 raised on the way to `host`, through `proxy` if there is one."""
    error = root_of(error)
    peer = f"the proxy {proxy} for {host}" if proxy else host
    if isinstance(error, (socket.gaierror, LocationValueError)):  # LocationValueError: a name that DNS could not have
        name = (proxy or host).partition(":")[0]
        return outside(f"cannot reach {peer}: unknown host {name}", f"check its spelling; {_NO_INTERNET}")
    if isinstance(error, ConnectionRefusedError):
        return outside(f"cannot reach {peer}: connection refused", f"check host and port; {_NO_INTERNET}")
    if isinstance(error, (TimeoutError, Late)):
        return outside(f"cannot reach {peer}: no answer within {timeout:g} s", _NO_INTERNET)
    if isinstance(error, ssl.SSLCertVerificationError):
        return outside(
            f"the TLS certificate of {host} is not trusted: {error.verify_message}",
            "export SSL_CERT_FILE=FILE with the certificate authority of this registry or proxy, and check this "
            "machine's clock",
        )
    if isinstance(error, ssl.SSLError):
        todo = "if it uses plain HTTP, add it to the site's insecure registries"
        return outside(f"no TLS connection with {host}: {error.reason or 'the handshake failed'}", todo)
    if proxy and isinstance(error, OSError) and "Tunnel connection failed" in str(error):
        status = "".join(str(error).partition("failed:")[2].split()[:1])
        todo = "the proxy does not know or does not allow this host: ask its administrators, or use a mirror"
        if status == "407":
            todo = "it requires a login: set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
        return outside(f"{peer} refuses the connection (status {status})", todo)
    if isinstance(error, (HTTPError, HTTPException, ConnectionError)):
        todo = "check host and port"
        return outside(f"{peer} does not answer as a registry does ({type(error).__name__})", todo)
    reason = getattr(error, "strerror", None) or type(error).__name__
    return outside(f"cannot reach {peer}: {reason}", _NO_INTERNET)


def root_of(error: BaseException) -> BaseException:
    """The innermost of the exceptions that urllib3 wraps into each other."""
    while inner := next((one for one in error.args if isinstance(one, BaseException)), error.__cause__):
        error = inner
    return error


_MOST_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_PIECE = 1 << 16


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
    headers: HTTPHeaderDict
    body: bytes
    origin: Origin
    redirected: bool = False


class Transport:
    """Keeps one connection to each host until it is closed."""

    def __init__(self, settings: RegistrySettings) -> None:
        self._settings = settings
        self._managers: dict[Proxy | None, PoolManager] = {}

    def get(
        self,
        url: str,
        *,
        limit: int,
        what: str,
        authorization: str | None = None,
        accept: Iterable[str] = (),
        into: BinaryIO | None = None,
    ) -> Answer:
        """The answer at the end of all redirects.

        limit:         bytes of the body, above which it is refused.
        what:          is asked for, for messages: "the manifest of IMAGE".
        authorization: sent to the origin of `url` alone.
        into:          gets the body of a status 200, which the answer then has not.

        Raises ExternalError, and UserError for plain HTTP with a host for which it is not allowed.
        """
        target = _printable(url)
        first = origin_of(target)
        if first is None:
            raise outside(f"{what} has an invalid address", "check that this host is a registry")
        origin = first
        for _ in range(_MOST_REDIRECTS + 1):
            headers = {"Accept": ", ".join(accept) or "*/*", "User-Agent": f"slurmddp/{__version__}"}
            if authorization and origin == first:
                headers["Authorization"] = authorization
            answer = self._once(origin, target, headers, limit, what, into)
            if answer.status not in _REDIRECTS:
                return replace(answer, redirected=origin != first)
            target = urljoin(target, _printable(answer.headers.get("Location", "")))
            onward = origin_of(target)
            if onward is None:
                raise outside(f"{origin.name} redirects to an invalid address for {what}")
            if is_loopback(onward.host) and not is_loopback(first.host):
                raise outside(f"{origin.name} redirects to this machine itself ({onward.name}) for {what}", NO_REGISTRY)
            origin = onward
        raise outside(f"{first.name} redirects more than {_MOST_REDIRECTS} times, for {what}")

    def _once(
        self, origin: Origin, url: str, headers: Mapping[str, str], limit: int, what: str, into: BinaryIO | None
    ) -> Answer:
        if origin.scheme == "http" and not self._settings.plain_allowed(origin.name):
            what = f"{origin.name} would send {what} over plain HTTP, which is not allowed for that host"
            raise UserError(what, todo="if you trust the network: add it to the site's insecure registries")
        proxy = self._settings.proxy_for(origin.scheme, origin.name)
        parts = urlsplit(url)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        if origin.scheme == "http" and proxy:
            path = f"http://{origin.name}{path}"
        try:
            try:
                return self._exchange(origin, proxy, path, headers, limit, what, into)
            except ProtocolError as error:
                # The other side may have closed a connection that was kept, without having said so
                if not isinstance(root_of(error), ConnectionError):
                    raise
                return self._exchange(origin, proxy, path, headers, limit, what, into)
        except (HTTPError, HTTPException, OSError) as error:
            raise unreachable(error, origin.name, proxy.name if proxy else None, self._settings.patience) from None

    def _exchange(
        self,
        origin: Origin,
        proxy: Proxy | None,
        path: str,
        headers: Mapping[str, str],
        limit: int,
        what: str,
        into: BinaryIO | None,
    ) -> Answer:
        # The pool gets the host that our rules were asked about: urllib3 could read another one out of an address
        pool = self._manager(proxy).connection_from_host(origin.host, origin.port, origin.scheme)
        response = pool.urlopen(
            "GET", path, headers=dict(headers), timeout=self._settings.patience,
            retries=False, redirect=False, assert_same_host=False, preload_content=False,
        )  # fmt: skip
        with response:
            body = bytearray()
            length = 0
            into = into if response.status == 200 else None
            if into:
                into.seek(0)
                into.truncate()  # of a try that broke off
            # stream() of urllib3 2.2 reads a chunk's length into memory, however long; read() has a limit
            while piece := response.read(_PIECE, decode_content=False):
                length += len(piece)
                if into:
                    into.write(piece)
                else:
                    body += piece
                if length > limit:
                    raise outside(f"{origin.name} sent {what} with more than {limit >> 20} MiB, the limit")
        return Answer(response.status, response.headers, bytes(body), origin)

    def _manager(self, proxy: Proxy | None) -> PoolManager:
        if proxy not in self._managers:
            made = ProxyManager(f"http://{proxy.name}", proxy_headers=proxy.headers) if proxy else PoolManager()
            self._managers[proxy] = made
        return self._managers[proxy]

    def close(self) -> None:
        for manager in self._managers.values():
            manager.clear()


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
    """Percent-encode what a header may hold but an address may not."""
    return quote(location, safe="%!#$&'()*+,/:;=?@[]~", encoding="latin-1", errors="replace")
