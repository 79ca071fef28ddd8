"""`EngineService` and `ModelService`: what the server is and serves, and how busy it is, once or as a stream; and `grpc.health.v1.Health`:
whether it can take requests, all its services or none of them. They change nothing.

The servicer for asyncio of grpcio-health-checking has no `List`, and holds a lock while it writes: a watcher that does not read would keep
the server from notifying anyone else.

`grpc.reflection`: the schema for clients that do not have it, as v1 and as v1alpha, which are the same but for their name.
grpcio-reflection has v1alpha alone. Descriptors are copied into a pool of their own, so that nothing is added to what the process shares.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc import ServicerContext, aio
from grpc.aio import Server
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse, HealthListRequest, HealthListResponse  # type: ignore[attr-defined]  # the stubs are older than List
from grpc_health.v1.health_pb2_grpc import HealthServicer as Base
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio as reflection_aio
from prometheus_client.process_collector import ProcessCollector

from aengine.api import VERSION
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import CachedPages, EngineStats, ReplicaState
from aengine.server.core.calls_in_flight import current_caller
from aengine.server.core.core import Backend
from aengine.server.core.errors import ServiceError, clip
from aengine.server.core.model_pool import PooledModel
from aengine.v1 import engine_service_pb2 as messages
from aengine.v1 import model_service_pb2
from aengine.v1.engine_service_pb2_grpc import EngineServiceServicer
from aengine.v1.model_service_pb2_grpc import ModelServiceServicer
from aengine.wire.names import LIMITS
from aengine.wire.request import read_seconds
from aengine.wire.response import draft_messages, write_model

MIN_INTERVAL_SECONDS = 0.01
MAX_INTERVAL_SECONDS = 1.0  # also the longest time without a message to a watcher
DEFAULT_INTERVAL_SECONDS = 0.1
MIN_SALT_BYTES, MAX_SALT_BYTES = 8, 64
DEFAULT_DIGESTS = 65_536
MAX_DIGESTS = 1 << 20
STATES = {state: messages.ReplicaState.Value(f"REPLICA_STATE_{state.name}") for state in ReplicaState}


class ModelServicer(ModelServiceServicer):
    """Describes the model of the backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def GetModel(self, request: model_service_pb2.GetModelRequest, context: ServicerContext) -> model_service_pb2.GetModelResponse:
        response, models = model_service_pb2.GetModelResponse(), self._backend.models
        if models is not None and (model := models.find(request.model)).choice is not None:
            _write_pooled(model, response.model)
            return response
        write_model(self._backend.require_model(request.model)[0], self._backend.engine.adapters, response.model)
        return response

    async def ListModels(
        self, request: model_service_pb2.ListModelsRequest, context: ServicerContext
    ) -> model_service_pb2.ListModelsResponse:
        response = model_service_pb2.ListModelsResponse()
        for name in self._backend.model_names:
            write_model(self._backend.require_model(name)[0], self._backend.engine.adapters, response.models.add())
        for model in () if self._backend.models is None else self._backend.models.others.values():
            _write_pooled(model, response.models.add())
        return response


def _write_pooled(model: PooledModel, message: model_service_pb2.Model) -> None:
    """One of several models: all that is known of it, which before it was first loaded is its name."""
    if model.info is not None:
        adapters = model.engine.adapters if model.engine is not None and model.engine.healthy else ()
        write_model(replace(model.info, name=model.name), adapters, message)
    message.name = model.name


