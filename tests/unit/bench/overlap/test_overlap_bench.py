"""The bench runs, says what it measured, and its device does what a device does."""

from __future__ import annotations

import json

import pytest

from bench.overlap.__main__ import main
from bench.overlap.device import SleepingDevice
from bench.overlap.measure import Case
from replica.request import FinishReason
from tests.fake_replica import EngineDriver, fake_shape, request_of, small_config


def test_the_last_line_is_a_document_with_a_case_for_each_width_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--running", "2", "3", "--device-ms", "0.5", "1", "--rounds", "1", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cases = json.loads(lines[-1])["cases"]
    assert [(case["num_running"], case["device_ms"]) for case in cases] == [(2, 0.5), (2, 1), (3, 0.5), (3, 1)]
    assert len(lines) == 1 + len(cases) + 1
    assert min(case["waiting_ms"] - case["device_ms"] for case in cases) > 0


@pytest.mark.parametrize("wrong", [["--steps", "0"], ["--device-ms", "0"], ["--running", "0"]])
def test_a_size_that_measures_nothing_is_refused(wrong: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(wrong)


def test_the_gain_is_that_of_the_longer_part() -> None:
    case = Case(64, device_ms=6.0, host_ms=2.0, waiting_ms=8.4, ahead_ms=6.3)
    assert case.gain == pytest.approx(4 / 3)
    assert case.expected_gain == pytest.approx(4 / 3)


@pytest.mark.parametrize("is_async", [False, True])
def test_an_engine_ends_on_the_device_as_on_any_runner(is_async: bool) -> None:
    device = SleepingDevice(fake_shape(), 0.0005, is_async=is_async)
    driver = EngineDriver(small_config(), device)
    driver.submit(*(request_of(f"r{i}", first=i, max_tokens=5) for i in range(6)))
    driver.run()
    device.close()
    assert {tuple(tokens) for tokens in driver.tokens.values()} == {(1,) * 5}
    assert {reason for ends in driver.ends.values() for reason in ends} == {FinishReason.LENGTH}
