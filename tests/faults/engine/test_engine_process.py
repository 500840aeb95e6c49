"""The engine in a process of its own, with the fake model: death, stall, poison, floods of aborts, no leftovers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from replica import engine_process
from replica.errors import EngineDead
from replica.request import FinishReason
from replica.service import ReplicaService
from tests.fake_replica import FakeFactory, answer, oracle, request_of, running, sample, small_config
from tests.faults.engine.factories import SlowFactory
from tests.replica_reader import read


def engine_pid(service: ReplicaService) -> int:
    return int(service.status()["engine_pid"])


async def quiet(service: ReplicaService) -> None:
    async with asyncio.timeout(10):
        while True:
            load = service.load()
            if (load.num_running, load.num_waiting, load.kv_usage_ratio) == (0, 0, 0.0):
                return
            await asyncio.sleep(0.01)


async def test_the_process_gives_the_same_answers_and_leaves_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    fds = set(Path("/proc/self/fd").iterdir())
    async with running(small_config(), FakeFactory(tmp_path), in_thread=False, progress=lines.append) as service:
        pid = engine_pid(service)
        assert pid != os.getpid()
        requests = [request_of(f"r{i}", num_prompt=3 + i, max_tokens=10, first=i) for i in range(8)]
        answers = await asyncio.gather(*(answer(service, request) for request in requests))
        for request, answered in zip(requests, answers, strict=True):
            assert answered.token_ids() == oracle(request)
        service.check()
    assert lines == ["loading the fake model"]
    assert not psutil.pid_exists(pid)
    assert set(Path("/proc/self/fd").iterdir()) <= fds


@pytest.mark.parametrize(("chosen", "expected"), [(None, ("PASSIVE", "3000")), ("ACTIVE", ("ACTIVE", None))])
async def test_its_threads_sleep_while_they_wait_unless_the_operator_says_otherwise(
    chosen: str | None, expected: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    else:
        monkeypatch.setenv("OMP_WAIT_POLICY", chosen)
    async with running(small_config(), FakeFactory(tmp_path), in_thread=False) as service:
        found = psutil.Process(engine_pid(service)).environ()
        assert (found["OMP_WAIT_POLICY"], found.get("GOMP_SPINCOUNT")) == expected


def test_it_works_on_the_event_loop_that_serve_replicas_use(tmp_path: Path) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def serve_one() -> None:
        async with running(small_config(), FakeFactory(tmp_path), in_thread=False) as service:
            request = request_of("r", max_tokens=10)
            assert (await answer(service, request)).token_ids() == oracle(request)
            os.kill(engine_pid(service), signal.SIGKILL)
            late = await answer(service, request_of("late", max_tokens=100))
            assert late.end().error is not None

    uvloop.run(serve_one())


async def test_a_killed_engine_ends_every_stream_within_a_second_and_fails_the_check(tmp_path: Path) -> None:
    async with running(small_config(), SlowFactory(tmp_path), in_thread=False) as service:
        streams = [asyncio.ensure_future(answer(service, request_of(f"r{i}", max_tokens=100))) for i in range(10)]
        while service.load().num_running < 4:
            await asyncio.sleep(0.01)
        os.kill(engine_pid(service), signal.SIGKILL)
        async with asyncio.timeout(1.0):
            answers = await asyncio.gather(*streams)
        for answered in answers:
            end = answered.end()
            assert end.finish_reason is FinishReason.ERROR
            assert end.error is not None
            assert end.error.code == "engine_dead"
        with pytest.raises(EngineDead):
            service.check()
        assert (await answer(service, request_of("late"))).end().finish_reason is FinishReason.REJECTED
        assert sample(service, "num_requests_running") == sample(service, "kv_cache_usage_perc") == 0.0
        assert sample(service, "request_success_total", finished_reason="error") == 10


async def test_an_engine_whose_device_is_gone_says_so_and_ends(tmp_path: Path) -> None:
    async with running(
        small_config(), SlowFactory(tmp_path, faults={"num_sound_steps": 5}), in_thread=False
    ) as service:
        answers = await asyncio.gather(*(answer(service, request_of(f"r{i}", max_tokens=100)) for i in range(6)))
        assert {answered.end().error.code for answered in answers if answered.end().error} == {"engine_dead"}  # type: ignore[union-attr]
        pid = engine_pid(service)
        async with asyncio.timeout(5):
            while service.status()["state"] != "dead":
                await asyncio.sleep(0.01)
        with pytest.raises(EngineDead, match="failed"):
            service.check()
    assert not psutil.pid_exists(pid)


async def test_an_engine_that_hangs_counts_as_dead_after_the_stall_timeout(tmp_path: Path) -> None:
    async with running(small_config(stall_timeout_s=1.5), SlowFactory(tmp_path), in_thread=False) as service:
        stream = asyncio.ensure_future(answer(service, request_of("r", max_tokens=100)))
        while not service.load().num_running:
            await asyncio.sleep(0.01)
        os.kill(engine_pid(service), signal.SIGSTOP)
        async with asyncio.timeout(6.0):
            end = (await stream).end()
        assert end.error is not None
        assert end.error.code == "engine_dead"
        with pytest.raises(EngineDead, match="no step"):
            service.check()


async def test_an_idle_engine_is_no_stalled_engine_and_keeps_reporting(tmp_path: Path) -> None:
    async with running(small_config(stall_timeout_s=2.5), FakeFactory(tmp_path), in_thread=False) as service:
        first = service.load().number
        async with asyncio.timeout(10):
            while service.load().number < first + 3:
                await asyncio.sleep(0.05)
        service.check()


async def test_signals_for_the_whole_process_group_leave_the_engine_alone(tmp_path: Path) -> None:
    async with running(small_config(), SlowFactory(tmp_path), in_thread=False) as service:
        stream = asyncio.ensure_future(answer(service, request_of("r", max_tokens=30)))
        while not service.load().num_running:
            await asyncio.sleep(0.01)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine_pid(service), number)
        assert (await stream).end().finish_reason is FinishReason.LENGTH
        service.check()


@pytest.mark.parametrize("killed_by", [signal.SIGKILL, signal.SIGTERM])
def test_the_engine_dies_with_its_parent(tmp_path: Path, killed_by: signal.Signals) -> None:
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from tests.fake_replica import FakeFactory, small_config\n"
        "from replica.service import ReplicaService\n"
        "async def main():\n"
        "    service = await ReplicaService.start(small_config(), replica_id='r', model_name='m',\n"
        "        runner_factory=FakeFactory(Path(sys.argv[1])))\n"
        "    print(service.status()['engine_pid'], flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as parent:
        assert parent.stdout is not None
        engine = psutil.Process(int(parent.stdout.readline()))
        os.kill(engine.pid, signal.SIGSTOP)
        parent.send_signal(killed_by)
        _, alive = psutil.wait_procs([engine], timeout=5.0)
        assert not alive


async def test_a_poison_request_fails_alone_and_the_process_lives(tmp_path: Path) -> None:
    requests = [request_of(f"r{i}", max_tokens=10, first=i) for i in range(3)]
    harmless = {token for request in requests for token in (*request.prompt_ids, *oracle(request))}
    poison_token = min(set(range(90)) - harmless)
    factory = FakeFactory(tmp_path, faults={"poison_token": poison_token})
    async with running(small_config(), factory, in_thread=False) as service:
        poison = request_of("poison", prompt_ids=(1, poison_token))
        *answers, poisoned = await asyncio.gather(*(answer(service, request) for request in (*requests, poison)))
        assert [answered.token_ids() for answered in answers] == [oracle(request) for request in requests]
        error = poisoned.end().error
        assert error is not None
        assert error.code == "step_failed"
        service.check()


@pytest.mark.parametrize("every", [3, 7])
async def test_running_out_of_memory_every_few_steps_gives_the_same_outputs(tmp_path: Path, every: int) -> None:
    factory = FakeFactory(tmp_path, faults={"oom_every": every})
    async with running(small_config(), factory, in_thread=False) as service:
        requests = [request_of(f"r{i}", num_prompt=3 + 7 * i, max_tokens=10, first=i) for i in range(6)]
        answers = await asyncio.gather(*(answer(service, request) for request in requests))
        assert [answered.token_ids() for answered in answers] == [oracle(request) for request in requests]
        await quiet(service)


async def test_two_hundred_aborts_at_random_times_leave_nothing_running(tmp_path: Path) -> None:
    draw = random.Random(5)
    config = small_config(max_num_seqs=8, max_num_batched_tokens=16)
    factory = SlowFactory(tmp_path, faults={"step_s": 0.002})

    async def leave_early(service: ReplicaService, number: int) -> None:
        await asyncio.sleep(draw.uniform(0, 1.0))
        stream = read(service, request_of(f"r{number}", num_prompt=80, max_tokens=40, first=number, n=1 + number % 2))
        try:
            async with asyncio.timeout(draw.uniform(0, 0.3)):
                async for _ in stream:
                    pass
        except TimeoutError:
            await stream.aclose()
        if number % 3 == 0:
            service.abort(f"r{number}")

    async with running(config, factory, in_thread=False) as service:
        await asyncio.gather(*(leave_early(service, number) for number in range(200)))
        await quiet(service)
        assert service.load().num_blocks_free + service.load().num_blocks_cached == service.load().num_blocks_total
        assert service.status()["num_streams"] == 0
        num_aborted = sample(service, "request_success_total", finished_reason="abort")
        assert num_aborted > 100, "too few were aborted: the test shows nothing"
        canary = request_of("canary", max_tokens=10)
        assert (await answer(service, canary)).token_ids() == oracle(canary)


async def test_a_consumer_that_does_not_read_does_not_stop_the_engine(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path), in_thread=False) as service:
        idle = read(service, request_of("idle", max_tokens=100))
        await anext(idle)
        other = request_of("other", max_tokens=60, first=3)
        assert (await answer(service, other)).token_ids() == oracle(other)
        await quiet(service)
        rest = [event async for message in idle for event in message.events]
        assert sum(len(event.token_ids) for event in rest) == 100


async def test_an_event_loop_that_is_blocked_does_not_stop_the_engine(tmp_path: Path) -> None:
    async with running(small_config(), FakeFactory(tmp_path), in_thread=False) as service:
        stream = read(service, request_of("r", max_tokens=100))
        await anext(stream)
        before = service.load().number
        time.sleep(1.0)
        await asyncio.sleep(0.05)
        assert service.load().num_running == 0
        assert service.load().number > before + 50
        rest = [event async for message in stream for event in message.events]
        assert sum(len(event.token_ids) for event in rest) == 100


async def test_closing_while_a_step_hangs_kills_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "_EXIT_GRACE_S", 0.5)
    async with running(small_config(), SlowFactory(tmp_path), in_thread=False) as service:
        pid = engine_pid(service)
        stream = asyncio.ensure_future(answer(service, request_of("r", max_tokens=100)))
        while not service.load().num_running:
            await asyncio.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)
    assert not psutil.pid_exists(pid)
    error = (await stream).end().error
    assert error is not None
    assert error.code == "unavailable"
