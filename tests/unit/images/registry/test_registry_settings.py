"""Mirrors, proxies and plain HTTP: where an image is asked for."""

import pytest

from slurmddp.errors import UserError
from slurmddp.images.registry.reference import parse_reference
from slurmddp.images.registry.settings import RegistrySettings, is_loopback, parse_proxy


@pytest.mark.parametrize(
    ("reference", "mirrors", "url", "repository"),
    [
        ("ubuntu", {}, "https://registry-1.docker.io/v2/library/ubuntu", "docker.io/library/ubuntu"),
        ("nvcr.io/a/b", {"docker.io": "m.org"}, "https://nvcr.io/v2/a/b", "nvcr.io/a/b"),
        ("ubuntu", {"docker.io": "m.org"}, "https://m.org/v2/library/ubuntu", "m.org/library/ubuntu"),
        ("a/b", {"index.docker.io": "https://m.org/h/"}, "https://m.org/v2/h/a/b", "m.org/h/a/b"),
        ("nvcr.io/a/b", {"nvcr.io": "m.org:5000/x/y"}, "https://m.org:5000/v2/x/y/a/b", "m.org:5000/x/y/a/b"),
        ("nvcr.io/a/b", {"nvcr.io": "127.0.0.1:5000"}, "http://127.0.0.1:5000/v2/a/b", "127.0.0.1:5000/a/b"),
        ("nvcr.io/a/b", {"nvcr.io": "https://127.0.0.1:5000"}, "https://127.0.0.1:5000/v2/a/b", "127.0.0.1:5000/a/b"),
        ("nvcr.io/a/b", {"nvcr.io": "http://plain.org"}, "http://plain.org/v2/a/b", "plain.org/a/b"),
        ("plain.org:5000/a", {}, "http://plain.org:5000/v2/a", "plain.org:5000/a"),
        ("localhost:5000/a", {}, "http://localhost:5000/v2/a", "localhost:5000/a"),
    ],
)  # fmt: skip
def test_where_an_image_is_asked_for(reference: str, mirrors: dict[str, str], url: str, repository: str) -> None:
    settings = RegistrySettings(mirrors=mirrors, insecure=frozenset({"Plain.org"}))
    found = settings.location(parse_reference(reference))
    assert (found.url, found.repository) == (url, repository)


@pytest.mark.parametrize(
    ("mirror", "message"),
    [
        ("", "the mirror of nvcr.io: it is not HOST"),
        ("ftp://m.org", "it is not HOST"),
        ("user:SECRET@m.org", "it is not HOST"),
        ("m.org/a b", "it is not HOST"),
        ("http://m.org/x", "m.org would be reached over plain HTTP, which is not allowed for it"),
    ],
)
def test_what_is_no_mirror(mirror: str, message: str) -> None:
    settings = RegistrySettings(mirrors={"nvcr.io": mirror})
    with pytest.raises(UserError) as error:
        settings.location(parse_reference("nvcr.io/a/b"))
    assert message in str(error.value) and "SECRET" not in str(error.value)


def test_plain_http_is_for_loopback_and_the_hosts_listed() -> None:
    settings = RegistrySettings(insecure=frozenset({"any-port.org", "one-port.org:5000"}))
    hosts = ["any-port.org", "any-port.org:1", "one-port.org:5000", "127.0.0.9:1", "[::1]:5000", "localhost"]
    assert [host for host in hosts if not settings.plain_allowed(host)] == []
    others = ["one-port.org", "one-port.org:5001", "x.any-port.org", "localhost.org", "127.0.0.1.org", "10.0.0.1"]
    assert [host for host in others if settings.plain_allowed(host)] == []
    assert is_loopback("[::1]:80") and not is_loopback("[::2]:80")


def test_the_profiles_proxy_goes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RegistrySettings().proxy_for("https", "nvcr.io") is None
    monkeypatch.setenv("HTTPS_PROXY", "http://environment:3128")
    monkeypatch.setenv("http_proxy", "plain:81")
    monkeypatch.setenv("NO_PROXY", "inside.org,other.org:5000")
    cases = [
        (None, "https", "nvcr.io", "environment:3128"),
        (None, "http", "nvcr.io", "plain:81"),
        (None, "https", "x.inside.org:5000", None),
        (None, "https", "127.0.0.1:5000", None),
        ("http://profile", "https", "nvcr.io", "profile:80"),
        ("http://profile", "https", "inside.org", None),
        ("http://profile", "http", "localhost:1", None),
    ]
    for given, scheme, host, expected in cases:
        found = RegistrySettings(proxy=given).proxy_for(scheme, host)
        assert (found.name if found else None) == expected, (given, scheme, host)


@pytest.mark.parametrize(
    "text", ["socks5://u:SECRET@h:1", "https://u:SECRET@h:1", "http://u:SECRET@h:x", "http://u:SECRET@"]
)
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_proxy(text, "HTTPS_PROXY")
    assert "HTTPS_PROXY: " in str(error.value) and "SECRET" not in str(error.value)
    good = parse_proxy("http://u:SECRET%40@h:1", "x")
    assert good.userinfo == "u:SECRET@" and "SECRET" not in repr(good)
