"""The fold of a generation's events to one whole response, which is what a unary call has to answer with."""

from __future__ import annotations

from aengine.v1.generation_pb2 import AssistantMessage, ChatEvent, GeneratedSequence, GenerationEvent, TokenLogprobs
from aengine.v1.generation_service_pb2 import GenerateResponse


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
            for part in delta.chat_events:
                _add_part(sequence.message, part)
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
        """The response so far; whole once the last event was added."""
        for sequence, texts in zip(self._response.sequences, self._texts, strict=True):
            sequence.text = "".join(texts)
        return self._response

    def _sequence(self, index: int) -> GeneratedSequence:
        sequences = self._response.sequences
        while len(sequences) <= index:
            sequences.add(index=len(sequences))
            self._texts.append([])
        return sequences[index]


def _add_part(message: AssistantMessage, part: ChatEvent) -> None:
    kind = part.WhichOneof("event")
    if kind == "content":
        message.content += part.content
    elif kind == "reasoning":
        message.reasoning += part.reasoning
    elif kind == "call_started":
        assert part.call_started.index == len(message.tool_calls)
        message.tool_calls.add(id=part.call_started.id, name=part.call_started.name)
    elif kind == "arguments":
        message.tool_calls[part.arguments.index].arguments += part.arguments.text
    elif kind == "call_ended":
        message.tool_calls[part.call_ended.index].complete = part.call_ended.complete


def _extend(columns: TokenLogprobs, more: TokenLogprobs) -> None:
    """Add the tokens of `more`, which report as many alternatives each."""
    columns.top_k = more.top_k
    columns.logprobs.extend(more.logprobs)
    columns.ranks.extend(more.ranks)
    columns.top_token_ids.extend(more.top_token_ids)
    columns.top_logprobs.extend(more.top_logprobs)
