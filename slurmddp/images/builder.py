"""Builds an image with the machine's Apptainer or Singularity: all of it, or nothing at all."""

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import ExternalError, UserError
from slurmddp.images import spython_adapter
from slurmddp.images.base import is_sif
from slurmddp.images.context.staging import Item, gathered
from slurmddp.images.definition import PACKAGES
from slurmddp.images.log import BuildLog, log_path
from slurmddp.images.process import StopSignals
from slurmddp.images.provenance import check_target, lock_path, lock_text, sha256, writing
from slurmddp.images.spython_adapter import passed_environment
from slurmddp.images.workspace import HELD, RECORD, own_tmp

Flavour = Literal["apptainer", "singularityce", "singularity"]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Builder:
    """The program that builds: its name on PATH, its version, and which of the family it is."""

    name: str
    version: str
    flavour: Flavour


@dataclass(frozen=True)
class Built:
    """A finished image: bytes and SHA-256 of the file, and torch's version by its package's metadata."""

    image: Path
    bytes: int
    sha256: str
    torch: str | None
    definition: Path
    log: Path
    lock: Path


def find_builder(prefer: str | None = None) -> Builder:
    """Apptainer, else Singularity, from PATH; the one called `prefer` first.

    Raises UserError where there is neither, ExternalError where the one found does not run.
    """
    for name in sorted(SIF_PROGRAMS, key=lambda name: name != prefer):
        if shutil.which(name):
            return parse_version(name, spython_adapter.version_text(name))
    todo = "build on a login node; many sites need `module load apptainer` (or singularity) first"
    raise UserError("neither apptainer nor singularity is on PATH", todo=todo)


def parse_version(name: str, text: str) -> Builder:
    """Parse "apptainer version 1.4.5-1", "singularity-ce version 4.1.0" or "singularity version 3.8.7"."""
    version = re.search(r"\d+\.\d+[\w.+~-]*", text)
    flavour: Flavour = "singularity"
    if text.lower().startswith("apptainer"):
        flavour = "apptainer"
    elif re.match(r"singularity-?(ce|pro)\b", text.lower()):
        flavour = "singularityce"
    return Builder(name, version.group(0) if version else "unknown", flavour)


def build_command(builder: Builder, definition: Path, image: Path, options: tuple[str, ...]) -> list[str]:
    """The command line that builds `image`; options are those of the way in which this machine can (privilege.py).

    --force lets our labels and help replace those of a base that has its own (apptainer,
    internal/pkg/build/metadata.go); no file is at `image`.
    """
    return [builder.name, "build", "--force", *options, str(image), str(definition)]


def build(
    definition: str,
    target: Path,
    builder: Builder,
    *,
    options: tuple[str, ...],
    variables: Mapping[str, str],
    facts: Mapping[str, Any],
    temporary: Path,
    items: Iterable[Item] = (),
    lock: int | None = None,
    force: bool,
    report: Report,
) -> Built:
    """Build the definition into `target`, an absolute path, with a .def, .build.log and .lock.json beside it.

    options, variables: further ones for the builder; facts: what the lock says besides what is known of the image.
    temporary: a folder for what the builder unpacks, and for what %post has as /tmp and /var/tmp.
    items: what the definition takes from a folder beside it.
    lock: the open file of only_build, which the builder holds, too.

    Every line that the builder says goes to `report` and into the log. An image that is there already stays
    untouched until the new one is complete and inspected.
    Raises UserError (target, permissions), ExternalError (the build failed), Stopped (a signal); then only
    the log is new.
    """
    check_target(target, force)
    log = log_path(target)
    with StopSignals() as stop, _drafts(target) as (drafts, held):
        draft, draft_definition, draft_lock = drafts / target.name, drafts / "definition", drafts / "lock"
        with writing(target):
            draft_definition.write_text(definition, encoding="utf-8")
        own_folder = own_tmp(builder.flavour, builder.version, temporary, report, drafts / RECORD)
        with gathered(items, drafts), own_folder as (binds, places):
            command = build_command(builder, draft_definition, draft, (*options, *binds))
            draft_log = BuildLog(log, drafts / "log")
            locks = (held,) if lock is None else (held, lock)
            build_log = _run_build(command, {**variables, **places}, definition, draft_log, stop, report, locks)
        torch = _inspect(builder, draft, build_log, stop)
        stop.check()
        draft.chmod(draft.stat().st_mode & ~0o022)  # whatever the umask: who can change an image runs code as its users
        state = draft.stat()
        digest = sha256(draft, stop.check)
        known = {
            "image": target.name,
            "bytes": state.st_size,
            "mtime": state.st_mtime,
            "sha256": digest,
            "torch": torch,
            "builder": asdict(builder),
            "definition_sha256": hashlib.sha256(definition.encode()).hexdigest(),
            "packages": _packages(builder, draft, PACKAGES in definition, stop),
            "host": platform.node(),
            "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            **facts,
        }
        final_definition = target.with_name(target.name + ".def")
        with writing(target):
            draft_lock.write_text(lock_text(known), encoding="utf-8")
            for each in (draft_definition, draft_lock):
                each.chmod(each.stat().st_mode & ~0o022)
            stop.check()
            # From here on it takes no time. A lock that belongs to another file is recognised by its bytes
            # and mtime.
            draft.replace(target)
            draft_definition.replace(final_definition)
            draft_lock.replace(lock_path(target))
    return Built(target, state.st_size, digest, torch, final_definition, log, lock_path(target))


