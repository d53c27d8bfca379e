"""The scripts themselves: valid, free of findings, computing nothing that was known before."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError

from slurmddp.assets import asset_folder
from slurmddp.job.job import Job
from slurmddp.job.site import Site
from slurmddp.render.documents import job_json, job_yaml, site_yaml
from slurmddp.render.engine import environment, quote
from slurmddp.render.per_node import node_commands
from slurmddp.render.scripts import job_script, node_script
from tests.helpers import LM_JOB, SHELL, Desk, check_bash, has, plan_of

SCRIPT_JOB = "name: own\nsite: gpus\ntrain: {script: src/train.py, args: [--lr, 3e-4, 'a b']}\n"
KINDS = {
    "lm": (LM_JOB, ()),
    "nodes": (LM_JOB, ("resources.nodes=4", "resources.time=1h")),
    "static": (LM_JOB, ("resources.nodes=2", "launch.rendezvous=static")),
    "interface": (LM_JOB, ("resources.nodes=2", "network.interface=ib0")),
    "exact interface": (LM_JOB, ("resources.nodes=2", "network.interface==ib0,ib1")),
    "no interface": (LM_JOB, ("resources.nodes=2", "network.interface=^lo,docker")),
    "debug": (LM_JOB, ("network.debug=true",)),
    "setup": (LM_JOB, ("setup=[module load x, 'export A=\"b c\"', source ~/env.sh]",)),
    "caches": (
        LM_JOB,
        ("paths.cache=/scratch/my cache", "container.options=[--cleanenv]", "container.binds=[/a:/b:ro]"),
    ),
    "singularity": (LM_JOB, ("container.runtime=singularity",)),
    "script": (SCRIPT_JOB, ("resources.nodes=2",)),
    "module": (SCRIPT_JOB.replace("script: src/train.py", "module: pkg.train"), ("train.project=.",)),
    "bash": (SCRIPT_JOB.replace("train.py", "run.sh"), ("resources.nodes=2",)),
    "no snapshot": (SCRIPT_JOB, ("snapshot=false", "environment.PYTHONPATH=/x:/y z")),
    "cores": (SCRIPT_JOB.replace("gpus", "cores"), ("resources.nodes=2", "resources.ranks_per_node=2")),
    "auto": (LM_JOB, ("resources.nodes=2", "resources.ranks_per_node=auto", "train.batch.global=64")),
    "auto cores": (SCRIPT_JOB.replace("gpus", "cores"), ("resources.nodes=2", "resources.ranks_per_node=auto")),
    "here": (LM_JOB.replace("gpus", "here"), ("resources.ranks_per_node=2",)),
    "elastic": (LM_JOB, ("resources.nodes={min: 2, max: 4, spares: 1}", "resources.time=1h")),
    "alerts": (LM_JOB, ("resources.nodes={min: 1, max: 2}", "alerts=[{to: slack, url_env: X}]")),
    "no requeue": (LM_JOB, ("resources.nodes=2", "recovery.requeue=never", "recovery.preflight=false")),
    "many": (
        LM_JOB,
        (
            "resources.nodes=2",
            "resources.ranks_per_node=auto",
            "train.batch.global=64",
            "launch.rendezvous=static",
            "setup=[module load x, 'export A=\"b c\"', source ~/env.sh]",
            "alerts=[{to: slack, url_env: X}]",
        ),
    ),
    "own task": (LM_JOB.replace("task: lm", "task: my.tasks:speech\n  project: ."), ()),
}


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)))
    | st.text("'\"\\$`!~ \n-=*{}", max_size=12)
)
def test_quote_brings_any_text_through_bash(text: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote(text)}"], capture_output=True, check=True)
    assert done.stdout == text.encode()


@pytest.mark.parametrize("text", ["a", "3e-4", "--lr=3e-4", "/a/b.py", "a@b:c,d%e+f", "x=y"])
def test_quote_leaves_alone_what_needs_no_quotes(text: str) -> None:
    assert quote(text) == text


@pytest.mark.parametrize("text", ["", " ", "=a", "~", "{a,b}", "*", "a&b", "#", "!", "(", "a'b", "ä"])
def test_quote_quotes_the_rest(text: str) -> None:
    assert quote(text)[0] in "'\""


def test_quote_refuses_nul() -> None:
    with pytest.raises(ValueError, match="NUL"):
        quote("a\0b")


#: shellcheck takes most of the time here; what these have beyond the others is a line or two, or is in "many", too.
#: `make lint` also checks the golden scripts of each kind.
ALIKE = set(KINDS) - {"many", "here"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long) if kind in ALIKE else kind for kind in KINDS]
)
@pytest.mark.skipif(not has("shellcheck"), reason="shellcheck is not installed")
def test_bash_and_shellcheck_have_nothing_to_say(desk: Desk, kind: str, tmp_path: Path) -> None:
    job, options = KINDS[kind]
    for name, text in zip(("job.sh", "node.sh"), desk.scripts(job, *options), strict=True):
        check_bash(text, name, tmp_path)
    guarded = " guarded=yes " in desk.scripts(job, *options)[0]
    assert guarded == (kind != "here")


@pytest.mark.parametrize("kind", KINDS)
def test_scripts_read_well(desk: Desk, kind: str) -> None:
    job, options = KINDS[kind]
    for text in desk.scripts(job, *options):
        assert text.startswith("#!/bin/bash\n")
        assert text.endswith("\n") and not text.endswith("\n\n")
        for found in ("{{", "{%", "%}", "{##", "None", "Undefined", "\t", "\n\n\n"):
            assert found not in text, found
        assert not [line for line in text.splitlines() if line != line.rstrip()]


def test_what_a_person_reviews_is_short(desk: Desk) -> None:
    """Of a simple job: somebody reads these before a week of GPU hours."""
    job, node = desk.scripts(LM_JOB, "resources.nodes=2", "resources.time=1h")
    assert len(job.splitlines()) <= 85 and len(node.splitlines()) <= 90


@pytest.mark.skipif(not has("shellcheck"), reason="shellcheck is not installed")
@pytest.mark.parametrize("kind", ["auto", pytest.param("here", marks=pytest.mark.long)])
def test_shellcheck_has_nothing_to_say_on_the_functions(desk: Desk, kind: str, tmp_path: Path) -> None:
    """All that job.sh and node.sh source, with the values that these assign: -a also reports what it finds there."""
    job, options = KINDS[kind]
    for name, text in zip(("job.sh", "node.sh"), desk.scripts(job, *options), strict=True):
        path = tmp_path / name
        path.write_text(text)
        command = ["shellcheck", "-x", "-a", "-f", "gcc", "-S", "warning", "-P", SHELL, path]
        if (kind, name) == ("here", "node.sh"):
            command.append("--exclude=SC2034")  # `threads`, which only `auto` uses
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        assert not [line for line in said.splitlines() if not line.startswith("/etc/")]  # which setup.sh sources


@pytest.mark.skipif(not has("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say_on_what_runs_by_itself() -> None:
    scripts = [path for path in SHELL.rglob("*.sh") if path.read_text().startswith("#!/bin/bash\n")]
    names = {"python.sh"}
    assert {path.name for path in scripts} == names
    done = subprocess.run(
        ["shellcheck", "-x", "-a", "-P", SHELL, *scripts],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_templates_and_functions_hide_no_finding() -> None:
    for path in (*asset_folder("templates").rglob("*.sh.j2"), *SHELL.rglob("*.sh")):
        assert "shellcheck" not in path.read_text().replace("# shellcheck shell=bash", ""), path


#: What bash may compute: what is known only once the job runs. Anything else belongs into the plan.
#: Programs and functions whose output it may take: they look at the job, the nodes and the run folder.
ASKED = {"check", "command", "date", "declare", "mktemp", "tail"}


@pytest.mark.parametrize("kind", [*KINDS, "functions"])
def test_bash_computes_only_what_was_not_known_before(desk: Desk, kind: str) -> None:
    texts = [path.read_text() for path in SHELL.rglob("*.sh")]
    if kind != "functions":
        job, options = KINDS[kind]
        texts = list(desk.scripts(job, *options))
    for text in texts:
        code = re.sub(r"(^|\s)#.*$", "", text, flags=re.MULTILINE)
        assert "$((" not in code, re.findall(r"\$\(\(.*", code)
        assert set(re.findall(r"\$\((?:\{ |\n *)?([A-Za-z_]\w*)", code)) <= ASKED
        assert not re.search(r"(?<!\\)`", code)
        assert not re.search(r"\b(let|expr|bc) ", code)


def test_undefined_names_are_errors() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ nothing }}").render()
    with pytest.raises(UndefinedError):
        environment().from_string("{% if plan.nothing %}x{% endif %}").render(plan=object())


def test_4096_nodes_are_the_same_text_as_2(desk: Desk) -> None:
    """Nothing is written per node: the texts differ in the number alone."""
    desk.site(Path(desk.config / "sites" / "gpus.yaml").read_text().replace("max_nodes: 64", "max_nodes: 9999"))
    options = ("train.batch.global=4194304", "train.batch.micro=1")
    for small, large in zip(
        desk.scripts(LM_JOB, *options, "resources.nodes=2"),
        desk.scripts(LM_JOB, *options, "resources.nodes=4096"),
        strict=True,
    ):
        normal = [
            re.sub(
                r"((?<=nodes=)|(?<=nodes_max=)|(?<=nodes_min=))(2|4096)\b|\b(2|4096)(?= node)",
                "N",
                text,
            )
            for text in (small, large)
        ]
        assert normal[0] == normal[1]


@pytest.mark.parametrize("kind", KINDS)
def test_rendering_is_pure(desk: Desk, kind: str) -> None:
    job, options = KINDS[kind]
    before = desk.tree() if (desk.project / "job.yaml").exists() else None
    first = desk.scripts(job, *options)
    before = desk.tree()
    resolved = desk.resolve_file(desk.project / "job.yaml", *options)
    plan = plan_of(resolved, desk.project)
    assert (job_script(plan), node_script(plan)) == first
    assert desk.tree() == before


# --- the documents


@pytest.mark.parametrize("kind", KINDS)
def test_the_resolved_job_reads_back_to_the_same_scripts(desk: Desk, kind: str) -> None:
    job, options = KINDS[kind]
    desk.site(
        (desk.config / "sites" / "gpus.yaml").read_text() + "  setup: [module load a]\n  paths: {runs: $SCRATCH/runs}\n"
    )
    text = (desk.config / "sites" / "gpus.yaml").read_text()
    desk.site(text.replace("image: /images", "binds: [$SCRATCH/x, /y:/z:ro], options: [--cleanenv], image: /images"))
    resolved = desk.resolve(job, *options, SCRATCH="/scratch/a$b")
    plan = plan_of(resolved, desk.project)
    first = job_script(plan), node_script(plan), job_yaml(resolved, plan)
    for _ in range(2):
        again = desk.resolve(first[2], SCRATCH="/scratch/a$b")
        plan = plan_of(again, desk.project)
        assert (job_script(plan), node_script(plan)) == first[:2]
        # Paths have become absolute, and the batch explicit; all else is as it was asked for.
        changed = {name: getattr(again.job.train, name) for name in ("batch", "script", "project", "data")}
        assert again.job.train == resolved.job.train.model_copy(update=changed)
        assert again.job.resources == resolved.job.resources
        first = (*first[:2], job_yaml(again, plan))


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.text()
        | st.integers()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.none()
        | st.booleans()
        | st.lists(st.text(), max_size=2),
        max_size=3,
    )
)
def test_free_values_read_back_from_the_resolved_job(tmp_path_factory: pytest.TempPathFactory, values: dict) -> None:
    desk = Desk(tmp_path_factory.getbasetemp() / "free values")
    resolved = desk.resolve(LM_JOB.replace("task: lm", "task: own.tasks:free"))
    train = resolved.job.train.model_copy(update={"model": values})
    resolved = type(resolved)(resolved.job.model_copy(update={"train": train}), resolved.site, resolved.layered, ())
    again = desk.resolve(job_yaml(resolved, plan_of(resolved, desk.project)))
    assert again.job.train.model == values


def test_the_resolved_job_has_every_key(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB)
    read = yaml.safe_load(job_yaml(resolved, plan_of(resolved, desk.project)))
    assert list(read) == [field.alias or name for name, field in Job.model_fields.items()]
    limits = {"rendezvous": "600s", "join": "600s", "collective": "600s", "stop": None, "hang": "120s"}
    assert read["timeouts"] == limits
    assert read["resources"]["mem_per_node"] is None
    assert list(yaml.safe_load(site_yaml(resolved))) == list(Site.model_fields)


def test_a_literal_dollar_in_a_path_reads_back(desk: Desk) -> None:
    resolved = desk.resolve(LM_JOB + "container: {image: /a/$$HOME.sif, binds: [/x/$$y:/z]}\n")
    plan = plan_of(resolved, desk.project)
    assert plan.container.image == "/a/$HOME.sif"
    assert plan_of(desk.resolve(job_yaml(resolved, plan)), desk.project).container == plan.container


def test_what_the_ranks_read_is_json_without_surprises(desk: Desk) -> None:
    assert job_json(desk.plan(SCRIPT_JOB), "id") is None
    own_task = LM_JOB.replace("task: lm", "task: own.tasks:free")
    text = job_json(desk.plan(own_task, "train.data.word=ä'\"\\", "train.data.rate=3e-4"), "id") or ""
    assert '"rate": 0.0003' in text
    assert "ä'\\\"\\\\" in text


# --- without Slurm


def test_a_line_for_each_node(desk: Desk) -> None:
    plan = desk.plan(SCRIPT_JOB, "resources.nodes=3", "environment.A=b c")
    texts = node_commands(plan, "head.example.org", 29400)
    assert texts[0] == "# own: 3 nodes; the first is head.example.org, with port 29400"
    assert texts[1].endswith("this command with --write RUN_FOLDER, not --per-node")
    assert texts[2].startswith("# First, on each node: address=$(ip -o -4 route get ")
    assert texts[3].startswith("# First, on each node: interface=$(ip -o -4 addr show to ")
    assert [
        n
        for n, text in enumerate(texts)
        if text.startswith(("# Preflight: one line per node", "# Ranks: one line per node"))
    ] == [4, 8]
    checks, lines = texts[5:8], texts[9:]
    assert all("SLURMDDP_PREFLIGHT_NODES=node0 node1 node2" in text for text in checks)
    assert len(lines) == 3
    for node, line in enumerate(lines):
        words = subprocess.run(
            ["bash", "-c", f"address=10.0.0.5 interface=ib0; printf '%s\\0' {line}"], capture_output=True, check=True
        ).stdout.decode().split("\0")  # fmt: skip
        assert words[0] == "env"
        assert "A=b c" in words
        assert any(word.endswith("SLURMDDP_STOP_FILE=RUN_FOLDER/stop") for word in words)
        assert any(word.endswith("SLURMDDP_ATTEMPT=0") for word in words)
        assert "--nnodes=3" in words and "--nproc-per-node=4" in words and "--local-addr=10.0.0.5" in words
        ours = ("APPTAINERENV_GLOO_SOCKET_IFNAME=ib0", "APPTAINERENV_SLURMDDP_RUN=RUN_FOLDER")
        assert set(ours) <= set(words)
        assert "--rdzv-endpoint=head.example.org:29400" in words
        assert any(f"is_host={int(node == 0)}" in word for word in words)
        assert words[-5:-1] == [f"{desk.project}/src/train.py", "--lr", "3e-4", "a b"]


def test_the_lines_of_nodes_find_a_task_of_the_project(desk: Desk) -> None:
    plan = desk.plan(LM_JOB.replace("task: lm", "task: own.tasks:free"), f"train.project={desk.project}")
    (line,) = [text for text in node_commands(plan, "h", 29400) if not text.startswith("#")][-1:]
    assert "PYTHONPATH=RUN_FOLDER/code/slurmddp.zip:RUN_FOLDER/code/project" in line


def test_static_lines_have_the_node_s_rank(desk: Desk) -> None:
    plan = desk.plan(SCRIPT_JOB, "resources.nodes=2", "launch.rendezvous=static", "recovery.preflight=false")
    lines = [text for text in node_commands(plan, "h", 29400) if not text.startswith("#")]
    assert [f"--rdzv-conf=rank={node} " in lines[node] for node in (0, 1)] == [True, True]


def test_the_resolved_job_means_the_same_files_from_another_folder(desk: Desk) -> None:
    text = "name: x\nsite: local\ntrain: {task: lm, data: {path: text}}\n"
    resolved = desk.resolve(text)
    written = job_yaml(resolved, plan_of(resolved, desk.project))
    elsewhere = plan_of(desk.resolve(written), desk.project.parent)
    assert elsewhere.data_paths == (str(desk.project / "text"),)
    assert elsewhere.runs_root == str(desk.project / "runs")
