"""The shipped profiles: each is valid, says only what the models know, and has a source for every value."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from slurmddp.assets import asset_folder
from slurmddp.spec.document import read_file
from slurmddp.spec.job import Job
from slurmddp.spec.layers import Layered, merge, submodel
from slurmddp.spec.site import Site
from slurmddp.spec.validate import nearest_key, validate

FOLDER = asset_folder("site_configs")
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
BASES = sorted(path.stem for path in (FOLDER / "bases").glob("*.yaml"))

#: Real sites, and their ids in the facts file.
REAL = {
    "jean-zay": "idris_jean_zay",
    "leonardo": "cineca_leonardo",
    "lumi": "lumi",
    "narval": "alliance_narval",
    "snellius": "surf_snellius",
    "vista": "tacc_vista",
}
INVENTED = {"generic", "local", "testcluster"}
FACTS_FILE = Path(__file__).parents[4] / "shared" / "facts" / "sites.yaml"

#: Says nothing about the site that could be wrong, or is the record of the sources itself.
NEEDS_NO_FACT = {"name", "title", "documentation", "experimental", "bases", "scheduler", "facts"}


@cache
def layered(name: str) -> Layered:
    """The profile over the bases that it names, in their order."""
    document = read_file(FOLDER / f"{name}.yaml", name)
    bases = [read_file(FOLDER / "bases" / f"{base}.yaml", base) for base in document.tree.get("bases", [])]
    return merge(Site, [*bases, document])


@cache
def site(name: str) -> Site:
    return validate(Site, layered(name))


def leaves(tree: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[str]:
    """Dotted keys of all values; a list is one value, but each note and an empty map count for themselves."""
    for name, value in tree.items():
        key = (*prefix, name)
        if isinstance(value, dict) and value:
            yield from leaves(value, key)
        elif key == ("notes",):
            yield from (f"notes.{index}" for index in range(len(value)))
        else:
            yield ".".join(key)


def covers(fact: str, key: str) -> bool:
    return key == fact or key.startswith(fact + ".")


def test_all_profiles_are_here() -> None:
    assert set(NAMES) == set(REAL) | INVENTED


@pytest.mark.parametrize("name", NAMES)
def test_valid_and_named_after_its_file(name: str) -> None:
    assert site(name).name == name
    assert set(site(name).bases) <= set(BASES)


@pytest.mark.parametrize("base", BASES)
def test_base_is_a_part_of_a_profile_and_used(base: str) -> None:
    tree = read_file(FOLDER / "bases" / f"{base}.yaml", base).tree
    assert set(tree) <= set(Site.model_fields) - {"name", "title", "bases", "experimental"}
    # Facts are keyed by a note's place in its own file.
    assert "notes" not in tree
    assert any(base in site(name).bases for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_job_layer_has_only_keys_and_values_of_the_job(name: str) -> None:
    layer = layered(name).tree.get("job", {})

    def walk(tree: dict[str, Any], model: type[BaseModel], path: tuple[str, ...]) -> None:
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        for key, value in tree.items():
            assert key in fields, f"{'.'.join((*path, key))}: did you mean {nearest_key(Job, (*path, key))}?"
            inner = submodel(fields[key].annotation)
            if isinstance(value, dict) and inner is not None:
                walk(value, inner, (*path, key))

    walk(layer, Job, ())
    job = Job.model_validate({**layer, "site": name, "train": {"script": "train.py"}})
    assert job.resources.account is None, "an account is the user's"


@pytest.mark.parametrize("name", NAMES)
def test_limits_and_sizes_are_plausible(name: str) -> None:
    for partition in site(name).partitions.values():
        assert partition.max_time is None or 60 <= partition.max_time <= 30 * 86400
        assert partition.mem_per_node is None or 1024 <= partition.mem_per_node <= 4 * 1024 * 1024
    default = site(name).job.get("resources", {}).get("partition")
    assert default is None or default in site(name).partitions


@pytest.mark.parametrize("name", NAMES)
def test_required_keys_exist_in_the_job(name: str) -> None:
    for dotted in site(name).required:
        model: Any = Job
        for part in dotted.split("."):
            assert part in model.model_fields, dotted
            model = submodel(model.model_fields[part].annotation)


def test_units_are_read_as_slurm_counts_them() -> None:
    assert site("snellius").partitions["gpu_a100"].mem_per_node == 491520
    assert site("snellius").partitions["gpu_h100"].mem_per_node == 737280
    assert site("narval").partitions["a100"].mem_per_node == 510000
    assert site("testcluster").partitions["debug"].max_time == 300
    assert site("jean-zay").partitions["gpu_p13"].max_time == 100 * 3600
    assert site("lumi").partitions["standard-g"].max_time == 2 * 86400


def test_no_two_sites_are_found_by_the_same_sign() -> None:
    found = [pattern for name in NAMES for pattern in site(name).detect.hostnames]
    found += [f"{key}={value}" for name in NAMES for key, value in site(name).detect.environment.items()]
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", sorted(REAL))
def test_every_value_has_a_source_and_every_source_a_value(name: str) -> None:
    facts = site(name).facts
    keys = [
        key for top, value in layered(name).tree.items() if top not in NEEDS_NO_FACT for key in leaves({top: value})
    ]
    assert [key for key in keys if not any(covers(fact, key) for fact in facts)] == []
    assert [fact for fact in facts if not any(covers(fact, key) for key in keys)] == []


@pytest.mark.parametrize("name", NAMES)
def test_experimental_exactly_where_something_is_unverified(name: str) -> None:
    assert site(name).experimental == any(not fact.verified for fact in site(name).facts.values())


@cache
def facts_file() -> dict[str, dict[str, Any]]:
    if not FACTS_FILE.is_file():
        pytest.skip(f"the facts are not beside this checkout: {FACTS_FILE}")
    import yaml

    with FACTS_FILE.open(encoding="utf-8") as handle:
        return {entry["id"]: entry for entry in yaml.safe_load_all(handle) if entry}


@pytest.mark.parametrize("name", sorted(REAL))
def test_what_is_called_verified_is_verified_in_the_facts(name: str) -> None:
    known: dict[str, set[bool]] = {}
    for fact in facts_file()[REAL[name]]["facts"]:
        known.setdefault(fact["source"], set()).add(fact["verified"])
    for key, fact in site(name).facts.items():
        if fact.verified:
            assert True in known.get(fact.source, set()), f"{key}: {fact.source} is not verified in the facts"
        else:
            assert True not in known.get(fact.source, set()), f"{key}: {fact.source} is verified in the facts"
