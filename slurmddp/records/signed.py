"""Signatures with the run's key: what a node accepts from the network comes from the same run.

The key is in the run folder, readable by its owner alone. A signature (HMAC-SHA256) covers the content and where it
belongs, so a signed value cannot be moved to another key, rendezvous or attempt.
"""

import base64
import binascii
import hashlib
import hmac
import os
import stat
from typing import Tuple

_LENGTH = hashlib.sha256().digest_size
#: Bytes of a key as `run/create.py` makes it, and more than enough for any other.
_SHORTEST, _LONGEST = 32, 4096


class ForgedError(ValueError):
    """Something that does not carry the run's signature, or that of another place."""


class UnsafeKeyError(ValueError):
    """There is no key, or somebody else may know or have made it."""


class Key:
    """Signs and checks. Two keys of the same secret accept each other's signatures."""

    def __init__(self, secret: bytes, pair: str = "", why: str = "") -> None:
        """pair: the file with the run's key pair for TLS, if there is one. why: why submission could not make one."""
        self.secret, self.pair, self.why = secret, pair, why

    def seal(self, content: bytes, *where: str) -> bytes:
        """Return `content` with its signature, as ASCII. `where`: what it belongs to, such as a rendezvous id."""
        return base64.b64encode(self._digest(content, where) + content)

    def open(self, sealed: bytes, *where: str) -> bytes:
        """Return the content that `seal` was given. Raises ForgedError for anything else."""
        try:
            raw = base64.b64decode(sealed, validate=True)
        except (binascii.Error, ValueError):
            raise ForgedError("not signed") from None
        digest, content = raw[:_LENGTH], raw[_LENGTH:]
        if not hmac.compare_digest(digest, self._digest(content, where)):
            raise ForgedError("not signed with this run's key")
        return content

    def _digest(self, content: bytes, where: Tuple[str, ...]) -> bytes:
        total = hmac.new(self.secret, digestmod=hashlib.sha256)
        for part in (*(text.encode() for text in where), content):
            total.update(len(part).to_bytes(8, "big") + part)  # with its length: ("ab", "c") is not ("a", "bc")
        return total.digest()


def load(path: str, pair: str = "") -> Key:
    """Return the key in a file. pair: the file of the key pair, which need not be there. Raises UnsafeKeyError."""
    secret = _read(path)
    if len(secret) < _SHORTEST:
        raise UnsafeKeyError("the run's key {} is too short: submit the run again".format(path))
    if not pair or not os.path.lexists(pair):
        return Key(secret)
    content = _read(pair)
    return Key(secret, pair) if content.startswith(b"-----BEGIN ") else Key(secret, why=content.decode().strip())


def _read(path: str) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                raise UnsafeKeyError("the run's key {} is not a file of yours: submit the run again".format(path))
            if facts.st_mode & 0o077:
                text = "other users can read the run's key {}: chmod 600 it, or submit the run again"
                raise UnsafeKeyError(text.format(path))
            return file.read(_LONGEST)
    except OSError as error:
        text = "cannot read the run's key {}: {}. Submit the run again"
        raise UnsafeKeyError(text.format(path, error.strerror)) from error
