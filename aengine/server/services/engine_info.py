"""`EngineService`: what the server is and how busy it is, asked for or watched. Changes nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from prometheus_client.process_collector import ProcessCollector

import aengine
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.server.generation.admission import Admission
from aengine.server.generation.durations import read_seconds
from aengine.v1 import engine_service_pb2 as messages
from aengine.v1.engine_service_pb2_grpc import EngineServiceServicer

if TYPE_CHECKING:
    import grpc

    from aengine.engine.async_engine import AsyncEngine

MIN_INTERVAL_SECONDS = 0.01
MAX_INTERVAL_SECONDS = 1.0  # also the longest that a watcher hears nothing
DEFAULT_INTERVAL_SECONDS = 0.1


class EngineServicer(EngineServiceServicer):
    """Describes `engine` and the server in front of it."""

    def __init__(self, engine: AsyncEngine, admission: Admission, *, max_message_bytes: int) -> None:
        self._engine = engine
        self._admission = admission
        self._max_message_bytes = max_message_bytes
        self._started_ns = _process_start_ns()

    async def GetServerInfo(self, request: messages.GetServerInfoRequest, context: grpc.ServicerContext) -> messages.GetServerInfoResponse:
        model, config = self._engine.model_info, self._engine.config
        response = messages.GetServerInfoResponse(version=aengine.__version__, model=model.name, device=model.device)
        response.started.FromNanoseconds(self._started_ns)
        limits = response.limits
        limits.max_model_len = model.max_model_len
        limits.max_num_seqs = config.num_seqs
        limits.max_num_batched_tokens = config.max_num_batched_tokens or 0
        limits.max_queued_requests = config.max_queued_requests or 0
        limits.max_queued_tokens = config.max_queued_tokens or 0
        limits.max_logprobs = config.max_logprobs
        limits.max_message_bytes = self._max_message_bytes
        limits.page_size = config.page_size
        limits.num_pages = self._engine.stats().pages_total
        return response

    async def GetLoad(self, request: messages.GetLoadRequest, context: grpc.ServicerContext) -> messages.GetLoadResponse:
        return messages.GetLoadResponse(load=self._load())

    async def WatchLoad(
        self, request: messages.WatchLoadRequest, context: grpc.ServicerContext
    ) -> AsyncGenerator[messages.WatchLoadResponse, None]:
        interval = _read_interval(request)
        told: messages.Load | None = None
        told_at = 0.0
        while True:
            load = self._load()
            if load != told or time.monotonic() - told_at >= MAX_INTERVAL_SECONDS:
                yield messages.WatchLoadResponse(load=load)
                told, told_at = load, time.monotonic()  # after the client took it, or a slow one would get two at once
            silence = time.monotonic() - told_at
            await asyncio.sleep(min(interval, MAX_INTERVAL_SECONDS - silence))

    def _load(self) -> messages.Load:
        stats = self._engine.stats()
        return messages.Load(
            running=stats.running,
            waiting=stats.waiting,
            parked=stats.parked,
            pages_used=stats.pages_used,
            pages_total=stats.pages_total,
            cached_tokens=stats.cached_tokens,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
            completion_tokens=stats.completion_tokens,
            steps=stats.steps,
            preemptions=stats.preemptions,
            draining=self._admission.closed,
            paused=stats.paused,
        )


def _read_interval(request: messages.WatchLoadRequest) -> float:
    """Seconds. Raises `InvalidRequestError`."""
    if not request.HasField("min_interval"):
        return DEFAULT_INTERVAL_SECONDS
    violations: list[FieldViolation] = []
    interval = read_seconds(request.min_interval, "min_interval", violations)
    if interval is not None and not MIN_INTERVAL_SECONDS <= interval <= MAX_INTERVAL_SECONDS:
        description = f"{interval:g} s is not in [{MIN_INTERVAL_SECONDS:g}, {MAX_INTERVAL_SECONDS:g}] s"
        violations.append(FieldViolation("min_interval", description))
    if interval is None or violations:
        raise InvalidRequestError(violations)
    return interval


def _process_start_ns() -> int:
    """When the process started, in nanoseconds since the epoch; now, where the system does not tell."""
    starts = (
        metric.samples[0].value for metric in ProcessCollector(registry=None).collect() if metric.name == "process_start_time_seconds"
    )
    return round(next(starts, time.time()) * 1e9)
