"""Limits of all replicas of a model: changed on all or on none, and given to replicas that start later."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from deployments.limited_replicas_fake import FakeLimitedReplicas
from deployments.live_limits import OVERWRITTEN, LiveLimits
from replica.config import SchedulerConfig
from replica.errors import SettingError, Unavailable

START = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, watermark=0.5)


def replicas_of(*replica_ids: str) -> FakeLimitedReplicas:
    replicas = FakeLimitedReplicas()
    for replica_id in replica_ids:
        replicas.start(replica_id, START)
    return replicas


def tokens_of(replicas: FakeLimitedReplicas) -> dict[str, int]:
    return {one: replica.now.max_num_batched_tokens for one, replica in replicas.replicas.items()}


async def change(limits: LiveLimits, reset: bool = False, **changes: Any) -> list[str]:
    """The ids of those that were silent."""
    _, silent = await limits.change(changes, reset=reset)
    return silent


async def test_a_change_reaches_every_replica_and_leaves_other_limits_alone() -> None:
    replicas = replicas_of("a", "b", "c")
    limits = LiveLimits(replicas, "i")
    assert await change(limits, max_num_seqs=4) == []
    assert await change(limits, max_num_batched_tokens=32) == []
    now = [replica.now for replica in replicas.replicas.values()]
    assert now == [replace(START, max_num_seqs=4, max_num_batched_tokens=32)] * 3


async def test_one_replica_that_refuses_keeps_all_as_they_were() -> None:
    replicas = replicas_of("a", "b")
    replicas.start("c", replace(START, max_num_batched_tokens=16))
    with pytest.raises(SettingError, match=r"max_num_batched_tokens = 32 .* at most its start value, 16"):
        await change(LiveLimits(replicas, "i"), max_num_batched_tokens=32)
    assert tokens_of(replicas) == {"a": 64, "b": 64, "c": 16}


async def test_of_two_limits_that_contradict_each_other_the_one_asked_for_is_named() -> None:
    with pytest.raises(SettingError, match=r"^max_num_batched_tokens = 4 .* at least max_num_seqs \+ 1 = 9"):
        await change(LiveLimits(replicas_of("a"), "i"), max_num_batched_tokens=4)


@pytest.mark.parametrize("silent_from", ["limits", "check_budgets"])
async def test_nothing_changes_while_a_replica_is_silent(silent_from: str) -> None:
    replicas = replicas_of("a", "b")
    if silent_from == "limits":
        replicas.silent = {"b"}
    else:
        whole = replicas.limits

        async def then_silent(replica_id: str) -> Any:
            answer = await whole(replica_id)
            replicas.silent = {"b"}
            return answer

        replicas.limits = then_silent  # type: ignore[method-assign]
    with pytest.raises(Unavailable, match="replica b doesn't answer; nothing was changed"):
        await change(LiveLimits(replicas, "i"), max_num_seqs=4)
    assert [replica.now for replica in replicas.replicas.values()] == [START, START]


async def test_without_a_replica_there_is_nothing_to_change() -> None:
    with pytest.raises(Unavailable, match="no replica of this model is running; nothing was changed"):
        await change(LiveLimits(FakeLimitedReplicas(), "i"), max_num_seqs=4)


async def test_one_that_falls_silent_between_the_rounds_is_named_and_gets_it_when_it_answers_again() -> None:
    replicas = replicas_of("a", "b")
    limits = LiveLimits(replicas, "i")
    await limits.make_equal()
    replicas.before_set = lambda _: replicas.silent.add("b")
    assert await change(limits, max_num_batched_tokens=32) == ["b"]
    assert tokens_of(replicas) == {"a": 32, "b": 64}
    await limits.make_equal()
    replicas.before_set, replicas.silent = lambda _: None, set()
    await limits.make_equal()
    assert tokens_of(replicas) == {"a": 32, "b": 32}


async def test_reset_gives_each_replica_its_own_start_values_but_for_what_is_named() -> None:
    replicas = replicas_of("a")
    replicas.start("b", replace(START, watermark=0.25))
    limits = LiveLimits(replicas, "i")
    await change(limits, max_num_seqs=2, max_num_batched_tokens=16, watermark=0.0)
    await change(limits, reset=True, max_num_batched_tokens=20)
    assert replicas.replicas["a"].now == replace(START, max_num_batched_tokens=20)
    assert replicas.replicas["b"].now == replace(START, max_num_batched_tokens=20, watermark=0.25)


async def test_a_replica_that_starts_later_gets_what_its_neighbours_have() -> None:
    replicas = replicas_of("a", "b")
    await change(LiveLimits(replicas, "gone since"), max_num_batched_tokens=32)
    other = LiveLimits(replicas, "i")
    await other.make_equal()
    del replicas.replicas["b"]
    replicas.start("c", START)
    await other.make_equal()
    assert tokens_of(replicas) == {"a": 32, "c": 32}


async def test_a_change_builds_on_the_newest_limits_also_at_a_replica_that_has_just_come() -> None:
    replicas = replicas_of("a")
    limits = LiveLimits(replicas, "i")
    await change(limits, max_num_batched_tokens=32)
    replicas.start("b", START)
    await change(limits, max_num_seqs=4)
    now = [replica.now for replica in replicas.replicas.values()]
    assert now == [replace(START, max_num_seqs=4, max_num_batched_tokens=32)] * 2


async def test_an_ingress_that_saw_the_change_remembers_it_when_all_replicas_die() -> None:
    replicas = replicas_of("a")
    limits = LiveLimits(replicas, "i")
    await change(limits, max_num_batched_tokens=32)
    await limits.ask()
    replicas.replicas.clear()
    await limits.make_equal()
    replicas.start("b", START)
    await limits.make_equal()
    assert tokens_of(replicas) == {"b": 32}


async def test_an_ingress_with_an_older_memory_does_not_undo_a_newer_change() -> None:
    replicas = replicas_of("a", "b")
    first, second = LiveLimits(replicas, "1"), LiveLimits(replicas, "2")
    await change(first, max_num_batched_tokens=32)
    await first.make_equal()
    await change(second, max_num_batched_tokens=48)
    replicas.start("c", START)
    await first.make_equal()
    assert tokens_of(replicas) == {"a": 48, "b": 48, "c": 48}


@pytest.mark.parametrize("loser_is_told_first", [True, False])
@pytest.mark.parametrize(
    ("lost", "won"),
    [
        ({"max_num_batched_tokens": 32}, {"max_num_batched_tokens": 48}),
        ({"max_num_seqs": 4}, {"max_num_batched_tokens": 48}),
        ({"reset": True}, {"max_num_batched_tokens": 48}),
    ],
)
async def test_of_two_changes_at_once_one_counts_on_all_replicas_and_the_other_says_so(
    lost: dict[str, Any], won: dict[str, Any], loser_is_told_first: bool
) -> None:
    replicas = replicas_of("a", "b", "c")
    winner, loser = LiveLimits(replicas, "2"), LiveLimits(replicas, "1")  # of one revision, the larger id wins
    calls = [change(loser, **lost), change(winner, **won)]
    ends = await asyncio.gather(*calls[:: 1 if loser_is_told_first else -1], return_exceptions=True)
    loss, win = ends[:: 1 if loser_is_told_first else -1]
    assert (type(loss), str(loss)) == (Unavailable, OVERWRITTEN)
    assert win == []
    assert [replica.now for replica in replicas.replicas.values()] == [replace(START, **won)] * 3


async def test_two_changes_at_once_that_agree_are_both_done() -> None:
    replicas = replicas_of("a", "b")
    first, second = LiveLimits(replicas, "1"), LiveLimits(replicas, "2")
    both = (change(first, max_num_batched_tokens=32), change(second, max_num_batched_tokens=32))
    silent_of_first, silent_of_second = await asyncio.gather(*both)
    assert (silent_of_first, silent_of_second) == ([], [])
    assert tokens_of(replicas) == {"a": 32, "b": 32}


async def test_what_is_set_after_a_change_is_told() -> None:
    found, silent = await LiveLimits(replicas_of("a", "b"), "i").change({"max_num_batched_tokens": 32}, reset=False)
    assert [(one["replica_id"], one["now"]["max_num_batched_tokens"]) for one in found] == [("a", 32), ("b", 32)]
    assert silent == []


async def test_replicas_that_come_together_are_told_together() -> None:
    replicas = replicas_of("a")
    limits = LiveLimits(replicas, "i")
    await change(limits, max_num_batched_tokens=32)
    replicas.start("b", START)
    replicas.start("c", START)
    all_told, set_budgets = asyncio.Barrier(2), replicas.set_budgets

    async def answer_once_all_are_told(replica_id: str, budgets: Any, revision: Any) -> Any:
        await all_told.wait()
        return await set_budgets(replica_id, budgets, revision)

    replicas.set_budgets = answer_once_all_are_told  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        await limits.make_equal()
    assert tokens_of(replicas) == {"a": 32, "b": 32, "c": 32}


async def test_after_a_deployment_with_other_settings_the_deployment_counts() -> None:
    replicas = replicas_of("a")
    limits = LiveLimits(replicas, "i")
    await change(limits, max_num_batched_tokens=32)
    replicas.start("b", replace(START, max_num_batched_tokens=128))
    await limits.make_equal()
    assert tokens_of(replicas) == {"a": 32, "b": 128}


async def test_nobody_is_asked_while_no_replica_has_come() -> None:
    replicas = replicas_of("a", "b", "c", "d", "e")
    limits = LiveLimits(replicas, "i")
    await limits.make_equal()
    replicas.calls.clear()
    await limits.make_equal()
    assert replicas.calls == []
    replicas.start("f", START)
    await limits.make_equal()
    assert replicas.calls == [(one, "limits") for one in ("f", "a", "b", "c")], "of the equal ones, three"
