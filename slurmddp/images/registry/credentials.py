"""The user name and password for a registry: from the environment, a login file of Apptainer or Docker, or a helper.

Each belongs to one registry, and no other is shown it: a Dockerfile can name any host. They are only read. A password
is in no message and in no repr.
"""

import atexit
import base64
import binascii
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from slurmddp.errors import UserError
from slurmddp.images.registry.reference import DOCKER_HUB, canonical_registry, is_registry

PATIENCE = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class HelperError(Exception):
    """Why a helper gave no user name and password: "which ..."."""


class HelperAnswer(NamedTuple):
    """server: whose user name and password these are; "" if the helper does not say."""

    server: str
    username: str
    password: str


def ask_helper(name: str, server: str) -> HelperAnswer:
    """Run `docker-credential-NAME get`, for at most PATIENCE seconds. Raises HelperError."""
    path = shutil.which(f"docker-credential-{name}") if _NAME.fullmatch(name) else None
    if path is None or not os.path.isabs(path):  # A relative PATH would run a program of the working directory
        raise HelperError("which is not in PATH")
    try:
        code, output = _run(path, server)
    except OSError as error:
        raise HelperError(f"which cannot be run: {error.strerror}") from None
    if code:
        raise HelperError(f"which has no credentials for it (exit code {code})")
    try:
        tree = json.loads(output)
        answer = HelperAnswer(*(tree.get(key) or "" for key in ("ServerURL", "Username", "Secret")))
    except (ValueError, AttributeError, RecursionError):
        answer = HelperAnswer("", "", "")
    if not all(isinstance(text, str) for text in answer) or not (answer.username and answer.password):
        raise HelperError("which gave an invalid answer")
    if answer.username == "<token>":
        raise HelperError("which has a token, but slurmddp supports only user name and password")
    return answer


