"""The client against small fake commands: what is run, in which environment, and what errors say."""

import json
import os
from pathlib import Path

import pytest

from slurmddp.cluster import client
from slurmddp.cluster.base import JobId
from slurmddp.cluster.client import Slurm
from slurmddp.errors import ExternalError, UserError

SAMPLES = Path(__file__).parent / "samples"
FORGOTTEN = 'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
AWAY = 'echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1'
NO_ACCOUNTING = 'echo "Slurm accounting storage is disabled" >&2; exit 1'


class Commands:
    """A PATH with nothing but the fake commands that a test makes; each call is noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls_file = folder / "calls"

    def make(self, name: str, body: str) -> None:
        path = self.folder / name
        path.write_text(
            f'#!/bin/bash\nPATH=/usr/bin:/bin\nprintf "%s " "{name}" "$@" >>"{self.calls_file}"\n'
            f'echo >>"{self.calls_file}"\n{body}\n'
        )
        path.chmod(0o755)

    def sample(self, name: str, sample: str) -> None:
        self.make(name, f'cat "{SAMPLES / sample}.txt"')

    @property
    def calls(self) -> list[list[str]]:
        return [line.split() for line in self.calls_file.read_text().splitlines()]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return Commands(folder)


def test_command_line_is_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    command = Slurm().command(["--nodes=2"], "/r/job.sh", ["/r"], log="/r/100%/job.log")
    assert command == (
        "sbatch", "--parsable", "--output=/r/100%%/job.log", "--nodes=2", "/r/job.sh", "/r",
    )  # fmt: skip


def test_submit_runs_it_as_given_in_a_clean_environment(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen.json"
    commands.make(
        "sbatch",
        f"env -0 >'{tmp_path}/env'; pwd >'{tmp_path}/cwd'\nreadlink /proc/self/fd/0 >'{tmp_path}/in'\n"
        f'/usr/bin/python3 -c \'import json,sys; json.dump(sys.argv[1:], open("{seen}", "w"))\' "$@"\n'
        "echo '*** banner ***'; echo '123;alpha'; echo bye",
    )
    for name in ("SLURM_JOB_ID", "SLURM_CPU_BIND", "SBATCH_PARTITION", "PMIX_RANK", "PMI_RANK"):
        monkeypatch.setenv(name, "leak")
    monkeypatch.setenv("SLURM_CONF", "/etc/x/slurm.conf")
    odd = ["a b", "$(id)", "'\"", "line\nbreak", "*"]
    cwd = tmp_path / "a folder"
    cwd.mkdir()
    assert Slurm().submit(Slurm.sbatch_command(["--comment=x y"], "job.sh", odd), cwd) == JobId("123", "alpha")
    assert json.loads(seen.read_text()) == ["--parsable", "--comment=x y", "job.sh", *odd]
    assert (tmp_path / "cwd").read_text().strip() == str(cwd)
    assert (tmp_path / "in").read_text().strip() == "/dev/null"
    environment = (tmp_path / "env").read_text()
    assert "leak" not in environment
    assert "SLURM_CONF=/etc/x/slurm.conf" in environment


def test_no_sbatch(commands: Commands, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        Slurm().submit(("sbatch", "job.sh"), tmp_path)
    for part in ("sbatch", "login node", "module load slurm", "--dry-run"):
        assert part in str(error.value)


def test_refusal_is_shown_whole(commands: Commands, tmp_path: Path) -> None:
    commands.make(
        "sbatch",
        'echo "site: no account given"\n'
        'echo "sbatch: error: Batch job submission failed: Invalid account or account/partition" >&2\n'
        'printf "second line \\xff\\n" >&2; exit 1',
    )
    with pytest.raises(UserError) as error:
        Slurm().submit(("sbatch", "job.sh"), tmp_path)
    for part in ("no account given", "Invalid account or account/partition", "second line \\xff", "code 1"):
        assert part in str(error.value)
    assert error.value.exit_code == 2


def test_a_wrong_partition_is_told_from_those_that_there_are(commands: Commands, tmp_path: Path) -> None:
    commands.make("sbatch", 'echo "sbatch: error: invalid partition specified: gpus" >&2; exit 1')
    commands.make("sinfo", "echo gpu; echo cpu; echo gpu")
    with pytest.raises(UserError) as error:
        Slurm().submit(("sbatch", "job.sh"), tmp_path)
    assert error.value.todo == "this cluster has: cpu, gpu; use --partition NAME, or resources.partition"
    commands.make("sinfo", "exit 1")
    with pytest.raises(UserError, match="change the setting that it names"):
        Slurm().submit(("sbatch", "job.sh"), tmp_path)


def test_no_answer_is_another_thing_than_a_refusal(commands: Commands, tmp_path: Path) -> None:
    text = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
    commands.make("sbatch", f'echo "{text}" >&2; exit 1')
    with pytest.raises(ExternalError, match="queue anyway") as error:
        Slurm().submit(("sbatch", "job.sh"), tmp_path)
    assert text in str(error.value)
    assert error.value.exit_code == 1


def test_a_command_that_hangs(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands.make("sbatch", "sleep 60")
    monkeypatch.setattr(client, "_SUBMIT_TIMEOUT", 0.2)
    with pytest.raises(ExternalError, match="may have worked anyway"):
        Slurm().submit(("sbatch", "job.sh"), tmp_path)


def test_sbatch_that_cannot_be_run(commands: Commands, tmp_path: Path) -> None:
    if os.getuid() == 0:
        (commands.folder / "sbatch").mkdir()  # root may run any file with an x bit, but no folder
    else:
        (commands.folder / "sbatch").write_text("")
    with pytest.raises(ExternalError, match="could not be started"):
        Slurm().submit(("sbatch", "job.sh"), tmp_path)


def test_job_by_scontrol(commands: Commands) -> None:
    commands.sample("scontrol", "scontrol-requeued")
    view = Slurm().job(JobId("42", "alpha"))
    assert view and (view.word, view.restarts, view.source) == ("PENDING", 1, "scontrol")
    assert commands.calls == [["scontrol", "-M", "alpha", "--oneliner", "show", "job", "42"]]


def test_forgotten_by_the_controller_known_to_accounting(commands: Commands) -> None:
    commands.make("scontrol", FORGOTTEN)
    commands.sample("sacct", "sacct-requeued")
    view = Slurm().job(JobId("42"))
    assert view and (view.word, view.source) == ("TIMEOUT", "sacct")


@pytest.mark.parametrize("sacct", [NO_ACCOUNTING, "exit 0", None])
def test_forgotten(commands: Commands, sacct: "str | None") -> None:
    commands.make("scontrol", FORGOTTEN)
    if sacct:
        commands.make("sacct", sacct)
    assert Slurm().job(JobId("42")) is None


def test_not_reachable_is_not_forgotten(commands: Commands) -> None:
    commands.make("scontrol", AWAY)
    commands.sample("sacct", "sacct-completed")
    with pytest.raises(ExternalError, match="Unable to contact slurm controller"):
        Slurm().job(JobId("42"))
    commands.make("scontrol", FORGOTTEN)
    commands.make("sacct", 'echo "sacct: error: Problem talking to the database: Connection refused" >&2; exit 1')
    with pytest.raises(ExternalError, match="Connection refused"):
        Slurm().job(JobId("42"))


def test_squeue_where_scontrol_is_not_allowed(commands: Commands) -> None:
    line = f"{'42':<24}{'RUNNING':<20}{'1':<12}{'N/A':<24}{'N/A':<24}{'UNLIMITED':<20}{'None':<160}node1"
    commands.make("scontrol", 'echo "scontrol is for administrators" >&2; exit 1')
    commands.make("squeue", f'echo "{line}"')
    view = Slurm().job(JobId("42"))
    assert view and (view.word, view.restarts, view.nodes, view.source) == ("RUNNING", 1, "node1", "squeue")


def test_no_slurm_at_all(commands: Commands) -> None:
    with pytest.raises(UserError, match="login node"):
        Slurm().job(JobId("42"))


def test_many_jobs_take_two_commands_a_cluster(commands: Commands) -> None:
    line = f"{'41':<24}{'RUNNING':<20}{'0':<12}{'N/A':<24}{'N/A':<24}{'UNLIMITED':<20}{'None':<160}node1"
    commands.make("squeue", f'[[ "$*" != *-M* ]] || exit 0; echo "{line}"')
    commands.sample("sacct", "sacct-requeued")
    jobs = [JobId("41"), JobId("42"), JobId("43", "beta"), JobId("99"), JobId("41")]
    views = Slurm().jobs(jobs)
    assert {str(job): view.word for job, view in views.items()} == {
        "41": "RUNNING",
        "42": "TIMEOUT",
        "43;beta": "OUT_OF_MEMORY",
    }
    assert [call[0] for call in commands.calls] == ["squeue", "sacct", "squeue", "sacct"]
    assert "--jobs=41,42,99" in commands.calls[0]
    assert "--jobs=42,99" in commands.calls[1]
    assert commands.calls[2][1:3] == ["-M", "beta"]


def test_squeue_that_fails_is_shown(commands: Commands) -> None:
    commands.make("squeue", 'echo "squeue: error: Invalid user: x" >&2; exit 1')
    with pytest.raises(ExternalError, match="Invalid user: x"):
        Slurm().jobs([JobId("41")])


def test_cancel(commands: Commands) -> None:
    commands.make("scancel", "exit 0")
    assert Slurm().cancel(JobId("42", "alpha")) is True
    assert commands.calls == [["scancel", "--verbose", "-M", "alpha", "42"]]
    for text in ("Invalid job id specified", "Job/step already completing or completed"):
        commands.make("scancel", f'echo "scancel: error: Kill job error on job id 42: {text}" >&2; exit 0')
        assert Slurm().cancel(JobId("42")) is False
    denied = 'echo "scancel: error: Kill job error on job id 42: Access/permission denied" >&2; exit 1'
    commands.make("scancel", denied)
    with pytest.raises(ExternalError, match="permission denied"):
        Slurm().cancel(JobId("42"))


def test_requeue(commands: Commands) -> None:
    commands.make("scontrol", "exit 0")
    Slurm().requeue(JobId("42"))
    assert commands.calls == [["scontrol", "requeue", "42"]]
    commands.make("scontrol", 'echo "Requested operation is presently disabled for job 42" >&2; exit 1')
    with pytest.raises(ExternalError, match="presently disabled"):
        Slurm().requeue(JobId("42"))


def test_start_now(commands: Commands) -> None:
    seen = commands.folder / "argv"
    commands.make("scontrol", f'printf "%s\\n" "$@" > {seen}')
    Slurm().start_now(JobId("42", "alpha"))
    assert seen.read_text().split() == ["-M", "alpha", "update", "JobId=42", "StartTime=now"]
    commands.make("scontrol", 'echo "slurm_update error: Access/permission denied" >&2; exit 1')
    with pytest.raises(ExternalError, match="Access/permission denied"):
        Slurm().start_now(JobId("42"))
