"""Which sequences hold a row and pages, and how they get and lose them; and the `StepPlan` of the rows that were chosen for a step.

Owns rows, pages and the prefixes in flight, and collects their changes for the runner. Decides whether there is room and which sequence
would be preempted; knows nothing of the waiting queue, of budgets, of policy, or of why a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aengine.cache import PageCache, PageNeeds, Prefix
from aengine.scheduler.drafters import NO_DRAFT, Draft
from aengine.scheduler.plan import NO_INTS, DraftRows, Features, IntArray, NewRow, StateRows, StepPlan
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import SchedulerConfig, Sequence, SequenceState
from aengine.scheduler.states import RowStates
from aengine.scheduler.tier_loads import TierLoads
from aengine.scheduler.waiting import AdapterRoom, Draining, PrefixesInFlight


@dataclass(slots=True)
class RowChanges:
    """Changes of rows that were not sent to the runner yet."""

    new_rows: dict[int, NewRow] = field(default_factory=dict)  # by row
    copies: dict[int, tuple[IntArray, IntArray]] = field(default_factory=dict)
    """By row: the pages that are copied, and the row's pages they are copied to, one in each group."""
    page_writes: list[tuple[IntArray, IntArray, IntArray, IntArray]] = field(default_factory=list)
    """Groups, rows, columns and ids of page-table entries."""

    def write_pages(self, first_group: int, rows: IntArray, columns: IntArray, pages: IntArray) -> None:
        """`pages` [groups, n] stand in the page table at `rows` and `columns` [n], in groups from the first on."""
        groups = np.repeat(np.arange(first_group, first_group + len(pages), dtype=np.int32), len(rows))
        if len(pages) != 1:
            rows, columns = np.tile(rows, len(pages)), np.tile(columns, len(pages))
        self.page_writes.append((groups, rows, columns, pages.reshape(-1)))

    def write_row(self, first_group: int, row: int, first_column: int, pages: IntArray) -> None:
        """`pages` [groups, n] stand in the page table at one row, from a column on."""
        columns = np.arange(first_column, first_column + pages.shape[1], dtype=np.int32)
        self.write_pages(first_group, np.full(len(columns), row, np.int32), columns, pages)

    def drop(self, row: int) -> None:
        """The row is free: nothing of it is sent."""
        self.new_rows.pop(row, None)
        self.copies.pop(row, None)
        for i, (groups, rows, columns, ids) in enumerate(self.page_writes):
            others = rows != row
            if not others.all():
                self.page_writes[i] = groups[others], rows[others], columns[others], ids[others]


MAX_PREEMPTIONS = 3
"""After this many preemptions a sequence is admitted only with room for everything that runs to grow to its end. As long as it
runs, the same holds for all others, so nothing runs out of pages and it is never preempted again."""


