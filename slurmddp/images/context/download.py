"""ADD of an address: what is there is fetched once, on the machine that builds, before the builder starts."""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.context.staging import Item
from slurmddp.images.provenance import sha256
from slurmddp.images.registry.failures import outside, within
from slurmddp.images.registry.settings import RegistrySettings
from slurmddp.images.registry.transport import Transport

if TYPE_CHECKING:
    from slurmddp.images.dockerfile.lines import Instruction

_NAME = re.compile(r"[\w@%+=:,-][\w@%+=:,.-]*")
_CHECKSUM = re.compile(r"sha256:[0-9a-f]{64}")
#: Bytes, and seconds, that one file may take.
_LARGEST, _LONGEST = 64 << 30, 3600


def read_address(url: str, checksum: str, instruction: Instruction) -> str:
    """The name of the file that the address leads to. Raises UserError for what is not fetched."""
    if instruction.keyword == "COPY":
        raise instruction.error(f"COPY cannot download {url}", "use ADD")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.path.endswith(".git"):
        todo = "RUN git clone --branch NAME ADDRESS FOLDER; or clone it beside the Dockerfile, and COPY"
        raise instruction.error(f"ADD of {url} is not converted: it is not the URL of a file", todo)
    if not url.isprintable() or " " in url or parts.username or parts.password:
        raise instruction.error("the URL contains a password or an invalid character", "use RUN curl with a --secret")
    if checksum and not _CHECKSUM.fullmatch(checksum):
        raise instruction.error(f"--checksum={checksum} is not a SHA-256", "write --checksum=sha256: and 64 digits")
    name = unquote(parts.path.rsplit("/", 1)[-1])
    if not _NAME.fullmatch(name):
        raise instruction.error(f"{url} does not end in a file name", f"RUN curl -fsSL -o FILE {url}")
    return name


@contextlib.contextmanager
def downloaded(
    items: Iterable[Item], folder: Path, settings: RegistrySettings, report: Callable[[str], None]
) -> Iterator[tuple[tuple[Item, ...], dict[str, str]]]:
    """The items with files in the place of addresses, and the SHA-256 of each address; the files go afterwards.

    Raises UserError for a wrong checksum, ExternalError where an address cannot be had.
    """
    checksums: dict[str, str] = {}
    items = tuple(items)
    if not any(item.url for item in items):
        yield items, checksums
        return
    with tempfile.TemporaryDirectory(prefix="slurmddp-", dir=folder if folder.is_dir() else None) as scratch:
        for item in items:
            file = Path(scratch, hashlib.sha256(item.url.encode()).hexdigest())
            if item.url and item.url not in checksums:
                report(f"fetching {item.url}")
                checksums[item.url] = _fetch(item.url, file, settings)
            if item.checksum and item.checksum != f"sha256:{checksums[item.url]}":
                raise UserError(
                    f"{item.url} has the checksum sha256:{checksums[item.url]}, not {item.checksum}",
                    where=item.where,
                    todo="check what has changed there; if it is right, write the new checksum",
                )
        files = {url: Path(scratch, hashlib.sha256(url.encode()).hexdigest()) for url in checksums}
        yield tuple(replace(item, path=files[item.url]) if item.url else item for item in items), checksums


def _fetch(url: str, file: Path, settings: RegistrySettings) -> str:
    """Write the file as Docker does: for its owner alone, with the server's time. Returns its SHA-256."""
    transport = Transport(settings)
    host = urlsplit(url).hostname
    try:
        with file.open("xb") as target:
            os.chmod(file, 0o600)
            answer = within(_LONGEST, lambda: transport.get(url, limit=_LARGEST, what=url, into=target))
    except TimeoutError:
        raise outside(
            f"{url} did not arrive within {_LONGEST // 60} minutes", "download it yourself first, and COPY it"
        ) from None
    except OSError as error:
        raise ExternalError(f"{file} cannot be written: {error.strerror}") from None
    finally:
        transport.close()
    if answer.status != 200:
        raise outside(f"{host} has no file at {url} (status {answer.status})", "check the address")
    modified = email.utils.parsedate_tz(answer.headers.get("Last-Modified", ""))
    time = email.utils.mktime_tz(modified) if modified else 0
    os.utime(file, (time, time))
    return sha256(file)
