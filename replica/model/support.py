"""Which models may be served: a static rule on the configuration, and a self-test of the loaded model.

Many architectures run under a foreign attention function without an exception and give wrong text: some never
call it (ALiBi, state-space and hybrid layers), some ignore positions. So every model must pass both.

The self-test runs two short sequences packed into one forward, their tokens interleaved, each attending to its own
only; it requires that attention was called once per layer, every layer with its own index, and that the logits equal
those of the same weights run one sequence at a time with transformers' own attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from replica.errors import ModelUnsupported
from replica.model.attention import interface
from replica.model.attention.interface import AttentionCall, attention_step, masked_softmax_attention
from replica.model.convert import first_line
from replica.model.host_memory import is_out_of_memory

_SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
_PROBE_LENGTHS = (7, 5)
# Largest relative distance (2-norm) of packed and dense logits. A model that mixes sequences or positions is off by
# 0.1 to 1; rounding alone by 1e-5 in float32, and by up to some hundredths in half precision with routed experts.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer's attention was seen to get: K and V sizes may differ from each other and between layers. The
    rest is as in `AttentionCall`."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    value_size: int
    scaling: float = 1.0
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


def require_supported_config(config: PretrainedConfig) -> None:
    """The static rule. Raises `ModelUnsupported` naming the architecture and the reason."""
    name = getattr(config, "model_type", "") or type(config).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ModelUnsupported(f"{name} is an encoder-decoder model; only decoder-only models can be served")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelUnsupported(f"{name} is no text generation model that transformers itself implements")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class: type[PreTrainedModel] = found[0] if isinstance(found, tuple | list) else found
    reason = _static_reason(model_class, config.get_text_config())
    if reason:
        raise ModelUnsupported(f"{name} can't be served: {reason}; choose a model with standard attention layers")


def _static_reason(model_class: type[PreTrainedModel], text: PretrainedConfig) -> str | None:
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a recurrent state, which paged attention can't hold"
    if not model_class._can_set_attn_implementation():
        return "its attention can't be replaced by paged attention"
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _SUPPORTED_LAYERS)
    if others:
        return f"it has layers other than full and sliding attention ({', '.join(others)})"
    if getattr(text, "attn_temperature_tuning", False):
        return "it scales queries by their place in the step instead of their position (attn_temperature_tuning)"
    if int(getattr(text, "num_hidden_layers", 1)) < 1:
        return "its configuration says that it has no layers"
    return None


def pin_rope(model: PreTrainedModel, max_model_len: int) -> None:
    """Fix the frequencies of length-dependent RoPE at those for `max_model_len`.

    `dynamic` and `longrope` choose them by the longest position in the forward, so that one long request would change
    the others in its step. Must run before the first step and after the weights are on their device.
    """
    reference = next(model.parameters())
    hidden = torch.zeros(1, 1, 1, dtype=reference.dtype, device=reference.device)
    positions = torch.tensor([[max_model_len - 1]], device=reference.device)
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str) and _depends_on_length(kinds):
            module(hidden, positions)
            module.rope_type = "fixed"  # type: ignore[assignment]
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _depends_on_length(kind):
                    module(hidden, positions, layer_type)
                    kinds[layer_type] = "fixed"


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


class ProbeStep:
    """Attention of a step without a cache, each token given by its sequence and position; remembers which layers
    called and with what."""

    def __init__(self, owners: Tensor, positions: Tensor) -> None:
        self._distance = positions[:, None] - positions[None, :]
        self._visible = (owners[:, None] == owners[None, :]) & (self._distance >= 0)
        self.layers: list[int] = []
        self.shapes: dict[int, LayerShape] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        (num_heads, num_tokens, head_size), num_kv_heads = call.query.shape, call.key.shape[0]
        self.layers.append(call.layer)
        self.shapes[call.layer] = LayerShape(
            num_heads,
            num_kv_heads,
            head_size,
            call.value.shape[-1],
            call.scaling,
            call.window,
            call.softcap,
            call.sinks is not None,
        )
        mask = self._visible if call.window is None else self._visible & (self._distance < call.window)
        query = call.query.reshape(num_kv_heads, num_heads // num_kv_heads, num_tokens, head_size)
        out = masked_softmax_attention(call, query, call.key, call.value, mask)
        return out.flatten(0, 1).transpose(0, 1)


class Probe:
    """Two short sequences packed into one forward. Interleaved, neighbours in the step are strangers: a model that goes
    by place instead of position shows. `order` [T] is where each place's token is in the sequences one after the
    other. Positions count from `first` on."""

    def __init__(self, vocab_size: int, device: torch.device, first: int = 0) -> None:
        self.sequences = [_probe_tokens(length, vocab_size, device) for length in _PROBE_LENGTHS]
        lengths = torch.tensor(_PROBE_LENGTHS)
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        positions = first + torch.cat([torch.arange(length) for length in _PROBE_LENGTHS])
        self.order = torch.argsort(positions, stable=True).to(device)
        self._owners, self._positions = owners.to(device)[self.order], positions.to(device)[self.order]

    def step(self) -> ProbeStep:
        """Its attention, for one forward."""
        return ProbeStep(self._owners, self._positions)

    def run(self, model: PreTrainedModel, step: ProbeStep | None = None) -> Tensor:
        """Logits [T - 1, vocabulary], of all tokens but the first, of the packed forward of a model that is set to
        paged attention. One is left out to see that the model leaves it out."""
        token_ids = torch.cat(self.sequences)[self.order]
        kept = torch.arange(1, len(token_ids), device=token_ids.device)
        with attention_step(step or self.step()):
            output = model(
                input_ids=token_ids[None], position_ids=self._positions[None], use_cache=False, logits_to_keep=kept
            )
        logits: Tensor = output.logits[0]
        return logits


def near_and_far(vocab_size: int, device: torch.device, max_model_len: int) -> list[Probe]:
    """At the beginning of a context and at its end: some models scale queries by their position, from some on."""
    far = max(0, max_model_len - max(_PROBE_LENGTHS))
    return [Probe(vocab_size, device), Probe(vocab_size, device, far)]


def self_test(model: PreTrainedModel) -> list[LayerShape]:
    """Compare a packed forward with dense ones; returns every layer's shape, by layer index.

    Leaves the model set to paged attention. Raises `ModelUnsupported` naming the architecture and what differed.
    """
    name = model.config.model_type
    text = model.config.get_text_config()
    probe = Probe(int(text.vocab_size), next(model.parameters()).device)
    with torch.inference_mode():
        dense = _dense_probe(model, probe)
        step = probe.step()
        interface.register()
        model.set_attn_implementation(interface.ATTENTION_NAME)
        try:
            logits = probe.run(model, step)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ModelUnsupported(f"{name} can't run with paged attention: {first_line(error)}") from error
    if sorted(step.layers) != list(range(text.num_hidden_layers)):
        raise ModelUnsupported(
            f"{name} can't be served: attention ran {len(step.layers)} times for {text.num_hidden_layers} layers, "
            "so some layers keep a state that paged attention doesn't hold"
        )
    if logits.shape != dense.shape:
        raise ModelUnsupported(f"{name} can't be served: it doesn't give the logits of chosen tokens only")
    require_equal_logits(name, logits, dense)
    return [step.shapes[layer] for layer in range(text.num_hidden_layers)]


def _dense_probe(model: PreTrainedModel, probe: Probe) -> Tensor:
    """What `probe.run` should give."""
    try:
        dense = torch.cat([dense_logits(model, tokens) for tokens in probe.sequences])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelUnsupported(f"transformers can't run {model.config.model_type} here: {first_line(error)}") from error
    return dense[probe.order[1:]]


def dense_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits [T, vocabulary] of one sequence by transformers' own attention, without a cache."""
    with attention_implementation(model, "eager"):
        output = model(input_ids=tokens[None], use_cache=False)
    logits: Tensor = output.logits[0]
    return logits


def require_equal_logits(name: str, packed: Tensor, dense: Tensor) -> None:
    """Raise `ModelUnsupported` when the two differ by more than rounding."""
    if not dense.isfinite().all():
        raise ModelUnsupported(f"{name} can't be served: its weights give logits that aren't finite numbers")
    distance = (packed.float() - dense.float()).norm() / dense.float().norm().clamp_min(1e-30)
    tolerance = _TOLERANCE.get(packed.dtype, 0.1)
    if not float(distance) <= tolerance:
        raise ModelUnsupported(
            f"{name} can't be served: with paged attention its logits are off by {float(distance):.1e} "
            f"(allowed: {tolerance:.0e}), so it would answer wrongly"
        )


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _probe_tokens(length: int, vocab_size: int, device: torch.device) -> Tensor:
    """Distinct ordinary tokens, the same in every run."""
    return (torch.arange(length, device=device) * 7919 + length * 104729 + 11) % max(vocab_size - 8, 1)
