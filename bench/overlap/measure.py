"""Seconds a step of an engine that only decodes, on a device of a given speed, planning ahead or not."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median

from bench.overlap.device import SleepingDevice
from replica.config import EngineConfig, SchedulerConfig
from replica.engine import Engine
from replica.frames import pack
from replica.model.api import ModelShape
from replica.request import GenerationRequest, SamplingParams

_PROMPT_TOKENS = 64
_BLOCK_SIZE = 16
_MAX_TOKENS = 4000
_VOCAB_SIZE = 49_152


@dataclass(frozen=True, slots=True)
class Case:
    """Milliseconds a step, medians of the rounds. `host_ms`: on a device that takes no time: all that the engine's
    process does for a step but for the model's own part (building inputs, launching kernels)."""

    num_running: int
    device_ms: float
    host_ms: float
    waiting_ms: float
    ahead_ms: float

    @property
    def gain(self) -> float:
        return self.waiting_ms / self.ahead_ms

    @property
    def expected_gain(self) -> float:
        """Of a device that never pauses while there is something to do, or of a host that doesn't."""
        return (self.host_ms + self.device_ms) / max(self.host_ms, self.device_ms)


def measure(num_running: int, device_ms: float, *, rounds: int, steps: int) -> Case:
    """The three engines take turns, so that what the machine does meanwhile hits them alike."""
    kinds = ((0.0, False), (device_ms / 1e3, False), (device_ms / 1e3, True))
    times: list[list[float]] = [[], [], []]
    for _ in range(rounds):
        for (step_s, is_async), taken in zip(kinds, times, strict=True):
            taken.append(_step_ms(num_running, step_s, steps, is_async=is_async))
    return Case(num_running, device_ms, *map(median, times))


def _step_ms(num_running: int, step_s: float, num_steps: int, *, is_async: bool) -> float:
    device = SleepingDevice(_shape(num_running), step_s, is_async=is_async)
    engine = _engine(num_running, device)
    while engine.step().stats.num_decode_tokens != num_running:
        pass  # prefills
    gc.collect()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        pack([engine.step()])  # as the engine's process hands it over
    taken_s = time.perf_counter() - began_s
    device.close()
    return taken_s / num_steps * 1e3


def _shape(num_running: int) -> ModelShape:
    length = _PROMPT_TOKENS + _MAX_TOKENS
    return ModelShape(num_running * (length // _BLOCK_SIZE + 1), _BLOCK_SIZE, _VOCAB_SIZE, length, eos_token_ids=(2,))


def _engine(num_running: int, device: SleepingDevice) -> Engine:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=num_running, max_num_batched_tokens=8192))
    engine = Engine(config, device, clock=time.monotonic, random_seed=lambda: 0, replica_id="bench", epoch="0")
    sampling = SamplingParams(max_tokens=_MAX_TOKENS, ignore_eos=True)
    for number in range(num_running):
        prompt = tuple((number * 7919 + place * place) % _VOCAB_SIZE for place in range(_PROMPT_TOKENS))
        engine.submit(GenerationRequest(str(number), prompt, sampling), time.monotonic())
    return engine
