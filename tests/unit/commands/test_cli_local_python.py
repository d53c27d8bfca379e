"""Which Python trains on this machine where slurmddp itself has no torch, as where pipx or uv has installed it."""

from collections.abc import Callable

from tests.helpers import Desk, Result


def test_the_python_of_the_shell_trains(desk: Desk, cli: Callable[..., Result]) -> None:
    """Tests of the login side run without torch."""
    desk.write("train.py")
    desk.program("python3", "#!/bin/bash\n")
    assert f"python={desk.bin}/python3 " in cli("submit", "train.py", "--site", "local", "--dry-run").out
    (desk.bin / "python3").unlink()
    assert "python=" in cli("submit", "train.py", "--site", "local", "--dry-run", PATH=str(desk.bin)).out
