"""`LiveSequences`: the sequences that are not FINISHED; how they lose their rows, and how they end.

Knows nothing of steps, but that a row which one still computes is released later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from aengine.api.outputs import FinishReason
from aengine.scheduler.kv import KVCacheManager
from aengine.scheduler.rows import RowTable
from aengine.scheduler.sequence import Finished, Request, SchedulerConfig, Sequence, SequenceState, Updates
from aengine.scheduler.sessions import SessionPrefixes, note_name
from aengine.scheduler.waiting import WaitingQueue


class MovingRatio:
    """What was added fades as more is added: after `span` of it 1/e is left."""

    __slots__ = ("_denominator", "_numerator", "_span", "_start")

    def __init__(self, span: float, start: float = 0.0) -> None:
        """`start`: the ratio as long as there is none."""
        self._span = span
        self._start = start
        self._numerator = self._denominator = 0.0

    def add_sums(self, numerator: float, denominator: float, amount: float) -> None:
        """Adds to the two sums, after both have faded by exp(-`amount` / `span`). `amount` is in the unit of `span`, such as tokens or
        steps."""
        left = math.exp(-amount / self._span)
        self._numerator = self._numerator * left + numerator
        self._denominator = self._denominator * left + denominator

    @property
    def value(self) -> float:
        return self._numerator / self._denominator if self._denominator else self._start


UNCACHED_SPAN = 65_536  # tokens of prompts


class LiveSequences:
    def __init__(
        self, config: SchedulerConfig, rows: RowTable, kv_cache: KVCacheManager, queue: WaitingQueue, sessions: SessionPrefixes
    ) -> None:
        self.by_key: dict[int, Sequence] = {}
        self.prefilling: list[Sequence] = []  # RUNNING with known tokens left to compute, oldest admission first
        self.num_leaving = 0  # in this state
        self.num_preemptions = 0
        self.num_expected = 0  # the sum of that of all sequences
        self.uncached = MovingRatio(UNCACHED_SPAN, 1.0)  # the share of prompts that was not cached when they began
        self.updates = Updates()
        self._config = config
        self._rows = rows
        self._kv_cache = kv_cache
        self._queue = queue
        self._sessions = sessions
        self.on_release: list[Callable[[Sequence], object]] = []  # called before a sequence that has ended loses its row

    def add_request(self, request: Request) -> None:
        """Makes the sequence of a request, which may have output already, and puts it into the waiting queue."""
        primary = self.by_key.get(request.fork_of) if request.fork_of is not None else None
        tokens = np.concatenate((request.prompt, request.output)) if len(request.output) else request.prompt
        sequence = self.by_key[request.key] = Sequence(request, primary, tokens)
        sequence.name_pages(self._config.page_size, self._kv_cache.version)
        self._queue.enter_sequence(sequence)
        self._expect_all(sequence)

    def expect(self, sequence: Sequence, num_tokens: int) -> None:
        """A sequence has so many tokens to compute once it is admitted: those that are not found in the cache. 0: it does not wait."""
        self.num_expected += num_tokens - sequence.num_expected
        sequence.num_expected = num_tokens

    def _expect_all(self, sequence: Sequence) -> None:
        """The sequence waits, and nobody has looked yet how much of it is cached: probably as much as of the latest prompts."""
        num_tokens = len(sequence.tokens)
        if sequence.primary is not None and not sequence.started:
            num_expected = num_tokens - sequence.num_shared  # a fork
        else:
            num_expected = max(1, round(num_tokens * (1.0 if sequence.started else self.uncached.value)))
        self.expect(sequence, num_expected)

    def set_parked(self, sequence: Sequence, parked: bool) -> None:
        """The sequence is scheduled no more, or again."""
        sequence.parked = parked
        if sequence.state is SequenceState.RUNNING:
            self._rows.set_parked(sequence.row, parked)
            if parked:
                self._queue.push(*self._kv_cache.prefixes.abandon(sequence))  # nobody waits for one that computes nothing
        elif sequence.state is SequenceState.WAITING:
            (self.stop_waiting if parked else self._queue.push)(sequence)
            if parked:
                self.expect(sequence, 0)
            else:
                self._expect_all(sequence)

    def fail_rows(self, errors: Mapping[int, BaseException]) -> None:
        for row, error in errors.items():
            sequence = self._rows.sequences[row]
            if sequence is not None:
                self.finish(sequence, FinishReason.ERROR, error=error)

    def preempt(self, sequence: Sequence, *, for_share: bool = False) -> None:
        """Take row and pages from a running sequence that no step in flight computes, for others. `for_share`: for another tenant, which
        does not count for what the sequence is to be spared."""
        self.give_up_row(sequence)
        self.num_preemptions += 1
        sequence.preemptions += not (sequence.parked or for_share)  # a parked one loses nothing but its place

    def give_up_row(self, sequence: Sequence) -> None:
        """A running sequence that no step in flight computes loses row and pages; its tokens are computed again when it comes back."""
        sequence.tokens = self._rows.tokens[sequence.row, : self._rows.num_known[sequence.row]].copy()
        self._stop_running(sequence)
        self._queue.push(*self._kv_cache.release(sequence))
        if sequence.chain.version != self._kv_cache.version:
            sequence.name_pages(self._config.page_size, self._kv_cache.version)
        sequence.state, sequence.num_loads, sequence.num_loaded = SequenceState.WAITING, 0, 0
        if not sequence.parked:
            self._queue.push(sequence)
            self._expect_all(sequence)

    # ---- the end of a sequence ---------------------------------------------------------------------------------------

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: BaseException | None = None
    ) -> None:
        """End a sequence, whatever it is doing. Idempotent. What it holds is released once no step computes it any more."""
        if sequence.state in (SequenceState.LEAVING, SequenceState.FINISHED):
            return
        self.updates.finished.append(Finished(sequence.request.key, reason, stop_token_id, error))
        if sequence.state is SequenceState.WAITING:
            self.stop_waiting(sequence)
            self.expect(sequence, 0)
            self._forget(sequence)
            return
        self._stop_running(sequence)
        self._rows.deactivate(sequence.row)
        sequence.state = SequenceState.LEAVING
        self.num_leaving += 1
        if not self._rows.flights[sequence.row]:
            self.release(sequence)

    def stop_waiting(self, sequence: Sequence) -> None:
        """Take a WAITING sequence out of the queue, or from those that wait for others; a parked one is in neither."""
        if not self._queue.remove(sequence):
            self._kv_cache.stop_waiting(sequence)

    def _stop_running(self, sequence: Sequence) -> None:
        """A RUNNING sequence computes no further."""
        if not self._rows.decoding[sequence.row]:
            self.prefilling.remove(sequence)
        self._queue.push(*self._kv_cache.stop(sequence))

    def release(self, sequence: Sequence) -> None:
        for on_release in self.on_release:
            on_release(sequence)
        self.num_leaving -= 1
        request, rows, row = sequence.request, self._rows, sequence.row
        known = None if request.session is None else rows.tokens[row, : rows.num_known[row]].copy()
        self._queue.push(*self._kv_cache.release(sequence))
        if request.session is not None and known is not None and sequence.chain.version == self._kv_cache.version:
            name = request.tenant, request.session
            self._sessions.remember(name, sequence.chain, known)
            if self._kv_cache.loads is not None:
                note = self._sessions.write_note(known, request.cache_salt, request.adapter_number)
                self._kv_cache.loads.save_note(note_name(name), note)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.FINISHED
        key = sequence.request.key
        del self.by_key[key]
        self._queue.leave_sequence(sequence)
        self.updates.released.append(key)
