"""Messages for a registry that cannot be reached."""

from __future__ import annotations

import http.client
import socket
import ssl

from urllib3.exceptions import HTTPError, LocationValueError
from urllib3.exceptions import TimeoutError as Late

from slurmddp.errors import ExternalError
from slurmddp.images.registry.failures import outside

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
        return outside(
            f"no TLS connection with {host}: {error.reason or 'the handshake failed'}",
            "if it uses plain HTTP, add it to the site's insecure registries",
        )
    if proxy and isinstance(error, OSError) and "Tunnel connection failed" in str(error):
        status = "".join(str(error).partition("failed:")[2].split()[:1])
        todo = "the proxy does not know or does not allow this host: ask its administrators, or use a mirror"
        if status == "407":
            todo = "it requires a login: set HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT"
        return outside(f"{peer} refuses the connection (status {status})", todo)
    if isinstance(error, (HTTPError, http.client.HTTPException, ConnectionError)):
        todo = "check host and port"
        return outside(f"{peer} does not answer as a registry does ({type(error).__name__})", todo)
    reason = getattr(error, "strerror", None) or type(error).__name__
    return outside(f"cannot reach {peer}: {reason}", _NO_INTERNET)


def root_of(error: BaseException) -> BaseException:
    """The innermost of the exceptions that urllib3 wraps into each other."""
    while inner := next((one for one in error.args if isinstance(one, BaseException)), error.__cause__):
        error = inner
    return error
