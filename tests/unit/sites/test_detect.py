"""Which site this host belongs to: the order of selection, the evidence and its weight, ties, and the cost."""

from pathlib import Path

import pytest

from slurmddp.assets import asset_folder
from slurmddp.errors import UserError
from slurmddp.job.document import read_file
from slurmddp.sites import host as host_module
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import detect, select, survey
from slurmddp.sites.host import Host
from tests.helpers import Desk, refusal

ALPHA = """name: alpha
title: a
detect:
  cluster_names: [alpha, alpha-*]
  hostnames: ['login*.alpha.org', 'uan*']
  environment: {CLUSTER: alpha}
  files: {/etc/alpha: '*'}
"""
BETA = """name: beta
title: b
detect:
  hostnames: ['*.beta.org', 'uan*']
  environment: {CLUSTER: beta, BETA_HOME: '*'}
  files: {/etc/systemname: 'beta*'}
"""


@pytest.fixture
def bare(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """No profile is shipped."""
    monkeypatch.setattr("slurmddp.sites.catalogue.asset_folder", lambda _: desk.root / "none")
    return desk


@pytest.fixture
def known(bare: Desk) -> Desk:
    bare.site(ALPHA)
    bare.site(BETA)
    return bare


def host(desk: Desk, name: str = "n1", files: dict[str, str] | None = None, **variables: str) -> Host:
    root = desk.root / "root"
    for path, text in (files or {}).items():
        below = root / path.lstrip("/")
        below.parent.mkdir(parents=True, exist_ok=True)
        below.write_text(text)
    return Host(name, {"PATH": str(desk.bin), **variables}, root)


def find(desk: Desk, name: str = "n1", files: dict[str, str] | None = None, **variables: str) -> tuple[str, str] | None:
    return detect(Catalogue(desk.environment), host(desk, name, files, **variables))


def slurm_conf(cluster: str) -> dict[str, str]:
    return {"/etc/slurm/slurm.conf": f"# ClusterName=no\nSlurmctldHost=c1\n clustername = {cluster} # comment\n"}


def scontrol(desk: Desk, text: str) -> None:
    desk.program("scontrol", f"#!/bin/bash\n/bin/touch {desk.root}/asked\n{text}\n")


def asked(desk: Desk) -> bool:
    return (desk.root / "asked").exists()


# --- one kind of evidence


@pytest.mark.parametrize(
    ("name", "files", "variables", "found"),
    [
        ("login03.alpha.org", {}, {}, ("alpha", "detected: this host is login03.alpha.org")),
        ("n1", {}, {"CLUSTER": "beta"}, ("beta", "detected: $CLUSTER is beta")),
        ("n1", {}, {"BETA_HOME": "/b"}, ("beta", "detected: $BETA_HOME is /b")),
        ("n1", {}, {"CLUSTER": "gamma"}, None),
        ("n1", {"/etc/alpha": ""}, {}, ("alpha", "detected: /etc/alpha exists")),
        ("n1", {"/etc/systemname": "# system\nbeta7 \n"}, {}, ("beta", "detected: /etc/systemname contains beta7")),
        ("n1", {"/etc/systemname": "gamma\n"}, {}, None),
        ("nowhere.example.org", {}, {}, None),
    ],
)
def test_one_piece_of_evidence(
    known: Desk, name: str, files: dict[str, str], variables: dict[str, str], found: tuple[str, str] | None
) -> None:
    assert find(known, name, files, **variables) == found


@pytest.mark.parametrize("cluster", ["alpha", "ALPHA", "alpha-gpu"])
def test_the_cluster_name_from_slurm_conf(known: Desk, cluster: str) -> None:
    why = f"detected: Slurm's ClusterName is {cluster}, from /etc/slurm/slurm.conf"
    assert find(known, files=slurm_conf(cluster)) == ("alpha", why)


def test_where_the_cluster_name_is_read(known: Desk) -> None:
    configless = host(known, files={"/run/slurm/conf/slurm.conf": "ClusterName=alpha\n"})
    assert configless.cluster_name() == ("alpha", "/run/slurm/conf/slurm.conf")
    default = host(known, files=slurm_conf("beta"))
    assert default.cluster_name() == ("beta", "/etc/slurm/slurm.conf")
    own = host(known, files={"/sw/slurm.conf": "ClusterName=gamma\n"}, SLURM_CONF="/sw/slurm.conf")
    assert own.cluster_name() == ("gamma", "/sw/slurm.conf")
    job = host(known, SLURM_CONF="/sw/slurm.conf", SLURM_CLUSTER_NAME="delta")
    assert job.cluster_name() == ("delta", "$SLURM_CLUSTER_NAME")
    # A named slurm.conf that does not exist: the default one is another cluster's.
    assert host(known, SLURM_CONF="/sw/none.conf").cluster_name() is None


# --- weights


@pytest.mark.parametrize(
    ("name", "files", "variables"),
    [
        ("uan01", {"/etc/systemname": "beta", **slurm_conf("alpha")}, {"CLUSTER": "beta"}),
        ("login1.alpha.org", {"/etc/systemname": "beta"}, {"CLUSTER": "beta"}),
        ("uan01", {"/etc/systemname": "beta"}, {"CLUSTER": "alpha"}),
        ("uan01", {"/etc/alpha": ""}, {}),
    ],
    ids=["cluster name", "host name with domain", "variable", "file"],
)
def test_stronger_evidence_outweighs_all_that_is_weaker(
    known: Desk, name: str, files: dict[str, str], variables: dict[str, str]
) -> None:
    found = find(known, name, files, **variables)
    assert found is not None and found[0] == "alpha"


def test_evidence_of_different_kinds_adds_up_and_of_one_kind_does_not(known: Desk) -> None:
    there = host(known, "n1.beta.org", {"/etc/systemname": "beta"}, CLUSTER="beta", BETA_HOME="/b")
    (beta,) = survey(Catalogue(known.environment), there).candidates
    assert beta.score == 8 + 4 + 2
    assert beta.why == "this host is n1.beta.org; $CLUSTER is beta; $BETA_HOME is /b; /etc/systemname contains beta"


def test_another_cluster_name_rules_a_profile_out(known: Desk) -> None:
    there = host(known, "login1.alpha.org", slurm_conf("omega"))
    (alpha,) = survey(Catalogue(known.environment), there).candidates
    assert alpha.score == 0
    assert alpha.excluded == (
        "Slurm's ClusterName is omega, from /etc/slurm/slurm.conf; the profile is for alpha or alpha-*"
    )
    assert detect(Catalogue(known.environment), there) is None


def test_a_tie_names_both_sites_and_what_matched(known: Desk) -> None:
    with pytest.raises(UserError) as caught:
        find(known, "uan01")
    assert refusal(caught.value) == (
        "this host matches two sites equally well: alpha (this host is uan01) and beta (this host is uan01)\n"
        "  -> select one: --site alpha, or `site: alpha` in the job file or in ~/.config/slurmddp/config.yaml"
    )
    known.site("name: gamma\ntitle: g\ndetect: {hostnames: ['uan*']}")
    with pytest.raises(UserError, match=r"matches 3 sites equally well: alpha .* and beta .* and gamma "):
        find(known, "uan01")


# --- scontrol


def test_scontrol_is_not_asked_when_the_rest_decides(known: Desk) -> None:
    scontrol(known, "echo ClusterName = alpha")
    assert find(known, CLUSTER="beta") == ("beta", "detected: $CLUSTER is beta")
    assert find(known, files=slurm_conf("omega")) is None
    assert not asked(known)
    survey(Catalogue(known.environment), host(known, SLURM_CONF="/none", CLUSTER="beta"), ask=True)
    assert asked(known)


@pytest.mark.parametrize("name", ["n1", "uan01"], ids=["no evidence", "a tie"])
def test_scontrol_decides_what_the_rest_leaves_open(known: Desk, name: str) -> None:
    scontrol(known, '[[ -z ${SLURM_CLUSTERS-} ]] || exit 1\nprintf "Configuration data\\nClusterName  = alpha\\n"')
    found = find(known, name, SLURM_CLUSTERS="other")
    assert found is not None and found[0] == "alpha" and "Slurm's ClusterName is alpha, from scontrol" in found[1]


def test_scontrol_is_not_asked_if_no_profile_has_a_cluster_name(bare: Desk) -> None:
    scontrol(bare, "echo ClusterName = alpha")
    bare.site(BETA)
    assert find(bare) is None
    assert not asked(bare)


@pytest.mark.parametrize("answer", ["exit 1", "/bin/sleep 60", "echo nothing"], ids=["fails", "hangs", "says nothing"])
def test_scontrol_that_does_not_answer_is_no_evidence(
    known: Desk, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_module, "_SCONTROL_SECONDS", 0.2 if "sleep" in answer else 30)
    scontrol(known, f"exec {answer}" if "sleep" in answer else answer)
    assert find(known) is None


# --- profiles


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("[x]", ":3: detect: must be a mapping of keys to values"),
        ("{hostnames: text}", ":3: detect.hostnames: must be a list, not 'text'"),
        ("\n  environment: [x]", ":4: detect.environment: must be a mapping"),
        ("\n  # comment\n\n  host: [x]", ":6: detect.host: unknown key"),
        ("{files: {etc/x: '*'}}", ":3: detect.files.etc/x: 'etc/x' must be an absolute path"),
    ],
)
def test_a_profile_with_broken_rules_is_an_error_that_names_it(known: Desk, rules: str, message: str) -> None:
    known.site(f"name: broken\ntitle: x\ndetect: {rules}\nnotes: []")
    with pytest.raises(UserError) as caught:
        find(known)
    assert f"broken.yaml{message}" in refusal(caught.value)


