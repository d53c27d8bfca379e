"""`slurmddp build-image`: what the site says of builds, and the build."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from slurmddp.images.make import Rules
from slurmddp.sites.catalogue import Catalogue
from slurmddp.sites.detect import detect
from slurmddp.spec.expand import Expander, Unexpanded


def rules_of(site: str | None, environment: Mapping[str, str] = os.environ) -> Rules:
    """The rules of the site that is named, by --site or SLURMDDP_SITE, or that this host belongs to; else none.

    Raises UserError for a site that is unknown or wrong.
    """
    catalogue = Catalogue(environment)
    name = site or environment.get("SLURMDDP_SITE")
    if name is None:
        found = detect(catalogue, platform.node(), environment)
        if found is None:
            return Rules()
        name = found[0]
    profile, layer = catalogue.load(name)
    paths = layer.tree.get("paths") or {}
    written = profile.images.cache or paths.get("cache")
    cache = Expander(environment).text(str(written), ("paths", "cache")) if written else None
    runtime = (layer.tree.get("container") or {}).get("runtime")
    return Rules(
        prefer=str(runtime) if runtime in ("apptainer", "singularity") else None,
        # A variable that is not set here: the builder's own places are better than a folder of that name.
        cache=Path(cache).absolute() if cache and not isinstance(cache, Unexpanded) else None,
        processors=profile.images.processors,
        memory=profile.images.memory,
    )
