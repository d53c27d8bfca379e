"""Each rule finds its bad script, stays silent on its good one, and is listed in docs/check.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.scripts.check.finding import RULES, Finding, Hit, check_script
from slurmddp.scripts.check.rule import Rule
from slurmddp.scripts.check.script import Script, read

from . import needs_namespaces, page

FIXTURES = Path(__file__).parent / "fixtures"
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
#: Errors that come with another one: what bash reads is no srun then.
ALONG = {"invisible-character": {"one-node-only"}, "syntax": {"no-program"}}


def found(path: Path) -> list[Finding]:
    return check_script(read(path))


@needs_namespaces
@every_rule
def test_rule_finds_its_bad_script(rule: Rule[Script, Hit]) -> None:
    findings = found(FIXTURES / "bad" / f"{rule.id}.sbatch")
    assert rule.id in {each.rule.id for each in findings}
    errors = {each.rule.id for each in findings if each.severity == "error"}
    assert errors - ALONG.get(rule.id, set()) <= {rule.id}


def test_rules_of_the_text_need_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_NO_SANDBOX", "1")
    alone = set()
    for rule in RULES:
        try:
            script = read(FIXTURES / "bad" / f"{rule.id}.sbatch")
        except UserError:
            continue
        assert not script.found.launches
        alone |= {rule.id} & {each.rule.id for each in check_script(script)}
    assert alone >= {
        "blank-in-assignment", "broken-continuation", "conda-activate", "crlf", "invisible-character", "log-folder",
        "no-shebang", "no-time", "sbatch-after-command", "sbatch-option", "sbatch-variable", "secret",
        "syntax", "wait-missing", "signal-to-steps",
    } and not alone & {"nnodes", "node-rank", "launcher-per-task", "local-rendezvous", "world-size"}  # fmt: skip


@every_rule
def test_rule_is_silent_on_its_good_script(rule: Rule[Script, Hit]) -> None:
    findings = found(FIXTURES / "good" / f"{rule.id}.sbatch")
    assert not [each for each in findings if each.rule.id == rule.id or each.severity == "error"]


@pytest.mark.parametrize("path", sorted((FIXTURES / "fine").iterdir()), ids=lambda path: path.stem)
def test_a_way_to_launch_that_works_is_no_error(path: Path) -> None:
    assert not [each for each in found(path) if each.severity == "error"]


@needs_namespaces
@pytest.mark.parametrize("path", sorted((FIXTURES / "broken").iterdir()), ids=lambda path: path.stem)
def test_a_way_to_launch_that_cannot_work_is_an_error(path: Path) -> None:
    """The name of the file begins with the rule that must find it."""
    assert path.stem.partition("--")[0] in {each.rule.id for each in found(path) if each.severity == "error"}


def test_every_fixture_belongs_to_a_rule() -> None:
    for folder in ("bad", "good"):
        assert {path.stem for path in (FIXTURES / folder).iterdir()} == {rule.id for rule in RULES}


@every_rule
def test_rule_is_explained(rule: Rule[Script, Hit]) -> None:
    assert re.fullmatch(r"https://\S+", rule.source)
    for sentence in (rule.reason, rule.fix):
        assert sentence[0].isupper() or sentence.startswith(("srun", "sbatch", "bash", "localhost", "hostname", "--"))
        assert sentence.isascii() and sentence.endswith((".", "'", "FILE"))


def test_the_page_has_the_table_of_the_code() -> None:
    """If it does not: python -m tests.unit.scripts.page"""
    assert page.table() in page.PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "text",
    [
        "A=x\n" + 'A="$A$A"\n' * 60,
        'A=("" "")\n' + 'A=("${A[@]}" "${A[@]}")\n' * 60,
        "echo " + "$(" * 300 + ")" * 300,
        "A=" + "${A:-" * 300 + "}" * 300,
        'A=\'eval "$A"; eval "$A"; \'\n' + 'A="$A$A"\n' * 5 + 'eval "$A"',
        "#SBATCH --time=" + "9" * 5000,
        "\n" * 50_000,
        " " * 50_000,
        "for i in x; do\n" * 5000,
        "echo " + "$(" * 5000,
        "echo " + '"$(' * 5000,
        "cat <<EOF",
        "x='",
        "${",
        "srun",
        "`",
    ],
)
def test_text_that_no_shell_can_read_is_no_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.sbatch"
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    found(path)


def test_a_file_of_5_mb_is_one_message(tmp_path: Path) -> None:
    path = tmp_path / "large.sbatch"
    path.write_bytes(b"#!/bin/bash\n" + b"x " * 2_500_000)
    with pytest.raises(UserError, match="too large for a batch script"):
        found(path)


@pytest.mark.parametrize(
    ("before", "command", "rule", "line"),
    [
        ("export PORT=29511\necho", "--rdzv_endpoint=$(hostname):$PORT", "fixed-port", 6),
        ("echo", "\\\n  --rdzv_id=7 \\\n  --rdzv_endpoint=$(hostname):29511", "fixed-port", 9),
        ("IP=$(hostname -I)\necho", "--rdzv_endpoint=$IP:$SLURM_JOB_ID", "hostname-ip", 6),
    ],
)
@needs_namespaces
def test_a_finding_names_the_line_of_the_value(tmp_path: Path, before: str, command: str, rule: str, line: int) -> None:
    head = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH -G 8\n#SBATCH -t 9\n#SBATCH -c 9\n"
    path = tmp_path / "job.sbatch"
    path.write_text(f"{head}{before}\nsrun torchrun --nnodes=2 --rdzv_backend=c10d {command} x.py\n", encoding="utf-8")
    assert [each.line for each in found(path) if each.rule.id == rule] == [line]


ONE_NODE = "#SBATCH -N 1\n#SBATCH -t 9\n#SBATCH -J a\n#SBATCH --gpus-per-node="


@needs_namespaces
@pytest.mark.parametrize(
    ("text", "rule", "message"),
    [
        ("accelerate launch --num_processes 1 train.py", "fixed-port", None),
        (f"{ONE_NODE}1\naccelerate launch train.py", "fixed-port", None),
        (f"{ONE_NODE}2\naccelerate launch train.py", "fixed-port", "port 29500 is the same in each job"),
        # The batch shell has the CPUs of all tasks.
        (f"{ONE_NODE}2\n#SBATCH -n 8\ntorchrun --nproc_per_node=2 t.py", "no-cpus", None),
        (f"{ONE_NODE}2\n#SBATCH -n 2\nsrun python t.py", "no-cpus", "the job asks for no CPUs per task"),
        ("KEY=<your key>\npython t.py", "syntax", "<your key> is to be filled in: syntax error near unexpected token"),
        ("srun bash -c 'nsys profile -o a\n  --config=a \\\n  python t.py'", "broken-continuation",
         "no backslash ends the line above, so --config=a is run as a program"),
        ("A=(\n  --a\n)\ncat <<E\n--a\nE\npython t.py ${A[@]}", "broken-continuation", None),
        ("STEPS=5\ntorchrun t.py --steps=$STEP", "undefined-variable", "STEP is never set; did you mean STEPS?"),
        ("STEPS=5\nSTEP=1\ntorchrun t.py --steps=$STEP", "undefined-variable", None),
        ("export DATA=5\ntorchrun t.py --steps=$STEP", "undefined-variable", None),
    ],
)  # fmt: skip
def test_what_other_scripts_have_shown(tmp_path: Path, text: str, rule: str, message: str | None) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    messages = [each.message for each in found(path) if each.rule.id == rule]
    assert [each[: len(message or "")] for each in messages] == ([message] if message else [])


@pytest.mark.parametrize(
    ("line", "severity"),
    [("--bee-image=$X", "warning"), ("--nodes=$X", "error"), ("--site-option=1", "warning"), ("-N=2", "error"),
     ("--time=24h", "error"), ("--mem=64 GB", "error"), ("--mem=1G --mem-per-cpu=1G", "error"),
     ("--ntask-per-node=1", "error"), ("--workdir=/x", "warning"),
     ("--tasks-per-node=1", None), ("--cluster=a", None), ("--wait-all-nodes=1", None), ("--mem=64GB", None),
     ("--nodes=2-4", None), ("--time=1-12", None), ("--container-image=x", None), ("--cpus-per-task=8# all", None)],
)  # fmt: skip
def test_sbatch_options_are_judged_as_sbatch_judges_them(tmp_path: Path, line: str, severity: str | None) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(f"#!/bin/bash\n#SBATCH {line}\nhostname\n", encoding="utf-8")
    told = {each.severity for each in found(path) if each.rule.id in ("sbatch-option", "sbatch-variable")}
    assert told == ({severity} if severity else set())


def test_directives_of_another_script_are_not_late(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    inner = "#!/bin/bash\n#SBATCH -N 2\nhostname\n"
    for text, count in ((f"sbatch <<EOF\n{inner}EOF\n", 0), (f"hostname\n{inner}", 1)):
        path.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
        assert [each.rule.id for each in found(path)].count("sbatch-after-command") == count


@pytest.mark.parametrize("word", ["#SBATCh", "#Sbatch", "#SBTACH"])
def test_a_misspelled_directive_is_found(tmp_path: Path, word: str) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(f"#!/bin/bash\n{word} --nodes=1\nhostname\n", encoding="utf-8")
    assert "sbatch-disabled" in {each.rule.id for each in found(path)}


def test_each_part_of_a_heterogeneous_job_has_its_own_options(tmp_path: Path) -> None:
    path, parts = tmp_path / "job.sbatch", ("#SBATCH -p cpu --mem=1G", "#SBATCH -p gpu --mem-per-cpu=1G")
    for between, expected in (("#SBATCH hetjob", set()), ("#", {"option-twice", "sbatch-option"})):
        path.write_text("\n".join(["#!/bin/bash", parts[0], between, parts[1], "hostname\n"]), encoding="utf-8")
        assert {each.rule.id for each in found(path)} & {"option-twice", "sbatch-option"} == expected


TWO_NODES = "#!/bin/bash\n#SBATCH -N 2\n#SBATCH -G 8\n#SBATCH -t 9\nM=$(scontrol show hostnames | head -n 1)\n"


@pytest.mark.parametrize(
    ("srun", "options", "severity"),
    [
        ("srun", "--node_rank=0 @S", "error"),
        ("srun", "@S", "error"),
        ("srun", "--node_rank=$SLURM_NODEID @S", "error"),  # the batch shell expands it
        ("srun", "--node_rank=$R @S", None),
        ("srun", "--node_rank=0 @C", None),  # c10d numbers the nodes itself
        ("srun", "--node_rank=0 --rdzv_backend=$B @S", None),
        ("srun", "--node_rank=0 $MORE @S", None),  # which may name another backend
        ("srun", "$MORE @S", None),
        ("srun", "$MORE --rdzv_backend=static @S", None),
        ("srun", "--standalone --node_rank=0", None),
        ("srun -n 8", "--node_rank=0 @S", None),  # launcher-per-task tells
        ("srun -n $N", "--node_rank=0 @S", None),
        ("srun -N 1 -n 1 -w $HOST", "--node_rank=0 @S", None),  # the first of several steps
        ("", "--node_rank=0 @S", None),  # one-node-only tells
    ],
)
@needs_namespaces
def test_node_rank_is_wrong_only_where_nodes_meet_by_it(
    tmp_path: Path, srun: str, options: str, severity: str | None
) -> None:
    options = options.replace("@S", "--master_addr=$M --master_port=$P").replace("@C", "--rdzv_backend=c10d")
    path = tmp_path / "job.sbatch"
    path.write_text(f"{TWO_NODES}P=$SLURM_JOB_ID\n{srun} torchrun --nnodes=2 {options} x.py\n", encoding="utf-8")
    assert {each.severity for each in found(path) if each.rule.id == "node-rank"} == ({severity} if severity else set())


@needs_namespaces
def test_a_node_rank_beside_a_file_of_settings_is_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    meets = "--num_machines=2 --main_process_ip=$M --main_process_port=$P --num_processes=8 --machine_rank=0"
    for config, expected in (("", "error"), ("--config_file c.yaml ", "warning")):  # which may say otherwise
        line = f"srun accelerate launch {config}{meets} x.py\n"
        path.write_text(f"{TWO_NODES}P=$SLURM_JOB_ID\n{line}", encoding="utf-8")
        assert {each.severity for each in found(path) if each.rule.id == "node-rank"} == {expected}
