"""A naive model of what a scheduler may do, kept only from what crosses its border: plans, outcomes, calls.

It knows nothing of queues, budgets' shares or block pools. Every plan is checked against the laws as it appears.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from replica.request import FinishReason, GenerationRequest
from replica.scheduler.plan import PENDING_TOKEN, StepOutcome, StepPlan
from replica.scheduler.scheduler import Scheduler


@dataclass
class Book:
    """One sequence as the outside sees it. `scheduled`: computed if all plans in flight succeed."""

    request: GenerationRequest
    tokens: list[int]
    scheduled: int = 0
    ever_computed: int = 0
    preemptions: int = 0
    received: list[int] = field(default_factory=list)
    end: FinishReason | None = None


@dataclass
class Ledger:
    scheduler: Scheduler
    block_size: int
    books: dict[int, Book] = field(default_factory=dict)
    live: dict[int, Book] = field(default_factory=dict)
    num_received: int = 0
    plans: dict[int, tuple[StepPlan, dict[int, int]]] = field(default_factory=dict)
    admitted: set[int] = field(default_factory=set)

    def arrived(self, seq_id: int, request: GenerationRequest) -> None:
        book = Book(request, [*request.prompt_ids, *request.prior_output_ids])
        self.books[seq_id] = self.live[seq_id] = book

    def ended(self, seq_id: int, reason: FinishReason) -> None:
        assert self.books[seq_id].end is None, f"sequence {seq_id} ended twice"
        self.books[seq_id].end = reason
        del self.live[seq_id]
        self.admitted.discard(seq_id)

    def planned(self, plan: StepPlan) -> None:
        self._notice_preemptions()
        config = self.scheduler.config
        assert len(plan.token_ids) <= config.max_num_batched_tokens
        assert len(set(plan.seq_ids)) == len(plan.seq_ids), "a sequence has two rows"
        assert len(set(plan.lanes)) == len(plan.lanes), "two rows share a lane"
        joined = [j.seq_id for j in plan.joined if j.seq_id not in self.admitted]
        if joined:
            assert len(plan.seq_ids) <= config.max_num_seqs, "admitted above max_num_seqs"
        self.admitted.update(joined)
        self._check_arrival_order(joined)
        offset = recomputed = 0
        stays = {}
        for row, seq_id in enumerate(plan.seq_ids):
            chunk = plan.token_ids[offset : offset + plan.num_tokens[row]]
            offset += plan.num_tokens[row]
            recomputed += self._check_row(plan, row, chunk, seq_id in joined)
            stays[row] = self.books[seq_id].preemptions
        assert recomputed == plan.num_recomputed_tokens
        assert plan.num_prefill_tokens + plan.num_decode_tokens + recomputed == len(plan.token_ids)
        self._check_writes(plan)
        self._check_budget_is_used(plan)
        self.plans[plan.step] = (plan, stays)

    def committed(self, plan: StepPlan, outcome: StepOutcome) -> None:
        del self.plans[plan.step]
        live = [row for row, seq_id in enumerate(plan.seq_ids) if self.books[seq_id].end is None]
        for row in live:
            book = self.books[plan.seq_ids[row]]
            book.ever_computed = max(book.ever_computed, plan.starts[row] + plan.num_tokens[row])
        expected = [plan.seq_ids[row] for row in live if plan.samples[row]]
        failed = [s for s, r in zip(outcome.seq_ids, outcome.finish_reasons, strict=True) if r is FinishReason.ERROR]
        assert [s for s in outcome.seq_ids if s not in failed] == [s for s in expected if s not in failed]
        news = zip(outcome.seq_ids, outcome.token_ids, outcome.finish_reasons, strict=True)
        for seq_id, token, reason in news:
            book = self.books[seq_id]
            if reason is not FinishReason.ERROR:
                assert token != PENDING_TOKEN
                book.tokens[book.tokens.index(PENDING_TOKEN)] = token
                book.received.append(token)
                self.num_received += 1
            if reason is not None:
                self.ended(seq_id, reason)

    def rolled_back(self, plan: StepPlan) -> None:
        for step in sorted((s for s in self.plans if s >= plan.step), reverse=True):
            undone, stays = self.plans.pop(step)
            for row, seq_id in enumerate(undone.seq_ids):
                book = self.books[seq_id]
                if book.end is not None:
                    continue
                if undone.samples[row]:
                    del book.tokens[undone.starts[row] + undone.num_tokens[row] :]
                if book.preemptions == stays[row]:
                    book.scheduled = undone.starts[row]
                    self.admitted -= {seq_id} - self._running_ids()

    def check_finished(self) -> None:
        """After everything ended: nothing is held, nothing was lost."""
        assert all(book.end is not None for book in self.books.values())
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        load = self.scheduler.load()
        assert load.num_blocks_free + load.num_blocks_cached == load.num_blocks_total

    def _running_ids(self) -> set[int]:
        return {seq.seq_id for seq in self.scheduler._state.batch.running}

    def _notice_preemptions(self) -> None:
        for seq_id, book in self.live.items():
            if book.preemptions != self.scheduler.timings(seq_id).num_preemptions:
                book.preemptions = self.scheduler.timings(seq_id).num_preemptions
                book.scheduled = 0
                self.admitted.discard(seq_id)

    def _check_row(self, plan: StepPlan, row: int, chunk: list[int], joins: bool) -> int:
        book = self.books[plan.seq_ids[row]]
        start, end = plan.starts[row], plan.starts[row] + len(chunk)
        assert book.end is None, "an ended sequence was planned"
        if joins:
            assert start % self.block_size == 0, "a hit of half a block"
            assert start < len(book.tokens), "a hit of the last token"
            book.ever_computed = max(book.ever_computed, start)
        else:
            assert start == book.scheduled, "computed tokens were lost or skipped without a preemption"
        assert chunk and chunk == book.tokens[start:end]
        assert plan.samples[row] == (end == len(book.tokens))
        assert plan.num_logits[row] == int(plan.samples[row])
        assert plan.output_index[row] == len(book.tokens) - len(book.request.prompt_ids)
        assert len(plan.block_tables[row]) * self.block_size >= end, "a position without a block"
        book.scheduled = end
        if plan.samples[row]:
            book.tokens.append(PENDING_TOKEN)
        return max(0, min(end, book.ever_computed) - start)

    def _check_arrival_order(self, joined: list[int]) -> None:
        """Nobody enters past one that arrived earlier, unless a setting says so."""
        config = self.scheduler.config
        may_pass = config.max_long_partial_prefills is not None or config.kv_bypass_s > 0
        if joined and config.policy == "fcfs" and not may_pass:
            waiting = [seq_id for seq_id in self.live if seq_id not in self.admitted]
            assert max(joined) < min(waiting, default=max(joined) + 1), "somebody was passed"

    def _check_writes(self, plan: StepPlan) -> None:
        """No block that is written in this step is in anybody else's table."""
        tables = {seq.seq_id: seq.block_table for seq in self.scheduler._state.batch.running}
        tables.update(zip(plan.seq_ids, plan.block_tables, strict=True))
        users: dict[int, int] = {}
        for table in tables.values():
            for block in table:
                users[block] = users.get(block, 0) + 1
        for row, start in enumerate(plan.starts):
            first, last = start // self.block_size, (start + plan.num_tokens[row] - 1) // self.block_size
            for block in plan.block_tables[row][first : last + 1]:
                assert users[block] == 1, "a block is written while another sequence uses it"

    def _check_budget_is_used(self, plan: StepPlan) -> None:
        if len(plan.token_ids) == self.scheduler.config.max_num_batched_tokens:
            return
        pool = self.scheduler.block_pool
        for row, samples in enumerate(plan.samples):
            end = plan.starts[row] + plan.num_tokens[row]
            has_slot = pool.num_free > 0 or len(plan.block_tables[row]) * self.block_size > end
            assert samples or not has_slot, "budget was left while a planned sequence could use it"
