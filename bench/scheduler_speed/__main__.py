"""`python -m bench.scheduler_speed`: our scheduler's time a step, beside a peer's, and its memory a waiting request.

Exit code 1 when a goal is not met; a goal that wasn't measured (no peer, other widths) doesn't count.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from bench.peers.driver import DriverFailed
from bench.scheduler_speed.measure import CaseTimes, measure
from bench.scheduler_speed.own_scheduler import OwnScheduler
from bench.scheduler_speed.peer import PeerProcess, peer_process
from bench.scheduler_speed.report import document, table
from bench.scheduler_speed.waiting_memory import bytes_per_waiting_request
from bench.scheduler_speed.workload import MAX_MODEL_LEN, PROMPT_TOKENS, Workload, unsettle_memory

_MAX_STEPS = MAX_MODEL_LEN - 2 * PROMPT_TOKENS
"""A case's steps, all rounds together: no sequence may end within them."""
_FEW_WAITING = 2


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    process = peer_process(options.peer_python) if options.peer_python else nullcontext(None)
    try:
        with process as peer:
            return _run(options, peer)
    except DriverFailed as error:
        print(f"bench-scheduler: the peer failed: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, peer: PeerProcess | None) -> int:
    if peer is None:
        print("No --peer-python: our side alone is measured.")
    else:
        print(f"Our scheduler beside that of vllm {peer.version}, in turn.")
    try:
        cases = _measured(options, peer)
        _progress("memory of waiting requests")
        weight = bytes_per_waiting_request(options.memory_requests)
    finally:
        unsettle_memory()
    _progress("")
    print("\n".join(table(cases)))
    print("us a step, medians of the rounds; report: stats and load report, as the engine asks for after each step")
    print(f"{weight:.0f} bytes a waiting request, beside its {PROMPT_TOKENS} or more prompt tokens")
    found = document(cases, weight, None if peer is None else peer.version)
    for goal, met in found["goals"].items():
        print(f"{'not measured' if met is None else 'met' if met else 'NOT MET':12}  {goal}")
    print(json.dumps(found))
    return 1 if False in found["goals"].values() else 0


def _measured(options: argparse.Namespace, peer: PeerProcess | None) -> list[CaseTimes]:
    """Every width with every number waiting for a place, beside the peer; then, ours alone, waiting for blocks, where
    two wait at least: one that is looked at in vain and one that might pass it."""
    ours, rounds, steps = OwnScheduler(), options.rounds, options.steps
    cases = [
        measure(Workload(width, waiting), ours, peer, rounds=rounds, steps=steps, progress=_progress)
        for width in options.widths
        for waiting in options.waiting
    ]
    for_blocks = sorted({max(_FEW_WAITING, waiting) for waiting in options.waiting})
    cases += [
        measure(Workload(width, waiting, "blocks"), ours, None, rounds=rounds, steps=steps, progress=_progress)
        for width in options.widths
        for waiting in for_blocks
        if len(for_blocks) > 1
    ]
    return cases


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench-scheduler", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--peer-python", default="", help="interpreter of an environment with vllm; none: ours alone")
    parser.add_argument("--widths", type=_counts, default="16,256,1024", help="running decodes, one case each")
    parser.add_argument("--waiting", type=_counts, default="0,10000", help="requests waiting, one case each")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each side a case, alternating")
    parser.add_argument("--steps", type=int, default=32, help="steps a round; two blocks' worth by default")
    parser.add_argument("--memory-requests", type=int, default=20_000, help="waiting requests that are weighed")
    options = parser.parse_args(argv)
    if min(options.rounds, options.steps, options.memory_requests, *options.widths) < 1 or min(options.waiting) < 0:
        parser.error("counts must be at least 1 (waiting: at least 0)")
    if max(options.widths) > 4096:
        parser.error("at most 4096 running decodes")
    if (options.rounds + 1) * options.steps > _MAX_STEPS:
        parser.error(f"(rounds + 1) * steps must be at most {_MAX_STEPS}: nobody may end meanwhile")
    return options


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _progress(line: str) -> None:
    """The newest line only, on the terminal of whoever waits."""
    end = "" if sys.stderr.isatty() and line else "\n"
    if line or sys.stderr.isatty():
        print(f"\r\x1b[K{line}" if sys.stderr.isatty() else line, end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
