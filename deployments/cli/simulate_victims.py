"""`brimful simulate victims`: what each way to choose a preemption's victim costs."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from deployments.cli.console import Console, result_lines
from deployments.cli.simulate_cost import given_cost
from replica.errors import SettingError

if TYPE_CHECKING:
    from collections.abc import Collection

    from bench.simulate.step_cost import StepCost
    from bench.victims.study import Measured, Setup

Repeated = list[str] | None
LAST_SEED = 1_000_000


def victims(
    shape: Annotated[Repeated, typer.Option(help="W1, W2 or W4; may be repeated [default: all]")] = None,
    rule: Annotated[
        Repeated, typer.Option(help="compare only this with newest; may be repeated [default: all]")
    ] = None,
    share: Annotated[
        list[float] | None, typer.Option(help="share of capacity that arrives; may be repeated [default: 0.9 1.0 1.2]")
    ] = None,
    regime: Annotated[
        str, typer.Option(help="pressed: admission keeps nothing free; shipped: as in the default settings")
    ] = "pressed",
    prefix_caching: Annotated[bool, typer.Option(help="prefix cache on or off")] = True,
    cost: Annotated[str, typer.Option(help="step cost: a preset or a cost file")] = "h100-8b",
    seeds: Annotated[int, typer.Option(help="traces to average over, one a seed")] = 2,
    first_seed: Annotated[int, typer.Option(help="seed of the first trace; the others follow it")] = 0,
) -> int:
    """Preempt by one rule after the other, on the same requests, and compare what had to be computed again.

    Columns: tokens computed again (thousands), computed / useful tokens, preemptions a request, most of any request,
    requests preempted more than 3 times, requests per second, p99 of time to first token, end to end and between
    tokens, longest wait for a first token and longest stall between tokens (seconds). Takes about 5 minutes. The last
    line is JSON.
    """
    from bench.victims.rules import RULES
    from bench.victims.verdict import REFERENCE, better_rules

    began_s = time.monotonic()
    rules = tuple(dict.fromkeys((REFERENCE, *_known("--rule", rule, RULES))))
    setups = _setups(shape, share, regime, given_cost(cost), prefix_caching=prefix_caching)
    numbers = _seeds(first_seed, seeds)
    measured = {(setup.load.shape, setup.rate): _measure(setup, rules, numbers) for setup in setups}
    better = better_rules(measured)
    shown = f"seed {numbers[0]}" if seeds == 1 else f"seeds {numbers[0]} to {numbers[-1]}"
    print(
        f"\nbetter than {REFERENCE} under every load that ran ({len(measured)}), {shown}: {', '.join(better) or 'none'}"
    )
    result = {
        "command": "simulate victims",
        "regime": regime,
        "prefix_caching": prefix_caching,
        "cost": setups[0].cost.name,
        "seeds": seeds,
        "first_seed": first_seed,
        "better": better,
        "loads": [
            {"shape": name, "share": value, "rules": [row._asdict() for row in rows.values()]}
            for (name, value), rows in measured.items()
        ],
        "wall_s": time.monotonic() - began_s,
    }
    print(json.dumps(result))
    return 0


def _setups(
    shapes: Repeated, shares: list[float] | None, regime: str, cost: StepCost, *, prefix_caching: bool
) -> list[Setup]:
    """One for each shape at each share of capacity."""
    from bench.victims.study import LOADS, REGIMES, Setup

    names = _known("--shape", shapes, LOADS)
    _known("--regime", [regime], REGIMES)
    shares = shares or [0.9, 1.0, 1.2]
    for share in shares:
        if not 0.01 <= share <= 100.0:
            raise SettingError("--share", share, "from 0.01 to 100")
    return [Setup(LOADS[name], REGIMES[regime], prefix_caching, cost, share) for name in names for share in shares]


def _seeds(first: int, count: int) -> tuple[int, ...]:
    if not 1 <= count <= 1000:
        raise SettingError("--seeds", count, "from 1 to 1000")
    most = LAST_SEED + 1 - count
    if not 0 <= first <= most:
        raise SettingError("--first-seed", first, f"from 0 to {most} with --seeds {count}")
    return tuple(range(first, first + count))


def _measure(setup: Setup, rules: tuple[str, ...], seeds: tuple[int, ...]) -> dict[str, Measured]:
    from bench.victims.study import compare
    from bench.victims.verdict import table

    console = Console(sys.stderr)
    title = f"{setup.load.shape} at {setup.rate:g} x capacity"
    console.doing(f"measuring {title}: capacity and {rules[0]}")
    rows: dict[str, Measured] = {}
    for row in compare(setup, rules, seeds):
        rows[row.rule] = row
        console.doing(f"measuring {title}: {len(rows)}/{len(rules)} rules")
    about = f"{title}, {setup.regime.name}, prefix cache {'on' if setup.prefix_caching else 'off'}"
    result_lines(["", about, *table(rows)])
    return rows


def _known(flag: str, given: Repeated, allowed: Collection[str]) -> list[str]:
    for name in given or ():
        if name not in allowed:
            raise SettingError(flag, name, f"one of {', '.join(allowed)}")
    return list(given or allowed)
