"""check JOB.yaml: each rule finds its pitfall in a bad job, and nothing in a good one."""

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import slurmddp.launch.job_check.rules  # noqa: F401 - registers them
from slurmddp.cluster.client import Answer
from slurmddp.commands.check.job import Answer as JobAnswer
from slurmddp.commands.check.job import Offer, _script_lines, examine
from slurmddp.errors import ExternalError
from slurmddp.launch.job_check.cluster import Cluster, Nodes
from slurmddp.launch.job_check.rule import RULES, Finding, Hit, Subject, check_job
from slurmddp.launch.prepare import Prepared
from slurmddp.launch.quotas import Quota
from slurmddp.launch.resumed import Resumed
from slurmddp.scripts.check.rule import Rule, Severity
from tests.helpers import LM_JOB, ROOT, SIF, Desk, plan_of

#: What scontrol, sinfo and sacctmgr of Slurm 24.11 print, cut to the fields that matter and some beside them.
PARTITIONS = """\
PartitionName=main AllowGroups=ALL AllowAccounts=physics,bio AllowQos=ALL AllocNodes=ALL Default=YES QoS=N/A \
DefaultTime=01:00:00 DisableRootJobs=NO MaxNodes=8 MaxTime=12:00:00 MinNodes=0 Nodes=n[1-16] State=UP TotalCPUs=1024 \
TotalNodes=16 SelectTypeParameters=NONE
PartitionName=closed AllowAccounts=ALL AllowQos=long Default=NO DefaultTime=NONE MaxNodes=UNLIMITED MaxTime=UNLIMITED \
Nodes=n[1-2] State=DRAIN TotalNodes=2
PartitionName=cores AllowAccounts=ALL AllowQos=ALL Default=NO MaxNodes=UNLIMITED MaxTime=UNLIMITED State=UP TotalNodes=4
"""
SINFO = {
    "main": "64|491520|gpu:a100:4(S:0-1)\n128|1031000+|gpu:a100:2,gpu:h100:2\n",
    "cores": "64|500000|(null)\n",
}
ASSOCIATIONS = "physics||normal,long\nbio|main|normal\n"
QOS = "normal|08:00:00\nlong|\n"
STARTS = "sbatch: Job 17 to start at 2026-11-23T12:00:{0} using 64 processors on nodes n[1-2] in partition main\n"


@dataclass
class Slurm:
    """Slurm's answers. trial: what --test-only says, by partition."""

    missing: frozenset[str] = frozenset()
    trial: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, command: Sequence[str], *, timeout: float) -> Answer:
        self.asked.append(tuple(command))
        if command[0] in self.missing:
            return Answer(127, "", "not found", missing=True)
        if command[:3] == ("scontrol", "--oneliner", "show"):
            return Answer(0, PARTITIONS, "")
        if command[0] == "sinfo":
            partition = next(word.partition("=")[2] for word in command if word.startswith("--partition="))
            return Answer(0, SINFO.get(partition, ""), "")
        if command[0] == "sacctmgr":
            return Answer(0, QOS if "qos" in command else ASSOCIATIONS, "")
        assert command[:2] == ("sbatch", "--test-only")
        partition = next((word.partition("=")[2] for word in command if word.startswith("--partition=")), "")
        said = self.trial.get(partition, STARTS.format("00"))
        return Answer(0 if "to start" in said else 1, "", said)


@pytest.fixture
def check(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Finding]]:
    """Check a job that is right but for what the options change; its files exist, and its run folder is shared."""
    monkeypatch.setenv("PATH", f"{desk.bin}:/usr/bin:/bin")
    for name in ("sbatch", "srun"):
        desk.program(name, "#!/bin/sh\n")
    image, data = desk.write("image.sif", SIF), desk.write("books/a.txt", "text")
    monkeypatch.setattr("slurmddp.launch.job_check.rules.files._OF_ONE_NODE", ("/not-here",))
    good = (f"container.image={image}", f"train.data.path={data.parent}", "resources.time=4h", "resources.nodes=2")

    def found(*options: str, slurm: Slurm | None = None, inside: bool = False, **variables: str) -> list[Finding]:
        prepared = prepared_of(desk, *good, *options, inside=inside)
        return check_job(Subject(prepared, Cluster(slurm or Slurm()), {**desk.environment, **variables}))

    return found


