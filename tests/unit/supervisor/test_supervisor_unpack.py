"""The run's code on the node's own disk: unpacked once, however many ranks ask for it at the same time."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmddp.supervisor import unpack
from tests.helpers import ROOT, make_code, supervisor

OLD = sorted(Path.home().glob(".pyenv/versions/3.6.*/bin/python"))
#: What node.sh says of the job: this node is the only one, of two ranks.
VALUES = {
    "alone": "yes", "preflight": "", "wanted_interface": "", "exact_interface": "",
    "ranks": "2", "gpus_per_node": "0", "threads_per_rank": "1",
}  # fmt: skip
ALONE = {"SLURMDDP_NODES": "1", "SLURMDDP_NODE": "node7", "SLURM_JOB_ID": "7"}


@dataclass
class Node:
    """A node of a run, with its own disk."""

    root: Path
    python: str

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def scratch(self) -> Path:
        return self.root / "disk" / f"slurmddp-{os.getuid()}"

    @property
    def failed(self) -> str:
        """What job.sh reads."""
        return (self.run / "logs/preflight/node7.failed").read_text()

    def start(self, attempt: str = "gpt-7-0", **variables: str) -> subprocess.Popen[str]:
        values = {**VALUES, "node_folder": str(self.root / "disk")}
        ours = {"RUN": str(self.run), "LOGS": str(self.run / "logs"), "RENDEZVOUS_ID": attempt}
        environment = {**os.environ, **ALONE, **{f"SLURMDDP_{name}": text for name, text in ours.items()}, **variables}
        words = [*supervisor("node", self.python), *(f"{name}={text}" for name, text in values.items())]
        return subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def unpack(self, attempt: str = "gpt-7-0", **variables: str) -> tuple[int, str, str]:
        process = self.start(attempt, **variables)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture(params=[pytest.param(sys.executable, id="new"), pytest.param(OLD[-1:], id="3.6")])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Node:
    if not request.param:
        pytest.skip("no Python 3.6 here")
    (tmp_path / "run/logs").mkdir(parents=True)
    make_code(tmp_path / "run")
    return Node(tmp_path, request.param if isinstance(request.param, str) else str(request.param[0]))


def code_of(out: str) -> str:
    """The folder that ranks import from, the first of what node.sh reads."""
    return out.split("\x1f")[0]


def test_many_ranks_at_once_get_one_whole_copy(node: Node) -> None:
    ranks = [node.start() for _ in range(8)]
    answers = [rank.communicate(timeout=60) for rank in ranks]
    code = node.scratch / "gpt-7-0/code"
    assert {err for _, err in answers} == {""} and {code_of(out) for out, _ in answers} == {str(code)}
    assert [rank.returncode for rank in ranks] == [0] * len(ranks)
    assert sorted(path.name for path in code.parent.iterdir()) == ["code", "code.lock"]
    for name in ("shell/node.sh", "causes/cause.rules", "runtime/train.py"):
        assert (code / "slurmddp" / name).read_bytes() == (ROOT / "slurmddp" / name).read_bytes()
    assert [path.stat().st_mode & 0o777 for path in (node.scratch, code.parent)] == [0o700, 0o700]


def test_it_is_unpacked_once_for_an_attempt_and_anew_for_the_next(node: Node) -> None:
    assert node.unpack()[0] == 0
    mark = node.scratch / "gpt-7-0/code/mark"
    mark.touch()
    archive = node.run / "code/slurmddp.zip"
    aside = archive.rename(node.root / "aside")  # the file system was purged meanwhile
    assert node.unpack()[0] == 0 and mark.exists(), "a later step of the attempt uses what is there"
    aside.rename(archive)
    done, out, _ = node.unpack("gpt-7-1")
    assert (done, code_of(out)) == (0, f"{node.scratch}/gpt-7-1/code")
    assert not (node.scratch / "gpt-7-1/code/mark").exists()


def test_what_a_lost_node_has_kept_goes_with_its_next_attempt(node: Node) -> None:
    """No cleanup has reached it. That of an attempt that lives stays."""
    me = os.getpid()  # other tests beside this one have processes of the usual names
    for attempt in (f"lost-{me}-0", f"lost-{me}-1"):
        assert node.unpack(attempt)[0] == 0
    lives = subprocess.Popen(["sleep", "60"], env={"SLURMDDP_RENDEZVOUS_ID": f"lost-{me}-1"})
    try:
        assert node.unpack("lm-8-0")[0] == 0
    finally:
        lives.kill()
        lives.wait()
    assert not (node.scratch / f"lost-{me}-0").exists()
    assert (node.scratch / f"lost-{me}-1/code/slurmddp").is_dir()


def test_what_a_killed_rank_has_begun_is_done_again(node: Node) -> None:
    part = node.scratch / "gpt-7-0/code.part/slurmddp"
    part.mkdir(parents=True)
    (part / "old.py").touch()
    assert node.unpack()[0] == 0
    assert not (node.scratch / "gpt-7-0/code/slurmddp/old.py").exists() and not part.exists()


@pytest.mark.parametrize("damage", ["half", "empty", "changed", "gone"])
def test_a_damaged_archive_is_one_message_and_nothing_is_left(node: Node, damage: str) -> None:
    archive = node.run / "code/slurmddp.zip"
    if damage == "gone":
        archive.unlink()
    elif damage == "changed":
        archive.write_bytes(archive.read_bytes().replace(b"def main(", b"def niam(", 1))
    else:
        os.truncate(archive, 300_000 if damage == "half" else 0)
    code, out, err = node.unpack()
    assert (code, out, err) == (1, "", "slurmddp: node node7: " + node.failed.partition("\n")[2])
    why = "cannot read the run's copy of the code, " if damage == "gone" else "the run's copy of the code is damaged, "
    assert node.failed.startswith(f"1 \n{why}{archive}")
    assert not (node.scratch / "gpt-7-0/code").exists()


def test_a_disk_that_cannot_be_written_is_said(node: Node) -> None:
    (node.root / "disk").write_text("")
    code, _, err = node.unpack()
    assert code == 1 and f"cannot create the folder {node.root}/disk" in err and err.count("\n") == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("planted", ["slurmddp-0", "slurmddp-0/gpt-7-0"])
def test_nothing_of_another_users_folder_is_used(node: Node, planted: str) -> None:
    """Of the second, only its owner could be another: the folder above is closed to all others."""
    (node.root / "disk").mkdir()
    theirs = node.root / "disk" / planted
    theirs.mkdir(parents=True)
    (theirs / "code").mkdir()
    os.chown(node.scratch, 65534, 65534)
    code, out, err = node.unpack()
    assert (code, out) == (1, "") and f"{node.scratch} is not a folder of yours" in err


def test_beside_the_ranks_a_failure_says_nothing_of_the_attempt(node: Node) -> None:
    (node.run / "code/slurmddp.zip").unlink()
    assert node.unpack(SLURMDDP_STEP="attach")[0] == 1
    assert not (node.run / "logs/preflight").exists()


@pytest.mark.parametrize("other", ["node8.ready", "node8.failed"])
def test_a_node_that_fails_waits_for_the_word_of_the_others(node: Node, other: str) -> None:
    """srun would end them before their slower setup lines have failed, too."""
    ours = {"SLURMDDP_LOGS": str(node.run / "logs"), "SLURMDDP_NODES": "2", "SLURMDDP_NODE": "node7"}
    words = [*supervisor("fail", node.python), "", "user", "no torch\nhere"]
    process = subprocess.Popen(words, env={**os.environ, **ours})
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2)
    assert node.failed == "1 user\nno torch here\n"
    (node.run / "logs/preflight" / other).touch()
    assert process.wait(10) == 0
    assert (
        subprocess.run([*words[:-3], "yes", "", "x"], env={**os.environ, **ours}, timeout=3, check=False).returncode
        == 0
    )


def test_a_failure_that_nobody_can_be_told_of_is_said(node: Node) -> None:
    shutil.rmtree(node.run / "logs")
    (node.run / "logs").write_text("")
    words = [*supervisor("fail", node.python), "yes", "", "no torch"]
    environment = {**os.environ, "SLURMDDP_LOGS": str(node.run / "logs"), **ALONE}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert (
        done.stderr == f"slurmddp: node node7: cannot write {node.run}/logs/preflight/node7.failed: Not a directory\n"
    )


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")
@pytest.mark.parametrize(
    ("owner", "group", "mode", "weak"),
    [
        (0, 0, 0o755, False),
        (0, 0, 0o775, False),  # root's own group
        (0, 0, 0o777, True),
        (0, 0, 0o1777, False),
        (0, 12, 0o775, True),
        (0, 12, 0o1775, False),
        (65534, 0, 0o755, True),  # its owner can replace what is in it
        (65534, 0, 0o1777, True),
    ],
)
def test_whose_folders_may_lie_on_the_way(tmp_path: Path, owner: int, group: int, mode: int, weak: bool) -> None:
    way = tmp_path / "way"
    way.mkdir()
    os.chown(way, owner, group)
    way.chmod(mode)
    (tmp_path / "link").symlink_to("way")
    for path in (way, tmp_path / "link"):
        found = unpack._weak_part(f"{path}/disk")
        assert bool(found) is weak and (not weak or str(way) in str(found))
