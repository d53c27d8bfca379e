"""The shipped profiles: each is valid, says only what the models know, and has a source for every value."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from slurmddp.assets import asset_folder
from slurmddp.job.document import read_file
from slurmddp.job.job import Job
from slurmddp.job.layers import Layered, submodel
from slurmddp.job.site import Site
from slurmddp.job.validate import nearest_key
from slurmddp.sites.catalogue import Catalogue
from tests.golden.update import scripts
from tests.helpers import Desk

FOLDER = asset_folder("site_configs")
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
BASES = sorted(path.stem for path in (FOLDER / "bases").glob("*.yaml"))

INVENTED = {"generic", "local", "testcluster"}
#: Real sites. Their ids in the facts file are longer.
REAL = sorted(set(NAMES) - INVENTED)
FACTS_FILE = Path(__file__).parents[4] / "shared" / "facts" / "sites.yaml"

#: Says nothing about the site that could be wrong, or is the record of the sources itself.
NEEDS_NO_FACT = {"name", "title", "documentation", "level", "bases", "scheduler", "facts"}
#: Parts for profiles of users' own, which no shipped profile has.
FOR_OTHERS = {"amd", "ethernet", "mi300a", "roce"}

CATALOGUE = Catalogue({"HOME": "/nowhere"})


@cache
def layered(name: str) -> Layered:
    """The profile over its bases."""
    return CATALOGUE.layered(name)


@cache
def site(name: str) -> Site:
    return CATALOGUE.load(name)[0]


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


@pytest.mark.parametrize("name", NAMES)
def test_valid_and_named_after_its_file(name: str) -> None:
    assert site(name).name == name
    assert set(site(name).bases) <= set(BASES)


@pytest.mark.parametrize("base", BASES)
def test_base_is_a_part_of_a_profile_and_used(base: str) -> None:
    tree = read_file(FOLDER / "bases" / f"{base}.yaml", base).tree
    assert set(tree) <= set(Site.model_fields) - {"name", "title", "level"}
    # Facts are keyed by a note's place in its own file.
    assert "notes" not in tree
    assert any(base in site(name).bases for name in NAMES) != (base in FOR_OTHERS)


@pytest.mark.parametrize("name", NAMES)
def test_renders_a_job(name: str) -> None:
    made = scripts(name, "simple")
    assert made["node.sh"].startswith("#!/bin/bash\n")
    assert site(name).scheduler == "local" or "#SBATCH --nodes=2\n" in made["job.sh"]


@pytest.mark.parametrize("name", NAMES)
def test_job_layer_has_only_keys_and_values_of_the_job(name: str) -> None:
    for layer in (site(name).job, *(entry.job for entry in site(name).when.values())):
        check_job_layer(name, layer)


def check_job_layer(name: str, layer: dict[str, Any]) -> None:
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
        assert partition.mem_per_node in (None, 0) or 1024 <= partition.mem_per_node <= 4 * 1024 * 1024
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


@pytest.mark.parametrize("name", REAL)
def test_every_value_has_a_source_and_every_source_a_value(name: str) -> None:
    facts = site(name).facts
    keys = [
        key for top, value in layered(name).tree.items() if top not in NEEDS_NO_FACT for key in leaves({top: value})
    ]
    assert [key for key in keys if not any(covers(fact, key) for fact in facts)] == []
    assert [fact for fact in facts if not any(covers(fact, key) for key in keys)] == []


@pytest.mark.parametrize("name", REAL)
def test_every_source_has_an_address_and_a_date(name: str) -> None:
    assert "level" in read_file(FOLDER / f"{name}.yaml", name).tree
    for key, fact in site(name).facts.items():
        assert fact.source.startswith(("https://", "http://")) and " " not in fact.source, key
        assert fact.date is not None, key


@cache
def facts_file() -> dict[str, set[bool]]:
    """Address -> whether it was read in text of the site or its vendor, as the facts say."""
    if not FACTS_FILE.is_file():
        pytest.skip(f"the facts are not beside this checkout: {FACTS_FILE}")
    import yaml

    known: dict[str, set[bool]] = {}
    with FACTS_FILE.open(encoding="utf-8") as handle:
        for entry in filter(None, yaml.safe_load_all(handle)):
            for fact in entry["facts"]:
                known.setdefault(fact["source"], set()).add(fact["verified"])
    return known


#: Read in stored text of the site or vendor on 2026-11-23 and 2026-11-25, after the facts were gathered.
READ_SINCE = {
    "https://docs.isambard.ac.uk/user-documentation/guides/example-data/nccl/env_vars.sh",
    "https://docs.isambard.ac.uk/user-documentation/guides/nccl/",
    "https://documentation.sigma2.no/hpc_machines/olivia/nccl.html",
    "https://github.com/CSCfi/csc-user-guide/blob/master/docs/computing/containers/overview.md",
    "https://github.com/CSCfi/csc-user-guide/blob/master/docs/computing/containers/run-existing.md",
    "https://github.com/CSCfi/csc-user-guide/blob/master/docs/computing/systems-mahti.md",
    "https://github.com/CSCfi/csc-user-guide/blob/master/docs/computing/systems-roihu.md",
    "https://github.com/HewlettPackard/shs-ccl-docs/blob/main/README.md",
    "https://github.com/HewlettPackard/shs-ccl-docs/blob/main/ccl_env.sh",
    "https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/118",
    "https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/97",
    "https://github.com/NERSC/nersc-dl-multigpu/blob/main/submit_batch_modules.sh",
    "https://github.com/NVIDIA/nccl/pull/2053",
    "https://github.com/NYU-RTS/rts-docs-dev/blob/main/docs/hpc/01_getting_started/01_intro.md",
    "https://github.com/lumi-ai-factory/laifs-container-recipes/issues/44",
    "https://github.com/ncsa/Delta_doc/blob/main/docs/source/user_guide/architecture.rst",
    "https://github.com/ncsa/Delta_doc/blob/main/docs/source/user_guide/containers.rst",
    "https://github.com/ncsa/Delta_doc/blob/main/docs/source/user_guide/running_jobs.rst",
    "https://github.com/stanford-rc/www.sherlock.stanford.edu/blob/main/src/docs/software/containers/apptainer.md",
}


@pytest.mark.parametrize("name", REAL)
def test_what_is_called_verified_is_verified_in_the_facts(name: str) -> None:
    known = facts_file()
    for key, fact in site(name).facts.items():
        if fact.verified:
            assert fact.source in READ_SINCE or True in known.get(fact.source, set()), f"{key}: {fact.source}"
        else:
            assert fact.note or True not in known.get(fact.source, set()), f"{key}: say why in a note"


@pytest.mark.parametrize(
    ("name", "image", "level"),
    [
        ("lumi", "lumi-multitorch-full-u24r70f21m50t210-20260807_115122.sif", None),  # hangs with PHB
        ("lumi", "mine.sif", None),
        ("lumi", "lumi-multitorch-full-u24r64f21m43t29-20260225_144743.sif", "PHB"),
        ("frontier", "mine.sif", "PHB"),
        ("isambard-ai", "mine.sif", "PHB"),
    ],
)
def test_gpudirect_on_slingshot_belongs_to_the_image(desk: Desk, name: str, image: str, level: str | None) -> None:
    job = desk.resolve(f"site: {name}\nname: x\ntrain: {{script: t.py}}\ncontainer: {{image: /i/{image}}}\n").job
    assert job.network.variables.get("NCCL_NET_GDR_LEVEL") == level


@pytest.mark.parametrize("name", [name for name in NAMES if site(name).architecture == "aarch64"])
def test_gh200_on_slingshot_never_uses_ll128(name: str) -> None:
    variables = site(name).job.get("network", {}).get("variables", {})
    assert ("NCCL_PROTO" in variables) == (site(name).fabric == "slingshot11")
    assert variables.get("NCCL_PROTO", "^LL128") == "^LL128"


@pytest.mark.parametrize("name", NAMES)
def test_a_fabric_brings_its_interface_and_a_value_of_infiniband_is_one_that_the_field_can_hold(name: str) -> None:
    network = site(name).job.get("network", {})
    assert site(name).fabric != "slingshot11" or network["interface"].startswith("hsn")
    assert 0 < int(network.get("variables", {}).get("NCCL_IB_TIMEOUT", 20)) < 32
