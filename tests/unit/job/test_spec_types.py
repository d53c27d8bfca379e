"""Durations, memory, names and #SBATCH values: what they mean and what they refuse."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from slurmddp.cluster.duration import seconds_of
from slurmddp.job import types
from slurmddp.job.document import Plain
from slurmddp.job.job import Bind, Job, Network
from slurmddp.job.train import Batch


def value(kind: Any, written: Any) -> Any:
    return TypeAdapter(kind).validate_python(written)


def refused(kind: Any, written: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        value(kind, written)
    return caught.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("24:00:00", 86400),
        ("00:10:00", 600),
        ("1-12:00:00", 129600),
        ("100:00:00", 360000),
        ("30m", 1800),
        ("90s", 90),
        ("1.5h", 5400),
        ("2d", 172800),
        ("2 days", 172800),
        ("5 min", 300),
        ("1h30m", 5400),
        ("1d12h", 129600),
        ("1h 30m 5s", 5405),
        ("30", 30),
        (Plain("1800"), 1800),
        (Plain("24:00:00"), 86400),
    ],
)
def test_durations(written: str, seconds: int) -> None:
    assert value(types.Seconds, written) == seconds


@pytest.mark.parametrize(
    "written",
    [
        "0",
        "0s",
        "1:30",
        "00:60:00",
        "00:00:61",
        "-1h",
        "30m1h",
        "1h30",
        "9" * 400 + "h",
        "",
        "tomorrow",
        "0:0:0",
        True,
        None,
        1.5,
    ],
)
def test_what_is_no_clear_duration_is_refused(written: Any) -> None:
    refused(types.Seconds, written)


def test_a_time_limit_needs_a_unit() -> None:
    assert "write 30h for hours, or 30m for minutes (Slurm's default)" in refused(types.TimeLimit, Plain("30"))
    assert value(types.TimeLimit, Plain("1h30m")) == 5400


@given(st.integers(1, 10**7))
def test_slurm_reads_back_the_times_that_we_write(seconds: int) -> None:
    assert value(types.Seconds, types.slurm_time(seconds)) == seconds
    assert seconds_of(types.slurm_time(seconds)) == seconds


@pytest.mark.parametrize(
    ("written", "mebibytes"),
    [
        ("480G", 491520),
        ("64GB", 65536),
        ("500000M", 500000),
        ("1T", 1048576),
        ("512K", 1),
        ("2 GiB", 2048),
        ("1g", 1024),
    ],
)
def test_memory(written: str, mebibytes: int) -> None:
    assert value(types.Mebibytes, written) == mebibytes


@pytest.mark.parametrize("written", ["64", "0G", "-1G", "1.5G", "64X", "", "G"])
def test_what_is_no_amount_of_memory_is_refused(written: str) -> None:
    refused(types.Mebibytes, written)


@pytest.mark.parametrize(
    ("written", "number"), [("100000", 100000), ("100_000", 100000), ("1e5", 100000), ("2.5e3", 2500)]
)
def test_counts(written: str, number: int) -> None:
    assert value(types.Count, Plain(written)) == number


@pytest.mark.parametrize("written", ["0", "-1", "1.5", "1e-3", "1e99", "ten", "", "1e400"])
def test_what_is_no_count_is_refused(written: str) -> None:
    refused(types.Count, Plain(written))


@pytest.mark.parametrize("name", ["a", "gpt-books", "A.b_c+1", "0", "x" * 100])
def test_names(name: str) -> None:
    assert value(types.Name, name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-a",
        ".a",
        "a b",
        "a\n",
        "a\nb",
        "a'b",
        'a"b',
        "$(id)",
        "a;b",
        "a/b",
        "ä",
        "a`",
        "x" * 101,
        "a\0",
        "a%j",
        "..",
        "--x",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    refused(types.Name, name)


@pytest.mark.parametrize(
    "text", ["a100", "boost_usr_prod", "h100&nvlink", "gpu:4", "user@cpu", "[rack1|rack2]", "node[1-3,5]"]
)
def test_values_for_sbatch(text: str) -> None:
    assert value(types.SbatchValue, text) == text


@pytest.mark.parametrize(
    "text", ["", "-p", "a b", "a\n#SBATCH --x", "a'b", 'a"', "$USER", "a`id`", "a\\", "a#b", "ä", "a\t", "a\0", "\n"]
)
def test_what_an_sbatch_line_does_not_carry_is_refused(text: str) -> None:
    refused(types.SbatchValue, text)


@pytest.mark.parametrize(
    "text", ["--reservation=maint", "--exclusive", "-H", "--mail-user=a@b.c", "--licenses=x:1,y:2"]
)
def test_options_for_sbatch(text: str) -> None:
    assert value(types.SbatchFlag, text) == text


@pytest.mark.parametrize(
    "text", ["", "reservation=x", "--", "--a b", "--a='b'", "--a=$X", "--a=\n", "--a=", "---a", "--comment=a#b"]
)
def test_what_is_no_option_for_sbatch_is_refused(text: str) -> None:
    refused(types.SbatchFlag, text)


@pytest.mark.parametrize("text", ["ib0", "=ib0", "^lo,docker", "ib0,ib1", "eth0.100", "mlx5_0:1"])
def test_interfaces(text: str) -> None:
    assert value(types.Interface, text) == text


@pytest.mark.parametrize("text", ["", "a b", "$(id)", 'a"', "a'", "a;b", "a\n", "=", "a/b", "`"])
def test_what_is_no_interface_is_refused(text: str) -> None:
    refused(types.Interface, text)


@pytest.mark.parametrize("name", ["A", "_x", "NCCL_DEBUG", "a1"])
def test_names_of_variables(name: str) -> None:
    assert value(types.EnvMap, {name: "x"}) == {name: "x"}


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a=b", "a\n", "é", "a[0]", "$x"])
def test_what_is_no_name_of_a_variable_is_refused(name: str) -> None:
    refused(types.EnvMap, {name: "x"})


@pytest.mark.parametrize("text", ["", "a\0b", "\ud800"])
def test_texts_that_no_process_can_be_given(text: str) -> None:
    if text:
        refused(types.Text, text)
    else:
        assert value(types.Text, text) == ""


@pytest.mark.parametrize("text", ["", " ", "a\nb", "a\rb", "a\x1bb", "a\x7f", "a\u2028b", "a\0"])
def test_what_is_no_line_is_refused(text: str) -> None:
    refused(types.Line, text)
    refused(types.PathStr, text)


@pytest.mark.parametrize(
    ("text", "bind"),
    [
        ("/a", Bind(source="/a")),
        ("/a:/b", Bind(source="/a", destination="/b")),
        ("/a:/b:ro", Bind(source="/a", destination="/b", mode="ro")),
        ("$WORK/a:/b", Bind(source="$WORK/a", destination="/b")),
    ],
)
def test_binds_as_text(text: str, bind: Bind) -> None:
    assert value(Bind, text) == bind


@pytest.mark.parametrize(
    "text", ["", ":", "/a:", ":/b", "/a:/b:rx", "/a:/b:ro:x", "/a,/b", '/a"b', "/a\\b", "-a:/b", "/a\n:/b"]
)
def test_binds_that_the_option_cannot_carry_are_refused(text: str) -> None:
    refused(Bind, text)


@pytest.mark.parametrize("destination", ["b", "./b", "../b"])
def test_a_destination_in_the_container_is_absolute(destination: str) -> None:
    refused(Bind, f"/a:{destination}")


def test_of_three_sizes_of_a_batch_one_is_left_out() -> None:
    assert value(Batch, {"global": "512", "micro": "16"}) == Batch(global_=512, micro=16)
    assert "remove one" in refused(Batch, {"global": 8, "micro": 2, "accumulation": 4})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "SLURMDDP_RUN", "UID", "run"])
def test_variables_of_torchrun_and_ours_cannot_be_set(name: str) -> None:
    train = {"task": "lm"}
    assert "slurmddp sets it on every rank" in refused(Job, {"site": "x", "train": train, "environment": {name: "1"}})
    assert "slurmddp sets it on every rank" in refused(
        Job, {"site": "x", "train": train, "network": {"variables": {name: "1"}}}
    )


def test_words_of_yaml_are_false_only_where_a_bool_is_wanted() -> None:
    assert value(Network, {"debug": Plain("no"), "variables": {"A": Plain("no")}}) == Network(
        debug=False, variables={"A": "no"}
    )


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"task": "lm", "script": "a.py"},
        {"task": "lm", "args": ["x"]},
        {"module": "a", "script": "a.py"},
        {"module": "a.py-x"},
        {"module": "-c"},
        {"module": "a..b"},
        {"task": "ml"},
        {"task": "a:b:c"},
        {"task": "a b:c"},
        {"task": "a.b"},
        {"task": "$(id):x"},
        {"task": ".a:b"},
    ],
)
def test_a_job_has_one_task_or_one_script(train: dict[str, Any]) -> None:
    refused(Job, {"site": "x", "train": train})


def test_the_fields_of_a_model_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Network().debug = True  # type: ignore[misc]
