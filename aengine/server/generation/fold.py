"""The fold of a generation's events to one whole answer: what makes a unary reply equal to its stream."""

from __future__ import annotations

import sys

from aengine.server.calls.errors import AnswerTooLargeError
from aengine.v1.generation_pb2 import GeneratedSequence, GenerationEvent, TokenLogprobs
from aengine.v1.generation_service_pb2 import GenerateResponse


class EventFold:
    """Adds up the events of one generation to the whole answer."""

    def __init__(self, max_bytes: int = sys.maxsize) -> None:
        """`max_bytes`: of the answer."""
        self._max_bytes = max_bytes
        self._num_bytes = 0  # of what makes answers large, at least
        self._response = GenerateResponse()
        self._texts: list[list[str]] = []  # per sequence; joined once, since growing a field is quadratic

    def add(self, event: GenerationEvent) -> None:
        """Raises `AnswerTooLargeError` as soon as the answer cannot but be too large."""
        response = self._response
        kind = event.WhichOneof("event")
        if kind == "delta":
            delta = event.delta
            sequence = self._sequence(delta.sequence_index)
            sequence.token_ids.extend(delta.token_ids)
            sequence.num_tokens += delta.num_tokens
            self._grow(len(delta.text) + len(delta.token_ids))
            if delta.HasField("logprobs"):
                self._grow(_least_bytes(delta.logprobs))
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
            self._grow(_least_bytes(event.prompt_logprobs.logprobs))
            _extend(response.prompt_logprobs, event.prompt_logprobs.logprobs)
        elif kind == "finished":
            response.usage.CopyFrom(event.finished.usage)
            response.timing.CopyFrom(event.finished.timing)

    def response(self) -> GenerateResponse:
        """The answer so far; whole once the last event was added. Raises `AnswerTooLargeError`."""
        for sequence, texts in zip(self._response.sequences, self._texts, strict=True):
            sequence.text = "".join(texts)
        self._check(self._response.ByteSize())
        return self._response

    def _grow(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._check(self._num_bytes)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise AnswerTooLargeError(f"the answer takes more than {self._max_bytes} bytes in one message")

    def _sequence(self, index: int) -> GeneratedSequence:
        sequences = self._response.sequences
        while len(sequences) <= index:
            sequences.add(index=len(sequences))
            self._texts.append([])
        return sequences[index]


def _least_bytes(columns: TokenLogprobs) -> int:
    return 4 * (len(columns.logprobs) + len(columns.top_logprobs))  # what the floats take


def _extend(columns: TokenLogprobs, more: TokenLogprobs) -> None:
    """Add the tokens of `more`, which report as many alternatives each."""
    columns.top_k = more.top_k
    columns.logprobs.extend(more.logprobs)
    columns.ranks.extend(more.ranks)
    columns.top_token_ids.extend(more.top_token_ids)
    columns.top_logprobs.extend(more.top_logprobs)
