"""What somebody without the run's key can do to the rendezvous: nothing but make the attempt fail."""

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from slurmddp.records.rank_events import Forged
from slurmddp.run.create import write_key
from slurmddp.runtime import signing
from slurmddp.runtime.agent import stores
from slurmddp.runtime.agent.signed import SignedBackend, SignedStore
from slurmddp.runtime.errors import UserError
from slurmddp.runtime.journal import read_events
from tests import storeclient
from tests.helpers import Desk, make_code
from tests.strangers import UID, needs_root

from .harness import PATIENCE, ROOT, free_port

ID = "run-1-0"
SECOND = datetime.timedelta(seconds=5)
ASSIGNED = "torchelastic/assigned_ranks/1"
PLAIN, SIGNED, STATIC = "c10d", "slurmddp-c10d", "slurmddp-static"
#: A user's script: what torchrun told this rank, and a sum over all of them.
SCRIPT = """
import os, sys, time
print(" ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "MASTER_ADDR", "SLURMDDP_START")), flush=True)
if len(sys.argv) > 1:
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    one = torch.ones(1)
    dist.all_reduce(one)
    print(f"sum={one.item()}", flush=True)
    if os.environ["RANK"] == "1" and os.environ["SLURMDDP_START"] == "0":
        time.sleep(3)
        os._exit(3)
    time.sleep(float(sys.argv[1]))
"""

#: Gathers objects in two groups, one after the other. Rank 1 comes when the outsider has had his time.
OBJECTS = """
import os, pathlib, socket, time
import torch.distributed as dist
rank, here = int(os.environ["RANK"]), pathlib.Path(os.environ["LOGDIR"])
(here / f"address-{rank}").write_text(os.environ["MASTER_ADDR"] + " " + os.environ["MASTER_PORT"])
while rank == 1 and not (here / "outsider-gone").exists():
    time.sleep(0.1)
told = []
for _ in range(2):
    dist.init_process_group("gloo")
    found = [None, None]
    dist.all_gather_object(found, rank)
    told.append(found)
    dist.destroy_process_group()
store = pathlib.Path(os.environ["SLURMDDP_STORE"])
above = [path.stat() for path in (store, *store.parents)]
print("closed to others", any(at.st_mode & 0o077 == 0 and at.st_uid == os.getuid() for at in above[:3]), flush=True)
print("groups in it", sorted(path.name for path in store.iterdir()), flush=True)
print("gathered", *told, flush=True)
"""
#: Another user's program: joins as rank 1, and sends an object that makes a file where it is unpickled.
OUTSIDER = """
import datetime, os, pathlib, sys, time
import torch.distributed as dist
here = pathlib.Path(sys.argv[1])
while not (here / "address-0").exists() or not (here / "address-0").read_text():
    time.sleep(0.05)
host, port = (here / "address-0").read_text().split()
os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, RANK="1", WORLD_SIZE="2", TORCHELASTIC_USE_AGENT_STORE="True")
class Evil:
    def __reduce__(self):
        return os.mkdir, (str(here / "planted"),)
try:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
    dist.all_gather_object([None, None], Evil())
finally:
    (here / "outsider-gone").touch()
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_key(tmp_path / "rendezvous.key")
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


class Agents:
    """torchrun agents as node.sh starts them, or torch's own, on this machine's loopback interface."""

    def __init__(self, run: Path, backend: str, nodes: int, **environment: str) -> None:
        self.run, self.backend, self.nodes, self.port = run, backend, nodes, free_port()
        self.environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "SLURMDDP_NODE": "here", **environment}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, node: int, *script: str, ranks: int = 1, begin: bool = False) -> "subprocess.Popen[str]":
        """begin: start the script through slurmddp.runtime.begin, as node.sh does."""
        module = ["torch.distributed.run"] if self.backend == PLAIN else ["slurmddp.runtime.agent", str(self.run)]
        conf = f"rank={node}" if self.backend == STATIC else f"is_host={int(node == 0)},join_timeout=60"
        command = [
            *(sys.executable, "-m", *module, f"--nnodes={self.nodes}", f"--nproc-per-node={ranks}"),
            *("--max-restarts", str(0 if self.backend == STATIC else 3), f"--rdzv-backend={self.backend}"),
            *(f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-id={ID}", f"--rdzv-conf={conf}"),
            f"--local-addr=127.0.0.{node + 1}",
            *(["-m", "slurmddp.runtime.begin"] if begin else []),
            *(str(self.run / "script.py"), *script),
        ]
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **self.environment}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=self.run
        )
        self.started.append(process)
        return process

    def plant(self, values: dict[str, bytes]) -> None:
        """As soon as the store is there."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return storeclient.plant("127.0.0.1", self.port, values)
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)


