"""What the nodes could not send waits in the run folder; whoever uses the login node next sends it."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from slurmddp.alerts import secrets
from slurmddp.runs.gate import OwnRun, own_or_none
from slurmddp.runs.layout import RunFolder
from slurmddp.slurm.base import clean_environment

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_HEADER = re.compile(r'[A-Za-z-]+: [^"\\\x00-\x1f\x7f-\xff]*')
#: How alert.sh names a message's folder behind the run's id, and the files in it.
_MESSAGE = re.compile(r"\.[0-9]{1,9}\.[a-z_]{1,40}\.[A-Za-z0-9][A-Za-z0-9._+-]*")
_HEAD, _BODY = "head", "body"
_HEAD_LINES = 20
#: Bytes of a message; the largest that a target accepts has some kB.
_LARGEST = 2**20
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
    body: bytes


def deliver_all(folders: Iterable[RunFolder], *, seconds: float = 2.0) -> Delivered:
    """Send what waits in run folders, taking `seconds` at most (and a second for what hangs in spite of that).

    Only the run's owner sends. Never raises: what does not go out now waits for the next time.
    """
    deadline = time.monotonic() + seconds
    sent, left, why = 0, 0, ""
    for folder in folders:
        if not os.path.lexists(folder.alert_spool) or (run := own_or_none(folder)) is None:
            continue
        try:
            for name in _waiting(run):
                remaining = deadline - time.monotonic()
                outcome = _one(run, name, remaining) if remaining > 0 else ""
                sent, left = sent + (outcome is None), left + bool(outcome is not None)
                why = outcome or why
        except (OSError, ValueError) as error:
            why = str(error)
    return Delivered(sent, left, why)


def _waiting(run: OwnRun) -> list[str]:
    """Names of the messages that may be taken, the oldest first."""
    try:
        with run.held.inside(run.alert_spool, listed=True) as spool:
            entries = [(name, os.stat(name, dir_fd=spool, follow_symlinks=False)) for name in os.listdir(spool)]
    except FileNotFoundError:
        return []
    found = sorted(
        (facts.st_mtime, name) for name, facts in entries if stat.S_ISDIR(facts.st_mode) and _is_ours(run, name)
    )
    return [name for changed, name in found if not name.startswith(".") or _is_abandoned(run, name, changed)]


def _is_ours(run: OwnRun, name: str) -> bool:
    """Return whether alert.sh gives a message such a name: RUN.ATTEMPT.KIND.TARGET, with a dot before it while it is
    being sent."""
    plain = name.removeprefix(".")
    return plain.startswith(run.id) and _MESSAGE.fullmatch(plain.removeprefix(run.id)) is not None


def _is_abandoned(run: OwnRun, name: str, changed: float) -> bool:
    """Return whether the time is over that its sender had given itself."""
    until = _head(run, run.alert_spool / name).get("until", "")
    limit = float(until) if until.isdecimal() else changed + _STALE_SECONDS
    return time.time() > limit


def _one(run: OwnRun, name: str, seconds: float) -> str | None:
    """Send one message: None if that is done, else why it still waits ("" where another process has it)."""
    message = _claim(run, name, seconds)
    if message is None:
        return ""
    path, sent = message.path, run.path / "alerts" / "sent"
    if f"{message.key} {message.target}" in _lines(run, sent):
        _remove(run, path)
        return None
    url = secrets.address(run.id, message.target, os.environ)
    if url is None:
        where = secrets.of_run(run.id, os.environ) / message.target
        status, why = "", f"the address of {message.target} is not in {where}"
    elif not secrets.may_be_sent_to(url, insecure=message.insecure):
        status, why = "", f"the address of {message.target} is not https"
    else:
        status, why = _post(message, url, seconds)
    if status.startswith("2"):
        run.held.append_text(sent, f"{message.key} {message.target}\n")
        _remove(run, path)
        run.record("alert", kind=message.kind, target=message.target, delivered=True, spooled=False)
        return None
    refused = status.startswith("4") and status not in ("408", "429")
    keep = run.path / "alerts" / "refused" if refused else path.parent
    run.held.make(keep)
    run.held.move(path, keep / path.name.removeprefix("."))
    return why


def _claim(run: OwnRun, name: str, seconds: float) -> _Message | None:
    """Take a message by renaming it; None if another process was faster or it is none of ours."""
    spool, plain = run.alert_spool, name.removeprefix(".")
    try:
        if name != plain:
            run.held.move(spool / name, spool / plain)
        head = _head(run, spool / plain)
        if not head and name != plain:
            _remove(run, spool / plain)  # its sender was killed before it had written it down
            return None
        _write_head(run, spool / plain, {**head, "until": str(int(time.time() + seconds + 15))})
        run.held.move(spool / plain, spool / f".{plain}")
        body = run.held.read(spool / f".{plain}" / _BODY, _LARGEST)
    except OSError:
        return None
    values = [head.get(part, "") for part in ("target", "key", "kind")]
    if not all(_NAME.fullmatch(value) for value in values):
        return None  # half written when its sender was killed, or no work of ours: it stays where it lies
    target, key, kind = values
    headers = tuple(line for line in head.get("header", "").split("\n") if _HEADER.fullmatch(line))
    return _Message(spool / f".{plain}", target, key, kind, head.get("insecure") == "1", headers, body)


def _remove(run: OwnRun, path: Path) -> None:
    """Remove a message: the files that alert.sh writes. What else lies there stays, with its folder."""
    with run.held.inside(path, listed=True) as folder:
        for name in os.listdir(folder):
            if name in (_HEAD, _BODY) or name.startswith(f"{_HEAD}.part"):
                os.unlink(name, dir_fd=folder)
    with run.held.inside(path.parent) as spool:
        try:
            os.rmdir(path.name, dir_fd=spool)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise


def _head(run: OwnRun, path: Path) -> dict[str, str]:
    """The lines `WORD VALUE` of a message's head; of several with one word, the values with line breaks between."""
    found: dict[str, str] = {}
    for line in _lines(run, path / _HEAD)[:_HEAD_LINES]:
        word, _, value = line.partition(" ")
        found[word] = f"{found[word]}\n{value}" if word in found else value
    return found


def _write_head(run: OwnRun, path: Path, head: Mapping[str, str]) -> None:
    lines = [f"{word} {value}" for word, text in head.items() for value in text.split("\n")]
    run.held.write(path / _HEAD, "\n".join(lines) + "\n")


def _post(message: _Message, url: str, seconds: float) -> tuple[str, str]:
    """curl with the address on its standard input, as in alert.sh: the status ("000" without an answer), and why."""
    import subprocess  # here: most commands have nothing to send
    import tempfile

    words = [("url", url), *(("header", header) for header in message.headers)]
    config = "".join(f'{word} = "{value}"\n' for word, value in words)
    command = ["curl", "--disable", "--config", "-", "--silent", "--globoff", "--proto", "=http,https"]
    command += ["--max-time", f"{max(seconds, 0.1):.1f}", "--output", "/dev/null", "--write-out", "%{http_code}"]
    try:
        with tempfile.TemporaryFile() as body:
            body.write(message.body)
            body.seek(0)
            done = subprocess.run(
                [*command, "--data-binary", f"@/dev/fd/{body.fileno()}"],
                input=config.encode("ascii"),
                pass_fds=[body.fileno()],
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


def _lines(run: OwnRun, path: Path) -> list[str]:
    try:
        return run.held.read(path, _LARGEST).decode("utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return []
