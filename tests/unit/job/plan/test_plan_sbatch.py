"""The #SBATCH lines, in the form that each kind of site takes."""

import pytest

from slurmddp.errors import UserError
from slurmddp.job.plan.sbatch import missing_settings
from tests.helpers import LM_JOB, Desk, refusal


def site(desk: Desk, text: str, part: str = "") -> str:
    """A job at a site with these lines."""
    job = f"job:\n  resources: {{partition: p{part}}}\n  container: {{runtime: none}}\n"
    partitions = (
        ""
        if "partitions:" in text
        else "partitions: {p: {gpus_per_node: 4, gpu_type: h100, cpus_per_node: 8, mem_per_node: 64G}}\n"
    )
    desk.site(f"name: s\ntitle: t\n{text}\n{partitions}{job}")
    return "name: gpt\nsite: s\ntrain: {script: a.py}\n"


def lines(desk: Desk, job: str, *options: str) -> list[str]:
    return list(desk.plan(job, *options).sbatch)


def refused(desk: Desk, job: str, *options: str) -> str:
    with pytest.raises(UserError) as caught:
        desk.plan(job, *options)
    return refusal(caught.value)


def test_all_of_it(desk: Desk) -> None:
    options = ("nodes=2", "time=1h", "account=acc", "qos=q", "constraint=c", "exclusive=true")
    assert lines(desk, LM_JOB, *(f"resources.{option}" for option in options)) == [
        "--job-name=gpt",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=64",
        "--gpus-per-node=4",
        "--mem=491520M",
        "--time=01:00:00",
        "--partition=main",
        "--account=acc",
        "--qos=q",
        "--constraint=c",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
        "--signal=B:USR2@120",
    ]


@pytest.mark.parametrize(
    ("form", "line"),
    [
        ("gpu_request: gpus-per-node", "--gpus-per-node=4"),
        ("gpu_request: gpus-per-node\ngpu_request_type: true", "--gpus-per-node=h100:4"),
        ("gpu_request: gres", "--gres=gpu:4"),
        ("gpu_request: gres\ngpu_request_type: true", "--gres=gpu:h100:4"),
        ("gpu_request: none", None),
    ],
)
def test_how_gpus_are_asked_for(desk: Desk, form: str, line: str | None) -> None:
    found = [text for text in lines(desk, site(desk, form)) if text.startswith(("--gpus", "--gres"))]
    assert found == ([line] if line else [])


def test_the_job_s_own_type_of_gpu(desk: Desk) -> None:
    assert "--gres=gpu:a100_3g:1" in lines(
        desk, site(desk, "gpu_request: gres"), "resources.gpu_type=a100_3g", "resources.gpus_per_node=1"
    )


def test_no_gpus_no_request(desk: Desk) -> None:
    assert not [text for text in lines(desk, LM_JOB, "resources.gpus_per_node=0") if "gpu" in text]


def test_what_a_partition_is_asked_for_by(desk: Desk) -> None:
    found = lines(desk, LM_JOB, "resources.partition=large")
    assert "--constraint=big&new" in found
    assert "--qos=long" in found
    assert not [text for text in found if text.startswith("--partition")]
    more = lines(desk, LM_JOB, "resources.partition=large", "resources.constraint=fast", "resources.qos=mine")
    assert "--constraint=big&new&fast" in more
    assert "--qos=mine" in more


def test_flags_that_a_site_rejects_are_left_out(desk: Desk) -> None:
    job = site(desk, "unsupported_flags: [--mem, --gres, --cpus-per-task]\ngpu_request: gres")
    assert not [text for text in lines(desk, job) if text.startswith(("--mem", "--gres", "--cpus-per-task"))]


@pytest.mark.parametrize(
    ("flag", "option", "key"),
    [
        ("--mem", "resources.mem_per_node=1G", "resources.mem_per_node"),
        ("--exclusive", "resources.exclusive=true", "resources.exclusive"),
        ("--constraint", "resources.constraint=x", "resources.constraint"),
        ("--qos", "resources.qos=x", "resources.qos"),
        ("--reservation", "resources.sbatch_extra=[--reservation=x]", "resources.sbatch_extra"),
    ],
)
def test_what_the_user_asks_for_is_not_dropped_in_silence(desk: Desk, flag: str, option: str, key: str) -> None:
    shown = refused(desk, site(desk, f"unsupported_flags: [{flag}]"), option)
    assert f"site s rejects jobs with {flag}" in shown
    assert f"--set {key}" in shown


@pytest.mark.parametrize("key", ["account", "partition", "time"])
def test_what_a_site_requires_is_asked_for_by_its_key(desk: Desk, key: str) -> None:
    job = site(desk, f"required: [resources.{key}]").replace(
        "site: s", "site: s\nresources: {partition: null, gpus_per_node: 1}"
    )
    (error,) = missing_settings(desk.resolve(job))
    assert f"resources.{key} is not set, and site s requires it" in str(error)
    assert f"--{key}" in str(error)
    assert f"resources.{key} is not set" in desk.plan(job).notes[0].text
    value = {"account": "a", "partition": "p", "time": "1h"}[key]
    assert desk.plan(job, f"resources.{key}={value}")
    assert desk.plan(job, inside=True)


def test_a_required_key_that_is_no_option_of_submit(desk: Desk) -> None:
    job = site(desk, "required: [container.runtime]")
    (error,) = missing_settings(desk.resolve(job, "container.runtime=null"))
    assert "or pass --set container.runtime=VALUE" in str(error)


def test_extra_options_come_last_and_add_up(desk: Desk) -> None:
    job = site(desk, "", ", sbatch_extra: [--licenses=scratch]")
    found = lines(desk, job, "resources.sbatch_extra=[--reservation=r, --mail-user=a@b.c]")
    assert found[-3:] == ["--licenses=scratch", "--reservation=r", "--mail-user=a@b.c"]


@pytest.mark.parametrize(
    "flag",
    [
        "--nodes=8",
        "--output=x",
        "--array=1-9",
        "--ntasks=9",
        "--wrap=id",
        "--parsable",
        "--gpus-per-node=1",
        "--export=NONE",
    ],
)
def test_an_extra_option_does_not_undo_ours(desk: Desk, flag: str) -> None:
    assert "resources.sbatch_extra" in refused(desk, LM_JOB, f"resources.sbatch_extra=[{flag}]")


@pytest.mark.parametrize(("time", "lead"), [("10m", 120), ("6m", 120), ("5m", 100), ("3m", 60), ("2m", None)])
def test_a_short_job_has_no_early_signal(desk: Desk, time: str, lead: int | None) -> None:
    found = [text for text in lines(desk, LM_JOB, f"resources.time={time}") if text.startswith("--signal")]
    assert found == ([f"--signal=B:USR2@{lead}"] if lead else [])


def test_a_local_job_has_no_sbatch_lines(desk: Desk) -> None:
    assert desk.plan("site: here\ntrain: {script: a.py}\n").sbatch == ()
