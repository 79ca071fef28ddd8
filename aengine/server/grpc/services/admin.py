"""`AdminService`: what an operator can change while the server runs.

Knows nothing of who may call it: calls that come here were let through.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from grpc import ServicerContext

from aengine.api.engine import ServedEngine
from aengine.api.errors import FieldViolation, InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import MemoryUse
from aengine.server.core.calls_in_flight import Admission
from aengine.server.core.errors import ServiceError, clip
from aengine.v1 import admin_service_pb2 as messages
from aengine.v1.admin_service_pb2_grpc import AdminServiceServicer
from aengine.wire.request import read_seconds
from aengine.wire.response import read_kv_pages, write_adapter, write_kv_page

_PAUSES, _SLEEPS, _UPDATES = messages.PauseMode, messages.SleepMode, messages.UpdateMode


class AdminServicer(AdminServiceServicer):
    """Operates `engine` and its server, whose generations `admission` counts.

    `drain` begins to shut the server down and returns at once; its argument is the grace in seconds, None for that of the
    server's configuration. Adapters and weights are loaded from below the directories `weights_roots` alone.
    """

    def __init__(
        self, engine: ServedEngine, admission: Admission, drain: Callable[[float | None], None], weights_roots: Sequence[str] = ()
    ) -> None:
        self._engine = engine
        self._admission = admission
        self._drain = drain
        self._roots = [Path(root).resolve() for root in weights_roots]

    async def FlushCache(self, request: messages.FlushCacheRequest, context: ServicerContext) -> messages.FlushCacheResponse:
        return messages.FlushCacheResponse(freed_pages=await self._engine.flush_cache())

    async def PauseGeneration(self, request: messages.PauseGenerationRequest, context: ServicerContext) -> messages.PauseGenerationResponse:
        mode = _read_mode(_PAUSES, request.mode, default="keep")
        return messages.PauseGenerationResponse(cancelled_requests=await self._engine.pause(cancel=mode == "cancel"))

    async def ContinueGeneration(
        self, request: messages.ContinueGenerationRequest, context: ServicerContext
    ) -> messages.ContinueGenerationResponse:
        await self._engine.unpause()
        return messages.ContinueGenerationResponse()

    async def Drain(self, request: messages.DrainRequest, context: ServicerContext) -> messages.DrainResponse:
        check = FieldChecks()
        grace = read_seconds(request.grace, "grace", check, 0) if request.HasField("grace") else None
        if grace is not None and request.replica:
            check.add_violation("grace", "cannot be combined with replica, whose requests go on elsewhere")
        check.finish(InvalidRequestError)
        if request.replica:
            return messages.DrainResponse(requests_in_flight=await self._engine.drain_replica(request.replica))
        response = messages.DrainResponse(requests_in_flight=self._admission.in_flight)
        self._drain(grace)
        return response

    async def Profile(self, request: messages.ProfileRequest, context: ServicerContext) -> messages.ProfileResponse:
        check = FieldChecks()
        given: dict[str, Any] = {"num_steps": request.num_steps} if request.HasField("num_steps") else {}
        if request.HasField("time_limit"):
            given["seconds"] = read_seconds(request.time_limit, "time_limit", check)
        check.finish(InvalidRequestError)
        try:
            return messages.ProfileResponse(trace=await self._engine.profile(**given))
        except InvalidRequestError as error:
            names = {"seconds": "time_limit"}
            found = [FieldViolation(names.get(one.field, one.field), one.description) for one in error.violations]
            raise InvalidRequestError(found) from error

    async def LoadAdapter(self, request: messages.LoadAdapterRequest, context: ServicerContext) -> messages.LoadAdapterResponse:
        info = await self._engine.load_adapter(request.name, await self._read_path(request.path))
        response = messages.LoadAdapterResponse()
        write_adapter(info, response.adapter)
        return response

    async def UnloadAdapter(self, request: messages.UnloadAdapterRequest, context: ServicerContext) -> messages.UnloadAdapterResponse:
        await self._engine.unload_adapter(request.name)
        return messages.UnloadAdapterResponse()

    async def Sleep(self, request: messages.SleepRequest, context: ServicerContext) -> messages.SleepResponse:
        level = request.level if request.HasField("level") else 1
        mode = _read_mode(_SLEEPS, request.mode, default="park")
        if mode == "refuse" and self._admission.in_flight:
            raise ServiceError("REQUESTS_IN_FLIGHT", f"{self._admission.in_flight} requests are in flight")
        memory = await self._engine.sleep(level, mode)
        return messages.SleepResponse(memory=_memory(memory))

    async def Wake(self, request: messages.WakeRequest, context: ServicerContext) -> messages.WakeResponse:
        return messages.WakeResponse(memory=_memory(await self._engine.wake()))

    async def UpdateWeights(self, request: messages.UpdateWeightsRequest, context: ServicerContext) -> messages.UpdateWeightsResponse:
        mode = _read_mode(_UPDATES, request.mode, default="keep")
        version = await self._engine.update_weights(await self._read_path(request.path), mode, request.partial)
        return messages.UpdateWeightsResponse(weights_version=version)

    # ---- KV for other servers ------------------------------------------------------------------------------------------

    async def FindKv(self, request: messages.FindKvRequest, context: ServicerContext) -> messages.FindKvResponse:
        prefix = request.prefix
        found = await self._engine.find_kv(_read_ids(prefix), cache_salt=prefix.cache_salt, adapter=prefix.adapter or None)
        return messages.FindKvResponse(identity=found.identity, num_tokens=found.num_tokens)

    async def ExportKv(
        self, request: messages.ExportKvRequest, context: ServicerContext
    ) -> AsyncGenerator[messages.ExportKvResponse, None]:
        prefix = request.prefix
        pages = self._engine.export_kv(
            _read_ids(prefix),
            identity=request.identity,
            cache_salt=prefix.cache_salt,
            adapter=prefix.adapter or None,
            skip_tokens=request.skip_tokens,
        )
        async with aclosing(pages):
            async for page in pages:
                for part in write_kv_page(page):
                    yield messages.ExportKvResponse(page=part)

    async def ImportKv(
        self, request_iterator: AsyncIterator[messages.ImportKvRequest], context: ServicerContext
    ) -> messages.ImportKvResponse:
        try:
            return messages.ImportKvResponse(num_tokens=await self._import_kv(request_iterator))
        finally:  # a client that still writes when its call ends does not see why
            async for _ in request_iterator:
                pass

    async def _import_kv(self, request_iterator: AsyncIterator[messages.ImportKvRequest]) -> int:
        first = await anext(request_iterator, messages.ImportKvRequest())
        if first.WhichOneof("part") != "prefix":
            raise InvalidRequestError.of("prefix", "must come first")
        prefix = first.prefix.prefix
        async with aclosing(read_kv_pages(part.page async for part in request_iterator)) as pages:
            return await self._engine.import_kv(
                _read_ids(prefix), pages, identity=first.prefix.identity, cache_salt=prefix.cache_salt, adapter=prefix.adapter or None
            )

    async def _read_path(self, path: str) -> str:
        """Raises `InvalidRequestError` for a path that is not below one of the roots, or has something below it that is not, with all links
        followed."""
        if not self._roots:
            raise InvalidRequestError.of("path", "this server loads nothing while it runs: it has no weights_roots")
        if not path or "\0" in path:
            what = "NUL is in it" if path else "it is empty"
            raise InvalidRequestError.of("path", f"must be a path below a directory of the server's weights_roots, and {what}")
        found, outside = await asyncio.to_thread(_outside_of, self._roots, path)
        if outside is not None:
            where = "" if outside == path else f" because of {clip(outside)!r}"
            raise InvalidRequestError.of("path", f"{clip(path)!r} is not below a directory of the server's weights_roots{where}")
        return found


def _read_ids(prefix: messages.KvPrefix) -> Sequence[int]:
    """Raises `InvalidRequestError`."""
    if not prefix.token_ids:
        raise InvalidRequestError.of("prefix.token_ids", "must not be empty")
    return prefix.token_ids


def _outside_of(roots: Sequence[Path], path: str) -> tuple[str, str | None]:
    """`path` with all links followed; and itself, or what is below it, where that is outside of the roots or cannot be followed."""
    try:
        found = Path(path).resolve()
    except (OSError, RuntimeError):  # a circle of links
        return path, path
    seen: set[Path] = set()
    left = [(path, found)]
    while left:
        name, real = left.pop()
        if not any(real.is_relative_to(root) for root in roots):
            return str(found), name
        if real in seen or not real.is_dir():
            continue
        seen.add(real)
        for entry in real.iterdir():
            try:
                left.append((str(entry), entry.resolve()))
            except (OSError, RuntimeError):
                return str(found), str(entry)
    return str(found), None


def _read_mode(modes: Any, number: int, *, default: str) -> str:
    """The engine's name of a mode. 0 is the default. Raises `InvalidRequestError`."""
    names = {value: name for name, value in modes.items()}
    prefix = names[0].removesuffix("UNSPECIFIED")
    if number not in names:
        known = ", ".join(f"{value} ({name})" for value, name in names.items() if value)
        raise InvalidRequestError.of("mode", f"{number} is none of {known}")
    return names[number].removeprefix(prefix).lower() if number else default


def _memory(use: MemoryUse) -> messages.MemoryUse:
    return messages.MemoryUse(bytes_before=use.before, bytes_after=use.after)
