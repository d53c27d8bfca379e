"""Whose program is at the other end of a connection; the other user is a process that root started."""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection

import pytest

from slurmddp.shared.peer import distrust
from tests.helpers import ROOT
from tests.strangers import needs_root, stranger

#: Where somebody listens, and where a client connects to.
PLACES = [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "::1"), ("::", "::1"), ("::", "127.0.0.1")]

UNKNOWN = "the kernel does not show whose it is (it may be closed already)"


def listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")
    except OSError as error:
        pytest.skip(f"no {host} on this machine: {error}")


def listen(pipe: Connection, host: str) -> None:
    """Listen, and do what the pipe says: accept, close."""
    with listener(host) as accepts:
        pipe.send(accepts.getsockname()[1])
        if pipe.recv() == "accept":
            connection, _ = accepts.accept()
            pipe.send("accepted")
            if pipe.recv() == "close":
                connection.close()
                pipe.send("closed")
                pipe.recv()


def connect(pipe: Connection, host: str, port: int) -> None:
    with socket.create_connection((host, port)) as connection:
        pipe.send(connection.getsockname()[1])
        pipe.recv()


@pytest.mark.parametrize(("host", "to"), PLACES)
def test_a_program_of_this_user_is_trusted_before_and_after_it_accepts(host: str, to: str) -> None:
    with listener(host) as accepts, socket.create_connection((to, accepts.getsockname()[1])) as client:
        assert distrust(client) is None
        with accepts.accept()[0] as server:
            assert distrust(client) is None and distrust(server) is None


@needs_root
@pytest.mark.parametrize(("host", "to"), PLACES)
def test_another_user_who_listens_is_named_before_and_after_he_accepts(host: str, to: str) -> None:
    listener(host).close()  # skips without IPv6
    with stranger(listen, host) as pipe, socket.create_connection((to, pipe.recv())) as client:
        assert "another user, nobody (uid 65534)" in str(distrust(client))
        pipe.send("accept")
        pipe.recv()
        assert "another user, nobody (uid 65534)" in str(distrust(client))
        pipe.send("close")
        pipe.recv()
        assert distrust(client) == UNKNOWN  # its row has uid 0 then, which is this test's own


@needs_root
@pytest.mark.parametrize(("host", "to"), PLACES)
def test_another_user_who_connects_is_named(host: str, to: str) -> None:
    with listener(host) as accepts, stranger(connect, to, accepts.getsockname()[1]) as pipe:
        pipe.recv()
        with accepts.accept()[0] as server:
            assert "another user, nobody (uid 65534)" in str(distrust(server))


def test_a_client_that_has_closed_is_unknown() -> None:
    with listener("127.0.0.1") as accepts:
        socket.create_connection(accepts.getsockname()).close()
        with accepts.accept()[0] as server:
            assert distrust(server) == UNKNOWN


def test_a_kernel_that_shows_no_table_is_no_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmddp.shared.peer._TABLES", ("/absent/tcp", "/absent/tcp6"))
    with listener("127.0.0.1") as accepts, socket.create_connection(accepts.getsockname()) as client:
        assert "unknown whose it is: " in str(distrust(client)) and "/absent/tcp" in str(distrust(client))


def test_all_users_look_alike_where_the_namespace_has_none_of_them() -> None:
    """In a user namespace without a map, every socket has the uid that this process seems to have."""
    code = (
        "import os, socket\nfrom slurmddp.shared.peer import distrust\n"
        "accepts = socket.create_server(('127.0.0.1', 0))\n"
        "print(os.getuid(), distrust(socket.create_connection(accepts.getsockname())))"
    )
    words = ["unshare", "--user", sys.executable, "-c", code]
    done = subprocess.run(words, cwd="/", env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no user namespaces here: {done.stderr[-300:]}")
    assert done.stdout == f"65534 {UNKNOWN}\n"
