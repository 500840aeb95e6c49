"""A naive model of what a scheduler may do, kept only from what crosses its border: plans, outcomes, calls.

It knows nothing of queues or budgets' shares. Every plan is checked against the laws as it appears:

    1 budgets are kept                             6 what fits alone finishes; the oldest makes progress
    2 computed falls only by preemption            7 arrival order, but for the bounded exceptions
    3 blocks are conserved                         8 tokens don't depend on neighbours
    4 a block in use is nobody else's              9 abort is idempotent
    5 one terminal event each                     10 no budget is left that a planned sequence could use

3 is `check_invariants`, 8 and 9 are checked in `World`. Rules of admission and preemption that no law names are called
rules here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil

from replica.request import FinishReason, GenerationRequest
from replica.scheduler.block_hash import block_hash, root_hash
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
    arrived_at_s: float = 0.0
    passed_since_s: float | None = None
    chain: list[bytes] = field(default_factory=list)

    @property
    def demand(self) -> int:
        """Tokens of prompt and output, at most."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@dataclass
class Before:
    """What a plan found: free blocks, blocks that running sequences could take in it, and who ran."""

    now_s: float
    num_free: int
    num_wanted: int
    running: list[int]


@dataclass
class Ledger:
    scheduler: Scheduler
    block_size: int
    books: dict[int, Book] = field(default_factory=dict)
    live: dict[int, Book] = field(default_factory=dict)
    num_received: int = 0
    num_preemptions: int = 0
    before: Before = field(default_factory=lambda: Before(0.0, 0, 0, []))
    plans: dict[int, tuple[StepPlan, dict[int, int]]] = field(default_factory=dict)
    admitted: set[int] = field(default_factory=set)
    names: dict[bytes, list[int]] = field(default_factory=dict)

    def arrived(self, seq_id: int, request: GenerationRequest, now_s: float = 0.0) -> None:
        book = Book(request, [*request.prompt_ids, *request.prior_output_ids], arrived_at_s=now_s)
        self.books[seq_id] = self.live[seq_id] = book

    def ended(self, seq_id: int, reason: FinishReason) -> None:
        assert self.books[seq_id].end is None, f"law 5: sequence {seq_id} ended twice"
        self.books[seq_id].end = reason
        del self.live[seq_id]
        self.admitted.discard(seq_id)

    def before_plan(self, now_s: float) -> None:
        """Call it, then plan, then `planned` or `not_planned`."""
        self._notice_preemptions()
        state, size = self.scheduler._state, self.block_size
        wanted = 0
        for seq in state.batch.running:
            reach = seq.num_scheduled + min(seq.gap, self.scheduler.config.max_num_batched_tokens)
            wanted += max(0, -(-reach // size) - len(seq.block_table))
        running = [seq.seq_id for seq in state.batch.running]
        self.before = Before(now_s, self.scheduler.block_pool.num_free, wanted, running)

    def not_planned(self) -> None:
        self._check_preemptions(self._notice_preemptions())
        assert (
            not self.before.running or self._blocks_come_back() or not self.scheduler.config.enable_chunked_prefill
        ), "law 6: somebody runs and nothing is planned"

    def planned(self, plan: StepPlan) -> None:
        preempted = self._notice_preemptions()
        config = self.scheduler.config
        assert len(plan.token_ids) <= config.max_num_batched_tokens, "law 1: more tokens than the budget"
        assert len(set(plan.seq_ids)) == len(plan.seq_ids), "a sequence has two rows"
        assert len(set(plan.lanes)) == len(plan.lanes), "two rows share a lane"
        joined = [j.seq_id for j in plan.joined if j.seq_id not in self.admitted]
        if joined:
            assert len(plan.seq_ids) <= config.max_num_seqs, "law 1: admitted above max_num_seqs"
            assert not preempted, "rule 3: somebody entered in a step that preempted"
        self.admitted.update(joined)
        self._check_arrival_order(joined)
        offset = recomputed = 0
        stays = {}
        for row, seq_id in enumerate(plan.seq_ids):
            chunk = plan.token_ids[offset : offset + plan.num_tokens[row]]
            offset += plan.num_tokens[row]
            recomputed += self._check_row(plan, row, chunk, seq_id in joined)
            stays[row] = self.books[seq_id].preemptions
        assert recomputed == plan.num_recomputed_tokens, "recomputed tokens are miscounted"
        assert plan.num_prefill_tokens + plan.num_decode_tokens + recomputed == len(plan.token_ids)
        self._check_writes(plan)
        self._check_budget_is_used(plan)
        self._check_preemptions(preempted)
        self._check_runners(plan)
        self._check_promises(plan, joined)
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

    def tokens_named(self, content: bytes) -> list[int] | None:
        """The tokens of the full block that has this hash in some sequence's chain."""
        if content not in self.names:
            for book in self.books.values():
                self._extend_chain(book)
        return self.names.get(content)

    def check_finished(self) -> None:
        """After everything ended: nothing is held, nothing was lost."""
        assert all(book.end is not None for book in self.books.values())
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        load = self.scheduler.load()
        assert load.num_blocks_free + load.num_blocks_cached == load.num_blocks_total

    def _extend_chain(self, book: Book) -> None:
        size = self.block_size
        while PENDING_TOKEN not in (block := book.tokens[len(book.chain) * size :][:size]) and len(block) == size:
            parent = book.chain[-1] if book.chain else root_hash(book.request.cache_salt)
            book.chain.append(block_hash(parent, block))
            self.names[book.chain[-1]] = block

    def _running_ids(self) -> set[int]:
        return {seq.seq_id for seq in self.scheduler._state.batch.running}

    def _notice_preemptions(self) -> list[int]:
        """Who was preempted since it was last asked."""
        noticed = []
        for seq_id, book in self.live.items():
            num_preemptions = self.scheduler.timings(seq_id).num_preemptions
            if book.preemptions != num_preemptions:
                self.num_preemptions += num_preemptions - book.preemptions
                book.preemptions = num_preemptions
                book.scheduled = 0
                self.admitted.discard(seq_id)
                noticed.append(seq_id)
        return noticed

    def _blocks_come_back(self) -> bool:
        """No block is free, and the coming commit ends somebody: waiting costs less than preempting."""
        return self.scheduler.block_pool.num_free == 0 and bool(self.scheduler._state.batch.ending)

    def _check_row(self, plan: StepPlan, row: int, chunk: list[int], joins: bool) -> int:
        book = self.books[plan.seq_ids[row]]
        start, end = plan.starts[row], plan.starts[row] + len(chunk)
        assert book.end is None, "law 5: an ended sequence was planned"
        if joins:
            assert start % self.block_size == 0, "rule 3: a hit of half a block"
            assert start < len(book.tokens), "rule 3: a hit of the last token"
            book.ever_computed = max(book.ever_computed, start)
        else:
            assert start == book.scheduled, "law 2: computed tokens were lost without a preemption"
        assert chunk and chunk == book.tokens[start:end]
        assert plan.samples[row] == (end == len(book.tokens))
        assert plan.num_logits[row] == int(plan.samples[row])
        assert plan.output_index[row] == len(book.tokens) - len(book.request.prompt_ids)
        assert len(plan.block_tables[row]) * self.block_size >= end, "law 4: a position without a block"
        book.scheduled = end
        if plan.samples[row]:
            book.tokens.append(PENDING_TOKEN)
        return max(0, min(end, book.ever_computed) - start)

    def _check_arrival_order(self, joined: list[int]) -> None:
        """Nobody enters past one that comes before it, unless a setting says so, and then only for so long.

        With one exception in force at a time the bounds can be told from outside: a head is passed by small requests,
        or long prompts by anybody. A fixed batch takes its own preempted members first.
        """
        config, now_s = self.scheduler.config, self.before.now_s
        for seq_id in joined:
            self.live[seq_id].passed_since_s = None
        waiting = sorted((seq_id for seq_id in self.live if seq_id not in self.admitted), key=self._place)
        by_size = config.kv_bypass_s > 0 and config.kv_bypass_blocks > 0
        by_length = config.max_long_partial_prefills is not None
        if config.batching == "static" and (by_size or by_length or config.policy == "priority"):
            return
        for seq_id in waiting:
            book = self.live[seq_id]
            passers = [other for other in joined if self._place(other) > self._place(seq_id)]
            if not passers:
                continue
            assert by_size or by_length, "law 7: somebody was passed"
            if by_size and not by_length:
                blocks = [-(-self.books[other].demand // self.block_size) for other in passers]
                assert max(blocks) <= config.kv_bypass_blocks, "law 7: somebody was passed by a large request"
            if by_length and not by_size:
                assert len(book.tokens) > config.long_prefill_token_threshold, "law 7: a short prompt was passed"
            if by_length != by_size and (by_length or seq_id == waiting[0]):
                bound_s = config.max_prefill_skip_s if by_length else config.kv_bypass_s
                if book.passed_since_s is None:
                    book.passed_since_s = now_s
                assert now_s - book.passed_since_s < max(bound_s, 1e-9), "law 7: somebody was passed for too long"

    def _place(self, seq_id: int) -> tuple[float, int]:
        """Order among the waiting; it never changes, since all age alike."""
        book, config = self.books[seq_id], self.scheduler.config
        aged = book.request.priority * config.priority_ageing_s + book.arrived_at_s
        return (aged if config.policy == "priority" else 0.0, seq_id)

    def _check_preemptions(self, preempted: list[int]) -> None:
        """Only a running sequence that finds no free block makes a victim, never the oldest; no reserve is kept from
        it."""
        if preempted:
            assert self.before.num_wanted > self.before.num_free, "rule 2: preempted though blocks were free"
            assert self.before.running[0] not in preempted, "law 6: the oldest running sequence was preempted"

    def _check_runners(self, plan: StepPlan) -> None:
        """A running sequence is planned unless the budget or the blocks are used up; the oldest always."""
        config, pool = self.scheduler.config, self.scheduler.block_pool
        if len(plan.token_ids) >= config.max_num_batched_tokens or not config.enable_chunked_prefill:
            return
        for seq_id in self.before.running:
            if seq_id in self.admitted and seq_id not in plan.seq_ids:
                assert pool.num_free == 0, "law 10: budget and blocks were left and a running sequence not planned"
        oldest = self.before.running[:1]
        assert self._blocks_come_back() or all(seq_id in plan.seq_ids for seq_id in oldest), "law 6: the oldest stands"

    def _check_promises(self, plan: StepPlan, joined: list[int]) -> None:
        """After an admission beside others, free blocks cover all that mid-prefills still need, and the watermark."""
        config, pool = self.scheduler.config, self.scheduler.block_pool
        if not joined or not config.scheduler_reserve_full_isl or len(self.before.running) + len(joined) < 2:
            return
        prefills = {s.seq_id: s for s in self.scheduler._state.batch.running}
        for row, samples in enumerate(plan.samples):
            if samples:
                prefills.pop(plan.seq_ids[row], None)
        wide = [s for s in prefills.values() if s.gap > 1]
        owed = sum(max(0, -(-len(s.tokens) // self.block_size) - len(s.block_table)) for s in wide)
        assert owed <= pool.num_free, "rule 3: free blocks don't cover what mid-prefills are owed"
        reserve = ceil(config.watermark * pool.num_blocks)
        assert owed + reserve <= pool.num_free, "rule 3: an admission took blocks of the watermark"

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
                assert users[block] == 1, "law 4: a block is written while another sequence uses it"

    def _check_budget_is_used(self, plan: StepPlan) -> None:
        if len(plan.token_ids) == self.scheduler.config.max_num_batched_tokens:
            return
        pool = self.scheduler.block_pool
        for row, samples in enumerate(plan.samples):
            end = plan.starts[row] + plan.num_tokens[row]
            has_slot = pool.num_free > 0 or len(plan.block_tables[row]) * self.block_size > end
            assert samples or not has_slot, "law 10: budget was left while a planned sequence could use it"
