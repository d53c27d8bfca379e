"""The check before the first step: real processes, one a node, on addresses of the loopback."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmddp.records.preflight import Finding, Verdict, bad, plain, read, warn
from slurmddp.records.refusal import Refusal
from slurmddp.run.create import write_key
from slurmddp.runtime import signing
from slurmddp.runtime.preflight import node as node_side
from slurmddp.runtime.preflight import node_settings
from slurmddp.runtime.preflight.checks import devices, folders, packages
from slurmddp.runtime.preflight.judge import Report, judge, partners
from slurmddp.runtime.preflight.protocol import answers_with_name, meet

from .harness import PATIENCE, ROOT, free_port

COMMAND = [sys.executable, "-m", "slurmddp.runtime.preflight"]


@dataclass
class Nodes:
    """Nodes that share a run folder."""

    root: Path
    names: list[str]
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.run = self.root / "run"
        self.logs = self.run / "logs" / "attempt-000"
        (self.run / "code").mkdir(parents=True)
        (self.run / "code" / "own.py").write_text("print()\n")
        self.logs.mkdir(parents=True)
        write_key(self.run / "rendezvous.key")

    def variables(self, name: str, **changes: str) -> dict[str, str]:
        number = self.names.index(name)
        own = f"127.3.{number // 250}.{number % 250 + 1}"
        return {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "SLURMDDP_NODE": name,
            "SLURMDDP_PREFLIGHT_NODES": " ".join(self.names),
            "SLURMDDP_PREFLIGHT_SECONDS": "12",
            "SLURMDDP_LOGS": str(self.logs),
            "SLURMDDP_RENDEZVOUS_ID": "run-77-0",
            "SLURMDDP_HEAD": "127.3.0.1",
            "SLURMDDP_PORT": str(self.port),
            "SLURMDDP_ADDRESS": own,
            "SLURMDDP_INTERFACE": "lo",
            "SLURMDDP_NETWORK": f"{own}/16",
            "SLURMDDP_IMAGE": "9 bytes, checksum 1",
            **changes,
        }

    def start(self, name: str, **changes: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*COMMAND, str(self.run)],
            env=self.variables(name, **changes),
            cwd=self.root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def check(self, changes: dict[str, dict[str, str]] | None = None, absent: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit code of the head, and the verdict without its warnings of little space. The others must exit 0."""
        changes = changes or {}
        started = {name: self.start(name, **changes.get(name, {})) for name in self.names if name not in absent}
        ended = {
            name: (*process.communicate(timeout=PATIENCE), process.returncode) for name, process in started.items()
        }
        for name, (_, errors, code) in ended.items():
            assert code == 0 or name == self.names[0], f"{name}: {errors}"
        lines = read(json.loads((self.logs / "preflight" / "verdict.json").read_text())).lines()
        kept = "\n".join(line for line in lines if " MiB free" not in line)
        return ended[self.names[0]][2], kept


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes in this process have the path of the others: setuptools, which torch 2.4 imports, adds to it."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if not folder.endswith("setuptools/_vendor")])


@pytest.fixture
def three(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path, ["n1", "n2", "n3"])


def test_all_is_well(three: Nodes) -> None:
    assert three.check() == (0, "n1 ok\nn2 ok\nn3 ok")
    assert sorted(os.listdir(three.logs / "preflight")) == ["verdict.json"]
    # torchrun's store takes the port next.
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("", three.port))


def test_a_node_alone(tmp_path: Path) -> None:
    assert Nodes(tmp_path, ["n1"]).check() == (0, "n1 ok")


def test_the_head_may_be_the_last_to_come(three: Nodes) -> None:
    first = [three.start(name) for name in ("n2", "n3")]
    while len(list((three.logs / "preflight").glob("*.token"))) < 2:
        assert all(process.poll() is None for process in first)
    head = three.start("n1")
    assert head.wait(PATIENCE) == 0
    for process in (*first, head):
        assert process.communicate(timeout=PATIENCE)[1] == "" and process.returncode == 0


