"""`when` of a profile: what holds only for some jobs."""

import pytest

from slurmddp.errors import UserError
from slurmddp.job.plan.layout import partition_of
from tests.helpers import GPU_SITE, LM_JOB, Desk, refusal

SITE = (
    GPU_SITE.replace("name: gpus", "name: mine")
    + """\
  setup: [module load base]
  network: {variables: {NCCL_NET: Socket, NCCL_DEBUG: WARN}}
when:
  several-nodes:
    nodes: 2-
    job: {network: {variables: {NCCL_NET: OFI}}, resources: {sbatch_extra: [--network=x]}}
  small: {nodes: 1-3, partition: main, max_time: 2h}
  large: {nodes: 4, max_time: 6h, max_nodes: 4}
  long: {qos: "lo*", max_time: 7d}
  little: {account: "*-sl3-gpu", max_time: 1h}
  bare: {runtime: none, job: {setup: [module load python]}}
"""
)
JOB = LM_JOB.replace("gpus", "mine") + "resources: {time: 1h}\n"


@pytest.fixture
def mine(desk: Desk) -> Desk:
    desk.site(SITE)
    return desk


@pytest.mark.parametrize(
    ("options", "hours"),
    [
        ((), 2),
        (("resources.nodes=3",), 2),
        (("resources.nodes=2+1",), 2),
        (("resources.nodes=3+1",), 6),
        (("resources.nodes=5",), 24),
        (("resources.partition=large",), 168),  # its own QOS
        (("resources.qos=long",), 168),
        (("resources.account=ours-sl3-gpu",), 1),
        (("resources.account=ours-sl2-gpu",), 2),
    ],
)
def test_limits_by_nodes_qos_and_account(mine: Desk, options: tuple[str, ...], hours: int) -> None:
    assert partition_of(mine.resolve(JOB, *options)).max_time == hours * 3600


def test_layers_of_the_job_go_over_the_sites_own_and_under_the_users(mine: Desk) -> None:
    assert mine.resolve(JOB).job.network.variables == {"NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"}
    found = mine.resolve(JOB, "resources.nodes=2")
    assert found.job.network.variables == {"NCCL_NET": "OFI", "NCCL_DEBUG": "WARN"}
    assert found.job.resources.sbatch_extra == ("--network=x",)
    path = mine.config / "sites/mine.yaml"
    line = next(n for n, text in enumerate(SITE.splitlines(), 1) if "OFI" in text)
    assert found.location("network", "variables", "NCCL_NET") == f"{path}:{line}: network.variables.NCCL_NET"
    own = mine.resolve(JOB, "resources.nodes=2", "network.variables.NCCL_NET=IB")
    assert own.job.network.variables["NCCL_NET"] == "IB"


def test_environment_by_runtime(mine: Desk) -> None:
    assert mine.resolve(JOB).job.setup == ("module load base",)
    assert mine.resolve(JOB, "container.runtime=none").job.setup == ("module load base", "module load python")


def test_a_limit_names_its_entry(mine: Desk) -> None:
    with pytest.raises(UserError) as caught:
        mine.plan(JOB, "resources.time=3h")
    assert "above the limit 02:00:00 of partition main of site mine (when.small of its profile)" in refusal(
        caught.value
    )
    with pytest.raises(UserError) as caught:
        mine.plan(JOB, "resources.time=8h", "resources.nodes=4", "resources.account=a-sl3-gpu")
    assert "(when.little of its profile)" in refusal(caught.value)


def test_what_conditions_are_read_from_cannot_depend_on_them(desk: Desk) -> None:
    for part in ("resources: {partition: other}", "container: {runtime: none}", "container: {image: x}"):
        desk.site(GPU_SITE.replace("name: gpus", "name: mine") + f"when:\n  x: {{nodes: 1, job: {{{part}}}}}\n")
        with pytest.raises(UserError) as caught:
            desk.resolve(JOB)
        assert "mine.yaml:" in (shown := refusal(caught.value)) and "no container.runtime" in shown


@pytest.mark.parametrize("nodes", ["-3", "two", "1-2-3", "1,2"])
def test_a_range_that_is_none(desk: Desk, nodes: str) -> None:
    desk.site(GPU_SITE.replace("name: gpus", "name: mine") + f'when:\n  x: {{nodes: "{nodes}"}}\n')
    with pytest.raises(UserError, match=r"must be a number of nodes or a range: 1, 2-91, or 2-"):
        desk.resolve(JOB)


def test_an_account_of_another_kind_of_nodes(desk: Desk) -> None:
    site = GPU_SITE.replace("name: gpus", "name: mine").replace("max_nodes: 64}", 'max_nodes: 64, account: "*-gpu"}')
    desk.site(site)
    notes = desk.plan(JOB, "resources.account=ours-cpu").notes
    assert ("warning", "account ours-cpu does not look like one for partition main of site mine: those are *-gpu") in [
        (note.level, note.text) for note in notes
    ]
    assert not any("does not look" in note.text for note in desk.plan(JOB, "resources.account=ours-gpu").notes)


def test_what_suits_one_image_only(desk: Desk) -> None:
    desk.site(
        GPU_SITE.replace("name: gpus", "name: mine")
        + 'when:\n  old: {image: "torch-*r64*", job: {network: {variables: {NCCL_NET_GDR_LEVEL: PHB}}}}\n'
    )

    def variables(*options: str) -> dict[str, str]:
        return desk.resolve(JOB, *options).job.network.variables

    old = "container.image=/apps/lumi/torch-full-r64f21.sif"
    assert variables(old) == {"NCCL_NET_GDR_LEVEL": "PHB"}
    assert variables(old, "network.variables.NCCL_NET_GDR_LEVEL=SYS") == {"NCCL_NET_GDR_LEVEL": "SYS"}
    assert variables(old, "container.runtime=none") == {}
    assert variables("container.image=/apps/torch-x-r64/torch-full-r70.sif") == {}  # the file's name decides
    assert variables() == {}
