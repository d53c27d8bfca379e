"""The options of sbatch that submit takes, and the one that it refuses: --gpus has two meanings."""

from collections.abc import Callable

import pytest

from tests.helpers import Desk, Result

Cli = Callable[..., Result]

SITE = """\
name: any
title: any cluster
gpu_request: gpus-per-node
job: {container: {runtime: none}}
"""


@pytest.fixture
def lines(desk: Desk, cli: Cli) -> Callable[..., set[str]]:
    """The #SBATCH lines of a job with these options."""
    desk.site(SITE)
    desk.write("train.py")

    def found(*options: str) -> set[str]:
        done = cli("check", "train.py", "--site", "any", "--write", "rendered", *options)
        assert done.code == 0, done.err
        text = (desk.project / "rendered" / "job.sh").read_text()
        return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}

    return found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("-N", "3"), "--nodes=3"),
        (("-p", "gpu"), "--partition=gpu"),
        (("-A", "mine"), "--account=mine"),
        (("-t", "30m"), "--time=00:30:00"),
        (("-J", "name"), "--job-name=name"),
        (("-q", "high"), "--qos=high"),
        (("--qos", "high"), "--qos=high"),
        (("-c", "8"), "--cpus-per-task=8"),
        (("--mem", "10G"), "--mem=10240M"),
        (("--exclude", "node[1-3]"), "--exclude=node[1-3]"),
        (("--reservation=maint",), "--reservation=maint"),
        (("--gpus-per-node", "4"), "--gpus-per-node=4"),
        (("--gres=gpu:4",), "--gpus-per-node=4"),
        (("--gres", "gpu"), "--gpus-per-node=1"),
        (("--gres=gpu:a100:2",), "--gpus-per-node=a100:2"),
    ],
)
def test_an_option_of_sbatch(lines: Callable[..., set[str]], options: tuple[str, ...], expected: str) -> None:
    gpus = () if "gpus-per-node" in expected else ("--gpus-per-node", "1")
    assert expected in lines(*options, *gpus)


def test_options_that_become_lines_add_up(lines: Callable[..., set[str]]) -> None:
    more = ("--set", "resources.sbatch_extra=[--comment=x]", "--set", "resources.sbatch_extra=[--licenses=y]")
    found = lines("--exclude", "a", "--reservation", "b", "--gpus-per-node", "1", *more)
    assert {"--exclude=a", "--reservation=b", "--comment=x", "--licenses=y"} <= found


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ("-N", "2", "--gpus", "16"),
            "--gpus: 16 per node, or 16 on all 2 nodes together?\n"
            "  -> --gpus-per-node 8 for 16 in all; --gpus-per-node 16 for 16 per node, 32 in all",
        ),
        (("-N", "2", "-G", "3"), "-> 3 do not divide by 2 nodes; --gpus-per-node 3 for 3 per node, 6 in all"),
        (("--gpus", "4"), "--gpus: is written per node here\n  -> --gpus-per-node 4"),
        (("-N", "2-4", "--gpus", "4"), "-> write the number per node: --gpus-per-node N"),
        (("--gres=nvme:1",), "--gres=nvme:1 is not a number of GPUs"),
    ],
)
def test_what_has_two_meanings_is_refused(desk: Desk, cli: Cli, options: tuple[str, ...], expected: str) -> None:
    desk.site(SITE)
    desk.write("train.py")
    done = cli("submit", "train.py", "--site", "any", *options)
    assert (done.code, done.out) == (2, "")
    assert expected in done.err


def test_gpus_of_a_job_file_have_two_meanings(desk: Desk, cli: Cli) -> None:
    desk.site(SITE)
    desk.write("job.yaml", "site: any\nresources: {nodes: 2, gpus: 16}\ntrain: {script: train.py}\n")
    done = cli("submit", "job.yaml")
    assert done.code == 2
    assert "job.yaml:2: resources.gpus: 16 per node, or 16 on all 2 nodes together?" in done.err
    assert "resources.gpus_per_node: 8 for 16 in all; resources.gpus_per_node: 16" in done.err


def test_an_unknown_partition_lists_those_of_the_site(desk: Desk, cli: Cli) -> None:
    desk.write("train.py")
    done = cli("submit", "train.py", "--site", "gpus", "-p", "foo")
    assert "--partition: resources.partition: the profile of site gpus has no partition foo" in done.err
    assert "-> use one of main, large" in done.err
