"""What the nodes could not send waits in the run folder; whoever uses the login node next sends it."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.runs.events import append_event
from slurmddp.runs.layout import RunFolder
from slurmddp.shared.files import write_whole
from slurmddp.slurm.base import clean_environment

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_HEADER = re.compile(r'[A-Za-z-]+: [^"\\\x00-\x1f\x7f-\xff]*')
_HEAD_LINES = 20
#: A message that somebody is sending is left alone for as long as it says, or this long where it does not say.
_STALE_SECONDS = 600.0


class Delivered(NamedTuple):
    """Messages that have gone out now, and those that still wait; why: what the last failure was, "" without one."""

    sent: int = 0
    left: int = 0
    why: str = ""


class _Message(NamedTuple):
    """One folder of the spool, ours to send."""

    path: Path
    target: str
    key: str
    kind: str
    insecure: bool
    headers: tuple[str, ...]


def deliver(folder: RunFolder, *, seconds: float = 2.0) -> Delivered:
    """Send what waits in the run folder, taking `seconds` at most (and a second for what hangs in spite of that).

    Only the run's owner sends. Never raises: what does not go out now waits for the next time.
    """
    return deliver_all([folder], seconds=seconds)


def deliver_all(folders: Iterable[RunFolder], *, seconds: float = 2.0) -> Delivered:
    """Return `deliver` for many runs, the seconds for all of them together."""
    deadline = time.monotonic() + seconds
    sent, left, why = 0, 0, ""
    for folder in folders:
        try:
            for name in _waiting(folder):
                remaining = deadline - time.monotonic()
                outcome = _one(folder, name, remaining) if remaining > 0 else ""
                sent, left = sent + (outcome is None), left + bool(outcome is not None)
                why = outcome or why
        except (OSError, ValueError) as error:
            why = str(error)
    return Delivered(sent, left, why)


def _waiting(folder: RunFolder) -> list[str]:
    """Names of the messages that may be taken, the oldest first; none where the run is somebody else's."""
    spool = folder.alert_spool
    try:
        if spool.stat().st_uid != os.geteuid():
            return []
        found = [(entry.stat().st_mtime, entry.name) for entry in os.scandir(spool) if entry.is_dir()]
    except FileNotFoundError:
        return []
    return [name for _, name in sorted(found) if not name.startswith(".") or _is_abandoned(spool / name)]


def _is_abandoned(path: Path) -> bool:
    """Return whether the time is over that its sender had given itself."""
    until = _head(path).get("until", "")
    limit = float(until) if until.isdecimal() else path.stat().st_mtime + _STALE_SECONDS
    return time.time() > limit


def _one(folder: RunFolder, name: str, seconds: float) -> str | None:
    """Send one message: None if that is done, else why it still waits ("" where another process has it)."""
    message = _claim(folder, name, seconds)
    if message is None:
        return ""
    path, sent = message.path, folder.path / "alerts" / "sent"
    if f"{message.key} {message.target}" in _lines(sent):
        shutil.rmtree(path)
        return None
    url = secrets.address(folder.id, message.target, os.environ)
    if url is None:
        where = secrets.of_run(folder.id, os.environ) / message.target
        status, why = "", f"the address of {message.target} is not in {where}"
    elif not secrets.may_be_sent_to(url, insecure=message.insecure):
        status, why = "", f"the address of {message.target} is not https"
    else:
        status, why = _post(message, url, seconds)
    if status.startswith("2"):
        with sent.open("a", encoding="utf-8") as file:
            file.write(f"{message.key} {message.target}\n")
        shutil.rmtree(path)
        append_event(folder.events, "alert", kind=message.kind, target=message.target, delivered=True, spooled=False)
        return None
    refused = status.startswith("4") and status not in ("408", "429")
    keep = folder.path / "alerts" / "refused" if refused else path.parent
    keep.mkdir(exist_ok=True)
    path.rename(keep / path.name.removeprefix("."))
    return why


def _claim(folder: RunFolder, name: str, seconds: float) -> _Message | None:
    """Take a message by renaming it; None if another process was faster or it is none of ours."""
    spool, plain = folder.alert_spool, name.removeprefix(".")
    try:
        if name != plain:
            (spool / name).rename(spool / plain)
        head = _head(spool / plain)
        if not head and name != plain:
            shutil.rmtree(spool / plain)  # its sender was killed before it had written it down
            return None
        _write_head(spool / plain, {**head, "until": str(int(time.time() + seconds + 15))})
        (spool / plain).rename(spool / f".{plain}")
    except OSError:
        return None
    values = [head.get(part, "") for part in ("target", "key", "kind")]
    if not all(_NAME.fullmatch(value) for value in values) or not (spool / f".{plain}" / "body").is_file():
        return None  # half written when its sender was killed, or no work of ours: it stays where it lies
    target, key, kind = values
    headers = tuple(line for line in head.get("header", "").split("\n") if _HEADER.fullmatch(line))
    return _Message(spool / f".{plain}", target, key, kind, head.get("insecure") == "1", headers)


def _head(path: Path) -> dict[str, str]:
    """The lines `WORD VALUE` of a message's head; of several with one word, the values with line breaks between."""
    found: dict[str, str] = {}
    for line in _lines(path / "head")[:_HEAD_LINES]:
        word, _, value = line.partition(" ")
        found[word] = f"{found[word]}\n{value}" if word in found else value
    return found


def _write_head(path: Path, head: Mapping[str, str]) -> None:
    lines = [f"{word} {value}" for word, text in head.items() for value in text.split("\n")]
    write_whole(path / "head", "\n".join(lines) + "\n")


def _post(message: _Message, url: str, seconds: float) -> tuple[str, str]:
    """curl with the address on its standard input, as in alert.sh: the status ("000" without an answer), and why."""
    import subprocess  # here: most commands have nothing to send

    config = "".join(
        f'{word} = "{value}"\n' for word, value in [("url", url), *(("header", h) for h in message.headers)]
    )
    command = ["curl", "--disable", "--config", "-", "--silent", "--globoff", "--proto", "=http,https"]
    command += ["--max-time", f"{max(seconds, 0.1):.1f}", "--data-binary", "@body", "--output", "/dev/null"]
    command += ["--write-out", "%{http_code}"]
    try:
        done = subprocess.run(
            command,
            input=config.encode("ascii"),
            cwd=message.path,
            env=clean_environment(os.environ),
            capture_output=True,
            timeout=seconds + 1,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return "000", f"{message.target}: curl: {type(error).__name__}"
    status = done.stdout.decode("ascii", errors="replace").strip() or "000"
    how = f"status {status}" if status != "000" else f"no answer (curl's exit code {done.returncode})"
    return status, f"{message.target}: {how}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