def prepared_of(desk: Desk, *options: str, inside: bool = False, save_seconds: float | None = None) -> Prepared:
    resolved = desk.resolve(LM_JOB, *options)
    return Prepared(resolved, plan_of(resolved, desk.project, inside=inside), Resumed(longest_save=save_seconds))


def test_a_good_job_breaks_no_rule(check: Callable[..., list[Finding]]) -> None:
    assert check() == []
    assert check("resources.account=physics", "resources.qos=normal", "resources.cpus_per_node=64") == []


BAD = [
    ("partition-unknown", ["resources.partition=gpu", "resources.gpus_per_node=4"], "Slurm knows no partition gpu"),
    ("partition-closed", ["resources.partition=closed", "resources.gpus_per_node=4"], "partition closed is DRAIN"),
    ("partition-limit", ["resources.time=13h"], "the time limit 13:00:00 is above the 12:00:00 of partition main"),
    ("partition-limit", ["resources.nodes=9"], "9 nodes are more than the 8 that partition main gives one job"),
    ("partition-limit", ["resources.nodes=9-12"], "9 nodes are more than the 8"),
    ("time-default", ["resources.time=null"], "partition main ends the job after 01:00:00"),
    ("partition-account", ["resources.account=art"], "partition main does not accept account art"),
    ("partition-account", ["resources.partition=closed", "resources.gpus_per_node=4", "resources.qos=no"], "qos no"),
    ("account-unknown", ["resources.account=art"], "you have no association with account art"),
    ("qos-limit", ["resources.account=bio", "resources.qos=long"], "you may not use QOS long"),
    ("qos-limit", ["resources.qos=normal", "resources.time=9h"], "09:00:00 is above the 08:00:00 of QOS normal"),
    ("node-size", ["resources.partition=cores", "resources.gpus_per_node=0", "resources.cpus_per_node=65"], "65 cores"),
    ("node-size", ["resources.partition=cores", "resources.gpus_per_node=0", "resources.mem_per_node=600G"], "600G"),
    ("node-size", ["resources.partition=cores", "resources.gpus_per_node=4"], "have no GPUs that Slurm knows"),
    ("node-size", ["resources.gpu_type=v100"], "partition main has no GPU type v100"),
    ("submit-refuses", ["train.data.path=/absent"], "the dataset /absent does not exist"),
    ("bind-hides", ["container.binds=[/home:/usr]"], "the bind /home hides the image's own /usr"),
    ("slow-network", ["environment.NCCL_IB_DISABLE=1"], "NCCL_IB_DISABLE=1 switches"),
    ("slow-network", ["network.variables.NCCL_NET=Socket"], "NCCL_NET=Socket switches"),
    ("slow-network", ["setup=[export NCCL_P2P_DISABLE=1]", "resources.nodes=1"], "NCCL_P2P_DISABLE=1 switches"),
    ("wrong-interface", ["network.interface=lo"], "network.interface is lo: lo does not reach other nodes"),
    ("wrong-interface", ["environment.GLOO_SOCKET_IFNAME=docker0"], "docker0 does not reach other nodes"),
    ("debug-variable", ["environment.CUDA_LAUNCH_BLOCKING=1"], "makes every kernel wait"),
    ("shared-cache", ["environment.TRITON_CACHE_DIR=/home/me/triton"], "TRITON_CACHE_DIR=/home/me/triton is a folder"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "options", "message"), BAD)
def test_a_bad_job_breaks_the_rule(
    check: Callable[..., list[Finding]], rule: str, options: list[str], message: str
) -> None:
    found = [each for each in check(*options) if each.rule.id == rule]
    assert len(found) == 1 and message in found[0].message, found
    assert found[0].fix and found[0].rule.reason and found[0].where


