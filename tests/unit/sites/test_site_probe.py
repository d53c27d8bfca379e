"""sites init --probe: what the script says is read, and jobs are submitted, awaited and cancelled. sbatch is a small
command that runs the real script here."""

import re
from collections.abc import Callable

import pytest

from slurmddp.cluster.describe import nodes
from slurmddp.job.site import Site
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.draft.live import NodeType
from slurmddp.sites.draft.seen import Seen, read_log
from tests.helpers import ROOT, Desk, Result, check_bash

Cli = Callable[..., Result]
SCRIPT = ROOT / "templates" / "sbatch" / "site_probe.sh"

#: As the script prints it on a node with four GPUs on InfiniBand, after a prolog of the site's.
GPU_NODE = """\
Welcome to the cluster
slurmddp-probe node gpu1
slurmddp-probe architecture x86_64
slurmddp-probe cpus 120
slurmddp-probe memory_kb 527839232
slurmddp-probe memory_limit max
slurmddp-probe memory_limit 524288000000
slurmddp-probe memory_limit 9223372036854771712
slurmddp-probe shm Filesystem     1024-blocks  Used Available Capacity Mounted on
slurmddp-probe shm tmpfs            263919616     0 263919616       0% /dev/shm
slurmddp-probe tmpdir
slurmddp-probe tmp Filesystem     1024-blocks     Used Available Capacity Mounted on
slurmddp-probe memlock unlimited
slurmddp-probe open_files 131072
slurmddp-probe device /dev/nvidia0
slurmddp-probe nvidia NVIDIA A100-SXM4-40GB, 40960 MiB, 535.183.01
slurmddp-probe nvidia NVIDIA A100-SXM4-40GB, 40960 MiB, 535.183.01
slurmddp-probe topology \tGPU0\tGPU1\tNIC0\tCPU Affinity
slurmddp-probe topology GPU0\t X \tNV4\tPXB\t0-59
slurmddp-probe port mlx5_0|1|4: ACTIVE|200 Gb/sec (4X HDR)|InfiniBand|mlx5_core
slurmddp-probe port mlx5_1|1|1: DOWN|10 Gb/sec (4X SDR)|Ethernet|mlx5_core
slurmddp-probe interface docker0|up
slurmddp-probe interface eno1|down
slurmddp-probe interface ib0|up
slurmddp-probe interface lo|unknown
slurmddp-probe address 1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever
slurmddp-probe address 2: eno1    inet 10.1.0.4/16 brd 10.1.255.255 scope global eno1\\       valid_lft forever
slurmddp-probe address 4: ib0    inet 10.2.0.4/16 brd 10.2.255.255 scope global ib0\\       valid_lft forever
slurmddp-probe address 7: docker0    inet 172.17.0.1/16 scope global docker0\\       valid_lft forever
slurmddp-probe apptainer apptainer version 1.3.4-1.el9
slurmddp-probe program srun
slurmddp-probe module apptainer/1.3.4
slurmddp-probe end
Bye
"""
(NODE,) = nodes("NodeName=gpu1 CPUEfctv=120 Gres=gpu:a100:4(S:0) RealMemory=515000 State=IDLE Partitions=gpu")


def seen(*lines: str, text: str = "") -> Seen:
    log = text or "".join(f"slurmddp-probe {line}\n" for line in (*lines, "end"))
    facts = read_log(log)
    assert facts is not None
    return Seen(NodeType((NODE,)), "gpu", "7", facts)


def test_what_a_gpu_node_says() -> None:
    found = seen(text=GPU_NODE)
    assert (found.node, found.vendor, found.driver, found.fabric) == ("gpu1", "nvidia", "535.183.01", "infiniband")
    assert found.gpus == ["NVIDIA A100-SXM4-40GB"] * 2
    assert [(port.device, port.active) for port in found.ports] == [("mlx5_0", True), ("mlx5_1", False)]
    assert found.interfaces == {"ib0": "10.2.0.4/16"}
    assert found.memory_mib == 500000, "the job's cgroup"
    notes = "\n".join(found.notes())
    assert "CPUs 120, memory 500000M (Slurm: 120, 515000M)" in notes
    assert "/dev/shm 251.7G; TMPDIR (not set), unknown; memlock unlimited; open files 131072" in notes
    assert "GPUs: 2 x NVIDIA A100-SXM4-40GB, driver 535.183.01" in notes and "GPU0\t X \tNV4\tPXB" in notes
    assert "mlx5_0 port 1: 4: ACTIVE, 200 Gb/sec (4X HDR), InfiniBand, driver mlx5_core" in notes
    python = "no Python 3.6 or newer in /usr"
    assert python in notes and python not in "\n".join(seen("supervisor /usr/bin/python3").notes())
    assert "scontrol is not on this node" in notes and "module: apptainer/1.3.4" in notes
    assert read_log(GPU_NODE.replace("slurmddp-probe end\n", "")) is None, "it was killed"


