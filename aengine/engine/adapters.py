"""`Adapters`: the adapters of an engine by name, from the call that loads one to the end of the one that unloads it, and the requests that
use each.

Lives in the event loop. A key is never given twice, so nothing that was computed with an adapter is taken for another's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from aengine.aio.edge import LoopEdge
from aengine.api.config import ADAPTER_NAME
from aengine.api.errors import AdapterNotFoundError, InvalidRequestError
from aengine.api.fields import is_not, shown
from aengine.api.outputs import AdapterInfo
from aengine.engine.operations import ModelChanges
from aengine.models.loading.hub import resolve_adapter
from aengine.runner.contract import LoadAdapter, Prepared, UnloadAdapter


@dataclass(eq=False, slots=True)
class _Adapter:
    key: int
    name: str
    info: AdapterInfo | None = None  # None: it is being loaded
    unloading: bool = False
    num_users: int = 0
    loaded: list[Future[None]] = field(default_factory=list)  # for those that wait until it is
    unused: Future[None] = field(default_factory=Future)  # once it is being unloaded

    @property
    def state(self) -> str:
        return "is being unloaded" if self.unloading else "is being loaded" if self.info is None else "is loaded"


class Adapters:
    def __init__(self, loaded: Sequence[AdapterInfo], changes: ModelChanges, edge: LoopEdge) -> None:
        """`loaded`: those that the model was loaded with; their keys are 1, 2, .."""
        self._changes = changes
        self._edge = edge
        self._by_name = {info.name: _Adapter(key, info.name, replace(info, key=key)) for key, info in enumerate(loaded, 1)}
        self._next_key = len(loaded) + 1
        self._used: dict[int, _Adapter] = {}  # by user

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters with their numbers of requests, in the order of the calls that loaded them."""
        return tuple(
            replace(each.info, num_requests=each.num_users)
            for each in self._by_name.values()
            if each.info is not None and not each.unloading
        )

    # ---- for requests --------------------------------------------------------------------------------------------------

    def check(self, name: str | None) -> None:
        """Raises `AdapterNotFoundError` for one that requests cannot use."""
        if name is not None:
            self._find(name)

    def enter(self, name: str, user: int) -> Future[None] | None:
        """A request uses it until it leaves. Returns what the request has to wait for if it is being loaded. `user` is a number of the
        request's own. Raises `AdapterNotFoundError`."""
        adapter = self._used[user] = self._find(name)
        adapter.num_users += 1
        if adapter.info is not None:
            return None
        adapter.loaded.append(Future())
        return adapter.loaded[-1]

    def key_of(self, user: int) -> int:
        """0 for a request without an adapter."""
        adapter = self._used.get(user)
        return 0 if adapter is None else adapter.key

    def leave(self, user: int) -> None:
        """No step computes anything of it any more. May be called again."""
        adapter = self._used.pop(user, None)
        if adapter is not None:
            adapter.num_users -= 1
            if adapter.unloading and not adapter.num_users:
                _settle(adapter.unused)

    # ---- for operators -------------------------------------------------------------------------------------------------

    async def load(self, name: str, path: str) -> AdapterInfo:
        """Goes on if the caller is cancelled. Raises `InvalidRequestError` (name, path), and what preparing raises."""
        if not isinstance(name, str) or not re.fullmatch(ADAPTER_NAME, name):
            raise InvalidRequestError.of("name", is_not(name, f"a string that matches {ADAPTER_NAME}"))
        if not isinstance(path, str) or not path:
            raise InvalidRequestError.of("path", is_not(path, "a path"))
        if name in self._by_name:
            raise InvalidRequestError.of("name", f"{name!r} {self._by_name[name].state}")
        adapter = self._by_name[name] = _Adapter(self._next_key, name)
        self._next_key += 1
        done: Future[None] = Future()
        adapter.loaded.append(done)

        def on_end(prepared: Prepared | None, error: BaseException | None) -> None:
            if error is not None:
                del self._by_name[name]
            elif prepared is not None:
                adapter.info = None if prepared.adapter is None else replace(prepared.adapter, key=adapter.key)
            for waiting in adapter.loaded:
                _settle(waiting, error)
            adapter.loaded.clear()

        self._changes.start(lambda: LoadAdapter(adapter.key, name, str(resolve_adapter(path))), on_end)
        await self._edge.wait(done)
        assert adapter.info is not None
        return adapter.info

    async def unload(self, name: str) -> None:
        """Waits until no request uses it, and takes no new ones; if the caller is cancelled meanwhile, it stays loaded. Raises
        `AdapterNotFoundError`."""
        adapter = self._find(name, "name")
        if adapter.info is None:
            raise AdapterNotFoundError.of("name", f"{name!r} {adapter.state}")
        adapter.unloading, adapter.unused = True, Future()
        try:
            if adapter.num_users:
                await self._edge.wait(adapter.unused)
            async with self._changes:
                await self._changes.apply(UnloadAdapter(adapter.key), lambda: self._by_name.pop(name))
        finally:
            adapter.unloading = False  # it stays, unless it is gone by now

    def _find(self, name: str, field: str = "adapter") -> _Adapter:
        adapter = self._by_name.get(name)
        if adapter is None or adapter.unloading:
            what = "is not loaded" if adapter is None else adapter.state
            names = ", ".join(info.name for info in self.infos) or "none"
            raise AdapterNotFoundError.of(field, f"{shown(name)} {what}; loaded adapters: {names}")
        return adapter


def _settle(future: Future[None], error: BaseException | None = None) -> None:
    """Unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
