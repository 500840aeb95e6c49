"""Changes of the prefix cache reach every reader of load reports exactly once, however few reports it gets."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from replica.cache_changes import CacheChanges
from replica.request import LoadReport
from replica.scheduler.block_hash import block_hashes
from tests.fake_replica import FakeFactory, answer, request_of, running, small_config

REPORT = LoadReport("r", "e", 1, 0.0, 0, 0, 0, 0, 8, 8, 0, 4, 4, 16)


def changed(added: tuple[bytes, ...] = (), evicted: tuple[bytes, ...] = (), number: int = 0) -> LoadReport:
    return replace(REPORT, block_hashes_added=added, block_hashes_evicted=evicted, block_hashes_number=number)


def test_a_reader_that_missed_reports_is_told_the_net_of_them_once_in_a_numbered_batch() -> None:
    changes = CacheChanges()
    for reader in ("one", "two"):
        assert changes.for_reader(reader, REPORT) == REPORT
    assert changes.take(changed(added=(b"a", b"b"))) == REPORT
    assert changes.for_reader("one", REPORT) == changed(added=(b"a", b"b"), number=1)
    changes.take(changed(added=(b"c",), evicted=(b"a",)))
    assert changes.for_reader("two", REPORT) == changed(added=(b"b", b"c"), evicted=(b"a",), number=2)
    assert changes.for_reader("one", REPORT) == changed(added=(b"c",), evicted=(b"a",), number=3)
    assert changes.for_reader("one", REPORT) == changes.for_reader("two", REPORT) == REPORT


def test_a_block_evicted_and_filled_again_is_held() -> None:
    changes = CacheChanges()
    changes.for_reader("one", REPORT)
    changes.take(changed(added=(b"a",), evicted=(b"a",)))
    assert changes.for_reader("one", REPORT) == changed(added=(b"a",), number=1)


def test_what_waits_for_silent_readers_is_bounded() -> None:
    changes = CacheChanges()
    for number in range(100):
        changes.for_reader(f"reader-{number}", REPORT)
    for number in range(50):
        changes.take(changed(added=tuple(f"{number}-{i}".encode() for i in range(100))))
    assert len(changes.for_reader("reader-99", REPORT).block_hashes_added) == 2048
    assert changes.for_reader("reader-0", REPORT) == REPORT


async def test_two_ingress_processes_learn_every_block_that_the_cache_holds(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path)) as service:
        heard: dict[str, set[bytes]] = {"one": set(), "two": set()}
        for lease in heard:
            await answer(service, request_of(f"hello {lease}", num_prompt=1, max_tokens=1, lease=lease))
        for number in range(4):
            await answer(service, request_of(f"r{number}", num_prompt=12, first=number, lease="one"))
        for lease, hashes in heard.items():
            async with aclosing(service.submit(request_of(f"bye {lease}", num_prompt=1, lease=lease))) as call:
                message = await anext(call)
            assert message.load is not None
            hashes.update(message.load.block_hashes_added)
        prompts = {
            h for number in range(4) for h in block_hashes(request_of(num_prompt=12, first=number).prompt_ids, 4)
        }
        assert len(prompts) == 12
        assert prompts <= heard["two"]
        assert not prompts & heard["one"], "told already, on the messages of its own streams"
        assert service.load().block_hashes_added == ()