@pytest.mark.parametrize(
    ("lines", "vendor", "fabric"),
    [
        ([], "none", None),
        (["device /dev/dri/renderD128"], None, None),
        (["device /dev/kfd"], "amd", None),
        (["device /dev/kfd", "device /dev/nvidia0"], None, None),
        (["nvidia No devices were found"], "none", None),
        (["amd device,Card Series,Card model", "amd card0,AMD Instinct MI250X,0x740c"], "amd", None),
        (["slingshot cxi0", "port x|1|4: ACTIVE|1|InfiniBand|y"], "none", "slingshot11"),
        (["port rdmap0|1|4: ACTIVE|100 Gb/sec|Unspecified|efa"], "none", "efa"),
        (["port mlx5_0|1|4: ACTIVE|100 Gb/sec|Ethernet|mlx5_core"], "none", None),
        (["port mlx5_0|1|2: INIT|100 Gb/sec|InfiniBand|mlx5_core"], "none", None),
    ],
)
def test_vendor_and_fabric_are_seen_or_left_open(lines: list[str], vendor: str | None, fabric: str | None) -> None:
    found = seen(*lines)
    assert (found.vendor, found.fabric) == (vendor, fabric)
    assert found.notes() and found.memory_mib is None
    if "MI250X" in str(lines):
        assert found.gpus == ["AMD Instinct MI250X"]


def test_the_script_is_sound(desk: Desk) -> None:
    check_bash(SCRIPT.read_text(), "site_probe.sh", desk.project)


@pytest.fixture
def sbatch(desk: Desk, slurm: Callable[..., None]) -> Callable[[str], None]:
    """Put sbatch on the desk: it writes down what it is asked, and does `then` with the log's path and the script."""

    def put(then: str) -> None:
        slurm()
        desk.program(
            "sbatch",
            '#!/bin/bash\nprintf "%s " "$@" >>~/sbatch; echo >>~/sbatch\n'
            "for word; do [[ $word != --output=* ]] || log=${word#*=}; done\nscript=${!#}\n" + then,
        )
        desk.program("scancel", '#!/bin/sh\necho "$@" >>~/scancel\n')
        desk.program(
            "squeue", "#!/bin/sh\nprintf '%-24s%-20s%-12s%-24s%-24s%-20s%-160s\\n' 7 PENDING 0 N/A N/A 5:00 Priority\n"
        )
        for name in ("apptainer", "singularity"):
            desk.program(name, f"#!/bin/sh\necho {name} version 1.3\n")

    return put


RUN = 'SLURMD_NODENAME=g$(wc -l <~/sbatch) bash "$script" >"$log" 2>/dev/null; echo $((6 + $(wc -l <~/sbatch)))\n'


def probed(desk: Desk, cli: Cli, *words: str) -> tuple[Result, Site, str]:
    done = cli("site", "init", "--probe", "-o", "site.yaml", "--force", *words)
    path = desk.project / "site.yaml"
    return done, Catalogue(desk.environment).load(str(path))[0], path.read_text()


