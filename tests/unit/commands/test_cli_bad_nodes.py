"""sites bad-nodes, and how submit keeps a job off these nodes."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import SIF, Desk, Result

Cli = Callable[..., Result]

JOB = """name: gpt
site: gpus
container: {image: image.sif}
resources: {nodes: 2, time: 2h}
train: {task: lm, data: {path: books}, batch: {global: 512, micro: 16}}
"""
SBATCH = '#!/bin/bash\nprintf "%s\\n" "$@" >"$HOME/words"\necho 4711\n'


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("job.yaml", JOB)
    desk.write("image.sif", SIF)
    desk.write("books/a.txt", "text")
    desk.program("sbatch", SBATCH)
    partition(desk, 40)
    return desk


def partition(desk: Desk, nodes: int) -> None:
    """n1, n2, ... in the job's partition, all of them twice, and x1 in the default one."""
    rows = [f"n{number} {name}" for number in range(1, nodes + 1) for name in ("main", "all")]
    desk.program("sinfo", "#!/bin/bash\ncat <<END\n" + "\n".join([*rows, "x1 debug*"]) + "\nEND\n")


def bad(cli: Cli, *nodes: str) -> None:
    for node in nodes:
        assert cli("site", "bad-nodes", "--site", "gpus", "--add", node, "--reason", "a slow disk").code == 0


def excluded(desk: Desk) -> list[str]:
    words = (desk.home / "words").read_text().splitlines()
    return [word.partition("=")[2] for word in words if word.startswith("--exclude=")]


# --- sites bad-nodes


def test_list_add_and_forget(desk: Desk, cli: Cli) -> None:
    assert cli("site", "bad-nodes", SLURMDDP_SITE="gpus").out == "no bad nodes at site gpus\n"
    done = cli("site", "bad-nodes", "--add", "n7", "--reason", "a slow disk\x1b", "--site", "gpus")
    head, line = done.out.splitlines()
    assert head.split() == ["NODE", "AGE", "EXPIRES", "IN", "RUN", "REASON"]
    assert line.split("  ")[0] == "n7" and line.endswith("(added by you)  a slow disk\\x1b")
    (found,) = json.loads(cli("site", "bad-nodes", "--json", SLURMDDP_SITE="gpus").out)
    assert (found["node"], found["run"], found["expires"]) == ("n7", None, found["time"] + 86400)
    assert abs(time.time() - found["time"]) < 600
    assert cli("site", "bad-nodes", "--site", "cores").out == "no bad nodes at site cores\n"
    assert cli("site", "bad-nodes", "--site", "gpus", "--forget", "n7").out == "no bad nodes at site gpus\n"
    assert cli("site", "bad-nodes", "--site", "gpus", "--json").out == "[]\n"


def test_the_profile_says_how_long(desk: Desk, cli: Cli) -> None:
    for keep, expected in (("2h", 7200), ("0", None)):
        desk.site(f"name: own\ntitle: t\nexclude_bad_nodes_for: {keep}\n")
        cli("site", "bad-nodes", "--site", "own", "--add", "n7", "--reason", "x")
        found = json.loads(cli("site", "bad-nodes", "--site", "own", "--json").out)
        assert [round(each["expires"] - each["time"]) for each in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--add", "n7"], "--add and --reason work only together"),
        (["--reason", "x"], "--add and --reason work only together"),
        (["--add", "n[1-3]", "--reason", "x"], "'n[1-3]' is not the name of a node"),
        (["--add", "n7", "--reason", " "], "--reason is empty"),
        (["--add", "n7", "--reason", "x", "--forget", "n7"], "--add and --forget cannot be combined"),
        (["--forget", "n9"], "n9 is not a bad node of site gpus"),
        ([], "no site selected, and none matches this host"),
    ],
)
def test_refusals(desk: Desk, cli: Cli, options: list[str], message: str) -> None:
    done = cli("site", "bad-nodes", *options, **({"SLURMDDP_SITE": "gpus"} if options else {}))
    assert done.code == 2 and message in done.err


# --- submit


def test_a_job_avoids_bad_nodes_and_says_so(ready: Desk, cli: Cli) -> None:
    assert cli("submit", "job.yaml").code == 0
    assert excluded(ready) == []
    bad(cli, "n7", "x1", "n99")
    done = cli("submit", "job.yaml")
    assert excluded(ready) == ["n7"], "x1 is in another partition, and n99 in none"
    assert "warning: node n7 is excluded: a slow disk (0:0" in done.err
    assert "`slurmddp site bad-nodes --forget n7` allows it again" in done.err
    (command,) = (
        json.loads((path / "submission.json").read_text())["command"]
        for path in (ready.project / "runs").iterdir()
        if "--exclude=n7" in (path / "submission.json").read_text()
    )
    assert "--exclude=n7" in command
    dry = cli("submit", "job.yaml", "--dry-run", "--json")
    assert "--exclude=n7" in json.loads(dry.out)["command"]
    bad(cli, "n1")
    own = cli("submit", "job.yaml", "--set", "resources.sbatch_extra=['--exclude=n[2-3]']")
    assert own.code == 0 and excluded(ready) == ["n[2-3],n1,n7"], "the last option counts for sbatch"


def test_a_wrong_judgement_takes_no_cluster_away(ready: Desk, cli: Cli) -> None:
    """At most a tenth of the partition, and never nodes that the job needs."""
    bad(cli, *(f"n{number}" for number in range(1, 11)))
    done = cli("submit", "job.yaml")
    assert excluded(ready) == ["n10,n9,n8,n7"]
    assert "1 more bad nodes are excluded: `slurmddp site bad-nodes` lists them" in done.err
    assert "6 bad nodes are not excluded (4 of the 40 nodes)" in done.err
    partition(ready, 10)
    cli("submit", "job.yaml", "--nodes", "9")
    assert excluded(ready) == ["n10"]
    done = cli("submit", "job.yaml", "--nodes", "10")
    assert excluded(ready) == []
    assert "10 bad nodes are not excluded (the job needs all 10 nodes)" in done.err


@pytest.mark.parametrize("extra", ["--nodelist=n7", "--reservation=exam", "--exclude=./nodes"])
def test_a_job_that_chooses_its_nodes_is_left_alone(ready: Desk, cli: Cli, extra: str) -> None:
    bad(cli, "n7")
    done = cli("submit", "job.yaml", "--set", f"resources.sbatch_extra=['{extra}']")
    assert done.code == 0 and excluded(ready) == []
    assert "the job chooses its nodes itself, so bad nodes are not excluded" in done.err


def test_where_slurm_does_not_list_its_nodes(ready: Desk, cli: Cli) -> None:
    bad(cli, "n7")
    for text in ("#!/bin/bash\nexit 1\n", "#!/bin/bash\necho n7 other\n"):
        ready.program("sinfo", text)
        done = cli("submit", "job.yaml")
        assert done.code == 0 and excluded(ready) == []
        assert "sinfo does not list the nodes, so bad nodes are not excluded" in done.err


def test_a_site_that_remembers_nothing(ready: Desk, cli: Cli) -> None:
    bad(cli, "n7")
    profile = Path(ready.config / "sites" / "gpus.yaml")
    profile.write_text(profile.read_text() + "exclude_bad_nodes_for: 0\n")
    done = cli("submit", "job.yaml")
    assert done.code == 0 and excluded(ready) == [] and "bad node" not in done.err
