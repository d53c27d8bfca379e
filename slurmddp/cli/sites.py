"""sites: which profiles there are, and what one says."""

import os
from typing import Annotated

import typer

from slurmddp.cli import options as opt
from slurmddp.cli.help import App


def register(app: App) -> None:
    """Put the group's commands on the app."""
    app.add("Sites and alerts", sites, example="slurmddp sites leonardo")


def sites(
    name: Annotated[
        str | None, typer.Argument(metavar="SITE", help="Site to show", autocompletion=opt.site_names)
    ] = None,
) -> None:
    """List the site profiles, or show one with the sources of its values."""
    from slurmddp.report.sites import site_list, site_page
    from slurmddp.sites.catalogue import Catalogue

    catalogue = Catalogue(os.environ)
    typer.echo(site_page(catalogue, name) if name else site_list(catalogue))
