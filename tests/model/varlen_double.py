"""torch's paged variable-length attention as its documentation describes it, on any device: what `VarlenBackend` calls
on a GPU, with the demands of the flash version behind it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class VarlenDouble:
    """`page_multiple`: pages of another size are refused. `needs_key_starts`: True and False refuse a call without and
    with `cu_seq_k`. `ignores_table`: takes the pages in order, as a flash version that doesn't page."""

    def __init__(self, page_multiple: int = 1, *, needs_key_starts: bool = False, ignores_table: bool = False) -> None:
        self._page_multiple = page_multiple
        self._needs_key_starts = needs_key_starts
        self._ignores_table = ignores_table

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Any:
        self._require(query, key, value, cu_seq_q, cu_seq_k, seqused_k, block_table, enable_gqa=enable_gqa)
        starts, used = cu_seq_q.tolist(), seqused_k.tolist()
        assert max_q >= max(end - start for start, end in pairwise(starts))
        assert max_k >= max(used)
        outs, weights = [], []
        for row, num_keys in enumerate(used):
            pages = block_table[row].long()
            if self._ignores_table:
                pages = torch.arange(len(pages))
            flat_key, flat_value = (pool[pages].flatten(0, 1)[:num_keys] for pool in (key, value))
            out, weight = _attend(query[starts[row] : starts[row + 1]], flat_key, flat_value, scale, window_size)
            outs.append(out)
            weights.append(weight)
        if return_aux is not None and return_aux.lse:
            return torch.cat(outs), torch.cat(weights, dim=1)
        return torch.cat(outs)

    def _require(self, query: Tensor, key: Tensor, value: Tensor, *tensors: Tensor | None, enable_gqa: bool) -> None:
        cu_seq_q, cu_seq_k, seqused_k, block_table = tensors
        assert cu_seq_q is not None and seqused_k is not None and block_table is not None
        if (cu_seq_k is not None) != self._needs_key_starts:
            raise RuntimeError("cu_seq_k is not what this version takes")
        if key.shape[1] % self._page_multiple:
            raise RuntimeError(f"Paged KV cache block size must be divisible by {self._page_multiple}")
        if not enable_gqa and query.shape[1] != key.shape[2]:
            raise ValueError("Expect query and key/value to have the same number of heads")
        assert all(tensor.dtype == torch.int32 for tensor in tensors if tensor is not None)
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value, block_table))
        assert key.shape[-1] == value.shape[-1]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window_size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """One row: `query` [Q, H, D], `key`, `value` [K, KH, D]; causal by their ends. The result and [H, Q] log-sums."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query.float(), key.float()) * scale
    distance = torch.arange(len(query))[:, None] + len(key) - len(query) - torch.arange(len(key))[None, :]
    left, right = window_size
    hidden = distance < -right
    if left >= 0:
        hidden |= distance > left
    scores = scores.masked_fill(hidden, float("-inf"))
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), value.float()).to(query.dtype)
    return out, torch.logsumexp(scores, dim=-1)
