"""The events of a generation: built from tokens, numbered, and folded into one answer. Knows neither the engine nor gRPC.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and this runs per token.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import repeat

from aengine.outputs import FinishReason, Token, TokenLogprob, Usage
from aengine.server.convert import FINISH_REASONS, write_usage
from aengine.v1.generation_pb2 import GeneratedSequence, GenerationEvent, GenerationSpec, TokenLogprobs
from aengine.v1.generation_service_pb2 import GenerateResponse, StreamGenerateResponse

MAX_PROMPT_LOGPROBS_BYTES = 512 * 1024
"""Of one event, so that streams that share a connection do not wait for each other."""
_ENTRY_BYTES = 9  # at most, of a float and a varint of 32 bits
_OTHER_BYTES = 128  # more than what frames the columns


class EventWriter:
    """Numbers the events of one generation and measures its times. Made when the request arrives."""

    def __init__(self, *, text: bool, token_ids: bool) -> None:
        self._text = text
        self._token_ids = token_ids
        self._arrival_ns = time.time_ns()
        self._start = time.monotonic()
        self._first_token: float | None = None
        self._num_events = 0
        self._num_tokens: Counter[int] = Counter()

    def started(
        self, *, request_id: str, model: str, prompt_tokens: int, seed: int, effective_spec: GenerationSpec | None = None
    ) -> StreamGenerateResponse:
        response = self._next()
        started = response.event.started
        started.request_id = request_id
        started.model = model
        started.prompt.num_tokens = prompt_tokens
        started.seed = seed
        if effective_spec is not None:
            started.effective_spec.CopyFrom(effective_spec)
        return response

    def prompt_logprobs(self, entries: Sequence[TokenLogprob | None]) -> Iterator[StreamGenerateResponse]:
        """The events of a prompt's logprobs; each is built when it is asked for. None is a token without one."""
        top_k = max((len(entry.top_logprobs) for entry in entries if entry is not None), default=0)
        step = max(1, (MAX_PROMPT_LOGPROBS_BYTES - _OTHER_BYTES) // (_ENTRY_BYTES * (1 + top_k)))
        for offset in range(0, len(entries), step):
            response = self._next()
            piece = response.event.prompt_logprobs
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
            yield response

    def delta(self, token: Token) -> StreamGenerateResponse | None:
        """The event of a token, or None for a closing token that brings nothing but the end of its sequence."""
        generated = token.token_id >= 0
        text = token.text if self._text else ""
        if not generated and not text:
            return None
        if self._first_token is None and generated:
            self._first_token = time.monotonic() - self._start
        response = self._next()
        delta = response.event.delta
        delta.sequence_index = token.index
        delta.token_offset = self._num_tokens[token.index]
        if generated:
            delta.num_tokens = 1
            self._num_tokens[token.index] += 1
            if self._token_ids:
                delta.token_ids.append(token.token_id)
        if text:
            delta.text = text
        if token.logprob is not None:
            columns = delta.logprobs
            columns.logprobs.append(token.logprob)
            columns.ranks.append(token.rank or 0)
            if token.top_logprobs:
                columns.top_k = len(token.top_logprobs)
                columns.top_token_ids.extend(token.top_logprobs.keys())
                columns.top_logprobs.extend(token.top_logprobs.values())
        return response

    def sequence_finished(self, token: Token, reason: FinishReason) -> StreamGenerateResponse:
        """`token` is the last one of its sequence."""
        response = self._next()
        finished = response.event.sequence_finished
        finished.sequence_index = token.index
        finished.num_tokens = self._num_tokens[token.index]
        finished.finish.reason = FINISH_REASONS[reason]
        if reason is FinishReason.STOP_TOKEN:
            finished.finish.stop_token_id = token.token_id
        elif isinstance(token.stop_reason, str):
            finished.finish.stop_string = token.stop_reason
        return response

    def finished(self, usage: Usage) -> StreamGenerateResponse:
        response = self._next()
        finished = response.event.finished
        write_usage(usage, finished.usage)
        timing = finished.timing
        timing.arrival.FromNanoseconds(self._arrival_ns)
        if self._first_token is not None:
            timing.first_token.FromTimedelta(timedelta(seconds=self._first_token))
        timing.total.FromTimedelta(timedelta(seconds=time.monotonic() - self._start))
        return response

    def _next(self) -> StreamGenerateResponse:
        response = StreamGenerateResponse()
        response.event.event_number = self._num_events
        self._num_events += 1
        return response


class EventFold:
    """Adds up the events of one generation to the whole answer."""

    def __init__(self) -> None:
        self._response = GenerateResponse()
        self._texts: list[list[str]] = []  # per sequence; joined once, since growing a field is quadratic

    def add(self, event: GenerationEvent) -> None:
        response = self._response
        kind = event.WhichOneof("event")
        if kind == "delta":
            delta = event.delta
            sequence = self._sequence(delta.sequence_index)
            sequence.token_ids.extend(delta.token_ids)
            sequence.num_tokens += delta.num_tokens
            if delta.HasField("logprobs"):
                _extend(sequence.logprobs, delta.logprobs)
            self._texts[delta.sequence_index].append(delta.text)
        elif kind == "sequence_finished":
            self._sequence(event.sequence_finished.sequence_index).finish.CopyFrom(event.sequence_finished.finish)
        elif kind == "started":
            started = event.started
            response.request_id = started.request_id
            response.model = started.model
            response.prompt.CopyFrom(started.prompt)
            response.seed = started.seed
            if started.HasField("effective_spec"):
                response.effective_spec.CopyFrom(started.effective_spec)
        elif kind == "prompt_logprobs":
            _extend(response.prompt_logprobs, event.prompt_logprobs.logprobs)
        elif kind == "finished":
            response.usage.CopyFrom(event.finished.usage)
            response.timing.CopyFrom(event.finished.timing)

    def response(self) -> GenerateResponse:
        """The answer so far; whole once the last event was added."""
        for sequence, texts in zip(self._response.sequences, self._texts, strict=True):
            sequence.text = "".join(texts)
        return self._response

    def _sequence(self, index: int) -> GeneratedSequence:
        sequences = self._response.sequences
        while len(sequences) <= index:
            sequences.add(index=len(sequences))
            self._texts.append([])
        return sequences[index]


def _extend(columns: TokenLogprobs, more: TokenLogprobs) -> None:
    """Add the tokens of `more`, which report as many alternatives each."""
    columns.top_k = more.top_k
    columns.logprobs.extend(more.logprobs)
    columns.ranks.extend(more.ranks)
    columns.top_token_ids.extend(more.top_token_ids)
    columns.top_logprobs.extend(more.top_logprobs)