@pytest.fixture
def agents(run: Path) -> Iterator[Any]:
    made: list[Agents] = []

    def make(backend: str, nodes: int, **environment: str) -> Agents:
        made.append(Agents(run, backend, nodes, **environment))
        return made[-1]

    yield make
    for process in [process for one in made for process in one.started]:
        if process.poll() is None:
            process.kill()
        process.communicate()


def output(process: "subprocess.Popen[str]", timeout: float = PATIENCE) -> tuple[int, str]:
    out, errors = process.communicate(timeout=timeout)
    return process.returncode, out + errors


class TestState:
    @pytest.mark.parametrize("backend", [pytest.param(PLAIN, marks=pytest.mark.long), SIGNED])
    def test_a_planted_state_runs_no_code(self, agents: Any, run: Path, backend: str) -> None:
        """With torch's own backend it does: then the attack itself is sound."""
        mark = run / "planted"
        waiting = agents(backend, 2)
        agent = waiting.start(0)
        waiting.plant({f"torch.rendezvous.{ID}": storeclient.state(str(mark))})
        code, text = output(agent)
        assert code == 1
        assert mark.exists() == (backend == PLAIN)
        if backend == SIGNED:
            assert f"slurmddp: node here: somebody else changed the state of rendezvous {ID} (not signed" in text
            assert "Traceback" not in text
            (event,) = read_events(run / "events.jsonl", Forged)
            assert event.node == "here" and isinstance(event.facts, Forged)
            assert event.facts.text.startswith("somebody else changed the state")

    def test_only_what_was_signed_here_and_now_is_read(self, run: Path) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECOND)

        def backend(key: signing.Key, where: Sequence[str] = ("id", "0")) -> SignedBackend:
            return SignedBackend("x", C10dRendezvousBackend(server, "id"), key, where)

        key = signing.load(run)
        first, name = backend(key), "torch.rendezvous.id"
        assert first.get_state() is None
        one = first.set_state(b"one")
        assert one is not None and one[0] == b"one" and one[2]
        old = server.get(name).decode()
        two = first.set_state(b"two", one[1])
        assert two is not None and two[0] == b"two" and two[2]
        late = backend(key)
        assert late.get_state() == (b"two", two[1])
        assert late.set_state(b"lost", one[1]) == (b"two", two[1], False)
        for stranger in (backend(signing.Key(b"x" * 32)), backend(key, ("id", "1")), backend(key, ("other", "0"))):
            with pytest.raises(RendezvousStateError, match="not signed with this run's key"):
                stranger.get_state()
            with pytest.raises(RendezvousStateError, match="not signed with this run's key"):
                stranger.set_state(b"mine", one[1])
        server.set(name, old)
        with pytest.raises(RendezvousStateError, match="an older state was restored"):
            first.get_state()
        for planted in ("Y2FuaW1hZGFt", "", "a", "not base 64", "\x00\xff"):  # the first: torch's word for none
            server.set(name, planted)
            with pytest.raises(RendezvousStateError, match="somebody else changed the state"):
                first.get_state()


