"""A site profile by its path: only in a job file of this user, or of root."""

import os

import pytest

from slurmddp.errors import UserError
from tests.helpers import CPU_SITE, Desk

JOB = "name: gpt\nsite: {}\nresources: {{time: 1h}}\ntrain: {{script: train.py}}\n"


@pytest.mark.skipif(os.getuid() != 0, reason="giving files to another user takes root")
@pytest.mark.parametrize("owner", [0, 65534])
@pytest.mark.parametrize("site", ["./evil.yaml", "evil.yaml", "{folder}/evil.yaml", "cores"])
def test_another_users_job_file_names_no_file(
    desk: Desk, owner: int, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk.project)
    desk.write("evil.yaml", CPU_SITE)
    path = desk.write("job.yaml", JOB.format(site.format(folder=desk.project)))
    os.chown(path, owner, -1)
    if owner == 0 or site == "cores":
        assert desk.resolve_file(path).job.name == "gpt"
        return
    with pytest.raises(UserError, match=r"the site is a file .* and this job file belongs to another user") as refused:
        desk.resolve_file(path)
    assert str(refused.value.where) == f"{path}:2" and "--site FILE" in str(refused.value)
    assert desk.resolve_file(path, "site=cores").job.name == "gpt"


def test_ones_own_job_file_names_a_file(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk.project)
    desk.write("here.yaml", CPU_SITE)
    assert desk.resolve_file(desk.write("job.yaml", JOB.format("./here.yaml"))).site.name == "cores"
