"""The variables of the ranks, the binds of the container, and where a path of the container lies on the host."""

import re

import pytest

from slurmddp.container import Bind
from slurmddp.errors import UserError
from slurmddp.job.plan.model import Plan
from slurmddp.job.plan.program import host_path
from tests.helpers import LM_JOB, Desk, refusal

VERBOSE = {"NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL"}
RECORDER = {
    "TORCH_FR_BUFFER_SIZE",
    "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
SCRIPT = "site: gpus\ntrain: {script: src/a.py}\n"


def variables(plan: Plan) -> dict[str, str]:
    return {item.name: item.value for group in plan.environment for item in group.variables}


def binds(plan: Plan) -> list[str]:
    return [bind.spec for bind in plan.container.binds]


@pytest.mark.parametrize("site", ["gpus", "cores", "here"])
def test_nothing_verbose_unless_it_is_asked_for(desk: Desk, site: str) -> None:
    job = LM_JOB.replace("gpus", site)
    quiet, loud = desk.plan(job), desk.plan(job, "network.debug=true")
    assert not VERBOSE & set(variables(quiet))
    assert not [text for text in desk.scripts(job) if re.search(rf"\b(APPTAINERENV_)?({'|'.join(VERBOSE)})=", text)]
    assert set(variables(loud)) - set(variables(quiet)) == VERBOSE
    assert variables(loud)["NCCL_DEBUG"] == "INFO"
    assert "%h.%p" in variables(loud)["NCCL_DEBUG_FILE"]


def test_the_flight_recorder_is_always_on_under_both_names(desk: Desk) -> None:
    for option in ("network.debug=false", "network.debug=true"):
        assert set(variables(desk.plan(LM_JOB, option))) >= RECORDER


def test_ranks_on_cores_are_spared_the_deprecated_name(desk: Desk) -> None:
    without = {"TORCH_NCCL_TRACE_BUFFER_SIZE"}
    assert RECORDER - set(variables(desk.plan(LM_JOB, "resources.gpus_per_node=0"))) == without


def test_the_user_s_variables_come_last_and_win(desk: Desk) -> None:
    plan = desk.plan(LM_JOB, "network.debug=true", "environment.NCCL_DEBUG=WARN", "environment.OMP_NUM_THREADS=1")
    assert variables(plan)["NCCL_DEBUG"] == "WARN"
    assert variables(plan)["OMP_NUM_THREADS"] == "1"
    lines = [
        line for line in desk.scripts(LM_JOB, "environment.OMP_NUM_THREADS=1")[1].splitlines() if "OMP_NUM" in line
    ]
    assert lines[-1] == "export APPTAINERENV_OMP_NUM_THREADS=1 # the job's own"


def test_an_interface_is_nccl_s_unless_its_own_variable_is_set(desk: Desk) -> None:
    assert variables(desk.plan(LM_JOB, "network.interface=ib0"))["NCCL_SOCKET_IFNAME"] == "ib0"
    options = ("network.interface=ib0", "network.variables.NCCL_SOCKET_IFNAME=ib1")
    assert variables(desk.plan(LM_JOB, *options))["NCCL_SOCKET_IFNAME"] == "ib1"


def test_the_user_s_gloo_interface_goes_over_ours(desk: Desk) -> None:
    options = ("resources.nodes=2", "network.variables.GLOO_SOCKET_IFNAME=mine")
    lines = [line for line in desk.scripts(LM_JOB, *options)[1].splitlines() if "GLOO_SOCKET_IFNAME" in line]
    assert lines[-1] == "export APPTAINERENV_GLOO_SOCKET_IFNAME=mine # network"


def test_home_s_own_packages_are_kept_out_of_a_container_only(desk: Desk) -> None:
    assert "PYTHONNOUSERSITE" in variables(desk.plan(LM_JOB))
    assert "PYTHONNOUSERSITE" not in variables(desk.plan(LM_JOB.replace("gpus", "cores")))


def test_the_dataset_is_bound_where_nothing_else_brings_it(desk: Desk) -> None:
    assert binds(desk.plan(LM_JOB)) == ["/data/books:/data/books:ro"]
    assert binds(desk.plan(LM_JOB, "container.binds=[/w/books:/data:ro]")) == ["/w/books:/data:ro"]
    assert binds(desk.plan(LM_JOB, "container.binds=[/data/book]")) == [
        "/data/book:/data/book:rw",
        "/data/books:/data/books:ro",
    ]
    assert binds(desk.plan(LM_JOB, "train.data.path=[a, /b]")) == [f"{desk.project}/a:{desk.project}/a:ro", "/b:/b:ro"]


def test_a_script_s_folder_is_bound(desk: Desk) -> None:
    assert binds(desk.plan(SCRIPT)) == [f"{desk.project}:{desk.project}:rw"]
    other = binds(desk.plan(SCRIPT.replace("src/a.py", "/elsewhere/a.py"), "snapshot=false"))
    assert set(other) == {"/elsewhere:/elsewhere:ro", f"{desk.project}:{desk.project}:rw"}


def test_the_same_bind_twice_is_one(desk: Desk) -> None:
    assert binds(desk.plan(SCRIPT, "container.binds=[/a, /a:/a, {source: /a, destination: /a, mode: rw}]"))[:2] == [
        "/a:/a:rw",
        f"{desk.project}:{desk.project}:rw",
    ]


@pytest.mark.parametrize(
    ("path", "host"),
    [
        ("/data/x", "/w/x"),
        ("/data", "/w"),
        ("/database", "/database"),
        ("/data/deep/x", "/d/x"),
        ("/other", "/other"),
        ("/data/deeper", "/w/deeper"),
    ],
)
def test_where_a_path_of_the_container_lies(path: str, host: str) -> None:
    mapping = (Bind("/w", "/data", "ro"), Bind("/d", "/data/deep", "rw"))
    assert host_path(path, mapping) == host


def test_a_bind_onto_the_root_covers_all() -> None:
    assert host_path("/a/b", (Bind("/w", "/", "ro"),)) == "/w/a/b"


@pytest.mark.parametrize("folder", ["a:b", "a,b", 'a"b', "a\\b"])
def test_a_folder_that_a_bind_cannot_carry(desk: Desk, folder: str) -> None:
    with pytest.raises(UserError, match="does not accept"):
        desk.plan(LM_JOB, f"train.data.path=/x/{folder}")


def test_a_script_outside_of_its_project(desk: Desk) -> None:
    with pytest.raises(UserError, match="is outside of"):
        desk.plan(SCRIPT, "train.project=other")


def test_a_script_keeps_its_place_in_the_project(desk: Desk) -> None:
    plan = desk.plan(SCRIPT, "train.project=.")
    assert (plan.program.script, plan.program.project) == ("code/project/src/a.py", str(desk.project))
    plan = desk.plan(SCRIPT, "snapshot=false")
    assert (plan.program.script, plan.program.python_path) == (f"{desk.project}/src/a.py", (f"{desk.project}/src",))


def test_a_job_that_needs_an_image_and_names_none(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.plan(LM_JOB, "container.image=null")
    assert "container.image is not set" in refusal(caught.value)
    with pytest.raises(UserError) as caught:
        desk.plan(LM_JOB + "container:\n  image: null\n")
    said = refusal(caught.value)
    assert ": container.image is not set: the ranks" in said and said.count("container.image") == 1, (
        "the key is said once"
    )


@pytest.mark.parametrize(
    ("vendor", "gpus", "options"), [("nvidia", 1, ("--nv",)), ("amd", 1, ("--rocm",)), ("nvidia", 0, ())]
)
def test_the_container_s_option_for_gpus(desk: Desk, vendor: str, gpus: int, options: tuple[str, ...]) -> None:
    text = (desk.config / "sites" / "gpus.yaml").read_text()
    desk.site(text + f"gpu_vendor: {vendor}\n")
    assert desk.plan(LM_JOB, f"resources.gpus_per_node={gpus}").container.options == options


def test_an_own_script_is_observed_unless_the_job_says_no(desk: Desk) -> None:
    desk.write("src/a.py", "")
    assert variables(desk.plan(SCRIPT))["SLURMDDP_OBSERVE"] == '{"hang": 120, "restart": false}'
    told = variables(desk.plan(SCRIPT, "train.observe=restart", "timeouts.hang=null"))["SLURMDDP_OBSERVE"]
    assert told == '{"hang": null, "restart": true}'
    assert "SLURMDDP_OBSERVE" not in variables(desk.plan(SCRIPT, "train.observe=off"))
    assert "SLURMDDP_OBSERVE" not in variables(desk.plan(LM_JOB))
