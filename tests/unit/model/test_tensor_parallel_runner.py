"""What the first rank makes of what the others say of a step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest

from replica.errors import EngineDead
from replica.model.api import ModelShape, OutOfDeviceMemory
from replica.model.fake import FakeModel
from replica.model.tensor_parallel.messages import Proceed, RunStep, StepDone
from replica.model.tensor_parallel.runner import TensorParallelRunner, plan_for_ranks
from replica.scheduler.plan import PENDING_TOKEN, StepPlan
from tests.model.plans import Row, make_plan

SHAPE = ModelShape(num_blocks=8, block_size=4, vocab_size=50, max_model_len=32, eos_token_ids=())
POISON = 13


@dataclass
class Told:
    """The other ranks, whose words are laid out beforehand; they agree where nothing else is said. `events` is what
    happened to them."""

    words: deque[list[StepDone] | EngineDead] = field(default_factory=deque)
    given: deque[int] = field(default_factory=deque)
    events: list[object] = field(default_factory=list)
    pids: list[int] = field(default_factory=lambda: [1, 2])

    def send(self, message: object) -> None:
        if isinstance(message, RunStep):
            self.given.append(message.ticket)
        else:
            self.events.append(message)

    def collect(self, limit_s: float) -> list[object]:
        ticket = self.given.popleft()
        words = self.words.popleft() if self.words else [StepDone(ticket, 5), StepDone(ticket, 5)]
        if isinstance(words, EngineDead):
            raise words
        return list(words)

    def stop(self) -> None:
        self.events.append("stop")

    def close(self) -> None:
        self.events.append("close")

    def kill(self) -> None:
        self.events.append("kill")


@dataclass
class Five:
    """A group in which five collectives have been begun."""

    left: list[bool] = field(default_factory=list)

    def num_collectives(self) -> int:
        return 5

    def leave(self, *, orderly: bool) -> None:
        self.left.append(orderly)


def runner_of(*words: list[StepDone] | EngineDead) -> tuple[TensorParallelRunner, Told, Five]:
    told, group = Told(deque(words)), Five()
    return TensorParallelRunner(FakeModel(SHAPE, poison_token=POISON), told, group), told, group


def plan(step: int, *tokens: int) -> StepPlan:
    return make_plan(step, [Row(0, 0, tokens, [0, 1])], joined=[0])


def failed(ticket: int, num_collectives: int = 5, *, out_of_memory: bool = False) -> StepDone:
    return StepDone(ticket, num_collectives, "RuntimeError: no", out_of_memory)


def test_ranks_that_agree_leave_the_first_ones_result_as_it_is() -> None:
    runner, told, group = runner_of()
    first, second = runner.submit(plan(0, 1, 2)), runner.submit(plan(1, 1, 2))
    assert first.result().token_ids == FakeModel(SHAPE).submit(plan(0, 1, 2)).result().token_ids
    assert second.result().step == 1
    runner.close()
    assert told.events == ["stop", "close"]
    assert group.left == [True]


def test_an_error_that_all_ranks_met_together_is_the_first_ones_own_and_they_may_go_on() -> None:
    runner, told, _ = runner_of([failed(0), failed(0)])
    with pytest.raises(RuntimeError, match="raise on this token"):
        runner.submit(plan(0, POISON))
    assert told.events == [Proceed(0)]
    assert len(runner.submit(plan(1, 1)).result().token_ids) == 1


def test_an_error_that_only_the_first_rank_met_keeps_them_together() -> None:
    runner, told, _ = runner_of()
    with pytest.raises(RuntimeError, match="raise on this token"):
        runner.submit(plan(0, POISON))
    assert told.events == [Proceed(0)]


def test_an_error_of_another_rank_fails_the_step_and_its_lack_of_memory_is_a_lack_of_memory() -> None:
    runner, told, _ = runner_of([StepDone(0, 5), failed(0)], [StepDone(1, 5), failed(1, out_of_memory=True)])
    with pytest.raises(RuntimeError, match="failed on another rank: RuntimeError: no"):
        runner.submit(plan(0, 1)).result()
    with pytest.raises(OutOfDeviceMemory):
        runner.submit(plan(1, 1)).result()
    assert told.events == [Proceed(0), Proceed(1)]


@pytest.mark.parametrize(
    "words",
    [
        [StepDone(0, 5), failed(0, num_collectives=4)],
        [StepDone(7, 5), StepDone(0, 5)],
        EngineDead("rank 1 of the model ended (signal 9)"),
    ],
)
def test_ranks_out_of_step_or_gone_end_the_runner_for_ever(words: list[StepDone] | EngineDead) -> None:
    runner, told, group = runner_of(words)
    step = runner.submit(plan(0, 1))
    with pytest.raises(EngineDead) as ended:
        step.result()
    with pytest.raises(EngineDead, match=r"^the model can't compute any more: ") as again:
        runner.submit(plan(1, 1))
    assert again.value.message == ended.value.message
    runner.close()
    assert told.events == ["kill"]
    assert group.left == [False]


def test_a_result_that_nobody_asked_for_holds_up_neither_the_next_one_nor_a_rank() -> None:
    runner, told, _ = runner_of([StepDone(0, 5), failed(0)])
    runner.submit(plan(0, 1))
    assert runner.submit(plan(1, 1, 2)).result().step == 1
    assert told.events == [Proceed(0)]


def test_ranks_are_sent_what_they_need_and_no_more() -> None:
    full = make_plan(3, [Row(0, 3, [PENDING_TOKEN], [4, 5, 6]), Row(1, 0, [7, 8], [2, 3])], joined=[1])
    full.token_masks = {1: b"\xff" * 7}
    sent = plan_for_ranks(full, 4)
    assert sent.block_tables == [[4], [2]]
    assert (sent.joined, sent.left, sent.token_masks) == ([], [], {})
    assert (sent.token_ids, sent.lanes, sent.output_index) == (full.token_ids, full.lanes, full.output_index)
    assert full.block_tables == [[4, 5, 6], [2, 3]]
    assert RunStep.of(9, sent).unpacked() == sent
