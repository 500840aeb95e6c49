"""Who shares which round of questions."""

from __future__ import annotations

import asyncio

import pytest

from deployments.shared_rounds import SharedRounds
from replica.errors import Unavailable
from tests.unit.deployments.lease_parts import settled


class Rounds:
    """Each round answers with its number when `go` is set, or fails."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.fails = False
        self.num_begun = 0
        self.shared = SharedRounds(self._ask)

    async def _ask(self) -> int:
        self.num_begun += 1
        number = self.num_begun
        await self.go.wait()
        if self.fails:
            raise Unavailable("silent")
        return number

    async def asked_by(self, num: int) -> list[asyncio.Task[int]]:
        tasks = [asyncio.create_task(self.shared.answer()) for _ in range(num)]
        await settled()
        return tasks


async def test_all_who_ask_while_a_round_is_under_way_share_the_next_one() -> None:
    rounds = Rounds()
    first = await rounds.asked_by(1)
    later = await rounds.asked_by(50)
    assert rounds.num_begun == 1
    rounds.go.set()
    assert await asyncio.gather(*first, *later) == [1] + [2] * 50
    assert rounds.num_begun == 2
    assert await rounds.shared.answer() == 3


async def test_rounds_follow_each_other_while_more_and_more_ask() -> None:
    rounds = Rounds()
    asked = []
    for _ in range(5):
        asked += await rounds.asked_by(2)
        rounds.go.set()
        await asyncio.sleep(0)
        rounds.go.clear()
    rounds.go.set()
    answers = await asyncio.gather(*asked)
    assert answers == sorted(answers)
    assert rounds.num_begun == max(answers) <= 6


async def test_one_who_leaves_takes_nobodys_answer_along() -> None:
    rounds = Rounds()
    leaving, staying = (await rounds.asked_by(1))[0], await rounds.asked_by(2)
    leaving.cancel()
    staying[0].cancel()
    await settled()
    rounds.go.set()
    assert await staying[1] == 2
    with pytest.raises(asyncio.CancelledError):
        await leaving


async def test_a_round_that_fails_fails_for_its_askers_and_the_next_one_is_asked() -> None:
    rounds = Rounds()
    rounds.fails = True
    first, second = [*await rounds.asked_by(1), *await rounds.asked_by(1)]
    rounds.go.set()
    with pytest.raises(Unavailable):
        await first
    with pytest.raises(Unavailable):
        await second
    rounds.fails = False
    assert await rounds.shared.answer() == 3