class EngineServicer(EngineServiceServicer):
    """Describes the backend's engine and the server in front of it."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._engine = backend.engine
        self._admission = backend.admission
        self._started_ns = _process_start_ns()

    async def GetServerInfo(self, request: messages.GetServerInfoRequest, context: ServicerContext) -> messages.GetServerInfoResponse:
        model, info = self._backend.model_info, self._engine.engine_info
        response = messages.GetServerInfoResponse(version=VERSION, model=model.name, device=model.device)
        response.started.FromNanoseconds(self._started_ns)
        if info.speculative != "off":
            response.speculation.mode = info.speculative
            response.speculation.model = info.speculative_model or ""
            response.speculation.max_drafts = info.max_drafts
        if info.tensor_parallel_size * info.pipeline_parallel_size > 1:
            response.ranks.tensor_parallel_size = info.tensor_parallel_size
            response.ranks.tensor_parallel_mode = info.tensor_parallel_mode
            response.ranks.pipeline_parallel_size = info.pipeline_parallel_size
        response.fingerprint = info.fingerprint
        response.fingerprint_parts.update(info.fingerprint_parts)
        limits = response.limits
        limits.max_model_len = model.max_model_len
        for name in LIMITS:
            setattr(limits, name, getattr(info, name))
        limits.max_message_bytes = self._backend.max_message_bytes
        return response

    async def GetLoad(self, request: messages.GetLoadRequest, context: ServicerContext) -> messages.GetLoadResponse:
        response = messages.GetLoadResponse(load=self._load())
        for one in self._engine.replicas():
            load = _write_load(one.report.stats, one.report.draining)
            response.replicas.add(name=one.name, state=STATES[one.state], load=load, generation=one.generation, reason=one.reason)
        return response

    async def WatchLoad(
        self, request: messages.WatchLoadRequest, context: ServicerContext
    ) -> AsyncGenerator[messages.WatchLoadResponse, None]:
        check = FieldChecks()
        interval = DEFAULT_INTERVAL_SECONDS
        if request.HasField("min_interval"):
            given = read_seconds(request.min_interval, "min_interval", check, MIN_INTERVAL_SECONDS, MAX_INTERVAL_SECONDS)
            interval = given or interval
        pages = None
        if request.HasField("page_digests"):
            pages = self._watch_pages(request.page_digests, check)
        check.finish(InvalidRequestError)
        async with AsyncExitStack() as stack:
            if pages is not None:
                await stack.enter_async_context(aclosing(pages))
            sent: messages.Load | None = None
            sent_at = 0.0
            while True:
                load, changed = self._load(), None if pages is None else await anext(pages)
                if load != sent or changed is not None or time.monotonic() - sent_at >= MAX_INTERVAL_SECONDS:
                    yield messages.WatchLoadResponse(load=load, pages=_write_pages(changed))
                    sent, sent_at = load, time.monotonic()  # after the client took it, or a slow one would get two at once
                silence = time.monotonic() - sent_at
                await asyncio.sleep(min(interval, MAX_INTERVAL_SECONDS - silence))

    def _watch_pages(self, options: messages.PageDigestOptions, check: FieldChecks) -> AsyncGenerator[CachedPages | None, None] | None:
        """None: there are violations."""
        if not current_caller().sees_all:
            raise ServiceError("ADMIN_ONLY", "page_digests: which prompts are cached is told to administrators only")
        if not MIN_SALT_BYTES <= len(options.salt) <= MAX_SALT_BYTES:
            check.add_violation("page_digests.salt", f"{len(options.salt)} bytes are not in [{MIN_SALT_BYTES}, {MAX_SALT_BYTES}]")
        most = options.most if options.HasField("most") else DEFAULT_DIGESTS
        if not 1 <= most <= MAX_DIGESTS:
            check.add_violation("page_digests.most", f"{most} is not in [1, {MAX_DIGESTS}]")
        return None if check.violations else self._engine.watch_pages(options.salt, most)

    def _load(self) -> messages.Load:
        return _write_load(self._engine.stats(), self._admission.closed)


def _write_load(stats: EngineStats, draining: bool) -> messages.Load:
    names = (field.name for field in messages.Load.DESCRIPTOR.fields if field.name not in ("draining", "drafts"))
    return messages.Load(draining=draining, drafts=draft_messages(stats.drafts), **{name: getattr(stats, name) for name in names})


def _write_pages(pages: CachedPages | None) -> messages.CachedPages | None:
    if pages is None:
        return None
    return messages.CachedPages(snapshot=pages.snapshot, added=pages.added, removed=pages.removed)


def _process_start_ns() -> int:
    """When the process started, in nanoseconds since the epoch; now, where the system does not say."""
    values = {metric.name: metric.samples[0].value for metric in ProcessCollector(registry=None).collect()}
    return round(values.get("process_start_time_seconds", time.time()) * 1e9)


class HealthServicer(Base):
    """The health of the services `names`. NOT_SERVING at first. To be used from one event loop."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._serving = False
        self._final = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Notify all who watch. Ignored after `shut_down`."""
        if serving != self._serving and not self._final:
            self._serving = serving
            self._changed.set()
            self._changed = asyncio.Event()

    def shut_down(self) -> None:
        """Set all services to NOT_SERVING, for good."""
        self.set_serving(False)
        self._final = True

    async def Check(self, request: HealthCheckRequest, context: aio.ServicerContext[Any, Any]) -> HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no service {clip(request.service)!r} here")
        return self._response()

    async def List(self, request: HealthListRequest, context: aio.ServicerContext[Any, Any]) -> HealthListResponse:
        return HealthListResponse(statuses=dict.fromkeys(self._names, self._response()))

    async def Watch(self, request: HealthCheckRequest, context: aio.ServicerContext[Any, Any]) -> AsyncIterator[HealthCheckResponse]:
        known = request.service in self._names
        sent: HealthCheckResponse | None = None
        while True:
            changed = self._changed
            response = self._response() if known else HealthCheckResponse(status=HealthCheckResponse.SERVICE_UNKNOWN)
            if response != sent:
                yield response
                sent = response
            else:
                await changed.wait()

    def _response(self) -> HealthCheckResponse:
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if self._serving else HealthCheckResponse.NOT_SERVING)


OLD, NEW = "v1alpha", "v1"


def add_reflection_to_server(schema: Iterable[ModuleType], server: Server) -> None:
    """Describe the services in the generated modules `schema`, and of reflection itself."""
    pool = DescriptorPool()
    names: list[str] = []
    for module in (*schema, reflection_pb2):
        _add_file(module.DESCRIPTOR, pool)
        names += service_names(module)
    (old,) = service_names(reflection_pb2)
    new = old.replace(OLD, NEW)
    described = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    pool.Add(text_format.Parse(described.replace(OLD, NEW), FileDescriptorProto()))
    servicer = reflection_aio.ReflectionServicer((*names, new), pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (old, new):
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def service_names(module: ModuleType) -> list[str]:
    """The full names of the services that a generated module defines."""
    return [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]


def _add_file(file: Any, pool: DescriptorPool) -> None:
    """Add a file and all that it depends on. Adding one twice does nothing."""
    for dependency in file.dependencies:
        _add_file(dependency, pool)
    pool.AddSerializedFile(file.serialized_pb)