def test_only_the_rules_are_read(known: Desk) -> None:
    """A mistake elsewhere is told when the site is used."""
    known.site("name: odd\ntitle: x\nnonsense: 1\ndetect:\n  hostnames: [odd.org]\nfacts: [\n")
    assert find(known, "odd.org") == ("odd", "detected: this host is odd.org")


@pytest.mark.parametrize(
    "text", ["{name: odd, title: x, detect: {hostnames: [odd.org]}}", "'detect': {hostnames: [odd.org]}"]
)
def test_rules_that_do_not_begin_a_line_are_read_too(known: Desk, text: str) -> None:
    known.site(text, "odd")
    assert find(known, "odd.org") == ("odd", "detected: this host is odd.org")


@pytest.mark.parametrize("name", sorted(path.stem for path in asset_folder("site_configs").glob("*.yaml")))
def test_the_rules_are_those_of_the_whole_file(desk: Desk, name: str) -> None:
    catalogue = Catalogue(desk.environment)
    assert catalogue.detection(name) == catalogue.load(name)[0].detect
    tree = read_file(catalogue.path(name), "site").tree
    assert ("detect" in tree) == (catalogue.detection(name) != type(catalogue.detection(name)).model_construct())


def test_a_profile_over_another_does_not_match_where_that_one_does(known: Desk) -> None:
    known.site("name: own\ntitle: x\nbases: [alpha]")
    assert find(known, "login1.alpha.org") == ("alpha", "detected: this host is login1.alpha.org")
    assert Catalogue(known.environment).load("own")[0].detect.hostnames == ()


# --- the order of selection


def test_the_order_of_selection(known: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    here = host(known, "login1.alpha.org")
    monkeypatch.setattr("slurmddp.sites.detect.this_host", lambda _: here)
    catalogue = Catalogue(known.environment)
    assert select(catalogue, known.environment) == ("alpha", "detected: this host is login1.alpha.org")
    config = known.config / "config.yaml"
    config.write_text("site: gpus\n")
    assert select(catalogue, known.environment) == ("gpus", f"{config}:1")
    named = known.environment | {"SLURMDDP_SITE": "cores"}
    assert select(catalogue, named) == ("cores", "$SLURMDDP_SITE")
    assert select(catalogue, named, "here") == ("here", "--site")


def test_a_named_site_needs_no_detection(known: Desk) -> None:
    Path(known.config / "config.yaml").write_text("site: gpus\n")
    known.site("name: broken\ntitle: x\ndetect: [x]")
    assert select(Catalogue(known.environment), known.environment, "here") == ("here", "--site")
