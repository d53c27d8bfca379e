"""What new users type, and the answer that names what to do. Each row: the words, and what the answer has."""

import os
import re
import stat
from collections.abc import Callable

import pytest

from tests.helpers import SIF, Desk, Result

Cli = Callable[..., Result]

SITE = """\
name: any
title: any cluster
gpu_request: gpus-per-node
job: {container: {runtime: apptainer}}
"""


@pytest.fixture
def typed(desk: Desk, cli: Cli) -> Cli:
    """The command, on a login node with train.py, image.sif and a site without an image."""
    desk.site(SITE)
    desk.write("train.py")
    desk.write("image.sif", SIF)
    desk.write("nb.ipynb", "{}")
    desk.write("run.sbatch", "#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n")
    desk.write("run.sh", "#!/bin/bash\n#SBATCH -N 2\nsrun python train.py\n")
    desk.write("wrong.py", "x")
    desk.write("mypkg/__init__.py")
    desk.write("mypkg/sub/main.py", "import os\nfrom ..x import y\n")
    desk.write("mypkg/main.py", "from . import x\n")
    desk.write("mypkg/both.py", "try:\n    from . import x\nexcept ImportError:\n    import x\n")
    desk.program("sbatch", "#!/bin/bash\necho 4711\n")
    return cli


GOOD = ("--site", "any", "--image", "image.sif", "--gpus-per-node", "1")
TABLE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no image": (
        ("train.py", "--site", "any", "--gpus-per-node", "1"),
        (
            "slurmddp: container.image is not set: the ranks need an image, or a Python environment",
            "slurmddp build-image image.sif --recipe ngc-pytorch, then --image image.sif",
            "or --venv DIR, or --conda NAME",
        ),
    ),
    "a typo": (("trian.py", *GOOD), ("trian.py: the script ", "trian.py does not exist", "did you mean train.py?")),
    "no suffix": (("train", *GOOD), ("did you mean train.py?",)),
    "hours or minutes": (("train.py", *GOOD, "-t", "24"), ("write 24h for hours, or 24m for minutes",)),
    "a short clock": (("train.py", *GOOD, "-t", "24:00"), ("is 24 minutes to Slurm", "24:00:00 for 24 hours")),
    "arguments of the script": (
        ("train.py", *GOOD, "--lr", "3e-4"),
        ("submit has no option --lr", "go after --: slurmddp submit ", "--gpus-per-node 1 -- --lr 3e-4"),
    ),
    "a notebook": (("nb.ipynb", *GOOD), ("is a notebook", "jupyter nbconvert --to script nb.ipynb")),
    "a batch script": (("run.sbatch", *GOOD), ("is a batch script (line 2)", "slurmddp import run.sbatch -o job.yaml")),
    "a bash batch script": (("run.sh", *GOOD), ("is a batch script (line 2)", "slurmddp import run.sh -o job.yaml")),
    "relative imports": (
        ("mypkg/main.py", *GOOD),
        ("main.py has a relative import in line 1", "-> -m mypkg.main in place of", "train: {module: mypkg.main}"),
    ),
    "relative imports of the folder above": (
        ("mypkg/sub/main.py", *GOOD),
        ("has a relative import in line 2", "-> -m mypkg.sub.main in place of"),
    ),
    "a list": (
        ("train.py", *GOOD, "--set", "setup=source x"),
        ("--set setup: must be a list, not 'source x'", "--set 'setup=[source x]'"),
    ),
    "all at once": (
        ("trian.py", "--site", "any", "--set", "paths.runs=$NOWHERE/x"),
        ("did you mean train.py?", "$NOWHERE is not set", "gpus_per_node", "container.image is not set"),
    ),
    "all that this machine lacks at once": (
        (
            "trian.py",
            "--site",
            "any",
            "--gpus-per-node",
            "1",
            "--image",
            "no.sif",
            "--set",
            "container.binds=[/nothing]",
        ),
        ("did you mean train.py?", "no.sif does not exist", "/nothing does not exist"),
    ),
}


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize("what", TABLE)
def test_a_mistake_of_the_command_line(typed: Cli, what: str, more: tuple[str, ...]) -> None:
    words, answer = TABLE[what]
    done = typed("submit", *more, *words)
    assert (done.code, done.out) == (2, ""), done
    assert "site_configs" not in done.err and "Traceback" not in done.err
    for part in answer:
        assert part in done.err
        assert done.err.count("did you mean train.py?") <= 1


FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tab": ("resources:\n\tnodes: 2\n", ("job.yaml:3: a tab is not allowed in YAML", "spaces")),
    "ntasks": (
        "ntasks: 8\n",
        ("job.yaml:2: ntasks: unknown key", "ranks follow from nodes and GPUs", "ranks_per_node"),
    ),
    "resources.ntasks": ("resources: {ntasks: 8}\n", ("resources.ntasks: unknown key", "resources.ranks_per_node")),
    "gpus": ("resources: {gpus: 4}\n", ("resources.gpus: is written per node here", "resources.gpus_per_node: 4")),
    "Boolean": ("resources: {partition: no}\n", ("resources.partition: 'no' is a Boolean in YAML", 'write "no"')),
    "time": ("resources: {time: 24}\n", ("24h for hours, or 24m for minutes",)),
    "list": ("setup: source x\n", ("setup: must be a list, not 'source x'", "write setup: [source x]")),
}

#: The job file, what its one answer has, and what it has not: that a default in the place of a wrong value is wrong.
TOGETHER: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "a wrong value and what this machine lacks": (
        "resources: {time: 24, gpus_per_node: 1}\ncontainer: {image: no.sif, binds: [/nothing]}\n"
        "train: {script: trian.py}\n",
        ("24h for hours", "no.sif does not exist", "/nothing does not exist", "did you mean", "train.py?"),
        (),
    ),
    "an unknown key and no image": (
        "resources: {gpus_per_node: 1, tiem: 1h}\ntrain: {script: train.py}\n",
        ("resources.tiem: unknown key", "did you mean resources.time?", "container.image is not set"),
        (),
    ),
    "a number of GPUs that is none": (
        "resources: {gpus_per_node: many}\ntrain: {script: train.py}\n",
        ("gpus_per_node: must be a whole number, not 'many'", "container.image is not set"),
        ("does not say how many GPUs",),
    ),
    "an item of a list": (
        "resources: {gpus_per_node: 1}\ncontainer: {binds: [[]]}\ntrain: {script: trian.py}\n",
        ("container.binds.0", "did you mean", "container.image is not set"),
        (),
    ),
    "a section that is none": ("resources: 4\ntrain: {script: trian.py}\n", ("resources: must be a mapping",), ()),
    "a program that is none": (
        "resources: {time: 24, gpus: 4}\ntrain: train.py\ncontainer: {image: no.sif}\n",
        ("24h for hours", "resources.gpus_per_node: 4", "train: must be a mapping", "no.sif does not exist"),
        ("is missing", "does not say how many"),
    ),
    "GPUs and an image": (
        "train: {script: trian.py}\ncontainer: {image: no.sif}\n",
        ("does not say how many GPUs", "did you mean", "no.sif does not exist"),
        (),
    ),
    "a program that nobody names": (
        "resources: {gpus_per_node: 1}\ntrian: {script: train.py}\ncontainer: {image: no.sif}\n",
        ("train: is missing", "did you mean train?", "no.sif does not exist"),
        (),
    ),
    "no YAML in one section": (
        "resources: {time: 24, gpus_per_node: 1}\ntrain: [x}\ncontainer: {image: no.sif}\n",
        ("job.yaml:3: is not valid YAML", "24h for hours", "no.sif does not exist"),
        ("is missing",),
    ),
    "no YAML in two sections": (
        'name: "abc\nresources: {gpus_per_node: 1, tiem: 1}\ntrain:\n   script: trian.py\n  args: [a]\n'
        "container: {image: no.sif}\n",
        ("unexpected end of stream, in what begins in line 2", "job.yaml:6: is not", "time?", "no.sif does not exist"),
        ("is missing",),
    ),
    "a tab": (
        "ntasks: 4\nresources:\n\ttime: 24\ntrain: {script: trian.py}\n",
        ("job.yaml:4: a tab is not allowed", "ntasks: unknown key", "container.image is not set", "did you mean"),
        ("gpus_per_node: the profile",),
    ),
    "what YAML has and a job file has not": (
        "ntasks: 4\nntasks: 5\nresources: &a {time: 24}\n[x]: 1\n<<: *a\nname: !x y\ntrain: {script: trian.py}\n",
        ('key "ntasks" is given twice', "a key that is not text", "merge key", "a YAML tag", "24h for", "did you mean"),
        ("is missing",),
    ),
}

