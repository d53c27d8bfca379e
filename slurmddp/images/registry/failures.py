"""What goes wrong with registries: one that answers too late, or with an error."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, TypeVar

from slurmddp.errors import ExternalError, SlurmddpError, UserError

if TYPE_CHECKING:
    from urllib3 import HTTPHeaderDict


Result = TypeVar("Result")


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """The call's result, or what it raises; TimeoutError after so many seconds.

    A socket's time-out counts from its last byte: a server that sends one byte at a time, of a header or of a chunk's
    length, would never reach it. So the call has a thread of its own, which is left behind where it is too slow; it
    does not keep the process alive.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 -- the caller raises it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError
    return future.result()


NO_REGISTRY = "check that this host is a registry"
# Nothing else of an error's text is shown: a registry might repeat what was sent to it
# (distribution-spec, "Error Codes").
_CODE = re.compile(
    "(BLOB|MANIFEST|NAME|BLOB_UPLOAD|MANIFEST_BLOB)_UNKNOWN|(BLOB_UPLOAD|DIGEST|MANIFEST|NAME|SIZE|TAG)_INVALID|"
    "UNAUTHORIZED|DENIED|UNSUPPORTED|TOOMANYREQUESTS|UNAVAILABLE|UNKNOWN"
)


def outside(what: str, todo: str | None = None) -> ExternalError:
    """An ExternalError that says what to do as UserError does."""
    return ExternalError(f"{what}\n  -> {todo}" if todo else what)


def bad_status(status: int, headers: HTTPHeaderDict, body: bytes, host: str, what: str) -> SlurmddpError:
    """Return the error for an answer other than 200, 401, 403 and 404."""
    code = error_code(body)
    shown = f"status {status}, {code}" if code else f"status {status}"
    if status == 429:
        wait = headers.get("Retry-After", "")
        after = f" for {wait} s" if wait.isdecimal() and len(wait) < 7 else ""
        todo = f"wait{after} and try again, log in (this raises the limit), or use a mirror"
        return outside(f"{host} limits the rate of requests and refuses {what} ({shown})", todo)
    if status >= 500:
        return outside(f"{host} failed to send {what} ({shown})", "try again later")
    if status == 407:
        return outside(f"the proxy for {host} requires a user name and password ({shown})")
    return outside(f"{host} gave an unexpected answer for {what} ({shown})", "check that this host is a registry")


def not_found(body: bytes, host: str, image: str, digest: str | None) -> UserError:
    code = error_code(body)
    if digest:
        message = f"{image} does not exist at {host}, or was removed: registries remove images without a tag"
        return UserError(message, todo="pin the tag again, or check the name")
    if code == "NAME_UNKNOWN":
        return UserError(f"{image} does not exist: {host} has no image of this name", todo="check the name")
    if code == "MANIFEST_UNKNOWN":
        return UserError(f"{image} does not exist: {host} has no such tag", todo="check the tag, and the name")
    todo = "check name and tag, and that this host is a registry"
    return UserError(f"{image} does not exist at {host} (status 404)", todo=todo)


def error_code(body: bytes) -> str | None:
    """The code of the first error in a registry's answer, where it is one of the specification's."""
    try:
        code = json.loads(body)["errors"][0]["code"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return None
    return code if isinstance(code, str) and _CODE.fullmatch(code) else None
