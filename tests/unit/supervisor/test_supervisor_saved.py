"""Whether a script saved something since its job began: checkpoints/ of the run, and checkpoint.watch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmddp.supervisor.files import Files, apart


@pytest.mark.parametrize(
    ("content", "age", "saved"),
    [(b"\x80\x02x.", -5, True), (b"\x80\x02x.", 5, False), (b"\x80\x02x", -5, False), (b"a log of a kind", -5, False)],
)
def test_a_save_elsewhere_since_the_job_began(tmp_path: Path, content: bytes, age: float, saved: bool) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    out.mkdir()
    run.mkdir()
    assert Files(str(run)).saved([str(out)]) is None, "nobody knows when it began"
    (run / "job_began").touch()
    (out / "last.pt").write_bytes(content)
    os.utime(out / "last.pt", (time.time() - age,) * 2)
    assert Files(str(run)).saved([str(out)]) is saved
    assert Files(str(run)).saved([]) is False


def test_a_question_to_a_mount_that_hangs_has_no_answer() -> None:
    assert apart(lambda: True, 5) and not apart(lambda: False, 5)
    began = time.monotonic()
    with pytest.raises(OSError, match="no answer"):
        apart(lambda: bool(time.sleep(60)), 0.2)
    assert time.monotonic() - began < 5
