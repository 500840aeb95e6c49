"""Who may enter the batch: `need + reserve + growth <= free - owed`."""

from __future__ import annotations

import pytest

from replica.scheduler.block_tables import BlockTables
from tests.unit.scheduler.rig import World, chunks, request, world


def waiting_by_reason(w: World) -> dict[str, int]:
    by_reason = w.scheduler.stats(None, w.now_s, step_s=0, idle_s=0).num_waiting_by_reason
    return {reason: count for reason, count in by_reason.items() if count}


def test_the_whole_input_must_fit_before_its_first_chunk() -> None:
    w = world(num_blocks=10, max_num_batched_tokens=12)
    w.add(request([5] * 24, 1))
    w.add(request([6] * 20, 1))
    assert chunks(w.step()) == {0: 12}
    assert chunks(w.step()) == {0: 12}, "4 blocks are free, 5 are needed"
    assert waiting_by_reason(w) == {"budget": 1}
    assert chunks(w.step()) == {1: 12}


def test_without_full_reservation_only_the_chunk_must_fit() -> None:
    w = world(num_blocks=10, max_num_batched_tokens=16, scheduler_reserve_full_isl=False)
    w.add(request([5] * 24, 1))
    w.add(request([6] * 20, 1))
    w.step()
    assert chunks(w.step()) == {0: 8, 1: 8}


def test_what_mid_prefills_still_have_to_take_is_not_free() -> None:
    w = world(num_blocks=10, max_num_seqs=2, max_num_batched_tokens=8)
    w.add(request([5] * 24, 1))
    w.add(request([6] * 17, 1))
    assert chunks(w.step()) == {0: 8}
    assert chunks(w.step()) == {0: 8}, "8 blocks are free and 5 are needed, but 4 are owed to the first"
    w = world(num_blocks=11, max_num_seqs=2, max_num_batched_tokens=8)
    w.add(request([5] * 24, 1))
    w.add(request([6] * 17, 1))
    assert chunks(w.step()) == {0: 8}
    assert chunks(w.step()) == {0: 6, 1: 2}


def test_a_mid_prefill_with_more_blocks_than_it_needs_lends_none_of_them() -> None:
    """After a rollback 0 keeps the block that its first decode had taken: 3 for an input of 2. One of 4 is free."""
    w = world(num_blocks=4, max_num_batched_tokens=12)
    w.add(request([5] * 8, 4))
    w.plan()
    w.plan()
    w.rollback()
    w.add(request([6] * 8, 4))
    assert chunks(w.plan()) == {0: 8}, "2 blocks are needed"


def test_the_watermark_is_kept_free_while_something_runs() -> None:
    for watermark, admitted in ((0.21, {0: 1}), (0.2, {0: 1, 1: 28})):
        w = world(num_blocks=10, max_num_batched_tokens=40, watermark=watermark)
        w.add(request([5], 2))
        w.step()
        w.add(request([6] * 28, 1))
        assert chunks(w.step()) == admitted, "1 block held, 7 needed, 2 left: 21 % of 10 are 3 blocks"


def test_the_watermark_is_off_when_nothing_runs() -> None:
    w = world(num_blocks=10, max_num_batched_tokens=40, watermark=0.9)
    w.add(request([5] * 39, 1))
    assert chunks(w.step()) == {0: 39}


def test_blocks_that_decodes_will_need_while_the_input_is_computed_are_kept() -> None:
    w = world(num_blocks=9, block_size=4, max_num_batched_tokens=9)
    w.add(request([5] * 3, 30))
    w.step()
    w.add(request([6] * 32, 1))
    assert chunks(w.step()) == {0: 1}, "8 are free and 8 needed, but in 4 steps the decode takes one more"
    w = world(num_blocks=10, block_size=4, max_num_batched_tokens=9)
    w.add(request([5] * 3, 30))
    w.step()
    w.add(request([6] * 32, 1))
    assert chunks(w.step()) == {0: 1, 1: 8}


def test_a_decode_that_ends_soon_grows_only_to_its_end() -> None:
    w = world(num_blocks=9, block_size=4, max_num_batched_tokens=9)
    w.add(request([5] * 3, 2))
    w.step()
    w.add(request([6] * 32, 1))
    assert chunks(w.step()) == {0: 1, 1: 8}


def test_a_head_that_does_not_fit_holds_the_queue_in_order() -> None:
    w = world(num_blocks=10, kv_bypass_s=0.0)
    w.add(request([5] * 20, 5))
    w.add(request([6] * 28, 1))
    w.add(request([7], 1))
    w.step()
    assert waiting_by_reason(w) == {"blocks": 2}
    assert w.scheduler.num_running == 1


