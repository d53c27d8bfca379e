"""sites init: a profile drafted from what Slurm says, here through small commands that print recorded text."""

import datetime
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.job.site import Site
from slurmddp.sites.catalogue import Catalogue
from tests.helpers import Desk, Result

Cli = Callable[..., Result]
SAMPLES = Path(__file__).parents[1] / "cluster" / "samples"
TODAY = datetime.date.today().isoformat()


def profile(desk: Desk, path: Path) -> Site:
    return Catalogue(desk.environment).load(str(path))[0]


def test_a_draft_of_a_gpu_cluster(desk: Desk, cli: Cli, slurm: Callable[..., None]) -> None:
    slurm()
    done = cli("site", "init")
    path = desk.config / "sites" / "Alps-2.yaml"
    assert (done.code, done.out) == (0, ""), done.err
    assert done.err.startswith(f"wrote {path}\n")
    assert cli("site", "validate", str(path)).code == 0
    site, text = profile(desk, path), path.read_text()
    assert (site.name, site.level, site.architecture) == ("Alps-2", "documented", "x86_64")
    assert site.detect.cluster_names == ("Alps 2",) and site.gpu_request == "gres"
    gpu = site.partitions["gpu"]
    assert (gpu.gpus_per_node, gpu.gpu_type, gpu.cpus_per_node, gpu.mem_per_node) == (4, "a100", 120, 512000)
    assert (gpu.max_time, gpu.max_nodes) == (4 * 3600, 8), "its QOS ends jobs earlier"
    cores = site.partitions["cores.long"]
    assert (cores.gpus_per_node, cores.cpus_per_node, cores.mem_per_node) == (None, 32, 32000)
    assert (cores.max_time, cores.max_nodes) == (None, None)
    assert site.partitions["odd"].cpus_per_node is None and "preempt" not in site.partitions
    assert site.job == {"resources": {"partition": "gpu"}, "container": {"runtime": "apptainer"}}
    assert f"    cpus_per_node: 120 # scontrol show node, {TODAY}; hardware threads, 2 per core\n" in text
    assert f"    max_time: 4h # sacctmgr show qos short, {TODAY}\n" in text
    assert "    # AllowAccounts=physics,bio\n" in text and "  # preempt is left out: its State is DRAIN\n" in text
    assert "# job.resources.account: you may use physics (sacctmgr show associations); QOS: short, normal\n" in text
    assert "# unsupported_flags: JobSubmitPlugins=lua: " in text
    assert [key for key, fact in site.facts.items() if not fact.verified] == ["job.container"], "nodes may differ"
    # It is found by the cluster's name from now on.
    assert cli("site", "--json", SLURM_CLUSTER_NAME="alps 2").out.count('"active": true') == 1


def test_a_draft_says_what_it_hides_and_what_is_used_in_its_place(
    desk: Desk, cli: Cli, slurm: Callable[..., None]
) -> None:
    slurm(config="ClusterName = lumi\nSelectType = select/cons_tres\n")
    done = cli("site", "init")
    assert "\nnote: it hides the profile " in done.err and "/site_configs/lumi.yaml\n" in done.err
    assert "is used here" not in cli("site", "init", "--force", SLURM_CLUSTER_NAME="lumi").err
    desk.site("name: other\ntitle: t\ndetect: {cluster_names: [lumi]}")
    assert (
        "note: this host matches two sites equally well: "
        in cli("site", "init", "--force", SLURM_CLUSTER_NAME="lumi").err
    )
    done = cli("site", "init", "--force", SLURMDDP_SITE="other")
    assert "note: site other is used here ($SLURMDDP_SITE): select the draft with --site lumi\n" in done.err


def test_every_value_has_a_source_and_a_date(desk: Desk, cli: Cli, slurm: Callable[..., None]) -> None:
    slurm()
    text = cli("site", "init", "-o", "-").out
    lines = text.partition("\nfacts:")[0].splitlines()
    values = {line: key[1] for line in lines if (key := re.match(r" *([\w.]+): [^#{]", line))}
    assert len(values) > 12
    assert [key for line, key in values.items() if TODAY not in line] == ["name", "title", "level"]


