"""Whether a model's masks hide something that its attention calls don't say, at lengths that no short test reaches.

transformers builds no masks for our attention: a window must come with the call. Some families apply theirs by the mask
only, and a model of theirs would answer wrongly as soon as a context is longer than the window. transformers describes
every mask by a function of two positions, so it can be asked about any: here, what the query at the last position that
will be served sees of all before it. That must be what the call says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from replica.errors import ModelUnsupported
from replica.model.support import attention_implementation

_NAME = "brimful_mask_probe"
_PROBE_TOKENS = (1, 2, 3)

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def require_windows_in_calls(model: PreTrainedModel, max_model_len: int) -> None:
    """Raise `ModelUnsupported`, naming the context up to which the model is right, when a mask hides more than a call.

    The model must have passed the self-test and still have its own layers.
    """
    device = next(model.parameters()).device
    comparison = _Comparison(max_model_len, device)
    AttentionInterface.register(_NAME, comparison.attention)
    AttentionMaskInterface.register(_NAME, comparison.mask)
    with attention_implementation(model, _NAME), torch.inference_mode():
        try:
            model(input_ids=torch.tensor([_PROBE_TOKENS], device=device), use_cache=False)
        except IndexError:  # a mask that looks up more than the two positions, in something as long as the prompt
            comparison.has_own_masks = True
    if comparison.has_own_masks:
        raise ModelUnsupported(
            f"{model.config.model_type} can't be served: it makes attention masks of its own, which paged attention "
            "can't follow"
        )
    if comparison.shortest < max_model_len:
        raise ModelUnsupported(
            f"{model.config.model_type} can't be served with contexts of {max_model_len} tokens: its masks hide what "
            "its attention isn't told to leave out, so it would answer wrongly; "
            f"set --max-model-len {max(comparison.shortest, 1)}"
        )


class _Comparison:
    """Stands in for transformers' attention and masks in one forward. `shortest`: the contexts that come out right.
    `has_own_masks`: some layer got a mask that transformers didn't make."""

    def __init__(self, max_model_len: int, device: torch.device) -> None:
        self.shortest = max_model_len
        self.has_own_masks = False
        self._last = torch.tensor(max_model_len - 1, device=device)
        self._keys = torch.arange(max_model_len, device=device)

    def mask(self, *_args: Any, mask_function: Mask, **_kwargs: Any) -> Tensor:
        """Which keys the last query sees, [1, 1, 1, max_model_len]: instead of a mask, handed on as one."""
        zero = torch.zeros_like(self._last)
        return mask_function(zero, zero, self._last, self._keys).expand(1, 1, 1, len(self._keys))

    def attention(
        self,
        _module: nn.Module,
        query: Tensor,
        _key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        sliding_window: int | None = None,
        **_kwargs: Any,
    ) -> tuple[Tensor, None]:
        if attention_mask is not None and attention_mask.shape != (1, 1, 1, len(self._keys)):
            self.has_own_masks = True
        elif attention_mask is not None:
            told = self._keys > self._last - (sliding_window or len(self._keys))
            wrong = (attention_mask.flatten() != told).nonzero()
            if wrong.numel():
                self.shortest = min(self.shortest, int(self._last - wrong.max()))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None
