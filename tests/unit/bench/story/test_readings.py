"""A reading says what its rows show; where they don't show the story's claim, it refuses to."""

from typing import Any

import pytest

from bench.story.measures import Summary
from bench.story.readings import read_chunked_prefill, read_max_num_seqs, read_watermark
from bench.story.study import KnobRow

PLAIN = Summary(100, 10.0, 8.0, (8.0,) * 4, 10.0, 5.0, 100.0, 1.0, 2.0, 0.010, 0.020, 0.8, 1.0, 0, 0)


def row(label: str, **numbers: Any) -> KnobRow:
    values = {name: getattr(PLAIN, name) for name in Summary.__slots__} | numbers
    return KnobRow(label, Summary(**values))


def test_more_places_than_the_pool_holds_buy_only_pressure() -> None:
    reading = read_max_num_seqs(
        [
            row("8", output_tokens_per_s=50.0),
            row("16", num_preemptions=4),
            row("32", output_tokens_per_s=103.0, num_preemptions=60, itl_p99_s=0.044),
        ]
    )
    assert reading.shown
    assert reading.text == (
        "from 16 to 32 tokens per second change by +3.0% and only pressure grows (preemptions 4 -> 60, ITL p99 20.0 -> "
        "44.0 ms): the KV pool is the limit"
    )


def test_places_without_takers_are_said_to_be_no_limit() -> None:
    reading = read_max_num_seqs([row("8", kv_peak=0.3), row("16", kv_peak=0.3, itl_p99_s=0.03)])
    assert reading.text.endswith("places aren't the limit")


def test_a_raise_that_still_pays_is_no_evidence() -> None:
    reading = read_max_num_seqs([row("8"), row("16", output_tokens_per_s=140.0, num_preemptions=50)])
    assert not reading.shown
    assert reading.text == "not shown: the last raise, to 16, still gave +40.0% tokens per second"


def test_a_raise_that_changes_nothing_is_no_evidence_of_pressure() -> None:
    reading = read_max_num_seqs([row("8"), row("16")])
    assert not reading.shown
    assert reading.text.endswith("+0.0%, and neither KV pressure nor ITL grows")


@pytest.mark.parametrize(
    ("ttft_p99_s", "price"), [(2.5, "TTFT pays for it"), (2.04, "TTFT doesn't pay for it"), (1.5, "TTFT falls too")]
)
def test_chunking_is_read_from_itl_and_its_price_from_ttft(ttft_p99_s: float, price: str) -> None:
    rows = [row("off"), row("on"), row("on, small", itl_p99_s=0.012, ttft_p99_s=ttft_p99_s)]
    reading = read_chunked_prefill(rows)
    assert reading.shown
    assert reading.text.startswith("the ITL of running decodes falls, p99 20.0 -> 12.0 ms, not by chunking alone")
    assert f"; {price}, p99 2000.0 -> " in reading.text


def test_chunking_alone_is_credited_when_it_was_enough() -> None:
    reading = read_chunked_prefill([row("off"), row("on", itl_p99_s=0.012), row("on, small", itl_p99_s=0.012)])
    assert "already at the same budget" in reading.text


def test_chunking_that_does_not_lower_itl_is_no_evidence() -> None:
    reading = read_chunked_prefill([row("off"), row("on"), row("on, small", itl_p99_s=0.0195, ttft_p50_s=3.0)])
    assert not reading.shown
    assert reading.text.startswith("not shown: cutting prompts doesn't lower the ITL")


def test_a_watermark_is_read_from_preemptions() -> None:
    none = row("0", num_preemptions=40, num_recomputed_tokens=900, width=9.0)
    kept = row("0.05", num_preemptions=10, num_recomputed_tokens=200, output_tokens_per_s=104.0)
    reading = read_watermark([none, kept])
    assert reading.shown
    assert reading.text == (
        "preemptions 40 -> 10, recomputed tokens 900 -> 200, and no concurrency is bought (batch width 9.0 -> 8.0); "
        "tokens per second change by +4.0%"
    )
    wider = read_watermark([none, row("0.05", num_preemptions=10, width=12.0)])
    assert "and the batch is wider too (batch width 9.0 -> 12.0)" in wider.text


