"""Bases in a real registry: taken by their digest, asked about only when that is needed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmddp.errors import ExternalError, UserError
from slurmddp.images.image_spec import of_dockerfile, of_recipe
from slurmddp.images.make import BuildResult, Request, Rules, build_image, preview
from slurmddp.images.provenance import lock_path
from slurmddp.images.recipe import read_recipe
from slurmddp.images.registry.settings import RegistrySettings
from tests.registry import Registry

from .conftest import Apptainer

ENVIRONMENT = {"CUDA_DRIVER_VERSION": "575.51.02", "CUDA_VERSION": "12.9.0.036", "NCCL_VERSION": "2.26.3"}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    with Registry.started(tmp_path / "registry") as running:
        yield running


def push(registry: Registry, *more: str, tag: str = "1.0") -> str:
    config: dict[str, Any] = {"config": {"Env": [*(f"{k}={v}" for k, v in ENVIRONMENT.items()), *more]}}
    return registry.push("lab/torch", tag, config, [b"layer"]).digest


def build(registry: Registry, folder: Path, **more: Any) -> tuple[BuildResult, str]:
    said: list[str] = []
    rules = more.pop("rules", Rules())
    image = of_recipe(read_recipe(None, {"base": f"docker://{registry.reference('lab/torch', '1.0')}"}, folder, {}))
    request = Request(image, more.pop("target", None), folder, **more)
    return build_image(request, said.append, lambda: rules), "\n".join(said)


def test_a_tag_becomes_a_digest_and_the_lock_tells_of_it(
    registry: Registry, apptainer: Apptainer, tmp_path: Path
) -> None:
    digest = push(registry)
    apptainer.builds('echo "https off: $APPTAINER_NOHTTPS"; cat $definition; ' + FAKE)
    result, said = build(registry, tmp_path)
    host = registry.reference("lab/torch", "1.0").removesuffix("/lab/torch:1.0")
    assert f"Bootstrap: docker\nFrom: {host}/lab/torch@{digest}\n" in result.definition
    assert f"slurmddp.digest {digest}" in result.definition and "https off: 1" in said
    lock = json.loads(lock_path(result.target).read_text())
    assert lock["digests"] == {f"{host}/lab/torch:1.0": digest}
    found = lock["registry"]
    assert (found["driver"], found["cuda"], found["nccl"], found["torch"]) == (
        "575.51.02",
        "12.9.0.036",
        "2.26.3",
        None,
    )


def test_an_image_that_is_there_asks_nobody(apptainer: Apptainer, tmp_path: Path) -> None:
    with Registry.started(tmp_path / "for a while") as gone:
        push(gone)
        first, _ = build(gone, tmp_path)
    again, _ = build(gone, tmp_path)
    assert again.up_to_date and again.target == first.target
    with pytest.raises(ExternalError):
        build(gone, tmp_path, update=True)


def test_asked_for_the_tag_is_looked_at_again(registry: Registry, apptainer: Apptainer, tmp_path: Path) -> None:
    push(registry)
    first, _ = build(registry, tmp_path)
    moved = push(registry, "NEW=1")
    assert build(registry, tmp_path)[0].up_to_date
    # What it leads to now is another image, under another name.
    newer, _ = build(registry, tmp_path, update=True)
    assert newer.built is not None and newer.target != first.target and moved in newer.definition
    latest, _ = build(registry, tmp_path, update=True)
    assert latest.up_to_date and latest.target == newer.target


def test_a_name_of_ones_own_is_not_replaced_by_an_update_unasked(
    registry: Registry, apptainer: Apptainer, tmp_path: Path
) -> None:
    push(registry)
    build(registry, tmp_path, target=Path("mine.sif"))
    assert build(registry, tmp_path, target=Path("mine.sif"), update=True)[0].up_to_date
    moved = push(registry, "NEW=1")
    with pytest.raises(UserError, match="its base has changed in the registry"):
        build(registry, tmp_path, target=Path("mine.sif"), update=True)
    assert moved in build(registry, tmp_path, target=Path("mine.sif"), force=True)[0].definition


def test_a_mirror_is_where_the_builder_is_sent(registry: Registry, apptainer: Apptainer, tmp_path: Path) -> None:
    digest = push(registry)
    host = registry.reference("lab/torch", "1.0").removesuffix("/lab/torch:1.0")
    image = of_recipe(read_recipe(None, {"base": "docker://nvcr.io/torch:1.0"}, tmp_path, {}))
    rules = Rules(registries=RegistrySettings(mirrors={"nvcr.io": f"{host}/lab"}))
    result = build_image(Request(image, None, tmp_path), [].append, lambda: rules)
    assert f"From: {host}/lab/torch@{digest}\n" in result.definition
    assert "slurmddp.base docker://nvcr.io/torch:1.0" in result.definition


@pytest.mark.parametrize("tag", ["25.04", "26.12"])
def test_the_registry_is_asked_for_any_release_and_the_table_is_for_dry_runs(
    registry: Registry, apptainer: Apptainer, tmp_path: Path, tag: str
) -> None:
    image = of_recipe(read_recipe(None, {"base": tag}, tmp_path, {}))
    said: list[str] = []
    dry = preview(Request(image, None, tmp_path), said.append).definition
    assert ("as slurmddp's table of releases has it" in dry) == (tag == "25.04")
    assert any("NGC 26.12 is not in slurmddp's table of releases" in line for line in said) == (tag == "26.12")
    host = registry.reference("lab/torch", "1.0").removesuffix("/lab/torch:1.0")
    rules = Rules(registries=RegistrySettings(mirrors={"nvcr.io": f"{host}/lab"}))
    with pytest.raises(UserError, match=f"nvidia/pytorch:{tag}-py3"):
        build_image(Request(image, None, tmp_path), [].append, lambda: rules)
    said.clear()
    registry.push("lab/nvidia/pytorch", f"{tag}-py3", {"config": {"Env": ["CUDA_VERSION=14.0.1"]}}, [b"layer"])
    definition = build_image(Request(image, None, tmp_path), said.append, lambda: rules).definition
    assert f"NGC PyTorch {tag}, as its registry has it:\n        cuda    14.0.1\n        torch   unknown" in definition
    assert not any("table" in line for line in said)


def test_every_stage_of_a_dockerfile_is_pinned(registry: Registry, apptainer: Apptainer, tmp_path: Path) -> None:
    first, second = push(registry), push(registry, "OTHER=1", tag="2.0")
    names = [registry.reference("lab/torch", tag) for tag in ("1.0", "2.0")]
    text = f"FROM {names[0]} AS made\nRUN echo x > /x\nFROM {names[1]}\nCOPY --from=made /x /y\n"
    (tmp_path / "Dockerfile").write_text(text)
    result = build_image(Request(of_dockerfile(tmp_path / "Dockerfile", {}, None), None, tmp_path), [].append)
    assert result.definition.count("@sha256:") == 2
    assert first in result.definition and second in result.definition
    assert json.loads(lock_path(result.target).read_text())["digests"] == dict(zip(names, (first, second), strict=True))


def test_the_builder_gets_credentials_for_their_registry_alone(
    registry: Registry, apptainer: Apptainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(registry)
    apptainer.builds('echo "shown: $APPTAINER_DOCKER_USERNAME $SINGULARITY_DOCKER_PASSWORD."; ' + FAKE)
    monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", "ann")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "S3CRET")
    _, said = build(registry, tmp_path, force=True)
    assert "shown:  ." in said and "are not used, because their registry is not given" in said
    monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", "ghcr.io")
    _, said = build(registry, tmp_path, force=True)
    assert "shown:  ." in said and "are not used" not in said
    monkeypatch.setenv("SLURMDDP_REGISTRY_HOST", registry.host)
    _, said = build(registry, tmp_path, force=True)
    assert "shown: ann S3CRET." in said


def test_plain_http_for_one_base_of_several_is_refused(
    registry: Registry, apptainer: Apptainer, tmp_path: Path
) -> None:
    push(registry)
    plain = registry.reference("lab/torch", "1.0")
    (tmp_path / "Dockerfile").write_text(f"FROM {plain} AS made\nFROM ghcr.io/lab/b:1\nCOPY --from=made /x /y\n")
    with pytest.raises(UserError, match=rf"{plain} comes over plain HTTP and ghcr.io/lab/b:1 over HTTPS"):
        build_image(Request(of_dockerfile(tmp_path / "Dockerfile", {}, None), None, tmp_path), [].append)
    assert apptainer.calls == []


def test_what_the_registry_refuses_leaves_nothing(registry: Registry, apptainer: Apptainer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"lab/torch:1\.0"):
        build(registry, tmp_path)
    assert not (tmp_path / "images").exists() and apptainer.calls == []
    image = of_recipe(read_recipe(None, {"base": f"docker://{registry.reference('lab/torch', '1.0')}"}, tmp_path, {}))
    # A dry run asks nobody.
    assert "lab/torch:1.0" in preview(Request(image, None, tmp_path), [].append).definition


FAKE = r"printf '#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0%s' new > $image"
