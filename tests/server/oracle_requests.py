"""Requests to a server on the oracle engine: what is asked of it by token ids and seed, and how its answer is compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oracle_engine import OracleEngine, idle

from aengine.v1.generation_pb2 import GenerationEvent
from aengine.v1.generation_service_pb2 import StreamGenerateRequest


def oracle_request(
    seed: int, *, prompt: Sequence[int] = (1, 2), max_tokens: int | None = None, request_id: str | None = None
) -> StreamGenerateRequest:
    """Runs to `max_tokens`, or until the context is full. Seeds tell the oracle's requests apart."""
    request = StreamGenerateRequest(request_id=request_id)
    spec = request.spec
    spec.prompt.token_ids.ids.extend(prompt)
    spec.sampling.seed = seed
    spec.stopping.ignore_eos = True
    if max_tokens is not None:
        spec.stopping.max_tokens = max_tokens
    spec.output.token_ids = True
    return request


def check_whole(engine: OracleEngine, seed: int, events: Sequence[GenerationEvent]) -> None:
    """A stream from its start to its end, with the tokens of the solo run."""
    assert [event.event_number for event in events] == list(range(len(events)))
    assert [events[0].HasField("started"), events[-2].HasField("sequence_finished"), events[-1].HasField("finished")] == [True] * 3
    assert ids_of(events) == engine.solo(seed)[0]


def ids_of(events: Iterable[GenerationEvent]) -> list[int]:
    return [token_id for event in events for token_id in event.delta.token_ids]


def num_generated(engine: OracleEngine, request_id: str) -> int:
    """Tokens of a request in flight, sent or not."""
    info = engine.request_info(request_id)
    assert info is not None
    return info.usage.completion_tokens


def nothing_left(engine: OracleEngine) -> bool:
    """Whether no request is left in the engine, and no command of one on its way."""
    return idle(engine) and not engine._core.serving.registry._bound._waiting
