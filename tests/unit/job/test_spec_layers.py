"""Layers: what goes over what, and where each value came from."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.job.document import read_text
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, adding_lists, merge
from slurmddp.job.resolve import Request, environment_layer, resolve
from slurmddp.job.validate import origin_of
from slurmddp.report.explain import explain
from slurmddp.sites.catalogue import Catalogue, config_files
from tests.helpers import LM_JOB, Desk, Result, refusal


def layered(*texts: str) -> Layered:
    return merge(Job, [read_text(text, f"layer {index}", f"{index}.yaml") for index, text in enumerate(texts)])


def origin(found: Layered, dotted: str) -> str:
    where = origin_of(found, tuple(dotted.split(".")))
    return where.where if where else ""


def test_maps_merge_and_values_replace() -> None:
    found = layered("a: {x: 1, y: 2}\nb: 1", "a: {y: 3, z: 4}")
    assert found.tree == {"a": {"x": "1", "y": "3", "z": "4"}, "b": "1"}
    assert [origin(found, key) for key in ("a.x", "a.y", "a.z", "b")] == [
        "0.yaml:1",
        "1.yaml:1",
        "1.yaml:1",
        "0.yaml:2",
    ]
    assert [old.where for old in found.overridden["a", "y"]] == ["0.yaml:1"]


def test_a_layer_does_not_change_the_ones_that_it_was_made_from() -> None:
    below, above = (read_text(text, "l", "f") for text in ("container: {binds: [/a]}", "container: {binds: [/b]}"))
    assert merge(Job, [below, above]).tree["container"]["binds"] == ["/a", "/b"]
    assert below.tree == {"container": {"binds": ["/a"]}}
    assert above.tree == {"container": {"binds": ["/b"]}}


def test_which_lists_add() -> None:
    assert adding_lists(Job) == {
        ("resources", "sbatch_extra"),
        ("container", "binds"),
        ("container", "options"),
        ("container", "pip"),
        ("setup",),
        ("environment_from",),
        ("not_secret",),
        ("checkpoint", "watch"),
        ("alerts",),
    }


def test_adding_lists_keep_each_item_s_origin_and_add_nothing_twice() -> None:
    found = layered("setup:\n- a\n- b", "setup:\n- b\n- c", "setup: [c, d]")
    assert found.tree["setup"] == ["a", "b", "c", "d"]
    assert [origin(found, f"setup.{index}") for index in range(4)] == ["0.yaml:2", "0.yaml:3", "1.yaml:3", "2.yaml:1"]


def test_what_stands_twice_in_one_layer_was_meant() -> None:
    assert layered("setup: [a]", "setup: [x, y, x]").tree["setup"] == ["a", "x", "y", "x"]


def test_a_replacing_list_leaves_no_origin_of_the_old_items() -> None:
    found = layered("train: {args: [a, b, c]}", "train:\n  args: [d]")
    assert found.tree["train"]["args"] == ["d"]
    assert ("train", "args", "2") not in found.origins
    assert origin(found, "train.args.0") == "1.yaml:2"
    assert [old.where for old in found.overridden["train", "args"]] == ["0.yaml:1"]


def test_null_takes_a_value_back() -> None:
    found = layered("resources: {account: a}", "resources: {account: null}")
    assert found.tree == {"resources": {"account": None}}


def test_a_map_over_a_value_and_a_value_over_a_map() -> None:
    found = layered("a: {b: 1}", "a: 2", "a: {c: 3}")
    assert found.tree == {"a": {"c": "3"}}
    assert ("a", "b") not in found.origins


# --- all layers of a job


@pytest.fixture
def full(desk: Desk) -> Callable[..., object]:
    """A job whose account is set by every layer up to the one that is named."""
    desk.site("name: low\ntitle: base\njob: {resources: {account: base}, setup: [base]}", "low")
    desk.site(
        "name: cluster\ntitle: c\nbases: [low]\npartitions: {p: {gpus_per_node: 1}}\n"
        "job: {resources: {account: site, partition: p}, setup: [site], container: {runtime: none}}"
    )
    files = {}
    for name in ("etc", "user"):
        files[name] = desk.write(f"{name}.yaml", f"resources: {{account: {name}}}\nsetup: [{name}]\n")
    job = desk.write("job.yaml", "site: cluster\ntrain: {script: a.py}\nresources: {account: job}\nsetup: [job]\n")
    bare = desk.write("bare.yaml", "site: cluster\ntrain: {script: a.py}\n")

    def make(top: str) -> tuple[str | None, list[str], str]:
        order = ["site", "etc", "user", "job", "environment", "command line"]
        reached = order[: order.index(top) + 1]
        variables = {**desk.environment, "SLURMDDP_RESOURCES__ACCOUNT": "environment"}
        request = Request(
            job if "job" in reached else bare,
            options=[("resources.account", "command line", "--account")] if "command line" in reached else [],
            environment=variables if "environment" in reached else {},
        )
        configured = [files[name] for name in ("etc", "user") if name in reached]
        found = resolve(request, configured, Catalogue(desk.environment).load, lambda: None, strict=False)
        return found.job.resources.account, list(found.job.setup), found.location("resources", "account")

    return make


@pytest.mark.parametrize("top", ["site", "etc", "user", "job", "environment"])
def test_each_layer_goes_over_the_ones_below(full: Callable[..., tuple], top: str) -> None:
    account, setup, place = full(top)
    assert account == top
    assert setup == ["base", "site", "etc", "user", "job"][: {"site": 2, "etc": 3, "user": 4}.get(top, 5)]
    expected = {"site": "cluster.yaml:5", "job": "job.yaml:3", "environment": "$SLURMDDP_RESOURCES__ACCOUNT"}
    assert expected.get(top, f"{top}.yaml:1") in place


def test_the_command_line_goes_over_all(full: Callable[..., tuple]) -> None:
    with pytest.raises(UserError) as caught:  # "command line" has a space: the message shows which layer won
        full("command line")
    assert "--account: resources.account: 'command line' contains a character" in refusal(caught.value)


def test_the_user_s_configuration_is_where_xdg_says(desk: Desk) -> None:
    folder = desk.root / "elsewhere"
    (folder / "slurmddp").mkdir(parents=True)
    (folder / "slurmddp" / "config.yaml").write_text("name: x")
    assert folder / "slurmddp" / "config.yaml" in config_files({**desk.environment, "XDG_CONFIG_HOME": str(folder)})
    (desk.config / "config.yaml").write_text("name: x")
    assert config_files({"HOME": str(desk.home)})[-1] == desk.config / "config.yaml"
    assert config_files({"HOME": str(desk.home), "XDG_CONFIG_HOME": ""})[-1] == desk.config / "config.yaml"


def test_the_user_s_configuration_through_the_command(desk: Desk, cli: Callable[..., Result]) -> None:
    desk.write("job.yaml", LM_JOB)
    (desk.config / "config.yaml").write_text("resources: {account: mine}\n")
    done = cli("submit", "job.yaml", "--dry-run")
    assert "#SBATCH --account=mine\n" in done.out
    assert "config.yaml:1" in cli("check", "job.yaml", "--explain", "resources.account").out


def test_a_mistake_in_the_user_s_configuration_names_it(desk: Desk, cli: Callable[..., Result]) -> None:
    desk.write("job.yaml", LM_JOB)
    (desk.config / "config.yaml").write_text("resources:\n  acount: mine\n")
    done = cli("submit", "job.yaml", "--dry-run")
    assert (done.code, done.out) == (2, "")
    assert "config.yaml:2: resources.acount: unknown key\n  -> did you mean resources.account?" in done.err


def test_the_environment_layer() -> None:
    layer = environment_layer(
        {
            "SLURMDDP_SITE": "x",
            "SLURMDDP_RESOURCES__ACCOUNT": "a",
            "SLURMDDP_TRAIN__OPTIMIZER__LR": "3e-4",
            "SLURMDDP_ENVIRONMENT__Some_Name": "1",
            "SLURMDDP_ENVIRONMENT__A__B": "2",
            "SLURMDDP_NETWORK__VARIABLES__NCCL_X": "3",
            "SLURMDDP_SETUP": "not a key: no double underscore",
            "SLURMDDP_RUN": "set inside a job, no key",
            "OTHER__THING": "x",
        }
    )
    assert layer.tree == {
        "site": "x",
        "resources": {"account": "a"},
        "train": {"optimizer": {"lr": "3e-4"}},
        "environment": {"Some_Name": "1", "A__B": "2"},
        "network": {"variables": {"NCCL_X": "3"}},
    }


@pytest.mark.parametrize("name", ["SLURMDDP_RESOURCES__NO_SUCH", "SLURMDDP___", "SLURMDDP_A__", "SLURMDDP___X"])
def test_a_variable_that_names_no_key_is_an_error_that_names_it(desk: Desk, name: str) -> None:
    with pytest.raises(UserError, match=rf"\${name}"):
        desk.resolve(LM_JOB, **{name: "x"})


# --- --set


def test_set_reaches_every_key_and_the_last_one_wins(desk: Desk) -> None:
    found = desk.resolve(
        LM_JOB,
        "train.steps=1e3",
        "train.steps=2000",
        "train.optimizer.lr=3e-4",
        "train.data.context=64",
        "train.data.glob='no'",
        "container.binds=[/a, /b:/c:ro]",
        "environment.A=x = y",
        "checkpoint.interval=null",
    ).job
    assert (found.train.steps, found.train.optimizer.lr) == (2000, 3e-4)
    assert found.train.data == {"path": "/data/books", "context": 64, "glob": "'no'"}
    assert [bind.source for bind in found.container.binds] == ["/a", "/b"]
    assert (found.environment["A"], found.checkpoint.interval) == ("x = y", None)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("train.stepz=1", "--set train.stepz: unknown key\n  -> did you mean train.steps?"),
        ("train.steps=many", "--set train.steps: must be a whole number, not 'many'"),
        ("train..steps=1", "is not a key"),
        ("train.steps.x=1", "--set train.steps.x"),
        ("train=lm", "--set train: must be a mapping"),
        ("container.binds=[/a, 'b c,d']", "--set container.binds"),
        ("container.binds=/a", "--set container.binds: must be a list, not '/a'"),
        ("site.x=1", "--set site"),
    ],
)
def test_a_mistake_in_set_names_the_option(desk: Desk, option: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(LM_JOB, option)
    assert message in refusal(caught.value)


def test_an_item_that_set_adds_to_a_list_has_its_place(desk: Desk) -> None:
    with pytest.raises(UserError) as caught:
        desk.resolve(LM_JOB + "container:\n  binds: [/a]\n", 'container.binds=["b,c"]')
    assert refusal(caught.value).startswith("--set container.binds")


def test_set_within_what_is_set_already(desk: Desk) -> None:
    with pytest.raises(UserError, match="already has a value"):
        desk.resolve(LM_JOB, "train.data.a=1", "train.data.a.b=2")
    assert desk.resolve(LM_JOB, "train.data={context: 1}", "train.data.validation_fraction=0").job.train.data == {
        "path": "/data/books",
        "context": 1,
        "validation_fraction": 0,
    }


# --- --explain


def test_explain_shows_layer_and_what_was_overridden(desk: Desk) -> None:
    found = desk.resolve(
        LM_JOB + "resources: {partition: large}\nsetup: [a]\n", "resources.partition=main", "setup=[b]"
    )
    assert explain(found, "resources.partition").splitlines() == [
        "resources.partition = main",
        "  command line: --set resources.partition",
        f"  over job file: {desk.project}/job.yaml:6",
        f"  over site gpus: {desk.config}/sites/gpus.yaml:8",
    ]
    assert explain(found, "train.steps") == "train.steps = 1000\n  built-in"
    assert explain(found, "setup").splitlines()[2:] == ["setup.1 = b", "  command line: --set setup"]
    assert "job.yaml:5" in explain(found, "train.data")


def test_explain_of_a_replaced_list_shows_what_it_replaced(desk: Desk) -> None:
    (desk.config / "config.yaml").write_text("train: {args: [old]}\n")
    found = desk.resolve("site: cores\ntrain:\n  script: a.py\n  args: [new]\n")
    assert "config.yaml:1" in explain(found, "train.args")


def test_explain_of_a_key_that_is_none(desk: Desk) -> None:
    with pytest.raises(UserError, match=r"did you mean resources\.nodes"):
        explain(desk.resolve(LM_JOB), "resources.node")


# --- own sites, bases


def test_a_profile_of_the_user_hides_a_shipped_one(desk: Desk) -> None:
    desk.site("name: local\ntitle: mine\nscheduler: local\n")
    assert Catalogue(desk.environment).load("local")[0].title == "mine"
    assert "gpus" in Catalogue(desk.environment).names()


def test_a_profile_by_its_path_is_found_again_from_the_resolved_job(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk.project)
    desk.write(
        "mine.yaml", "name: other\ntitle: t\nscheduler: local\ngpu_vendor: none\njob: {container: {runtime: none}}\n"
    )
    for name in ("mine.yaml", "./mine.yaml"):
        assert desk.resolve(f"site: {name}\ntrain: {{script: a.py}}\n").job.site == str(desk.project / "mine.yaml")


def test_a_profile_is_known_by_its_file_s_name(desk: Desk) -> None:
    desk.site("name: inner\ntitle: t\nscheduler: local\ngpu_vendor: none\njob: {container: {runtime: none}}\n", "outer")
    assert desk.resolve("site: outer\ntrain: {script: a.py}\n").job.site == "outer"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "bases: [b]", "b": "bases: [a]"}, "circle"),
        ({"a": "bases: [b]", "b": "bases: [c]", "c": "bases: [b]"}, "circle"),
        ({"a": "bases: [nowhere]"}, "its base 'nowhere' does not exist"),
        ({"a": "bases: b"}, "bases must be a list"),
        ({"a": "bases: [[b]]"}, "base"),
        ({"a": "bases: [../../x]"}, "base"),
        ({"a": "scheduler: pbs"}, "scheduler: must be one of"),
        (
            {"a": "partitions: {p: {gpu_per_node: 4}}"},
            "a.yaml:3: partitions.p.gpu_per_node: unknown key\n  -> did you mean",
        ),
        ({"a": "detect: [x]"}, "detect"),
        ({"a": "job: [x]"}, "job: must be a mapping"),
        ({"a": "job: {resources: {nodez: 1}}"}, "sites/a.yaml:3: resources.nodez: unknown key"),
        ({"a": ""}, None),
    ],
)
def test_profiles_that_are_wrong(desk: Desk, files: dict[str, str], message: str | None) -> None:
    for name, text in files.items():
        desk.site(f"name: {name}\ntitle: t\n{text}\n")
    job = "site: a\nresources: {gpus_per_node: 0}\ncontainer: {runtime: none}\ntrain: {script: a.py}\n"
    if message is None:
        assert desk.resolve(job).site.name == "a"
        return
    with pytest.raises(UserError) as caught:
        desk.resolve(job)
    assert message in refusal(caught.value)


def test_two_bases_may_share_one_below(desk: Desk) -> None:
    desk.site("name: root\ntitle: t\njob: {setup: [root]}")
    desk.site("name: left\ntitle: t\nbases: [root]\njob: {setup: [left]}")
    desk.site("name: right\ntitle: t\nbases: [root]\njob: {setup: [right]}")
    desk.site("name: top\ntitle: t\nbases: [left, right]")
    assert Catalogue(desk.environment).layered("top").tree["job"]["setup"] == ["root", "left", "right"]


@pytest.mark.parametrize("name", ["lokal", "", "..", ".", "x" * 300, "a\nb", "no/such", "no.yaml", "$(id)", "-x"])
def test_an_unknown_site(desk: Desk, name: str) -> None:
    with pytest.raises(UserError) as caught:
        Catalogue(desk.environment).load(name)
    assert name != "lokal" or "did you mean local" in refusal(caught.value)


def test_no_site_at_all(desk: Desk) -> None:
    with pytest.raises(UserError, match="no site selected"):
        desk.resolve("train: {script: a.py}\n")


def test_an_empty_variable_names_no_site(desk: Desk) -> None:
    assert desk.resolve(LM_JOB, SLURMDDP_SITE="").site.name == "gpus"


def test_a_folder_without_a_parent_s_profile_is_shipped_too(desk: Desk) -> None:
    assert {"local", "generic"} <= set(Catalogue({"HOME": str(Path("/nonexistent"))}).names())


def test_an_option_is_not_blamed_for_the_keys_beside_its_own(desk: Desk) -> None:
    """`--time 10m` also makes the map `resources`, and says nothing about its other keys."""
    found = desk.resolve("site: generic\ntrain: {script: a.py}\n", "resources.time=10m")
    assert found.location("resources", "time") == "--set resources.time"
    assert found.location("resources", "account") == "resources.account"
