"""Credentials of the environment and of Apptainer's and Docker's login files."""

import base64
import json
from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.registry.credentials import advice, find_credentials, for_builder, login_files


def login(path: Path, tree: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))


def coded(text: str) -> dict[str, str]:
    return {"auth": base64.b64encode(text.encode()).decode()}


def found(registry: str, name: str = "a/b") -> tuple[str, str, str] | None:
    credentials = find_credentials(registry, name).credentials
    return (credentials.username, credentials.password, credentials.source) if credentials else None


def test_there_are_none() -> None:
    nothing = find_credentials("nvcr.io", "a/b")
    assert nothing.credentials is None and nothing.remarks == ()


def test_apptainers_variables_go_before_singularitys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", "GHCR.io")
    monkeypatch.setenv("SINGULARITY_DOCKER_USERNAME", "sue")
    monkeypatch.setenv("SINGULARITY_DOCKER_PASSWORD", "s:1")
    assert found("ghcr.io") == ("sue", "s:1", "SINGULARITY_DOCKER_USERNAME and SINGULARITY_DOCKER_PASSWORD")
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "a")
    assert found("ghcr.io") == ("ann", "a", "APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD")


@pytest.mark.parametrize(
    ("username", "named", "registry", "shown"),
    [
        ("ann", "", "ghcr.io", False), ("ann", "", "nvcr.io", False), ("ann", "", "docker.io", False),
        ("ann", "ghcr.io", "ghcr.io", True), ("ann", "ghcr.io", "evil.example", False),
        ("ann", "ghcr.io", "nvcr.io", False), ("ann", "ghcr.io", "ghcr.io:444", False),
        ("ann", "index.docker.io", "docker.io", True), ("ann", "h.org:5000", "h.org:5000", True),
        ("ann", "h.org:5000", "h.org", False), ("$oauthtoken", "", "nvcr.io", True), ("", "", "nvcr.io", True),
        ("", "nvcr.io", "nvcr.io", True), ("$oauthtoken", "", "evil.example", False), ("", "", "evil.example", False),
        ("$oauthtoken", "ghcr.io", "ghcr.io", False), ("$oauthtoken", "ghcr.io", "nvcr.io", True),
        ("", "ghcr.io", "ghcr.io", False), ("", "ghcr.io", "nvcr.io", False),
    ],
)  # fmt: skip
def test_the_environments_are_for_one_registry(
    username: str, named: str, registry: str, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", username)
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "S3CRET")
    monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", named)
    result = find_credentials(registry, "a/b")
    assert (result.credentials is not None) == shown
    variables, _ = for_builder([registry])
    assert ("S3CRET" in variables.values()) == shown
    if shown:
        assert set(variables) == {
            f"{prefix}_DOCKER_{half}" for prefix in ("APPTAINER", "SINGULARITY") for half in ("USERNAME", "PASSWORD")
        }
        assert variables["SINGULARITY_DOCKER_USERNAME"] == (username or "$oauthtoken")
    else:
        assert result.remarks and "S3CRET" not in str(result.remarks)


def test_a_builder_that_pulls_from_several_registries_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "S3CRET")
    variables, notes = for_builder(["evil.example", "nvcr.io"])
    assert variables == {} and "the builder would also send them to evil.example" in "".join(notes)
    assert "apptainer registry login docker://nvcr.io" in "".join(notes)
    assert for_builder([]) == ({}, ()) and for_builder(["evil.example"]) == ({}, ())
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
    variables, notes = for_builder(["ghcr.io"])
    assert variables == {} and "are not used, because their registry is not given: export SLURMDDP_REGISTRY" in "".join(
        notes
    )
    assert for_builder([]) == ({}, ())


def test_a_host_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", "https://ghcr.io/")
    with pytest.raises(UserError, match=r"SLURMDDP_REGISTRY_HOST: 'https://ghcr\.io/' is not a registry"):
        find_credentials("ghcr.io", "a/b")


def test_nvidias_registry_needs_the_password_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "key")
    assert (found("nvcr.io") or ())[:2] == ("$oauthtoken", "key")
    other = find_credentials("ghcr.io", "a/b")
    assert other.credentials is None
    assert other.remarks == ("APPTAINER_DOCKER_USERNAME and APPTAINER_DOCKER_PASSWORD are only for nvcr.io",)
    assert "to an API key of NGC" in advice("nvcr.io")
    assert "SLURMDDP_REGISTRY_HOST to ghcr.io" in advice("ghcr.io")


