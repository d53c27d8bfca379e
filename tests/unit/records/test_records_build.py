"""The lock file of a build: written and read in one place."""

from __future__ import annotations

import pytest

from slurmddp.records.build import Build, read


@pytest.mark.parametrize("build", [Build(7, "node1", 1.5), Build(7, "node1", 1.5, "4711")])
def test_what_is_written_is_read(build: Build) -> None:
    assert read(build.write()) == build and build.line().startswith("process 7")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"process 7 on node1, since today\n",
        b'{"pid": 7}',
        Build(0, "n", 1.0).write(),
        Build(7, "a\x1b[2J", 1.0).write(),
    ],
)
def test_what_is_not_sound_says_nothing(data: bytes) -> None:
    assert read(data) is None


def test_a_job_that_is_no_number_is_none() -> None:
    found = read(Build(7, "n", 1.0, "7; rm").write())
    assert found is not None and found.job is None