LACKS = "container: {image: no.sif, binds: [/nothing]}\ntrain: {script: trian.py}\n"
LACKING = ("train.py?", "no.sif does not exist", "/nothing does not exist")
FOR_ANY = ("gpus_per_node", "sbatch is not", "--partition")

NOWHERE = {
    "an unknown site, and what this machine lacks": (f"site: nosuch\n{LACKS}", ("unknown site", *LACKING), FOR_ANY),
    "no site, and what this machine lacks": (
        f"resources: {{tiem: 1}}\npaths: {{runs: $NO/x}}\n{LACKS}",
        ("no site selected", "resources.tiem: unknown key", "$NO is not set", *LACKING),
        FOR_ANY,
    ),
    "a profile with a mistake": (f"site: ./p.yaml\n{LACKS}", ("p.yaml:1: nmae", *LACKING), FOR_ANY),
    "no GPUs, no image": (
        "site: nosuch\ntrain: {script: trian.py}\n",
        ("unknown site", "did you mean"),
        (*FOR_ANY, "container.image"),
    ),
    "a program that cannot be planned": (
        "site: nosuch\ntrain: {script: trian.py, batch: {global: 3, micro: 2}}\n",
        ("unknown site", "did you"),
        FOR_ANY,
    ),
    "an unknown site": ("site: nosuch\nresources: {time: 24}\n", ("unknown site 'nosuch'", "24h for hours"), ()),
    "no site": ("resources: {time: 24}\n", ("no site selected", "24h for hours"), ()),
    "a site that cannot be read": (
        "site: [any\nsetup: source x\n",
        ("is not valid YAML", "must be a list"),
        ("no site",),
    ),
}


@pytest.mark.parametrize("what", NOWHERE)
def test_an_unknown_site_hides_no_other_mistake(desk: Desk, typed: Cli, what: str) -> None:
    text, answer, absent = NOWHERE[what]
    desk.write("p.yaml", "nmae: x\n")
    desk.write("job.yaml", text if "train:" in text else f"{text}train: {{script: train.py}}\n")
    done = typed("submit", "job.yaml")
    assert (done.code, done.out) == (2, ""), done
    assert [part for part in answer if done.err.count(part) != 1] == []
    assert [part for part in absent if part in done.err] == []


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize("what", TOGETHER)
def test_a_wrong_value_hides_no_other_mistake(desk: Desk, typed: Cli, what: str, more: tuple[str, ...]) -> None:
    text, answer, absent = TOGETHER[what]
    desk.write("job.yaml", f"site: any\n{text}")
    done = typed("submit", "job.yaml", *more)
    assert (done.code, done.out) == (2, ""), done
    for part in answer:
        assert done.err.count(part) == 1, done.err
    for part in absent:
        assert part not in done.err


@pytest.mark.parametrize("what", FILES)
def test_a_mistake_in_a_job_file(desk: Desk, typed: Cli, what: str) -> None:
    text, answer = FILES[what]
    desk.write("job.yaml", f"site: any\n{text}train: {{script: train.py}}\n")
    done = typed("submit", "job.yaml")
    assert (done.code, done.out) == (2, ""), done
    for part in answer:
        assert part in done.err


def test_what_the_refusal_of_a_relative_import_says_to_do_works(desk: Desk, typed: Cli) -> None:
    assert typed("submit", "--dry-run", *GOOD, "-m", "mypkg.main").code == 0
    assert typed("submit", "--dry-run", "mypkg/both.py", *GOOD).code == 0  # a guarded import may fail
    there = (desk.project / "mypkg/main.py").rename(desk.root / "project/wrong.py")
    there.parent.joinpath("__init__.py").touch()
    assert f"-> cd {desk.root}, then -m project.wrong in" in typed("submit", "--dry-run", "wrong.py", *GOOD).err


