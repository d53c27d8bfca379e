"""How node.sh starts the container: command line and environment of both runtimes, what is inherited, what a contained
container is given back, and the sources of the binds. Real bash; a stand-in for the runtime writes down what it gets.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from slurmddp.render.scripts import node_script
from tests.helpers import LM_JOB, SHELL, SIF, Desk, change_code, check_bash, has, make_code

DUMP = '#!/bin/bash\nprintf "%s\\0" "$@" >"$DUMP.argv"\ncat /proc/self/environ >"$DUMP.env"\n'
RUNTIMES = ["apptainer", "singularity"]
PLAIN = ("container.compat=false",)  # nothing between the image and the ranks' command


class Node:
    """node.sh of a job on a desk, and what the runtime got."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.run = desk.root / "run"
        (self.run / "logs").mkdir(parents=True)
        make_code(self.run)
        for name in RUNTIMES:
            desk.program(name, DUMP)

    @property
    def scratch(self) -> Path:
        """The user's folder on the node's own disk."""
        return self.desk.root / "disk" / f"slurmddp-{os.getuid()}"

    def script(self, *options: str) -> str:
        return node_script(self.desk.plan(LM_JOB, *PLAIN, f"paths.node={self.scratch.parent}", *options))

    def desk_script(self, disk: Path) -> str:
        return node_script(self.desk.plan(LM_JOB, *PLAIN, f"paths.node={disk}"))

    def start(self, script: str, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        ours = dict.fromkeys(("SLURMDDP_ATTEMPT", "SLURMDDP_PORT", "SLURMDDP_RENDEZVOUS_ID"), "61000")
        environment = {
            **self.desk.environment, **ours,
            "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "node7", "SLURMDDP_NODES": "1", "SLURMDDP_RUN": str(self.run),
            "SLURMDDP_LOGS": str(self.run / "logs"), "DUMP": str(self.desk.root / "dump"), **variables,
        }  # fmt: skip
        path = self.desk.write("node.sh", script)
        words = ["bash", str(path), *command]
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60)

    def change_functions(self, old: str, new: str, file: str = "shell/node.sh") -> None:
        """A copy of node.sh's functions, or of another file, for this test, with another text in one place."""
        assert (SHELL.parent / file).read_text().count(old) == 1
        change_code(self.run, file, lambda text: text.replace(old, new))

    def got(self) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment of the runtime."""
        arguments = (self.desk.root / "dump.argv").read_text().split("\0")[:-1]
        pairs = (self.desk.root / "dump.env").read_text().split("\0")[:-1]
        return arguments, dict(pair.split("=", 1) for pair in pairs)

    def ranks(self, script: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        done = self.start(script, **variables)
        assert done.returncode == 0, done.stderr
        return self.got()


@pytest.fixture
def node(desk: Desk) -> Node:
    return Node(desk)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_whole_command_line_of_either_runtime(node: Node, runtime: str) -> None:
    cache = node.desk.root / "cache"
    options = ('container.options=["--no-home"]', 'container.binds=["/scratch/in:/in:ro"]', f"paths.cache={cache}")
    arguments, environment = node.ranks(node.script(f"container.runtime={runtime}", *options))
    assert arguments[: arguments.index("-m")] == [
        "exec", "--nv", "--no-home", "--pwd", str(node.run), "--bind", f"{node.run}:{node.run}:rw",
        "--bind", f"{cache}:{cache}:rw", "--bind", f"{node.scratch}:{node.scratch}:rw",
        "--bind", "/scratch/in:/in:ro", "--bind", "/data/books:/data/books:ro",
        "/images/torch.sif", "python3",
    ]  # fmt: skip
    assert arguments[-3:] == ["-m", "slurmddp.runtime.train", str(node.run)]
    own, other = ("APPTAINER", "SINGULARITY")[:: 1 if runtime == "apptainer" else -1]
    assert environment[f"{own}_CACHEDIR"] == f"{cache}/{runtime}"
    assert environment[f"{own}_NO_EVAL"] == "1"
    assert environment[f"{own}ENV_SLURMDDP_RUN"] == str(node.run)
    assert environment[f"{own}ENV_PYTHONPATH"] == f"{node.scratch}/61000/code"
    assert environment[f"{own}ENV_PYTHONNOUSERSITE"] == "1"
    assert environment[f"{own}ENV_HF_HOME"] == f"{cache}/huggingface"
    # Nodes that share these crash each other.
    assert environment[f"{own}ENV_TRITON_CACHE_DIR"] == f"{node.scratch}/triton"
    assert environment[f"{own}ENV_TORCHINDUCTOR_CACHE_DIR"] == f"{node.scratch}/inductor"
    assert not [name for name in environment if name.startswith(other)]


def test_attach_gets_what_the_ranks_get(node: Node) -> None:
    """The same container and variables; another command, whose output is all that is on standard output."""
    setup = [f"export PATH={node.desk.bin}:$PATH", "echo text $#"]
    script = node.script(f"setup={json.dumps(setup)}", "environment.SEEN=x")
    arguments, environment = node.ranks(script)
    done = node.start(script, "ls", "-l", "a b", SLURMDDP_STEP="attach")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "text 0\n")
    attached, variables = node.got()
    assert attached == [*arguments[: arguments.index("-m") - 1], "ls", "-l", "a b"]
    assert {name: value for name, value in variables.items() if name != "SLURMDDP_STEP"} == environment
    done = node.start(node.script("setup=[false]"), "ls", SLURMDDP_STEP="attach")
    assert done.returncode == 1 and "setup line failed" in done.stderr
    assert not (node.run / "logs/preflight/node7.failed").exists(), "it says nothing of the attempt"


def test_the_choice_of_libcuda_comes_before_every_command_but_the_check_of_python(node: Node) -> None:
    """Which names a container without Python; beside the ranks, the choice is not printed."""
    calls = node.desk.root / "calls"
    node.desk.program("apptainer", f"#!/bin/bash\necho \"${{*//$'\\n'}}\" >>{calls}\necho True nothing 3.12 python3\n")
    script = node.script("container.compat=true", "recovery.preflight=false")
    assert node.start(script).returncode == 0 and node.start(script, "ls", SLURMDDP_STEP="attach").returncode == 0
    look, ranks, attached = (line.partition("/images/torch.sif python3 ")[2] for line in calls.read_text().splitlines())
    assert look.startswith("-c import") and "libcuda" not in look
    assert ranks.startswith("-m slurmddp.runtime.libcuda node7  python3 -m slurmddp.runtime.agent ")
    assert attached == "-m slurmddp.runtime.libcuda node7 yes ls"


def test_attach_has_the_interface_of_the_nodes_rank(node: Node) -> None:
    """Its step is on one node, whose way to itself is not the one that the ranks talk over."""
    node.desk.program("scontrol", "#!/bin/bash\necho node7\n")
    node.desk.program("getent", '#!/bin/bash\necho "10.0.0.${2#node} STREAM $2"\n')
    node.desk.program(
        "ip", '#!/bin/bash\n[[ "$*" == *10.0.0.6 ]] && echo dev ib0 src 10.0.0.7 || echo dev lo src 127.0.0.1\n'
    )
    step = {"SLURMDDP_NODES": "2", "SLURMDDP_STEP": "attach", "SLURMDDP_ATTACH_NODES": "node6 node7"}
    script = node.script("resources.nodes=2")
    done = node.start(script, "ls", SLURM_NODEID="0", SLURM_STEP_NODELIST="node7", **step)
    assert done.returncode == 0, done.stderr
    assert node.got()[1]["APPTAINERENV_GLOO_SOCKET_IFNAME"] == "ib0"


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("value", ["=mlx5_0,mlx5_1", "a=b,c=d=", 'x,"y",z', "a\\,b", "$HOME ${x} `id`", " "])
def test_a_value_gets_through_as_it_is(node: Node, runtime: str, value: str) -> None:
    """`--env` would take it for a list."""
    options = (f"container.runtime={runtime}", f"network.variables.NCCL_IB_HCA={value}")
    arguments, environment = node.ranks(node.script(*options, f"environment.OWN={value}"))
    prefix = f"{runtime.upper()}ENV_"
    assert environment[f"{prefix}NCCL_IB_HCA"] == environment[f"{prefix}OWN"] == value
    assert not [word for word in arguments if word.startswith("--env")]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_what_would_change_the_container_silently_is_not_inherited(node: Node, runtime: str) -> None:
    kinds = ("BIND", "BINDPATH", "MOUNT", "CONTAIN", "CONTAINALL", "COMPAT")
    leaks = {f"{prefix}_{kind}": "/leak" for prefix in ("APPTAINER", "SINGULARITY") for kind in kinds}
    own = f"{runtime.upper()}_BIND"
    setup = [f"export PATH={node.desk.bin}:$PATH", f"export {own}=/meant"]
    options = (f"container.runtime={runtime}", f"setup={json.dumps(setup)}")
    _, environment = node.ranks(node.script(*options), **leaks)
    assert {name: environment[name] for name in leaks if name in environment} == {own: "/meant"}


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_gpus_that_slurm_gave_get_through(node: Node, runtime: str) -> None:
    """--cleanenv and --containall pass on nothing else of the step's variables."""
    given = {"CUDA_VISIBLE_DEVICES": "2,3", "ROCR_VISIBLE_DEVICES": ""}
    _, environment = node.ranks(node.script(f"container.runtime={runtime}"), **given)
    prefix = f"{runtime.upper()}ENV_"
    assert (environment[f"{prefix}CUDA_VISIBLE_DEVICES"], environment[f"{prefix}ROCR_VISIBLE_DEVICES"]) == ("2,3", "")
    assert f"{prefix}HIP_VISIBLE_DEVICES" not in environment
    _, environment = node.ranks(
        node.script(f"container.runtime={runtime}", "environment.CUDA_VISIBLE_DEVICES=0"), **given
    )
    assert environment[f"{prefix}CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_contained_container_gets_the_network_s_devices(node: Node, runtime: str) -> None:
    devices = node.desk.root / "dev"
    (devices / "infiniband").mkdir(parents=True)
    for name in ("gdrdrv", "cxi0", "cxi1", "cxi_service"):
        (devices / name).touch()

    def started(*options: str) -> list[str]:
        script = node.script(f"container.runtime={runtime}", *options)
        assert script.count('"${devices[@]}"') == ("container.options" in "".join(options))
        arguments, _ = node.ranks(script)
        return [after for word, after in itertools.pairwise(arguments) if word == "--bind"]

    for name in ("infiniband", "gdrdrv", "cxi"):
        node.change_functions(f" /dev/{name}", f" {devices}/{name}")
    given = [str(devices / name) for name in ("infiniband", "gdrdrv", "cxi0", "cxi1")]
    plain = started()
    assert not [bind for bind in plain if bind.startswith(str(devices))]
    assert started('container.options=["--containall"]') == [*given, *plain]
    (devices / "infiniband").rmdir()
    assert started('container.options=["--containall"]') == [*given[1:], *plain]


def test_a_contained_container_s_tmp_and_home_lie_on_the_node_s_own_folder(node: Node) -> None:
    arguments, _ = node.ranks(node.script('container.options=["-c"]'))
    assert arguments[:5] == [
        "exec",
        "--workdir",
        str(node.scratch / "61000"),
        "--nv",
        "-c",
    ]  # the user's own --workdir would win
    assert (node.scratch / "61000").is_dir()
    arguments, _ = node.ranks(node.script())
    assert "--workdir" not in arguments


def test_a_user_s_own_cache_folder_wins(node: Node) -> None:
    _, environment = node.ranks(node.script("environment.TRITON_CACHE_DIR=/mine"))
    assert environment["APPTAINERENV_TRITON_CACHE_DIR"] == "/mine"


def test_the_node_s_own_folder_is_private(node: Node) -> None:
    for _ in range(2):  # the preflight's step comes first
        node.ranks(node.script())
        assert node.scratch.is_dir() and node.scratch.stat().st_mode & 0o777 == 0o700
        assert [path.name for path in node.scratch.iterdir()] == ["61000"], "the attempt's"


def test_miopen_has_a_folder_where_the_gpus_are_amd_s(node: Node) -> None:
    text = (node.desk.config / "sites" / "gpus.yaml").read_text()
    node.desk.site(f"{text}gpu_vendor: amd\n")
    _, environment = node.ranks(node.script())
    assert {path.name for path in node.scratch.iterdir()} == {"miopen", "61000"}
    assert environment["APPTAINERENV_MIOPEN_USER_DB_PATH"] == f"{node.scratch}/miopen"


@pytest.mark.parametrize("planted", ["link", "dangling link", "file", "somebody's folder"])
def test_what_another_user_has_put_in_its_place_is_refused(node: Node, planted: str) -> None:
    elsewhere = node.desk.root / "elsewhere"
    node.scratch.parent.mkdir()
    if planted == "file":
        node.scratch.write_text("")
    elif planted == "somebody's folder":
        if os.getuid() != 0:
            pytest.skip("only root can make a folder of another user")
        node.scratch.mkdir(mode=0o700)
        os.chown(node.scratch, 65534, 65534)
    else:
        if planted == "link":
            elsewhere.mkdir(mode=0o700)
        node.scratch.symlink_to(elsewhere)
    done = node.start(node.script())
    assert done.returncode == 1 and not (node.desk.root / "dump.argv").exists()
    assert f"{node.scratch} is not a folder of yours: another user may have put it there" in done.stderr
    assert not elsewhere.exists() or not list(elsewhere.iterdir())


#: What lies at `disk`, and on the way to it; how node.sh names what another user could replace. None: it starts.
WAYS: dict[str, tuple[int, int, str | None]] = {
    # mode of disk, mode of its parent, what is named
    "private": (0o700, 0o755, None),
    "sticky": (0o1777, 0o1777, None),
    "world-writable": (0o777, 0o755, r"drwxrwxrwx \w+ \w+ /\S+/way/disk"),
    "in a world-writable one": (0o755, 0o777, r"drwxrwxrwx \w+ \w+ /\S+/way"),
    "unreadable for others, and yet": (0o703, 0o755, r"drwx----wx \w+ \w+ /\S+/way/disk"),
}


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_node_folder_in_which_others_can_replace_files_is_refused(node: Node, way: str, linked: bool) -> None:
    mode, above, named = WAYS[way]
    disk = node.desk.root / "way" / "disk"
    disk.mkdir(parents=True)
    disk.chmod(mode)
    disk.parent.chmod(above)
    if linked:
        (node.desk.root / "link").symlink_to("way")
        disk = node.desk.root / "link" / "disk"
    done = node.start(node.desk_script(disk))
    if named is None:
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1 and not (node.desk.root / "dump.argv").exists()
    assert f"other users can replace files in {disk} (paths.node), by way of: " in done.stderr
    assert re.search(f"by way of: {named} - set paths.node to", done.stderr), done.stderr
    assert not list(disk.iterdir()), "nothing was written there"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("planted", ["folder", "link", "folder's parent", "group"])
def test_a_node_folder_by_way_of_another_user_s_is_refused(node: Node, planted: str) -> None:
    shared, hers = node.desk.root / "shared", node.desk.root / "hers"
    hers.mkdir(mode=0o755)
    shared.mkdir()
    shared.chmod(0o1777)
    disk = shared / "disk"
    if planted == "link":
        disk.symlink_to(hers)
        os.lchown(disk, 65534, 65534)
    elif planted == "group":
        disk.mkdir()
        os.chown(disk, 0, 65534)
        disk.chmod(0o775)
    else:
        disk.mkdir(mode=0o755)
        os.chown(disk, 65534, 65534)
        disk /= "deeper" if planted == "folder's parent" else ""
    done = node.start(node.desk_script(disk))
    assert done.returncode == 1 and not (node.desk.root / "dump.argv").exists()
    assert re.search("by way of: [dl]rwx.* /\\S+/shared/disk - set", done.stderr), done.stderr
    assert not list(hers.iterdir()) and not (planted == "folder's parent" and disk.exists())


def test_what_node_sh_makes_on_the_way_is_closed_to_others(node: Node) -> None:
    disk = node.desk.root / "new" / "disk"
    script = node.desk_script(disk).replace("set -euo pipefail", "set -euo pipefail\numask 0")
    assert node.start(script).returncode == 0
    assert [path.stat().st_mode & 0o777 for path in (disk.parent, disk)] == [0o755, 0o755]


def preflight(node: Node, script: str) -> tuple[str, list[str]]:
    """node.sh's complaint, and what it left for job.sh. The container is not started."""
    done = node.start(script, SLURMDDP_STEP="preflight")
    assert done.returncode == 1 and not (node.desk.root / "dump.argv").exists()
    return done.stderr, (node.run / "logs/preflight/node7.failed").read_text().splitlines()[1:]


def test_every_bind_that_the_node_lacks_is_named(node: Node) -> None:
    """The user's, the site's and the dataset's; before the container, which would not start, and name the first."""
    text = (node.desk.config / "sites" / "gpus.yaml").read_text()
    node.desk.site(text.replace("runtime: apptainer", "runtime: apptainer, binds: ['/no where/$$HOME']"))
    there = node.desk.write("there")
    loop = node.desk.root / "loop"
    loop.symlink_to(loop)
    script = node.script(f'container.binds=["{there}:/there:ro", "{loop}:/loop"]')
    complaint, left = preflight(node, script)
    said = (
        f"cannot bind /no where/$HOME (No such file or directory), {loop} (Too many levels of symbolic links), "
        "/data/books (No such file or directory) - mount or create it on this node, or correct container.binds"
    )
    assert complaint == f"slurmddp: node node7: {said}\n"
    assert left == [said]


@pytest.mark.parametrize("code", [0, 3])
def test_a_setup_line_that_exits_is_named_by_the_preflight(node: Node, code: int) -> None:
    complaint, left = preflight(node, node.script(f"setup=['exit {code}']"))
    assert complaint == f"slurmddp: node node7: {left[0]}\n"
    assert left == [f"setup line exited with code {code}: exit {code}"]


def test_a_setup_line_must_not_return(node: Node) -> None:
    """The lines are evaluated in a sourced file, whose rest `return` would skip."""
    complaint, left = preflight(node, node.script("setup=['(exit 0)', 'return 0', 'true']"))
    assert complaint == f"slurmddp: node node7: {left[0]}\n"
    assert left == ["setup line failed: it must not call return: return 0"]


def test_a_setup_line_may_use_any_name(node: Node) -> None:
    """Scripts of modules and conda have variables of their own."""
    setup = f"export PATH={node.desk.bin}:$PATH"
    found = node.ranks(node.script(f"setup=['{setup}']"))
    names = "code=1 scratch=2 node_rank=3 head=4 address=5 interface=6 network=7 gloo_interface=8 ranks=9 threads=0"
    assert node.ranks(node.script(f"setup=['{setup}', '{names}']")) == found


def test_what_would_change_the_container_silently_is_all_taken_away() -> None:
    inherited = "BIND,BINDPATH,MOUNT,CONTAIN,CONTAINALL,COMPAT"
    assert f"unset {{APPTAINER,SINGULARITY}}_{{{inherited}}}\n" in (SHELL / "node.sh").read_text()


@pytest.mark.parametrize("size", [None, 0, 300_000])
def test_a_node_without_the_functions_says_so(node: Node, size: int | None) -> None:
    archive = node.run / "code" / "slurmddp.zip"
    archive.unlink() if size is None else os.truncate(archive, size)
    complaint, left = preflight(node, node.script())
    assert complaint.splitlines()[-1] == f"slurmddp: node node7: {left[0]}"
    assert left[0].startswith("the run's copy of the code is gone or incomplete, ")


def two_nodes(node: Node) -> dict[str, str]:
    """The variables of the first of two nodes, and what their names lead to."""
    (node.run / "logs/preflight").mkdir()  # by job.sh
    node.desk.program("scontrol", "#!/bin/bash\nprintf 'node7\\nnode8\\n'\n")
    node.desk.program("getent", "#!/bin/bash\necho 10.0.0.8 STREAM node8\n")
    node.desk.program("ip", "#!/bin/bash\necho 10.0.0.8 dev ib0 src 10.0.0.7\n")
    return {"SLURMDDP_NODES": "2", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "node[7-8]"}


def test_without_a_preflight_a_node_that_fails_waits_for_the_word_of_the_others(node: Node) -> None:
    """srun would end them before their slower setup lines have failed, too."""
    nodes = ("resources.nodes=2", "train.batch.global=64", "recovery.preflight=false")
    others = "sleep 3; touch $SLURMDDP_LOGS/preflight/node8.ready"
    script = node.script(*nodes, f"setup=['{{ {others}; }} >/dev/null 2>&1 &', 'false']")
    began = time.monotonic()
    done = node.start(script, **two_nodes(node))
    assert done.returncode == 1 and "setup line failed with exit code 1: false" in done.stderr
    assert 3 <= time.monotonic() - began < 50


def test_without_a_preflight_a_node_tells_the_others_that_its_ranks_can_start(node: Node) -> None:
    variables = two_nodes(node)
    node.desk.program(
        "apptainer", '#!/bin/bash\n[[ "$*" == *agent* ]] || { echo True nothing 3.12 python3; exit; }\n' + DUMP
    )
    nodes = ("resources.nodes=2", "train.batch.global=64", "recovery.preflight=false")
    node.ranks(node.script(*nodes), **variables)
    assert [path.name for path in (node.run / "logs/preflight").iterdir()] == ["node7.ready"]


def test_a_mount_that_is_dead_holds_nothing_up(node: Node) -> None:
    pid = node.desk.root / "pid"
    stat = f'#!/bin/bash\ncase $* in *dead*) echo $$ >>{pid}; exec sleep 600;; esac\nexec /usr/bin/stat "$@"\n'
    node.desk.program("stat", stat)
    script = node.script('container.binds=["/dead/one", "/", "/dead/two"]', "train.data.path=/usr")
    node.change_functions("patience = [], 10.0", "patience = [], 2.0", "supervisor/node_checks.py")
    try:
        complaint, _ = preflight(node, script)
    finally:
        for word in pid.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(word), signal.SIGKILL)
    assert ": cannot bind /dead/one (no answer), /dead/two (no answer) - mount or create it" in complaint


def test_a_check_that_breaks_is_named(node: Node) -> None:
    node.change_functions("lacks, patience = [], 10.0", "lacks, patience = 1 / 0", "supervisor/node_checks.py")
    complaint, left = preflight(node, node.script())
    assert "ZeroDivisionError" in complaint and left == ["cannot check mounts: its log says why"]


def test_with_all_binds_there_the_preflight_goes_on(node: Node) -> None:
    image = node.desk.write("image.sif", SIF)
    options = ('container.binds=["/usr:/host:ro"]', "train.data.path=/etc", f"container.image={image}")
    done = node.start(node.script(*options), SLURMDDP_STEP="preflight")
    assert done.returncode == 0, done.stderr
    assert node.got()[0][-3:] == ["-m", "slurmddp.runtime.preflight", str(node.run)]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.skipif(not has("shellcheck"), reason="shellcheck is not installed")
def test_bash_and_shellcheck_have_nothing_to_say(node: Node, runtime: str, tmp_path: Path) -> None:
    options = (f"container.runtime={runtime}", 'container.options=["--contain"]', 'container.binds=["/a b:/c"]')
    check_bash(node.script(*options, "paths.node=/local disk"), "node.sh", tmp_path)