def test_a_probe_of_each_node_type(desk: Desk, cli: Cli, sbatch: Callable[[str], None]) -> None:
    sbatch(RUN)
    done, site, text = probed(desk, cli, "--account", "physics")
    assert done.code == 0, done.err
    asked = (desk.home / "sbatch").read_text().splitlines()
    last = ("--account=physics", "--time=00:05:00")
    assert [re.findall(r"--(?:cpus|gres|mem|time|account|partition|nodelist)\S+", line) for line in asked] == [
        ["--cpus-per-task=120", "--gres=gpu:a100:4", "--mem=512000M", *last, "--partition=gpu"],
        ["--cpus-per-task=32", "--mem=32000M", *last, "--partition=cores.long"],
    ]
    assert "sbatch --parsable --output=" in done.err and "  job 7: 2 x 120 CPUs, 512000M, gpu:a100:4\n" in done.err
    assert site.level == "probed" and "level: probed # 2 of 2 node types; see the end\n" in text
    assert site.job["container"] == {"runtime": "apptainer"}
    assert (
        "runtime: apptainer # probe of g1, g2, " in text
        and "# 2 x 120 CPUs, 512000M, gpu:a100:4, in gpu, job 7, on g1\n" in text
    )
    assert all(fact.verified for fact in site.facts.values())
    name = re.findall(r"--job-name=(\S+)", asked[0])[0]
    assert (desk.home / "scancel").read_text().endswith(f"--name={name}\n"), "nothing of it can stay"
    assert list(desk.home.glob(".slurmddp-probe-*")) == []


def test_a_cluster_with_and_without_gpus(desk: Desk, cli: Cli, sbatch: Callable[[str], None]) -> None:
    """Nodes without GPUs say nothing about those with GPUs: vendor, model and network are what the latter have."""
    (desk.home / "gpu.log").write_text(GPU_NODE)
    sbatch('[[ $* != *gres* ]] || { cat ~/gpu.log >"$log"; echo 7; exit; }\n' + RUN)
    done, site, text = probed(desk, cli)
    assert done.code == 0 and "gpu_vendor: nvidia # probe of gpu1, g2, " in text, done.err
    assert (site.gpu, site.fabric, site.gpu_request) == ("NVIDIA A100-SXM4-40GB", "infiniband", "gres")
    gpu, cores = site.partitions["gpu"], site.partitions["cores.long"]
    assert (gpu.gpus_per_node, gpu.driver, cores.gpus_per_node, cores.driver) == (4, "535.183.01", 0, None)
    assert "network" not in site.job and "job.network.interface: default: the one that leads" in text
    assert "#     GPU0\\t" not in text and "#     GPU0\t X \tNV4\tPXB\t0-59\n" in text


def test_a_bounded_number_of_probes(
    desk: Desk, cli: Cli, slurm: Callable[..., None], sbatch: Callable[[str], None]
) -> None:
    """Racks are features: other hardware is probed first, and nodes that are down are not."""
    sbatch(RUN)
    node = "NodeName={0} CPUEfctv=8 Gres={1} RealMemory=9000 State={2} AvailableFeatures={0} Partitions=gpu"
    shapes = [
        *((f"r{number}", "(null)", "IDLE") for number in range(9)),
        ("g", "gpu:1", "MIXED"),
        ("d", "gpu:2", "DOWN*"),
    ]
    slurm(nodes="\n".join(node.format(*shape) for shape in shapes))
    done, site, text = probed(desk, cli)
    asked = [re.findall(r"--nodelist=(\S+)", line)[0] for line in (desk.home / "sbatch").read_text().splitlines()]
    assert len(asked) == 8 and asked[0] == "g" and "d" not in asked, done.err
    assert "level: probed # 8 of 11 node types" in text and site.partitions["gpu"].gpus_per_node is None
    assert text.count("#   not probed: left out: a probe submits 8 jobs at most; --partition selects\n") == 2
    assert text.count("#   not probed: none of its nodes is up\n") == 1


def test_a_probe_that_is_refused_or_waits_too_long(desk: Desk, cli: Cli, sbatch: Callable[[str], None]) -> None:
    sbatch('[[ $* != *cores* ]] || { echo "sbatch: error: Invalid account" >&2; exit 1; }\necho 7\n')
    done, site, text = probed(desk, cli, "--wait", "1s")
    assert done.code == 0 and "  job 7: PENDING Priority\n" in done.err
    assert site.level == "documented" and site.job["container"] == {"runtime": "apptainer"}
    assert "#   not probed: job 7 was PENDING Priority after 1 s\n" in text
    assert "#   not probed: sbatch refused the probe: sbatch: error: Invalid account\n" in text
    assert (desk.home / "scancel").exists()


