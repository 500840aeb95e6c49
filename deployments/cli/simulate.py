"""The commands `brimful simulate ...`: each in a file of its own. Without a command: a cluster under a load."""

from __future__ import annotations

import inspect
from typing import Any

import typer

from deployments.cli import simulate_cluster
from deployments.cli.simulate_fit import fit
from deployments.cli.simulate_routing import routing
from deployments.cli.simulate_story import story
from deployments.cli.simulate_validate import validate
from deployments.cli.simulate_victims import victims
from replica.errors import SettingError

simulate = typer.Typer(rich_markup_mode=None)
simulate.command()(fit)
simulate.command()(validate)
simulate.command()(story)
simulate.command()(victims)
simulate.command()(routing)


def _cluster(ctx: typer.Context, **given: Any) -> int:
    """Simulate a cluster in virtual time: the real scheduler and router, no model. Or one of the experiments below.

    Replicas' settings are those of `brimful serve`; their defaults follow the device of the step cost (a GPU
    or a CPU). Prints tables and, as the last line, one JSON document; progress goes to stderr.
    """
    if ctx.invoked_subcommand is None:
        return simulate_cluster.run(given)
    for name, value in given.items():
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise SettingError(flag, value, f"put flags of {ctx.invoked_subcommand} after its name")
    return 0


def _with_flags() -> None:
    """Give the command a signature with all its flags."""
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    every = [context, *simulate_cluster.parameters()]
    _cluster.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]
    _cluster.__annotations__ = {one.name: one.annotation for one in every}
    simulate.callback(invoke_without_command=True)(_cluster)


_with_flags()
