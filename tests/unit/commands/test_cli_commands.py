"""The commands as a user meets them: what they print, what they write, and what they leave alone."""

import json
import os
import pickle
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.run import create
from slurmddp.sites.catalogue import Catalogue
from tests.checkpoints import make_checkpoint
from tests.helpers import ROOT, SHELL, SIF, Desk, Result

Cli = Callable[..., Result]

SBATCH = """#!/bin/bash
printf '%s\\0' "$@" > "$HOME/sbatch.argv"
env > "$HOME/sbatch.env"
{answer}
"""

JOB = """\
name: gpt
site: gpus
container: {image: image.sif}
resources: {nodes: 2, time: 2h}
train:
  task: lm
  data: {path: books}
  batch: {global: 512, micro: 16}
"""

#: What these tests are rightly warned of: they lie below /tmp.
OF_TESTS = "in a folder that differs on each node"


@pytest.fixture
def ready(desk: Desk) -> Desk:
    desk.write("job.yaml", JOB)
    desk.write("image.sif", SIF)
    desk.write("books/a.txt", "text")
    desk.write("train.py", "print('hello')\n")
    desk.program("sbatch", SBATCH.format(answer="echo 4711"))
    return desk


def only_run(desk: Desk) -> Path:
    runs = list((desk.project / "runs").iterdir())
    assert len(runs) == 1
    return runs[0]


# --- submit


def test_a_submission(ready: Desk, cli: Cli) -> None:
    done = cli("submit", "job.yaml")
    assert done.code == 0, done.err
    run = only_run(ready)
    assert done.out.splitlines() == [f"run     {run.name}", "job     4711", f"log     {run}/logs/job.log"]
    assert {path.name for path in run.iterdir()} >= {
        "job.json", "job.yaml", "site.yaml", "job.sh", "node.sh", "manifest.json", "submission.json", "code", "logs",
    }  # fmt: skip
    assert zipfile.Path(run / "code/slurmddp.zip", "slurmddp/runtime/train.py").is_file()
    manifest = json.loads((run / "manifest.json").read_text())
    assert (manifest["run"], manifest["command"]) == (run.name, ["slurmddp", "submit", "job.yaml"])
    assert manifest["origins"]["train.batch.global"].endswith(": job.yaml:8")
    argv = (ready.home / "sbatch.argv").read_bytes().decode().split("\0")[:-1]
    assert argv == ["--parsable", f"--output={run}/logs/job.log", f"{run}/job.sh", str(run)]


#: Runs a command with a small file system of its own in a folder.
MOUNTED = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'


