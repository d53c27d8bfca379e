"""The mirror is found in the machine's apt sources, whichever of their two formats they are in."""

from pathlib import Path

import pytest

from . import debian
from .errors import ClusterUnavailable

MIRROR = "http://mirror.example/debian"
ONE_LINE = f"""
# deb http://commented.example/debian bookworm main
deb http://security.example/debian-security bookworm-security main
deb [signed-by=/usr/share/keyrings/some.gpg arch=amd64] {MIRROR} bookworm main contrib # the archive
deb-src {MIRROR} bookworm main
"""
DEB822 = f"""Types: deb
# where it was once
URIs: http://other.example/vendor
Suites: stable
Components: main

Types: deb deb-src
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: {MIRROR}/
Suites: bookworm
 bookworm-updates
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 URIs: not a field
"""


@pytest.mark.parametrize(("name", "text"), [("debian.list", ONE_LINE), ("debian.sources", DEB822)])
def test_the_mirror_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    folder = tmp_path / "sources.list.d"
    folder.mkdir()
    (folder / name).write_text(text)
    monkeypatch.delenv(debian.MIRROR_VARIABLE, raising=False)
    assert debian.debian_mirror(tmp_path) == MIRROR


def test_a_continued_field_keeps_all_its_values() -> None:
    assert [source.suites for source in debian.read_deb822_sources(DEB822)][-1] == (
        "bookworm",
        "bookworm-updates",
    )


def test_without_a_mirror_the_message_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(debian.MIRROR_VARIABLE, raising=False)
    with pytest.raises(ClusterUnavailable, match=debian.MIRROR_VARIABLE):
        debian.debian_mirror(tmp_path)
    monkeypatch.setenv(debian.MIRROR_VARIABLE, MIRROR)
    assert debian.debian_mirror(tmp_path) == MIRROR
