"""Answers as text: EOS, stop ids and stop strings, several answers, continued streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from replica.model.fake import FakeModel
from replica.model_card import TOKENIZER_FILE
from replica.request import FinishReason
from replica.scheduler.plan import PENDING_TOKEN
from replica.stream import Answer
from replica.text.tokenizer import Tokenizer
from tests.fake_replica import (
    EOS_ID,
    FakeFactory,
    answer,
    assert_quiet,
    fake_shape,
    oracle,
    request_of,
    running,
    sample,
    settled,
    small_config,
    text_of,
    write_model,
)


async def test_an_eos_ends_the_answer_and_stays_out_of_the_text(tmp_path: Path) -> None:
    factory = FakeFactory(tmp_path, faults={"eos_ratio": 0.2})
    request = request_of("r", max_tokens=100, ignore_eos=False)
    tokens, reason = FakeModel(fake_shape(), eos_ratio=0.2).alone(request, 0)
    assert (tokens[-1], reason) == (EOS_ID, FinishReason.STOP)
    async with running(small_config(), factory) as service:
        hidden = await answer(service, request)
        shown = await answer(service, request_of("r", max_tokens=100, ignore_eos=False, skip_special_tokens=False))
    assert (hidden.text(), hidden.token_ids()) == (text_of(tokens), tokens)
    assert shown.text() == text_of(tokens) + "<eos>"
    assert (hidden.end().finish_reason, hidden.end().stop_reason) == (FinishReason.STOP, None)


async def test_an_eos_that_the_tokenizer_does_not_mark_as_special_stays_out_of_the_text_too(tmp_path: Path) -> None:
    card = write_model(tmp_path, eos_is_special=False)
    tokenizer = Tokenizer((tmp_path / TOKENIZER_FILE).read_bytes(), card)
    texts = []
    for skip in (True, False):
        got = Answer(0, request_of("r", skip_special_tokens=skip), tokenizer)
        got.push(1)
        assert got.push(EOS_ID, FinishReason.STOP) is FinishReason.STOP
        texts.append(got.take().text)
    assert texts == [text_of([1]), text_of([1]) + "<eos>"]


async def test_what_is_held_back_when_an_answer_is_cut_short_is_left_to_whoever_continues_it(tmp_path: Path) -> None:
    card = write_model(tmp_path)
    tokenizer = Tokenizer((tmp_path / TOKENIZER_FILE).read_bytes(), card)
    stop = text_of([2, 3, 4])
    first = Answer(0, request_of("r", stop=(stop,)), tokenizer)
    for token in (1, 2, 3):
        first.push(token)
    first.push(PENDING_TOKEN, FinishReason.ERROR)
    cut = first.take()
    assert (cut.token_ids, cut.text) == ((1, 2, 3), text_of([1]))
    second = Answer(0, request_of("r", stop=(stop,), prior_output_ids=cut.token_ids), tokenizer)
    second.push(9, FinishReason.LENGTH)
    assert second.take().text == text_of([2, 3, 9])


async def test_a_stop_token_id_is_named_and_its_text_is_not_shown(factory: FakeFactory) -> None:
    tokens = oracle(request_of("r", max_tokens=20))
    stop = tokens[7]
    cut = tokens.index(stop)
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=20, stop_token_ids=(stop,)))
    assert answered.text() == text_of(tokens[:cut])
    assert (answered.end().stop_reason, answered.end().num_output_tokens) == (stop, cut + 1)


@pytest.mark.parametrize("length", [1, 2, 3, 6])
@pytest.mark.parametrize("position", [0, 3, 11])
async def test_a_stop_string_cuts_the_text_before_it_and_counts_the_tokens_made(
    factory: FakeFactory, position: int, length: int
) -> None:
    tokens = oracle(request_of("r", max_tokens=20))
    whole = text_of(tokens)
    stop = whole[position : position + length]
    cut = whole.index(stop)
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=100, stop=(stop,)))
        await settled(service)
        assert_quiet(service)
        num_late = int(factory.faults["is_async"])
        assert sample(service, "step_tokens_total", kind="decode") == cut + length - 1 + num_late, "the engine went on"
        assert sample(service, "generation_tokens_total") == cut + length
        assert sample(service, "request_success_total", finished_reason="stop") == 1
        assert sample(service, "request_success_total", finished_reason="abort") == 0
    assert answered.text() == whole[:cut]
    end = answered.end()
    assert (end.finish_reason, end.stop_reason, end.num_output_tokens) == (FinishReason.STOP, stop, cut + length)
    assert answered.token_ids() == tokens[: cut + length]


async def test_a_stop_string_completed_by_the_last_allowed_token_is_a_stop(factory: FakeFactory) -> None:
    whole = text_of(oracle(request_of("r", max_tokens=8)))
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=8, stop=(whole[-2:],)))
    assert answered.end().finish_reason is FinishReason.STOP


async def test_text_held_back_for_a_stop_string_is_sent_at_the_end(factory: FakeFactory) -> None:
    whole = text_of(oracle(request_of("r", max_tokens=8)))
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=8, stop=(whole[-3:] + "\n",)))
    assert (answered.text(), answered.end().finish_reason) == (whole, FinishReason.LENGTH)


async def test_a_stop_string_within_the_minimum_of_tokens_does_not_stop(factory: FakeFactory) -> None:
    whole = text_of(oracle(request_of("r", max_tokens=12)))
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=12, min_tokens=6, stop=(whole[2:4],)))
    assert answered.text().startswith(whole[:6])


async def test_one_answer_of_several_stops_while_the_other_goes_on(factory: FakeFactory) -> None:
    request = request_of("r", max_tokens=20, n=2, temperature=1.0, seed=5)
    texts = [text_of(oracle(request, index)) for index in range(2)]
    stop = texts[0][3:5]
    assert stop not in texts[1]
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=20, n=2, temperature=1.0, seed=5, stop=(stop,)))
    assert answered.text(0) == texts[0][: texts[0].index(stop)]
    assert answered.text(1) == texts[1]
    assert answered.end(1).finish_reason is FinishReason.LENGTH


async def test_a_continued_stream_sends_nothing_again_and_counts_on(factory: FakeFactory) -> None:
    request = request_of("r", max_tokens=12)
    tokens = oracle(request)
    async with running(small_config(), factory) as service:
        answered = await answer(service, request_of("r", max_tokens=12, prior_output_ids=tuple(tokens[:5])))
        assert sample(service, "generation_tokens_total") == 7
    assert answered.token_ids() == tokens[5:]
    assert answered.text() == text_of(tokens[5:])
    assert answered.end().num_output_tokens == 12


async def test_one_of_several_answers_is_continued_under_its_own_index(factory: FakeFactory) -> None:
    request = request_of("r", max_tokens=12, n=3, temperature=1.0, seed=5)
    tokens = oracle(request, 2)
    stop = text_of(tokens)[7:9]
    rest = replace(request, n=1, first_index=2, prior_output_ids=tuple(tokens[:5]))
    async with running(small_config(), factory) as service:
        answered = await answer(service, replace(rest, sampling=replace(request.sampling, stop=(stop,))))
        refused = await answer(service, replace(rest, prior_output_ids=(-1,)))
    assert answered.text(2) == text_of(tokens[5:7])
    assert (answered.end(2).stop_reason, {event.index for event in answered.events}) == (stop, {2})
    assert [(event.index, event.finish_reason) for event in refused.events] == [(2, FinishReason.REJECTED)]


async def test_a_stop_string_that_began_on_another_replica_is_found(factory: FakeFactory) -> None:
    tokens = oracle(request_of("r", max_tokens=12))
    whole = text_of(tokens)
    stop = whole[3:7]
    async with running(small_config(), factory) as service:
        answered = await answer(
            service, request_of("r", max_tokens=12, stop=(stop,), prior_output_ids=tuple(tokens[:5]))
        )
    assert answered.text() == ""
    assert (answered.end().stop_reason, answered.end().num_output_tokens) == (stop, 7)
