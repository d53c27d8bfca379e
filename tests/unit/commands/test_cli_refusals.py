"""Bad input gets a clear error, exit code 2, and changes nothing."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.helpers import SIF, Desk, Result

Cli = Callable[..., Result]

SBATCH = """#!/bin/bash
printf '%s\\0' "$@" > "$HOME/sbatch.argv"
echo 4711
"""

JOB = """\
name: gpt
site: gpus
container: {image: image.sif}
train:
  task: lm
  data: {path: books}
"""


@pytest.fixture
def ready(desk: Desk) -> Desk:
    """All that JOB needs is there."""
    desk.write("job.yaml", JOB)
    desk.write("image.sif", SIF)
    desk.write("books/a.txt", "text")
    desk.program("sbatch", SBATCH)
    return desk


@pytest.fixture
def refused(ready: Desk, cli: Cli) -> Callable[..., str]:
    """The message of a submission that is refused, and that changed nothing but the list of runs: a run is in it before
    sbatch is called.
    """

    def tree() -> dict[str, tuple[int, int, bytes]]:
        return {path: facts for path, facts in ready.tree(times=False).items() if not path.startswith("home/.local")}

    def run(*arguments: str, **variables: str) -> str:
        before = tree()
        done = cli("submit", *(arguments or ("job.yaml",)), **variables)
        assert (done.code, done.out) == (2, ""), done
        assert done.err.strip()
        assert "Traceback" not in done.err
        assert tree() == before
        return done.err

    return run


def test_the_job_itself_is_good(ready: Desk, cli: Cli) -> None:
    done = cli("submit", "job.yaml")
    assert done.code == 0, done.err


def test_an_unknown_key(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("job.yaml", JOB + "resources: {node: 2}\n")
    assert "job.yaml:7: resources.node: unknown key\n  -> did you mean resources.nodes?" in refused()


def test_a_wrong_type(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("job.yaml", JOB + "resources: {nodes: two}\n")
    assert "job.yaml:7: resources.nodes: must be a whole number, not 'two'" in refused()


def test_a_missing_image(refused: Callable[..., str]) -> None:
    assert "the image" in (shown := refused("job.yaml", "--image", "no.sif")) and "no.sif does not exist" in shown


def test_an_image_for_other_processors(ready: Desk, refused: Callable[..., str]) -> None:
    sif = "#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0" + "01\0" + "02\0"
    ready.write("image.sif", sif)
    (ready.config / "sites/mine.yaml").write_text("name: mine\ntitle: Mine\nbases: [gpus]\narchitecture: aarch64\n")
    shown = refused("job.yaml", "--site", "mine")
    assert "image.sif is for amd64, but the nodes of site mine are aarch64" in shown


def test_an_empty_image(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("image.sif", "")
    assert "image.sif is not a SIF image" in refused()
    ready.write("image.sif", "#!/usr/bin/env python3\nprint('a script given by mistake')\n")
    assert "image.sif is not a SIF image" in refused()
    assert "is a folder, but not a root file system" in refused("job.yaml", "--image", ".")


def test_a_missing_dataset(refused: Callable[..., str]) -> None:
    assert "/nothing does not exist" in refused("job.yaml", "--set", "train.data.path=/nothing")
    shown = refused("job.yaml", "--set", "train.data.path=/data/x", "--set", "container.binds=[./books:/data]")
    assert "the dataset /data/x (" in shown and "books/x on this machine) does not exist" in shown


def test_absent_weights_to_start_from(ready: Desk, refused: Callable[..., str], cli: Cli) -> None:
    shown = refused("job.yaml", "--set", "train.init_from=nowhere")
    assert "train.init_from" in shown and "/nowhere does not exist" in shown and "bind source" not in shown
    options = ("--set", "container.binds=[./books:/data]", "--set")
    assert "books/w on this machine) does not exist" in refused("job.yaml", *options, "train.init_from=/data/w")
    assert cli("submit", "job.yaml", *options, "train.init_from=/data/a.txt").code == 0


def test_check_names_what_is_absent(ready: Desk, cli: Cli) -> None:
    done = cli("check", "job.yaml", "--set", "train.data.path=/nothing")
    assert done.code == 1 and "error: the dataset /nothing does not exist [submit-refuses]" in done.out
    assert cli("check", "job.yaml").code == 0


def test_an_absent_bind_source(refused: Callable[..., str]) -> None:
    assert "the bind source /nothing does not exist" in refused("job.yaml", "--set", "container.binds=[/nothing:/x]")


def test_a_missing_script(refused: Callable[..., str]) -> None:
    assert "nothing.py does not exist" in refused("nothing.py", "--site", "cores")


def test_too_many_gpus(refused: Callable[..., str]) -> None:
    assert "5 GPUs per node are more than the 4" in refused("job.yaml", "--gpus-per-node", "5")


def test_too_much_time(refused: Callable[..., str]) -> None:
    assert "--time: resources.time: 2-00:00:00 is above the limit 1-00:00:00" in refused("job.yaml", "--time", "2d")


def test_an_unknown_site(refused: Callable[..., str]) -> None:
    assert "--site: unknown site 'gpu'\n  -> did you mean gpus?" in refused("job.yaml", "--site", "gpu")


@pytest.mark.parametrize("name", ["a\nb", "a'b", 'a"b', "$(touch x)", "a;b", "-a", "a b", "", "../a", "a/b", "ä"])
def test_a_name_that_is_none(refused: Callable[..., str], name: str) -> None:
    assert "name" in refused("job.yaml", f"--name={name}")


def test_a_job_file_that_is_empty(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("job.yaml")
    assert "job.yaml: is empty" in refused()


def test_a_job_file_that_is_not_there(refused: Callable[..., str]) -> None:
    assert "no.yaml: no such file" in refused("no.yaml")


def test_a_job_file_that_is_a_directory(ready: Desk, refused: Callable[..., str]) -> None:
    (ready.project / "dir.yaml").mkdir()
    assert "is a directory" in refused("dir.yaml")
    assert "is a directory" in refused("books")


def test_a_job_file_that_is_not_utf8(ready: Desk, refused: Callable[..., str]) -> None:
    (ready.project / "job.yaml").write_bytes(b"name: gpt\n# \xff\xfe\n")
    assert "job.yaml:2: is not UTF-8" in refused()


def test_a_job_file_of_a_hundred_megabytes(ready: Desk, cli: Cli) -> None:
    os.truncate(ready.project / "job.yaml", 100_000_000)
    done = cli("submit", "job.yaml")
    assert done.code == 2
    assert "is larger than 1000 kB" in done.err


def test_a_job_that_is_neither(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("job.txt", JOB)
    assert "is neither a job file (.yaml) nor a script (.py, .sh)" in refused("job.txt")


def test_a_batch_script_in_the_place_of_a_program(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("run.sh", "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
    assert "run.sh: is a batch script (line 2)" in (shown := refused("run.sh", "--site", "cores"))
    assert "slurmddp import" in shown


def test_a_module_that_its_package_has_not(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("pkg/__init__.py")
    assert "has no module pkg.trian that Python can start" in refused("-m", "pkg.trian", "--site", "cores")
    assert "needs a __main__.py" in refused("-m", "pkg", "--site", "cores")


def test_no_job(refused: Callable[..., str]) -> None:
    assert "no job file or script given" in refused("--site", "gpus")


def test_no_sbatch(ready: Desk, refused: Callable[..., str]) -> None:
    (ready.bin / "sbatch").unlink()
    assert "sbatch is not in PATH" in refused()


def test_sbatch_that_refuses_is_shown_whole(ready: Desk, refused: Callable[..., str]) -> None:
    message = "sbatch: error: Batch job submission failed: Invalid account\nsbatch: error: ask help@site.org"
    ready.program("sbatch", f"#!/bin/bash\necho '{message}' >&2\nexit 1\n")
    assert message in refused()


def test_nothing_of_a_refused_submission_stays_in_folders_that_were_there(
    ready: Desk, refused: Callable[..., str]
) -> None:
    ready.program("sbatch", "#!/bin/bash\nexit 1\n")
    (ready.project / "mine" / "runs").mkdir(parents=True)
    refused("job.yaml", "--set", "paths.runs=mine/runs")
    refused("job.yaml", "--set", "paths.runs=new/a/b")


def test_an_answer_that_nobody_understands_keeps_the_run_folder(ready: Desk, cli: Cli) -> None:
    ready.program("sbatch", "#!/bin/bash\necho 'all is well'\n")
    done = cli("submit", "job.yaml")
    assert done.code == 1
    assert "all is well" in done.err
    assert len(list((ready.project / "runs").iterdir())) == 1


def test_no_permission_for_the_run_folder(ready: Desk) -> None:
    """Root may write anywhere but on a read-only mount, so the test makes one where it is root."""
    runs = ready.project / "runs"
    runs.mkdir()
    command = [sys.executable, "-m", "slurmddp", "submit", "job.yaml"]
    if os.getuid() == 0:
        mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" || exit 99; exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", mount, str(runs), *command]
    else:
        runs.chmod(0o555)
    before = ready.tree()
    done = subprocess.run(
        command, cwd=ready.project, env=ready.environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 99 or "unshare" in done.stderr:
        pytest.skip("root cannot make a read-only mount here: " + done.stderr.strip())
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr or "Permission denied" in done.stderr
    assert str(runs) in done.stderr
    assert ready.tree() == before


def test_a_runs_folder_that_is_a_file(ready: Desk, refused: Callable[..., str]) -> None:
    ready.write("runs", "a file")
    assert f"{ready.project}/runs: Not a directory" in refused()


@pytest.mark.parametrize("folder", ["a:b", "a,b", 'a"b', "a\\b", "a\nb"])
def test_a_runs_folder_that_nothing_can_carry(refused: Callable[..., str], folder: str) -> None:
    assert refused("job.yaml", "--set", f"paths.runs={folder}")


@pytest.mark.parametrize("option", ["train.steps", "=x", "", "train.steps=x", ".=1"])
def test_options_that_are_none(refused: Callable[..., str], option: str) -> None:
    assert refused("job.yaml", "--set", option)


def test_all_that_is_missing_is_told_at_once(refused: Callable[..., str]) -> None:
    shown = refused("job.yaml", "--image", "no.sif", "--set", "train.data.path=/nothing")
    assert "no.sif does not exist" in shown and "/nothing does not exist" in shown


@pytest.mark.parametrize("run", ["last", "nothing", "../x", "-1"])
def test_a_run_to_resume_that_is_none(refused: Callable[..., str], run: str) -> None:
    assert refused("job.yaml", f"--resume={run}")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("SLURM_VERSION = 24.11.5\n", "requeue: expedite needs Slurm 25.11, and this cluster has 24.11.5"),
        ("SLURM_VERSION = 26.05.2\nSlurmctldParameters = idle_on_node_suspend\n", "have no enable_expedited_requeue"),
        ("SLURM_VERSION = 26.05.2\nSlurmctldParameters = (null)\n", "have no enable_expedited_requeue"),
        ("SLURM_VERSION = 25.11.0\nSlurmctldParameters = enable_configless,enable_expedited_requeue\n", ""),
        ("", ""),  # unknown: sbatch will say it
    ],
)
def test_an_expedited_requeue_that_slurm_does_not_know(ready: Desk, cli: Cli, config: str, message: str) -> None:
    profile = ready.config / "sites" / "gpus.yaml"
    profile.write_text(profile.read_text() + "requeue: expedite\n")
    ready.program("scontrol", f"#!/bin/sh\n[ \"$2\" = config ] && cat <<'END'\n{config}END\n")
    done = cli("submit", "job.yaml")
    if not message:
        assert done.code == 0 and (ready.home / "sbatch.argv").exists(), done.err
        return
    assert done.code == 2 and message in done.err and "-> write `requeue: allowed` in the profile" in done.err
    assert not (ready.home / "sbatch.argv").exists()
