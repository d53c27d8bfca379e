"""Which hosts are this machine itself: plain http to these needs no permission."""

import pytest

from slurmddp.records.address import is_loopback, may_be_sent_to


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_this_host(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "localhost.org", "127.0.0.1.org", "127.1", "10.0.0.1", "0.0.0.0", "[::2]"])
def test_another_host(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("url", "insecure", "allowed"),
    [
        ("https://example.org/x", False, True),
        ("http://example.org/x", False, False),
        ("http://example.org/x", True, True),
        ("http://localhost:9/x", False, True),
        ("http://user@127.0.0.1:9", False, True),
        ("http://[::1]:9/x", False, True),
        ("http://127.0.0.1@example.org/x", False, False),
        ("http://localhost.example.org/x", False, False),
    ],
)
def test_alerts_go_to_https_or_to_this_host(url: str, insecure: bool, allowed: bool) -> None:
    assert may_be_sent_to(url, insecure=insecure) == allowed
