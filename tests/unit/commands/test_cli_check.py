"""slurmddp check --script: text, JSON, exit codes, and files that cannot be checked."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ROOT, Desk, Result
from tests.unit.scripts import needs_namespaces

Cli = Callable[..., Result]
FIXTURES = ROOT / "tests/unit/scripts/fixtures"
BAD, GOOD = FIXTURES / "bad/launcher-per-task.sbatch", FIXTURES / "good/launcher-per-task.sbatch"


@needs_namespaces
def test_an_error_names_file_line_rule_reason_fix_and_source(cli: Cli) -> None:
    shown = cli("check", "--script", str(BAD))
    assert shown.code == 1
    first, why, fix, see = shown.out.splitlines()[:4]
    assert first == f"{BAD}:10: error: srun starts torchrun 4 times per node, each with 4 ranks [launcher-per-task]"
    assert re.match(r"    why: \w", why) and re.match(r"    fix: \w", fix) and re.match(r"    see: https://\S+$", see)
    assert shown.out.splitlines()[-1] == "1 script checked: 1 error"


def test_a_good_script_exits_with_0(cli: Cli) -> None:
    shown = cli("check", "--script", str(GOOD), str(GOOD), "--strict")
    assert (shown.code, shown.out) == (0, "2 scripts checked: nothing found\n")


@needs_namespaces
def test_strict_fails_for_warnings(cli: Cli) -> None:
    warned = str(FIXTURES / "bad/fixed-port.sbatch")
    assert cli("check", "--script", warned).code == 0
    assert cli("check", "--script", warned, "--strict").code == 1
    assert cli("check", "--script", str(FIXTURES / "bad/no-time.sbatch"), "--strict").code == 0


@needs_namespaces
def test_json_has_the_keys_of_the_page(cli: Cli) -> None:
    shown = cli("check", "--script", str(BAD), str(GOOD), "--json")
    assert shown.code == 1
    told = json.loads(shown.out)
    page = (ROOT / "docs/check.md").read_text(encoding="utf-8").split("## --json")[1]
    assert told["schema"] == 1 and told["files"] == [str(BAD), str(GOOD)]
    assert told["counts"] == {"error": 1, "warning": 0, "note": 0}
    keys = {"schema", "files", "findings", *(f"counts.{key}" for key in told["counts"])}
    keys |= {f"findings[].{key}" for key in told["findings"][0]}
    assert keys == set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the script"),
        (b"\x7fELF\0\0", "binary file"),
        (b" \n", "is empty"),
        ("folder", "a directory"),
    ],
)
def test_a_file_that_is_no_script_is_one_message(
    cli: Cli, desk: Desk, content: bytes | str | None, message: str
) -> None:
    path = Path(desk.project) / "train.sbatch"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content:
        path.mkdir()
    shown = cli("check", "--script", "train.sbatch")
    assert (shown.code, shown.out) == (2, "")
    assert message in shown.err and "train.sbatch" in shown.err and "->" in shown.err


def test_a_batch_script_is_known_by_its_name_or_its_lines(cli: Cli, desk: Desk) -> None:
    assert cli("check", str(BAD)) == cli("check", "--script", str(BAD))
    shown = cli("check", "--script", str(BAD), "--time", "1h")
    assert shown.code == 2 and "--time needs a job file" in shown.err
    assert "no batch script given" in cli("check", "--script").err
    desk.write("a.sh", BAD.read_text(encoding="utf-8"))
    assert "a.sh:10: error: srun starts torchrun" in cli("check", "a.sh").out
    desk.write("b.sh", "#!/bin/bash\npython train.py\n")
    assert "[submit-refuses]" not in cli("check", "b.sh", "--site", "cores", "--nodes", "1").out, "a training script"


@needs_namespaces
def test_fix_prints_the_script_on_stdout_and_what_it_found_on_stderr(cli: Cli, desk: Desk) -> None:
    script = desk.write("a.sbatch", BAD.read_text(encoding="utf-8"))
    text = script.read_text(encoding="utf-8")
    shown = cli("check", "--script", "a.sbatch", "--fix")
    assert shown.code == 0 and script.read_text(encoding="utf-8") == text
    assert set(text.splitlines()) - set(shown.out.splitlines()) == {text.splitlines()[9]}
    assert shown.err.splitlines()[0].startswith("a.sbatch:10: fixed: srun starts torchrun 4 times per node")
    assert shown.err.splitlines()[-1] == "1 fixed, not fixed: none"
    told = json.loads(cli("check", "--script", "a.sbatch", "--fix", "--json").out)
    assert told["script"] == shown.out and told["findings"] == [] and told["fixed"][0]["rule"] == "launcher-per-task"
    left = cli("check", "--script", str(FIXTURES / "broken/too-many-ranks--tasks.sbatch"), "--fix")
    assert left.code == 1 and "[too-many-ranks]" in left.err and "    fix: " in left.err
    assert left.err.splitlines()[-1] == "0 fixed, not fixed: 1 error"


@needs_namespaces
def test_fix_writes_a_new_file_and_replaces_one_only_with_force(cli: Cli, desk: Desk) -> None:
    script = desk.write("a.sbatch", "")
    script.write_bytes(b"#!/bin/bash\n#SBATCH -t 4h\n# \xff\nhostname")
    refused = cli("check", "--script", "a.sbatch", "--fix", "-o", "a.sbatch")
    assert (refused.code, refused.out) == (2, "") and "a.sbatch exists" in refused.err and "--force" in refused.err
    assert cli("check", "--script", "a.sbatch", "--fix", "-o", "b.sbatch").out == ""
    right = b"#!/bin/bash\n#SBATCH -t 4:00:00\n# \xff\nhostname"
    assert (script.parent / "b.sbatch").read_bytes() == right
    assert cli("check", "--script", "a.sbatch", "--fix", "-o", "a.sbatch", "--force").code == 0
    assert script.read_bytes() == right


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--script", "--json", "--explain", "name"], "cannot be combined"), (["--script", "-o", "b"], "-o needs --fix"),
     (["--script", "--fix", "--force"], "--force needs -o"), (["--script", "--fix", str(GOOD)], "one script, not 2")],
)  # fmt: skip
def test_an_option_of_fix_without_what_it_needs(cli: Cli, words: list[str], message: str) -> None:
    shown = cli("check", str(BAD), *words)
    assert (shown.code, shown.out) == (2, "") and message in shown.err


@pytest.mark.parametrize(
    ("mode", "option"),
    [(["--preflight"], ["--resume", "last"]), (["--rehearse"], ["--mtbf", "9"]), (["--per-node"], ["--partitions"]),
     (["--script"], ["--resume", "last"])],
)  # fmt: skip
def test_no_option_is_dropped_without_a_word(cli: Cli, desk: Desk, mode: list[str], option: list[str]) -> None:
    desk.write("train.py")
    shown = cli("check", "train.py", "--site", "cores", *mode, *option)
    assert (shown.code, shown.out) == (2, "") and f"{mode[0]} and {option[0]} cannot be combined" in shown.err


def test_a_job_is_checked_and_the_exit_code_follows_the_worst_finding(cli: Cli, desk: Desk) -> None:
    desk.write("train.py")
    desk.write("job.yaml", "site: cores\nname: x\ntrain: {script: train.py}\nresources: {nodes: 2, time: 1h}\n")
    shown = cli("check", "job.yaml")
    assert shown.code == 0 and "ranks               2 = 1 per node x 2" in shown.out, "the plan stands above"
    assert "\nnot checked: sbatch is not in PATH\n" in shown.out, "another machine may have it"
    assert "not checked, the job depends on it: a Python 3.6 or newer on each node: /usr/bin/python3, " in shown.out
    assert shown.out.splitlines()[-1].startswith("job x, ")
    desk.program("sbatch", "#!/bin/sh\n")
    assert cli("check", "job.yaml").code == 0
    wrong = ("check", "job.yaml", "--set", "network.interface=lo")
    assert cli(*wrong).code == 1 and "lo does not reach other nodes" in cli("submit", *wrong[1:], "--dry-run").err
    assert cli("check", "job.yaml", "--set", "environment.TRITON_CACHE_DIR=/home/x", "--strict").code == 1
    assert json.loads(cli(*wrong, "--json").out)["counts"]["error"] == 1
    refused = cli("check", "job.yaml", "--set", "resources.time=no")
    assert refused.code == 2 and "resources.time" in refused.err


def test_without_namespaces_the_text_alone_is_read_and_nothing_is_proven(cli: Cli, desk: Desk) -> None:
    desk.environment["SLURMDDP_NO_SANDBOX"] = "1"
    desk.write("t.py")
    desk.write("a.sbatch", "#!/bin/bash\n#SBATCH -N 2\n#SBATCH --gpus-per-node=4\n#SBATCH -t 4h\nsrun torchrun t.py\n")
    shown = cli("check", "a.sbatch")
    assert shown.code == 1 and "[sbatch-option]" in shown.out and "only the text of the script was read" in shown.err
    assert "[nnodes]" not in shown.out
    shown = cli("check", "a.sbatch", "--fix")
    assert "-t 4:00:00" in shown.out and "only its text was read" in shown.err
    shown = cli("import", "a.sbatch")
    assert shown.code == 1 and "not proven" in shown.err