def test_a_watermark_that_cures_nothing_is_no_evidence() -> None:
    assert not read_watermark([row("0"), row("0.05")]).shown
    unchanged = read_watermark([row("0", num_preemptions=40), row("0.05", num_preemptions=39)])
    assert unchanged.text == "not shown: 0.05 kept free doesn't lower preemptions (preemptions 40 -> 39)"


def test_what_two_plays_of_one_row_differ_by_is_no_effect() -> None:
    rows = [row("off"), row("on", itl_p99_s=0.014), row("on, small", itl_p99_s=0.012)]
    assert "already at the same budget" in read_chunked_prefill(rows).text
    rows[1] = row("on", itl_p99_s=0.018)
    assert "already at the same budget" in read_chunked_prefill(rows).text
    slower = row("off, again", itl_p99_s=0.0225).result
    reading = read_chunked_prefill(rows, slower)
    assert reading.shown
    assert "p99 20.0 -> 12.0 ms (chance: 12%), not by chunking alone" in reading.text


def test_nothing_is_read_from_what_two_plays_of_one_row_do_not_agree_on() -> None:
    rows = [row("off"), row("on", itl_p99_s=0.014), row("on, small", itl_p99_s=0.012, ttft_p99_s=3.0)]
    reading = read_chunked_prefill(rows, row("off, again", itl_p99_s=0.0368).result)
    assert (reading.shown, reading.text) == (False, "not shown: two plays of one row differ by 84% in ITL p99")
    reading = read_chunked_prefill(rows, row("off, again", ttft_p99_s=2.5).result)
    assert reading.shown
    assert "; whether TTFT pays for it is not shown, p99 2000.0 -> 3000.0 ms (chance: 25%)" in reading.text
    rows = [row("8"), row("16", output_tokens_per_s=101.0, num_preemptions=60)]
    reading = read_max_num_seqs(rows, row("8, again", output_tokens_per_s=86.0).result)
    assert (reading.shown, reading.text) == (
        False,
        "not shown: two plays of one row differ by 16% in tokens per second",
    )


def test_an_itl_within_chance_is_no_pressure() -> None:
    rows = [row("8"), row("16", itl_p99_s=0.05)]
    assert read_max_num_seqs(rows).shown
    assert not read_max_num_seqs(rows, row("8, again", itl_p99_s=0.024).result).shown


def test_throughput_that_falls_is_said_to_fall() -> None:
    rows = [row("8", output_tokens_per_s=90.0), row("16"), row("32", output_tokens_per_s=84.2, itl_p99_s=0.030)]
    assert read_max_num_seqs(rows).text == (
        "from 16 to 32 tokens per second change by -15.8% and throughput falls while pressure grows (ITL p99 20.0 -> "
        "30.0 ms): the KV pool is the limit"
    )


def test_a_few_preemptions_more_or_less_are_no_evidence() -> None:
    assert not read_max_num_seqs([row("16", num_preemptions=9), row("32", num_preemptions=11)]).shown
    assert not read_watermark([row("0", num_preemptions=11), row("0.05", num_preemptions=9)]).shown
    assert read_watermark([row("0", num_preemptions=17), row("0.05", num_preemptions=9)]).shown


def test_a_gain_within_chance_is_no_gain() -> None:
    rows = [row("8"), row("16", output_tokens_per_s=108.0, num_preemptions=9)]
    assert not read_max_num_seqs(rows).shown
    reading = read_max_num_seqs(rows, row("8, again", output_tokens_per_s=90.0).result)
    assert reading.shown
    assert "change by +8.0% (chance: 11%) and only pressure grows (preemptions 0 -> 9)" in reading.text
