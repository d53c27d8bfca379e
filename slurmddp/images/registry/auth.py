"""Answers a registry's challenge: Basic, or a Bearer token from the service that the registry names.

https://distribution.github.io/distribution/spec/auth/token/
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from slurmddp.errors import UserError
from slurmddp.images.registry.credentials import Found, advice
from slurmddp.images.registry.failures import NO_REGISTRY, bad_status, outside
from slurmddp.images.registry.settings import Location, is_loopback

if TYPE_CHECKING:
    from slurmddp.images.registry.transport import Transport

_LARGEST_TOKEN = 1 << 20
_PIECE = re.compile(
    r"""[\s,]*(?: (?P<key>[\w!#$%&'*+.^`|~-]+)\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,"]+))
                | (?P<scheme>[\w!#$%&'*+.^`|~-]+)(?=\s|,|$) )""",
    re.VERBOSE | re.ASCII,
)
_SCOPE = re.compile(r"(repository:[^\s:]+(?::\d+/[^\s:]+)?):[a-z,*]+")
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class Challenge:
    """One way to show who asks: `scheme` in lower case, parameters by their lower-case names."""

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict)


def parse_challenges(headers: Sequence[str]) -> list[Challenge]:
    """All challenges in a response's WWW-Authenticate headers; what is not understood is left out.

    Their grammar: RFC 9110, 11.6.1.
    """
    challenges: list[Challenge] = []
    for header in headers:
        inside: Challenge | None = None
        position = 0
        while match := _PIECE.match(header, position):
            position = match.end()
            if match["scheme"]:
                inside = Challenge(match["scheme"].lower())
                challenges.append(inside)
            elif inside:
                quoted = match["quoted"]
                value = match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                inside.parameters.setdefault(match["key"].lower(), value)
    return challenges


def authorize(
    challenges: Sequence[Challenge], found: Found, location: Location, transport: Transport, image: str
) -> str:
    """The Authorization header that answers the challenge.

    Without credentials a Bearer token is asked for all the same: registries hand them out for public images.
    Raises UserError (refused, or credentials needed) and ExternalError.
    """
    by_scheme = {challenge.scheme: challenge for challenge in reversed(challenges)}
    if "bearer" in by_scheme:
        return "Bearer " + _token(by_scheme["bearer"], found, location, transport, image)
    if "basic" in by_scheme:
        if found.credentials is None:
            raise refused(401, location, found, image)
        return found.credentials.basic
    if not challenges:
        raise refused(401, location, found, image)
    todo = "slurmddp supports Basic and Bearer; check that this host is a registry"
    raise outside(f"{location.host} asks for an unsupported kind of login for {image}", todo)


def refused(status: int, location: Location, found: Found, image: str) -> UserError:
    source = found.credentials.source if found.credentials else None
    where = advice(location.registry)
    remarks = "".join(f"; {remark}" for remark in found.remarks)
    if source:
        return UserError(
            f"{location.host} denies access to {image} with the login from {source} (status {status}){remarks}",
            todo=f"check user name, password, image name, and whether this user may read the image; otherwise {where}",
        )
    message = f"{location.host} requires a login for {image} (status {status}), but no credentials were found{remarks}"
    return UserError(message, todo=f"check the image name (an unknown image gives the same answer), or log in: {where}")


def _token(challenge: Challenge, login: Found, location: Location, transport: Transport, image: str) -> str:
    url = _token_url(challenge, location)
    host = urlsplit(url).netloc
    shown = login.credentials.basic if login.credentials else None
    answer = transport.get(url, limit=_LARGEST_TOKEN, what=f"a token for {image}", authorization=shown)
    if answer.status in (400, 401, 403):  # Docker Hub and others say 400 or 403 to what they do not know
        raise refused(answer.status, location, login, image)
    if answer.status == 404:
        raise outside(f"{host} has no token service for {image} (status 404)")
    if answer.status != 200:
        raise bad_status(answer.status, answer.headers, answer.body, host, f"a token for {image}")
    try:
        tree = json.loads(answer.body)
        token = tree.get("token") or tree.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise outside(f"{host} answered the token request for {image} without a token", "try again later")
    return token


def _token_url(challenge: Challenge, location: Location) -> str:
    realm = challenge.parameters.get("realm", "")
    scope = challenge.parameters.get("scope") or f"repository:{location.name}:pull"
    query = {"service": challenge.parameters.get("service"), "scope": _SCOPE.sub(r"\1:pull", scope)}
    try:
        parts = urlsplit(realm)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.fragment
        parts.port  # noqa: B018 -- raises for one that is none
    except ValueError:
        good = False
    if not good:
        raise outside(f"{location.host} gives no address for tokens", NO_REGISTRY)
    # From elsewhere it would have us ask services of this very machine
    if is_loopback(parts.hostname or "") and not is_loopback(location.host):
        raise outside(f"{location.host} refers to this machine itself ({parts.netloc}) for a token", NO_REGISTRY)
    given = urlencode({key: value for key, value in query.items() if value})
    return f"{realm}{'&' if parts.query else '?'}{given}"
