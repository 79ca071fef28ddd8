"""The events of a generation: built from tokens, numbered, and folded into one answer. Knows neither the engine nor gRPC.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and this runs per token.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import repeat

from google.protobuf.duration_pb2 import Duration

from aengine.outputs import FinishReason, Timing, Token, TokenLogprob, Usage
from aengine.server.calls.records import GenerationRecord
from aengine.server.generation.convert import write_usage
from aengine.v1.generation_pb2 import GenerationEvent, GenerationSpec, TokenLogprobs
from aengine.wire import FINISH_REASONS

MAX_PROMPT_LOGPROBS_BYTES = 512 * 1024
"""Of one event, so that streams that share a connection do not wait for each other."""
_ENTRY_BYTES = 9  # at most, of a float and a varint of 32 bits
_OTHER_BYTES = 128  # more than what frames the columns


class EventWriter:
    """Writes the events of one generation, numbered, and notes in `record` what they tell. Made when the request arrives.

    `new_event` gives the empty message of the next event, wherever the caller wants it; an event is whole when a method returns.
    """

    def __init__(
        self, record: GenerationRecord, new_event: Callable[[], GenerationEvent], *, text: bool, token_ids: bool, delta_tokens: int = 1
    ) -> None:
        """`delta_tokens`: most tokens in one delta."""
        self._record = record
        self._new_event = new_event
        self._text = text
        self._token_ids = token_ids
        self._delta_tokens = delta_tokens
        self._arrival_ns = time.time_ns()
        self._start = time.monotonic()
        self._last_token: float | None = None
        self._num_events = 0
        self._num_tokens: Counter[int] = Counter()

    def started(
        self,
        *,
        request_id: str,
        model: str,
        prompt_tokens: int,
        seed: int,
        effective_spec: GenerationSpec | None = None,
        resume_token: bytes = b"",
    ) -> None:
        started = self._next().started
        started.request_id = request_id
        started.model = model
        started.prompt.num_tokens = prompt_tokens
        started.seed = seed
        if effective_spec is not None:
            started.effective_spec.CopyFrom(effective_spec)
        if resume_token:
            started.resume_token = resume_token

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None]) -> Iterator[None]:
        """The events of a prompt's logprobs; each is written when it is asked for. None is a token without one."""
        top_k = max((len(entry.top_logprobs) for entry in entries if entry is not None), default=0)
        step = max(1, (MAX_PROMPT_LOGPROBS_BYTES - _OTHER_BYTES) // (_ENTRY_BYTES * (1 + top_k)))
        for offset in range(0, len(entries), step):
            piece = self._next().prompt_logprobs
            piece.token_offset = offset
            columns = piece.logprobs
            columns.top_k = top_k
            for entry in entries[offset : offset + step]:
                if entry is None:
                    columns.logprobs.append(math.nan)
                    columns.ranks.append(0)
                    columns.top_token_ids.extend(repeat(0, top_k))
                    columns.top_logprobs.extend(repeat(math.nan, top_k))
                else:
                    columns.logprobs.append(entry.logprob)
                    columns.ranks.append(entry.rank)
                    columns.top_token_ids.extend(entry.top_logprobs.keys())
                    columns.top_logprobs.extend(entry.top_logprobs.values())
            yield

    def tokens(self, tokens: Sequence[Token]) -> None:
        """The deltas of tokens that came together, and the ends of the sequences that end with them."""
        now = time.monotonic()
        if self._last_token is not None:
            self._record.inter_token_seconds.observe(now - self._last_token)
        self._last_token = now
        if self._delta_tokens == 1 or len(tokens) == 1:
            for token in tokens:
                self._run((token,))
        else:
            for run in _runs(tokens, self._delta_tokens):
                self._run(run)

    def finished(self, usage: Usage, timing: Timing) -> None:
        """The last event."""
        finished = self._next().finished
        write_usage(usage, finished.usage)
        times = finished.timing
        times.arrival.FromNanoseconds(self._arrival_ns)
        if timing.queue is not None:
            _write_seconds(times.queue, timing.queue)
        if timing.first_token is not None and timing.queue is not None:
            _write_seconds(times.prefill, timing.first_token - timing.queue)
            _write_seconds(times.first_token, timing.first_token)
            _write_seconds(times.decode, timing.decode or 0.0)
        _write_seconds(times.total, time.monotonic() - self._start)

    def _run(self, run: Sequence[Token]) -> None:
        """The delta of tokens of one sequence, of which only the last may end it; and that end."""
        last = run[-1]
        index, reason = last.index, last.finish_reason
        num_tokens = len(run) - (last.token_id < 0)  # a closing token brings nothing but the end and text that was held back
        text = ("".join([token.text for token in run]) if len(run) > 1 else last.text) if self._text else ""
        if num_tokens or text:
            delta = self._next().delta
            if index:
                delta.sequence_index = index
            offset = self._num_tokens[index]
            delta.token_offset = offset
            delta.num_tokens = num_tokens
            self._num_tokens[index] = offset + num_tokens
            if self._token_ids:
                delta.token_ids.extend([token.token_id for token in run[:num_tokens]])
            if text:
                delta.text = text
            if run[0].logprob is not None:
                _write_logprobs(run[:num_tokens], delta.logprobs)
            if reason is not None:
                delta.last = True
        if reason is not None and reason is not FinishReason.ERROR:
            self._sequence_finished(last, reason)

    def _sequence_finished(self, token: Token, reason: FinishReason) -> None:
        """`token` is the last one of its sequence."""
        self._record.finish_reasons.append(reason)
        finished = self._next().sequence_finished
        finished.sequence_index = token.index
        finished.num_tokens = self._num_tokens[token.index]
        finished.finish.reason = FINISH_REASONS[reason]
        if reason is FinishReason.STOP_TOKEN:
            finished.finish.stop_token_id = token.token_id
        elif isinstance(token.stop_reason, str):
            finished.finish.stop_string = token.stop_reason

    def _next(self) -> GenerationEvent:
        event = self._new_event()
        event.event_number = self._num_events
        self._num_events += 1
        return event


def _runs(tokens: Sequence[Token], most: int) -> Iterator[list[Token]]:
    """The tokens of each sequence together, at most so many, in an order in which nothing is late."""
    runs: dict[int, list[Token]] = {}
    for token in tokens:
        run = runs.setdefault(token.index, [])
        run.append(token)
        if len(run) == most or token.finish_reason is not None:
            yield runs.pop(token.index)
    yield from runs.values()


def _write_logprobs(run: Sequence[Token], columns: TokenLogprobs) -> None:
    for token in run:
        columns.logprobs.append(token.logprob if token.logprob is not None else math.nan)
        columns.ranks.append(token.rank or 0)
        if token.top_logprobs:
            columns.top_k = len(token.top_logprobs)
            columns.top_token_ids.extend(token.top_logprobs.keys())
            columns.top_logprobs.extend(token.top_logprobs.values())


def _write_seconds(message: Duration, seconds: float) -> None:
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
