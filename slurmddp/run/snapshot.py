"""Copies code into a run folder: all nodes run the same, and a later edit does not change a queued job."""

import io
import json
import os
import posixpath
import stat
import zipfile
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path

from slurmddp.errors import UserError
from slurmddp.run.create import OTHERS_WRITE, make_folder, write_file
from slurmddp.run.layout import ARCHIVE, STARTER, RunFolder
from slurmddp.run.survey import Item, Survey, shown
from slurmddp.shared.files import read_json

_PACKAGE = Path(__file__).resolve().parent.parent
_STARTER = f"shell/{STARTER}"


def copy_project(found: Survey, destination: Path, tell: Callable[[str], None] = lambda doing: None) -> None:
    """Copy what `survey` found below a new folder: bytes, paths and the permissions that the umask leaves.

    Nobody may read a copy who may not read its source, and nobody else may write it. Files that change meanwhile are
    copied as they are at that moment. Raises UserError for a file that cannot be read, OSError where the destination
    cannot be written (the caller knows how to put that). tell: gets how far it is, before each file.
    """
    make_folder(destination.parent)
    made: set[str] = set()
    _make_folder(found.root, destination, "", made)
    for index, item in enumerate(found.items):
        tell(f"copying the code: {index} of {len(found.items)} files")
        target = destination / item.relative
        _make_folder(found.root, destination, posixpath.dirname(item.relative), made)
        if item.link is not None:
            target.symlink_to(item.link)
            continue
        read = _read(item)
        if read is not None:
            facts, data = read
            write_file(target, data, mode=_mode(facts, target.parent) | 0o600)


def _read(item: Item) -> tuple[os.stat_result, bytes] | None:
    """A file of the project; None if it was removed since the survey. Raises UserError."""
    try:
        with item.source.open("rb") as file:
            return os.fstat(file.fileno()), file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        todo = "make it readable, or exclude it from train.project (.gitignore)"
        raise UserError(f"{shown(str(item.source))} cannot be read: {error.strerror}", todo=todo) from error


def _make_folder(source: Path, destination: Path, relative: str, made: set[str]) -> None:
    """Make the copy of a project's folder, and those above it first, unless they are in `made`."""
    if relative in made:
        return
    if relative:
        _make_folder(source, destination, posixpath.dirname(relative), made)
    target = destination / relative
    try:
        mode = _mode((source / relative).stat(), target.parent)
    except OSError:
        mode = 0  # removed since the survey, or closed to us: then to all others too
    target.mkdir(mode & ~OTHERS_WRITE | 0o700, exist_ok=True)
    target.chmod(target.stat().st_mode | 0o700)  # whatever the umask
    made.add(relative)


def _mode(source: os.stat_result, parent: Path) -> int:
    """The permissions of a source that its copy below `parent` may have.

    A setgid parent gives the copy its own group; where that is another group than the source's, it may do what
    all others may.
    """
    facts = parent.stat()
    mode = source.st_mode & 0o777
    group = facts.st_gid if facts.st_mode & stat.S_ISGID else os.getegid()
    return mode if group == source.st_gid else mode & (~0o070 | mode << 3)


def copy_runtime(code: Path, package: Path | None = None) -> None:
    """Write what a run needs of the installed package to a run folder's code/: an archive, and what starts it.

    The nodes and job.sh run nothing of slurmddp but this copy.

    package: another package folder than the one that runs. Raises OSError.
    """
    make_folder(code)
    for name, content in _ours(package).items():
        write_file(code / name, content)


def _ours(package: Path | None) -> dict[str, bytes]:
    """Return the files of a run folder's code/ that are not the user's."""
    names = dict(_runtime(package))
    starter = names.pop(_STARTER).read_bytes()
    return {
        ARCHIVE: _archive({f"slurmddp/{name}": path.read_bytes() for name, path in names.items()}),
        STARTER: starter,
    }


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return a zip, of which Python imports directly. The same files give the same bytes, on any machine."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:  # not compressed: that depends on the version of zlib
        for name in sorted(files):
            entry = zipfile.ZipInfo(name)
            entry.create_system, entry.external_attr = 3, 0o644 << 16
            archive.writestr(entry, files[name])
    return whole.getvalue()


def machinery() -> dict[str, Path]:
    """Return the scripts that job.sh and node.sh use, by where a run folder has them."""
    names = {name: path for name, path in _runtime(None) if name.startswith("shell/") and name != _STARTER}
    inside = {f"code/{ARCHIVE}/slurmddp/{name}": path for name, path in names.items()}
    return {f"code/{STARTER}": _PACKAGE / _STARTER, **inside}


def _runtime(package: Path | None) -> list[tuple[str, Path]]:
    """Return what `copy_runtime` copies: (path relative to the package, file).

    That is __init__.py, {runtime,shared,records,causes,supervisor}/**/*.py, causes/*.rules and shell/*.sh.
    """
    package = package or _PACKAGE
    names = ("runtime", "shared", "records", "causes", "supervisor")
    folders = (sorted((package / name).rglob("*.py")) for name in names)
    more = (*(package / "causes").glob("*.rules"), *sorted((package / "shell").glob("*.sh")))
    found = (package / "__init__.py", *chain.from_iterable(folders), *more)
    return [(str(path.relative_to(package)), path) for path in found]


def code_files(code: Path) -> dict[str, str]:
    """Return the sha256 (hex) of each file in a folder, by its relative path; of a link, that of its text.

    Python's caches are left out: the nodes may write them later.
    """
    found: dict[str, str] = {}
    for folder, folders, files in os.walk(code):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in (*files, *folders):
            path = Path(folder, name)
            if path.is_symlink():
                content = _link(os.fsencode(path.readlink()))
            elif path.is_file():
                content = path.read_bytes()
            else:
                continue
            found[str(path.relative_to(code))] = _sha256(content)
    return found


def code_hash(code: Path) -> str:
    return hash_of_files(code_files(code))


def hash_of(project: Survey | None, package: Path | None = None) -> str:
    """Return the `code_hash` of a run folder's code/, before there is one. Raises UserError for a file that cannot be
    read.
    """
    files = {name: _sha256(content) for name, content in _ours(package).items()}
    for item in project.items if project else ():
        if "__pycache__" in item.relative.split("/"):
            continue
        if item.link is not None:
            files[f"project/{item.relative}"] = _sha256(_link(os.fsencode(item.link)))
        elif (read := _read(item)) is not None:
            files[f"project/{item.relative}"] = _sha256(read[1])
    return hash_of_files(files)


def hash_of_files(files: Mapping[str, str]) -> str:
    """sha256 (hex) over files: the sorted relative paths, each with its content's hash."""
    import hashlib  # here: only submissions need it

    total = hashlib.sha256()
    for relative in sorted(map(os.fsencode, files)):
        total.update(relative + b"\0" + files[os.fsdecode(relative)].encode() + b"\n")
    return total.hexdigest()


def write_list(folder: RunFolder, files: Mapping[str, str]) -> None:
    """Write which files of the run folder's code/ are its code: what comes later is its program's. Raises OSError."""
    write_file(folder.code_list, json.dumps(files, indent=0).encode() + b"\n")


def read_list(folder: RunFolder) -> dict[str, str]:
    """Return what `write_list` wrote. Raises UserError."""
    try:
        found = read_json(folder.code_list, folder.path)
        return {str(path): str(digest) for path, digest in found.items()}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(folder.code_list), todo="submit the job again") from error


def _link(text: bytes) -> bytes:
    return b"link:" + text


def _sha256(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()
