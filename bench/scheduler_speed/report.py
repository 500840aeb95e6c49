"""The numbers as a table for people and as one JSON document, with each goal met or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.scheduler_speed.measure import CaseTimes, median, spread
from bench.scheduler_speed.workload import StepTimes

MAX_SHARE_OF_PEER = {16: 0.5, 256: 0.1, 1024: 0.1}
"""Running decodes -> our time as a share of the peer's, at most."""

MAX_STEP_US = {1024: 1000.0}
MAX_WAITING_SLOWDOWN = 1.15
"""Cost with many waiting over cost with few or none, of the quickest round of each: whatever else a machine does only
makes rounds longer."""

MAX_BYTES_PER_WAITING = 2000.0

_STEP: Callable[[StepTimes], float] = lambda times: times.step_us  # noqa: E731
_COLUMNS = "running  waiting  for    |   plan  commit    both  spread  report |    peer  spread | ours/peer"


def table(cases: list[CaseTimes]) -> list[str]:
    """One line a case; times are medians of the rounds in microseconds a step."""
    return [_COLUMNS, *map(_line, cases)]


def _line(case: CaseTimes) -> str:
    ours = case.ours
    plan, commit, report = (
        median(ours, of) for of in (lambda t: t.plan_us, lambda t: t.commit_us, lambda t: t.report_us)
    )
    line = (
        f"{case.workload.num_running:7}  {case.workload.num_waiting:7}  {case.workload.blocked_by:6} | "
        f"{plan:6.0f}  {commit:6.0f}  "
        f"{median(ours, _STEP):6.0f}  {spread(ours):5.0%}   {report:6.0f} |"
    )
    if not case.peer:
        return f"{line}       -       - |         -"
    return f"{line} {median(case.peer, _STEP):7.0f}  {spread(case.peer):5.0%}  | {_share(case):9.3f}"


def document(cases: list[CaseTimes], bytes_per_waiting: float, peer_version: str | None) -> dict[str, Any]:
    """All numbers; `goals` maps each goal to whether it was met, None where it wasn't measured."""
    return {
        "bench": "scheduler",
        "unit": "us per plan + commit, median of rounds",
        "peer": None if peer_version is None else f"vllm {peer_version}",
        "cases": [_case(case) for case in cases],
        "bytes_per_waiting_request": round(bytes_per_waiting),
        "goals": goals(cases, bytes_per_waiting),
    }


def _case(case: CaseTimes) -> dict[str, Any]:
    return {
        "running": case.workload.num_running,
        "waiting": case.workload.num_waiting,
        "waiting_for": case.workload.blocked_by,
        "ours": _side(case.ours),
        "peer": _side(case.peer) if case.peer else None,
        "ours_over_peer": round(_share(case), 4) if case.peer else None,
    }


def _side(times: list[StepTimes]) -> dict[str, float]:
    return {
        "plan_us": round(median(times, lambda t: t.plan_us), 1),
        "commit_us": round(median(times, lambda t: t.commit_us), 1),
        "report_us": round(median(times, lambda t: t.report_us), 1),
        "step_us": round(median(times, _STEP), 1),
        "spread": round(spread(times), 3),
    }


def _share(case: CaseTimes) -> float:
    return median(case.ours, _STEP) / median(case.peer, _STEP)


def goals(cases: list[CaseTimes], bytes_per_waiting: float) -> dict[str, bool | None]:
    """Each goal, met by every case that it is about (None: there is no such case, or no peer)."""
    met: dict[str, bool | None] = {}
    for width, share in MAX_SHARE_OF_PEER.items():
        met[f"at most {share:g} of the peer at {width}"] = _all(
            _share(case) <= share for case in cases if case.workload.num_running == width and case.peer
        )
    for width, limit_us in MAX_STEP_US.items():
        met[f"under {limit_us:g} us at {width}"] = _all(
            median(case.ours, _STEP) < limit_us for case in cases if case.workload.num_running == width
        )
    met["cost flat in the number waiting"] = _all(
        min(map(_STEP, many.ours)) <= MAX_WAITING_SLOWDOWN * min(map(_STEP, few.ours))
        for few in cases
        for many in cases
        if few.workload.num_running == many.workload.num_running
        and few.workload.blocked_by == many.workload.blocked_by
        and few.workload.num_waiting < many.workload.num_waiting
    )
    met[f"under {MAX_BYTES_PER_WAITING:g} bytes a waiting request"] = bytes_per_waiting < MAX_BYTES_PER_WAITING
    return met


def _all(verdicts: Any) -> bool | None:
    found = list(verdicts)
    return all(found) if found else None
