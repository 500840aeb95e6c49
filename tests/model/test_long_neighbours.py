"""Position scaling that transformers chooses by the longest row of a step: fixed at start, a long neighbour changes
nothing; unfixed, it would."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from replica.model.runner import Runner
from tests.model.paged_logits import distance, load, prompts
from tests.model.plans import Row, make_plan
from tests.model.tiny_models import save_tiny

_SCALED = ["phi3_longrope", "llama_dynamic"]
_ORIGINAL = 32
"""Positions after which both families scale."""


def _short_row(runner: Runner, *, beside_long: bool) -> Tensor:
    """Logits of a short prompt's tokens, the long one beginning in the step before."""
    texts = prompts()
    short, long = texts[0], texts[1]
    assert len(short) < _ORIGINAL < len(long)
    mine, other = list(range(2)), list(range(8, 16))
    with torch.inference_mode():
        if not beside_long:
            return runner.logits(make_plan(1, [Row(0, 0, short, mine, len(short))]))
        runner.logits(make_plan(1, [Row(1, 0, long[:20], other)]))
        rows = [Row(1, 20, long[20:], other, 0), Row(0, 0, short, mine, len(short))]
        return runner.logits(make_plan(2, rows))


@pytest.mark.parametrize("family", _SCALED)
def test_a_long_neighbour_does_not_change_a_short_row(family: str, tmp_path: Path) -> None:
    runner = load(save_tiny(family, tmp_path), tmp_path)
    assert runner.shape.max_model_len > _ORIGINAL
    alone = _short_row(runner, beside_long=False)
    assert distance(_short_row(runner, beside_long=True), alone) < 1e-5
    runner.close()


@pytest.mark.parametrize("family", _SCALED)
def test_unfixed_scaling_would_show_here(family: str, tmp_path: Path) -> None:
    runner = load(save_tiny(family, tmp_path), tmp_path)
    rotary = runner._model.model.rotary_emb  # type: ignore[union-attr]
    rotary.rope_type = rotary.config.rope_parameters["rope_type"]
    alone = _short_row(runner, beside_long=False)
    assert distance(_short_row(runner, beside_long=True), alone) > 1e-2
    runner.close()
