"""TLS between the agents of several nodes: strangers neither read the ranks' store nor join it."""

import contextlib
import datetime
import multiprocessing
import os
import signal
import socket
import ssl
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from slurmddp.records.rank_events import StoreOpen
from slurmddp.run.create import write_pair
from slurmddp.runtime.agent import stores, tunnel
from slurmddp.runtime.agent.signed import SignedStore
from slurmddp.runtime.journal import read_events
from slurmddp.runtime.signing import Key
from tests import storeclient
from tests.strangers import needs_root, stranger

from .test_rendezvous import SIGNED, STATIC, agents, output, run

__all__ = ["agents", "run"]  # fixtures
LIMIT = datetime.timedelta(seconds=15)
SECRET = b"what-only-ranks-know"
#: Meets the other ranks by env://, and by a client of its own at MASTER_PORT.
SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
rank, start, at = int(os.environ["RANK"]), os.environ["SLURMDDP_START"], os.environ["MASTER_ADDR"]
dist.init_process_group("gloo")
one = torch.ones(1)
dist.all_reduce(one)
mine = dist.TCPStore(at, int(os.environ["MASTER_PORT"]), is_master=False)
mine.set(f"mine/{rank}", "what-only-ranks-know")
mine.get(f"mine/{1 - rank}")
print(f"start {start} sum={one.item()} at {at} by {os.environ.get('SLURMDDP_STORE')}", flush=True)
if rank == 1 and start == "0":
    os._exit(3)
time.sleep(float(sys.argv[1]))
dist.all_reduce(one)
"""


def make_pair(path: Path) -> str:
    assert write_pair(path) == ""
    return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return make_pair(tmp_path / "rendezvous.pem")


@pytest.fixture
def served(pair: str) -> stores.Served:
    served = stores.serve(own_address(), 0, LIMIT, several_nodes=True, pair=pair)
    served.store.set("secret", SECRET)
    return served


def own_address() -> str:
    return stores.own_address("192.0.2.1", 9)  # of TEST-NET-1: of the interface that leads out


def place(served: stores.Served) -> tuple[str, int]:
    assert served.tunnel is not None
    return served.tunnel.local


def answer(connection: socket.socket) -> bytes:
    """Return the first bytes that come once this end has sent what a client of torch sends first."""
    with contextlib.suppress(OSError):
        connection.settimeout(10)
        connection.sendall(b"\0\xce\xf7\x85\x3c\x0d\x01\0\0\0")  # VALIDATE, PING
        return connection.recv(100)
    return b""


def ask(pipe: Connection, at: tuple[str, int]) -> None:
    with socket.create_connection(at, 10) as connection:
        pipe.send(answer(connection))


def test_the_key_pair_is_for_its_owner_alone(pair: str) -> None:
    content = Path(pair).read_text()
    assert Path(pair).stat().st_mode & 0o777 == 0o600
    assert content.count("-----BEGIN ") == 2 and "PRIVATE KEY" in content


def test_without_openssl_the_reason_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert write_pair(tmp_path / "none.pem") == "this machine has no openssl to make a key pair with"
    assert (tmp_path / "none.pem").read_text() == "this machine has no openssl to make a key pair with"


class TestStrangers:
    def test_a_client_with_the_pair_reads_and_writes(self, served: stores.Served, pair: str) -> None:
        client: Any = stores.connect(own_address(), served.port, LIMIT, pair)
        assert client.get("secret") == SECRET
        client.set("from", b"afar" * 1_000_000)
        assert served.store.get("from") == b"afar" * 1_000_000 == client.clone().get("from")

    def test_one_without_tls_gets_nothing(self, served: stores.Served, capfd: pytest.CaptureFixture[str]) -> None:
        for _ in range(2):
            storeclient.plant(own_address(), served.port, {"planted": b"x"})
            with socket.create_connection((own_address(), served.port), 10) as connection:
                assert answer(connection) == b""
        assert not served.store.check(["planted"])
        assert capfd.readouterr().err.count("refused a connection of somebody else") == 1

    @pytest.mark.parametrize("shows", ["nothing", "another run's"])
    def test_one_without_the_run_s_certificate_gets_nothing(
        self, served: stores.Served, shows: str, tmp_path: Path
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if shows != "nothing":
            context.load_cert_chain(make_pair(tmp_path / "other.pem"))
        with (
            socket.create_connection((own_address(), served.port), 10) as plain,
            context.wrap_socket(plain) as connection,
        ):
            assert answer(connection) == b""

    def test_another_run_s_head_is_not_believed(self, served: stores.Served, tmp_path: Path) -> None:
        other, limit = make_pair(tmp_path / "other.pem"), datetime.timedelta(seconds=3)
        with pytest.raises(RuntimeError):
            stores.connect(own_address(), served.port, limit, other)

    def test_the_wire_shows_no_value(self, served: stores.Served, pair: str) -> None:
        seen = bytearray()
        with socket.create_server((own_address(), 0)) as listener:

            def spy() -> None:
                far, near = listener.accept()[0], socket.create_connection((own_address(), served.port))

                def copy(source: socket.socket, sink: socket.socket) -> None:
                    while data := source.recv(1 << 16):
                        seen.extend(data)
                        sink.sendall(data)

                threading.Thread(target=copy, args=(far, near), daemon=True).start()
                copy(near, far)

            threading.Thread(target=spy, daemon=True).start()
            client = stores.connect(own_address(), listener.getsockname()[1], LIMIT, pair)
        assert client.get("secret") == SECRET
        assert len(seen) > 1000 and SECRET not in seen and b"secret" not in seen

    def test_a_kernel_that_refuses_a_filter_is_said(self, pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(gate: tunnel.Gate, port: int) -> None:
            if not gate.is_open:
                raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(tunnel.Gate, "_let", refuse)
        served = stores.serve(own_address(), 0, LIMIT, several_nodes=True, pair=pair)
        assert served.tunnel is not None and served.tunnel.is_open
        assert stores.connect(own_address(), served.port, LIMIT, pair).num_keys() >= 0

    @needs_root  # an ordinary user may not be let
    def test_on_the_head_nobody_reaches_the_store_past_the_agent(self, served: stores.Served) -> None:
        host, port = place(served)
        with socket.socket() as connection, pytest.raises(TimeoutError):
            connection.settimeout(2)
            connection.connect(("127.0.0.1", port))
        assert TCPStore(host, port, is_master=False, timeout=LIMIT).get("secret") == SECRET

    @needs_root
    def test_another_user_of_a_node_gets_nothing(self, served: stores.Served, pair: str) -> None:
        far = tunnel.Tunnel().forward(own_address(), served.port, pair, 5).local
        for at in (far, place(served)):
            with stranger(ask, at) as pipe:
                assert pipe.recv() == b""
            with socket.create_connection(at, 10) as connection:
                assert answer(connection) != b""


def set_and_exit(address: str, port: int, pair: str) -> None:
    store = SignedStore(stores.connect(address, port, LIMIT, pair), Key(b"0" * 64), ("test", "0"), start=0)
    tunnel._loop().call_soon_threadsafe(time.sleep, 1)  # a busy node
    store.set("last", "1")
    os._exit(0)


class TestLife:
    def test_what_a_process_sets_last_arrives(self, served: stores.Served, pair: str) -> None:
        """As the ranks of the network's measurement do: rank 0 waits for what the last one sets."""
        process = multiprocessing.get_context("spawn").Process(
            target=set_and_exit, args=(own_address(), served.port, pair)
        )
        process.start()
        process.join(60)
        assert process.exitcode == 0 and served.store.check(["last"])

    def test_the_head_may_begin_to_listen_later(self, pair: str) -> None:
        with socket.create_server((own_address(), 0)) as other:
            port = other.getsockname()[1]
        late: list[stores.Served] = []

        def serve() -> None:
            late.append(stores.serve(own_address(), port, LIMIT, several_nodes=True, pair=pair))

        threading.Timer(1.5, serve).start()
        client = stores.connect(own_address(), port, LIMIT, pair)
        client.set("here", "1")
        assert late[0].store.get("here") == b"1"

    def test_a_store_that_is_gone_is_an_error_at_once_and_its_port_is_free(self, pair: str) -> None:
        served = stores.serve(own_address(), 0, LIMIT, several_nodes=True, pair=pair)
        client = stores.connect(own_address(), served.port, datetime.timedelta(seconds=60), pair)
        port, began = served.port, time.monotonic()
        assert served.tunnel is not None
        threading.Timer(0.5, served.tunnel.close).start()
        with pytest.raises(RuntimeError):
            client.get("never set")
        assert time.monotonic() - began < 10
        again = stores.serve(own_address(), port, LIMIT, several_nodes=True, pair=pair)
        assert stores.connect(own_address(), port, LIMIT, pair).num_keys() == again.store.num_keys()


