"""The commands `brimful bench ...`: the engine against this machine's limits, beside its peers and behind HTTP, a GPU's
steps."""

from __future__ import annotations

import typer

from deployments.cli.bench_engine import engine
from deployments.cli.bench_gpu import gpu
from deployments.cli.bench_http import http
from deployments.cli.bench_peers import peers

bench = typer.Typer(help="Measure the engine on this machine.", rich_markup_mode=None)
bench.command()(engine)
bench.command()(peers)
bench.command()(http)
bench.command()(gpu)
