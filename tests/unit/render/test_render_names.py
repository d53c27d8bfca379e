"""Names of the user's variables that node.sh has for its own: refused, or they reach the ranks and change nothing."""

import re
import shutil
import subprocess
from typing import NamedTuple

import pytest

from slurmddp.assets import package_folder
from slurmddp.job.job import RESERVED
from tests.helpers import Desk, make_code, on_disk

#: The arguments, then the environment, each entry with a NUL at its end. A preflight fails where it is to fail.
PYTHON = """#!/bin/bash
{ printf "%s\\0" "$@"; env -0; } >"$DUMP"
if [[ "$*" == *runtime.preflight* ]]; then echo "what it says" >&2; exit "$PREFLIGHT_EXITS"; fi
"""
#: Names of bash and torchrun, which no script of ours assigns.
FOREIGN = re.compile("[A-Z_]+")
SCRIPTS = ("node.sh", "setup.sh")


def assigned(text: str) -> set[str]:
    """The names that a script assigns, loops over or reads into."""
    code = "\n".join(line.split(" #")[0] for line in text.splitlines() if not line.lstrip().startswith("#"))
    found = re.findall(r"(?:^|[\s;(])([A-Za-z_]\w*)\+?=", code)
    found += re.findall(r"\bfor (?:\(\()?([A-Za-z_]\w*)", code)
    for words in re.findall(r"\b(?:local|read|mapfile)((?: +[-\w]+)+)", code):
        found += re.findall(r" ([A-Za-z_]\w*)", words)
    return set(found)


class Started(NamedTuple):
    code: int
    stderr: str
    marker: str | None
    arguments: list[str]
    environment: dict[str, str]


def start(desk: Desk, script: str, step: str, exits: int) -> Started:
    """Run node.sh; return what became of it, and what it started. `exits`: the preflight's exit code."""
    run, dump = desk.root / "run", desk.root / "dump"
    shutil.rmtree(run, ignore_errors=True)
    (run / "logs").mkdir(parents=True)
    make_code(run)
    desk.program("python3", PYTHON)
    path = desk.write("node.sh", on_disk(desk, script))
    ours = dict.fromkeys(("SLURMDDP_ATTEMPT", "SLURMDDP_PORT", "SLURMDDP_RENDEZVOUS_ID"), "61000")
    ours |= {"SLURMDDP_RUN": str(run), "SLURMDDP_LOGS": str(run / "logs"), "SLURMDDP_NODES": "1", "SLURMDDP_STEP": step}
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURMD_NODENAME": "here"}
    environment = {**desk.environment, **ours, **slurm, "DUMP": str(dump), "PREFLIGHT_EXITS": str(exits)}
    done = subprocess.run(["bash", str(path)], env=environment, capture_output=True, text=True, check=False)
    entries = dump.read_text().split("\0")[:-1]
    arguments = [entry for entry in entries if "=" not in entry or entry.startswith("-")]
    marker = run / "logs/preflight/here.failed"
    return Started(
        done.returncode,
        done.stderr,
        marker.read_text() if marker.exists() else None,
        arguments,
        dict(entry.split("=", 1) for entry in entries if entry not in arguments),
    )


@pytest.mark.parametrize(("step", "exits"), [("", 0), ("preflight", 0), ("preflight", 5)])
def test_a_name_of_the_scripts_is_refused_or_left_to_the_user(desk: Desk, step: str, exits: int) -> None:
    job = "name: n\nsite: cores\ntrain: {script: a.py}\ncontainer: {runtime: none, python: python3}\n"
    _, plain = desk.scripts(job, "network.debug=true")
    texts = [plain, *((package_folder() / "shell" / name).read_text() for name in SCRIPTS)]
    names = {name for text in texts for name in assigned(text) if not FOREIGN.fullmatch(name)}
    assert {"run", "torchrun", "host", "head", "scratch", "python", "secrets"} <= names
    users = sorted(names - RESERVED)
    variables = ", ".join(f"{name}: theirs" for name in users)  # others come behind those of the network
    _, script = desk.scripts(job + f"network: {{debug: true, variables: {{{variables}}}}}\n")
    expected, found = start(desk, plain, step, exits), start(desk, script, step, exits)
    assert expected.code == bool(exits) and (expected.marker is None) == (exits == 0), expected.stderr
    assert found[:-1] == expected[:-1]
    if exits:
        return  # the last thing started is a check of Python
    debug = {name: value for name, value in expected.environment.items() if name.startswith("NCCL_")}
    assert debug["NCCL_DEBUG_FILE"].startswith("/") and debug.items() <= found.environment.items()
    assert {name: found.environment.get(name) for name in users} == dict.fromkeys(users, "theirs")