def _run_build(
    command: list[str],
    variables: Mapping[str, str],
    definition: str,
    log: BuildLog,
    stop: StopSignals,
    report: Report,
    locks: tuple[int, ...],
) -> BuildLog:
    """Run the builder, its output shown and kept: the log, which is closed.

    Raises ExternalError with the output's end, Stopped, UserError.
    """
    environment = passed_environment() | dict(variables)
    with log as kept:
        kept.note(" ".join(command), "", *definition.splitlines(), "")

        def keep(line: str) -> None:
            kept.said(line)
            report(line)

        started = time.monotonic()
        try:
            code = stop.run(command, environment, keep, Path(command[-1]).parent, locks)
        except OSError as error:
            raise ExternalError(f"`{command[0]}` cannot be started: {error.strerror}") from None
        seconds = time.monotonic() - started
        kept.note(f"exit code {code} after {seconds:.0f} s")
    if code != 0:
        raise ExternalError(kept.failure(f"`{command[0]} build` failed with exit code {code}"))
    return kept


def _inspect(builder: Builder, image: Path, log: BuildLog, stop: StopSignals) -> str | None:
    """The torch version that the build recorded. Raises ExternalError where what was built is no image."""
    if not image.is_file() or not is_sif(image):
        raise ExternalError(log.failure(f"`{builder.name} build` reported success, but wrote no SIF image"))
    try:
        torch = spython_adapter.labels(builder.name, image).get("slurmddp.torch")
    except ExternalError as error:
        stop.check()  # ctrl-C in a terminal ends this small command too
        raise ExternalError(log.failure(str(error))) from None
    return None if torch == "none" else torch


def _packages(builder: Builder, image: Path, listed: bool, stop: StopSignals) -> list[str] | None:
    """Return `pip freeze` of the build, or of now; None if this machine cannot run images, or there is no pip.

    listed: the build has written it down. An image without such a list may have that of its base.
    """
    command = ("cat", PACKAGES) if listed else ("python3", "-m", "pip", "freeze", "--all")
    try:
        return spython_adapter.output_in(builder.name, image, *command).splitlines()
    except ExternalError:
        stop.check()
        return None


@contextlib.contextmanager
def _drafts(target: Path) -> Iterator[tuple[Path, int]]:
    """A folder beside the target for all that is in the making; gone afterwards. And a file in it that is locked.

    Nobody else can enter it: in a folder that others can write to, they could lay a link in a draft's place, and
    remove the lock file beside the target. By the locked file, `clean --images` knows that the build is running.
    """
    folder = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
    held = os.open(folder / HELD, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield folder, held
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