def test_ctrl_c_cancels_the_probes(desk: Desk, sbatch: Callable[[str], None]) -> None:
    sbatch("kill -INT $PPID; sleep 1; echo 7\n")
    done = desk.command("site", "init", "--probe", "-o", "site.yaml")
    assert done.code == 130 and "cancelling the probes\n" in done.err
    name = re.findall(r"--job-name=(\S+)", (desk.home / "sbatch").read_text())[0]
    assert f"--name={name}" in (desk.home / "scancel").read_text()
    assert not (desk.project / "site.yaml").exists()


def test_an_option_of_the_probe_without_it(desk: Desk, cli: Cli, sbatch: Callable[[str], None]) -> None:
    sbatch(RUN)
    done = cli("site", "init", "-o", "-", "--account", "physics")
    assert (done.code, done.err.splitlines()[0]) == (2, "slurmddp: --account works only with --probe")


EVIL = [
    'x"}\u2028job: {setup: [touch pwned]}\u2029job: {setup: [touch pwned]}\x85job: {setup: [touch pwned]} #',
    "$(touch${IFS}pwned)`touch pwned`';touch pwned;#",
    "\x1b]52;c;cm0gLXJmIH4=\x07\r\u202e&anchor *alias !!python/object/apply:os.system [x]",
    "no",
    "1e3",
    "0x10",
    "2026-01-01",
    "- x: &a [*a]",
]


@pytest.mark.parametrize("evil", EVIL)
def test_what_slurm_modules_and_nodes_say_is_only_text(
    desk: Desk, cli: Cli, slurm: Callable[..., None], sbatch: Callable[[str], None], evil: str
) -> None:
    keys = dict.fromkeys(line.split()[1] for line in GPU_NODE.splitlines() if line.startswith("slurmddp-probe"))
    log = "".join(f"slurmddp-probe {key} {evil}\n" for key in keys if key != "port") + "slurmddp-probe amd_driver x\n"
    for device in (evil, f"/dev/nvidia0{evil}"):
        log += f"slurmddp-probe device {device}\n"
    log += f"slurmddp-probe nvidia {evil.replace(',', '')}, {evil.replace(',', '')}, 535.183.01\n"
    log += f"slurmddp-probe address 2: {evil.split()[0]} inet {evil.split()[0]} x\n"
    log += "slurmddp-probe port " + "|".join([evil.replace("|", "")] * 6) + "\n"
    (desk.root / "log").write_bytes(log.encode())
    sbatch(f'cat {desk.root}/log >"$log"; echo 7\n')
    word = re.sub(r"\s", "_", evil)
    slurm(
        config=f"ClusterName = {evil}\nJobSubmitPlugins = {evil}\nSelectType = {evil}\n",
        partitions=f"PartitionName=main AllowAccounts={word} AllowQos={word} Default=YES QoS={word} MaxTime={word} "
        f"State=UP\nPartitionName={word} State=UP\nPartitionName=off State={word}\n",
        nodes=f"NodeName={word} Arch={word} CPUTot=2 Gres=gpu:{word}:4 RealMemory=1000 State=IDLE "
        f"AvailableFeatures={word} Partitions=main,{word}\n",
        sacctmgr=f"cat {desk.root}/sacctmgr",
    )
    (desk.root / "sacctmgr").write_text(f"{evil}|{evil}|{evil}\n")
    for name in ("apptainer", "module"):
        desk.program(name, f"#!/bin/sh\ncat {desk.root}/said\n")
    (desk.root / "said").write_text(f"apptainer/{evil}\n")
    before = sorted(desk.root.rglob("pwned"))
    done = cli("site", "init", "--probe", "-o", "site.yaml", SCRATCH=str(desk.root))
    path = desk.project / "site.yaml"
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", done.err)
    if done.code == 0:
        site, text = Catalogue(desk.environment).load(str(path))[0], path.read_text()
        assert "setup" not in site.job and set(site.partitions) <= {"main", word}
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e]", text)
    else:  # what no profile can hold is named, and nothing is written
        assert done.code == 1 and "make no valid profile" in done.err and not path.exists(), done.err
    assert sorted(desk.root.rglob("pwned")) == before == []