class TestAgents:
    @pytest.mark.parametrize("backend", [SIGNED, pytest.param(STATIC, marks=pytest.mark.long)])
    def test_ranks_of_two_nodes_meet_through_tls_also_after_a_restart(
        self, agents: Any, run: Path, backend: str
    ) -> None:
        make_pair(run / "rendezvous.pem")
        script = SCRIPT if backend == SIGNED else SCRIPT.replace('start == "0"', "False")
        (run / "script.py").write_text(script)
        pair = agents(backend, 2)
        ended = [output(process, 120) for process in [pair.start(node, "0", begin=True) for node in range(2)]]
        text = "\n".join(text for _, text in ended)
        last = "start 1" if backend == SIGNED else "start 0"
        assert [code for code, _ in ended] == [0, 0], text
        assert text.count(f"{last} sum=2.0 at 127.0.0.1 by 127.0.0.2:") == 1, text
        assert text.count(f"{last} sum=2.0 at 127.0.0.1 by 127.0.0.1:") == 1, text
        assert not [*read_events(run / "events.jsonl", StoreOpen)]

    def test_a_killed_agent_s_connections_close_at_once(self, agents: Any, run: Path) -> None:
        make_pair(run / "rendezvous.pem")
        (run / "script.py").write_text(
            SCRIPT.replace('start == "0"', "False").replace("time.sleep(float(sys.argv[1]))", "mine.get('never')")
        )
        pair = agents(SIGNED, 2)
        head, other = (pair.start(node, begin=True) for node in range(2))
        assert any("sum=2.0" in line for line in head.stdout)
        time.sleep(2)
        began = time.monotonic()
        head.send_signal(signal.SIGKILL)
        code, text = output(other, 120)
        assert code != 0 and time.monotonic() - began < 30, text

    def test_without_a_pair_status_learns_why(self, agents: Any, run: Path) -> None:
        (run / "rendezvous.pem").write_text("this machine has no openssl to make a key pair with")
        (run / "rendezvous.pem").chmod(0o600)
        pair = agents(SIGNED, 2)
        ended = [output(process, 120) for process in [pair.start(node) for node in range(2)]]
        assert [code for code, _ in ended] == [0, 0]
        told: list[Any] = [event.facts for event in read_events(run / "events.jsonl", StoreOpen)]
        assert [facts.why for facts in told] == ["this machine has no openssl to make a key pair with"] * 2