@pytest.mark.parametrize(
    "options",
    [
        ["environment.NCCL_IB_DISABLE=0", "environment.NCCL_NET=AWS Libfabric"],
        ["environment.NCCL_IB_DISABLE=1", "resources.nodes=1"],  # one node has no network between nodes
        ["network.interface=ib0", "environment.GLOO_SOCKET_IFNAME=^lo,docker0"],
        ["environment.TRITON_CACHE_DIR=/tmp/triton"],
        ["resources.nodes=4-12", "container.binds=[/home:/data]"],  # Slurm may begin with four
    ],
)
def test_what_is_fine_breaks_no_rule(check: Callable[..., list[Finding]], options: list[str]) -> None:
    assert check(*options) == []


def test_a_variable_of_the_shell_is_found_and_one_of_the_profile_is_not(
    check: Callable[..., list[Finding]], desk: Desk
) -> None:
    (found,) = check(NCCL_IB_DISABLE="1")
    assert (found.rule.id, found.where) == ("slow-network", "$NCCL_IB_DISABLE in this shell")
    profile = desk.config / "sites/gpus.yaml"
    profile.write_text(profile.read_text() + "  network: {variables: {NCCL_IB_DISABLE: '1'}}\n")
    assert check(NCCL_IB_DISABLE="1") == []


def test_where_the_site_chooses_the_partition_its_limits_are_not_those_of_the_default(
    check: Callable[..., list[Finding]],
) -> None:
    """`large` is asked for by a constraint and a QOS."""
    found = check("resources.partition=large", "resources.nodes=9", "resources.time=13h")
    assert not {"partition-limit", "node-size"} & {each.rule.id for each in found}


def test_a_stop_lead_shorter_than_the_save(desk: Desk) -> None:
    prepared = prepared_of(desk, "resources.time=4h", "timeouts.stop=120", save_seconds=200)
    found = check_job(Subject(prepared, Cluster(Slurm()), desk.environment))
    (lead,) = (each for each in found if each.rule.id == "stop-lead")
    assert "the longest save of the resumed runs took 200 s" in lead.message and "430" in lead.fix


