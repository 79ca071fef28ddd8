"""The events of a generation: built from tokens, numbered, and folded into one answer. Knows neither the engine nor gRPC.

Fields are set in place, one by one: several times cheaper than building nested messages from keywords, and this runs per token.
"""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta

from aengine.outputs import FinishReason, Token, Usage
from aengine.server.convert import FINISH_REASONS, write_usage
from aengine.v1.generation_pb2 import GeneratedSequence, GenerationEvent
from aengine.v1.generation_service_pb2 import GenerateResponse, StreamGenerateResponse


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

    def started(self, *, request_id: str, model: str, prompt_tokens: int, seed: int) -> StreamGenerateResponse:
        response = self._next()
        started = response.event.started
        started.request_id = request_id
        started.model = model
        started.prompt.num_tokens = prompt_tokens
        started.seed = seed
        return response

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
        return response

    def sequence_finished(self, token: Token, reason: FinishReason) -> StreamGenerateResponse:
        response = self._next()
        finished = response.event.sequence_finished
        finished.sequence_index = token.index
        finished.num_tokens = self._num_tokens[token.index]
        finished.finish.reason = FINISH_REASONS[reason]
        if reason is FinishReason.STOP_TOKEN:
            finished.finish.stop_token_id = token.token_id
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
            self._texts[delta.sequence_index].append(delta.text)
        elif kind == "sequence_finished":
            self._sequence(event.sequence_finished.sequence_index).finish.CopyFrom(event.sequence_finished.finish)
        elif kind == "started":
            started = event.started
            response.request_id = started.request_id
            response.model = started.model
            response.prompt.CopyFrom(started.prompt)
            response.seed = started.seed
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
