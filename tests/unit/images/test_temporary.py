"""The /tmp and /var/tmp of a build: fresh, its own, and gone afterwards."""

import stat
from pathlib import Path

import pytest

from slurmddp.errors import ExternalError
from slurmddp.images.make import Rules
from slurmddp.images.workspace import own_tmp

from .conftest import GOOD_BUILD, Apptainer
from .test_build import make

#: What a build does: show the two folders it was given, and leave files there that a plain removal cannot delete.
LEAVES = (
    'for word in "$@"; do case $word in *:/tmp|*:/var/tmp) folder=${word%%:*}; echo "mode $(stat -c %a $folder)";'
    ' echo "left $(ls -A $folder)"; mkdir -p $folder/.a/b; touch $folder/.a/b/c; chmod 555 $folder/.a/b ;; esac; done; '
)


@pytest.mark.parametrize("end", [GOOD_BUILD, "exit 1"])
def test_a_build_has_its_own_tmp_which_is_removed(apptainer: Apptainer, base: Path, tmp_path: Path, end: str) -> None:
    apptainer.builds(LEAVES + end)
    rules = Rules(cache=tmp_path / "scratch")
    if end == GOOD_BUILD:
        _, said = make(tmp_path, rules=rules)
        assert said.count("mode 1777") == 2 and said.count("left ") == 2
    else:
        with pytest.raises(ExternalError):
            make(tmp_path, rules=rules)
    (call,) = [call for call in apptainer.calls if " build " in call]
    own = f"--bind {tmp_path}/scratch/images/tmp/slurmddp-"
    assert call.count(own) == 2 and ":/tmp --bind " in call and ":/var/tmp " in call
    assert list((tmp_path / "scratch/images/tmp").iterdir()) == []


def test_nobody_else_reaches_it(tmp_path: Path) -> None:
    with own_tmp("singularityce", "3.8.0", tmp_path, print) as (options, variables):
        (own,) = tmp_path.iterdir()
        assert stat.S_IMODE(own.stat().st_mode) == 0o700
        assert variables == dict.fromkeys(("APPTAINER_TMPDIR", "SINGULARITY_TMPDIR"), f"{own}/builder")
        assert options == ("--bind", f"{own}/slurmddp-tmp:/tmp", "--bind", f"{own}/slurmddp-var-tmp:/var/tmp")
    assert not own.exists()


def test_an_odd_place_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "a:b").mkdir()
    for place in (tmp_path / "a:b", tmp_path / "gone"):
        with own_tmp("apptainer", "1.0.0", place, print) as (options, variables):
            assert variables == {}
            assert options[1].startswith("/tmp/slurmddp-") and options[1].count(":") == 1


def test_a_singularity_that_cannot_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    with own_tmp("singularity", "3.7.4-1.el8", tmp_path, said.append) as (options, _):
        assert options == () and list(tmp_path.iterdir()) == []
    assert "singularity 3.7.4-1.el8 cannot give a build its own /tmp" in said[0]
