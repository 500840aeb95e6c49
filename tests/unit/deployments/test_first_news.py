"""A stream's first news come by its own call, before anybody polls for it."""

from __future__ import annotations

import asyncio

import pytest

from replica.errors import BrimfulError, EngineDead, EngineFailure
from replica.request import StreamMessage
from tests.unit.deployments.news_site import STOP, Site, batch, news, turn


async def test_the_first_news_come_by_the_call_and_a_poll_follows_them() -> None:
    site = Site()
    call, a = site.open("a", taken_by=None)
    call.said.put_nowait(StreamMessage("r0"))
    await turn()
    assert (a.texts, site.asked) == ([""], [])
    call.begin("r0")
    await turn()
    assert (a.texts, site.asked) == (["", "1"], [("r0", 0)])


async def test_a_stream_that_ends_with_its_first_news_needs_no_poll() -> None:
    site = Site()
    call, a = site.open("a", taken_by=None)
    call.take("r0", STOP)
    call.said.put_nowait(None)
    await turn()
    assert (a.texts, a.error, a.reading.done()) == (["", "1"], None, True)
    assert (site.asked, site.news.num_open) == ([], 0)


@pytest.mark.parametrize(
    "end", [(EngineDead("gone"), EngineDead), (asyncio.CancelledError(), EngineFailure), (None, type(None))]
)
async def test_a_call_that_is_over_before_the_first_news_ends_its_stream(
    end: tuple[BaseException | None, type[BrimfulError]],
) -> None:
    site = Site()
    site.open("other")
    call, a = site.open("a", taken_by=None)
    call.said.put_nowait(StreamMessage("r0"))
    await turn()
    site.answer(batch(1, news("a", "early")))
    await turn()
    call.said.put_nowait(end[0])
    await turn()
    assert (a.texts, type(a.error), a.reading.done()) == ([""], end[1], True)


async def test_a_consumer_that_leaves_before_the_first_news_is_told_nothing_else() -> None:
    site = Site()
    call, a = site.open("a", taken_by=None)
    call.said.put_nowait(StreamMessage("r0"))
    await turn()
    a.reading.cancel()
    await turn()
    assert (a.reading.cancelled(), a.error, site.news.num_open) == (True, None, 0)
