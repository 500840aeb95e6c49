"""Bugs put into the scheduler on purpose: each a change of a few words in one function, for as long as a test wants.

The function's source is changed and compiled, and its code replaced in place, so that every module that has imported it
runs the broken copy. Words that are no longer there fail loudly: the bug must then be planted anew.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from replica.scheduler import admission, planning, preemption
from replica.scheduler.block_pool import BlockPool
from replica.scheduler.block_tables import BlockTables
from replica.scheduler.waiting_queue import WaitingQueue


@dataclass(frozen=True)
class Edit:
    """In the source of `function`, `says` (exactly once there) becomes `lies`."""

    function: Callable[..., Any]
    says: str
    lies: str


class MovedText(Exception):
    """A function doesn't say any more what a planted bug changes."""


BUGS: dict[str, tuple[Edit, ...]] = {
    "no owed": (Edit(admission._fits, "    if reserve_full:\n", "    if False:\n"),),
    "victim to the back": (
        Edit(
            preemption.return_to_queue,
            "state.waiting.add_returned(seq)",
            "seq.queue_key = (seq.queue_key[0] + 1e9, seq.queue_key[1]); state.waiting.add_returned(seq)",
        ),
    ),
    "hash of a half block": (
        Edit(
            BlockTables.register_computed,
            "seq.num_computed // self.block_size",
            "max(seq.num_computed, min(seq.num_computed + self.block_size - 1, seq.input_len)) // self.block_size",
        ),
    ),
    "hit of the last token": (Edit(BlockTables.lookup, "(len(seq.tokens) - 1) //", "len(seq.tokens) //"),),
    "free twice": (
        Edit(BlockTables.release, "self.pool.release(seq.block_table)", "self.pool.release(seq.block_table * 2)"),
        Edit(
            BlockPool.release,
            'assert self._ref_counts[block] >= 0, "a block was released twice"',
            "self._ref_counts[block] = max(0, self._ref_counts[block])",
        ),
    ),
    "budget off by one": (
        Edit(
            planning.plan_step,
            "StepDraft(state.config.max_num_batched_tokens,",
            "StepDraft(state.config.max_num_batched_tokens + 1,",
        ),
    ),
    "skip without bound": (Edit(WaitingQueue.first_overdue, "return _first(self._overdue)", "return None"),),
    "watermark on running": (
        Edit(
            preemption.make_room,
            "while state.tables.pool.num_free == 0:",
            "while state.tables.pool.num_free <= int(state.config.watermark * state.shape.num_blocks):",
        ),
        Edit(
            planning._plan_decodes,
            "if len(needy) <= state.tables.pool.num_free:",
            "if len(needy) <= state.tables.pool.num_free - int(state.config.watermark * state.shape.num_blocks):",
        ),
    ),
}


@contextmanager
def planted(edits: tuple[Edit, ...]) -> Iterator[None]:
    """The broken functions until the end of the block. Raises MovedText."""
    broken = [(edit.function, _changed(edit)) for edit in edits]
    sound = [function.__code__ for function, _ in broken]
    try:
        for function, code in broken:
            function.__code__ = code
        yield
    finally:
        for (function, _), code in zip(broken, sound, strict=True):
            function.__code__ = code


def _changed(edit: Edit) -> Any:
    function = edit.function
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(edit.says) != 1:
        raise MovedText(f"{function.__module__}.{function.__qualname__} doesn't say {edit.says!r} once any more")
    tree = ast.parse(source.replace(edit.says, edit.lies))
    flags = __future__.annotations.compiler_flag
    made: dict[str, Any] = {}
    exec(compile(tree, f"<broken {function.__qualname__}>", "exec", flags=flags), function.__globals__, made)
    return made[function.__name__].__code__