def test_a_partition_in_quotes_may_have_any_name(desk: Desk, typed: Cli) -> None:
    desk.write("job.yaml", 'site: any\nresources: {partition: "no"}\ntrain: {script: train.py}\n')
    done = typed("submit", "job.yaml", *GOOD, "--dry-run")
    assert done.code == 0 and "--partition=no\n" in done.out, done.err
    assert typed("submit", "job.yaml", *GOOD).code == 0
    run = next((desk.project / "runs").iterdir())
    assert typed("submit", str(run / "job.yaml"), "--dry-run").code == 0


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("queue", "slurmddp runs"),
        ("why", "slurmddp doctor RUN"),
        ("start", "slurmddp submit train.py"),
        ("kill", "slurmddp cancel RUN"),
        ("tail", "slurmddp logs RUN -f"),
    ],
)
def test_a_command_of_another_tool(cli: Cli, word: str, answer: str) -> None:
    done = cli(word)
    assert done.code == 2 and f"no command '{word}'\n  -> " in done.err and answer in done.err


@pytest.mark.parametrize("word", ["ps", "ls"])
def test_short_names_list_the_runs(cli: Cli, word: str) -> None:
    assert cli(word).out == cli("runs").out == "no runs\n"


def test_no_site_on_a_login_node_offers_a_profile_of_this_cluster(desk: Desk, typed: Cli) -> None:
    for name in ("gpus", "cores", "here"):
        (desk.config / "sites" / f"{name}.yaml").unlink()
    done = typed("submit", "train.py")
    assert done.code == 2 and "`slurmddp site init`" in done.err and "--site generic" in done.err


def test_one_machine_knows_what_gpus_means(desk: Desk, typed: Cli) -> None:
    desk.program("nvidia-smi", "#!/bin/sh\nprintf 'GPU 0: x\\nGPU 1: x\\n'\n")
    done = typed("check", "train.py", "--site", "local", "--gpus", "2")
    assert done.code == 0 and re.search("GPUs per node +2\n", done.out), done
    assert "3 GPUs per node are more than the 2" in typed("check", "train.py", "--site", "local", "--gpus", "3").err


def test_a_submission_inside_of_a_job_says_so(typed: Cli) -> None:
    assert (
        "this shell is in Slurm job 77: this is a new job" in typed("submit", "train.py", *GOOD, SLURM_JOB_ID="77").err
    )
    assert "this shell" not in typed("submit", "train.py", *GOOD).err


def test_an_image_that_is_ignored_is_said(typed: Cli) -> None:
    done = typed("submit", "train.py", "--site", "cores", "--image", "image.sif", "--dry-run")
    assert "warning: --image: container.image: the image is ignored" in done.err
    assert "image is ignored" not in typed("submit", "train.py", "--site", "cores", "--dry-run").err


def test_a_laptop_says_what_it_could_not_check(desk: Desk, typed: Cli) -> None:
    (desk.bin / "sbatch").unlink()
    words = ("train.py", "--site", "any", "--gpus-per-node", "4", "--image", "no.sif", "--", "--lr", "3e-4")
    done = typed("submit", "--dry-run", *words)
    assert done.code == 0, done.err
    assert "=== job.sh" in done.out
    said = done.err[done.err.index("not checked, because this machine has no sbatch") :]
    assert "no.sif does not exist" in said and "sbatch is not in PATH" in said
    assert typed("submit", *words).code == 2
    assert typed("submit", "--dry-run", "trian.py", *words[1:]).code == 2


def test_runs_in_the_home_folder_are_warned_about(desk: Desk, typed: Cli) -> None:
    home = typed("submit", "train.py", *GOOD, "--set", "paths.runs=~/runs")
    assert home.code == 0 and "runs is in your home folder: its file system has" in home.err, home.err
    assert "home folder" not in typed("submit", "train.py", *GOOD).err


def test_an_umask_that_allows_nothing_leaves_folders_that_their_owner_can_use(desk: Desk, typed: Cli) -> None:
    before = os.umask(0o777)
    try:
        done = typed("submit", "train.py", *GOOD)
    finally:
        os.umask(before)
    assert done.code == 0, done.err
    assert stat.S_IMODE((desk.project / "runs").stat().st_mode) == 0o700
    run = next((desk.project / "runs").iterdir())
    closed = [path for path in run.rglob("*") if path.is_dir() and stat.S_IMODE(path.stat().st_mode) & 0o700 != 0o700]
    assert not closed


def test_status_on_a_machine_without_slurm_shows_the_run_folder(desk: Desk, typed: Cli) -> None:
    assert typed("submit", "train.py", *GOOD).code == 0
    done = typed("status", "last", PATH=str(desk.bin))
    assert "Traceback" not in done.err and done.code == 3, done
    assert "squeue" in done.out + done.err and "4711" in done.out, done
