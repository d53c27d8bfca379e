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
    found: list[Challenge] = []
    for header in headers:
        inside: Challenge | None = None
        position = 0
        while match := _PIECE.match(header, position):
            position = match.end()
            if match["scheme"]:
                inside = Challenge(match["scheme"].lower())
                found.append(inside)
            elif inside:
                quoted = match["quoted"]
                value = match["bare"] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
                inside.parameters.setdefault(match["key"].lower(), value)
    return found


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
    raise outside(
        f"{location.host} wants to know who asks for {image} in a way that is not supported here",
        "Basic and Bearer are; check the host: is it a registry?",
    )


def refused(status: int, location: Location, found: Found, image: str) -> UserError:
    """What a user is told after 401 or 403."""
    source = found.credentials.source if found.credentials else None
    where = advice(location.registry)
    remarks = "".join(f"; {remark}" for remark in found.remarks)
    if source:
        return UserError(
            f"{location.host} refuses {image} to the name and password of {source} (status {status}){remarks}",
            todo=f"check name and password, whether that user may read the image, and its name; otherwise {where}",
        )
    return UserError(
        f"{location.host} does not show {image} to everybody (status {status}), and no credentials for it were "
        f"found{remarks}",
        todo=f"check the image's name (an unknown one gets the same answer), or log in: {where}",
    )


def _token(challenge: Challenge, found: Found, location: Location, transport: Transport, image: str) -> str:
    url = _token_url(challenge, location)
    host = urlsplit(url).netloc
    shown = found.credentials.basic if found.credentials else None
    answer = transport.get(url, limit=_LARGEST_TOKEN, what=f"a token for {image}", authorization=shown)
    if answer.status in (400, 401, 403):  # Docker Hub and others say 400 or 403 to what they do not know
        raise refused(answer.status, location, found, image)
    if answer.status == 404:
        raise outside(f"{host}, which is to hand out a token for {image}, does not know how (status 404)")
    if answer.status != 200:
        raise bad_status(answer.status, answer.headers, answer.body, host, f"a token for {image}")
    try:
        tree = json.loads(answer.body)
        token = tree.get("token") or tree.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        token = None
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise outside(f"{host} gives no token for {image}, though it says that it does", "try again later")
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
        raise outside(f"{location.host} names no address at which a token is to be had", NO_REGISTRY)
    # From elsewhere it would have us ask services of this very machine
    if is_loopback(parts.hostname or "") and not is_loopback(location.host):
        raise outside(f"{location.host} sends us to this machine itself, {parts.netloc}, for a token", NO_REGISTRY)
    given = urlencode({key: value for key, value in query.items() if value})
    return f"{realm}{'&' if parts.query else '?'}{given}"
