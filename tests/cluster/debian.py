"""Debian roots from the machine's own package mirror: where it is, and one call that makes a root folder."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import ClusterUnavailable

MIRROR_VARIABLE = "SLURMDDP_DEBIAN_MIRROR"
APT_DIR = Path("/etc/apt")
# Debian 12 has the keys of trixie from keyring 2023.3+deb12u2 on; an older one cannot verify the root.
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
NEWEST_KEY = Path("/usr/share/keyrings/debian-archive-trixie-stable.gpg")


@dataclass(frozen=True)
class AptSource:
    """One place that apt reads: an address with the suites and components taken from it."""

    uri: str
    suites: tuple[str, ...]
    components: tuple[str, ...]


def read_one_line_sources(text: str) -> Iterator[AptSource]:
    """Sources in the classic format: `deb [options] URI suite component...`."""
    for line in text.splitlines():
        match = re.match(r"deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s*(.*)", line.split("#")[0].strip())
        if match:
            uri, suite, components = match.groups()
            yield AptSource(uri, (suite,), tuple(components.split()))


def read_deb822_sources(text: str) -> Iterator[AptSource]:
    """Sources in the deb822 format: paragraphs of `Types:`, `URIs:`, `Suites:`, `Components:`."""
    without_comments = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    for paragraph in re.split(r"\n\s*\n", without_comments):
        fields: dict[str, list[str]] = {}
        name = ""
        for line in paragraph.splitlines():
            if line[:1].isspace():
                fields.setdefault(name, []).extend(line.split())
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.split()
        if "deb" not in fields.get("types", []) or fields.get("enabled", ["yes"])[0].lower() in (
            "no",
            "false",
            "0",
        ):
            continue
        for uri in fields.get("uris", []):
            yield AptSource(uri, tuple(fields.get("suites", [])), tuple(fields.get("components", [])))


def apt_sources(apt_dir: Path = APT_DIR) -> list[AptSource]:
    """Everything that this machine's apt reads packages from, in apt's order."""
    found: list[AptSource] = []
    main = apt_dir / "sources.list"
    if main.is_file():
        found.extend(read_one_line_sources(main.read_text()))
    for path in sorted((apt_dir / "sources.list.d").glob("*")):
        if path.suffix == ".list":
            found.extend(read_one_line_sources(path.read_text()))
        elif path.suffix == ".sources":
            found.extend(read_deb822_sources(path.read_text()))
    return found


def debian_mirror(apt_dir: Path = APT_DIR) -> str:
    """The address of a whole Debian archive: from the environment, else from the machine's apt sources."""
    if named := os.environ.get(MIRROR_VARIABLE):
        return named
    for source in apt_sources(apt_dir):
        suites = {suite.strip("/") for suite in source.suites}
        plain = suites and not any("security" in suite for suite in suites)
        if plain and "main" in source.components and source.uri.rstrip("/").endswith("/debian"):
            return source.uri.rstrip("/")
        # A dated snapshot of the archive, .../archive/debian/20250520T000000Z
        if plain and "main" in source.components and re.search(r"/debian/\d{8}T\d{6}Z/?$", source.uri):
            return source.uri.rstrip("/")
    raise ClusterUnavailable(
        f"no Debian archive among the apt sources in {apt_dir}; name one with {MIRROR_VARIABLE}=ADDRESS"
    )


def ensure_builder() -> None:
    """Install what building a root takes and this machine lacks."""
    keyring = [] if NEWEST_KEY.exists() else ["debian-archive-keyring"]
    ensure_tools({"mmdebstrap": "mmdebstrap"}, keyring)
    if not NEWEST_KEY.exists():
        raise ClusterUnavailable(f"{NEWEST_KEY} is missing: this machine's Debian keyring is older than trixie")


def ensure_tools(packages: dict[str, str], more: Sequence[str] = ()) -> None:
    """Install what is missing of {command: Debian package}, and `more`; needs root and apt."""
    missing = sorted({package for command, package in packages.items() if shutil.which(command) is None} | set(more))
    if not missing:
        return
    if shutil.which("apt-get") is None:
        raise ClusterUnavailable(f"missing on this machine, and no apt-get to install it: {' '.join(missing)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-qy", "--no-install-recommends", *missing]
    for command in (["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise ClusterUnavailable(f"{' '.join(command)} failed:\n{tail(done.stderr)}")


def apt_settings() -> list[str]:
    """The machine's own way out (proxy, certificates) as apt options: a new root starts with none."""
    names = ["Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::https::CAInfo"]
    dump = subprocess.run(["apt-config", "dump", *names], capture_output=True, text=True, check=True).stdout
    return [line for line in dump.splitlines() if '""' not in line]


def make_root(target: Path, suites: Sequence[str], packages: Sequence[str], *, hooks: Sequence[str] = ()) -> None:
    """Make a minimal Debian root of suites[0] with `packages` in `target`, an absolute path to be made.

    Packages come from a later suite only where an earlier one has none (pin 50). Each hook is a shell
    command that runs on the machine once the root is there, as "$1".
    """
    mirror = debian_mirror()
    # In a mount namespace of its own: a build that is killed leaves no mounts behind.
    command = ["unshare", "--mount", "mmdebstrap", "--mode=root", "--variant=minbase", "--format=directory"]
    options = ['Apt::Install-Recommends "false"', 'Acquire::Languages "none"', 'Acquire::Retries "3"']
    command += [f"--aptopt={option}" for option in [*options, *apt_settings()]]
    # fsync for every file, pages nobody reads: a root that is thrown away on failure needs neither.
    excluded = ["/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*"]
    command += [f"--dpkgopt={option}" for option in ["force-unsafe-io", *(f"path-exclude={p}" for p in excluded)]]
    for suite in suites[1:]:
        pin = rf"Package: *\nPin: release n={suite}\nPin-Priority: 50\n"
        command.append(
            f'--setup-hook=mkdir -p "$1/etc/apt/preferences.d" && printf "{pin}" > "$1/etc/apt/preferences.d/{suite}"'
        )
    command += [f"--customize-hook={hook}" for hook in hooks]
    command += [f"--include={','.join(packages)}", suites[0], str(target)]
    # check-valid-until: a mirror's copy of a moving suite may be stale, which is no harm here.
    command += [f"deb [check-valid-until=no signed-by={KEYRING}] {mirror} {suite} main" for suite in suites]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ClusterUnavailable(f"mmdebstrap could not make a root of {suites[0]} from {mirror}:\n{tail(done.stderr)}")


def tail(text: str, lines: int = 15) -> str:
    """The end of a command's output, where it says why it failed."""
    return "\n".join(text.strip().splitlines()[-lines:])