class TestStore:
    def test_values_are_bound_to_their_name_and_start(self, run: Path) -> None:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=SECOND)
        store = SignedStore(server, signing.load(run), ("id", "0"), start=0)
        store.multi_set(["a", "b"], ["1", b"2"])
        assert store.multi_get(["a", "b"]) == [b"1", b"2"]
        assert store.add("count", 2) == 2
        moved = server.get("a").decode()
        server.set("b", moved)
        with pytest.raises(signing.ForgedError, match="somebody else wrote b into"):
            store.get("b")
        with pytest.raises(signing.ForgedError, match="somebody else wrote a into"):
            SignedStore(server, signing.load(run), ("id", "0"), start=1).get("a")

    @pytest.mark.parametrize("backend", [pytest.param(PLAIN, marks=pytest.mark.long), SIGNED])
    def test_a_forged_master_addr_leads_no_rank_away(self, agents: Any, backend: str) -> None:
        """Planted before the agents meet. It counts where the second one reads it before the first writes its own."""
        names = ["MASTER_ADDR"] if backend == PLAIN else ["MASTER_ADDR", "slurmddp/ranks_store", ASSIGNED]
        values = {f"torch.rendezvous.{ID}.0/{name}": b"127.6.6.6" for name in names}
        for _ in range(5):
            pair = agents(backend, 2)
            pair.start(0)
            pair.plant(values)
            second = pair.start(1)
            pair.plant(values)
            text = output(second)[1]
            led_away = "MASTER_ADDR=127.6.6.6" in text
            refused = "slurmddp: node here: somebody else wrote" in text
            assert not (led_away and backend == SIGNED) and not (refused and "RANK=" in text), text
            if led_away or refused:
                return
        pytest.fail(f"in 5 tries, the second agent never read what was planted:\n{text}")