@pytest.mark.skipif(os.getuid() != 0, reason="mounting a file system needs root")
def test_a_disk_that_fills_up_during_the_submission_hides_no_job_id(ready: Desk) -> None:
    runs = ready.project / "runs"
    runs.mkdir()
    ready.program("sbatch", f"#!/bin/bash\nhead -c 9M /dev/zero >{runs}/fill 2>/dev/null\necho '4711;far'\n")
    words = [
        "unshare",
        "--mount",
        "sh",
        "-c",
        MOUNTED,
        str(runs),
        sys.executable,
        "-m",
        "slurmddp",
        "submit",
        "job.yaml",
    ]
    done = subprocess.run(words, cwd=ready.project, env=ready.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "job     4711;far" in done.stdout.splitlines(), done.stdout + done.stderr
    assert "warning: job 4711;far was submitted, but " in done.stderr
    assert "submission.json cannot be written: No space left on device" in done.stderr


def test_the_dry_run_shows_exactly_the_scripts_that_are_submitted(ready: Desk, cli: Cli) -> None:
    dry = cli("submit", "job.yaml", "--dry-run")
    assert dry.code == 0
    assert cli("submit", "job.yaml").code == 0
    run = only_run(ready)
    shown = dry.out.replace("RUN_ID (RUN_ID: gpt-DATE-TIME-XXXX)", "RUN_ID").replace("RUN_ID", run.name)
    job, node = ((run / name).read_text() for name in ("job.sh", "node.sh"))
    assert f"\n\n=== job.sh\n{job}\n=== node.sh\n{node}\nfunctions " in shown
    command = json.loads((run / "submission.json").read_text())["command"]
    manifest = json.loads((run / "manifest.json").read_text())
    facts = dict(re.findall("^([a-z]+(?: [a-z]+)?) +(.+)$", shown, re.MULTILINE))
    assert facts | {"site": "gpus (job.yaml:2)", "nodes": "2", "ranks": "8 = 4 per node x 2"} == facts
    assert facts["batch"] == "512 = 16 (micro batch) x 4 (accumulation) x 8 (ranks)"
    assert facts["time"] == "02:00:00; ranks save 120 s before"
    assert facts["image"] == f"{ready.project}/image.sif"
    assert facts["cost"].startswith("up to 16 GPU-hours")
    assert (facts["writes"], facts["runs"]) == (str(run), " ".join(command))
    assert facts["functions"] == f"{run}/code/slurmddp.zip, from {SHELL}"
    assert facts["code hash"] == manifest["code_hash"]


def test_a_full_dry_run_shows_the_functions_and_the_payloads_of_alerts(ready: Desk, cli: Cli) -> None:
    ready.write("job.yaml", JOB + "alerts: [{to: json, url_env: HOOK}]\n")
    short = cli("submit", "job.yaml", "--dry-run", HOOK="https://x.org/y")
    assert short.code == 0 and "--full prints the functions and the payloads of alerts" in short.out, short.err
    assert "=== payloads/json" not in short.out and "wait_for_child()" not in short.out
    full = cli("submit", "job.yaml", "--dry-run", "--full", HOOK="https://x.org/y")
    assert cli("submit", "job.yaml", HOOK="https://x.org/y").code == 0
    run = only_run(ready)
    inside = {f"code/slurmddp.zip/slurmddp/shell/{path.name}": path.read_text() for path in SHELL.glob("[!p]*.sh")}
    files = {name: (run / name).read_text() for name in ("payloads/json", "code/python.sh")} | inside
    assert len(files) == 4
    for name, text in files.items():
        assert f"\n\n=== {name}\n{text}\n" in full.out, name
    refused = cli("submit", "job.yaml", "--full", HOOK="https://x.org/y")
    assert refused.code == 2 and "--full" in refused.err


def test_the_code_hash_of_a_dry_run_is_that_of_the_run(ready: Desk, cli: Cli) -> None:
    for name, text in (("src/a.py", "a"), ("src/__pycache__/a.pyc", "b"), ("ä.txt", "c"), ("notes", "d")):
        ready.write(name, text)
    (ready.project / "link").symlink_to("src")
    (ready.project / "file").symlink_to("notes")
    job = ("train.py", "--site", "cores", "--set", f"train.project={ready.project}")

    def planned() -> str:
        found: str = json.loads(cli("submit", *job, "--dry-run", "--json").out)["machinery"]["code_hash"]
        return found

    first = planned()
    assert cli("submit", *job).code == 0
    run = only_run(ready)
    assert (run / "code/project/link").is_symlink()
    assert first == json.loads((run / "manifest.json").read_text())["code_hash"]
    ready.write("src/a.py", "changed")
    assert planned() != first


REFUSED: dict[str, tuple[str, ...]] = {
    "no image": ("job.yaml", "--image", "absent.sif"),
    "no SIF": ("job.yaml", "--image", "train.py"),
    "two things": ("job.yaml", "--image", "absent.sif", "--set", "train.data.path=absent"),
    "unset variable": ("job.yaml", "--image", "$WORK/image.sif"),
    "no address": ("job.yaml", "--set", "alerts=[{to: slack}]"),
    "no secret": ("job.yaml", "--set", "environment_from=[HF_TOKEN]"),
    "an address and a secret": ("job.yaml", "--set", "alerts=[{to: slack}]", "--set", "environment_from=[HF_TOKEN]"),
    "a secret in the job": ("train.py", "--site", "cores", "--set", "environment_from=[KEY]", "--", "0123456789abcdef"),
    "no folder": ("job.yaml", "--set", "paths.runs=train.py/runs"),
    "a file for a folder": ("job.yaml", "--set", "paths.runs=train.py"),
    "too large": ("train.py", "--site", "cores", "--set", "snapshot_limit=1M"),
    "no script": ("absent.py", "--site", "cores"),
    "an unknown key": ("job.yaml", "--set", "train.stepz=1"),
    "a job that cannot be": ("job.yaml", "--nodes", "65"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_dry_run_refuses_what_a_submission_refuses(ready: Desk, cli: Cli, why: str) -> None:
    (ready.project / "weights").write_bytes(bytes(2**21))
    before = ready.tree(times=False)
    dry = cli("submit", *REFUSED[why], "--dry-run", KEY="0123456789abcdef", PATH=f"{ready.bin}:/usr/bin:/bin")
    assert ready.tree(times=False) == before
    done = cli("submit", *REFUSED[why], KEY="0123456789abcdef", PATH=f"{ready.bin}:/usr/bin:/bin")
    assert ready.tree(times=False) == before
    message = done.err[done.err.index("slurmddp: ") :]
    assert (dry.code, done.code) == (2, 2)
    assert dry.err[dry.err.index("slurmddp: ") :] == message
    assert "0123456789abcdef" not in dry.out and "===" not in dry.out


def test_a_dry_run_touches_nothing_and_shows_the_scripts_without_slurm(ready: Desk) -> None:
    (ready.bin / "sbatch").unlink()
    (ready.project / "image.sif").unlink()
    job = ready.write("job.yaml", JOB + "environment: {A: b}\n")
    text = job.read_text().replace("image: image.sif", "image: image.sif, binds: [$WORK/x:/x, /nothing:/y]")
    job.write_text(text.replace("path: books", "path: /no/books"))
    before = ready.tree()
    done = ready.command("submit", "job.yaml", "--dry-run", XDG_STATE_HOME=str(ready.root / "state"))
    assert done.code == 0, done.err
    assert ready.tree() == before
    _, _, unchecked = done.err.partition("not checked, because this machine has no sbatch")
    for refusal in (
        "image.sif does not exist",
        "/no/books does not exist",
        "/nothing does not exist",
        "sbatch is not",
        "$WORK",
    ):
        assert refusal in unchecked, refusal
    assert "\n=== job.sh\n#!/bin/bash\n" in done.out and "\n=== node.sh\n#!/bin/bash\n" in done.out


@pytest.mark.parametrize(
    ("answer", "job", "cluster"),
    [
        ("echo 4711", "4711", None),
        ("echo '4711;gpu'", "4711", "gpu"),
        ("echo; echo '*** Welcome ***'; echo 'budget: 12'; echo '4711;gpu'", "4711", "gpu"),
        ("echo 'Submitted batch job 4711 on cluster gpu'", "4711", "gpu"),
        ("echo 'sbatch: lua: account set' >&2; echo 4711", "4711", None),
    ],
)
def test_what_wrappers_of_sbatch_answer(ready: Desk, cli: Cli, answer: str, job: str, cluster: str | None) -> None:
    ready.program("sbatch", SBATCH.format(answer=answer))
    done = cli("submit", "job.yaml", "--json")
    assert done.code == 0, done.err
    shown = json.loads(done.out)
    assert (shown["job_id"], shown["cluster"]) == (job, cluster)
    assert set(shown) == {
        "run_id", "job_id", "cluster", "run_folder", "log", "site", "scheduler", "gpu_hours", "warnings",
        "next",
    }  # fmt: skip
    assert Path(shown["run_folder"]) == only_run(ready)
    assert done.out.count("\n") == 1


def test_a_dry_run_as_json(ready: Desk, cli: Cli) -> None:
    shown = json.loads(cli("submit", "job.yaml", "--dry-run", "--json").out)
    assert shown["gpu_hours"] == 16
    assert (shown["nodes"], shown["ranks"]) == ({"min": 2, "max": 2, "spares": 0}, {"total": 8, "per_node": 4})
    assert (shown["batch"], shown["time"]) == ({"global": 512, "micro": 16, "accumulation": 4, "even": True}, 7200)
    assert shown["command"][:2] == ["sbatch", "--parsable"]
    assert shown["refusal"] is None and not [each for each in shown["warnings"] if OF_TESTS not in each]
    page = (ROOT / "docs/files.md").read_text().split("## submit --dry-run --json\n")[1].split("\n## ")[0]
    groups = ("nodes", "ranks", "batch", "machinery")
    keys = {key for key in shown if key not in groups} | {f"{group}.{key}" for group in groups for key in shown[group]}
    assert set(re.findall("^\\| `([a-z_.]+)` ", page, re.MULTILINE)) == keys
    assert cli("submit", "job.yaml").code == 0
    run = only_run(ready)
    assert shown["scripts"] == {name: (run / name).read_text() for name in ("job.sh", "node.sh")}
    inside = zipfile.Path(run / "code/slurmddp.zip", "slurmddp/shell/").iterdir()
    files = {f"code/slurmddp.zip/slurmddp/shell/{path.name}": path.read_text() for path in inside}
    files["code/python.sh"] = (run / "code/python.sh").read_text()
    assert shown["machinery"]["files"] == files
    (ready.project / "image.sif").unlink()
    refused = cli("submit", "job.yaml", "--dry-run", "--json")
    assert refused.code == 2 and f"slurmddp: {json.loads(refused.out)['refusal']}\n" in refused.err
    assert json.loads(refused.out)["scripts"]["job.sh"] == shown["scripts"]["job.sh"]


def test_sbatch_does_not_inherit_an_outer_job(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml", SLURM_JOB_ID="1", SBATCH_ACCOUNT="x", PMIX_RANK="0", SLURM_CONF="/etc/s.conf")
    names = {line.split("=")[0] for line in (ready.home / "sbatch.env").read_text().splitlines()}
    assert not names & {"SLURM_JOB_ID", "SBATCH_ACCOUNT", "PMIX_RANK"}
    assert "SLURM_CONF" in names


def test_a_script_without_a_job_file(ready: Desk, cli: Cli) -> None:
    arguments = (
        "train.py",
        "--site",
        "gpus",
        "--image",
        "image.sif",
        "--nodes",
        "4",
        "--",
        "--lr",
        "3e-4",
        "it's $HOME",
        "--help",
    )
    dry = cli("submit", "--dry-run", *arguments)
    assert "#SBATCH --nodes=4\n" in dry.out
    assert "#SBATCH --job-name=project-train\n" in dry.out
    done = cli("submit", *arguments)
    assert done.code == 0, done.err
    run = only_run(ready)
    assert (run / "code" / "project" / "train.py").read_text() == "print('hello')\n"
    node = (run / "node.sh").read_text()
    assert '  --lr\n  3e-4\n  "it\'s \\$HOME"\n  --help\n' in node
    assert not (run / "job.json").exists()


def test_a_module_is_started_from_the_copy_of_its_folder(ready: Desk, cli: Cli) -> None:
    ready.write("pkg/train.py", "print('hello')\n")
    arguments = ("-m", "pkg.train", "--site", "cores", "fast", "--", "--lr", "3e-4")
    dry = cli("submit", "--dry-run", *arguments)
    assert "program   torchrun -m pkg.train fast --lr 3e-4\ndirectory " in dry.out, dry.err
    planned = cli("check", *arguments).out
    assert "program             torchrun -m pkg.train fast --lr 3e-4\ndirectory           " in planned
    assert cli("submit", *arguments).code == 0
    run = only_run(ready)
    node = (run / "node.sh").read_text()
    assert "  -m slurmddp.runtime.begin -m pkg.train\n  fast\n  --lr\n  3e-4\n)" in node
    assert 'PYTHONPATH="$code":"$run"/code/project' in node and run.name.startswith("pkg.train-")
    ready.write("pkg/train.py", "print('edited since')\n")
    again = Path(json.loads(cli("rerun", "--json").out)["run_folder"])
    for each in (run, again):
        assert (each / "code/project/pkg/train.py").read_text() == "print('hello')\n"


def test_a_module_that_is_not_here_must_be_in_the_image(ready: Desk, cli: Cli) -> None:
    assert cli("submit", "-m", "lightning.train", "--site", "cores").code == 0
    run = only_run(ready)
    assert not (run / "code/project").exists()
    assert 'PYTHONPATH="$code"\n' in (run / "node.sh").read_text()


def test_a_bash_script_is_the_program(ready: Desk, cli: Cli) -> None:
    ready.write("run.sh", 'exec python "${0%/*}/train.py" "$@"\n')
    done = cli("submit", "run.sh", "--site", "cores", "--", "--lr", "3e-4")
    assert done.code == 0, done.err
    run = only_run(ready)
    assert '  -m slurmddp.runtime.begin bash "$run"/code/project/run.sh\n  --lr\n' in (run / "node.sh").read_text()
    assert (run / "code/project/train.py").is_file() and "own_script=yes" in (run / "job.sh").read_text()
    lines = cli("check", "run.sh", "--site", "cores", "--nodes", "1", "--per-node", "--head", "h").out.splitlines()
    assert lines[-1].endswith(f"-m slurmddp.runtime.begin bash {ready.project}/run.sh")


def test_a_run_is_not_changed_by_a_later_edit(ready: Desk, cli: Cli) -> None:
    cli("submit", "train.py", "--site", "cores")
    ready.write("train.py", "print('later')\n")
    assert (only_run(ready) / "code" / "project" / "train.py").read_text() == "print('hello')\n"
    assert str(ready.project / "train.py") not in (only_run(ready) / "node.sh").read_text()


@pytest.mark.parametrize("name", ["a b.py", "$x.py", "ä'\".py", "-x.py", ".hidden.py", "..py"])
def test_scripts_with_names_that_are_unusual(ready: Desk, cli: Cli, name: str) -> None:
    ready.write(name, "x")
    done = (
        cli("submit", "--site", "cores", "--", name) if name.startswith("-") else cli("submit", name, "--site", "cores")
    )
    if done.code == 0:
        assert (only_run(ready) / "code" / "project" / name).read_text() == "x"
    else:
        assert done.code == 2
        assert not (ready.project / "runs").exists()


def test_a_snapshot_that_is_too_large_names_what_is(ready: Desk, cli: Cli) -> None:
    with (ready.project / "weights.bin").open("wb") as file:
        file.truncate(80 * 2**20)
    done = cli("submit", "train.py", "--site", "cores")
    assert done.code == 2
    assert "weights.bin" in done.err
    assert not (ready.project / "runs").exists()
    assert cli("submit", "train.py", "--site", "cores", "--set", "snapshot=false").code == 0


def test_the_resolved_job_can_be_submitted_as_it_stands(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml", "--set", "environment.A=it's", "--debug")
    run = only_run(ready)
    again = cli("submit", str(run / "job.yaml"), "--dry-run", "--json")
    assert json.loads(again.out)["scripts"]["job.sh"] == (run / "job.sh").read_text()


# --- key pairs


@pytest.mark.parametrize(("asked", "code"), [("null", 0), ("true", 2)])
def test_without_openssl_a_run_has_no_tls_and_says_so_or_is_refused(
    ready: Desk, cli: Cli, monkeypatch: pytest.MonkeyPatch, asked: str, code: int
) -> None:
    monkeypatch.setattr(create, "_PAIR", ("absent-openssl",))
    ready.program("sbatch", "#!/bin/bash\necho 4711\n")
    done = cli("submit", "job.yaml", "--json", "--set", f"network.store_tls={asked}")
    why = "this machine has no openssl to make a key pair with"
    assert done.code == code, done.err
    if code:
        assert f"network.store_tls is true, but {why}" in done.err and "4711" not in done.out
        return
    answer = json.loads(done.out)
    assert [text for text in answer["warnings"] if why in text] != []
    assert (Path(answer["run_folder"]) / "rendezvous.pem").read_text() == why


@pytest.mark.parametrize("option", ["network.store_tls=false", "resources.nodes=1", "launch.mode=srun"])
def test_a_run_without_use_for_a_key_pair_has_none(ready: Desk, cli: Cli, option: str) -> None:
    ready.program("sbatch", "#!/bin/bash\necho 4711\n")
    what = ("train.py", "--site", "gpus", "--image", "image.sif", "--nodes", "2") if "srun" in option else ("job.yaml",)
    done = cli("submit", *what, "--json", "--set", option)
    assert done.code == 0, done.err
    assert not (Path(json.loads(done.out)["run_folder"]) / "rendezvous.pem").exists()


# --- render, plan, explain, init, sites


def test_render_writes_all_files(ready: Desk, cli: Cli) -> None:
    done = cli("check", "job.yaml", "--write", "out", "--set", "container.base=25.04")
    assert done.code == 0, done.err
    names = {"job.sh", "node.sh", "job.yaml", "job.json", "site.yaml", "image.def"}
    # The code and the key beside them are for clusters without Slurm (`check --per-node`).
    written = {*names, "code", "rendezvous.key", "rendezvous.pem", "logs", "markers", "checkpoints"}
    assert {path.name for path in (ready.project / "out").iterdir()} == written
    key = ready.project / "out/rendezvous.key"
    assert (ready.project / "out/rendezvous.pem").stat().st_mode & 0o777 == 0o600
    assert key.stat().st_mode & 0o777 == 0o600 and key.read_text().strip() not in done.out
    assert {path.name for path in (ready.project / "out/code").iterdir()} == {"python.sh", "slurmddp.zip"}
    assert {line.removeprefix("out/") for line in done.out.splitlines()} == {*names, "code/slurmddp.zip"}
    shown = json.loads(cli("submit", "job.yaml", "--dry-run", "--json").out)
    assert {name: (ready.project / "out" / name).read_text() for name in shown["scripts"]} == shown["scripts"]
    assert cli("check", "job.yaml", "--write", "out", "--set", "container.base=25.04").code == 0
    before = ready.tree(times=False)
    again = cli("check", "job.yaml", "--write", "out", "--nodes", "4")
    assert (again.code, ready.tree(times=False)) == (2, before)
    assert "exists with different content" in again.err


def test_render_copies_the_project_and_refuses_code_that_differs(ready: Desk, cli: Cli) -> None:
    command = ("check", "train.py", "--site", "cores", "--write", "out")
    for _ in range(2):
        done = cli(*command)
        assert done.code == 0, done.err
        assert (ready.project / "out/code/project/train.py").read_text() == "print('hello')\n"
        assert not (ready.project / "out/code/project/out").exists()
    archive = ready.project / "out/code/slurmddp.zip"
    content = archive.read_bytes()
    archive.write_bytes(content + b"of an older version")
    before = ready.tree(times=False)
    done = cli(*command)
    assert (done.code, ready.tree(times=False)) == (2, before)
    assert "slurmddp: out/code exists with different content" in done.err
    archive.write_bytes(content)
    ready.write("train.py", "print('later')\n")
    assert "out/code exists with different content" in cli(*command).err
    elsewhere = cli("check", "/cluster/train.py", "--site", "cores", "--write", "other")
    assert (elsewhere.code, elsewhere.err) == (
        0,
        "note: no code/project written: /cluster does not exist on this machine\n",
    )


def test_a_rendered_job_runs_and_is_no_part_of_a_later_snapshot(ready: Desk, cli: Cli) -> None:
    job = ("train.py", "--site", "here", "--set", "container.python=/bin/echo")
    assert cli("check", *job, "--write", "out").code == 0
    run = ready.project / "out"
    done = subprocess.run(
        ["bash", str(run / "job.sh"), str(run)], cwd=ready.root, env=ready.environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (run / "logs/attempt-000").glob("*.log")
    assert f"{run}/code/project/train.py" in log.read_text()
    assert cli("check", *job, "--write", "again").code == 0
    assert not (ready.project / "again/code/project/out").exists()


@pytest.mark.parametrize("place", ["train.py", "train.py/x", "/proc/x"])
def test_render_into_what_is_no_folder(ready: Desk, cli: Cli, place: str) -> None:
    done = cli("check", "job.yaml", "--write", place)
    assert done.code == 2
    assert "cannot write to" in done.err


def test_render_over_a_file_that_is_no_text(ready: Desk, cli: Cli) -> None:
    (ready.project / "out").mkdir()
    (ready.project / "out" / "job.sh").write_bytes(b"\xff\xfe")
    done = cli("check", "job.yaml", "--write", "out")
    assert done.code == 2
    assert "exists with different content" in done.err


def test_plan_shows_the_arithmetic(ready: Desk, cli: Cli) -> None:
    out = cli("check", "job.yaml").out
    assert "512 = 16 (micro batch) x 4 (accumulation) x 4 (GPUs per node) x 2 (nodes)" in out
    assert "more accumulation" in out and "more nodes" in out
    assert "more GPUs" not in out  # the partition has no more than four
    assert "16 GPU-hours" in out


def test_plan_of_an_uneven_batch(ready: Desk, cli: Cli) -> None:
    done = cli("check", "job.yaml", "--set", "train.batch.global=500")
    assert "micro batches are uneven; every sample weighs the same" in done.out + done.err
    assert "Even batches nearby: 384 and 512" in done.out + done.err
    refused = cli("check", "job.yaml", "--set", "train.batch.global=500", "--set", "train.batch.even=true")
    assert refused.code == 2


def test_plan_per_node(ready: Desk, cli: Cli) -> None:
    done = cli("check", "job.yaml", "--per-node", "--head", "h0", "--port", "29500")
    lines = [line for line in done.out.splitlines() if not line.startswith("#")]
    assert len(lines) == 4
    assert all("SLURMDDP_HEAD=h0 " in line and "SLURMDDP_PORT=29500 " in line for line in lines[:2])
    assert all("--rdzv-endpoint=h0:29500" in line for line in lines[2:])
    for option in (["--head", "h0"], ["--port", "29500"]):
        done = cli("check", "job.yaml", *option)
        assert done.code == 2 and f"{option[0]} needs --per-node" in done.err


def test_plan_with_failures(ready: Desk, cli: Cli) -> None:
    for hours in ("0", "-1", "nan", "inf"):
        done = cli("check", "job.yaml", f"--mtbf={hours}")
        assert done.code == 2 and f"--mtbf: {hours} is not a number of hours above 0" in done.err
    done = cli("check", "job.yaml", "--mtbf", "3700")
    assert done.code == 2 and "has saved a checkpoint, so nothing is measured" in done.err
    assert "cost: " in done.out, "the plan itself is shown"


def test_explain(ready: Desk, cli: Cli) -> None:
    for command in ("check", "submit"):
        out = cli(command, "job.yaml", "--nodes", "3", "--explain", "resources.nodes").out
        assert out.splitlines()[:3] == [
            "resources.nodes = 3",
            "  command line: --nodes",
            "  over job file: job.yaml:4",
        ]
    assert cli("check", "job.yaml", "--explain", "resources.nods").code == 2
    assert not (ready.project / "runs").exists()


def test_debug(ready: Desk, cli: Cli) -> None:
    cli("check", "job.yaml", "--write", "a")
    cli("check", "job.yaml", "--write", "b", "--debug")
    quiet, loud = ((ready.project / name / "node.sh").read_text() for name in "ab")
    assert "_NCCL_DEBUG=" not in quiet
    assert "export APPTAINERENV_NCCL_DEBUG=INFO\n" in loud


@pytest.mark.parametrize(
    "what", [(), ("--task", "lm"), ("--task", "images"), ("--script", "train.py"), ("--script", "it's $x.py")]
)
@pytest.mark.parametrize("site", ["local", "testcluster", "cores"])
def test_init_writes_a_job_that_submits(ready: Desk, cli: Cli, site: str, what: tuple[str, ...]) -> None:
    ready.write("it's $x.py", "x")
    ready.write("images.npz", "x")
    image = Catalogue(ready.environment).load(site)[1].tree["container"].get("image", "")
    if image.startswith("$HOME/"):
        ready.write(f"../home/{image.removeprefix('$HOME/')}", SIF)
    made = cli("init", "new.yaml", "--site", site, *what)
    assert (made.code, made.out) == (0, "new.yaml\n"), made.err
    done = cli("submit", "new.yaml", "--dry-run", SLURM_JOB_ID="1")
    assert done.code == 0, done.err
    trouble = [line for line in done.err.splitlines() if line.startswith("warning: ")]
    assert not [line for line in trouble if OF_TESTS not in line], trouble


def test_init_touches_no_file_that_exists(ready: Desk, cli: Cli) -> None:
    before = ready.tree()
    for arguments in (
        ("job.yaml",),
        ("new.txt",),
        ("no/folder/x.yaml",),
        ("x.yaml", "--task", "ml"),
        ("x.yaml", "--site", "no"),
    ):
        done = cli("init", *arguments)
        assert done.code == 2, done
        assert done.err.count("\n") <= 2
    assert cli("init", "x.yaml", "--task", "lm", "--script", "a.py").code == 2
    assert ready.tree() == before


@pytest.mark.parametrize(
    "name", ["my job.yaml", "3.yaml", "no.yaml", "a: b.yaml", "-x.yaml", "ä.yaml", "null.yml", "$(id).yaml"]
)
def test_init_with_a_file_name_that_is_no_name_of_a_job(ready: Desk, cli: Cli, name: str) -> None:
    assert cli("init", "--site", "local", "--", name).code == 0
    done = cli("submit", "--dry-run", "--", name)
    assert done.code == 0, done.err


def test_init_asks_for_what_only_the_user_knows(ready: Desk, cli: Cli) -> None:
    ready.site(
        "name: strict\ntitle: t\nrequired: [resources.account]\npartitions: {p: {gpus_per_node: 1}}\n"
        "job: {resources: {partition: p}}"
    )
    cli("init", "new.yaml", "--site", "strict")
    done = cli("submit", "new.yaml", "--dry-run")
    assert done.code == 2
    assert done.err.count("resources.account is not set") == 1 and done.out == ""
    assert "resources.account is not set" in cli("check", "new.yaml").out
    refused = cli("submit", "new.yaml")
    assert refused.code == 2
    assert "resources.account is not set, and site strict requires it" in refused.err
    assert "resources.account" not in cli("submit", "new.yaml", "--dry-run", "--account", "a").err


@pytest.fixture
def elsewhere(ready: Desk) -> Desk:
    """A host that no profile matches, whatever the machine of the tests is called."""
    for name in ("gpus", "cores", "here"):
        (ready.config / "sites" / f"{name}.yaml").unlink()
    return ready


def test_init_where_slurm_is_takes_the_generic_site_and_says_so(elsewhere: Desk, cli: Cli) -> None:
    (elsewhere.project / "job.yaml").unlink()
    done = cli("init")
    assert (done.code, done.out) == (0, "job.yaml\n"), done.err
    assert "site    generic (no profile matches this host, and sbatch is in PATH)" in done.err
    assert "slurmddp init --site NAME" in done.err
    planned = cli("check", "job.yaml")
    assert planned.code == 0 and "any Slurm cluster" in planned.out, planned.err
    assert not cli("submit", "job.yaml", "--dry-run").code


def test_init_where_no_slurm_is_takes_this_machine(elsewhere: Desk, cli: Cli) -> None:
    (elsewhere.bin / "sbatch").unlink()
    done = cli("init", "new.yaml", PATH=str(elsewhere.bin))
    assert "site    local (no profile matches this host, and sbatch is not in PATH)" in done.err


def test_init_takes_the_site_of_the_configuration_and_of_the_variable(ready: Desk, cli: Cli) -> None:
    (ready.config / "config.yaml").write_text("site: cores\n")
    assert "site    cores" in cli("init", "a.yaml").err
    assert "site    here ($SLURMDDP_SITE)" in cli("init", "b.yaml", SLURMDDP_SITE="here").err
    assert "site    gpus (--site)" in cli("init", "c.yaml", "--site", "gpus", SLURMDDP_SITE="here").err


def test_training_on_a_machine_that_has_sbatch_is_warned_about(ready: Desk, cli: Cli) -> None:
    job = ("train.py", "--site", "here", "--dry-run")
    assert "train on this machine" in cli("submit", *job).err
    assert "train on this machine" not in cli("submit", *job, SLURM_JOB_ID="1").err
    (ready.bin / "sbatch").unlink()
    assert "train on this machine" not in cli("submit", *job, PATH=str(ready.bin)).err


def test_a_run_with_alert_targets_has_a_payload_for_each(ready: Desk, cli: Cli) -> None:
    alerts = "alerts=[{to: slack}, {to: json, name: bot}]"
    assert cli("check", "job.yaml", "--write", "out", "--set", alerts).code == 0
    out = ready.project / "out"
    assert sorted(path.name for path in (out / "payloads").iterdir()) == ["bot", "slack"]


def test_alerts_of_the_configuration_are_not_added_twice_to_a_resumed_run(ready: Desk, cli: Cli) -> None:
    (ready.config / "config.yaml").write_text("alerts: [{to: json, url_env: HOOK, on: [failed]}]\n")
    cli("submit", "job.yaml", HOOK="http://127.0.0.1:9/x")
    checkpoint = only_run(ready) / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    done = cli("submit", "--resume", "last", "--dry-run", HOOK="http://127.0.0.1:9/x")
    assert done.code == 0, done.err


def test_a_script_that_resumes_a_run_keeps_its_site(ready: Desk, cli: Cli) -> None:
    (ready.config / "config.yaml").write_text("site: gpus\n")
    cli("submit", "train.py", "--site", "cores")
    checkpoint = only_run(ready) / "checkpoints" / "step-00000010"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    done = cli("submit", "train.py", "--resume", "last", "--explain", "site")
    assert done.code == 0 and "cores" in done.out and "resumed run" in done.out, done.err + done.out
    resumed = cli("submit", "train.py", "--resume", "last", "--json")
    assert json.loads(resumed.out)["site"] == "cores", resumed.err
    first = str(checkpoint.parents[1])
    options = ("--site", "gpus", "--image", "image.sif", "--name", "other")
    other = cli("submit", "train.py", "--resume", first, *options, "--json")
    assert json.loads(other.out)["site"] == "gpus", other.err


def test_sites(desk: Desk, cli: Cli) -> None:
    desk.site("name: broken\ntitle: t\nnonsense: 1")
    out = cli("site").out
    assert re.search("^gpus +a cluster with GPUs", out, re.MULTILINE)
    assert re.search("^broken +broken: ", out, re.MULTILINE)
    assert "a cluster with GPUs" in cli("site", "gpus").out
    assert cli("site", "nope").code == 2


# --- the program itself


def test_help_and_version(cli: Cli) -> None:
    assert "submit" in cli("--help").out
    assert re.fullmatch(r"\d+\.\d+\.\d+(\+g[0-9a-f]{10}(\.dirty)?)?\n", cli("--version").out)
    assert cli("nonsense").code == 2
    assert cli("submit", "--nonsense").code == 2


def test_messages_go_to_stderr_and_a_closed_pipe_is_no_traceback(ready: Desk) -> None:
    line = f"{sys.executable} -m slurmddp submit job.yaml --dry-run 2>err | head -c 10; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=ready.project, env=ready.environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.startswith("site      ")
    assert "Traceback" not in (ready.project / "err").read_text()


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--help",), ("torch", "rich", "spython", "pydantic", "jinja2", "yaml", "urllib3")),
        (("submit", "--help"), ("torch", "rich", "spython", "urllib3")),
        (("submit", "job.yaml", "--dry-run"), ("torch", "rich", "spython", "numpy", "urllib3")),
        pytest.param(
            ("check", "job.yaml", "--write", "out"), ("torch", "rich", "spython", "numpy"), marks=pytest.mark.long
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(ready: Desk, arguments: tuple[str, ...], absent: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "slurmddp", *arguments],
        cwd=ready.project, env=ready.environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "typer" in loaded
    assert not loaded & set(absent)


@pytest.mark.parametrize("text", ["paths:\n", "paths: x\n", "setup: [a]\n"])
def test_a_configuration_with_empty_keys_breaks_no_search_for_runs(desk: Desk, cli: Cli, text: str) -> None:
    (desk.config / "config.yaml").write_text(text)
    desk.site("name: odd\ntitle: t\njob:\n")
    for command in (("status", "nothing"), ("logs", "nothing"), ("cancel", "nothing")):
        done = cli(*command)
        assert done.code == 2, done
        assert "nothing" in done.err
    assert cli("runs").code == 0


def test_resuming_a_run_whose_job_is_damaged(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml")
    (only_run(ready) / "job.json").write_text("{")
    done = cli("submit", "--resume", "last")
    assert done.code == 2
    assert "job.json: is damaged" in done.err
    assert len(list((ready.project / "runs").iterdir())) == 1


def test_arguments_behind_the_dashes_go_to_the_resumed_script(ready: Desk, cli: Cli) -> None:
    cli("submit", "train.py", "--site", "cores", "--", "--epochs", "2")
    first = only_run(ready)
    (first / "checkpoints" / "step-00000010").mkdir(parents=True)
    (first / "checkpoints" / "step-00000010" / "COMPLETE").touch()
    done = cli("submit", "--resume", "last", "--json", "--", "--epochs", "8")
    assert done.code == 0, done.err
    assert "  --epochs\n  8\n" in (Path(json.loads(done.out)["run_folder"]) / "node.sh").read_text()
    refused = cli("submit", "--resume", first.name, "--", "fast")
    assert refused.code == 2 and "--resume RUN RUN_FOLDER/job.yaml -- ARGS" in refused.err


def test_a_run_of_a_framework_is_resumed_from_what_its_script_saved(ready: Desk, cli: Cli) -> None:
    cli("submit", "train.py", "--site", "cores")
    first = only_run(ready)
    refused = cli("submit", "--resume", "last")
    assert refused.code == 2 and "your own script, which has saved nothing in" in refused.err
    (first / "checkpoints" / "step-00000010").mkdir()
    refused = cli("submit", "--resume", "last")
    assert refused.code == 2 and "has no complete checkpoint yet" in refused.err
    (first / "checkpoints" / "last.ckpt").touch()
    done = cli("submit", "--resume", "last", "--json")
    assert done.code == 0, done.err
    script = (Path(json.loads(done.out)["run_folder"]) / "node.sh").read_text()
    assert f"SLURMDDP_RESUME_FROM={first}/checkpoints # " in script


@pytest.mark.parametrize("workdir", ["submit", "run"])
def test_a_run_is_resumed_from_what_its_script_saved_where_the_job_says(ready: Desk, cli: Cli, workdir: str) -> None:
    options = ("--workdir", workdir, "--set", "checkpoint.watch=[out]")
    cli("submit", "train.py", "--site", "cores", *options)
    first = only_run(ready)
    refused = cli("resume", "last")
    assert refused.code == 2 and "set checkpoint.watch to where it saves" in refused.err
    out = (ready.project if workdir == "submit" else first / "work") / "out"
    out.mkdir(parents=True)
    (out / "last.pkl").write_bytes(pickle.dumps({"step": 3}))
    done = cli("resume", "last", "--json", "--yes")
    assert done.code == 0, done.err
    folder = Path(json.loads(done.out)["run_folder"])
    more = "" if workdir == "submit" else f":{out}"
    assert f"SLURMDDP_RESUME_FROM={first}/checkpoints{more} # " in (folder / "node.sh").read_text()
    assert "  watch:\n  - out\n" in (folder / "job.yaml").read_text()


def test_a_run_foreground_that_fails_ends_with_its_cause(ready: Desk, cli: Cli) -> None:
    done = cli("run", "train.py", "--site", "here", "--set", "setup=['false']")
    run = only_run(ready)
    assert done.code != 0
    cause, more = done.err.splitlines()[-2:]
    assert cause.startswith("failed: ") and "setup line failed with exit code 1: false" in cause
    assert more == f"more: slurmddp status {run.name}"


def test_resuming_a_run_takes_its_job_and_its_checkpoints(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml")
    first = only_run(ready)
    refused = cli("submit", "--resume", "last")
    assert refused.code == 2
    assert "has no complete checkpoint yet" in refused.err
    (first / "checkpoints" / "step-00000010").mkdir(parents=True)
    (first / "checkpoints" / "step-00000010" / "COMPLETE").touch()
    done = cli("submit", "--resume", "last", "--nodes", "3", "--json")
    assert done.code == 0, done.err
    second = Path(json.loads(done.out)["run_folder"])
    job = json.loads((second / "job.json").read_text())
    assert job["resume_from"] == [str(first / "checkpoints")]
    assert job["batch"]["global"] == 512
    assert "#SBATCH --nodes=3\n" in (second / "job.sh").read_text()
    assert f"{first}/checkpoints:{first}/checkpoints:ro" in (second / "node.sh").read_text()
    assert f"from    {first.name}\n" in done.err
    second.rename(second.with_name(".gone"))  # else it still continues the first one
    third = cli("resume", first.name, "--nodes", "3", "--json")
    assert third.code == 0, third.err
    assert json.loads((Path(json.loads(third.out)["run_folder"]) / "job.json").read_text()) == {
        **job, "run": {**job["run"], "id": json.loads(third.out)["run_id"]},
    }  # fmt: skip


def test_a_finished_run_is_resumed_with_more_steps_only(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml")
    first = only_run(ready)
    make_checkpoint(first / "checkpoints", 1000)
    for command in (["resume"], ["submit", "--resume", "last"], ["submit", "--resume", "last", "--dry-run"]):
        done = cli(*command)
        assert done.code == 2, done
        assert f"nothing is left to train: {first.name} has a checkpoint of step 1000, and the job ends at" in done.err
        assert "add steps: --set train.steps=N, with N above 1000" in done.err
    assert only_run(ready) == first
    more = cli("resume", "--set", "train.steps=1001")
    assert more.code == 0 and f"from    {first.name}, step 1000\n" in more.err, more.err


def test_a_rerun_has_the_code_and_arguments_of_the_run(ready: Desk, cli: Cli) -> None:
    assert cli("submit", "train.py", "--image", "image.sif", "--site", "gpus", "--", "--lr", "3").code == 0
    first = only_run(ready)
    ready.write("train.py", "print('edited since')\n")
    again = cli("rerun", "--json")
    assert again.code == 0 and f"from    {first.name}, step 0\n" in again.err, again.err
    second = Path(json.loads(again.out)["run_folder"])
    assert second != first and (second / "code/project/train.py").read_text() == "print('hello')\n"
    was, now = (json.loads((run / "manifest.json").read_text()) for run in (first, second))
    assert was["code_hash"] == now["code_hash"] and was["image"] == now["image"]
    assert was["directory"] == now["directory"] and now["resumed_from"] == []
    assert (second / "node.sh").read_text().replace(second.name, first.name) == (first / "node.sh").read_text()
    third = cli("rerun", second.name, "--json")
    assert third.code == 0 and Path(json.loads(third.out)["run_folder"], "code/project/train.py").exists()


def test_what_the_program_wrote_beside_its_code_is_not_code(ready: Desk, cli: Cli) -> None:
    ready.write("lib/a.py", "")
    assert cli("submit", "train.py", "--image", "image.sif", "--site", "gpus").code == 0
    first = only_run(ready)
    (first / "code/project/snapshot.pt").write_text("50 epochs")
    (first / "code/project/lib/out.txt").write_text("1")
    again = cli("rerun", first.name, "--json")
    assert again.code == 0, again.err
    assert f"came into {first}/code after the submission: project/" in again.err
    assert "project/snapshot.pt" in again.err and "project/lib/out.txt" in again.err
    second = Path(json.loads(again.out)["run_folder"])
    assert (second / "code/project/lib/a.py").exists()
    assert not [*second.glob("code/project/**/snapshot.pt"), *second.glob("code/project/**/out.txt")]
    was, now = (json.loads((run / "manifest.json").read_text())["code_hash"] for run in (first, second))
    assert was == now
    for harm in (lambda path: path.write_text("edited"), Path.unlink):
        harm(first / "code/project/lib/a.py")
        done = cli("rerun", first.name)
        assert done.code == 2 and "is not what the run was submitted with: project/lib/a.py" in done.err


def test_a_rerun_of_a_bundled_task(ready: Desk, cli: Cli) -> None:
    cli("submit", "job.yaml")
    first = only_run(ready)
    again = cli("rerun", first.name, "--json")
    assert again.code == 0, again.err
    was, now = (json.loads(Path(run, "job.json").read_text()) for run in (first, json.loads(again.out)["run_folder"]))
    assert {**was, "run": now["run"]} == now


@pytest.mark.parametrize("what", ["code", "image", "snapshot"])
def test_a_rerun_of_what_has_changed_is_refused(ready: Desk, cli: Cli, what: str) -> None:
    more = ("--set", "snapshot=false") if what == "snapshot" else ()
    assert cli("submit", "train.py", "--image", "image.sif", "--site", "gpus", *more).code == 0
    first = only_run(ready)
    if what == "code":
        (first / "code/project/train.py").write_text("edited")
    if what == "image":
        ready.write("image.sif", f"{SIF} and more")
    done = cli("rerun")
    says = {"code": "is not what the run was submitted with", "image": "is not the one", "snapshot": "snapshot: false"}
    assert done.code == 2 and says[what] in done.err and only_run(ready) == first
