"""`brimful simulate`: a cluster under a load, in virtual time."""

from __future__ import annotations

import inspect
import json
import sys
import time
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

import typer

from deployments.cli import flags
from deployments.cli.console import Console, Pause, result_lines
from deployments.cli.flags import flag_of
from deployments.cli.simulate_cost import given_cost
from deployments.config import ModelSettings
from deployments.router_settings import RouterSettings
from replica.config import SchedulerConfig
from replica.errors import BrimfulError, ErrorInfo, SettingError, error_from_info

if TYPE_CHECKING:
    from bench.simulate.cluster import Pace
    from bench.simulate.settings import ClusterSettings
    from bench.traces.trace import Trace

DEVICES = {"cpu": (1456, 32, 8192), "cuda": (3072, 128, 16384)}
"""What a replica has where no flag says, by the cost's device: KV blocks, tokens in a block, longest context."""
DEFAULT_LOAD = 0.8
VOCAB_SIZE = 49_152
_NAMED = {"num_replicas": "replicas", "num_routers": "routers", "num_workers": "workers"}
"""Settings of a simulated cluster whose flags are named otherwise."""
_OF_MODEL = ("num_blocks", "block_size", "max_model_len")
_OF_SCHEDULER = tuple(field.name for field in fields(SchedulerConfig))


def _own_flags() -> list[tuple[str, Any, Any, str]]:
    """(name, type, default, help) of the flags that only the simulator has."""
    return [
        ("shape", str, "W2", "lengths and arrivals: " + ", ".join(_shape_names())),
        ("num_requests", int, 1000, "requests in the trace"),
        ("rate", float, None, "requests per second, all replicas together"),
        ("load", float, None, f"rate as a share of what the replicas do with full queues [default: {DEFAULT_LOAD}]"),
        ("all_present", bool, False, "all requests are there at time 0"),
        ("length_scale", int, 1, "divide all lengths by this"),
        ("replicas", int, 1, "replicas"),
        ("routers", int, 1, "routers that know nothing of each other; requests go to them in turn"),
        ("report_delay", float, 0.05, "age of a load report beside the network, seconds"),
        ("network_delay", float, 0.0005, "one way between router and replica, seconds"),
        ("cost", str, "h100-8b", "step cost: a preset or a cost file (brimful simulate fit)"),
        ("slo_ttft", float, 1.0, "objective for goodput: time to first token, seconds"),
        ("slo_itl", float, 0.05, "objective for goodput: a request's mean time between tokens, seconds"),
        ("seed", int, 0, "of the trace and of the routers' choices"),
        ("workers", int, 1, "processes that step the replicas; no effect on the result"),
    ]


def _shape_names() -> list[str]:
    from bench.traces.generate import SHAPES

    return list(SHAPES)


def parameters() -> list[inspect.Parameter]:
    """The command's flags: its own, a router's weights, and a replica's settings, named as `brimful serve` names
    them."""
    own = [_parameter(name, kind, default, text) for name, kind, default, text in _own_flags()]
    weights = [
        _parameter(f"router_{name}", type(field.default), field.default, field.description or "")
        for name, field in RouterSettings.model_fields.items()
    ]
    settings = [one for one in flags.setting_parameters() if one.name in (*_OF_MODEL, *_OF_SCHEDULER)]
    return [*own, *weights, *settings]


def _parameter(name: str, kind: Any, default: Any, text: str) -> inspect.Parameter:
    option = typer.Option(default, flag_of(name), help=text, show_default=default is not None and kind is not bool)
    annotation = kind if default is not None else kind | None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=annotation)


