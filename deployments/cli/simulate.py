"""The commands `brimful simulate ...`: each in a file of its own."""

from __future__ import annotations

import typer

from deployments.cli.simulate_fit import fit
from deployments.cli.simulate_story import story
from deployments.cli.simulate_validate import validate

simulate = typer.Typer(help="The scheduler in virtual time, at any size.", rich_markup_mode=None)
simulate.command()(fit)
simulate.command()(validate)
simulate.command()(story)
