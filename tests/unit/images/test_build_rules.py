"""What a site says of builds."""

from pathlib import Path

import pytest

from slurmddp.errors import UserError
from slurmddp.images.make import Rules
from slurmddp.launch.image import rules_of
from tests.helpers import Desk

SITE = """
name: s
title: t
detect: {environment: {WE_ARE_AT: s}}
images: {processors: 2, memory: 1G}
job: {container: {runtime: singularity}, paths: {cache: $SCRATCH/cache}}
"""


def test_of_the_site_that_is_named_or_found(desk: Desk) -> None:
    desk.site(SITE)
    wanted = Rules("singularity", Path("/scratch/me/cache"), 2, 1024)
    here = {**desk.environment, "SCRATCH": "/scratch/me"}
    assert rules_of("s", here) == wanted
    assert rules_of(None, {**here, "SLURMDDP_SITE": "s"}) == wanted
    assert rules_of(None, {**here, "WE_ARE_AT": "s"}) == wanted


def test_elsewhere_and_without_the_variable_the_builders_own_places_are_taken(desk: Desk) -> None:
    desk.site(SITE)
    here = {name: value for name, value in desk.environment.items() if name not in ("SCRATCH", "SLURMDDP_SITE")}
    assert rules_of("s", here).cache is None
    with pytest.raises(UserError, match="unknown site"):
        rules_of("nowhere", here)
