"""Where the time of a step goes: the engine's own process with spans put around its parts, from outside.

`load_profiled` takes the place of `load_model` when an engine's process starts (`brimful bench engine`); the product
itself carries no spans. Each part's time is its own: what a part calls that has a span too counts there. Between two
steps the account is closed, so a record holds everything from the beginning of one step's submission to the beginning
of the next: the forward's parts, and outside of it inputs, sampling, commit, the engine's loop and the next plan.

Written when the model is closed: {"steps": [{"num_rows": n, "num_tokens": t, "idle": bool, "parts": {part: seconds}}]};
`idle` marks records that hold a pause.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from replica.config import EngineConfig
from replica.engine import Engine
from replica.errors import SettingError
from replica.model import cpu_kernels
from replica.model import runner as runner_module
from replica.model.api import InFlightStep, ModelRunner, ModelShape, Progress
from replica.model.fused_layer import FusedLayer
from replica.model.in_flight import InFlight
from replica.model.kv_cache import KVCache
from replica.model.prepare import prepare
from replica.model.runner import Runner, load_runner
from replica.model_card import ModelCard
from replica.scheduler.plan import StepPlan
from replica.scheduler.scheduler import Scheduler

OUTSIDE = ("plan", "commit", "loop", "inputs", "sampling")
"""Parts outside the forward. `loop`: what no span covers (news, messages, statistics)."""
FORWARD = ("embedding", "norm", "qkv", "rope", "kv write", "attention", "o", "mlp", "lm_head", "other")
"""Parts of the forward. `rope`: within the attention module around its products; `other`: residuals, glue."""

_MODULES = (
    (r"(q|k|v|qkv)_proj|query_key_value|c_attn", "qkv"),
    (r"\w*(attn|attention)\.(o_proj|out_proj|dense|c_proj)", "o"),
    (r"rotary_emb|self_attn|attn|attention", "rope"),
    (r"(mlp|feed_forward)(\..*)?", "mlp"),
    (r"lm_head|embed_out", "lm_head"),
    (r"embed_tokens|embed_in|wte|wpe", "embedding"),
    (r"\w*norm\w*|ln_\w+", "norm"),
)
"""What the end of a module's name says of its part; the first that fits."""

_FUSED_PARTS = (("_before_attention", "qkv"), ("_after_attention", "mlp"))
"""Methods of a `FusedLayer` and their parts; they hold norm and rotation, and output product and norm, too."""

_FUNCTIONS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "plan", "plan"),
    (Scheduler, "commit", "commit"),
    (Runner, "submit", "inputs"),
    (runner_module, "build_inputs", "inputs"),
    (Runner, "logits", "other"),
    (Runner, "_sample", "sampling"),
    (InFlight, "result", "sampling"),
    (KVCache, "write", "kv write"),
    (cpu_kernels, "write_slots", "kv write"),
)


