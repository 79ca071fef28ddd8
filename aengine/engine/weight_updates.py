"""`ModelWeights`: how an engine sleeps, wakes, and gets new weights.

Lives in the event loop. Knows where the weights came from last.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import anyio

from aengine.api.errors import EngineStateError, FieldViolation, refusal
from aengine.api.outputs import MemoryUse
from aengine.api.weight_sources import WeightSource
from aengine.engine.edges import Command, RunningRequests, Sleep, Wake
from aengine.engine.operations import ModelChanges, Turn
from aengine.engine.registry import Registry
from aengine.runner.contract import NewWeights, Runner

_RUNNING = ("park", "cancel", "refuse")


class ModelWeights:
    """The methods are those of `AsyncEngine`."""

    def __init__(
        self,
        runner: Runner,
        changes: ModelChanges,
        registry: Registry,
        run: Callable[[Callable[[Future[Any]], Command]], Awaitable[Any]],
        sleep_level: Callable[[], int],
    ) -> None:
        """`run` has the step thread carry out a command, and returns or raises what it replies."""
        self._runner = runner
        self._changes = changes
        self._registry = registry
        self._run = run
        self._sleep_level = sleep_level
        self._source: str | None = ""  # of the weights, a path; "": where the model came from; None: memory, or several

    async def sleep(self, level: int, running: str) -> MemoryUse:
        violations = [] if level in (1, 2) else [FieldViolation("level", f"{level} is not 1 or 2")]
        if running not in _RUNNING:
            violations.append(FieldViolation("running", f"{running!r} is not one of {', '.join(_RUNNING)}"))
        if violations:
            raise refusal(violations)
        async with self._changes.turn():
            if running == "refuse" and (count := self._registry.num_requests):
                raise EngineStateError(f"requests in flight forbid the sleep: {count}")
            if running == "cancel":
                await self._registry.cancel_all()
            with anyio.CancelScope(shield=True):  # bounded by one step: what has its turn next knows whether the engine sleeps
                memory: MemoryUse = await self._run(lambda reply: Sleep(reply, level))
            return memory

    async def wake(self, source: WeightSource | None) -> MemoryUse:
        async with self._changes.turn():
            level = self._sleep_level()
            if source is not None and level == 0:
                raise EngineStateError("the engine is awake; use update_weights")
            before = await anyio.to_thread.run_sync(self._runner.memory_used)  # the driver of a device may keep it waiting
            prepared = None
            if source is not None or level == 2:
                if source is None and self._source is None:
                    raise EngineStateError("the weights came from memory or in parts, and cannot be read again; give wake() a source")
                change = NewWeights((self._source or None) if source is None else source)
                prepared = await self._changes.prepare(lambda: change)
            with anyio.CancelScope(shield=True):  # what is prepared is applied, and it is known where the weights are from
                if prepared is not None:
                    await self._run(lambda reply: Sleep(reply, 2))
                memory: MemoryUse = await self._run(lambda reply: Wake(reply, prepared, replaces=source is not None))
                if source is not None:
                    self._source = _path_of(source)
            return replace(memory, before=before)

    async def update(self, source: WeightSource, running: str, partial: bool) -> int:
        modes = [mode.value for mode in RunningRequests]
        if running not in modes:
            raise refusal([FieldViolation("running", f"{running!r} is not one of {', '.join(modes)}")])
        return await self._changes.run_on(self._update(NewWeights(source, partial), RunningRequests(running), self._changes.turn()))

    async def _update(self, change: NewWeights, running: RunningRequests, turn: Turn) -> int:
        async with turn:
            await self._changes.change(lambda: change, running)
            self._source = None if change.partial else _path_of(change.source)
            return self._registry.weights_version


def _path_of(source: WeightSource) -> str | None:
    """None: it cannot be read again."""
    return os.fspath(source) if isinstance(source, str | os.PathLike) else None
