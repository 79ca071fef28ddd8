"""`ModelPool`: several models in one server, each with an engine of its own.

Owns which of them are loaded, asleep or neither: a model is loaded when a request asks for it, and gives its memory back when none has for
a while, or when another one needs it. Whoever uses a model holds it, and what is held keeps its memory. The model that the server was
started with is one of them, but its engine is another's to start and to close: it goes no further than to sleep.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from aengine.api.config import EngineConfig
from aengine.api.engine import ServedEngine
from aengine.api.errors import AEngineError, EngineStateError
from aengine.api.outputs import ModelInfo
from aengine.server.config.options import ModelChoice
from aengine.server.core.errors import ServiceError, clip

if TYPE_CHECKING:
    from aengine.server.core.core import Backend

_log = logging.getLogger("aengine")
LOOK_SECONDS = 0.25
"""Between two looks for models that nobody has used for long."""
_VALUE_BYTES = {"float32": 4}
_WEIGHT_FILES = ("*.safetensors", "*.bin")
LATEST = ":latest"
"""Behind the names that Ollama's programs have for models."""


@dataclass(eq=False, slots=True)
class PooledModel:
    """A model of the pool. `level`: 0 awake, 1 or 2 asleep as of `AsyncEngine.sleep`, 3 not loaded."""

    name: str
    choice: ModelChoice | None  # None: the engine is another's
    engine: ServedEngine | None = None
    level: int = 3
    users: int = 0
    used_at: float = field(default_factory=time.monotonic)
    info: ModelInfo | None = None  # once it was loaded
    num_bytes: int = 0  # when it is awake: as its files say, and then as the engine does
    num_weight_bytes: int = 0  # of them, which are kept at level 1
    keep_alive: float | None = None  # seconds, in place of those of the pool
    changing: asyncio.Task[None] | None = None
    backend: Backend | None = None

    @property
    def is_ready(self) -> bool:
        return self.level == 0 and self.engine is not None and self.engine.healthy and self.changing is None

    def bytes_at(self, level: int) -> int:
        return (self.num_bytes, self.num_weight_bytes, 0, 0)[level]