def run(given: dict[str, Any]) -> int:
    """Simulate what the flags say; prints the tables and, last, one line of JSON. Raises `SettingError`."""
    from bench.simulate.cluster import simulate_cluster
    from bench.simulate.outcome import Objectives
    from bench.simulate.report import table
    from bench.simulate.shard_process import peak_rss_bytes

    began_s = time.monotonic()
    console = Console(sys.stderr)
    _check(given)
    try:
        settings = cluster_settings(given)
        trace, known = _trace(given, settings, console)
    except SettingError as error:
        raise _in_flag_terms(error, given) from None
    objectives = Objectives(given["slo_ttft"], given["slo_itl"])
    outcome = simulate_cluster(settings, trace, _Progress(console))
    found = outcome.summary(objectives)
    result_lines([*_about(settings, trace, known), "", *table(found, outcome.steps.bins(), objectives)])
    result = {
        "command": "simulate",
        "settings": _settings_json(given, settings) | known,
        "trace": trace.summary(),
        **found,
        "wall_s": round(time.monotonic() - began_s, 1),
        "peak_rss_mb": (peak_rss_bytes() + outcome.workers_peak_rss_bytes) >> 20,
    }
    print(json.dumps(result))
    return 0


def cluster_settings(given: dict[str, Any]) -> ClusterSettings:
    """The cluster that the flags describe. Raises `SettingError`."""
    from bench.simulate.settings import ClusterSettings
    from replica.model.api import ModelShape
    from router.config import RouterConfig

    cost = given_cost(given["cost"])
    num_blocks, block_size, max_model_len = DEVICES[cost.kind_of_device]
    of_replica = {name: given[name] for name in (*_OF_MODEL, *_OF_SCHEDULER) if given.get(name) is not None}
    model = ModelSettings.checked(of_replica)
    seqs, tokens = model.limits_on(cost.kind_of_device)
    of_scheduler = {name: value for name, value in of_replica.items() if name in _OF_SCHEDULER}
    of_scheduler |= {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    shape = ModelShape(
        num_blocks=model.num_blocks or num_blocks,
        block_size=model.block_size or block_size,
        vocab_size=VOCAB_SIZE,
        max_model_len=model.max_model_len or max_model_len,
        eos_token_ids=(),
    )
    return ClusterSettings(
        scheduler=SchedulerConfig(**of_scheduler),
        shape=shape,
        cost=cost,
        router=RouterConfig(
            policy=given["router_policy"],
            weights={name: given[f"router_{name}"] for name in RouterSettings().weights},
            prefix_caching=of_scheduler.get("enable_prefix_caching", True),
        ),
        num_replicas=given["replicas"],
        num_routers=given["routers"],
        network_delay_s=given["network_delay"],
        report_delay_s=given["report_delay"],
        seed=given["seed"],
        num_workers=given["workers"],
    )


def _check(given: dict[str, Any]) -> None:
    arrivals = [name for name in ("rate", "load", "all_present") if given[name]]
    if len(arrivals) > 1:
        raise SettingError(flag_of(arrivals[1]), given[arrivals[1]], f"not together with {flag_of(arrivals[0])}")
    for name in ("rate", "load"):
        if given[name] is not None and not 0.001 <= given[name] < 1e9:
            raise SettingError(flag_of(name), given[name], "at least 0.001, less than 1e9")
    for name in ("slo_ttft", "slo_itl"):
        if not 0.0 < given[name] < 1e9:
            raise SettingError(flag_of(name), given[name], "more than 0 seconds, less than 1e9")
    for name in ("num_requests", "length_scale"):
        if not 1 <= given[name] <= 100_000_000:
            raise SettingError(flag_of(name), given[name], "from 1 to 100000000")
    if given["seed"] < 0:
        raise SettingError("--seed", given["seed"], "at least 0")


def _trace(given: dict[str, Any], settings: ClusterSettings, console: Console) -> tuple[Trace, dict[str, Any]]:
    """The trace at its rate, and what is known of the rate."""
    from bench.simulate.capacity import capacity, num_probes
    from bench.traces.generate import generate

    console.doing(f"drawing {given['num_requests']:,} requests of {given['shape']}")
    trace = generate(given["shape"], given["num_requests"], given["seed"], given["rate"]).scaled(given["length_scale"])
    if given["all_present"]:
        return trace.all_present(), {"rate": None, "capacity_per_replica": None}
    if given["rate"] is not None:
        return trace, {"rate": given["rate"], "capacity_per_replica": None}

    pause = Pause()

    def progress(num_ended: int, num_all: int) -> None:
        if pause.is_over():
            console.doing(f"measuring the capacity of one replica: {num_ended * 100 // num_all} %")

    share = DEFAULT_LOAD if given["load"] is None else given["load"]
    probes = generate(given["shape"], num_probes(settings), given["seed"]).scaled(given["length_scale"])
    per_replica = capacity(settings, probes, progress)
    if not per_replica:
        longest = f"and --max-model-len {settings.shape.max_model_len}"
        allowed = (
            f"no request of the trace fits into a replica of so many blocks of {settings.shape.block_size} {longest}"
        )
        raise SettingError("--num-blocks", settings.shape.num_blocks, allowed)
    rate = share * per_replica * settings.num_replicas
    timed = trace if trace.arrival_s[-1] > 0 else generate(given["shape"], len(trace), given["seed"], rate)
    timed = timed.at_rate(rate) if timed is trace else timed.scaled(given["length_scale"])
    return timed, {"rate": rate, "load": share, "capacity_per_replica": per_replica}


def _in_flag_terms(error: SettingError, given: dict[str, Any]) -> BrimfulError:
    """num_replicas -> --replicas, weights.queue_depth -> --router-queue-depth: if that flag has a value."""
    setting = error.param or ""
    name = _NAMED.get(setting, setting.replace("weights.", "router_"))
    if given.get(name) is None:
        return error
    message = error.message.replace(setting, flag_of(name), 1)
    return error_from_info(ErrorInfo(error.code, message, flag_of(name)))


class _Progress:
    """Virtual time, requests, pace and what is left."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pause = Pause()
        self._began_s = time.monotonic()

    def __call__(self, pace: Pace) -> None:
        if not self._pause.is_over():
            return
        per_s = pace.num_ended / (time.monotonic() - self._began_s)
        left = f"{(pace.num_requests - pace.num_ended) / per_s:.0f} s left" if per_s else "no request has ended yet"
        self._console.doing(
            f"simulating: {left}, {pace.num_ended:,} of {pace.num_requests:,} requests have ended, {per_s:,.0f}/s; "
            f"virtual time {pace.now_s:.1f} s, {pace.num_arrived:,} have arrived"
        )


def _about(settings: ClusterSettings, trace: Trace, known: dict[str, Any]) -> list[str]:
    scheduler, shape = settings.scheduler, settings.shape
    rate = "all present" if known["rate"] is None else f"{known['rate']:.3f} requests/s"
    if known["capacity_per_replica"]:
        rate += f" = {known['load']:g} x the capacity of {known['capacity_per_replica']:.3f} a replica"
    longest = shape.max_seq_len
    num_too_long = sum(prompt_tokens >= longest for prompt_tokens in trace.prompt_tokens)
    refused = [f"{num_too_long:,} of them have prompts of {longest:,} tokens or more (--max-model-len) and are refused"]
    return [
        f"{len(trace):,} requests of {trace.name}, {rate}",
        *(refused if num_too_long else []),
        f"{settings.num_replicas} replicas of {scheduler.max_num_seqs} sequences, {scheduler.max_num_batched_tokens} "
        f"tokens, {shape.num_blocks} blocks of {shape.block_size}; step cost {settings.cost.name}",
    ]


def _settings_json(given: dict[str, Any], settings: ClusterSettings) -> dict[str, Any]:
    own = {name: given[name] for name, *_ in _own_flags()}
    shape = {name: getattr(settings.shape, name) for name in _OF_MODEL}
    return {
        **own,
        **shape,
        "router_policy": settings.router.policy,
        "router_weights": settings.router.weights,
        **asdict(settings.scheduler),
    }
