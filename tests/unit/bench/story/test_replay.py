from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from bench.fit.engine import Order, Played
from bench.fit.virtual_engine import VirtualEngine
from bench.story.replay import as_one_play, replay
from replica.engine_api import EngineUpdate
from replica.request import FinishReason
from tests.unit.bench.story.engines import engine, silent, trace


def test_steps_and_waits_are_read_from_the_updates() -> None:
    found = replay(engine(), trace((0, 4, 3), (0, 4, 1), (0, 4, 2)), silent, "three")
    steps = found.steps
    # Step 1: requests 0 and 1; the place of 1 is taken in step 2; 0 and 2 end together.
    assert list(steps.ended_s) == [1, 2, 3]
    assert list(steps.seconds) == [1, 1, 1]
    assert list(steps.width) == [2, 2, 2]
    assert list(steps.tokens) == [8, 5, 2]
    assert list(steps.waiting) == [1, 0, 0]
    assert list(found.ttft_s) == [1, 1, 2]
    assert list(found.gap_s) == [1, 1, 1]
    assert (found.num_output_tokens, found.seconds, found.num_blocks) == (6, 3, 100)


def test_idle_time_is_no_step_time() -> None:
    found = replay(engine(), trace((0, 4, 1), (5, 4, 1)), silent, "apart")
    assert list(found.steps.ended_s) == [1, 6]
    assert list(found.steps.seconds) == [1, 1]
    assert list(found.ttft_s) == [1, 1]


def test_budgets_hold_from_the_first_step_and_stay() -> None:
    both = engine()
    load = trace((0, 4, 2), (0, 4, 2))
    assert list(replay(both, load, silent, "narrow", {"max_num_seqs": 1}).steps.width) == [1, 1, 1, 1]
    assert list(replay(both, load, silent, "as before").steps.width) == [1, 1, 1, 1]
    assert list(replay(both, load, silent, "wide", {"max_num_seqs": 2}).steps.width) == [2, 2]


def test_progress_says_how_many_have_ended() -> None:
    heard: list[str] = []
    replay(engine(), trace((0, 4, 1), (0, 4, 2)), heard.append, "two")
    assert heard == ["two: 1/2", "two: 2/2"]


def test_parts_of_fixed_batches_are_one_play_of_all() -> None:
    requests = [(0, 4, 3), (0, 4, 1), (0, 4, 2), (0, 4, 2), (0, 4, 5), (0, 4, 1)]
    fixed = engine(batching="static")
    parts = [replay(fixed, trace(*requests[i : i + 2]), silent, "part") for i in (0, 2, 4)]
    assert as_one_play(parts) == replay(fixed, trace(*requests), silent, "all")


class Tampered:
    """An engine whose updates are changed on their way."""

    def __init__(self, inner: VirtualEngine, change: Callable[[EngineUpdate], EngineUpdate]) -> None:
        self._change = change
        self._inner = inner
        self.config, self.shape, self.is_async = inner.config, inner.shape, inner.is_async

    def play(self, orders: Sequence[Order], progress: Callable[[int], None]) -> Played:
        played = self._inner.play(orders, progress)
        return Played(played.started_s, [self._change(update) for update in played.updates])


def test_a_request_without_all_its_tokens_is_refused() -> None:
    tampered = Tampered(engine(), lambda update: replace(update, token_ids=[-1] * len(update.token_ids)))
    with pytest.raises(ValueError, match="2 requests didn't get exactly their tokens, request 0 for one"):
        replay(tampered, trace((0, 4, 2), (0, 4, 2)), silent, "lost")


def test_a_request_that_ends_otherwise_is_refused() -> None:
    def aborted(update: EngineUpdate) -> EngineUpdate:
        return replace(update, finish_reasons=[FinishReason.ABORT for _ in update.finish_reasons])

    with pytest.raises(ValueError, match="request 0 ended by abort"):
        replay(Tampered(engine(), aborted), trace((0, 4, 2)), silent, "aborted")
