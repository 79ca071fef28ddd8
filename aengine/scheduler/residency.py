"""Which sequences hold a row and pages, and how they get and lose them.

Owns rows, pages and the prefixes in flight, and collects their changes for the runner. Decides whether there is room and which sequence
would be preempted; knows nothing of the waiting queue, of budgets, or of why a sequence ends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from aengine.cache import PageCache
from aengine.scheduler.plan import NO_INTS, Features, IntArray, NewRow
from aengine.scheduler.prefixes import PrefixesInFlight
from aengine.scheduler.request import Sequence, SequenceState
from aengine.scheduler.rows import RowTable


@dataclass(slots=True)
class RowChanges:
    """Changes of rows that were not sent to the runner yet."""

    new_rows: dict[int, NewRow] = field(default_factory=dict)  # by row
    copies: dict[int, tuple[int, int]] = field(default_factory=dict)  # by row: the page that is copied, and the row's page it is copied to
    page_writes: list[tuple[IntArray, IntArray, IntArray]] = field(default_factory=list)  # rows, columns and ids of page-table entries

    def drop(self, row: int) -> None:
        """The row is free: nothing of it is sent."""
        self.new_rows.pop(row, None)
        self.copies.pop(row, None)
        for i, (rows, columns, ids) in enumerate(self.page_writes):
            others = rows != row
            if not others.all():
                self.page_writes[i] = rows[others], columns[others], ids[others]


MAX_PREEMPTIONS = 3
"""After this many preemptions a sequence is admitted only with room for everything that runs to grow to its end. As long as it
runs, the same holds for all others, so nothing runs out of pages and it is never preempted again."""


class Residency:
    def __init__(self, rows: RowTable, cache: PageCache, *, enable_prefix_cache: bool) -> None:
        self.rows = rows
        self.cache = cache
        self.prefixes = PrefixesInFlight()
        self._enable_prefix_cache = enable_prefix_cache
        self._watermark = max(1, cache.usable // 100)
        self._num_protected = 0  # running sequences that were preempted MAX_PREEMPTIONS times
        self.changes = RowChanges()

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.cache.page_size)

    # ---- admission ---------------------------------------------------------------------------------------------------

    def prefix(self, sequence: Sequence) -> tuple[list[int], Sequence | None]:
        """The pages that a waiting sequence need not compute: the published ones that hold its longest prefix. Or for a fork those before
        the last prompt token of the running sequence that computed its prompt, with that sequence."""
        if self._enable_prefix_cache:
            sequence.hash_pages()
        rows, primary, num_tokens = self.rows, sequence.primary, len(sequence.tokens)
        forks = primary is not None and not sequence.started and primary.state is SequenceState.RUNNING
        if primary is not None and forks and rows.num_committed[primary.row] >= num_tokens:
            return rows.pages(primary.row)[: (num_tokens - 1) // self.cache.page_size].tolist(), primary
        if not self._enable_prefix_cache or sequence.request.params.prompt_logprobs is not None:  # cached KV has no logits
            return [], None
        return self.cache.match(sequence.chain, sequence.tokens), None

    def awaits_prompt(self, sequence: Sequence) -> bool:
        """Whether a running sequence is computing the prompt that a fork shares; if so, the fork waits for it."""
        fork_of = sequence.request.fork_of
        return fork_of is not None and self.prefixes.wait(sequence, fork_digest(fork_of))

    def awaits_page(self, sequence: Sequence, num_hits: int) -> bool:
        """Whether a running sequence is computing the page after the hits; if so, the sequence waits for it."""
        if num_hits == (len(sequence.tokens) - 1) // self.cache.page_size or num_hits == len(sequence.chain.digests):
            return False  # the rest must be computed anyway
        return self.prefixes.wait(sequence, sequence.chain.digests[num_hits])

    def has_room(self, sequence: Sequence, hits: list[int]) -> bool:
        """Whether the sequence can be admitted now: with its known tokens, and enough to grow that it is not soon preempted."""
        rows, size = self.rows, self.cache.page_size
        if not rows.num_free:
            return False
        known, limit = self._num_pages(len(sequence.tokens)), self._num_pages(sequence.limit)
        if not rows.active.any():
            needed = known
        elif self._num_protected or sequence.preemptions >= MAX_PREEMPTIONS:
            needed = limit + int((-(-rows.limit[rows.active] // size) - rows.num_pages[rows.active]).sum())
        else:
            # The headroom doubles with every preemption, so that two that do not fit together soon run one after the other.
            needed = min(known + 2**sequence.preemptions - 1, limit) + self._watermark
        return needed - len(hits) + self.cache.num_unreferenced(hits) <= self.cache.available

    def admit(self, sequence: Sequence, hits: list[int], tenant_id: int, primary: Sequence | None = None) -> None:
        """Give the sequence a row, the pages it matched, and pages for its other known tokens.

        With `primary`, from which the hits are shared, the page that both fill differently is copied, and only the last token of
        the prompt is left to compute.
        """
        rows, size = self.rows, self.cache.page_size
        request, tokens = sequence.request, sequence.tokens
        row = rows.assign(sequence, tenant_id)
        pages = np.empty(self._num_pages(len(tokens)), np.int32)
        self.cache.retain(hits)
        pages[: len(hits)] = hits
        pages[len(hits) :] = self.cache.allocate(len(pages) - len(hits))
        rows.page_table[row, : len(pages)] = pages
        rows.num_pages[row] = len(pages)
        self.changes.page_writes.append((np.full(len(pages), row, np.int32), np.arange(len(pages), dtype=np.int32), pages))
        num_computed = len(hits) * size
        if primary is not None and (len(tokens) - 1) % size:
            self.changes.copies[row] = int(rows.page_table[primary.row, len(hits)]), int(pages[len(hits)])
            num_computed = len(tokens) - 1
        rows.num_published[row] = len(hits)
        rows.num_computed[row] = rows.num_committed[row] = num_computed
        claims = sequence.chain.digests[len(hits) :]
        self.prefixes.claim(sequence, [*claims, fork_digest(request.key)] if request.num_forks else claims)
        self._num_protected += sequence.preemptions >= MAX_PREEMPTIONS
        history = tokens if request.params.features & Features.HISTORY else NO_INTS
        self.changes.new_rows[row] = NewRow(row, request.params, len(request.prompt), history)

    # ---- running -----------------------------------------------------------------------------------------------------

    def grow(self, decodes: IntArray) -> bool:
        """Give every row in `decodes` a page for its next token; False, and nothing is changed, when there are too few."""
        rows = self.rows
        columns = rows.num_computed[decodes] // self.cache.page_size
        growing = columns >= rows.num_pages[decodes]
        count = int(np.count_nonzero(growing))
        if count > self.cache.available:
            return False
        if count:
            growing_rows, columns, pages = decodes[growing], columns[growing], self.cache.allocate(count)
            rows.page_table[growing_rows, columns] = pages
            rows.num_pages[growing_rows] += 1
            self.changes.page_writes.append((growing_rows, columns, pages))
        return True

    def publish(self, plan_rows: IntArray, committed: IntArray) -> list[Sequence]:
        """Offer the pages that a returned step filled to others; its rows have `committed` tokens now. Returns the waiting sequences that
        can now use one."""
        rows, size = self.rows, self.cache.page_size
        woken: list[Sequence] = []
        if not self._enable_prefix_cache:
            return woken
        num_full = committed // size
        due = num_full > rows.num_published[plan_rows]
        if not np.count_nonzero(due):
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
            for i, page in enumerate(rows.page_table[row, start:end].tolist()):
                page_tokens = raw[i * page_bytes : (i + 1) * page_bytes]
                if len(digests) == start + i:
                    sequence.chain.append(page_tokens)
                self.cache.publish(page, digests[start + i], page_tokens)
                woken += self.prefixes.settle(sequence, digests[start + i])
        return woken

    # ---- the end -----------------------------------------------------------------------------------------------------

    def victim(self) -> Sequence:
        """The sequence to preempt: parked ones first, then the lowest priority, then the newest. Only those that no step in flight
        computes."""
        rows = self.rows
        settled = [rows.sequences[row] for row in np.flatnonzero(rows.active & (rows.flights == 0)).tolist()]
        candidates = [one for one in settled if one is not None and (one.parked or one.preemptions < MAX_PREEMPTIONS)]
        return max(candidates, key=lambda one: (one.parked, one.request.priority, one.request.arrival, one.request.key))

    def has_parked(self) -> bool:
        """Whether a parked sequence could be preempted now."""
        rows = self.rows
        return bool((rows.active & rows.parked & (rows.flights == 0)).any())

    def stop(self, sequence: Sequence) -> list[Sequence]:
        """A running sequence computes no further. Returns the sequences that waited for pages it would have computed."""
        self._num_protected -= sequence.preemptions >= MAX_PREEMPTIONS
        return self.prefixes.abandon(sequence)

    def release(self, sequence: Sequence) -> None:
        """Take row and pages from a stopped sequence that no step in flight computes."""
        assert self.rows.flights[sequence.row] == 0
        self.changes.drop(sequence.row)
        self.cache.release(self.rows.pages(sequence.row).copy())
        self.rows.clear(sequence.row)


def fork_digest(key: int) -> bytes:
    """Stands for the whole prompt of a request in `PrefixesInFlight`; shorter than any page digest."""
    return key.to_bytes(8, "little")
