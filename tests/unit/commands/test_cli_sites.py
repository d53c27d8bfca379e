"""sites: list, show, diff, detect, validate; and the schemas that `schema` prints."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slurmddp.job.schema import schema_text
from tests.helpers import Desk, Result

Cli = Callable[..., Result]

BASE = """gpu_vendor: amd
job:
  container: {binds: [/base]}
  paths: {runs: /base/runs}
facts:
  gpu_vendor: {source: https://example.org/base, verified: true}
"""
OWN = """name: own
title: our cluster
bases: [rocm]
detect: {environment: {OWN_CLUSTER: '*'}}
partitions:
  main: {max_time: 24h, mem_per_node: 480G, cpus_per_node: 64}
required: [resources.account]
job:
  resources: {partition: main, account: "0123"}
  paths: {runs: /own/runs}
facts:
  partitions.main: {source: "ssh own sinfo", verified: false, note: read on a node}
  partitions.main.max_time: {source: https://example.org/limits, date: 2026-08, verified: true}
"""


@pytest.fixture
def own(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A site over a base, beside those of every desk; none is shipped."""
    monkeypatch.setattr("slurmddp.sites.catalogue.asset_folder", lambda _: desk.root / "none")
    folder = desk.config / "sites"
    (folder / "bases").mkdir()
    (folder / "bases" / "rocm.yaml").write_text(BASE)
    desk.site(OWN)
    return desk


def profile(desk: Desk, name: str) -> Path:
    return desk.config / "sites" / f"{name}.yaml"


# --- list


def test_list_marks_the_active_site_and_says_why(own: Desk, cli: Cli) -> None:
    done = cli("site", OWN_CLUSTER="1")
    assert "own           our cluster  (documented)  [active: detected: $OWN_CLUSTER is 1]\n" in done.out
    assert done.out.count("[active") == 1
    (own.config / "config.yaml").write_text("site: gpus\n")
    done = cli("site", "list", OWN_CLUSTER="1")
    assert f"gpus          a cluster with GPUs  (documented)  [active: {own.config}/config.yaml:1]\n" in done.out
    done = cli("site", "list", "--json", OWN_CLUSTER="1", SLURMDDP_SITE="own")
    rows = {row["name"]: row for row in json.loads(done.out)}
    assert [name for name, row in rows.items() if row["active"]] == ["own"]
    assert rows["own"] == {
        "name": "own", "file": str(profile(own, "own")), "active": True, "why": "$SLURMDDP_SITE",
        "title": "our cluster", "level": "documented", "broken": None,
    }  # fmt: skip
    assert cli("site", "--json").out == cli("site", "list", "--json").out


def test_list_without_an_active_site(own: Desk, cli: Cli) -> None:
    done = cli("site")
    assert (done.code, done.err) == (0, "no active site: none is selected, and no profile matches this host\n")
    done = cli("site", SLURMDDP_SITE="./mine.yaml")
    assert (done.code, done.err) == (0, "active site: ./mine.yaml ($SLURMDDP_SITE)\n")
    own.site("name: other\ntitle: o\ndetect: {environment: {OWN_CLUSTER: '*'}}")
    done = cli("site", OWN_CLUSTER="1")
    assert done.code == 0 and "our cluster" in done.out and "[active" not in done.out
    assert done.err.startswith("no active site: this host matches two sites equally well: other (")


def test_a_broken_profile_hides_no_other(own: Desk, cli: Cli) -> None:
    own.site("name: broken\ntitle: t\nnonsense: 1\nmore: 2")
    out = cli("site").out
    assert f"broken        broken: {profile(own, 'broken')}:3: nonsense: unknown key\n" in out
    assert "own           our cluster  (documented)\n" in out


# --- show


@pytest.mark.parametrize("words", [("site", "own"), ("site", "show", "own")])
def test_show_is_the_profile_merged_with_its_bases(own: Desk, cli: Cli, words: tuple[str, ...]) -> None:
    out = cli(*words).out
    assert out.startswith(f"# {profile(own, 'own')}, with its bases: rocm\n")
    assert "gpu_vendor: amd\n" in out and "runs: /own/runs\n" in out and "/base/runs" not in out
    assert "max_time: 24h\n" in out and "cpus_per_node: 64\n" in out and "account: '0123'\n" in out
    assert out.endswith("# not verified in the site's own documentation:\n#   partitions.main: ssh own sinfo\n")
    own.site(out.replace("name: own", "name: copy"), "copy")
    assert cli("site", "diff", "own", "copy").out == "no differences\n"


def test_show_explain_names_file_line_and_source(own: Desk, cli: Cli) -> None:
    out = cli("site", "show", "own", "--explain").out
    file = profile(own, "own")
    assert (
        f"partitions.main.max_time = 24h\n  site own: {file}:6\n  verified: https://example.org/limits; 2026-08\n"
    ) in out
    assert (
        f"partitions.main.cpus_per_node = 64\n  site own: {file}:6\n  not verified: ssh own sinfo; read on a node\n"
    ) in out
    base = file.parent / "bases" / "rocm.yaml"
    assert f"gpu_vendor = amd\n  site rocm: {base}:1\n  verified: https://example.org/base\n" in out
    assert f"job.paths.runs = /own/runs\n  site own: {file}:10\n  over site rocm: {base}:4\n" in out
    assert "facts" not in out


def test_show_as_json(own: Desk, cli: Cli) -> None:
    plain = json.loads(cli("site", "own", "--json").out)
    assert set(plain) == {"name", "file", "profile"}
    assert plain["profile"]["partitions"] == {"main": {"max_time": "24h", "mem_per_node": "480G", "cpus_per_node": 64}}
    values = {
        value["key"]: value for value in json.loads(cli("site", "show", "own", "--explain", "--json").out)["values"]
    }
    assert values["partitions.main.mem_per_node"] == {
        "key": "partitions.main.mem_per_node",
        "value": "480G",
        "where": f"site own: {profile(own, 'own')}:6",
        "over": [],
        "fact": {"source": "ssh own sinfo", "verified": False, "note": "read on a node"},
    }
    assert values["job.container.binds.0"]["fact"] is None


def test_an_unknown_site_and_an_unknown_command(own: Desk, cli: Cli) -> None:
    done = cli("site", "show", "gpu")
    assert (done.code, done.err) == (2, "slurmddp: unknown site 'gpu'\n  -> did you mean gpus?\n")
    assert cli("site", "gpu").err == done.err
    done = cli("site", "vaildate", "a.yaml")
    assert done.code == 2 and "No such command 'vaildate'. Did you mean 'validate'?" in done.err


# --- diff


def test_diff(own: Desk, cli: Cli) -> None:
    own.site(OWN.replace("name: own", "name: second").replace("24h", "1440m").replace("64", "32"))
    assert cli("site", "diff", "own", "second").out == ("partitions.main.cpus_per_node\n  own     64\n  second  32\n")
    own.site("name: third\ntitle: t\nscheduler: local")
    found = json.loads(cli("site", "diff", "own", "third", "--json").out)
    assert found["scheduler"] == {"own": "slurm", "third": "local"}
    assert found["partitions.main.max_time"] == {"own": "24h", "third": None}
    assert not {"name", "title", "facts"} & {key.split(".")[0] for key in found}
    assert "  third  (not set)\n" in cli("site", "diff", "own", "third").out


# --- detect


def test_detect_shows_all_evidence(own: Desk, cli: Cli) -> None:
    own.site("name: other\ntitle: o\ndetect: {cluster_names: [omega], environment: {OWN_CLUSTER: '*'}}")
    done = cli("site", "detect", OWN_CLUSTER="1", SLURM_CLUSTER_NAME="alpha")
    assert done.code == 0, done.err
    assert "\nClusterName  alpha (from $SLURM_CLUSTER_NAME)\n" in done.out
    assert "own: score 4\n  4  $OWN_CLUSTER is 1 (detect.environment: OWN_CLUSTER: *)\n" in done.out
    assert "other: Slurm's ClusterName is alpha, from $SLURM_CLUSTER_NAME; the profile is for omega\n" in done.out
    assert done.out.endswith("detected: own\n")
    found = json.loads(cli("site", "detect", "--json", OWN_CLUSTER="1", SLURM_CLUSTER_NAME="omega").out)
    assert found["site"] == "other"
    assert found["cluster_name"] == {"value": "omega", "source": "$SLURM_CLUSTER_NAME"}
    assert [(item["site"], item["score"]) for item in found["candidates"]] == [("other", 12), ("own", 4)]


def test_detect_tells_a_tie_and_no_match(own: Desk, cli: Cli) -> None:
    own.site("name: other\ntitle: o\ndetect: {environment: {OWN_CLUSTER: '*'}}")
    done = cli("site", "detect", OWN_CLUSTER="1", SLURM_CLUSTER_NAME="x")
    assert done.code == 2 and "own: score 4\n" in done.out and "matches two sites equally well" in done.err
    assert cli("site", "detect", SLURM_CLUSTER_NAME="x").out.endswith("no profile matches this host\n")


# --- validate


def test_validate_lists_all_mistakes_of_all_files(own: Desk, cli: Cli) -> None:
    first = own.write(
        "first.yaml", "name: first\ntitle: t\npartitons: {}\ngpu_request: maybe\njob: {resources: {nods: 1}}\n"
    )
    second = own.write(
        "second.yaml",
        "name: seconds\ntitle: t\npartitions: {main: {}}\nrequired: [resources.acount]\n"
        "job: {resources: {partition: mian}}\n",
    )
    done = cli("site", "validate", str(first), "own", str(second), "nowhere.yaml")
    assert (done.code, done.out) == (2, "own: valid\n")
    assert done.err == (
        f"slurmddp: {first}:4: gpu_request: must be one of 'gpus-per-node', 'gres' or 'none', not 'maybe'\n"
        f"{first}:3: partitons: unknown key\n  -> did you mean partitions?\n"
        f"{first}:5: resources.nods: unknown key\n  -> did you mean resources.nodes?\n"
        f"{second}:1: name: 'seconds' is not the file's name\n  -> write second, or rename the file\n"
        f"{second}:4: required.0: 'resources.acount' is not a key of a job file\n  -> docs/job.md lists all keys\n"
        f"{second}:5: job.resources.partition: 'mian' is not under partitions\n  -> use one of main\n"
        "nowhere.yaml: no such file\n  -> `slurmddp site` lists all profiles\n"
    )


def test_validate_names_the_page_of_site_files(own: Desk, cli: Cli) -> None:
    file = own.write("x.yaml", "title: t\nxyzzy: 1\n")
    done = cli("site", "validate", str(file))
    assert f"{file}:2: xyzzy: unknown key\n  -> docs/sites.md lists all keys" in done.err
    assert f"{file}: name: is missing\n  -> set it; docs/sites.md lists all keys" in done.err


def test_validate_as_json(own: Desk, cli: Cli) -> None:
    file = own.write("x.yaml", "name: x\ntitle: [t]\n")
    done = cli("site", "validate", "own", "x.yaml", "--json")
    assert done.code == 2
    assert json.loads(done.out) == [
        {"file": "own", "problems": []},
        {"file": "x.yaml", "problems": [f"{file.name}:2: title: must be text, not ['t']"]},
    ]
    assert cli("site", "validate", "own", "--json").code == 0


def test_validate_reads_the_layers_that_hold_for_some_jobs(own: Desk, cli: Cli) -> None:
    own.site(OWN + "when:\n  wide: {nodes: 2-, job: {setup: [x]}}\n  narrow: {nodes: 1, job: {networ: {}}}\n")
    done = cli("site", "validate", "own")
    assert done.code == 2
    assert done.err == f"slurmddp: {profile(own, 'own')}:16: networ: unknown key\n  -> did you mean network?\n"


def test_validate_reports_what_no_model_sees(own: Desk, cli: Cli) -> None:
    own.site("name: lost\ntitle: t\nbases: [none-such]")
    done = cli("site", "validate", "lost")
    assert done.code == 2 and "its base 'none-such' does not exist" in done.err
    own.write("text.yaml", "just text\n")
    assert "text.yaml: is not a mapping of keys to values" in cli("site", "validate", "text.yaml").err


# --- schemas


@pytest.mark.parametrize("kind", ["job", "site", "recipe"])
def test_schema_prints_the_schema_and_a_path_of_it(desk: Desk, cli: Cli, kind: str) -> None:
    done = cli("schema", kind)
    assert done.out == schema_text(kind)
    assert json.loads(done.out)["title"] == f"slurmddp {kind} file"
    path = Path(cli("schema", kind, "--path").out.strip())
    assert path.read_text() == done.out, "a checkout writes it"


def test_a_schema_that_cannot_be_written(desk: Desk, cli: Cli) -> None:
    done = cli("schema", "job", "--path", XDG_STATE_HOME=str(desk.write("a-file", "")))
    assert (done.code, done.out) == (2, "")
    assert (
        "a-file/slurmddp/schemas/job.schema.json: cannot be written: Not a directory\n  -> set XDG_STATE_HOME"
        in done.err
    )
    assert cli("schema", "job").code == 0


def test_an_unknown_schema(desk: Desk, cli: Cli) -> None:
    done = cli("schema", "jobs")
    assert (done.code, done.err) == (2, "slurmddp: unknown kind of file 'jobs'\n  -> use job, site, recipe\n")


def test_init_names_the_schema_of_the_editor(desk: Desk, cli: Cli) -> None:
    assert cli("init", "new.yaml", "--site", "gpus").code == 0
    lines = (desk.project / "new.yaml").read_text().splitlines()
    schema = desk.home / ".local/state/slurmddp/schemas/job.schema.json"
    assert lines[1] == f"# yaml-language-server: $schema={schema}" and schema.read_text() == schema_text("job")