class TestStarts:
    @pytest.mark.parametrize("backend", [SIGNED, STATIC])
    def test_several_nodes_meet(self, agents: Any, backend: str) -> None:
        pair = agents(backend, 2)
        both = [pair.start(node) for node in (0, 1)]
        for node, process in enumerate(both):
            code, text = output(process)
            assert code == 0, text
            assert f"RANK={node} MASTER_ADDR=127.0.0.1 SLURMDDP_START=0" in text

    @pytest.mark.parametrize("backend", [SIGNED, pytest.param(STATIC, marks=pytest.mark.long)])
    def test_on_one_node_nobody_reaches_the_agents_store(self, agents: Any, backend: str) -> None:
        """With a store on the endpoint's port, one unsigned SET ended the attempt."""
        one = agents(backend, 1)
        agent = one.start(0, "0")
        reached = False
        while agent.poll() is None:
            try:
                storeclient.plant("127.0.0.1", one.port, {f"torch.rendezvous.{ID}": b"x"})
                reached = True
            except OSError:
                time.sleep(0.02)
        code, text = output(agent)
        assert code == 0 and "sum=1.0" in text and not reached, text

    @pytest.mark.long  # tests/cluster/test_rendezvous.py looks, too
    @pytest.mark.ranks(2)
    def test_on_one_node_everything_listens_on_loopback_also_after_a_restart(self, agents: Any) -> None:
        one = agents(SIGNED, 1, GLOO_SOCKET_IFNAME="lo")
        agent = one.start(0, "20", ranks=2)
        seen: set[str] = set()
        deadline = time.monotonic() + 60
        while agent.poll() is None and time.monotonic() < deadline:
            seen |= listening(agent.pid)
            time.sleep(0.05)
            if len(seen) >= 6:
                break
        agent.terminate()
        text = output(agent)[1]
        assert "RANK=0 MASTER_ADDR=127.0.0.1 SLURMDDP_START=1" in text, text
        assert text.count("sum=2.0") >= 2
        # The ranks' store of both starts, and gloo's, of two ranks twice. The agents' store has no port.
        assert f"127.0.0.1:{one.port}" not in seen and len(seen) >= 6, seen
        assert {address.rpartition(":")[0] for address in seen} == {"127.0.0.1"}, seen

    def test_starts_of_an_own_script_are_in_the_events(self, agents: Any, run: Path) -> None:
        """job.sh learns from them how long a start takes, and ends an attempt whose ranks do not start again."""
        (run / "script.py").write_text(
            "import os, sys, time\n"
            "if os.environ['SLURMDDP_START'] == '0':\n"
            "    while os.environ['RANK'] == '0' or not os.path.exists(os.environ['SLURMDDP_RUN'] + '/events.jsonl'):\n"
            "        time.sleep(0.1)\n"
            "    os._exit(3)\n"
        )
        pair = agents(SIGNED, 2, SLURMDDP_RUN=str(run), SLURMDDP_ATTEMPT="4")
        for process in [pair.start(node, begin=True) for node in (0, 1)]:
            code, text = output(process)
            assert code == 0, text
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        (exited,) = (event for event in events if event["event"] == "rank_exited")
        assert (exited["rank"], exited["exit_code"], exited["signal"]) == (1, 3, None)
        events.remove(exited)
        kinds = ["rank_started", "ranks_stopped", "ranks_stopped", "rank_started"]
        assert [event["event"] for event in events] == kinds
        assert all((event["attempt"], event["node"]) == (4, "here") for event in events)
        starts = [event for event in events if event["event"] == "rank_started"]
        assert all(event["rank"] == 0 and 0 < event["seconds"] < 60 for event in starts)

    def test_a_killed_rank_of_an_own_script_is_in_the_events(self, agents: Any, run: Path) -> None:
        """Its node's agent alone sees the signal. The other rank, which torchrun ends, is no failure of its own."""
        (run / "script.py").write_text(
            "import os, signal, time\n"
            "if os.environ['SLURMDDP_START'] == '0' and os.environ['RANK'] == '1':\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "if os.environ['SLURMDDP_START'] == '0':\n"
            "    time.sleep(60)\n"
        )
        one = agents(SIGNED, 1, SLURMDDP_RUN=str(run), SLURMDDP_ATTEMPT="4")
        code, text = output(one.start(0, ranks=2, begin=True))
        assert code == 0, text
        events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
        exits = [
            (event["attempt"], event["node"], event["rank"], event["exit_code"], event["signal"])
            for event in events
            if event["event"] == "rank_exited"
        ]
        assert exits == [(4, "here", 1, None, "SIGKILL")]

    @pytest.mark.ranks(2)
    def test_an_outsider_does_not_join_the_ranks(self, agents: Any, run: Path) -> None:
        """Rank 1 comes late. With torch's TCP store the outsider took its place, and rank 0 unpickled what he sent."""
        (run / "script.py").write_text(OBJECTS)
        one = agents(SIGNED, 1, LOGDIR=str(run), GLOO_SOCKET_IFNAME="lo")
        agent = one.start(0, ranks=2, begin=True)
        check_outsider(run, [agent])

    @pytest.mark.ranks(2)
    @pytest.mark.long
    def test_an_outsider_does_not_join_the_ranks_that_srun_starts(self, run: Path, tmp_path: Path) -> None:
        """The same with launch.mode srun, where no agent makes a store: the real node.sh, once for each rank."""
        desk = Desk(tmp_path / "desk")
        desk.write("script.py", OBJECTS)
        python = f"container: {{runtime: none, python: {sys.executable}}}\nrecovery: {{preflight: false}}\n"
        job = f"name: own\nsite: cores\ntrain: {{script: script.py}}\npaths: {{node: {tmp_path}/disk}}\n{python}"
        _, script = desk.scripts(job, "launch.mode=srun", "resources.nodes=1", "resources.ranks_per_node=2")
        (run / "code/project").mkdir(parents=True)
        make_code(run)
        (run / "code/project/script.py").write_text(OBJECTS)
        ours = {"RUN": str(run), "LOGS": str(run / "logs"), "ATTEMPT": "0", "PORT": str(free_port()), "NODES": "1"}
        slurm = {"SLURM_JOB_ID": "7", "SLURMD_NODENAME": "here", "SLURM_NTASKS": "2", "LOGDIR": str(run)}
        names = {**desk.environment, **slurm, **{f"SLURMDDP_{name}": value for name, value in ours.items()}}
        names["SLURMDDP_RENDEZVOUS_ID"] = "own-7-0"
        ranks = [
            subprocess.Popen(
                ["bash", "-c", script],
                env={**names, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in "01"
        ]  # fmt: skip
        try:
            check_outsider(run, ranks)
        finally:
            for rank in ranks:
                rank.kill()

    def test_after_a_stop_no_failed_rank_starts_again(self, agents: Any, run: Path) -> None:
        (run / "script.py").write_text(
            "import os\n"
            "with open(os.environ['SLURMDDP_RUN'] + '/starts', 'a') as file: file.write('x')\n"
            "open(os.environ['SLURMDDP_RUN'] + '/stop', 'w').close()\n"
            "os._exit(3)\n"
        )
        one = agents(SIGNED, 1, SLURMDDP_RUN=str(run), SLURMDDP_ATTEMPT="0")
        code, text = output(one.start(0))
        assert code == 1 and "the run was asked to stop: its ranks do not start again" in text, text
        assert "Traceback" not in text and (run / "starts").read_text() == "x"

    def test_a_port_in_use_is_one_message(self, agents: Any) -> None:
        pair = agents(SIGNED, 2)
        with socket.create_server(("", pair.port)):
            code, text = output(pair.start(0))
        assert code == 1
        assert f"slurmddp: node here: cannot listen on port {pair.port} of 0.0.0.0: Address already in use" in text
        assert "Traceback" not in text

    def test_a_port_that_becomes_free_is_taken(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            threading.Timer(1.0, other.close).start()
            store = stores.serve("127.0.0.1", port, datetime.timedelta(seconds=20), several_nodes=False)
        assert store.port == port

    def test_several_nodes_listen_on_one_address_only(self) -> None:
        own = stores.own_address("192.0.2.1", 9)  # of TEST-NET-1: of the interface that leads out
        store = stores.serve(own, 0, SECOND, several_nodes=True)
        assert {line for line in listening(os.getpid()) if line.endswith(f":{store.port}")} == {f"{own}:{store.port}"}

    @pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
    def test_a_head_whose_name_is_not_its_own_listens_everywhere_and_says_so(
        self, address: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store = stores.serve(address, 0, SECOND, several_nodes=True)
        found = {line.rpartition(":")[0] for line in listening(os.getpid()) if line.endswith(f":{store.port}")}
        assert found == {"0.0.0.0"} and "so the store listens on all interfaces" in capsys.readouterr().out


class TestKey:
    def test_it_is_for_its_owner_alone(self, run: Path) -> None:
        path = run / "rendezvous.key"
        assert path.stat().st_mode & 0o777 == 0o600
        sealed = signing.load(run).seal(b"text", "here")
        assert signing.load(run).open(sealed, "here") == b"text"
        path.chmod(0o640)
        with pytest.raises(UserError, match=r"other users can read the run's key .*chmod 600"):
            signing.load(run)

    @pytest.mark.parametrize(
        "what",
        [
            *("link", pytest.param("his", marks=needs_root)),
            *(pytest.param(what, marks=pytest.mark.long) for what in ("missing", "folder", "short")),
        ],
    )
    def test_a_bad_one_is_one_message(self, run: Path, agents: Any, what: str) -> None:
        path = run / "rendezvous.key"
        path.rename(run / "other")
        if what == "link":
            path.symlink_to(run / "other")
        elif what == "folder":
            path.mkdir()
        elif what == "short":
            path.write_text("x")
            path.chmod(0o600)
        elif what == "his":
            write_key(path)
            os.chown(path, UID, -1)
        code, text = output(agents(SIGNED, 1).start(0))
        assert code == 1 and text.count("slurmddp: node here:") == 1 and str(path) in text
        assert "Traceback" not in text


def check_outsider(run: Path, processes: "Sequence[subprocess.Popen[str]]") -> None:
    """Play the outsider while OBJECTS runs: the ranks of these processes meet each other, and nobody else."""
    (run / "outsider.py").write_text(OUTSIDER)
    command = [sys.executable, str(run / "outsider.py"), str(run)]
    outsider = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    ended = [output(process) for process in processes]
    text = "".join(text for _, text in ended)
    shown = text + outsider.stderr
    assert not any(code for code, _ in ended) and text.count("gathered [0, 1] [0, 1]") == 2, shown
    assert text.count("closed to others True") == 2 and text.count("groups in it ['group-0', 'group-1']") == 2, shown
    assert outsider.returncode != 0 and not (run / "planted").exists(), shown


def listening(root: int) -> set[str]:
    """Addresses on which a process and its descendants listen, as `ss -ltnp` shows them."""
    ours = {f"pid={pid}," for pid in descendants(root)}
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {line.split()[3] for line in lines if any(pid in line for pid in ours)}


def descendants(root: int) -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {root}
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return found
