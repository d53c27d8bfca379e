"""The test cluster is what the other tests take it for."""

import subprocess

import pytest

from .cluster import Cluster
from .errors import ClusterUnavailable
from .images import definition

pytestmark = pytest.mark.cluster


def test_three_nodes_are_idle(fresh_cluster: Cluster) -> None:
    assert fresh_cluster.node_states() == {"node1": "idle", "node2": "idle", "node3": "idle"}


def test_srun_reaches_every_node_as_the_user(cluster: Cluster) -> None:
    done = cluster.run("login", ["srun", "-N3", "sh", "-c", "echo $(hostname) $(id -un)"])
    assert sorted(done.stdout.splitlines()) == ["node1 alice", "node2 alice", "node3 alice"]


def test_hosts_talk_over_their_own_interface_only(cluster: Cluster) -> None:
    assert "received" in cluster.run("node1", ["ping", "-c1", "-W2", "node3"]).stdout
    assert "default" not in cluster.run("node1", ["ip", "route"]).stdout
    interfaces = cluster.run("node2", ["ls", "/sys/class/net"]).stdout.split()
    assert "ib0" in interfaces and "eth0" not in interfaces


def test_a_batch_job_writes_into_the_shared_home(cluster: Cluster) -> None:
    cluster.write("/home/alice/batch/job.sh", "#!/bin/bash\n#SBATCH -N2 --gres=gpu:2\nsrun -l hostname\n")
    job = cluster.run("login", ["sbatch", "--parsable", "job.sh"], cwd="/home/alice/batch").stdout.strip()
    assert cluster.wait_job(job) == "COMPLETED"
    output = cluster.machine_path(f"/home/alice/batch/slurm-{job}.out").read_text()
    assert sorted(output.splitlines()) == ["0: node1", "1: node2"]


@pytest.mark.parametrize("request_gpus", ["--gres=gpu:2", "--gpus-per-node=2"])
def test_fake_gpus_are_handed_out(cluster: Cluster, request_gpus: str) -> None:
    done = cluster.run("login", ["srun", "-N1", request_gpus, "printenv", "CUDA_VISIBLE_DEVICES"])
    assert done.stdout.strip() == "0,1"


def test_more_gpus_than_a_node_has_are_refused(cluster: Cluster) -> None:
    done = cluster.run("login", ["srun", "-N1", "--gres=gpu:3", "true"], check=False)
    assert done.returncode != 0
    assert "Requested node configuration is not available" in done.stderr


def test_the_debug_partition_has_its_own_limit(cluster: Cluster) -> None:
    done = cluster.run("login", ["sbatch", "-p", "debug", "-t", "10", "--wrap", "true"], check=False)
    assert "time limit" in done.stderr.lower() and done.returncode != 0


@pytest.mark.long  # test_images.py builds there, too
def test_the_user_builds_an_image_and_runs_it_on_a_node(cluster: Cluster, plain_image_root: str) -> None:
    text = definition(plain_image_root, "%post\n    echo made by %post > /made", "%environment\n    export TASTE=salt")
    cluster.write("/home/alice/build/plain.def", text)
    cluster.run("login", ["apptainer", "build", "plain.sif", "plain.def"], cwd="/home/alice/build", timeout=120)
    inside = ["apptainer", "exec", "plain.sif", "sh", "-c", "cat /made; echo $TASTE; id -un"]
    done = cluster.run("login", ["srun", "-w", "node1", *inside], cwd="/home/alice/build")
    assert done.stdout.splitlines() == ["made by %post", "salt", "alice"]


def test_torch_runs_in_its_image_on_all_nodes(cluster: Cluster, torch_image: str) -> None:
    program = "import torch, sys; print(torch.__version__.split('+')[0], sys.version_info[:2])"
    done = cluster.run("login", ["srun", "-N3", "apptainer", "exec", torch_image, "python3", "-c", program])
    assert done.stdout.splitlines() == ["2.13.0 (3, 11)"] * 3