def _run(path: str, server: str) -> tuple[int, bytes]:
    """Return exit code and output. Raises OSError and HelperError."""
    # Its own session, so that the processes that it starts can be ended with it
    with subprocess.Popen(
        [path, "get"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as child:
        end = partial(os.killpg, child.pid, signal.SIGKILL)
        atexit.register(end)  # Ctrl-C ends the main thread, and then this one where it is
        try:
            output, _ = child.communicate(server.encode(), PATIENCE)
        except BaseException as error:
            end()
            if isinstance(error, subprocess.TimeoutExpired):
                raise HelperError(f"which gave no answer within {PATIENCE:g} s") from None
            raise
        finally:
            atexit.unregister(end)
    return child.returncode, output


NVIDIA = "nvcr.io"
#: NVIDIA's registry takes an API key as the password of this user, dollar sign included (NGC user guide).
NVIDIA_USER = "$oauthtoken"
_PREFIXES = ("APPTAINER_DOCKER", "SINGULARITY_DOCKER")
#: Names the registry that the environment's name and password are for.
HOST_VARIABLE = "SLURMDDP_REGISTRY_HOST"
_LARGEST_FILE = 4 << 20


@dataclass(frozen=True)
class Credentials:
    """A name and a password for one registry; `source` says where they stand."""

    username: str
    password: str = field(repr=False)
    source: str

    @property
    def basic(self) -> str:
        """The value of an Authorization header."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode("ascii")


@dataclass(frozen=True)
class Found:
    """The credentials for a registry, or None, and remarks about what was seen but cannot be used."""

    credentials: Credentials | None
    remarks: tuple[str, ...] = ()


def find_credentials(registry: str, name: str) -> Found:
    """Those for the repository `name` at the host `registry`: the environment's, else the first file's that has some.

    Raises UserError where SLURMDDP_REGISTRY_HOST is no host.
    """
    remarks: list[str] = []
    for host, credentials in _of_environment(remarks):
        if host == canonical_registry(registry):
            return Found(credentials, tuple(remarks))
        remarks.append(f"{credentials.source} are only for {host}")
    for path in login_files():
        entry = _of_file(path, registry, name, remarks)
        if entry:
            return Found(entry, tuple(remarks))
    return Found(None, tuple(remarks))


def for_builder(registries: Collection[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Variables with the environment's credentials for a builder that pulls from these registries, and notes.

    A builder shows them to every registry that it pulls from: it gets them where all are the one they are for.
    Raises UserError where SLURMDDP_REGISTRY_HOST is no host.
    """
    notes: list[str] = []
    names = {canonical_registry(registry) for registry in registries}
    for host, credentials in _of_environment(notes) if names else ():
        if names == {host}:
            pair = (("USERNAME", credentials.username), ("PASSWORD", credentials.password))
            return {f"{prefix}_{half}": value for prefix in _PREFIXES for half, value in pair}, tuple(notes)
        if host in names:
            others = ", ".join(sorted(names - {host}))
            notes.append(
                f"{credentials.source} are for {host} and are not used to pull, because the builder would also "
                f"send them to {others}. For a private image: apptainer registry login docker://{host}"
            )
    return {}, tuple(notes)


def login_files() -> list[Path]:
    """The files in which `apptainer registry login`, `singularity` and `docker login` keep what they were told."""
    home = Path(os.environ.get("HOME") or "~").expanduser()
    # Apptainer keeps its own there instead (apptainer, pkg/syfs/syfs.go, configDir)
    moved = os.environ.get("APPTAINER_CONFIGDIR") or os.environ.get("SINGULARITY_CONFIGDIR")
    folders = [Path(moved)] if moved else [home / ".apptainer", home / ".singularity"]
    docker = Path(os.environ.get("DOCKER_CONFIG") or home / ".docker")
    return [*(folder / "docker-config.json" for folder in folders), docker / "config.json"]


def advice(registry: str) -> str:
    """Return where credentials for this registry are looked for."""
    variables = f"APPTAINER_DOCKER_USERNAME, APPTAINER_DOCKER_PASSWORD, and {HOST_VARIABLE} to {registry}"
    if registry == NVIDIA:
        variables = "APPTAINER_DOCKER_PASSWORD (or SINGULARITY_DOCKER_PASSWORD) to an API key of NGC"
    files = ", ".join(_shown(path) for path in login_files())
    return f"set {variables}, or use `apptainer registry login docker://{registry}`; credentials are read from {files}"


def _of_environment(remarks: list[str]) -> Iterator[tuple[str, Credentials]]:
    """The registry and the credentials of each pair of variables."""
    named = os.environ.get(HOST_VARIABLE, "").strip()
    if named and not is_registry(named):
        todo = "write HOST or HOST:PORT, such as ghcr.io"
        raise UserError(f"{named!r} is not a registry", where=HOST_VARIABLE, todo=todo)
    for prefix in _PREFIXES:
        username = os.environ.get(f"{prefix}_USERNAME")
        password = os.environ.get(f"{prefix}_PASSWORD")
        if not (username or password):
            continue
        if password and not username and canonical_registry(named or NVIDIA) == NVIDIA:
            username = NVIDIA_USER
        if not (username and password):
            missing = "PASSWORD" if username else "USERNAME"
            remarks.append(f"{prefix}_{missing} is not set, so the other one is not used")
            continue
        credentials = Credentials(username, password, f"{prefix}_USERNAME and {prefix}_PASSWORD")
        if ":" in username:  # it cannot be told from the password (RFC 7617)
            remarks.append(f"{prefix}_USERNAME contains ':', which is not allowed in a user name")
        elif username == NVIDIA_USER:
            yield NVIDIA, credentials
        elif named:
            yield canonical_registry(named), credentials
        else:
            remarks.append(
                f"{credentials.source} are not used, because their registry is not given: export {HOST_VARIABLE}=HOST"
            )


def _of_file(path: Path, registry: str, name: str, remarks: list[str]) -> Credentials | None:
    shown = _shown(path)
    try:
        with path.open("rb") as file:
            tree = json.loads(file.read(_LARGEST_FILE))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        remarks.append(f"{shown} cannot be read: {error.strerror}")
        return None
    except (ValueError, RecursionError):
        remarks.append(f"{shown} is not a JSON file")
        return None
    if not isinstance(tree, dict):
        remarks.append(f"{shown} does not contain a JSON object")
        return None
    entry = _entry(tree.get("auths"), registry, name)
    credentials = _of_entry(entry, shown, remarks) if entry is not None else None
    helper = _helper(tree, registry)
    return _of_helper(helper, registry, shown, remarks) if credentials is None and helper else credentials


def _entry(auths: Any, registry: str, name: str) -> Mapping[str, Any] | None:
    """The entry for the longest path that leads to the repository (containers/image, containers-auth.json.5.md)."""
    best: tuple[int, Mapping[str, Any]] | None = None
    for key, entry in auths.items() if isinstance(auths, dict) else ():
        host, path = _key(key)
        fits = host == canonical_registry(registry) and (not path or f"{name}/".startswith(f"{path}/"))
        if fits and isinstance(entry, dict) and (best is None or len(path) > best[0]):
            best = len(path), entry
    return best[1] if best else None


def _key(key: str) -> tuple[str, str]:
    """Host and path of "https://index.docker.io/v1/", "nvcr.io" or "quay.io/group"."""
    try:
        parts = urlsplit(key if "://" in key else f"https://{key}")
    except ValueError:
        return "", ""
    path = parts.path.strip("/")
    return canonical_registry(parts.netloc), "" if path in ("v1", "v2") else path


def _of_entry(entry: Mapping[str, Any], shown: str, remarks: list[str]) -> Credentials | None:
    username, password = entry.get("username"), entry.get("password")
    coded = entry.get("auth")
    if isinstance(coded, str) and coded:
        try:
            username, _, password = base64.b64decode(coded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            remarks.append(f"{shown} has an entry for it, but its `auth` is not base64 of NAME:PASSWORD")
            return None
        password = password.strip("\0")  # Docker's own padding (docker/cli, decodeAuth)
    if isinstance(username, str) and isinstance(password, str) and username and password:
        return Credentials(username, password, shown)
    if entry.get("identitytoken") or entry.get("registrytoken"):
        remarks.append(f"{shown} has a token for it, but slurmddp supports only user name and password")
    return None


def _helper(tree: Mapping[str, Any], registry: str) -> str | None:
    """The name of this registry's own helper, else of the one for all registries."""
    helpers = tree.get("credHelpers")
    for key, name in helpers.items() if isinstance(helpers, dict) else ():
        if _key(key)[0] == canonical_registry(registry) and isinstance(name, str):
            return name
    store = tree.get("credsStore")
    return store if isinstance(store, str) else None


def _of_helper(helper: str, registry: str, shown: str, remarks: list[str]) -> Credentials | None:
    host = canonical_registry(registry)
    try:
        # Docker stores Docker Hub's under this address, and all others under their host
        answer = ask_helper(helper, "https://index.docker.io/v1/" if host == DOCKER_HUB else host)
        if answer.server and _key(answer.server)[0] != host:
            raise HelperError("which returned credentials of another registry")
    except HelperError as error:
        remarks.append(f"{shown} leaves {registry} to the credential helper {helper!r}, {error}")
        return None
    return Credentials(answer.username, answer.password, f"docker-credential-{helper} ({shown})")


def _shown(path: Path) -> str:
    """Return the path with ~ for the home folder."""
    home = os.environ.get("HOME", "").rstrip("/")
    return f"~{str(path)[len(home) :]}" if home and str(path).startswith(f"{home}/") else str(path)