def test_another_image_or_code_is_named(three: Nodes, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "own.py").write_text("print(1)\n")
    code, text = three.check({"n3": {"SLURMDDP_IMAGE": "8 bytes, checksum 2"}})
    assert code == 3
    assert text.startswith("n1 ok\nn2 ok\nn3 bad its image file differs from the others' (8 bytes, checksum 2, theirs")
    assert " - copy the image to this node again" in text


def test_the_head_can_be_the_odd_one(three: Nodes) -> None:
    code, text = three.check({"n1": {"SLURMDDP_IMAGE": "8 bytes, checksum 2"}})
    assert code == 3
    assert text.startswith("n1 bad its image file differs") and text.endswith("\nn2 ok\nn3 ok")


def test_other_packages_are_named(three: Nodes, tmp_path: Path) -> None:
    (tmp_path / "site" / "numpy-0.0.1.dist-info").mkdir(parents=True)
    code, text = three.check({"n2": {"PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}})
    assert code == 3
    assert "n2 bad has different software: numpy 0.0.1 (the others: " in text and text.count(" bad ") == 1


def test_a_run_folder_of_its_own(three: Nodes, tmp_path: Path) -> None:
    """The folder has the same name and other contents: a stale or missing mount."""
    own = tmp_path / "own" / "logs"
    own.mkdir(parents=True)
    code, text = three.check({"n2": {"SLURMDDP_LOGS": str(own)}})
    assert code == 3
    assert "n2 bad does not see the files of n1 in the run folder - the run folder must be on a file system" in text
    assert text.startswith("n1 ok\n") and text.endswith("\nn3 ok")


def test_a_run_folder_that_cannot_be_written(three: Nodes, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = three.check({"n2": {"SLURMDDP_LOGS": str(tmp_path / "file")}})
    assert code == 3
    assert "n2 bad cannot write to the run folder" in text and text.endswith("\nn3 ok")


def test_missing_data_is_named_on_each_node(three: Nodes) -> None:
    (three.run / "job.json").write_text(json.dumps({"train": {"data": {"path": "/no/such"}, "init_from": None}}))
    code, text = three.check()
    assert code == 3
    assert (
        text.count(" bad train.data.path: cannot read /no/such: No such file or directory - check that it is mounted")
        == 3
    )


def test_an_address_that_is_not_the_nodes(three: Nodes) -> None:
    code, text = three.check({"n3": {"SLURMDDP_ADDRESS": "192.0.2.7"}})
    assert code == 3
    assert "n3 bad cannot listen on its own address 192.0.2.7 (lo): Cannot assign requested address" in text


def test_an_interface_in_another_network(three: Nodes) -> None:
    code, text = three.check({"n2": {"SLURMDDP_NETWORK": "10.9.0.3/24", "SLURMDDP_INTERFACE": "eth0"}})
    assert code == 3
    assert "n2 bad its interface eth0 (10.9.0.3/24) is not in the others' network, 127.3.0.0/16 - set n" in text


def test_a_closed_port_and_one_of_somebody_else(three: Nodes) -> None:
    asks = node_settings.read(three.run, three.variables("n1"))
    answers = node_settings.read(three.run, three.variables("n2"))
    other_run = node_settings.read(three.run, three.variables("n2", SLURMDDP_RENDEZVOUS_ID="run-78-0"))

    async def tries() -> list[str]:
        server = await asyncio.start_server(answers_with_name(answers), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        said = [await meet(asks, "127.0.0.1", port, name) for name in ("n2", "n1")]
        said.append(await meet(other_run, "127.0.0.1", port, "n2"))
        server.close()
        return [*said, await meet(asks, "127.0.0.1", port, "n2")]

    assert asyncio.run(tries()) == [
        "",
        "n2 answered instead: two nodes have this address",
        "not signed with this run's key",
        "Connection refused",
    ]


def test_what_node_sh_says_is_heard_at_once(three: Nodes) -> None:
    folder = three.logs / "preflight"
    folder.mkdir()
    (folder / "n3.failed").write_text(Refusal('has no interface "ib0"').write())
    code, text = three.check({name: {"SLURMDDP_PREFLIGHT_SECONDS": "600"} for name in three.names}, absent=("n3",))
    assert (code, text) == (3, 'n1 ok\nn2 ok\nn3 bad has no interface "ib0" - see its log')


def test_a_silent_node(three: Nodes) -> None:
    code, text = three.check({"n1": {"SLURMDDP_PREFLIGHT_SECONDS": "3"}}, absent=("n3",))
    assert code == 3
    assert text.startswith("n1 ok\nn2 ok\nn3 bad did not report within 3 s - see its log")


def test_a_node_that_cannot_reach_the_head(three: Nodes) -> None:
    """Its word comes through the run folder."""
    code, text = three.check({"n2": {"SLURMDDP_PORT": str(free_port())}})
    assert code == 3
    assert "n2 bad cannot reach the head 127.3.0.1 on the rendezvous port" in text and "refused" in text
    assert text.startswith("n1 ok\n") and text.endswith("\nn3 ok")


def test_when_none_reaches_the_head_it_is_the_heads_fault(three: Nodes) -> None:
    code, text = three.check({name: {"SLURMDDP_HEAD": "no.such.host.invalid"} for name in ("n2", "n3")})
    assert code == 3
    lines = [line for line in text.splitlines() if " warn " not in line]
    assert lines[0].startswith("n1 bad 2 of the 2 other nodes cannot work with it (n2: cannot reach the head")
    assert lines[1:] == ["n2 ok", "n3 ok"] and "cannot resolve" in lines[0]


@pytest.mark.parametrize("answer", [b"", b'{"node": "n3"}\n'])
def test_two_nodes_that_cannot_reach_each_other(three: Nodes, monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """The head reaches n3. After that, whoever connects to n3's port gets no answer, or one without a signature."""
    code, text = with_n3(three, monkeypatch, "answers_with_name", only_first_answered(answer))
    reason = "not signed" if answer else "the connection was closed"
    assert code == 3
    assert re.fullmatch(
        "n1 ok\nn2 ok\n"
        rf"n3 bad n2 cannot connect to n3 at 127\.3\.0\.3, port \d+: {reason}; slurmddp excludes one of the two "
        rf"- check .*",
        text,
    )


def only_first_answered(answer: bytes) -> Any:
    def answers(settings: node_settings.NodeSettings) -> Any:
        first = [answers_with_name(settings)]

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if first:
                await first.pop()(reader, writer)
            else:
                writer.write(answer)
                writer.close()

        return serve

    return answers


@pytest.mark.parametrize("lost", [True, False])
def test_a_node_that_says_nothing_of_the_others_is_only_warned_about(
    three: Nodes, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Its connection with the head is lost, or no answer comes on it. Of n2 and n3, the first connects to the other."""

    async def never(settings: node_settings.NodeSettings, peers: Any) -> dict[str, str]:
        if lost:
            raise ConnectionError
        await asyncio.sleep(8)
        return {}

    three.names = ["n1", "n3", "n2"]
    code, text = with_n3(three, monkeypatch, "_unreached", never)
    reason = "the connection was closed" if lost else "no answer within 4 s"
    warning = f"n3 warn did not report whether it can connect to the other nodes: {reason} - see its log"
    assert (code, text) == (0, f"n1 ok\nn3 ok\n{warning}\nn2 ok")


def with_n3(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, name: str, instead: Any) -> tuple[int, str]:
    """The check, with n3 in this process, where one function of a node's side is another."""

    monkeypatch.setattr(node_side, name, instead)
    (nodes.logs / "preflight").mkdir()
    n3 = node_side.report(node_settings.read(nodes.run, nodes.variables("n3")))
    thread = threading.Thread(target=asyncio.run, args=(n3,))
    thread.start()
    try:
        return nodes.check(absent=("n3",))
    finally:
        thread.join()


def test_the_rendezvous_port_is_taken(three: Nodes) -> None:
    """The head says so and ends; there is no verdict, and the others do not wait for one."""
    with socket.socket() as taken:
        taken.bind(("", three.port))
        head = three.start("n1")
        _, errors = head.communicate(timeout=PATIENCE)
        assert head.returncode == 1
        assert f"cannot listen on the rendezvous port {three.port}: Address already in use" in errors
    (three.logs / "preflight").mkdir(exist_ok=True)
    (three.logs / "preflight" / "n1.failed").write_text(Refusal("as node.sh writes then").write())
    other = three.start("n2", SLURMDDP_PREFLIGHT_SECONDS="600")
    assert "the head n1 failed; see its log" in other.communicate(timeout=PATIENCE)[0] and other.returncode == 0
    assert [path.name for path in (three.logs / "preflight").iterdir()] == ["n1.failed"]


def test_a_node_where_slurm_could_not_start_the_process(three: Nodes) -> None:
    """srun knows it at once: nobody waits for the node's report."""
    (three.logs / "srun.err").write_text(
        "srun: error: task 1 launch failed: Slurmd could not connect IO\nsrun: error: task 7 launch failed: x\n"
    )
    late = {name: {"SLURMDDP_PREFLIGHT_SECONDS": "3600"} for name in ("n1", "n3")}
    code, text = three.check(late, absent=("n2",))
    reason = "Slurm could not start a process there: Slurmd could not connect IO - check that the run folder is mounted"
    first, second, third = text.splitlines()
    assert (code, first, third) == (3, "n1 ok", "n3 ok") and second.startswith(f"n2 bad {reason}")


def test_strangers_on_the_port(three: Nodes) -> None:
    """Scanners, another run's node, and who names our nodes without our key, neither disturb nor join."""
    others = [three.start(name) for name in ("n1", "n2")]
    forged = (signing.Key(b"x" * 32), "run-77-0"), (signing.load(three.run), "run-77-1")
    shouts = [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\0\xff" * 999,
        b"[]\n",
        b'{"node": "n3"}\n',
        b"",
        *(key.seal(b'{"node": "n3"}', "preflight", name) + b"\n" for key, name in forged),
    ]
    for shout in shouts:
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    stranger = stack.enter_context(socket.create_connection(("127.3.0.1", three.port), 30))
                    break
                except ConnectionRefusedError:
                    assert others[0].poll() is None
            stranger.sendall(shout)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(100) == b""
    others.append(three.start("n3"))
    for number, process in enumerate(others):
        _, errors = process.communicate(timeout=PATIENCE)
        ignored = [line for line in errors.splitlines() if "ignored a message: not signed" in line]
        assert process.returncode == 0 and ignored == errors.splitlines()
        assert (len(ignored) >= 4) == (number == 0)


def test_two_hundred_nodes(tmp_path: Path) -> None:
    """A head of its own process; the other nodes share one, each with its connections: so, a job's usual time."""
    usual = {"SLURMDDP_PREFLIGHT_SECONDS": "60"}
    nodes = Nodes(tmp_path, [f"n{number}" for number in range(200)])
    (nodes.logs / "preflight").mkdir()
    head = nodes.start("n0", **usual)

    async def others() -> list[int]:
        tasks = []
        for name in nodes.names[1:]:
            settings = node_settings.read(nodes.run, nodes.variables(name, **usual))
            tasks.append(node_side.report(settings))
        return await asyncio.gather(*tasks)

    with contextlib.redirect_stdout(None):
        codes = asyncio.run(others())
    _, errors = head.communicate(timeout=PATIENCE)
    assert set(codes) == {0} and (head.returncode, errors) == (0, "")
    lines = read(json.loads((nodes.logs / "preflight" / "verdict.json").read_text())).lines()
    assert [line for line in lines if " warn " not in line] == [f"{name} ok" for name in nodes.names]


def test_verdict_is_plain_text() -> None:
    found = Verdict({"a": (), "b": (bad('says "x\\y"\n\tz', "do"), warn("w", "v"), bad("r", "s"))})
    assert found.lines() == ["a ok", 'b bad says "x\\y" z - do; r - s', "b warn w - v"]
    assert len(plain("x" * 9999)) == 500


def test_two_nodes_that_differ_the_head_is_right() -> None:
    reports = {"a": Report(facts={"image": "1"}), "b": Report(facts={"image": "2"})}
    found = judge(["a", "b"], reports, "silent")
    assert found["a"] == [] and [item.level for item in found["b"]] == ["bad"]


def test_links_that_most_have_trouble_with_are_the_heads() -> None:
    trouble = Report(links={"port": bad("x", "y")})
    nodes = ["h", "a", "b", "c", "d"]

    def levels(troubled: set[str], names: list[str] = nodes) -> dict[str, list[str]]:
        found = judge(names, {name: trouble if name in troubled else Report() for name in names}, "silent")
        return {name: [item.level for item in items] for name, items in found.items() if items}

    assert levels({"a"}) == {"a": ["bad"]}
    assert levels({"a", "b"}) == {"a": ["bad"], "b": ["bad"]}
    assert levels({"a", "b", "c"}) == {"h": ["bad"], "a": ["warn"], "b": ["warn"], "c": ["warn"]}
    assert levels({"a"}, ["h", "a"]) == {"a": ["bad"]}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 63, 64, 65, 128, 200])
def test_each_pair_is_tried_once(count: int) -> None:
    names = [f"n{number}" for number in range(count)]
    tried = partners(names)
    pairs = [frozenset((node, other)) for node, others in tried.items() for other in others]
    assert list(tried) == names and len(set(pairs)) == len(pairs) and all(len(pair) == 2 for pair in pairs)
    if count <= 64:
        assert len(pairs) == count * (count - 1) // 2
        assert all(abs(len(others) - (count - 1) / 2) <= 0.5 for others in tried.values())
    else:
        assert all(6 <= len(others) <= 7 for others in tried.values())
        assert {frozenset((node, after)) for node, after in zip(names, [*names[1:], names[0]], strict=True)} <= set(
            pairs
        )


@pytest.mark.parametrize(
    ("broken", "excluded"),
    [
        ([], []),
        (["a b"], ["b"]),
        (["b a"], ["b"]),
        (["c d"], ["d"]),
        (["a b", "b c", "d b"], ["b"]),  # the one with the most broken pairs
        (["b a", "c d"], ["b", "d"]),
        (["a b", "b c", "c d"], ["b", "c"]),
        (["a b", "a c", "a d", "b c", "b d", "c d"], ["b", "c", "d"]),  # only the head reaches anybody
    ],
)
def test_of_two_nodes_that_cannot_reach_each_other_one_is_excluded(broken: list[str], excluded: list[str]) -> None:
    nodes = ["h", "a", "b", "c", "d"]
    reports = {node: Report(address=f"at-{node}", port=7) for node in nodes}
    for pair in broken:
        node, other = pair.split()
        reports[node].unreached = {**reports[node].unreached, other: "no answer"}
    found = {node: items for node, items in judge(nodes, reports, "silent").items() if items}
    assert sorted(found) == excluded and all(len(items) == 1 and items[0].level == "bad" for items in found.values())
    for node, (finding,) in found.items():
        count = sum(node in pair.split() for pair in broken)
        start = "" if count == 1 else f"cannot connect to {count} other nodes: "
        assert re.match(rf"{start}(\w) cannot connect to (\w) at at-\2, port 7: no answer", finding.reason)
        assert (
            node in finding.reason.partition(":")[2]
            if count > 1
            else "slurmddp excludes one of the two" in finding.reason
        )


def test_a_node_that_is_bad_anyway_takes_no_other_with_it() -> None:
    reports = {node: Report() for node in ("h", "a", "b", "c")}
    reports["b"].unreached = {"c": "no answer", "a": "no answer"}
    reports["b"].findings.append(bad("x", "y"))
    reports["a"].unreached = {"gone": "no answer"}
    found = judge(["h", "a", "b", "c", "gone"], reports, "silent")
    assert {node: [item.reason for item in items] for node, items in found.items() if items} == {
        "b": ["x"],
        "gone": ["silent"],
    }


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (["10.0.0.1/24", "10.0.0.2/24", "10.0.1.3/24"], {"n2": "bad"}),
        (["10.0.1.3/24", "10.0.0.2/24", "10.0.0.1/24"], {"n0": "bad"}),
        (["10.0.0.1/32", "10.0.0.2/32", "10.0.0.3/32"], {}),  # as some clouds do: all is routed
        (["10.0.0.1/24", "10.0.1.2/24"], {"n1": "warn"}),
        (["10.0.0.1/24", "10.0.1.2/24", "10.0.0.2/24", "10.0.1.3/24"], {"n1": "warn", "n3": "warn"}),
        (["", "", "10.0.1.3/24"], {}),
        (["nonsense", "10.0.1.3/24", "10.0.1.4/24"], {}),
    ],
)
def test_networks(networks: list[str], expected: dict[str, str]) -> None:
    names = [f"n{number}" for number in range(len(networks))]
    reports = {name: Report(network=network) for name, network in zip(names, networks, strict=True)}
    found = judge(names, reports, "silent")
    assert {name: items[0].level for name, items in found.items() if items} == expected


def test_clocks_are_compared_with_the_usual_one() -> None:
    skews = {"h": 0.0, "a": -61.0, "b": -60.0, "c": -60.5}
    found = judge(list(skews), {name: Report(skew=skew) for name, skew in skews.items()}, "silent")
    assert {name: [item[:2] for item in items] for name, items in found.items() if items} == {
        "h": [("warn", "its clock is 60 s ahead of the others'")]
    }


def program(folder: Path, text: str) -> str:
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


GPU = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-5a1e0c5c-0000-0000-0000-00000000000{})"
MIG = "  MIG 1g.10gb     Device  {}: (UUID: MIG-5a1e0c5c-0000-0000-0000-00000000000{})"
LOST = "Unable to determine the device handle for GPU0000:41:00.0: Unknown Error"


@pytest.mark.parametrize(
    ("listed", "code", "visible", "reason"),
    [
        ([GPU.format(0, 0), GPU.format(1, 1)], 0, None, ""),
        ([GPU.format(0, 0), GPU.format(1, 1)], 0, "0,1", ""),
        ([GPU.format(0, 0)], 0, None, "has 1 usable GPU(s), but the job asked for 2 (nvidia-smi -L)"),
        ([GPU.format(0, 0), LOST], 255, None, f"has 1 usable GPU(s), but the job asked for 2 (nvidia-smi -L: {LOST})"),
        ([GPU.format(0, 0), MIG.format(0, 1), MIG.format(1, 2)], 0, None, ""),
        (
            [GPU.format(0, 0), GPU.format(1, 1)],
            0,
            "1",
            "CUDA_VISIBLE_DEVICES=1 leaves 1 GPU(s), but the job asked for 2",
        ),
        ([GPU.format(0, 0), GPU.format(1, 1)], 0, "", "CUDA_VISIBLE_DEVICES= leaves 0 GPU(s), but the job asked for 2"),
        (
            ["NVIDIA-SMI has failed because it couldn't communicate"],
            9,
            None,
            "has 0 usable GPU(s), but the job asked for 2",
        ),
    ],
)
def test_gpus_are_counted(
    three: Nodes, monkeypatch: pytest.MonkeyPatch, listed: list[str], code: int, visible: str | None, reason: str
) -> None:
    text = "\n".join(listed)
    monkeypatch.setenv("PATH", program(three.root / "bin", f'cat <<"END"\n{text}\nEND\nexit {code}'))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    wanted = three.variables("n1", SLURMDDP_GPUS="2", SLURMDDP_GPU_VENDOR="nvidia")
    found = list(devices.check(node_settings.read(three.run, wanted)))
    assert [item.reason[: len(reason)] for item in found] == ([reason] if reason else [])


def test_device_files_that_cannot_be_opened_do_not_count(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).write_text("")
    (tmp_path / "nvidia2").mkdir()  # what not even root opens for writing
    assert devices._openable(tmp_path, r"nvidia\d+") == 2
    (tmp_path / "dri").mkdir()
    (tmp_path / "dri" / "renderD128").write_text("")
    assert devices.amd(tmp_path) == (0, f"{tmp_path}/kfd does not exist")
    (tmp_path / "kfd").write_text("")
    assert devices.amd(tmp_path)[0] == 1
    assert devices.driver(tmp_path) == "nvidia" and devices.driver(tmp_path / "dri") == ""


def test_inputs_of_the_job(tmp_path: Path) -> None:
    def named(train: dict[str, Any]) -> list[tuple[str, str]]:
        (tmp_path / "job.json").write_text(json.dumps({"train": train}))
        return folders.inputs(tmp_path / "job.json")

    assert folders.inputs(tmp_path / "none") == []
    assert named({"data": {"path": ["/a", "/b"]}, "init_from": "/c"}) == [
        ("train.data.path", "/a"),
        ("train.data.path", "/b"),
        ("train.init_from", "/c"),
    ]
    assert named({"data": {"path": "relative"}, "init_from": None}) == named({"data": {}}) == []


def test_an_empty_folder_is_no_dataset(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert [item.reason for item in folders.readable("k", tmp_path / "data")] == [f"k: {tmp_path}/data is empty"]
    (tmp_path / "data" / "x").write_text("x")
    assert list(folders.readable("k", tmp_path / "data")) == list(folders.readable("k", tmp_path / "data" / "x")) == []


def test_packages_from_their_folders_names(tmp_path: Path) -> None:
    for name in (
        "Torch_Vision-0.2+cu126.dist-info",
        "numpy-2.1.0.dist-info",
        "old-1.0-py3.11.egg-info",
        "torch",
        "x.py",
    ):
        (tmp_path / name).mkdir()
    assert packages.packages([str(tmp_path), "/no/such"]) == {
        "torch-vision": "0.2+cu126",
        "numpy": "2.1.0",
        "old": "1.0",
    }
    own = json.dumps({"numpy": "1", "torch": "2", "a": "1", "b": "1", "c": "1", "same": "1"})
    others = json.dumps({"numpy": "2", "torch": "3", "c": "2", "d": "1", "same": "1"})
    expected = "has different software: torch 2 (the others: 3), numpy 1 (the others: 2), a 1 (the others: missing), "
    assert packages.differs(own, others) == expected + "b 1 (the others: missing) and 2 more"


@pytest.mark.parametrize("name", ["SLURMDDP_NODE", "SLURMDDP_LOGS", "SLURMDDP_PORT", "SLURMDDP_RENDEZVOUS_ID"])
def test_without_its_variables_it_says_so(three: Nodes, name: str) -> None:
    process = three.start("n1", **{name: ""})
    assert name in process.communicate(timeout=PATIENCE)[1] and process.returncode == 1


def test_a_finding_is_text() -> None:
    assert Finding("bad", "r", "t").text == "r - t"