class Spans:
    """Time of one thread by part. `cut` closes the account."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._open = ["loop"]
        self._since_s = clock()
        self._taken: defaultdict[str, float] = defaultdict(float)

    def enter(self, part: str) -> None:
        self._account()
        self._open.append(part)

    def leave(self) -> None:
        self._account()
        self._open.pop()

    @contextmanager
    def span(self, part: str) -> Iterator[None]:
        self.enter(part)
        try:
            yield
        finally:
            self.leave()

    def cut(self) -> dict[str, float]:
        """Seconds by part since the last cut."""
        self._account()
        taken, self._taken = self._taken, defaultdict(float)
        return dict(taken)

    def _account(self) -> None:
        now_s = self._clock()
        self._taken[self._open[-1]] += now_s - self._since_s
        self._since_s = now_s


def load_profiled(
    config: EngineConfig, progress: Progress, path: Path, clock: Callable[[], float]
) -> tuple[ModelRunner, ModelCard]:
    """The configured model, with spans, whose profile goes to `path` when it is closed. `clock` counts seconds.

    Raises `SettingError` for a replica of several processes: spans are of one.
    """
    if config.model.tensor_parallel_size > 1:
        raise SettingError("tensor_parallel_size", config.model.tensor_parallel_size, "1: a profile is of one process")
    card = prepare(config.model, progress=progress)
    runner = load_runner(card, config.model, config.scheduler, progress=progress)
    return ProfiledRunner(runner, path, clock), card


class ProfiledRunner:
    """A `ModelRunner` around another one: spans while it lives."""

    def __init__(self, runner: Runner, path: Path, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._path = path
        self._spans = Spans(clock)
        self._steps: list[dict[str, Any]] = []
        self._planted = ExitStack()
        _plant(self._planted, self._spans, runner, self._mark_idle)
        self._spans.cut()

    @property
    def shape(self) -> ModelShape:
        return self._runner.shape

    @property
    def is_async(self) -> bool:
        return self._runner.is_async

    def submit(self, plan: StepPlan) -> InFlightStep:
        self._close_record()
        self._steps.append({"num_rows": len(plan), "num_tokens": len(plan.token_ids), "idle": False, "parts": {}})
        return self._runner.submit(plan)

    def close(self) -> None:
        self._close_record()
        self._mark_idle()
        self._planted.close()
        self._path.write_text(json.dumps({"steps": self._steps}), encoding="utf-8")
        self._runner.close()

    def _close_record(self) -> None:
        taken = self._spans.cut()
        if self._steps:
            self._steps[-1]["parts"] = taken

    def _mark_idle(self) -> None:
        if self._steps:
            self._steps[-1]["idle"] = True


def part_of(module_name: str) -> str:
    """Of a module by its dotted name in the model."""
    for pattern, part in _MODULES:
        if re.search(rf"(^|\.)({pattern})$", module_name):
            return part
    return "other"


def _plant(stack: ExitStack, spans: Spans, runner: Runner, on_idle: Callable[[], None]) -> None:
    """Puts spans around everything above until `stack` is closed."""
    for owner, name, part in _FUNCTIONS:
        _replace(stack, owner, name, _with_span(spans, part, getattr(owner, name)))
    model, backend = runner._model, runner._backend
    if model is not None:
        for name, module in model.named_modules():
            _watch_module(stack, spans, module, part_of(name))
            if isinstance(module, FusedLayer):
                _watch_fused(stack, spans, module)
    prepared = _with_span(spans, "inputs", type(backend).prepare)
    _replace(stack, type(backend), "prepare", lambda *given: _Watched(prepared(*given), spans, "attention"))
    idle = Engine.idle_update

    def idle_update(engine: Engine) -> Any:
        on_idle()
        return idle(engine)

    _replace(stack, Engine, "idle_update", idle_update)


def _replace(stack: ExitStack, owner: Any, name: str, new: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, new)


def _with_span(spans: Spans, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def spanned(*args: Any, **kwargs: Any) -> Any:
        with spans.span(part):
            return function(*args, **kwargs)

    return spanned


def _watch_module(stack: ExitStack, spans: Spans, module: nn.Module, part: str) -> None:
    before = module.register_forward_pre_hook(lambda *_: spans.enter(part))
    after = module.register_forward_hook(lambda *_: spans.leave(), always_call=True)
    stack.callback(before.remove)
    stack.callback(after.remove)


def _watch_fused(stack: ExitStack, spans: Spans, layer: FusedLayer) -> None:
    """A fused layer has no modules of its own to watch, but parts under the names of what they compute."""
    for name, part in _FUSED_PARTS:
        setattr(layer, name, _with_span(spans, part, getattr(layer, name)))
        stack.callback(delattr, layer, name)


class _Watched:
    """Something whose calls are spans, whatever else it is."""

    def __init__(self, inner: Any, spans: Spans, part: str) -> None:
        self._inner = inner
        self._spans = spans
        self._part = part

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._spans.span(self._part):
            return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return _with_span(self._spans, self._part, found) if callable(found) else found
