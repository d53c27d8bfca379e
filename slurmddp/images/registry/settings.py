"""How registries are reached: proxy, mirrors, plain HTTP, and for how long an answer is waited for."""

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from slurmddp.errors import UserError
from slurmddp.images.registry.reference import DOCKER_HUB, Reference, canonical_registry
from slurmddp.records import address

# Docker Hub's registry answers under another name than its images have.
_API_HOSTS = {DOCKER_HUB: "registry-1.docker.io"}


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy; `userinfo` is "user:password" where the address had one, and is never shown."""

    host: str
    port: int
    userinfo: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """HOST:PORT, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """The headers for the proxy alone, not for the registry behind it."""
        coded = base64.b64encode((self.userinfo or "").encode()).decode("ascii")
        return {} if self.userinfo is None else {"Proxy-Authorization": f"Basic {coded}"}


@dataclass(frozen=True)
class Location:
    """Where an image is really asked for: scheme, host (with port) and the repository's path there."""

    scheme: str
    host: str
    name: str

    @property
    def url(self) -> str:
        """The repository's address: /manifests/ and /blobs/ follow."""
        return f"{self.scheme}://{self.host}/v2/{self.name}"

    @property
    def registry(self) -> str:
        """The host as a reference writes it, and as people log in to it."""
        return DOCKER_HUB if self.host == _API_HOSTS[DOCKER_HUB] else self.host

    @property
    def repository(self) -> str:
        """Registry and path, for a program that is to pull from here."""
        return f"{self.registry}/{self.name}"


@dataclass(frozen=True)
class RegistrySettings:
    #: "http://HOST:PORT" for every host but loopback ones and those in NO_PROXY; None: HTTPS_PROXY (for plain HTTP:
    #: http_proxy) of the environment
    proxy: str | None = None
    #: a registry's host -> HOST[:PORT][/PATH] that is asked instead of it, and alone
    mirrors: Mapping[str, str] = field(default_factory=dict)
    #: hosts, with or without a port, with which plain HTTP is spoken; loopback hosts need no mention
    insecure: frozenset[str] = frozenset()
    timeout: float = 30.0  # seconds that all answers about one image may take together

    @property
    def patience(self) -> float:
        """Seconds without any progress; fewer than in all, so that the message can say where there was none."""
        return self.timeout / 2

    def location(self, reference: Reference) -> Location:
        """Return where this image is asked for. Raises UserError for a mirror that is none."""
        for registry, mirror in self.mirrors.items():
            if canonical_registry(registry) == reference.registry:
                return self._mirror(registry, mirror, reference.name)
        host = _API_HOSTS.get(reference.registry, reference.registry)
        return Location("http" if self.plain_allowed(host) else "https", host, reference.name)

    def plain_allowed(self, host: str) -> bool:
        """Return whether plain HTTP may be spoken with this host (with or without a port)."""
        names = {name.lower() for name in self.insecure}
        return is_loopback(host) or host.lower() in names or _hostname(host) in names

    def proxy_for(self, scheme: str, host: str) -> Proxy | None:
        """The proxy on the way to this host (with its port, where it has one); None: straight. Raises UserError."""
        from urllib.request import getproxies_environment, proxy_bypass

        if is_loopback(host):  # as Apptainer does it (golang.org/x/net/http/httpproxy, useProxy)
            return None
        if proxy_bypass(host):
            return None
        if self.proxy is not None:
            return parse_proxy(self.proxy, "the proxy of the site's profile")
        url = getproxies_environment().get(scheme)
        return parse_proxy(url, f"{scheme}_proxy or {scheme.upper()}_PROXY in the environment") if url else None

    def _mirror(self, registry: str, mirror: str, name: str) -> Location:
        given, mark, rest = mirror.partition("://")
        base = (rest if mark else mirror).rstrip("/")
        host, _, path = base.partition("/")
        where = f"the mirror of {registry}"
        if (mark and given not in ("http", "https")) or not host or not base.isprintable() or set(base) & set(" ?#@"):
            # An address with a password in it must not be shown
            todo = "write it like mirror.example.org/docker-hub"
            raise UserError("it is not HOST[:PORT][/PATH]", where=where, todo=todo)
        plain = self.plain_allowed(host)
        if given == "http" and mark and not plain:
            message = f"{host} would be reached over plain HTTP, which is not allowed for it"
            raise UserError(message, where=where, todo="write https://, or add the host to the insecure registries")
        return Location(given if mark else "http" if plain else "https", host, f"{path}/{name}" if path else name)


def parse_proxy(text: str, where: str) -> Proxy:
    """Parse "http://[USER:PASSWORD@]HOST[:PORT]". Raises UserError, which does not show the address."""
    todo = "write http://HOST:PORT"
    scheme = text.partition("://")[0].lower() if "://" in text else "http"
    if scheme != "http":
        raise UserError(f"proxies of type {scheme[:10]!r} are not supported", where=where, todo=todo)
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port or 80
    except ValueError:
        host, port = None, 0
    if not host or not host.isascii() or not host.isprintable():
        raise UserError("it is not the address of a proxy", where=where, todo=todo)
    userinfo = None
    if parts.username is not None:
        userinfo = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return Proxy(host, port, userinfo)


def is_loopback(host: str) -> bool:
    """Return whether this host (with or without a port) is this machine itself."""
    name = _hostname(host)
    return name.endswith(".localhost") or address.is_loopback(name)


def _hostname(host: str) -> str:
    """Without port and brackets, in lower case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return (host.rpartition(":")[0] if host.count(":") == 1 else host).lower()