def test_the_login_side_has_its_python(cluster: Cluster) -> None:
    program = "import sys, typer, jinja2, pydantic, yaml, rich, spython, slurmddp; "
    program += "print(slurmddp.__file__, sys.prefix)"
    done = cluster.run("login", ["/opt/slurmddp-venv/bin/python", "-c", program])
    assert done.stdout.strip() == "/opt/slurmddp/slurmddp/__init__.py /opt/slurmddp-venv"


def test_processes_are_seen_until_they_are_gone(cluster: Cluster) -> None:
    job = cluster.run("login", ["sbatch", "--parsable", "-w", "node2", "--wrap", "sleep 321"]).stdout.strip()

    def sleeps() -> bool:
        return any(argv == ["sleep", "321"] for _, argv in cluster.processes("node2"))

    cluster.wait_for(sleeps, "the job's sleep is seen", timeout=10)
    cluster.run("login", ["scancel", job])
    assert cluster.wait_job(job) == "CANCELLED"
    cluster.wait_for(lambda: cluster.processes("node2") == [], "nothing of the user's is left", timeout=10)


def test_a_command_that_takes_too_long_leaves_nothing(cluster: Cluster) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.sh("login", "sleep 322 & sleep 322", timeout=1)
    cluster.wait_for(
        lambda: not [argv for _, argv in cluster.processes("login") if "322" in argv], "no sleep is left", timeout=5
    )


def test_a_cut_cable_is_silence_and_can_be_mended(fresh_cluster: Cluster) -> None:
    fresh_cluster.cut_network("node3")
    ping = ["ping", "-c1", "-W1", "node3"]
    assert fresh_cluster.run("login", ping, check=False).returncode != 0
    assert fresh_cluster.host_is_up("node3")
    fresh_cluster.mend_network("node3")
    fresh_cluster.wait_for(lambda: fresh_cluster.run("login", ping, check=False).returncode == 0, "mended", timeout=10)


def test_two_hosts_that_are_parted_reach_the_others(fresh_cluster: Cluster) -> None:
    def reaches(one: str, other: str) -> bool:
        return fresh_cluster.run(one, ["ping", "-c1", "-W1", other], check=False).returncode == 0

    fresh_cluster.part("node1", "node2")
    assert not reaches("node1", "node2") and not reaches("node2", "node1")
    assert reaches("node1", "node3") and reaches("login", "node1") and reaches("login", "node2")
    fresh_cluster.reset()
    assert reaches("node1", "node2") and reaches("node2", "node1")


@pytest.mark.long
def test_a_slow_link_is_slow(fresh_cluster: Cluster) -> None:
    try:
        fresh_cluster.slow_link("node1", "200ms")
    except ClusterUnavailable as error:
        pytest.skip(str(error))
    reply = fresh_cluster.run("login", ["ping", "-c1", "-W5", "node1"]).stdout
    fresh_cluster.slow_link("node1", None)
    assert float(reply.split("time=")[1].split()[0]) >= 200


@pytest.mark.long
def test_a_throttled_link_is_slow(fresh_cluster: Cluster) -> None:
    fresh_cluster.slow_link("node1", None, rate="256kbit")
    reply = fresh_cluster.run("login", ["ping", "-c4", "-i0.2", "-W5", "-s6000", "node1"]).stdout
    fresh_cluster.slow_link("node1", None)
    assert max(float(line.split("time=")[1].split()[0]) for line in reply.splitlines() if "time=" in line) > 50


@pytest.mark.long
def test_a_killed_host_goes_down_and_comes_back(fresh_cluster: Cluster) -> None:
    fresh_cluster.kill_host("node3")
    assert not fresh_cluster.host_is_up("node3")
    assert fresh_cluster.processes("node3", user=None) == []
    fresh_cluster.wait_nodes({"node1": "idle", "node2": "idle", "node3": "down"}, timeout=45)
    fresh_cluster.restart_host("node3")
    fresh_cluster.wait_nodes(timeout=30)
    assert fresh_cluster.run("node3", ["sh", "-c", "echo new >/scratch/new; cat /scratch/new"]).stdout == "new\n"
    assert fresh_cluster.run("login", ["srun", "-w", "node3", "hostname"]).stdout.strip() == "node3"