def test_a_folder_of_one_node(desk: Desk, check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmddp.launch.job_check.rules.files._OF_ONE_NODE", (str(desk.project),))
    assert [re.split(": |--set ", each.where)[-1] for each in check()] == [
        "paths.runs",
        "train.data.path",
        "container.image",
    ]
    assert check(inside=True) == []


def test_a_disk_that_is_nearly_full(check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmddp.launch.job_check.rules.files._LEAST_BYTES", 1 << 60)
    (found,) = check()
    assert found.rule.id == "space" and re.match(r"only [\d,]+ MiB are free in /", found.message)


def test_a_quota_that_is_nearly_used_up(check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch) -> None:
    left = [Quota("your", "/scratch", 300 << 20, None), Quota("group lab's", "/scratch", 5 << 30, 12)]
    monkeypatch.setattr("slurmddp.launch.job_check.rules.files.quotas", lambda folder: left)
    messages = [each.message for each in check() if each.rule.id == "space"]
    assert messages == [
        "your quota on /scratch leaves only 300 MiB",
        "group lab's quota on /scratch leaves only 12 files",
    ]


def test_an_alert_host_that_does_not_resolve(check: Callable[..., list[Finding]]) -> None:
    target = "alerts=[{to: slack, url_env: HOOK}]"
    found = [each.rule.id for each in check(target, HOOK="https://no-such-host.invalid/x")]
    assert "alert-address" in found
    assert "alert-address" not in [each.rule.id for each in check(target, HOOK="https://127.0.0.1/x")]


def test_what_slurm_itself_refuses(check: Callable[..., list[Finding]]) -> None:
    said = "sbatch: error: Batch job submission failed: Invalid qos specification\n"
    (found,) = check(slurm=Slurm(trial={"main": said}))
    assert (found.rule.id, found.message) == (
        "slurm-refuses",
        "Batch job submission failed: Invalid qos specification",
    )


def test_every_rule_is_tested_here() -> None:
    """Some are tested by the warnings of `submit`."""
    elsewhere = {"accelerate-layout", "image-driver", "site-bind", "login-node"}
    here = {"stop-lead", "local-folder", "space", "alert-address", "slurm-refuses", "no-store-tls"}
    here |= {rule for rule, *_ in BAD}
    assert here | elsewhere == {rule.id for rule in RULES}
    levels: set[Severity] = {rule.severity for rule in RULES}
    assert levels <= {"error", "warning", "note"}


def test_the_page_lists_the_rules_and_the_keys(desk: Desk) -> None:
    """SLURMDDP_UPDATE_GOLDEN=1 writes the table."""
    page = ROOT / "docs/check-job.md"
    rows = [(f"`{each.id}`", each.severity, each.reason, f"[source]({_link(each)})") for each in RULES]
    table = "| rule | severity | why | |\n|---|---|---|---|\n"
    table += "".join(f"| {' | '.join(row)} |\n" for row in sorted(rows))
    text = page.read_text()
    head, rest = text.split("## Rules\n\n")
    if os.environ.get("SLURMDDP_UPDATE_GOLDEN"):
        page.write_text(f"{head}## Rules\n\n{table}\n## --json{rest.split('## --json')[1]}")
    assert rest.split("\n## --json")[0] == table
    told = examine(prepared_of(desk), partitions=True, cluster=Cluster(Slurm())).as_dict()
    keys = {key for key in told if key != "counts"} | {f"counts.{key}" for key in told["counts"]}
    keys |= {f"{group}[].{key}" for group in ("findings", "partitions") for key in told[group][0]}
    listed = set(re.findall(r"^\| `([^`]+)` \|", rest.split("## --json")[1], re.MULTILINE))
    assert {key for key in listed if not key.startswith("script.")} == keys


def _link(rule: Rule[Subject, Hit]) -> str:
    return rule.source.removeprefix("docs/")


def silent(found: JobAnswer) -> list[str]:
    """What the answer says of commands of Slurm that did not answer."""
    return [line for line in found.not_checked if line.split(":")[0] in ("scontrol", "sinfo", "sacctmgr", "sbatch")]


def test_without_openssl_nodes_cannot_encrypt_their_store(
    check: Callable[..., list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **more: None if name == "openssl" else plain(name, **more))
    for options, severity in (("resources.nodes=2",), "warning"), (("network.store_tls=true",), "error"):
        (found,) = (each for each in check(*options) if each.rule.id == "no-store-tls")
        assert found.severity == severity and "no openssl" in found.message
    for option in ("resources.nodes=1", "network.store_tls=false"):
        assert "no-store-tls" not in {each.rule.id for each in check(option)}


def test_without_slurm_the_rest_is_checked_and_the_answer_says_so(desk: Desk) -> None:
    cluster = Cluster(Slurm(frozenset({"scontrol", "sinfo", "sacctmgr", "sbatch"})))
    found = examine(prepared_of(desk, "environment.NCCL_IB_DISABLE=1", "resources.nodes=2"), cluster=cluster)
    assert "slow-network" in {each.rule.id for each in found.findings} and found.start is None
    assert silent(found) == ["scontrol: it is not on this machine", "sbatch: it is not on this machine"]


@pytest.mark.parametrize("hangs", [True, False])
def test_a_slurm_that_does_not_answer(desk: Desk, hangs: bool) -> None:
    def down(command: Sequence[str], *, timeout: float) -> Answer:
        if command[0] == "sbatch" and hangs:
            raise ExternalError("sbatch did not finish within 20 s")
        return Answer(1, "", "slurm_load_partitions: Unable to contact slurm controller (connect failure)")

    found = examine(prepared_of(desk), cluster=Cluster(down))
    assert silent(found) == [
        "scontrol: slurm_load_partitions: Unable to contact slurm controller (connect failure)",
        "sbatch: sbatch did not finish within 20 s"
        if hangs
        else "sbatch: slurm_load_partitions: Unable to contact slurm controller (connect failure)",
    ]
    assert "slurm-refuses" not in {each.rule.id for each in found.findings}


def test_the_start_and_the_partitions_by_their_start(desk: Desk) -> None:
    slurm = Slurm(trial={"main": STARTS.format("09"), "cores": "allocation failure: Requested node configuration"})
    found = examine(prepared_of(desk), partitions=True, cluster=Cluster(slurm))
    assert found.start == "2026-11-23T12:00:09"
    assert found.offers == [  # `closed` is not up
        Offer("main", "2026-11-23T12:00:09", None),
        Offer("cores", None, "allocation failure: Requested node configuration"),
    ]
    trials = [command for command in slurm.asked if command[0] == "sbatch"]
    assert len(trials) == 3, "the job as it is, and each partition that is up; nothing twice"


@pytest.mark.parametrize(
    ("gres", "gpus"),
    [
        ("(null)", {}),
        ("gpu:4", {"": 4}),
        ("gpu:a100:4(S:0-1)", {"a100": 4}),
        ("gpu:a100_3g.20gb:2(S:0),gpu:v100:1,nvme:1", {"a100_3g.20gb": 2, "v100": 1}),
        ("gpu", {"": 1}),
    ],
)
def test_gpus_of_a_node(gres: str, gpus: dict[str, int]) -> None:
    assert Nodes(64, 1000, gres).gpus() == gpus


def test_the_script_is_read(desk: Desk) -> None:
    text = "import argparse, torch\np = argparse.ArgumentParser()\np.add_argument('--resume', default='')\n"
    text += "args = p.parse_args()\nopt = torch.optim.SGD(m.parameters(), 1)\nif args.resume:\n"
    text += "    state = torch.load(args.resume)\n    opt.load_state_dict(state['opt'])\n"
    text += "torch.save({'opt': opt.state_dict(), 'step': 1}, 'out/last.pt')\n"
    script = desk.write("project/train.py", text)
    options = (f"train.script={script}", "train.task=null", "train.data={}", "train.model={}")
    told = examine(prepared_of(desk, *options), cluster=Cluster(Slurm())).as_dict()["script"]
    assert {each["key"]: each["value"] for each in told["proposals"]} == {
        "train.resume_args": ["--resume", "{checkpoint}"],
        "checkpoint.watch": ["out"],
    }
    assert any("process group" in each["text"] for each in told["sentences"])
    assert told["facts"]["loads"]["places"][0]["line"] == 7
    page = set(re.findall(r"^\| `script\.([^`]+)` \|", (ROOT / "docs/check-job.md").read_text(), re.MULTILINE))
    assert page == {*told, *(f"facts.NAME.{key}" for key in told["facts"]["loads"])}
    known = ("train.resume_args=[--resume, x]", "checkpoint.watch=[out]")
    told = examine(prepared_of(desk, *options, *known), cluster=Cluster(Slurm())).as_dict()["script"]
    assert told["proposals"] == [] and not any("resume_args" in each["text"] for each in told["sentences"])


def test_a_task_has_no_script(desk: Desk) -> None:
    assert examine(prepared_of(desk), cluster=Cluster(Slurm())).as_dict()["script"] is None


def test_what_a_script_does_not_tell_is_a_short_line() -> None:
    facts = {name: {"answer": "cannot tell"} for name in ("stops", "seeds", "workers", "requeues", "loads_alone")}
    script = {"script": "a/train.py", "facts": facts, "sentences": [], "proposals": [], "not_read": []}
    line = "train.py: cannot tell from its text: stops, seeds, workers and 2 more (--json has all)"
    assert [*_script_lines(script)] == [line]
