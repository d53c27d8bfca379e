"""The table of benchmarks/rivals.py: a cell never says more than its runs have shown."""

from benchmarks import rivals
from benchmarks.rivals import Result


def test_a_cell_counts_survivors_and_names_other_ends() -> None:
    runs = [
        Result("torchrun", "node lost", 30.2, 2, "same weights"),
        Result("torchrun", "node lost", 50.4, 4, "other weights"),
        Result("torchrun", "node lost", 40.0, 3, "did not finish"),
        Result("torchrun", "node lost", None, 0, "nothing in 300 s"),
    ]
    cells = rivals.text(runs).split("| torchrun |")[1].split(" | ")
    assert cells[2] == "2 of 4, 40 s (30 to 50), 3 steps, did not finish, nothing in 300 s, other weights"
    assert [cells[number].strip() for number in (0, 1, 3)] == ["-"] * 3


def test_the_page_names_what_each_was_given() -> None:
    for rival in rivals.RIVALS:
        (line,) = (line for line in rivals.text([]).splitlines() if line.startswith(f"- {rival.title}, "))
        for word in rival.command.replace("{python}", "python").replace("{folder}/", "").split():
            assert word in line
