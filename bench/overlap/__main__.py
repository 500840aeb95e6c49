"""`python -m bench.overlap`: what it gains to plan the next step while the device works."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from bench.overlap.measure import Case, measure

_HEAD = "running  device ms  host ms | waiting ms  ahead ms | gain  (host + device) / the longer"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.overlap", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[64, 256], help="decodes in a step, one case each")
    parser.add_argument("--device-ms", type=float, nargs="+", default=[1, 3, 10, 30], help="what a step takes there")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each engine, alternating; medians are shown")
    parser.add_argument("--steps", type=int, default=100, help="steps a round")
    options = parser.parse_args(argv)
    if min(options.rounds, options.steps, *options.running) < 1 or min(options.device_ms) <= 0:
        parser.error("counts must be at least 1, times above 0")
    cases = [
        measure(num_running, device_ms, rounds=options.rounds, steps=options.steps)
        for num_running in options.running
        for device_ms in options.device_ms
    ]
    print("\n".join([_HEAD, *map(_line, cases)]))
    found = [asdict(case) | {"gain": case.gain, "expected_gain": case.expected_gain} for case in cases]
    print(json.dumps({"bench": "overlap", "unit": "ms a step, median of rounds", "cases": found}))
    return 0


def _line(case: Case) -> str:
    return (
        f"{case.num_running:7}  {case.device_ms:9g}  {case.host_ms:7.2f} | {case.waiting_ms:10.2f}  "
        f"{case.ahead_ms:8.2f} | {case.gain:4.2f}  {case.expected_gain:4.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
