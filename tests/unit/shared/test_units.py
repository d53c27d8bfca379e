from slurmddp.shared.units import listed


def test_a_long_list_names_the_first_and_counts_the_rest() -> None:
    assert listed(["a", "b"], 3) == "a, b"
    assert listed(["a", "b", "c"], 3) == "a, b, c"
    assert listed(["a", "b", "c", "d", "e"], 3) == "a, b, c and 2 more"
