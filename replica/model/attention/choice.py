"""Which attention backend serves: by device, by what the model's layers need, and by trying it.

A device's candidates stand in the order of their speed; the first one that serves is taken, and a line says which one
and why the ones before it were left out. The last one serves everything and isn't tried.

    cuda   varlen (torch's, by pages)   triton (ours)   gather
    cpu    pool (compiled loops)                        gather
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from replica.errors import SettingError
from replica.model.api import Progress
from replica.model.attention.backend import AttentionBackend, make_backend
from replica.model.attention.probe import probe
from replica.model.support import LayerShape

# Pages that flash attention was seen to read: any size (3), multiples of 256 (2).
_VARLEN_PAGES = ((64, False), (256, True))


@dataclass(frozen=True, slots=True)
class Candidate:
    """`make` raises ImportError where something isn't installed; `lacks` says what these layers need and it hasn't."""

    name: str
    make: Callable[[], AttentionBackend]
    lacks: str | None = None
    is_tried: bool = True


def choose_attention(
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
    *,
    setting: str = "auto",
    block_size: int | None = None,
    batch_invariant: bool = False,
    candidates: Sequence[Candidate] | None = None,
) -> AttentionBackend:
    """`candidates` None: the device's. Raises `SettingError` when `setting` names a backend that can't serve here."""
    if candidates is None:
        candidates = list(device_candidates(layers, dtype, device, block_size, batch_invariant=batch_invariant))
    names = list(dict.fromkeys(candidate.name for candidate in candidates))
    if setting not in ("auto", *names):
        raise SettingError(
            "attention_backend", setting, f"auto, {' or '.join(names)} {_where(device, batch_invariant)}"
        )
    left_out: list[str] = []
    for candidate in candidates:
        if setting not in ("auto", candidate.name):
            continue
        backend, reason = _tried(candidate, layers, block_size, dtype, device)
        if backend is not None:
            line = f"attention: {candidate.name}, blocks of {block_size or backend.block_size} tokens"
            progress("; ".join([line, *(f"not {reason}" for reason in dict.fromkeys(left_out))]))
            return backend
        left_out.append(f"{candidate.name} ({reason})")
    raise SettingError("attention_backend", setting, f"auto here: {'; '.join(dict.fromkeys(left_out))}")


def _tried(
    candidate: Candidate,
    layers: Sequence[LayerShape],
    block_size: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[AttentionBackend | None, str | None]:
    """The candidate's backend, or why it doesn't serve."""
    if candidate.lacks is not None:
        return None, candidate.lacks
    try:
        backend = candidate.make()
    except ImportError as error:
        return None, str(error)
    if not candidate.is_tried:
        return backend, None
    reason = probe(backend, layers, block_size or backend.block_size, dtype, device)
    return (backend, None) if reason is None else (None, reason)


def device_candidates(
    layers: Sequence[LayerShape],
    dtype: torch.dtype,
    device: torch.device,
    block_size: int | None = None,
    *,
    batch_invariant: bool = False,
) -> Iterator[Candidate]:
    """The fastest first."""
    if batch_invariant:
        yield Candidate("tiles", partial(make_backend, "tiles"), is_tried=False)
        return
    if device.type == "cuda":
        from replica.model.attention.varlen import lacks

        for page_size, with_key_starts in _VARLEN_PAGES:
            yield Candidate("varlen", _varlen(block_size or page_size, with_key_starts), lacks(layers, dtype))
        yield Candidate("triton", lambda: _triton(device))
    else:
        yield Candidate(
            "pool", partial(make_backend, "pool"), None if dtype == torch.float32 else "it computes in float32 only"
        )
    yield Candidate("gather", partial(make_backend, "gather"), is_tried=False)
    yield Candidate("reference", partial(make_backend, "reference"), is_tried=False)


def _where(device: torch.device, batch_invariant: bool) -> str:
    return "with batch_invariant" if batch_invariant else f"on device {device.type}"


def _varlen(page_size: int, with_key_starts: bool) -> Callable[[], AttentionBackend]:
    def make() -> AttentionBackend:
        from replica.model.attention import varlen

        write: varlen.Writer | None = None
        try:
            from replica.model.attention.triton_paged import write
        except ImportError:
            write = None  # torch's own operations write as well, in more launches
        return varlen.VarlenBackend(
            page_size, with_key_starts=with_key_starts, attention=varlen.torch_attention(), write=write
        )

    return make


def _triton(device: torch.device) -> AttentionBackend:
    from replica.model.attention.triton_paged import TritonBackend

    return TritonBackend(torch.cuda.get_device_properties(device).multi_processor_count)
