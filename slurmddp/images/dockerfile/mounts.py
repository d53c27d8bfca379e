"""RUN --mount: what lies in a place while one command runs, and is gone afterwards."""

import csv
import posixpath
import re
from collections.abc import Collection
from dataclasses import dataclass

from slurmddp.errors import UserError
from slurmddp.images.context.sources import STAGING
from slurmddp.images.dockerfile.copying import place
from slurmddp.images.dockerfile.lines import Instruction
from slurmddp.images.dockerfile.words import Lookup, Parts, known, plain, shell

_NAMES = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
_KNOWN = {
    "bind": {"from", "source", "target", "readonly", "readwrite"},
    "cache": {"id", "target", "sharing", "mode", "uid", "gid", "readonly", "readwrite"},
    "tmpfs": {"target", "size", "readonly", "readwrite"},
    "secret": {"id", "source", "target", "required", "mode", "uid", "gid", "env"},
}
_VALUES = {
    "mode": re.compile("[0-7]{3,4}"), "uid": re.compile("[0-9]+"), "gid": re.compile("[0-9]+"),
    "env": re.compile("[A-Za-z_][A-Za-z0-9_]*"), "required": re.compile("(?i)1|t|true|0|f|false"),
}  # fmt: skip
#: What the build itself needs, and what is not the image's own.
_TAKEN = re.compile(r"/|/(usr/)?(bin|sbin|lib|lib64)|/usr|/etc|/(dev|proc|sys|\.slurmddp|\.singularity\.d)(/.*)?")
#: Folders that are no part of the image in a build either.
SHARED = re.compile(r"/(var/)?tmp")


@dataclass(frozen=True)
class Mount:
    """kind: its type. target: an absolute path, "" for a secret in a variable. said: its other keys."""

    kind: str
    target: str
    said: dict[str, str]

    @property
    def name(self) -> str:
        """The id of a cache or a secret."""
        return self.said.get("id") or self.said.get("source") or self.target


def read_mount(text: str, instruction: Instruction, lookup: Lookup, workdir: Parts, secrets: Collection[str]) -> Mount:
    """The value of a --mount; `secrets`: the ids of those that the build has. Raises UserError."""

    def error(message: str, todo: str) -> UserError:
        return instruction.error(f"RUN --mount={text}: {message}", todo)

    options: dict[str, str] = {}
    for field in next(csv.reader([text]), []):
        name, equals, value = field.partition("=")
        name = _NAMES.get(name.lower(), name.lower())
        options[name] = known(value, lookup, instruction) if equals else "true"
    kind = options.pop("type", "bind").lower()
    if kind == "ssh":
        raise error("a build has no ssh agent", "pass a token with --secret, or download before the build and COPY")
    if kind not in _KNOWN:
        raise error(f"{kind!r} is not a type", f"use one of {', '.join(_KNOWN)}")
    for name, value in options.items():
        if name not in _KNOWN[kind] or (name in _VALUES and not _VALUES[name].fullmatch(value)):
            raise error(f"{name}={value} is not converted for type={kind}", "remove it")
    target = options.get("target", "")
    if kind == "secret":
        options.setdefault("id", options.get("source") or posixpath.basename(target))
        if options["id"] not in secrets and options.get("required", "0").lower() in ("1", "t", "true"):
            todo = f"--secret id={options['id'] or 'NAME'},src=FILE (or env=VARIABLE); it does not stay in the image"
            raise error("the build has no such secret", todo)
        target = target or ("" if "env" in options else f"/run/secrets/{posixpath.basename(options['id'])}")
    elif not target:
        raise error("it has no target", "write target=FOLDER")
    whole = plain(place((target,), workdir)) if target else ""
    if whole is None:
        raise error("its target is relative, and only the base image knows WORKDIR", "write an absolute path")
    whole = whole.rstrip("/") or whole
    if _TAKEN.fullmatch(whole) or (kind in ("bind", "secret") and SHARED.fullmatch(whole)):
        raise error(f"a build cannot mount over {whole}", "use another target")
    return Mount(kind, whole, options)


def around(mount: Mount, number: int, source: str) -> tuple[list[str], list[str]]:
    """The commands of %post before and after the RUN.

    number: its own among the mounts of the stage; source: where what it brings lies; of a cache, where it is kept.
    """
    before, after = [], []
    if mount.kind == "secret":
        if "env" in mount.said:  # %post shows what it does, unless it is told not to
            before += ["set +x", f'export {mount.said["env"]}="$(cat {source})"']
            after += [f"unset {mount.said['env']}"]
        if not mount.target:
            return before, after
        before.append(f"cp {source} {STAGING}/secret && chmod {mount.said.get('mode', '400')} {STAGING}/secret")
        source = f"{STAGING}/secret"
    elif mount.kind != "bind":
        mode = mount.said.get("mode", "755" if mount.kind == "cache" else "1777")
        before.append(f"mkdir -p {source} && chmod {mode} {source}")
    if "uid" in mount.said or "gid" in mount.said:
        before.append(f"chown {mount.said.get('uid', '0')}:{mount.said.get('gid', '0')} {source}")
    kept = f" {source}" if mount.kind == "cache" else ""
    target = shell(mount.target)
    return [*before, f"over {number} {target} {shell(source)}"], [f"back {number} {target}{kept}", *after]
