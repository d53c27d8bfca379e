"""Logs of healthy runs have no cause, and no failure is called none, see public_logs."""

import io
from pathlib import Path

import pytest

from slurmddp.commands.doctor import lines
from slurmddp.doctor.diagnose import Diagnosis, Examination
from slurmddp.doctor.sources import read_path
from tests.helpers import ROOT
from tests.unit.doctor.public_logs import FAILED, HEALTHY, Failed

CASES = ROOT.parent / "shared" / "cases" / "logs"
#: The answers that its README gives: causes, rank, node. None: no failure.
ANSWERS: dict[str, Failed | None] = {
    "account_notice": None,
    "bashrc_notice": None,
    "nv_notice": None,
    "retry_ok": None,
    "amd_fault": Failed("", ("cuda-fault", "unknown"), None, None),
    "cwd_denied": Failed("", ("permission", "unknown")),
    "nvls_bind": Failed("", ("nvls",)),
    "failed_node": Failed("", ("node-failure",), None, "n37"),
    "handled_then_killed": Failed("", ("killed",), 3, "node2"),
    "plugin_in_container": Failed("", ("slurm-plugin",)),
    "desync": Failed("", ("nccl-timeout",)),
}


def examine(log: str) -> Diagnosis:
    found = Examination()
    found.read("log", io.BytesIO(log.encode()))
    return found.diagnose()


def is_right(found: Diagnosis, answer: Failed | None) -> None:
    if answer is None:
        assert found.root is None and found.sure == "none", list(lines(found))
        return
    assert found.root is not None, list(lines(found))
    first = found.root.first
    assert first.cause.id in answer.causes or (found.sure == "unknown" and "unknown" in answer.causes), list(
        lines(found)
    )
    assert answer.rank in (None, first.rank) and answer.node in (None, first.host), list(lines(found))


@pytest.mark.parametrize("log", HEALTHY.values(), ids=HEALTHY)
def test_a_run_that_went_well_has_no_cause(log: str) -> None:
    is_right(examine(log), None)


@pytest.mark.parametrize("case", FAILED.values(), ids=FAILED)
def test_a_failure_is_never_called_none(case: Failed) -> None:
    is_right(examine(case.log), case)


@pytest.mark.parametrize("name", ANSWERS)
def test_the_shared_cases(name: str) -> None:
    path = CASES / f"{name}.log"
    if not path.exists():
        pytest.skip(f"{path} is not there: these cases are not part of the repository")
    found = Examination()
    read_path(found, Path(path))
    is_right(found.diagnose(), ANSWERS[name])


@pytest.mark.skipif(not CASES.is_dir(), reason="../shared/cases is not beside this checkout")
def test_every_shared_case_is_judged() -> None:
    assert {path.stem for path in CASES.iterdir()} == set(ANSWERS)
    found = Examination()
    read_path(found, CASES / "desync.log")
    assert found.diagnose().message == "the others waited for rank 1: did not join collective #3"


def test_what_the_cases_say_beyond_the_cause() -> None:
    lost = examine(FAILED["one node of two, named after the step's line"].log)
    assert lost.message == "exclude it: sbatch --exclude=gpu05"
    behind = examine(FAILED["the ranks are not in the same collective"].log)
    assert behind.message == "the others waited for rank 3: did not join collective #12"
    unknown = list(lines(examine(FAILED["a program that says only FATAL"].log)))
    assert unknown[:2] == [
        "cause     unknown",
        "known     the log says: FATAL: lock /scratch/u/run.lck is held by another run",
    ]