@pytest.mark.long
def test_a_restarted_controller_knows_the_job_and_its_end(cluster: Cluster) -> None:
    job = cluster.run("login", ["sbatch", "--parsable", "-o/dev/null", "--wrap", "sleep 3"], cwd="/tmp").stdout.strip()
    cluster.wait_job(job, {"RUNNING"})
    cluster.restart_controller()
    assert cluster.wait_job(job) == "COMPLETED"


@pytest.mark.long
@pytest.mark.parametrize(("partition", "signals"), [("low", "USR2 TERM"), ("low-warned", "USR2")])
def test_a_higher_partition_pushes_a_job_out(fresh_cluster: Cluster, partition: str, signals: str) -> None:
    """The signal that it asked for comes first; how long after it the end comes is the partition's matter. Where that
    is at once, SIGTERM overtakes it now and then.
    """
    script = f"""#!/bin/bash
#SBATCH --nodes=3 --exclusive --signal=B:USR2@60 --requeue --output=preempted.log --open-mode=append
trap 'echo USR2; [[ {partition} == low ]] || exit' USR2
trap 'echo TERM; exit' TERM
echo start
while :; do sleep 1 & wait $!; done
"""
    fresh_cluster.write("/home/alice/preempted.log", "")
    fresh_cluster.write("/home/alice/preempted.sh", script)
    low = fresh_cluster.run("login", ["sbatch", "--parsable", "-p", partition, "preempted.sh"]).stdout.strip()
    fresh_cluster.wait_job(low, {"RUNNING"})
    output = fresh_cluster.machine_path("/home/alice/preempted.log")
    fresh_cluster.wait_for(lambda: "start" in output.read_text(), "the job has begun", 10)
    high = ["sbatch", "--parsable", "-p", "high", "-N3", "--exclusive", "-o/dev/null", "--wrap", "true"]
    assert fresh_cluster.wait_job(fresh_cluster.run("login", high).stdout.strip(), timeout=25) == "COMPLETED"
    told = " ".join(line for line in output.read_text().splitlines() if line in ("USR2", "TERM"))
    assert told == signals or (partition == "low" and told == "TERM")
    again = fresh_cluster.job(low)
    if partition == "low":
        assert (again["JobState"], again["Reason"]) == ("PENDING", "BeginTime")
    fresh_cluster.run("login", ["scancel", low], check=False)


def test_all_hosts_share_a_small_file_system(cluster: Cluster) -> None:
    cluster.run("node1", ["sh", "-c", "echo there >/scratch/file"])
    assert cluster.run("node3", ["cat", "/scratch/file"]).stdout == "there\n"
    full = cluster.run("login", ["dd", "if=/dev/zero", "of=/scratch/ballast", "bs=1M"], check=False)
    assert "No space left on device" in full.stderr
    cluster.machine_path("/scratch/ballast").unlink()
    cluster.machine_path("/scratch/file").unlink()


@pytest.mark.long
def test_a_cluster_with_accounting_remembers_a_job(cluster: Cluster) -> None:
    with Cluster.started(f"{cluster.name}-accounts", accounting=True) as other:
        job = other.run("login", ["sbatch", "--parsable", "-o/dev/null", "--wrap", "exit 3"], cwd="/tmp").stdout.strip()
        told = ["sacct", "-X", "-n", "-P", "-j", job, "-o", "State,ExitCode"]
        other.wait_for(lambda: other.run("login", told).stdout.strip() == "FAILED|3:0", "sacct knows it", 20)


@pytest.mark.long
def test_a_second_cluster_runs_beside_the_first(cluster: Cluster) -> None:
    with Cluster.started(f"{cluster.name}-second") as second:
        assert second.run("login", ["srun", "-N3", "true"]).returncode == 0
        folder = second.layout.folder
        assert folder.is_dir()
    assert not folder.exists()
    assert cluster.is_up()