def test_a_draft_of_the_test_cluster(desk: Desk, cli: Cli, slurm: Callable[..., None]) -> None:
    """Slurm 24.11.5, recorded: no types of GPUs, nodes that differ in their number, no accounting."""
    texts = [(SAMPLES / f"real-scontrol-{kind}.txt").read_text() for kind in ("config", "partitions", "nodes")]
    slurm(*texts, sacctmgr="echo You are not running a supported accounting_storage plugin >&2; exit 1")
    (desk.bin / "apptainer").unlink()
    done = cli("site", "init", "-o", "drafted.yaml", "--partition", "debug,low")
    assert done.code == 0, done.err
    path = desk.project / "drafted.yaml"
    assert cli("site", "validate", str(path)).code == 0
    site, text = profile(desk, path), path.read_text()
    assert list(site.partitions) == ["debug", "low"]
    assert site.partitions["debug"].model_dump(exclude_none=True) == {
        "cpus_per_node": 4, "mem_per_node": 6000, "max_time": 300,
    }  # fmt: skip
    assert site.required == ("resources.partition", "container.runtime"), "neither is guessed"
    assert "    # gpus_per_node: the nodes differ, so each job must set it (resources.gpus_per_node)\n" in text
    assert "# gpu_vendor: nvidia (the default), amd or none: " in text
    assert "# (no answer): sacctmgr: You are not running a supported accounting_storage plugin\n" in text


def test_text_of_the_administrator_stays_a_comment(desk: Desk, cli: Cli, slurm: Callable[..., None]) -> None:
    slurm(
        'ClusterName = a: {b}" #c\x1b[31m\nSelectType = select/linear\n',
        "PartitionName=a'b State=UP\nPartitionName=null Default=YES State=UP MaxTime=1:00 AllowQos=x\\nname:evil\n",
        "NodeName=n Arch=weird CPUTot=x Gres=gpu:a:1,gpu:b:2 RealMemory=5 MemSpecLimit=9 Partitions=null State=\n",
    )
    text = cli("site", "init", "-o", "-").out
    assert "\x1b" not in text
    desk.site(text, name := text.split("\nname: ", 1)[1].splitlines()[0].split(" ")[0])
    site = profile(desk, desk.config / "sites" / f"{name}.yaml")
    assert site.partitions["null"].model_dump(exclude_none=True) == {"max_time": 60}
    assert site.job["resources"] == {"partition": "null"} and site.architecture is None
    assert "  # a'b is left out: its name cannot be a key of a profile\n" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-o", "there.yaml"], "there.yaml exists\n  -> use --force to replace it"),
        (["-o", "a b.yaml"], "--output: 'a b.yaml' cannot be a profile's file"),
        (["-o", "site.json"], "--output: 'site.json' cannot be a profile's file"),
        (["--partition", "gpu,gpus"], "--partition: Slurm knows no partition gpus\n  -> use one of: gpu, cores.long"),
    ],
)
def test_mistakes(desk: Desk, cli: Cli, slurm: Callable[..., None], words: list[str], message: str) -> None:
    slurm()
    desk.write("there.yaml", "mine")
    done = cli("site", "init", *words)
    assert done.code == 2 and message in done.err, done.err
    assert (desk.project / "there.yaml").read_text() == "mine"
    assert cli("site", "init", "-o", "there.yaml", "--force").code == 0
    assert (desk.project / "there.yaml").read_text().splitlines()[3] == "name: there"


def test_without_slurm(desk: Desk, cli: Cli, slurm: Callable[..., None]) -> None:
    done = cli("site", "init", PATH=str(desk.bin))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("slurmddp: no Slurm on this machine: scontrol is not in PATH\n  -> ")
    slurm()
    desk.program("scontrol", "#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
    done = cli("site", "init", "-o", "-")
    assert done.code == 1 and "scontrol: Unable to contact slurm controller" in done.err
