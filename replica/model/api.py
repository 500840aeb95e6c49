"""The contract between an engine and a model: torch-free, so that schedulers and tests never load torch.

`replica/model/runner.py` is the real one, `replica/model/fake.py` the shipped double behind the same contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from replica.scheduler.plan import StepPlan, StepResult

Progress = Callable[[str], None]
"""Takes a line about loading, for a person who waits."""

ERROR_PREFIX = "error: "
"""Begins the line that says why preparing a model in a process of its own failed; its other lines are progress."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the scheduler must know about a loaded model: lengths in tokens, `block_size` is the attention backend's.

    `vocab_size` is the width of the logits too. `kv_bytes_per_token` is for people and status pages.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    kv_bytes_per_token: int = 0

    @property
    def max_seq_len(self) -> int:
        """Tokens of the longest sequence that model and pool allow; the last token needs no slot."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)


class OutOfDeviceMemory(RuntimeError):
    """A step didn't fit in device memory; nothing was committed and the same plan may be tried again smaller."""


class InFlightStep(Protocol):
    """A step given to the device. `result` blocks until it is done; it raises what the forward raised."""

    def result(self) -> StepResult: ...


class ModelRunner(Protocol):
    """Runs one ragged forward a step. Owns weights, KV tensors and per-lane sampling state; schedules nothing.

    `is_async`: `submit` returns before the device is done, so that the next plan is made and submitted meanwhile, and
    `result` waits for its own step only. Steps run in the order of submission, each result has lists of its own, and a
    result may never be asked for. `submit` has read all of the plan, also the live block tables, when it returns.
    Running the same plan again (after an exception) writes the same KV and draws the same tokens.
    Raises `OutOfDeviceMemory` from `submit` or `result`; any other exception means that some row of the plan is poison.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def is_async(self) -> bool: ...

    def submit(self, plan: StepPlan) -> InFlightStep: ...

    def close(self) -> None: ...
