"""debug bundle: what support needs to know of a run, in one archive. Secrets are taken out of all texts in it: known
values, what follows a secret's name, and what looks so."""

import io
import os
import platform
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import typer

from slurmddp.alerts import secrets
from slurmddp.api import look
from slurmddp.cluster.client import ask
from slurmddp.commands import options as opt
from slurmddp.commands.doctor import examine, lines
from slurmddp.commands.terminal import Progress
from slurmddp.container import SIF_PROGRAMS
from slurmddp.errors import ExternalError, UserError
from slurmddp.launch.find import find_any_version
from slurmddp.records.redact import is_secret_name, redact
from slurmddp.run.evidence import evidence
from slurmddp.run.gate import own
from slurmddp.run.layout import RunFolder
from slurmddp.run.version import version
from slurmddp.shared.files import open_plain
from slurmddp.styled import labelled

#: A value shorter than this stands in a text by chance.
_SHORTEST = 6


def secrets_of(run_id: str, environment: Mapping[str, str]) -> list[str]:
    """Return the values that are known: those of this shell, by their names, and those that are kept for the run."""
    values = [value for name, value in environment.items() if is_secret_name(name)]
    folder = secrets.of_run(run_id, environment)
    try:
        names = [entry.path for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)]
    except OSError:
        names = []  # they are removed after the run
    for name in names:
        if os.path.basename(name).startswith((".run", ".last")):
            continue
        with open(name, encoding="utf-8", errors="replace") as file:
            parts = re.split(r"[\0\n]", file.read())  # a line with an address; NAME=VALUE and a NUL
        values += [*parts, *(part.partition("=")[2] for part in parts)]
    values += [value.partition("://")[2].partition("/")[2] for value in values]  # an error may name the path alone
    unique = {value.strip() for value in values}
    return sorted((value for value in unique if len(value) >= _SHORTEST), key=len, reverse=True)


#: Bytes of a file's end, and of all files together: an archive that a mail takes.
_FILE_BYTES, _ALL_BYTES = 256 * 1024, 8 * 1024 * 1024
#: Bytes that are read for it: a secret across the cut must be seen whole.
_READ_BYTES = _FILE_BYTES + 64 * 1024
_FILES = 300
#: Of a run folder, the most telling first. Not: its key, the code, checkpoints, traces, alerts.
_RECORDS = (
    *("manifest.json", "submission.json", "job.yaml", "site.yaml", "job.json", "accelerate.yaml", "job.sh", "node.sh"),
    *("events.jsonl", "stop", "progress", "ranks", "markers/*", "continued/*", "logs/job.log", "metrics.jsonl"),
)


class Packed(NamedTuple):
    """One file of the archive. size: of what is packed; whole: of the file itself, if only its end is packed."""

    name: str
    size: int
    whole: int | None

    def __str__(self) -> str:
        cut = f", the end of {self.whole}" if self.whole is not None else ""
        return f"{self.size:>8}  {self.name}{cut}"


class Bundle(NamedTuple):
    """An archive and what is in it. left_out: why a file is not in it."""

    path: Path
    size: int
    files: tuple[Packed, ...]
    left_out: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        files = [each._asdict() for each in self.files]
        return {"file": str(self.path), "size": self.size, "files": files, "left_out": list(self.left_out)}


class _Archive:
    """Texts, each without secrets and cut to its end, until the archive is full."""

    def __init__(self, folder: RunFolder, known: Sequence[str]) -> None:
        self._root, self._known = f"{folder.id}-bundle", known
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w:gz")  # noqa: SIM115 - `finished` closes it
        self._room, self.full = _ALL_BYTES, False
        self.files: list[Packed] = []
        self.left_out: list[str] = []

    def add(self, name: str, text: str, whole: int | None = None) -> None:
        """Pack a text. whole: the size of the file, if the text is only its end."""
        name = redact(name, self._known)
        data = redact(text, self._known).encode("utf-8", "replace")
        if len(data) > _FILE_BYTES:
            whole = len(data) if whole is None else whole
            data = data[-_FILE_BYTES:].partition(b"\n")[2]
        self.full |= len(self.files) >= _FILES or len(data) > self._room
        if self.full:
            self.left_out.append(f"{name}: the bundle is full")
            return
        self._room -= len(data)
        self._write(name, data)
        self.files.append(Packed(name, len(data), whole))

    def _write(self, name: str, data: bytes) -> None:
        facts = tarfile.TarInfo(f"{self._root}/{name}")
        facts.size, facts.mtime, facts.mode = len(data), int(time.time()), 0o600
        self._tar.addfile(facts, io.BytesIO(data))

    def finished(self) -> bytes:
        lines = [*map(str, self.files), *(f"not here: {text}" for text in self.left_out)]
        self._write("CONTENTS", ("\n".join(lines) + "\n").encode("utf-8", "replace"))
        self._tar.close()
        return self._buffer.getvalue()


