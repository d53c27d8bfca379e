"""Finds out at which site this host is, from its name and environment alone."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slurmddp.sites.catalogue import Catalogue


def detect(catalogue: Catalogue, hostname: str, environment: Mapping[str, str]) -> tuple[str, str] | None:
    """(site, why), or None. Profiles are asked in alphabetical order; variables are believed before host names."""
    by_name: tuple[str, str] | None = None
    for name in catalogue.names():
        rules = catalogue.load(name)[0].detect
        for variable, wanted in rules.environment.items():
            value = environment.get(variable)
            if value is not None and (wanted == "*" or fnmatchcase(value, wanted)):
                return name, f"detected: ${variable} is {value}"
        for pattern in rules.hostnames:
            if by_name is None and fnmatchcase(hostname, pattern):
                by_name = name, f"detected: this host is {hostname}"
    return by_name
