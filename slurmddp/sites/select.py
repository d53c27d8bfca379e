"""Which site a command uses where no job file names one."""

from __future__ import annotations

from collections.abc import Mapping

from slurmddp.job.resolve import named_site
from slurmddp.sites.catalogue import Catalogue, config_files
from slurmddp.sites.detect import detect
from slurmddp.sites.host import this_host


def select(catalogue: Catalogue, environment: Mapping[str, str], option: str | None = None) -> tuple[str, str] | None:
    """Return (site, why): --site, SLURMDDP_SITE, the configuration file, then detection; None if nothing matches.

    Raises UserError for a tie.
    """
    if option is not None:
        return option, "--site"
    return named_site(environment, config_files(environment)) or detect(catalogue, this_host(environment))
