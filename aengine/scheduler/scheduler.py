"""The scheduler: `schedule()` makes the next `StepPlan`, `commit()` applies its `StepResult`. Called from one thread.

There is one kind of batch. Every sequence is `num_computed` behind `num_tokens`; a step moves sequences forward under a token
budget: running decodes first, one token each, then prefill chunks with what is left, then newly admitted sequences. Between
`schedule()` and `commit()` of a step another step may be scheduled: lengths advance without the token, and whatever a sequence
holds is released only when every step that computes it has been committed. With `max_in_flight` each has its share of rows and budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from aengine.api.outputs import EngineStats, FinishReason
from aengine.cache import PageCache, PageNeeds, PageTiers, Prefix, PrefixIndex
from aengine.scheduler.drafters import Drafter
from aengine.scheduler.drafts import DraftProgress, Drafts
from aengine.scheduler.kv import Chunk, KVCacheManager, PlanBuilder, RowChanges, fork_digest
from aengine.scheduler.live_sequences import LiveSequences
from aengine.scheduler.plan import IntArray, StepPlan, StepResult
from aengine.scheduler.rows import RowTable, new_tokens
from aengine.scheduler.sequence import Request, SchedulerConfig, Sequence, SequenceState, Updates
from aengine.scheduler.sessions import SessionName, SessionPrefixes
from aengine.scheduler.tier_loads import PageLoad, TierLoads
from aengine.scheduler.waiting import Deadlines, WaitingQueue

KEPT_SHARE = 16
LEAST_KEPT = 8
"""One row of so many, and one where there are `LEAST_KEPT`, is kept for those who have not filled all others: a tenant that is named."""


class Scheduler:
    """`clock` tells seconds; deadlines and arrivals are on it. `drafter`: None without speculation."""

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic, drafter: Drafter | None = None) -> None:
        self._config = config
        self._clock = clock
        needs = PageNeeds(config.windows, config.page_size, config.max_num_batched_tokens, config.state_pages)
        self._rows = RowTable(
            config.max_num_seqs, config.max_model_len, needs, 0 if drafter is None else config.max_drafts, config.max_in_flight
        )
        self._cache = PageCache(config.num_pages, config.page_size)
        self._kv_cache = KVCacheManager(self._rows, self._cache, needs, config)
        self._builder = PlanBuilder(self._rows)
        of_model, head = config.has_draft_model, config.has_draft_head
        progress = DraftProgress(self._rows, self._cache, config.max_num_batched_tokens, is_head=head) if of_model else None
        self._drafts = None if drafter is None else Drafts(self._rows, self._kv_cache, clock, drafter, progress)
        self._tenant_rows = config.max_num_seqs - (max(1, config.max_num_seqs // KEPT_SHARE) if config.max_num_seqs >= LEAST_KEPT else 0)
        self._queue = WaitingQueue(tenant_weights=config.tenant_weights, ageing_seconds=config.ageing_seconds)
        pinned = int(config.session_share * self._cache.usable)
        self._sessions = SessionPrefixes(self._cache, needs, clock, config.session_seconds, pinned)
        self._live = LiveSequences(config, self._rows, self._kv_cache, self._queue, self._sessions)
        if self._drafts is not None:
            self._live.on_release.append(self._drafts.release)
        self._deadlines = Deadlines()
        self._num_steps = self._num_in_flight = 0
        self._num_prompt_tokens = self._num_cached_prompt_tokens = 0
        self._sent = RowChanges()  # in the latest plan
        self._lacking: Sequence | None = None  # was next in the latest plan, and found no pages

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Take a request that fits the context and the page pool; it waits."""
        if request.images is not None and self._config.has_draft_model:  # which sees no images
            request = replace(request, max_drafts=0)
        self._live.add_request(request)
        if request.deadline is not None:
            self._deadlines.add_deadline(request.deadline, request.key, self._live.by_key)

    def cancel(self, key: int) -> None:
        """End a request; unknown keys and repeated calls change nothing."""
        sequence = self._live.by_key.get(key)
        if sequence is not None:
            self._live.finish(sequence, FinishReason.CANCELLED)

    def set_parked(self, key: int, parked: bool) -> None:
        """Stop scheduling a request, which keeps its pages while memory allows, or schedule it again."""
        sequence = self._live.by_key.get(key)
        if sequence is not None and sequence.parked != parked:
            self._live.set_parked(sequence, parked)

    def flush_cache(self) -> int:
        """Drop the prefixes that no sequence holds; returns how many pages that freed."""
        return self._cache.flush()

    # ---- tiers -------------------------------------------------------------------------------------------------------

    def use_tiers(self, tiers: PageTiers | None, is_worth: Callable[[float, int], bool]) -> None:
        """Pages come from these tiers and go there from now on. `is_worth`: as of `TierLoads`. No load goes on."""
        self.abandon_loads()
        kv_cache, loads = self._kv_cache, None
        if tiers is not None and self._config.enable_prefix_cache:
            loads = TierLoads(self._cache, kv_cache.needs, kv_cache.prefixes, tiers.find, tiers.keeps, is_worth)
        kv_cache.loads = loads

    @property
    def loads(self) -> TierLoads | None:
        """What is loaded and to be saved; None: there are no tiers. Callers take from it, and end loads by `end_load`."""
        return self._kv_cache.loads

    def end_load(self, load: PageLoad, num_loaded: int) -> None:
        """The first columns of a load are in their pages; sequences that waited for it are scheduled."""
        if self.loads is not None:
            self._queue.push(*self.loads.end_load(load, num_loaded))
            self._sessions.end_load(load, num_loaded, self.loads, self._spared)

    def abandon_loads(self) -> bool:
        """Sequences that wait for tiers compute what they wait for, and the pages of their loads are free. False: there are none."""
        loads = self._kv_cache.loads
        if loads is None or not loads.num_loads:
            return False
        self._queue.push(*loads.abandon())
        self._sessions.abandon_loads()
        return True

    @property
    def _spared(self) -> int:
        """How many pages the next step may take."""
        return self._kv_cache.needs.num_groups * int(np.count_nonzero(self._rows.active))

    def touch(self, name: SessionName, note: bytes | None = None) -> int:
        """A session, or that of a note, is used soon: tiers load its prefix. Returns the number of its tokens; 0: it is not known."""
        if note is not None:
            self._sessions.restore(name, note, self.weights_version)
        return self._sessions.touch(name, self.loads, self._spared)

    @property
    def prefix_index(self) -> PrefixIndex:
        """The index of the pages that sequences can share. Callers read it, or have it log its changes; they do not write to it."""
        return self._cache.index

    def held_pages(self) -> IntArray:
        """The pages whose content steps will read: of all sequences that hold some, ascending."""
        return self._kv_cache.held_pages()

    # ---- weights -----------------------------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """The version of the weights in use: how often `use_weights` was called."""
        return self._kv_cache.version

    def use_weights(self, *, recompute: bool = False) -> None:
        """What is computed from now on is of other weights; no step is in flight. Cached prefixes are dropped. Sequences that
        run keep their KV, and share none with others any more; or with `recompute` all of it is computed again."""
        kv_cache = self._kv_cache
        kv_cache.version += 1
        for sequence in self._live.by_key.values():
            if sequence.state is not SequenceState.RUNNING:
                sequence.name_pages(self._config.page_size, kv_cache.version)
            elif recompute:
                self._live.give_up_row(sequence)
        self._cache.flush()
        self._sessions.forget_all()

    def drain(self) -> bool:
        """Whether sequences that have begun are left. No other one begins until `end_draining`."""
        self._kv_cache.draining.on = True
        return bool(self._rows.active.any()) or any(sequence.begun for sequence in self._live.by_key.values())

    def end_draining(self) -> None:
        self._queue.push(*self._kv_cache.draining.end_draining())

    def cancel_begun(self) -> None:
        """End the requests that have begun."""
        for sequence in [sequence for sequence in self._live.by_key.values() if sequence.begun]:
            self._live.finish(sequence, FinishReason.CANCELLED)

    # ---- state -------------------------------------------------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """When `schedule()` has something to end even if nothing else happens (maybe earlier than needed)."""
        return self._deadlines.next

    def stats(self) -> EngineStats:
        """A snapshot of what the scheduler counts. Fields that `StepStats` or the engine fills keep their defaults."""
        rows = self._rows
        num_active = int(np.count_nonzero(rows.active))
        num_parked = int(np.count_nonzero(rows.active & rows.parked))
        waiting = len(self._queue) + self._kv_cache.num_awaiting
        prefilling = [sequence.row for sequence in self._live.prefilling if not sequence.parked]
        return EngineStats(
            running=num_active - num_parked,
            waiting=waiting,
            parked=len(self._live.by_key) - (num_active - num_parked) - self._live.num_leaving - waiting,
            pages_used=self._cache.referenced,
            pages_total=self._cache.usable,
            uncomputed_tokens=self._live.num_expected + int((rows.num_tokens[prefilling] - rows.num_computed[prefilling]).sum()),
            cached_tokens=self._cache.cached_tokens // len(self._config.windows),
            loading=0 if self.loads is None else self.loads.num_waiting,
            sessions=len(self._sessions),
            session_tokens=self._cache.pinned_tokens // len(self._config.windows),
            preemptions=self._live.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            cached_prompt_tokens=self._num_cached_prompt_tokens,
            weights_version=self._kv_cache.version,
            drafts=() if self._drafts is None else tuple(self._drafts.usage.values()),
        )

    def take_updates(self) -> Updates:
        """What changed since the last call."""
        updates, self._live.updates = self._live.updates, Updates()
        return updates

    # ---- a step ------------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when nothing can run (with steps in flight: until one of them is committed)."""
        now = self._expire()
        if self._drafts is not None and self._drafts.drafting and self._num_in_flight and self._config.max_in_flight == 1:
            return None  # drafts follow tokens that are known
        if self._lacking is not None and not self._make_room():
            return None
        while True:
            decodes = self._plan_decodes()
            if decodes is None:
                return None
            budget = -(-self._config.max_num_batched_tokens // self._config.max_in_flight) - len(decodes)
            chunks = self._plan_prefills(budget, now)
            if self._drafts is not None and self._drafts.drafting and len(decodes):
                decodes, drafted = self._drafts.choose(decodes, budget - sum(chunk.length for chunk in chunks))
                chunks += drafted
            if len(decodes) or chunks:
                return self._make_plan(decodes, chunks)
            if self._num_in_flight or not self._kv_cache.short:
                if self._drafts is not None and not self._num_in_flight:
                    self._drafts.idle()
                return None
            if not self.abandon_loads():
                self._live.preempt(self._kv_cache.victim(self._hogging()))

    def pause(self) -> None:
        """In place of `schedule()` while no step is to run. Requests still end at their deadlines."""
        self._expire()
        if self._drafts is not None:
            self._drafts.idle()

    def _expire(self) -> float:
        """End what has passed its deadline; returns the time."""
        now = self._clock()
        for key in self._deadlines.take_passed(now):
            if (sequence := self._live.by_key.get(key)) is not None:
                self._live.finish(sequence, FinishReason.DEADLINE)
        self._sessions.expire(now)
        return now

    def _plan_decodes(self) -> IntArray | None:
        """The rows that decode, each with a page for its next token; None when pages are only freed by a step in flight."""
        while True:
            decodes = self._rows.share(self._rows.ready(in_flight=self._num_in_flight > 0))
            if self._kv_cache.grow(decodes):
                return decodes
            if self._num_in_flight:
                return None
            if not self.abandon_loads():
                self._live.preempt(self._kv_cache.victim(self._hogging()))

    def _plan_prefills(self, budget: int, now: float) -> list[Chunk]:
        chunks: list[Chunk] = []
        kv_cache = self._kv_cache
        kv_cache.short = False
        for prefilling in self._live.prefilling:
            if budget == 0:
                break
            if not prefilling.parked:
                budget -= self._add_chunk(prefilling, budget, chunks)
        self._preempt_parked_adapter()
        hogging = None if self._lacking is None else self._hogging()  # one that others wait for gets nothing before them
        self._lacking = None
        while budget > 0 and not kv_cache.short:
            crowding = self._queue.crowding(self._rows.tenants[self._rows.active], self._tenant_rows)  # gets no further row
            sequence = self._queue.pop(now, crowding if hogging is None else hogging)
            if sequence is None:
                break
            if kv_cache.draining.wait(sequence) or kv_cache.awaits_prompt(sequence):
                continue
            if kv_cache.adapters.wait(sequence):
                self._preempt_parked_adapter()
                continue
            prefix, primary = kv_cache.prefix(sequence)
            self._live.expect(sequence, len(sequence.tokens) - prefix.num_columns * self._config.page_size)
            if primary is None and (kv_cache.awaits_page(sequence, prefix.num_columns) or self._begin_load(sequence, prefix)):
                continue
            while not (has_room := kv_cache.has_room(sequence, prefix)) and kv_cache.has_parked():
                self._live.preempt(kv_cache.victim())
                prefix, primary = kv_cache.prefix(sequence)  # its pages may have been among the hits
            if not has_room:
                self._queue.push(sequence)
                if hogging is None and (hogging := self._hogging()) == self._queue.tenant_id(sequence):
                    continue  # it waits for its own tenant, and others do not
                self._lacking = sequence
                break
            self._admit(sequence, prefix, primary, now)
            budget -= self._add_chunk(sequence, budget, chunks)
        if chunks:
            self._live.prefilling = [sequence for sequence in self._live.prefilling if not self._rows.decoding[sequence.row]]
        return chunks

    def _begin_load(self, sequence: Sequence, prefix: Prefix) -> bool:
        loads = self._kv_cache.loads
        if loads is None or self._kv_cache.num_protected:  # whose pages to grow are spoken for
            return False
        return loads.begin(sequence, prefix, self._spared)

    def _hogging(self) -> int | None:
        """The tenant that has most of the pages, so that another one's first request does not wait for it."""
        rows = self._rows
        return self._queue.hogging(rows.tenants[rows.active], rows.num_pages[rows.active])

    def _make_room(self) -> bool:
        """Have the newest sequences of a tenant that has most of the pages give theirs to the one that lacked some, if it is the first of
        another tenant, and needs no more than half of all. False: they can when the steps in flight are committed."""
        sequence, rows, kv_cache = self._lacking, self._rows, self._kv_cache
        if sequence is None or sequence.state is not SequenceState.WAITING or sequence.parked:
            self._lacking = None
            return True
        num_needed = kv_cache.needs.pages(kv_cache.needs.columns(len(sequence.tokens)))
        tenant_id = self._queue.tenant_id(sequence)
        if not rows.num_free or 2 * num_needed > self._cache.usable or (rows.tenants[rows.active] == tenant_id).any():
            self._lacking = None
            return True
        growth = kv_cache.needs.num_groups * int(np.count_nonzero(rows.active))  # what the next step of the others may take, at most
        while (hogging := self._hogging()) is not None and not kv_cache.has_room(sequence, kv_cache.prefix(sequence)[0], growth):
            newest = kv_cache.newest_of(hogging, sequence.request.priority)
            if newest is None:
                return not self._num_in_flight
            self._live.preempt(newest, for_share=True)
        return True

    def _preempt_parked_adapter(self) -> None:
        """If some wait for the place of an adapter, and there is one that parked sequences alone have, these lose their rows."""
        for parked in self._kv_cache.adapters.parked():
            self._live.preempt(parked)

    def _admit(self, sequence: Sequence, prefix: Prefix, primary: Sequence | None, now: float) -> None:
        self._kv_cache.admit(sequence, prefix, self._queue.tenant_id(sequence), primary)
        self._live.expect(sequence, 0)
        sequence.state = SequenceState.RUNNING
        self._live.prefilling.append(sequence)
        if self._drafts is not None:
            # In this plan the draft model may be to compute more of a row that is forked anywhere, after its page is copied.
            alike = primary is not None and sequence.request.fork_at is None
            self._drafts.assign(sequence.row, primary.row if primary is not None and alike else None)
        if not sequence.started:
            sequence.started = True
            num_computed, prompt_len = int(self._rows.num_computed[sequence.row]), len(sequence.request.prompt)
            num_cached = min(num_computed, prompt_len)
            if sequence.request.fork_of is None:
                self._num_prompt_tokens += prompt_len
                self._num_cached_prompt_tokens += num_cached
                self._live.uncached.add_sums(prompt_len - num_cached, prompt_len, prompt_len)
            sequence.primary = None
            self._queue.charge(self._rows.tenants[[sequence.row]], len(sequence.tokens) - num_computed)
            self._live.updates.started.append((sequence.request.key, num_cached, min(num_cached, sequence.num_loaded), now))

    def _add_chunk(self, sequence: Sequence, budget: int, chunks: list[Chunk]) -> int:
        rows, row = self._rows, sequence.row
        start = int(rows.num_computed[row])
        missing = int(rows.num_tokens[row]) - start
        images, length = sequence.request.images, min(missing, 0 if self._config.whole_prompts and missing > budget else budget)
        if images is None:
            length = self._kv_cache.extend(row, start, length)
        elif length := images.chunk(start, length):
            length = images.chunk(start, self._kv_cache.extend(row, start, length))
        if not length:
            return 0
        decodes = length == missing and bool(rows.num_tokens[row] < rows.limit[row])
        chunks.append(Chunk(row, start, length, num_sampled=int(decodes)))
        rows.set_decoding(row, decodes)
        if self._drafts is not None:
            self._drafts.follow_prompt(row, start, length)
        return length

    def _make_plan(self, decodes: IntArray, chunks: list[Chunk]) -> StepPlan:
        kv_cache = self._kv_cache
        self._queue.push(*kv_cache.keep_states(decodes, chunks))
        self._sent, kv_cache.changes = kv_cache.changes, RowChanges()
        states = None if kv_cache.states is None else kv_cache.states.take_changes()
        drafts = self._drafts
        draft_rows, wants_forced = (None, False) if drafts is None else (drafts.take_rows(), drafts.wants_forced)
        plan = self._builder.build(self._num_steps, decodes, chunks, self._sent, draft_rows, states, wants_forced=wants_forced)
        self._num_steps += 1
        self._num_in_flight += 1
        self._queue.charge(self._rows.tenants[plan.decoding_rows])
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Apply what a step produced. Steps are committed in the order they were scheduled."""
        rows, updates = self._rows, self._live.updates
        self._num_in_flight -= 1
        rows.flights[plan.rows] -= 1
        new, committed = new_tokens(rows, plan, result)
        rows.num_committed[plan.rows] = committed
        again = [] if result.accepted is None else self._settle_drafts(plan, committed)
        for prompt_logprobs in result.prompt_logprobs:
            if rows.active[prompt_logprobs.row]:
                updates.prompt_logprobs.append((int(rows.keys[prompt_logprobs.row]), prompt_logprobs))
        for pooled in result.pooled:
            if rows.active[pooled.row]:
                updates.pooled.append((int(rows.keys[pooled.row]), pooled))
        if result.failures:
            self._live.fail_rows(result.failures)
        if self._live.num_leaving or result.failures:  # who finished while the step was in flight gets no token from it
            new = new.select(rows.active[new.rows])
        rows.tokens[new.rows, new.positions] = new.tokens
        num_tokens = new.positions + 1
        rows.num_known[new.rows] = num_tokens  # of a row with several: the last
        if self._drafts is not None:
            updates.drafts = self._drafts.observe(plan, result, committed, self._clock())
        updates.keys.extend(rows.keys[new.rows].tolist())
        updates.token_ids.extend(new.tokens.tolist())
        updates.logprobs = new.logprobs
        self._queue.push(*self._kv_cache.publish(plan.rows, committed), *self._kv_cache.publish_states(plan.rows, committed))
        self._kv_cache.leave_behind(plan.rows, committed)
        if plan.num_decodes < len(plan.rows):
            self._settle_forks(plan)
            self._end_prompts(plan, committed)
        stops, cut = rows.stop_ids[new.rows] == new.tokens[:, None], new.repeats | (num_tokens >= rows.limit[new.rows])
        if np.count_nonzero(stops) or np.count_nonzero(cut):
            stopped = stops.any(axis=1)
            for i in np.flatnonzero(stopped | cut).tolist():
                self._end_of_tokens(int(new.rows[i]), int(new.tokens[i]), stopped=bool(stopped[i]), repeats=bool(new.repeats[i]))
        if self._live.num_leaving:
            for row in plan.rows[~rows.active[plan.rows] & (rows.flights[plan.rows] == 0)].tolist():
                sequence = rows.sequences[row]
                if sequence is not None and sequence.state is SequenceState.LEAVING:
                    self._live.release(sequence)
        for sequence in again:
            if sequence.state is SequenceState.RUNNING:
                self._live.give_up_row(sequence)

    def _settle_drafts(self, plan: StepPlan, committed: IntArray) -> list[Sequence]:
        """A step has returned with drafts, or with rows that got no token: these compute their last token again in the next step, as a
        chunk of its own. Returns those of them that cannot, since their recurrent states have it already."""
        rows, again = self._rows, list[Sequence]()
        missing = plan.starts + np.where(plan.num_sampled > 1, 1, plan.lengths) - committed  # negative: as many drafts were accepted
        rows.num_computed[plan.rows] -= missing
        rows.num_tokens[plan.rows] -= missing
        for row, has_drafts in zip(plan.rows[missing == 1].tolist(), (plan.num_sampled[missing == 1] > 1).tolist(), strict=True):
            sequence = rows.sequences[row]
            if sequence is not None and sequence.state is SequenceState.RUNNING:
                rows.set_decoding(row, False)
                self._live.prefilling.insert(0, sequence)
                if not has_drafts:
                    again.append(sequence)
        self._queue.charge(np.repeat(rows.tenants[plan.rows], np.maximum(-missing, 0)))
        self._kv_cache.give_back(plan.rows[plan.num_sampled > 1])
        return again if self._kv_cache.states is not None else []

    def _settle_forks(self, plan: StepPlan) -> None:
        """Forks of a prompt that this step completed can start."""
        rows = self._rows
        for row in plan.rows[plan.num_decodes :][plan.num_sampled[plan.num_decodes :] == 1].tolist():
            sequence = rows.sequences[row]
            if sequence is not None and sequence.request.num_forks and rows.decoding[row]:
                self._queue.push(*self._kv_cache.prefixes.settle(sequence, fork_digest(sequence.request.key)))

    def _end_prompts(self, plan: StepPlan, committed: IntArray) -> None:
        """Sequences that get no token end when their prompt is computed."""
        for row in plan.rows[(plan.num_sampled == 0) & (committed == self._rows.limit[plan.rows])].tolist():
            sequence = self._rows.sequences[row]
            if sequence is not None:
                self._live.finish(sequence, FinishReason.MAX_TOKENS)

    def _end_of_tokens(self, row: int, token: int, *, stopped: bool, repeats: bool) -> None:
        sequence = self._rows.sequences[row]
        assert sequence is not None
        request = sequence.request
        if token in request.stop_token_ids:
            self._live.finish(sequence, FinishReason.STOP_TOKEN, stop_token_id=token)
        else:
            at_limit = FinishReason.CONTEXT_LENGTH if request.fills_context else FinishReason.MAX_TOKENS
            cut = FinishReason.REPETITION if repeats else at_limit
            self._live.finish(sequence, FinishReason.EOS if stopped else cut)

    def rollback(self, plan: StepPlan, errors: Mapping[int, BaseException]) -> None:
        """Undo the latest `schedule()`, whose step did not run: it was withdrawn, or there are `errors` of rows. Their sequences fail
        with these, and the next plan computes for the others exactly what this one would have."""
        rows = self._rows
        self._num_steps -= 1
        self._num_in_flight -= 1
        rows.flights[plan.rows] -= 1
        rows.num_computed[plan.rows] = plan.starts
        rows.num_tokens[plan.rows] -= plan.num_sampled > 0
        self._queue.charge(rows.tenants[plan.decoding_rows], -1)
        if self._drafts is not None:
            self._drafts.rollback(plan)
        completed = plan.rows[plan.num_decodes :][plan.num_sampled[plan.num_decodes :] == 1].tolist()  # prompts that it was to finish
        for row in completed:
            rows.set_decoding(row, False)
        self._live.prefilling[:0] = [sequence for row in completed if (sequence := rows.sequences[row]) is not None]
        self._kv_cache.changes = self._sent
        if self._kv_cache.states is not None:
            self._kv_cache.states.rollback()
        self._live.fail_rows(errors)