def write_bundle(
    folder: RunFolder, output: Path | None, answers: Mapping[str, Callable[[], str]], environment: Mapping[str, str]
) -> Bundle:
    """Pack the bundle of a run. answers: name -> what a command of ours says of it. Raises UserError."""
    path = output or Path(f"{folder.id}-bundle.tar.gz")
    if os.path.lexists(path):
        raise UserError(f"{path} exists", todo="remove it, or choose another name with -o")
    archive = _Archive(folder, secrets_of(folder.id, environment))
    archive.add("versions.txt", _versions())
    for name, answer in answers.items():
        archive.add(name, _attempted(answer))
    try:
        for name, command in _questions(folder):
            archive.add(name, _asked(command))
    except UserError as error:  # a damaged submission.json
        archive.left_out.append(f"what Slurm says: {error}")
    files = list(_files(folder))
    for number, relative in enumerate(files):
        if archive.full:
            archive.left_out.append(f"{len(files) - number} more files of the run: the bundle is full")
            break
        _add_file(archive, folder, relative)
    data = archive.finished()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}", todo="choose another file: -o FILE") from None
    return Bundle(path.absolute(), len(data), tuple(archive.files), tuple(archive.left_out))


def _add_file(archive: _Archive, folder: RunFolder, relative: str) -> None:
    path = folder.path / relative
    try:
        with open_plain(path, folder.path) as file:
            whole = os.fstat(file.fileno()).st_size
            file.seek(max(0, whole - _READ_BYTES))
            data = file.read(_READ_BYTES)
    except OSError as error:
        archive.left_out.append(f"{relative}: {error.strerror}")
        return
    if b"\0" in data:
        archive.left_out.append(f"{relative}: it is no text")
        return
    cut = whole > len(data)
    if cut:
        data = data.partition(b"\n")[2]  # the first line may be the rest of a secret
    if data:
        archive.add(relative, data.decode("utf-8", "replace"), whole if cut else None)
    elif cut:
        archive.left_out.append(f"{relative}: one line, too long to be cut safely")


def _files(folder: RunFolder) -> Iterator[str]:
    """Yield the names of the records, then of the logs of the nodes, the newest attempt first."""
    root, seen = folder.path, set[str]()
    logs = sorted(sorted(folder.logs.rglob("*")), key=lambda path: path.parts[len(root.parts) + 1 :][:1], reverse=True)
    for path in (*(path for pattern in _RECORDS for path in sorted(root.glob(pattern))), *logs):
        relative = str(path.relative_to(root))
        if relative not in seen and not path.is_dir() and "flight_recorder" not in path.parts:
            seen.add(relative)
            yield relative


def _versions() -> str:
    lines = [f"slurmddp {version()}", f"Python {sys.version.split()[0]} at {sys.executable}", platform.platform()]
    for program in ("sbatch", *SIF_PROGRAMS):
        lines.append(f"{program}: {_asked((program, '--version')).strip()}")
    return "\n".join(lines) + "\n"


def _questions(folder: RunFolder) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what Slurm is asked about the newest job of the run."""
    job_id = evidence(folder).job_id
    if job_id is None or job_id.is_local:
        return
    cluster = (f"--clusters={job_id.cluster}",) if job_id.cluster else ()
    yield "slurm/job.txt", ("scontrol", *cluster, "show", "job", job_id.id)
    fields = "JobID,JobName,State,ExitCode,Reason,Restarts,Submit,Start,End,Timelimit,AllocTRES,NodeList,MaxRSS"
    yield "slurm/accounting.txt", ("sacct", *cluster, f"--jobs={job_id.id}", "--duplicates", "-P", f"--format={fields}")
    yield "slurm/queue.txt", ("squeue", *cluster, f"--jobs={job_id.id}", "--states=all", "-o", "%i %j %T %r %S %N")
    yield "slurm/nodes.txt", ("sinfo", "--Node", "--long")


def _asked(command: Sequence[str]) -> str:
    return _attempted(lambda: ask(command, timeout=20).text)


def _attempted(answer: Callable[[], str]) -> str:
    """A bundle is made when things fail: what does not answer is a line in it."""
    try:
        return answer() + "\n"
    except (UserError, ExternalError, OSError, ValueError) as error:
        return f"(no answer: {error})\n"


def bundle(
    run: opt.Run = opt.LAST,
    output: Path | None = opt.value("FILE", "File to write  [default: RUN-bundle.tar.gz]", "-o", "--output"),
    as_json: opt.Json = False,
) -> None:
    """Pack what support needs to know of a run, without secrets: records, scripts, the ends of its logs, doctor's
    answer, versions, and what Slurm says. At most 8 MiB; look through it before you send it."""
    folder = own(find_any_version(run, os.environ), to="pack it")
    answers = {
        "status.json": lambda: opt.json_text(look(folder).as_dict()),
        "doctor.txt": lambda: "\n".join(map(str, lines(examine([str(folder.path)])[0].diagnose()))),
    }
    with Progress() as progress:
        progress.tell("packing")
        made = write_bundle(folder, output, answers, os.environ)
    if as_json:
        typer.echo(opt.json_text(made.as_dict()))
        return
    for packed in made.files:
        opt.say(str(packed))
    for text in made.left_out:
        opt.say(labelled("note", f"not packed: {text}"))
    typer.echo(made.path)
