"""Which options of the runtime give a container a /dev, /tmp and home of its own."""

import json
from typing import get_args

import pytest

from slurmddp.container import SIF_PROGRAMS, Runtime, runtime_named
from slurmddp.container.apptainer import contains
from tests.helpers import LM_JOB, Desk


@pytest.mark.parametrize(
    "option",
    ["-c", "-C", "--contain", "--containall", "--compat", "--contain=true", "-ce", "-eC", "-puc", "-c=1"],
)
def test_contained(option: str) -> None:
    assert contains(option)


@pytest.mark.parametrize(
    "option",
    [
        "--nv", "--cleanenv", "-e", "-p", "--no-home", "--nvccli", "--containlibs=/x", "--cwd=/c", "--env=A=-c",
        "--contain=false", "--compat=0", "-c=F", "-B/c:/C", "-eH/home/c", "-W/scratch", "-S/c", "-o/c.img",
    ],
)  # fmt: skip
def test_not_contained(option: str) -> None:
    assert not contains(option)


def test_an_option_of_the_site_s_counts_too(desk: Desk) -> None:
    assert not desk.plan(LM_JOB).container.contained
    text = (desk.config / "sites" / "gpus.yaml").read_text()
    desk.site(text.replace("runtime: apptainer", "runtime: apptainer, options: [--contain]"))
    assert desk.plan(LM_JOB).container.contained
    assert desk.plan(LM_JOB, f"container.options={json.dumps(['--cleanenv'])}").container.contained


def test_a_node_s_own_folder_is_below_tmp_or_where_the_job_says(desk: Desk) -> None:
    assert desk.plan(LM_JOB).node_folder == "/tmp"
    assert desk.plan(LM_JOB, "paths.node=/local").node_folder == "/local"


def test_each_word_has_its_class() -> None:
    assert [runtime_named(word).runtime for word in get_args(Runtime)] == list(get_args(Runtime))
    assert runtime_named(None).runtime == "apptainer"
    assert SIF_PROGRAMS == ("apptainer", "singularity")
