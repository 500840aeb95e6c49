"""Whatever replicas die and whenever: what a reader gets is, token by token and letter by letter, what it gets when
none does. Stop strings and characters of several bytes lie across the cuts, and several answers are lost at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.continued_stream import ContinuedStream, Continuing
from deployments.leases import Leases
from deployments.model_client_fake import FakeModelClient
from replica.errors import EngineDead
from replica.request import FinishReason, GenerationRequest, SamplingParams, StreamMessage
from replica.scheduler.plan import PENDING_TOKEN
from replica.stream import Answer
from replica.text.tokenizer import Tokenizer
from tests.tokenizer_families import FAMILIES, byte_ids

PIECES = st.sampled_from(["é", "你好", "😀", "ab", "aab", "b", " the", "\n"])


@dataclass(frozen=True)
class Life:
    """A replica's: it makes so many tokens for the request, tells of them in groups, and dies: with last words, or
    without, and then what it hadn't told is lost."""

    num_tokens: int
    group: int
    has_last_words: bool


class MortalReplicas(FakeModelClient):
    """Replicas that make the tokens of `scripts`, one list an answer. Each request sent takes the next of `lives`;
    after the last of them they are immortal."""

    def __init__(self, tokenizer: Tokenizer, scripts: list[list[int]], lives: list[Life]) -> None:
        super().__init__("r0", "r1")
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._lives = list(lives)

    async def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
        life = self._lives.pop(0) if self._lives else Life(10**9, 1, False)
        answers = [Answer(request.first_index + i, request, self._tokenizer) for i in range(request.n)]
        num_prior = len(request.prior_output_ids)
        yield StreamMessage("r0")
        num_made = 0
        for number in range(num_prior, max(map(len, self._scripts))):
            for answer in answers:
                script = self._scripts[answer.index]
                if answer.finish_reason is not None or number >= len(script):
                    continue
                if num_made == life.num_tokens:
                    if life.has_last_words:
                        yield _last_words(answers)
                        return
                    raise EngineDead("gone")
                answer.push(script[number], FinishReason.LENGTH if number == len(script) - 1 else None)
                num_made += 1
                if num_made % life.group == 0:
                    yield _news(answers)
        yield _news(answers)


def _news(answers: list[Answer]) -> StreamMessage:
    return StreamMessage("r0", tuple(answer.take() for answer in answers if answer.has_news))


def _last_words(answers: list[Answer]) -> StreamMessage:
    for answer in answers:
        answer.push(PENDING_TOKEN, FinishReason.ERROR, None, EngineDead("dead").info())
    return _news(answers)


@dataclass
class Got:
    """All that a reader got of one answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    num_output_tokens: int = 0
    end: tuple[FinishReason, str | int | None] | None = None


async def read_all(client: MortalReplicas, request: GenerationRequest) -> list[Got]:
    leases, news = Leases("lease", lambda: 0.0, retry_s=0.001), asyncio.Event()
    stream = ContinuedStream(leases, client, request, news, Continuing(limit=8, wait_s=1.0))
    got = [Got() for _ in range(request.n)]
    while not stream.finished:
        news.clear()
        for event in [event for message in stream.take_all() for event in message.events]:
            mine = got[event.index]
            assert mine.end is None, "news after the end"
            mine.text += event.text
            mine.token_ids += event.token_ids
            mine.num_output_tokens = event.num_output_tokens
            if event.finish_reason is not None:
                mine.end = (event.finish_reason, event.stop_reason)
        if not stream.finished:
            await asyncio.wait_for(news.wait(), 5)
    stream.close()
    while leases.num_background:
        await asyncio.sleep(0)
    assert len(leases) == 0
    return got


LIVES = st.lists(st.builds(Life, st.integers(0, 12), st.integers(1, 4), st.booleans()), min_size=1, max_size=4)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data(), lives=LIVES, n=st.integers(1, 3))
def test_nobody_notices_that_replicas_died(family: str, data: st.DataObject, lives: list[Life], n: int) -> None:
    tokenizer = FAMILIES[family]()
    letters = st.lists(PIECES, max_size=5).map(lambda pieces: byte_ids(tokenizer, "".join(pieces).encode()))
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6)
    scripts = [
        data.draw(letters) + data.draw(any_ids) + data.draw(letters) + byte_ids(tokenizer, b"a") for _ in range(n)
    ]
    whole = tokenizer.decode(scripts[0], True)
    cuts = st.tuples(st.integers(0, len(whole)), st.integers(1, 6)).map(lambda at: whole[at[0] : at[0] + at[1]])
    stops = tuple(filter(None, data.draw(st.lists(cuts, max_size=2))))
    sampling = SamplingParams(max_tokens=99, seed=1, stop=stops, min_tokens=data.draw(st.sampled_from([0, 0, 3])))
    prompt = tuple(
        byte_ids(tokenizer, data.draw(st.sampled_from(["x", "é", "你"])).encode()[: data.draw(st.integers(1, 3))])
    )
    request = GenerationRequest("a", prompt, sampling, n=n)
    undisturbed = asyncio.run(read_all(MortalReplicas(tokenizer, scripts, []), request))
    assert asyncio.run(read_all(MortalReplicas(tokenizer, scripts, lives), request)) == undisturbed


def test_the_test_can_fail() -> None:
    """Answers whose continuation doesn't know what was said before are other ones."""

    class Forgetful(MortalReplicas):
        def generate(self, request: GenerationRequest, exclude: tuple[str, ...] = ()) -> AsyncIterator[StreamMessage]:
            return super().generate(replace(request, prior_output_ids=request.prior_output_ids[1:]), exclude)

    tokenizer = FAMILIES["byte_level"]()
    scripts, lives = [byte_ids(tokenizer, b"abcdef")], [Life(3, 1, False)]
    request = GenerationRequest("a", (1,), SamplingParams(max_tokens=99))
    (got,) = asyncio.run(read_all(Forgetful(tokenizer, scripts, lives), request))
    assert got.text == "abccdef"