class KVCacheManager:
    def __init__(self, rows: RowTable, cache: PageCache, needs: PageNeeds, config: SchedulerConfig) -> None:
        self.rows = rows
        self.cache = cache
        self.needs = needs
        self.prefixes = PrefixesInFlight()
        self.adapters = AdapterRoom(rows, config.max_adapters)
        self.draining = Draining()
        self.version = 0  # of the weights
        self._enable_prefix_cache = config.enable_prefix_cache
        self._watermark = max(1, cache.usable // 100)
        self.num_protected = 0  # running sequences that were preempted MAX_PREEMPTIONS times
        self.changes = RowChanges()
        self.states: RowStates | None = None
        if needs.state_pages:
            self.states = RowStates(rows, cache, needs, interval=config.state_interval, enabled=config.enable_prefix_cache)
        self.loads: TierLoads | None = None  # None: there are no tiers
        self.short = False  # a chunk of the step that is planned found no pages in the groups with windows

    # ---- admission ---------------------------------------------------------------------------------------------------

    def prefix(self, sequence: Sequence) -> tuple[Prefix, Sequence | None]:
        """What a waiting sequence need not compute, as `PageCache.match` finds it. Or for a fork that of the tokens that it shares with a
        running sequence that has computed them, with that sequence."""
        if self._enable_prefix_cache:
            sequence.hash_pages()
        rows, primary = self.rows, sequence.primary
        forks = primary is not None and not sequence.started and primary.state is SequenceState.RUNNING
        if primary is None or primary.chain.version != sequence.chain.version or sequence.request.params.most_cached is not None:
            forks = False  # it goes on with KV of other weights, or more of the prompt is to be computed
        if primary is not None and forks and rows.num_committed[primary.row] >= sequence.num_shared:
            hits = self._full_pages(primary.row, sequence.num_shared)
            state = NO_INTS if self.states is None else self.states.of_fork(primary.row, sequence.num_shared)
            if hits is not None and state is not None:
                return Prefix(hits, state, hits.shape[1]), primary
        if not self._enable_prefix_cache or len(sequence.cacheable) <= 1:
            return Prefix(np.zeros((self.needs.num_groups, 0), np.int32), NO_INTS, 0), None
        return self.cache.match(sequence.chain, sequence.cacheable, self.needs), None

    def _full_pages(self, row: int, num_tokens: int) -> IntArray | None:
        """The full pages of the first `num_tokens` tokens of a row; 0 where the token behind these does not see one. None: it has left
        pages behind that this token sees."""
        rows = self.rows
        hits = rows.page_table[:, row, : num_tokens // self.cache.page_size].copy()
        for number, kind in enumerate(self.needs.kinds):
            first = kind.first_column(num_tokens)
            if rows.window_begins[number, row] > first:
                return None
            hits[kind.begin : kind.end, :first] = 0
        return hits

    def awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the prompt that a fork shares; if so, the fork waits for it."""
        fork_of = sequence.request.fork_of
        return fork_of is not None and self.prefixes.wait(sequence, fork_digest(fork_of))

    def awaits_page(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether a running sequence is computing the page after the hits; if so, the sequence waits for it."""
        if num_hits == (len(sequence.tokens) - 1) // self.cache.page_size or num_hits == len(sequence.chain.digests):
            return False  # the rest must be computed anyway
        if self.states is not None:
            return any(self.prefixes.wait(sequence, name) for name in self.states.names_from(sequence, num_hits))
        return self.prefixes.wait(sequence, sequence.chain.digests[num_hits])

    @property
    def num_awaiting(self) -> int:
        """How many sequences wait for others, and not in the queue."""
        return self.prefixes.num_awaiting + self.adapters.num_waiting + self.draining.num_waiting

    def stop_waiting(self, sequence: Sequence) -> None:
        """The sequence no longer waits for others, if it did."""
        self.prefixes.stop_waiting(sequence)
        self.adapters.stop_waiting(sequence)
        self.draining.stop_waiting(sequence)

    def has_room(self, sequence: Sequence, prefix: Prefix, spared: int = 0) -> bool:
        """Whether the sequence can be admitted now: with its known tokens, and enough to grow that it is not soon preempted; and `spared`
        pages are left to others."""
        rows, needs = self.rows, self.needs
        if not rows.num_free:
            return False
        known, limit = needs.columns(len(sequence.tokens)), needs.columns(sequence.limit)
        if not rows.active.any():
            needed = needs.pages(known)
        elif self.num_protected or sequence.preemptions >= MAX_PREEMPTIONS:
            growth = int((needs.columns(rows.limit[rows.active]) - rows.num_pages[rows.active]).sum())
            needed = needs.num_full * (limit + growth) + self._windows_to_grow(limit) + 2 * needs.state_pages
            needed += int(np.count_nonzero(prefix.pages[needs.num_full :]))
        else:
            # The headroom doubles with every preemption, so that two that do not fit together soon run one after the other.
            columns = min(known + 2**sequence.preemptions - 1, limit)
            needed = needs.pages(columns) + self._watermark + self._windows_of_chunks()
        if len(held := prefix.held):
            needed += self.cache.num_unreferenced(held) - len(held)
        return needed + spared <= self.cache.available

    def _windows_to_grow(self, columns: int) -> int:
        """How many pages are missing for all groups with windows of all that runs, and of another sequence of so many columns, to have the
        most that they ever hold. Pages that they share now count once: all but one of their holders can need another."""
        if not self.needs.kinds:
            return 0
        active = np.flatnonzero(self.rows.active)
        most = sum(self.needs.windowed_pages(limit) for limit in [columns, *self.needs.columns(self.rows.limit[active]).tolist()])
        kinds = range(len(self.needs.kinds))
        held = {page for row in active.tolist() for number in kinds for page in self.rows.window_pages(number, row).tolist()}
        return most - len(held)

    def _windows_of_chunks(self) -> int:
        """How many pages the sequences that compute their prompts will still take in groups with windows."""
        rows, missing = self.rows, 0
        if self.needs.kinds:
            prefilling = rows.active & ~rows.decoding
            columns = self.needs.columns(rows.num_tokens[prefilling])
        for number, kind in enumerate(self.needs.kinds):
            begins, ends = rows.window_begins[number, prefilling], rows.window_ends[prefilling]
            missing += kind.num_groups * int((np.minimum(columns, begins + kind.most_columns) - ends).clip(0).sum())
        return missing

    def admit(self, sequence: Sequence, prefix: Prefix, tenant_id: int, primary: Sequence | None = None) -> None:
        """Give the sequence a row, the pages of its prefix, and pages for its other known tokens; in groups with windows these come with
        each chunk (`extend`).

        With `primary`, from which the hits are shared, the pages that both fill differently are copied, and only what it does not
        share is left to compute.
        """
        rows, needs, hits, num_hits = self.rows, self.needs, prefix.pages, prefix.num_columns
        request, tokens = sequence.request, sequence.tokens
        row = rows.assign(sequence, tenant_id)
        self.adapters.admit(sequence)
        num_full, columns = needs.num_full, needs.columns(len(tokens))
        if len(held := prefix.held):
            self.cache.retain(held)
        pages = np.empty((num_full, columns), np.int32)
        pages[:, :num_hits] = hits[:num_full]
        pages[:, num_hits:] = self.cache.allocate(num_full * (columns - num_hits)).reshape(num_full, columns - num_hits)
        rows.page_table[:num_full, row, :columns] = pages
        rows.num_pages[row] = columns
        self.changes.write_row(0, row, 0, pages)
        num_computed = num_hits * self.cache.page_size
        copies = primary is not None and sequence.num_shared % self.cache.page_size > 0
        if copies:
            num_computed = sequence.num_shared
        if needs.kinds:
            rows.page_table[num_full:, row, :num_hits] = hits[num_full:]
            self.changes.write_row(num_full, row, 0, hits[num_full:])
            for number, kind in enumerate(needs.kinds):
                rows.window_begins[number, row] = kind.first_column(num_computed)
            rows.window_ends[row] = num_hits
            self.extend(row, num_computed, int(copies))
        if primary is not None and copies:
            self.changes.copies[row] = rows.page_table[:, primary.row, num_hits].copy(), rows.page_table[:, row, num_hits].copy()
        rows.num_published[row] = num_hits
        rows.num_computed[row] = rows.num_committed[row] = num_computed
        claims = sequence.chain.digests[num_hits:]
        if self.states is not None:
            source = prefix.state if len(prefix.state) else None
            self.states.begin(row, sequence, num_computed, source, prefix.num_found * self.cache.page_size)
            claims = self.states.names(sequence, row)
        self.prefixes.claim(sequence, [*claims, fork_digest(request.key)] if request.num_forks else claims)
        self.num_protected += sequence.preemptions >= MAX_PREEMPTIONS
        history, images = tokens if request.params.features & Features.HISTORY else NO_INTS, request.images
        history = history if images is None else images.shown(history)
        self.changes.new_rows[row] = NewRow(row, request.params, len(request.prompt), history, images)

    # ---- running -----------------------------------------------------------------------------------------------------

    def grow(self, decodes: IntArray) -> bool:
        """Give every row in `decodes` a page for its next token; False, and nothing is changed, when there are too few."""
        rows = self.rows
        columns = rows.num_computed[decodes] // self.cache.page_size
        growing = columns >= rows.num_pages[decodes]
        num_groups = self.needs.num_groups
        count = num_groups * int(np.count_nonzero(growing))
        if count > self.cache.available:
            return False
        if count:
            growing_rows, columns, pages = decodes[growing], columns[growing], self.cache.allocate(count).reshape(num_groups, -1)
            rows.page_table[:, growing_rows, columns] = pages
            rows.num_pages[growing_rows] += 1
            if self.needs.kinds:
                rows.window_ends[growing_rows] += 1
            self.changes.write_pages(0, growing_rows, columns, pages)
        return True

    def extend_by_drafts(self, row: int, num_drafts: int) -> int:
        """Give a decoding row, which has a page for its next token, pages for drafts behind it. Returns for how many there are pages."""
        rows, needs = self.rows, self.needs
        begin = int(rows.num_pages[row])
        first = int(rows.num_computed[row]) + 1  # position of the first draft
        end = min(needs.columns(first + num_drafts), begin + self.cache.available // needs.num_groups)
        if end > begin:
            pages = self.cache.allocate(needs.num_groups * (end - begin)).reshape(-1, end - begin)
            rows.page_table[:, row, begin:end] = pages
            self.changes.write_row(0, row, begin, pages)
            self._set_end(row, end)
        return min(num_drafts, int(rows.num_pages[row]) * self.cache.page_size - first)

    def give_back(self, drafted: IntArray) -> None:
        """Take from rows the pages that only rejected drafts are in."""
        rows, needs = self.rows, self.needs
        ends = needs.columns(rows.num_tokens[drafted])
        for row, end in zip(drafted.tolist(), ends.tolist(), strict=True):
            if end < rows.num_pages[row]:
                self.cache.release(rows.page_table[:, row, end : rows.num_pages[row]].T.ravel())
                self._set_end(row, end)

    def _set_end(self, row: int, end: int) -> None:
        self.rows.num_pages[row] = end
        if self.needs.kinds:
            self.rows.window_ends[row] = end

    def extend(self, row: int, start: int, length: int) -> int:
        """Give a row pages for a chunk of `length` tokens from position `start` on, in the groups with windows. Returns for how many of
        the tokens there are pages."""
        rows, needs = self.rows, self.needs
        if not needs.kinds:
            return length
        begin = int(rows.window_ends[row])
        end = min(needs.columns(start + length), begin + self.cache.available // (needs.num_groups - needs.num_full))
        if end > begin:
            pages = self.cache.allocate((end - begin) * (needs.num_groups - needs.num_full)).reshape(-1, end - begin)
            rows.page_table[needs.num_full :, row, begin:end] = pages
            rows.window_ends[row] = end
            self.changes.write_row(needs.num_full, row, begin, pages)
        covered = min(length, int(rows.window_ends[row]) * self.cache.page_size - start)
        self.short |= covered < length
        return covered

    def leave_behind(self, plan_rows: IntArray, committed: IntArray) -> None:
        """Give back the pages that no query of the rows, which have `committed` tokens now, will read again because of its window."""
        rows = self.rows
        for number, kind in enumerate(self.needs.kinds):
            begins = kind.first_column(committed - 1)  # for a fork, or a row without a token, computes the last token again
            due = (begins > rows.window_begins[number, plan_rows]) & rows.active[plan_rows]
            for row, begin in zip(plan_rows[due].tolist(), begins[due].tolist(), strict=True):
                old = int(rows.window_begins[number, row])
                pages = rows.page_table[kind.begin : kind.end, row, old:begin]
                self.cache.release(pages.T.ravel())
                pages[:] = 0
                self.changes.write_row(kind.begin, row, old, pages.copy())
                rows.window_begins[number, row] = begin

    def publish(self, plan_rows: IntArray, committed: IntArray) -> list[Sequence]:
        """Offer the pages that a returned step filled to others; its rows have `committed` tokens now. Returns the waiting sequences that
        can now use one."""
        rows, size = self.rows, self.cache.page_size
        woken: list[Sequence] = []
        num_full = committed // size
        due = num_full > rows.num_published[plan_rows]
        if not self._enable_prefix_cache or not np.count_nonzero(due):
            return woken
        due &= rows.active[plan_rows]
        due_rows, last = plan_rows[due], num_full[due]
        first = rows.num_published[due_rows]
        rows.num_published[due_rows] = last
        page_bytes = size * rows.tokens.itemsize
        for row, start, end in zip(due_rows.tolist(), first.tolist(), last.tolist(), strict=True):
            sequence = rows.sequences[row]
            assert sequence is not None
            digests = sequence.chain.digests
            raw = rows.tokens[row, start * size : end * size].tobytes()
            for column in range(start, end):
                page_tokens = raw[(column - start) * page_bytes : (column - start + 1) * page_bytes]
                if len(digests) == column:
                    sequence.chain.append(page_tokens)
                self.cache.publish((pages := rows.page_table[:, row, column]).tolist(), digests[column], page_tokens)
                if self.loads is not None and sequence.chain.version == self.version:
                    self.loads.save(digests[column], page_tokens, pages)
                woken += self.prefixes.settle(sequence, digests[column])
        return woken

    def publish_states(self, plan_rows: IntArray, committed: IntArray) -> list[Sequence]:
        """Offer the states that a returned step kept to others, after `publish`. Returns the waiting sequences that can now use one."""
        published = [] if self.states is None else self.states.commit(plan_rows, committed)
        return [woken for sequence, name in published for woken in self.prefixes.settle(sequence, name)]

    def held_pages(self) -> IntArray:
        """The ids of the pages that a sequence holds or that are still to be copied to one, ascending."""
        sources = [pages for pages, _ in self.changes.copies.values()]
        return np.union1d(np.flatnonzero(self.cache.refs), np.concatenate([NO_INTS, *sources])).astype(np.int32)

    def keep_states(self, decodes: IntArray, chunks: list[Chunk]) -> list[Sequence]:
        """Keep states that the step which is planned computes. Returns the sequences that waited for those for which there are no pages."""
        woken: list[Sequence] = []
        if self.states is not None:
            self.states.keep_of_decodes(decodes)
            for chunk in chunks:
                for name in self.states.keep_of_chunk(chunk.row, chunk.start, chunk.length, has_drafts=chunk.num_sampled > 1):
                    sequence = self.rows.sequences[chunk.row]
                    assert sequence is not None
                    woken += self.prefixes.settle(sequence, name)
        return woken

    # ---- the end -----------------------------------------------------------------------------------------------------

    def victim(self, hogging: int | None = None) -> Sequence:
        """The sequence to preempt: parked ones first, then the lowest priority, then the tenant `hogging`, then the newest. Only those that
        no step in flight computes."""
        rows = self.rows
        settled = [rows.sequences[row] for row in np.flatnonzero(rows.active & (rows.flights == 0)).tolist()]
        candidates = [one for one in settled if one is not None and (one.parked or one.preemptions < MAX_PREEMPTIONS)]
        return max(candidates, key=lambda one: (one.parked, one.request.priority, rows.tenants[one.row] == hogging, *_age(one)))

    def newest_of(self, tenant_id: int, priority: int) -> Sequence | None:
        """The newest running sequence of a tenant that can be preempted for a request of the given priority: its own priority is no better,
        and no step in flight computes it. Never the tenant's oldest sequence, so that this one comes to its end. None: there is no such
        sequence."""
        rows = self.rows
        numbers = np.flatnonzero(rows.active & (rows.tenants == tenant_id)).tolist()
        running = sorted((one for row in numbers if (one := rows.sequences[row]) is not None), key=_age)
        able = [one for one in running[1:] if one.request.priority >= priority and not rows.flights[one.row]]
        return able[-1] if able else None

    def has_parked(self) -> bool:
        """Whether a parked sequence could be preempted now."""
        return bool((self.rows.active & self.rows.parked & (self.rows.flights == 0)).any())

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """A running sequence computes no further. Returns the sequences that waited for pages it would have computed."""
        self.num_protected -= sequence.preemptions >= MAX_PREEMPTIONS
        return self.prefixes.abandon(sequence)

    def release(self, sequence: Sequence) -> list[Sequence]:
        """Take row and pages from a stopped sequence that no step in flight computes. Returns the sequences that waited for the place of
        its adapter."""
        assert self.rows.flights[sequence.row] == 0
        row, rows = sequence.row, self.rows
        self.changes.drop(row)
        pages, published = rows.pages(row).copy(), {} if self.states is None else self.states.release(row)
        if self.loads is not None and sequence.chain.version == self.version:
            for column, (first, name) in published.items():
                tokens = rows.tokens[row, column * self.cache.page_size : (column + 1) * self.cache.page_size].tobytes()
                if len(kept := self.cache.state_at(first, name)):
                    self.loads.save(name, tokens, kept)
        end = end_of_full = self.needs.num_full * int(rows.num_pages[row])
        for column, state in sorted(published.items(), reverse=True):  # so that a state is evicted with the pages behind it
            begin = min(end, self.needs.num_full * (column + 1))
            self.cache.release(pages[begin:end])
            self.cache.use_again(*state)
            end = begin
        self.cache.release(np.concatenate((pages[:end], pages[end_of_full:])))
        rows.clear(row)
        return self.adapters.leave_row(sequence.request.adapter)


def _age(sequence: Sequence) -> tuple[float, int]:
    return sequence.request.arrival, sequence.request.key


def fork_digest(key: int) -> bytes:
    """Stands for the whole prompt of a request in `PrefixesInFlight`; shorter than any page digest."""
    return key.to_bytes(8, "little")


_GRAMMAR = int(Features.GRAMMAR)
_OF_PROMPTS = int(Features.OF_PROMPTS)


@dataclass(slots=True)
class Chunk:
    """The tokens of one row in a step: a part of its prompt, or its last token with drafts."""

    row: int
    start: int
    length: int
    num_sampled: int
    draft: Draft = NO_DRAFT  # the last of its tokens, which are not the sequence's yet

    @property
    def end(self) -> int:
        """The position behind its tokens that are the sequence's."""
        return self.start + self.length - len(self.draft.token_ids)


class PlanBuilder:
    def __init__(self, rows: RowTable) -> None:
        self._rows = rows
        self._ones = np.ones(len(rows.sequences), np.int32)  # of a step of decodes alone: their lengths, and how many tokens each samples

    def build(
        self,
        step: int,
        decodes: IntArray,
        chunks: list[Chunk],
        changes: RowChanges,
        draft_rows: DraftRows | None,
        states: StateRows | None,
        *,
        wants_forced: bool,
    ) -> StepPlan:
        """Counts what the step computes and samples as computed and sampled. What grammars force it only wants to know if there are any."""
        rows = self._rows
        num_decodes, num_rows = len(decodes), len(decodes) + len(chunks)
        plan_rows, lengths = decodes, self._ones[:num_rows]
        num_sampled = num_certain = lengths  # certain: tokens that are the sequence's, which drafts are not
        scores_prompts = False
        if chunks:
            added = np.array([(chunk.row, chunk.length, chunk.num_sampled) for chunk in chunks], np.int32)
            plan_rows = np.concatenate((decodes, added[:, 0]))
            lengths = np.concatenate((self._ones[:num_decodes], added[:, 1]))
            num_sampled = np.concatenate((self._ones[:num_decodes], added[:, 2]))
            num_certain = np.where(num_sampled > 1, 1, lengths)
            scores_prompts = bool(np.count_nonzero(rows.features[added[:, 0]] & _OF_PROMPTS))
        starts = rows.num_computed[plan_rows]
        rows.num_computed[plan_rows] = starts + num_certain
        rows.num_tokens[plan_rows] += num_sampled > 0
        rows.flights[plan_rows] += 1
        rows.steps[plan_rows] = step
        pieces = [piece for chunk in chunks for piece in (rows.tokens[chunk.row, chunk.start : chunk.end], chunk.draft.token_ids)]
        page_groups = page_rows = page_cols = page_ids = copy_from = copy_to = NO_INTS
        if len(changes.page_writes) == 1:
            ((page_groups, page_rows, page_cols, page_ids),) = changes.page_writes
        elif changes.page_writes:
            page_groups, page_rows, page_cols, page_ids = map(np.concatenate, zip(*changes.page_writes, strict=True))
        if changes.copies:
            copy_from, copy_to = map(np.concatenate, zip(*changes.copies.values(), strict=True))
        return StepPlan(
            step=step,
            rows=plan_rows,
            num_decodes=num_decodes,
            starts=starts,
            lengths=lengths,
            num_sampled=num_sampled,
            token_ids=np.concatenate(pieces) if pieces else NO_INTS,
            new_rows=tuple(changes.new_rows.values()),
            page_groups=page_groups,
            page_rows=page_rows,
            page_cols=page_cols,
            page_ids=page_ids,
            copy_from=copy_from,
            copy_to=copy_to,
            draft_rows=draft_rows,
            wants_forced=wants_forced and rows.num_grammars > 0 and bool(np.count_nonzero(rows.features[plan_rows] & _GRAMMAR)),
            scores_prompts=scores_prompts,
            states=states,
            adapters=rows.adapters_of(plan_rows),
        )