def test_the_login_files_in_their_order(home: Path) -> None:
    files = login_files()
    names = [".apptainer/docker-config.json", ".singularity/docker-config.json", ".docker/config.json"]
    assert files == [home / name for name in names]
    for path in reversed(files):
        login(path, {"auths": {"ghcr.io": coded(f"user:of {path.parent.name}:x")}})
        assert found("ghcr.io") == ("user", f"of {path.parent.name}:x", f"~/{path.relative_to(home)}")
    login(files[0], {"auths": {"other.io": coded("a:b")}})
    assert (found("ghcr.io") or ())[1:2] == ("of .singularity:x",)


def test_folders_that_were_moved(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path / "a"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "d"))
    assert login_files() == [tmp_path / "a/docker-config.json", tmp_path / "d/config.json"]


@pytest.mark.parametrize(
    ("key", "registry", "name", "fits"),
    [
        ("https://index.docker.io/v1/", "docker.io", "library/ubuntu", True),
        ("docker.io", "docker.io", "library/ubuntu", True),
        ("https://ghcr.io", "ghcr.io", "a/b", True),
        ("http://GHCR.io/v2/", "ghcr.io", "a/b", True),
        ("ghcr.io/a", "ghcr.io", "a/b", True),
        ("ghcr.io/a/b", "ghcr.io", "a/b", True),
        ("ghcr.io/a", "ghcr.io", "ab/c", False),
        ("ghcr.io:5000", "ghcr.io", "a/b", False),
        ("ghcr.io", "ghcr.io:5000", "a/b", False),
        ("evil-ghcr.io", "ghcr.io", "a/b", False),
        ("https://[", "ghcr.io", "a/b", False),
    ],
)
def test_the_key_of_an_entry(home: Path, key: str, registry: str, name: str, fits: bool) -> None:
    login(home / ".docker/config.json", {"auths": {key: coded("u:p")}})
    assert (found(registry, name) is not None) == fits


def test_the_longest_key_counts(home: Path) -> None:
    auths = {"q.io": coded("all:p"), "q.io/a/b": coded("one:p"), "q.io/a": coded("group:p")}
    login(home / ".docker/config.json", {"auths": auths})
    names = {name: (found("q.io", name) or ("",))[0] for name in ("a/b", "a/c", "x")}
    assert names == {"a/b": "one", "a/c": "group", "x": "all"}


@pytest.mark.parametrize(
    ("tree", "remark"),
    [
        ("{", "~/.docker/config.json is not a JSON file"),
        ("[]", "~/.docker/config.json does not contain a JSON object"),
        ({"auths": {"g.io": {"auth": "hunter2?"}}}, "has an entry for it, but its `auth` is not base64"),
        (
            {"auths": {"g.io": {}}, "credsStore": "desktop"},
            "leaves g.io to the credential helper 'desktop', which is not in PATH",
        ),
        ({"credHelpers": {"g.io": "gcloud"}}, "leaves g.io to the credential helper 'gcloud', which is not in PATH"),
        (
            {"auths": {"g.io": {"identitytoken": "hunter2"}}},
            "has a token for it, but slurmddp supports only user name and password",
        ),
        ({"auths": {"g.io": coded(":hunter2")}}, None),
        ({"auths": []}, None),
        ({"auths": {"g.io": "hunter2"}, "credHelpers": {"x.io": "gcloud"}}, None),
    ],
)
def test_what_cannot_be_used_is_said(
    home: Path, tree: object, remark: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(home))  # this machine's own helpers are not asked
    login(home / ".docker/config.json", tree)
    result = find_credentials("g.io", "a/b")
    assert result.credentials is None
    assert (remark or "") in "; ".join(result.remarks) and bool(result.remarks) == bool(remark)
    assert "hunter2" not in repr(result)


def test_a_password_is_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "PASSWORD")
    result = find_credentials("nvcr.io", "a/b")
    assert result.credentials and "PASSWORD" not in repr(result).replace("APPTAINER_DOCKER_PASSWORD", "")
    assert base64.b64decode(result.credentials.basic.split()[1]) == b"$oauthtoken:PASSWORD"
