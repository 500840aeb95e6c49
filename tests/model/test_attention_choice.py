"""Which backend serves: the first that computes what the reference does for the model's own layers on its device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from replica.errors import SettingError
from replica.model.attention.backend import AttentionBackend, make_backend
from replica.model.attention.choice import Candidate, choose_attention
from replica.model.attention.interface import AttentionCall, AttentionStep
from replica.model.attention.probe import probe
from replica.model.attention.varlen import VarlenBackend, lacks
from replica.model.inputs import StepLayout
from replica.model.kv_cache import KVCache
from replica.model.support import LayerShape
from tests.model.varlen_double import VarlenDouble

_CPU = torch.device("cpu")
_LAYER = LayerShape(num_heads=4, num_kv_heads=2, head_size=16, value_size=16)
_KINDS = {
    "plain": _LAYER,
    "window": replace(_LAYER, window=70),
    "soft cap": replace(_LAYER, softcap=2.0),
    "sinks": replace(_LAYER, has_sinks=True),
}


@dataclass(frozen=True, slots=True)
class Careless:
    """The reference, but it takes these parts of a call for granted."""

    changes: dict[str, object]
    block_size: int = 16

    def prepare(self, layout: StepLayout, cache: KVCache) -> AttentionStep:
        return _CarelessStep(make_backend("reference").prepare(layout, cache), self.changes)


@dataclass(frozen=True, slots=True)
class _CarelessStep:
    step: AttentionStep
    changes: dict[str, object]

    def attend(self, call: AttentionCall) -> Tensor:
        return self.step.attend(replace(call, **self.changes))  # type: ignore[arg-type]


def _probe(backend: AttentionBackend, layer: LayerShape, block_size: int = 16) -> str | None:
    return probe(backend, [layer], block_size, torch.float32, _CPU)


@pytest.mark.parametrize("kind", _KINDS)
@pytest.mark.parametrize("name", ["reference", "gather", "pool"])
def test_backends_that_compute_rightly_pass(name: str, kind: str) -> None:
    assert _probe(make_backend(name), _KINDS[kind], block_size=32) is None


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("window", {"window": None}),
        ("window", {"window": 71}),
        ("soft cap", {"softcap": None}),
        ("sinks", {"sinks": None}),
    ],
)
def test_a_backend_that_leaves_out_what_a_layer_needs_is_off(kind: str, changes: dict[str, object]) -> None:
    reason = _probe(Careless(changes), _KINDS[kind])
    assert reason is not None and reason.startswith("its result is off by")
    assert _probe(Careless(changes), _LAYER) is None or "window" in changes


def test_any_layer_decides_not_only_the_first() -> None:
    careless = Careless({"softcap": None})
    assert probe(careless, [_LAYER, _LAYER], 16, torch.float32, _CPU) is None
    assert probe(careless, [_LAYER, _KINDS["soft cap"]], 16, torch.float32, _CPU) is not None


def test_an_error_of_a_kernel_is_the_reason() -> None:
    backend = VarlenBackend(64, with_key_starts=False, attention=VarlenDouble(page_multiple=256))
    reason = _probe(backend, _LAYER, block_size=64)
    assert reason == "RuntimeError: Paged KV cache block size must be divisible by 256"


def test_a_flash_version_that_does_not_page_is_off() -> None:
    backend = VarlenBackend(64, with_key_starts=False, attention=VarlenDouble(ignores_table=True))
    reason = _probe(backend, _LAYER, block_size=64)
    assert reason is not None and reason.startswith("its result is off by nan")


def _varlen(page_size: int, double: VarlenDouble, *, with_key_starts: bool) -> Candidate:
    return Candidate("varlen", lambda: VarlenBackend(page_size, with_key_starts=with_key_starts, attention=double))


def _choose(*candidates: Candidate, setting: str = "auto", block_size: int | None = None) -> tuple[int, list[str]]:
    """The chosen backend's block size, and what was said."""
    lines: list[str] = []
    backend = choose_attention(
        [_LAYER], torch.float32, _CPU, lines.append, setting=setting, block_size=block_size, candidates=candidates
    )
    return backend.block_size, lines


def _gather() -> Candidate:
    return Candidate("gather", lambda: make_backend("gather"), is_tried=False)


def test_the_first_candidate_that_serves_is_taken_and_the_line_says_why() -> None:
    old = VarlenDouble(page_multiple=256, needs_key_starts=True)
    candidates = _varlen(64, old, with_key_starts=False), _varlen(256, old, with_key_starts=True), _gather()
    assert _choose(*candidates) == (
        256,
        ["attention: varlen, blocks of 256 tokens; not varlen (RuntimeError: cu_seq_k is not what this version takes)"],
    )


def test_what_is_not_installed_is_left_out() -> None:
    def missing() -> AttentionBackend:
        raise ImportError("No module named 'triton'")

    size, lines = _choose(Candidate("triton", missing), _gather())
    assert size == make_backend("gather").block_size
    assert lines == ["attention: gather, blocks of 128 tokens; not triton (No module named 'triton')"]


def test_a_setting_takes_its_backend_or_is_refused_by_name() -> None:
    broken = Candidate("triton", lambda: Careless({"scaling": 0.0}))
    assert _choose(broken, _gather(), setting="gather")[1] == ["attention: gather, blocks of 128 tokens"]
    with pytest.raises(SettingError, match=r"attention_backend.*'triton'.*its result is off by"):
        _choose(broken, _gather(), setting="triton")
    with pytest.raises(SettingError, match="auto, triton or gather on device cpu"):
        _choose(broken, _gather(), setting="varlen")


def test_the_devices_own_candidates_on_the_cpu() -> None:
    def choose(dtype: torch.dtype, setting: str = "auto", *, batch_invariant: bool = False) -> str:
        lines: list[str] = []
        choose_attention([_LAYER], dtype, _CPU, lines.append, setting=setting, batch_invariant=batch_invariant)
        return lines[0]

    assert choose(torch.float32) == "attention: pool, blocks of 32 tokens"
    assert choose(torch.bfloat16).startswith(
        "attention: gather, blocks of 128 tokens; not pool (it computes in float32"
    )
    assert choose(torch.float32, "gather") == "attention: gather, blocks of 128 tokens"
    assert choose(torch.float32, batch_invariant=True) == "attention: tiles, blocks of 32 tokens"
    with pytest.raises(SettingError, match="auto, pool or gather or reference on device cpu"):
        choose(torch.float32, "triton")
    with pytest.raises(SettingError, match="auto, tiles with batch_invariant"):
        choose(torch.float32, "gather", batch_invariant=True)


@pytest.mark.parametrize(
    ("layer", "dtype", "reason"),
    [
        (_LAYER, torch.bfloat16, None),
        (_KINDS["sinks"], torch.float16, None),
        (_LAYER, torch.float32, "16 bits only, not in float32"),
        (_KINDS["soft cap"], torch.bfloat16, "no soft cap"),
        (replace(_LAYER, value_size=8), torch.bfloat16, r"16 and 8"),
        (replace(_LAYER, head_size=12, value_size=12), torch.bfloat16, "head size 12"),
        (replace(_LAYER, head_size=512, value_size=512), torch.bfloat16, "head size 512"),
    ],
)
def test_what_flash_attention_is_known_to_lack(layer: LayerShape, dtype: torch.dtype, reason: str | None) -> None:
    found = lacks([_LAYER, layer], dtype)
    assert found is None if reason is None else found is not None and reason in found