def test_reasons_name_what_stops_admission() -> None:
    w = world(max_num_seqs=1)
    w.add(request([5], 5))
    w.add(request([6], 5))
    w.step()
    assert waiting_by_reason(w) == {"seqs": 1}
    w = world(max_num_batched_tokens=9)
    w.add(request([5] * 9, 5))
    w.add(request([6], 5))
    w.step()
    assert waiting_by_reason(w) == {"budget": 1}


def test_a_cached_prefix_that_somebody_holds_costs_no_blocks() -> None:
    prefix = list(range(10, 34))
    w = world(num_blocks=10, max_num_batched_tokens=40)
    w.add(request(prefix, 9))
    w.step()
    w.add(request([*prefix, 5, 5, 5, 5, 5], 1))
    assert chunks(w.step()) == {0: 1, 1: 5}, "7 blocks held, 3 free: 6 of its 8 are shared"
    assert w.scheduler.timings(1).num_cached_tokens == 24


def test_a_cached_prefix_that_nobody_holds_counts_as_needed() -> None:
    prefix = list(range(10, 34))
    w = world(num_blocks=10, max_num_batched_tokens=40)
    w.add(request(prefix, 1))
    w.step()
    w.add(request([5] * 14, 9))
    w.step()
    assert w.scheduler.load().num_blocks_cached == 6
    w.add(request([*prefix, 6], 1))
    assert chunks(w.step()) == {0 + 1: 1}, "6 cached blocks are free, and its seventh isn't"


def test_at_most_all_but_one_of_the_known_tokens_hit() -> None:
    w = world()
    w.add(request(list(range(10, 22)), 1))
    w.step()
    w.add(request(list(range(10, 22)), 1))
    assert chunks(w.step()) == {1: 4}, "12 tokens are 3 full blocks, of which 2 may hit"
    assert w.scheduler.timings(1).num_cached_tokens == 8
    w.drain()
    w.check_outputs()


def test_blocks_filled_by_decode_are_reused_by_the_next_turn() -> None:
    w = world()
    w.add(request([10, 11, 12], 9))
    w.drain()
    first_turn = [10, 11, 12, *w.ledger.books[0].received]
    w.add(request([*first_turn, 5, 6], 1))
    assert chunks(w.step()) == {1: 6}, "of 14 tokens the first 8 hit: the last output token was never computed"


def test_prefix_entries_of_different_salts_are_apart() -> None:
    w = world()
    for salt, computed in (("a", 9), ("b", 9), ("a", 1), (None, 9)):
        seq_id = w.add(request([7] * 9, 1, cache_salt=salt))
        assert seq_id is not None and chunks(w.step()) == {seq_id: computed}


def test_without_prefix_caching_nothing_hits() -> None:
    w = world(enable_prefix_caching=False)
    for seq_id in (0, 1):
        w.add(request([7] * 9, 1))
        assert chunks(w.step()) == {seq_id: 9}
    stats = w.scheduler.stats(None, 0.0, step_s=0, idle_s=0)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens, stats.num_blocks_cached) == (0, 0, 0)


def test_prefix_tokens_are_counted_once_per_request() -> None:
    w = world()
    for _ in range(2):
        w.add(request([7] * 9, 1))
        w.step()
    stats = w.scheduler.stats(None, 0.0, step_s=0, idle_s=0)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (18, 8)
    assert w.scheduler.stats(None, 0.0, step_s=0, idle_s=0).prefix_query_tokens == 0


def test_load_names_the_hashes_that_came_and_went() -> None:
    from replica.scheduler.block_hash import block_hashes

    w = world(num_blocks=2)
    w.add(request([7, 8, 9, 10, 11], 1))
    w.step()
    assert w.scheduler.load().block_hashes_added == block_hashes([7, 8, 9, 10], 4)
    w.add(request([5, 5, 5, 5, 5], 1))
    w.step()
    load = w.scheduler.load()
    assert load.block_hashes_evicted == block_hashes([7, 8, 9, 10], 4)
    assert load.block_hashes_added == block_hashes([5, 5, 5, 5], 4)


def test_each_that_enters_is_looked_at_without_another_look_at_those_who_entered_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand that enter in one step would cost half a million looks."""
    looks = 0
    blocks_for = BlockTables.blocks_for

    def counted(tables: BlockTables, num_tokens: int) -> int:
        nonlocal looks
        looks += 1
        return blocks_for(tables, num_tokens)

    w = world(num_blocks=500, max_num_seqs=100, max_num_batched_tokens=400)
    for token in range(100):
        w.add(request([token % 50, 3, 4], 2))
    monkeypatch.setattr(BlockTables, "blocks_for", counted)
    assert len(chunks(w.plan())) == 100
    assert looks <= 5 * 100
