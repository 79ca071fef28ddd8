"""`RowStates`: the recurrent states of the rows, and which of them are kept as they were at the end of a column, so that other sequences,
or the same one after it lost its row, can begin there.

Owns which pages hold them. A row's state is written where it is from step to step. A kept state is written to pages of its own by the step
that computes the last token before it, and published when that step has returned; from then on it is cached, and nobody holds it. It is
never worth the memory of a sequence: where pages are scarce none is kept. A step that checks drafts leaves a state as it was before it; the
next one computes again what counts, so a state is kept by the first step that begins behind its last token. Knows nothing of what a state
is, and of the order of steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from aengine.cache import PageCache, PageNeeds, page_name
from aengine.scheduler.plan import IntArray, StateRows
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import Sequence

BEFORE_END = 16
"""Tokens between the latest kept state of a prompt and its end, at least: the next turn of a chat parts from this one a few tokens before
the end, since templates end a prompt with the beginning of an answer."""


@dataclass(slots=True)
class UnsentStates:
    """Changes that were not sent to the runner yet."""

    begun: dict[int, tuple[IntArray, IntArray]] = field(default_factory=dict)
    """By row: the pages of its state, and those of the one that it begins with, or zeros."""
    kept: list[tuple[int, int, IntArray]] = field(default_factory=list)
    """Rows, after how many of their tokens a state is kept, and its pages."""

    def rows(self, size: int) -> StateRows | None:
        if not self.begun and not self.kept:
            return None

        def table(pages: Iterable[IntArray]) -> IntArray:
            return np.array([*pages], np.int32).reshape(-1, size)

        return StateRows(
            rows=np.array([*self.begun], np.int32),
            pages=table(pages for pages, _ in self.begun.values()),
            sources=table(source for _, source in self.begun.values()),
            kept_rows=np.array([row for row, _, _ in self.kept], np.int32),
            kept_lengths=np.array([length for _, length, _ in self.kept], np.int32),
            kept_pages=table(pages for _, _, pages in self.kept),
        )


@dataclass(slots=True)
class _Row:
    pages: IntArray
    source: IntArray | None  # that its first step begins with, held until that has returned
    wanted: list[int]  # tokens of its prompt after which states are kept, ascending
    in_flight: list[tuple[int, IntArray]] = field(default_factory=list)  # kept by steps that have not returned: after how many tokens
    published: dict[int, tuple[int, bytes]] = field(default_factory=dict)  # by column: first page and name of a state kept at its end
    rolling: int | None = None  # the column of the one that was kept while the row decoded, and gives way to the next
    for_forks: tuple[int, IntArray] | None = None  # after how many tokens, and held until the row ends


class RowStates:
    def __init__(self, rows: RowTable, cache: PageCache, needs: PageNeeds, *, interval: int, enabled: bool) -> None:
        """`interval`: every so many tokens of a prompt a state is kept, 0: none. `enabled`: states are kept for others at all."""
        self._unsent, self._sent = UnsentStates(), UnsentStates()  # the latter in the latest plan
        self.size = needs.state_pages
        self._table = rows
        self._cache = cache
        self._needs = needs
        self._interval = interval
        self._enabled = enabled
        self._rows: dict[int, _Row] = {}
        self._lengths = np.zeros(len(rows.num_computed), np.int32)  # by row, tokens that its state has behind the latest plan
        self._before = self._lengths.copy()  # this plan

    # ---- a row gets and loses its state ------------------------------------------------------------------------------

    def begin(self, row: int, sequence: Sequence, num_computed: int, source: IntArray | None, num_found: int) -> None:
        """The row has `num_computed` tokens, whose state is in the pages `source`, which it holds; or none. `num_found`: tokens whose KV
        was found."""
        size = self.size
        state = _Row(self._cache.allocate(size), source, self._wanted(sequence, num_computed, num_found))
        self._rows[row] = state
        self._lengths[row] = num_computed
        if sequence.request.num_forks:
            before_last = len(sequence.request.prompt) - 1
            if before_last > num_computed and before_last not in state.wanted:
                state.wanted = sorted((*state.wanted, before_last))
        self._unsent.begun[row] = state.pages, np.zeros(size, np.int32) if source is None else source

    def _wanted(self, sequence: Sequence, num_computed: int, num_found: int) -> list[int]:
        if not self._enabled:
            return []
        page_size, known = self._cache.page_size, len(sequence.tokens)
        ends = {(len(sequence.request.prompt) - BEFORE_END) // page_size * page_size}
        ends.add(num_found)  # where prompts parted: the next one finds a state there
        if self._interval:
            ends.update(range(self._interval, known, self._interval))
        return sorted(end for end in ends if num_computed < end < known)

    def names(self, sequence: Sequence, row: int) -> list[bytes]:
        """What stands for the states of its prompt that the row will publish."""
        return [name for end in self._rows[row].wanted if (name := self._name_at(sequence, end)) is not None]

    def names_from(self, sequence: Sequence, column: int) -> Iterable[bytes]:
        """The names of the states of a prompt at the ends of its columns from one on, the last one first."""
        last = (len(sequence.tokens) - 1) // self._cache.page_size
        return (self._name(digest) for digest in reversed(sequence.chain.digests[column:last]))

    def _name(self, digest: bytes) -> bytes:
        return page_name(digest, self._needs.num_groups)

    def _name_at(self, sequence: Sequence, length: int) -> bytes | None:
        """The name of the state after so many tokens; None: it is for forks alone."""
        column, rest = divmod(length, self._cache.page_size)
        return None if rest or not self._enabled else self._name(sequence.chain.digests[column - 1])

    def of_fork(self, row: int, num_tokens: int) -> IntArray | None:
        """The pages of the row's state after so many tokens, if it is held for forks."""
        held = self._rows[row].for_forks
        return None if held is None or held[0] != num_tokens else held[1]

    def pages(self, row: int) -> list[IntArray]:
        """All that the row holds, by state."""
        state = self._rows[row]
        held = [state.pages, *(pages for _, pages in state.in_flight)]
        return held + [one for one in (state.source, None if state.for_forks is None else state.for_forks[1]) if one is not None]

    def release(self, row: int) -> dict[int, tuple[int, bytes]]:
        """Gives up all that the row holds. Returns the first pages and names of the states that it published, by column."""
        self._unsent.begun.pop(row, None)
        self._unsent.kept = [kept for kept in self._unsent.kept if kept[0] != row]
        for pages in self.pages(row):
            self._cache.release_state(pages)
        return self._rows.pop(row).published

    # ---- steps -------------------------------------------------------------------------------------------------------

    def keep_of_decodes(self, decodes: IntArray) -> None:
        """Keeps the states at the latest page ends that the step reaches. Called for each plan, before `keep_of_chunk`."""
        self._before = self._lengths.copy()
        if len(decodes):
            self._keep_page_ends(decodes, self._table.num_computed[decodes] + 1)

    def _keep_page_ends(self, rows: IntArray, lengths: IntArray) -> None:
        """The states of rows will have so many tokens."""
        ends, known = lengths // self._cache.page_size * self._cache.page_size, self._lengths[rows]
        self._lengths[rows] = lengths
        if self._enabled:
            for i in np.flatnonzero(ends > known).tolist():
                self._keep(int(rows[i]), int(ends[i]))

    def keep_of_chunk(self, row: int, start: int, length: int, *, has_drafts: bool) -> list[bytes]:
        """Keeps the states that are wanted of `length` tokens of a prompt from position `start` on, or in a step with drafts of tokens
        before these. Returns the names of those for which there are no pages."""
        if has_drafts:
            self._keep_page_ends(np.array([row]), np.array([start], np.int32))
            return []
        state, missing = self._rows[row], []
        self._lengths[row] = start + length
        for end in [end for end in state.wanted if start < end <= start + length]:
            if not self._keep(row, end):
                sequence = self._table.sequences[row]
                assert sequence is not None
                if (name := self._name_at(sequence, end)) is not None:
                    missing.append(name)
        return missing

    def _keep(self, row: int, length: int) -> bool:
        table, cache = self._table, self._cache
        spared = self._needs.num_groups * int(np.count_nonzero(table.active))  # what the next step of all rows may take
        if cache.available < self.size + spared:
            return False
        pages = cache.allocate(self.size)
        self._rows[row].in_flight.append((length, pages))
        self._unsent.kept.append((row, length, pages))
        return True

    def take_changes(self) -> StateRows | None:
        """What the step that is planned has to know, and later ones need not."""
        self._sent, self._unsent = self._unsent, UnsentStates()
        return self._sent.rows(self.size)

    def rollback(self) -> None:
        """The latest plan does not run: the next one has to know the same, and that step keeps no states."""
        self._lengths = self._before
        for row, length, pages in self._sent.kept:
            state = self._rows[row]
            state.in_flight = [kept for kept in state.in_flight if kept[0] != length]
            self._cache.release_state(pages)
        self._unsent = UnsentStates(self._sent.begun)

    def commit(self, plan_rows: IntArray, committed: IntArray) -> list[tuple[Sequence, bytes]]:
        """A step has returned: its rows have `committed` tokens now, whose pages are published. Returns the sequences that published
        states, and the names of these."""
        published = []
        for row, num_tokens in zip(plan_rows.tolist(), committed.tolist(), strict=True):
            state = self._rows.get(row)
            if state is None:  # it failed
                continue
            if state.source is not None:
                self._cache.release_state(state.source)
                state.source = None
            done = [kept for kept in state.in_flight if kept[0] <= num_tokens]
            if done:
                state.in_flight = state.in_flight[len(done) :]
                for length, pages in done:
                    published += self._publish(row, state, length, pages)
        return published

    def _publish(self, row: int, state: _Row, length: int, pages: IntArray) -> list[tuple[Sequence, bytes]]:
        table, page_size = self._table, self._cache.page_size
        sequence = table.sequences[row]
        assert sequence is not None
        published = []
        if table.active[row] and (name := self._name_at(sequence, length)) is not None:
            column = length // page_size - 1
            self._cache.publish_state(pages, name, table.tokens[row, column * page_size : length].tobytes())
            published.append((sequence, name))
            if length not in state.wanted:
                if state.rolling is not None:
                    self._cache.drop_state(*state.published.pop(state.rolling))
                state.rolling = column
            state.published[column] = int(pages[0]), name
        if sequence.request.num_forks and length == len(sequence.request.prompt) - 1 and table.active[row]:
            state.for_forks = length, pages  # which the row goes on holding
        else:
            self._cache.release_state(pages)
        return published
