"""A step that failed: find the rows at fault, so that their neighbours' results are kept.

The rule: a plan that raises is run again in two halves, each of which may fail and be halved in turn; a single row
that raises is a suspect and fails alone. Running rows again is harmless (same KV, same draws). When every row of a
plan failed, one harmless row decides whether the requests or the model are broken: if that row fails too, nothing can
be served any more and `EngineDead` is raised. One poison row among n costs about 2 log2(n) extra forwards.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from replica.errors import EngineDead, StepFailed
from replica.model.api import ModelRunner, OutOfDeviceMemory
from replica.request import SamplingParams
from replica.scheduler.plan import PENDING_TOKEN, JoinedSequence, StepPlan, StepResult

_log = logging.getLogger(__name__)


def run_step(runner: ModelRunner, plan: StepPlan) -> StepResult:
    """Runs a plan; rows that fail alone end up in `failed_rows`. Raises `OutOfDeviceMemory` (nothing may be committed)
    and `EngineDead` (not even a harmless row runs)."""
    try:
        return runner.submit(plan).result()
    except (OutOfDeviceMemory, EngineDead):
        raise
    except Exception:  # noqa: BLE001 - whatever a forward raises is settled here
        _log.exception("step %d failed with %d rows; looking for the rows at fault", plan.step, len(plan))
    token_ids = [PENDING_TOKEN] * len(plan)
    failed: dict[int, str] = {}
    rows = list(range(len(plan)))
    for half in _halves(rows) if len(rows) > 1 else [rows]:
        _run_rows(runner, plan, half, token_ids, failed)
    if len(failed) == len(plan):
        _probe(runner, plan)
    return StepResult(plan.step, token_ids, failed)


def _run_rows(
    runner: ModelRunner, plan: StepPlan, rows: list[int], token_ids: list[int], failed: dict[int, str]
) -> None:
    """Fills in the tokens and failures of `rows`."""
    try:
        result = runner.submit(plan.select(rows)).result()
    except (OutOfDeviceMemory, EngineDead):
        raise
    except Exception as error:  # noqa: BLE001 - see run_step
        if len(rows) == 1:
            _log.error("sequence %d fails alone: %s", plan.seq_ids[rows[0]], type(error).__name__)
            failed[rows[0]] = StepFailed.code
            return
        for half in _halves(rows):
            _run_rows(runner, plan, half, token_ids, failed)
        return
    for position, row in enumerate(rows):
        token_ids[row] = result.token_ids[position]
    failed.update({rows[position]: code for position, code in result.failed_rows.items()})


def _probe(runner: ModelRunner, plan: StepPlan) -> None:
    """Runs one harmless token in the place of the plan's first row, whose sequence fails anyway, so that its block is
    nobody's any more. Raises `EngineDead` when even that fails."""
    row = plan.select([0])
    joined = JoinedSequence(row.seq_ids[0], row.lanes[0], SamplingParams(max_tokens=1, temperature=0.0), 0, 0)
    harmless = replace(
        row,
        num_tokens=[1],
        token_ids=[0],
        samples=[False],
        num_logits=[0],
        token_masks={},
        joined=[joined],
    )
    try:
        runner.submit(harmless).result()
    except (OutOfDeviceMemory, EngineDead):
        raise
    except Exception as error:
        raise EngineDead("the model can't compute any more") from error


def _halves(rows: list[int]) -> list[list[int]]:
    middle = (len(rows) + 1) // 2
    return [rows[:middle], rows[middle:]]