class ModelPool:
    """To be used in one event loop. One model is loaded at a time."""

    def __init__(
        self,
        first: ServedEngine,
        choices: Sequence[ModelChoice],
        *,
        aliases: Sequence[str] = (),
        memory: int | None = None,
        keep_alive: float = 300.0,
    ) -> None:
        """`memory`: bytes that weights and KV caches of all may take. `keep_alive`: seconds without a user after which a model goes one
        level further."""
        self.first = PooledModel("", None, first, level=0)
        self.others = {choice.name: PooledModel(choice.name, choice, keep_alive=choice.keep_alive) for choice in choices}
        self._aliases = [alias.partition("=")[::2] for alias in aliases]
        self._memory = memory
        self._keep_alive = keep_alive
        self._lock = asyncio.Lock()  # of whatever changes a level
        self._idle = asyncio.Event()  # something is held no more
        self._watching: asyncio.Task[None] | None = None

    # ---- names ---------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[PooledModel]:
        yield self.first
        yield from self.others.values()

    def find(self, name: str) -> PooledModel:
        """The model that `name` means, be it its own name, an alias or that of an adapter of it. Any other means the first, whose backend
        says that there is none of this name."""
        name = name if name in self.others else name.removesuffix(LATEST)
        if name in self.others:
            return self.others[name]
        for model in self.others.values():
            if model.engine is not None and model.engine.healthy and any(adapter.name == name for adapter in model.engine.adapters):
                return model
        target = next((target for alias, target in self._aliases if fnmatchcase(name, alias)), "")
        return self.others.get(target, self.first)

    # ---- holding -------------------------------------------------------------------------------------------------------

    async def hold(self, name: str, held: ExitStack) -> PooledModel:
        """The model of this name, awake until `held` is closed. Waits for it to be loaded, and for room. Raises `ServiceError`: NOT_READY
        where it cannot be loaded, INSUFFICIENT_MEMORY where it never finds room."""
        model = self.find(name)
        model.users += 1
        held.callback(self._release, model)
        while not model.is_ready:
            if model.choice is None and model.level == 0:
                break  # it is not started, or dead: whoever owns it says so
            if model.changing is None or model.changing.done():
                model.changing = asyncio.create_task(self._wake(model), name=f"aengine-model-{model.name}")
                model.changing.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits gets it, or nobody
            await asyncio.shield(model.changing)
        return model

    def view_of(self, backend: Backend, model: PooledModel) -> Backend:
        """What calls of this model use, in place of `backend`, which is that of the first."""
        if model.choice is None:
            return backend
        assert model.engine is not None
        if model.backend is None or model.backend.engine is not model.engine:
            model.backend = backend.for_model(model.engine, model.name)
        return model.backend

    def start(self) -> None:
        """Load what is pinned, and begin to look for models that nobody uses."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(), name="aengine-models")

    async def aclose(self) -> None:
        """Close the engines that the pool has made."""
        tasks = [model.changing for model in self if model.changing is not None]
        tasks += [] if self._watching is None else [self._watching]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.others.values():
            await self._unload(model)

    def _release(self, model: PooledModel) -> None:
        model.users -= 1
        model.used_at = time.monotonic()
        if not model.users:
            self._idle.set()

    # ---- changes -------------------------------------------------------------------------------------------------------

    async def _wake(self, model: PooledModel) -> None:
        try:
            async with self._lock:
                await self._find_room(model)
                if model.level == 3 or model.engine is None or not model.engine.healthy:
                    await self._load(model)
                elif model.level:
                    await model.engine.wake()
                model.level = 0
        except AEngineError as error:
            if isinstance(error, ServiceError):
                raise
            _log.error("model %s cannot be loaded: %s", model.name, error)
            raise ServiceError("NOT_READY", f"model {clip(model.name)!r} cannot be loaded; the server's log says why") from error
        finally:
            model.changing = None

    async def _load(self, model: PooledModel) -> None:
        assert model.choice is not None
        await self._unload(model)
        engine = _engine_of(model.choice)
        begin = time.monotonic()
        try:
            await engine.start()
        except BaseException:
            await engine.aclose()
            raise
        model.engine = engine
        self._measure(model)
        _log.info("model %s is loaded (%.2f s, %s)", model.name, time.monotonic() - begin, _mib(model.num_bytes))

    def _measure(self, model: PooledModel) -> None:
        if model.engine is None or not model.engine.healthy:
            return
        if model.choice is not None and model.choice.router is not None:  # whose replicas have memory of their own
            model.info = model.engine.model_info
            return
        with suppress(EngineStateError):  # another's, which is not started
            model.info, limits = model.engine.model_info, model.engine.engine_info
            model.name = model.name or model.info.name
            page_bytes = limits.page_size * model.info.kv_bytes_per_token // max(1, len(model.info.layer_groups))
            if not model.num_weight_bytes:
                model.num_weight_bytes = model.info.num_parameters * _VALUE_BYTES.get(model.info.dtype, 2)
            model.num_bytes = model.num_weight_bytes + limits.num_pages * page_bytes

    async def _unload(self, model: PooledModel) -> None:
        engine, model.engine, model.level = model.engine, None, 3
        if engine is not None:
            await engine.aclose()

    async def _find_room(self, wanted: PooledModel) -> None:
        """Have others give back what `wanted` needs, those first that nobody has used for longest."""
        if self._memory is None:
            return
        if wanted.choice is not None and wanted.choice.router is None and not wanted.num_bytes:
            wanted.num_weight_bytes = await asyncio.to_thread(_weight_bytes, wanted.choice.engine)
            wanted.num_bytes = wanted.num_weight_bytes + (wanted.choice.engine.kv_cache_memory or 0)
        self._measure(self.first)
        while True:
            self._idle.clear()
            missing = wanted.num_bytes + sum(one.bytes_at(one.level) for one in self if one is not wanted) - self._memory
            if missing <= 0:
                return
            pinned = sum(one.num_bytes for one in self if one is not wanted and one.choice is not None and one.choice.pin)
            if wanted.num_bytes + pinned > self._memory:
                raise ServiceError(
                    "INSUFFICIENT_MEMORY",
                    f"model {clip(wanted.name)!r} needs {_mib(wanted.num_bytes)}, and all models together have {_mib(self._memory)} "
                    "(models_memory)",
                )
            unused = [one for one in self if one is not wanted and self._may_rest(one) and one.bytes_at(one.level)]
            # Whoever waits for one that sleeps waits for this change to end: if nothing else gives room, it has to sleep deeper.
            unused = unused or [one for one in self if one is not wanted and one.level == 1 and self._is_ours(one) and one.bytes_at(1)]
            if unused:
                oldest = min(unused, key=lambda one: one.used_at)
                await self._rest(oldest, 1 if not oldest.level and oldest.num_bytes - oldest.num_weight_bytes >= missing else 2)
            else:
                await self._idle.wait()

    def _may_rest(self, model: PooledModel) -> bool:
        return not model.users and model.changing is None and self._is_ours(model)

    def _is_ours(self, model: PooledModel) -> bool:
        """Whether its memory is the pool's to take."""
        return model.choice is None or not (model.choice.pin or model.choice.router is not None)

    async def _rest(self, model: PooledModel, level: int) -> None:
        """Go to `level`, or further where the model cannot."""
        assert model.engine is not None
        if level < 3:
            before, model.level = model.level, level  # from now on who wants it has to wake it: what a sleeping engine is given waits
            try:
                await model.engine.sleep(level, "refuse")
                _log.info("model %s sleeps at level %d", model.name, level)
                return
            except AEngineError as error:
                model.level = before
                if model.choice is None:
                    model.used_at = time.monotonic()
                    _log.warning("model %s does not sleep: %s", model.name, error)
                    return
        if model.choice is not None:
            await self._unload(model)
            _log.info("model %s is unloaded", model.name)

    async def _watch(self) -> None:
        for model in self.others.values():
            if model.choice is not None and model.choice.pin:
                with ExitStack() as held, suppress(ServiceError):
                    await self.hold(model.name, held)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for model in self:
                seconds = self._keep_alive if model.keep_alive is None else model.keep_alive
                deepest = 2 if model.choice is None else 3
                if model.level < deepest and self._is_unused(model, seconds * (model.level + 1)):
                    async with self._lock:
                        if self._is_unused(model, seconds * (model.level + 1)):
                            self._measure(model)
                            await self._rest(model, model.level + 1)

    def _is_unused(self, model: PooledModel, seconds: float) -> bool:
        is_there = model.engine is not None and model.engine.healthy
        return is_there and self._may_rest(model) and time.monotonic() - model.used_at >= seconds


def _engine_of(choice: ModelChoice) -> ServedEngine:
    """One that is not started. What it is made of is imported with it."""
    if choice.router is not None:
        from aengine.router.router import Router

        return Router(choice.engine, config=choice.router)
    from aengine.engine.async_engine import AsyncEngine

    return AsyncEngine(choice.engine)


def _weight_bytes(config: EngineConfig) -> int:
    """About how many bytes the weights of a model will take, as its files say. Blocks. Raises ModelLoadError."""
    from aengine.models.loading.hub import resolve_model
    from aengine.runner.memory import BITS

    path = resolve_model(config.model, config.revision, config.load_format)
    files = [path] if path.is_file() else next((found for pattern in _WEIGHT_FILES if (found := list(path.glob(pattern)))), [])
    return int(sum(file.stat().st_size for file in files) * BITS.get(config.quantization, 16) / 16)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
