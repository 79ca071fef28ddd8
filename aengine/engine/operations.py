"""What the event loop has the step thread do beside requests. Lives in the event loop.

`Commands` sends commands and has their replies. `ModelChanges` changes the model that runs, one change at a time and in their order: each
is prepared in a thread of its own while steps go on, and then applied by the step thread; it knows nothing of what the changes are.
`PageWatches` has who wants to know which pages of prompts are cached, and what each has not been told yet: the step thread lists names and
logs their changes (`WatchPages`), which costs nothing while nobody watches; what is paid per watcher, such as hashing the names under its
salt, is paid here.

`Adapters`: the adapters of an engine by name, from the call that loads one to the end of the one that unloads it, and the requests that
use each.

Lives in the event loop. A key is never given twice, so nothing that was computed with an adapter is taken for another's."""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio.lowlevel

from aengine.aio.edge import LoopEdge
from aengine.api.config import ADAPTER_NAME
from aengine.api.errors import AdapterNotFoundError, InvalidRequestError, RankError
from aengine.api.fields import is_not, shown
from aengine.api.outputs import AdapterInfo, CachedPages
from aengine.cache import published_digest
from aengine.engine.edges import Apply, Command, Done, PageNames, PagesChanged, RunningRequests, UnwatchPages, WatchPages
from aengine.engine.step_thread import LoadingCancelled
from aengine.models.loading.hub import resolve_adapter
from aengine.runner.contract import Change, LoadAdapter, Prepared, Runner, UnloadAdapter

T = TypeVar("T")


class ModelChanges:
    """Changes of the model, each in its turn."""

    def __init__(
        self,
        runner: Runner,
        edge: LoopEdge,
        send: Callable[[Callable[[Future[int]], Command]], Future[int]],
        fail: Callable[[BaseException], object],
        check_ending: Callable[[], object],
        check: Callable[[], object],
    ) -> None:
        """`send` hands a command to the step thread; the reply is set in the loop. `fail` ends that thread, and `check_ending`, in any
        thread, raises why it is about to end. `check` raises if nothing can be changed now."""
        self._runner = runner
        self._edge = edge
        self._send = send
        self._fail = fail
        self._check_ending = check_ending
        self._check = check
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aengine-changes")
        self._turns: deque[Future[None]] = deque()  # the first one is set, the others wait
        self._preparing: set[Future[Prepared]] = set()
        self._ended: BaseException | None = None

    def turn(self) -> Turn:
        """A turn behind those that were asked for before. Whoever asks for it enters it."""
        turn: Future[None] = Future()
        self._turns.append(turn)
        self._begin_next()
        return Turn(self, turn)

    async def run_on(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. It goes on if the caller is cancelled, and ends with an error when the engine has ended."""
        return await self._edge.wait(self._edge.spawn(work))

    async def change(self, make: Callable[[], Change], running: RunningRequests = RunningRequests.KEEP) -> Prepared:
        """Make a change in the thread, prepare and apply it, in a turn of the caller's, who is not cancelled. Raises what making and
        preparing raise, or why the engine has ended, and then nothing has changed."""
        self._check()
        prepared = await self.prepare(make)
        await self._edge.wait(self._send(lambda reply: Apply(reply, prepared, running)))
        return prepared

    async def change_unless_cancelled(self, change: Change, on_applied: Callable[[], object]) -> None:
        """Prepare and apply a change of adapters, in a turn of the caller's. Raises what preparing raises, or why the engine has ended.
        Nothing changes if the caller is cancelled before the step thread has begun to apply it; else `on_applied` is called first."""
        self._check()
        prepared = await self.prepare(lambda: change)
        reply = self._send(lambda reply: Apply(reply, prepared))
        try:
            await self._edge.wait(reply)
        finally:
            if reply.cancelled():
                self._runner.discard(prepared)
            elif not (reply.done() and reply.exception()):
                on_applied()

    async def prepare(self, make: Callable[[], Change]) -> Prepared:
        """Make a change in the thread and prepare it, in a turn of the caller's, who applies it. What is prepared is discarded if the
        caller is cancelled meanwhile. Raises what making and preparing raise, or why the engine has ended."""
        if self._ended is not None:
            raise self._ended
        found: Future[Prepared] = Future()
        self._preparing.add(found)
        self._thread.submit(self._prepare, make, found)
        try:
            return await self._edge.wait(found)
        finally:
            self._preparing.discard(found)

    def end_changes(self, error: BaseException) -> None:
        """The step thread has ended: so does all that is under way, with `error`."""
        self._ended = error
        self._thread.shutdown(wait=False, cancel_futures=True)
        waits: list[Future[Any]] = [*self._turns, *self._preparing]
        for waiting in waits:
            if not waiting.done():
                waiting.set_exception(error)

    async def wait_turn(self, turn: Future[None]) -> None:
        """Raises why the engine has ended."""
        try:
            await self._edge.wait(turn) if not turn.done() else turn.result()
        except BaseException:
            self.leave_turn(turn)
            raise

    def leave_turn(self, turn: Future[None]) -> None:
        self._turns.remove(turn)
        self._begin_next()

    def _begin_next(self) -> None:
        if not self._turns or self._turns[0].done():
            return
        if self._ended is None:
            self._turns[0].set_result(None)
        else:
            self._turns[0].set_exception(self._ended)

    def _prepare(self, make: Callable[[], Change], found: Future[Prepared]) -> None:
        """In the thread."""
        try:
            try:
                prepared = self._runner.prepare(make())
            except Exception:
                self._check_ending()  # where the runner was closed meanwhile
                raise
        except BaseException as error:
            self._edge.call_soon(self._on_failed, found, error)
        else:
            self._edge.call_soon(self._on_prepared, found, prepared)

    def _on_prepared(self, found: Future[Prepared], prepared: Prepared) -> None:
        if self._ended is not None:
            return
        if found.set_running_or_notify_cancel():
            found.set_result(prepared)
        else:
            self._runner.discard(prepared)

    def _on_failed(self, found: Future[Prepared], error: BaseException) -> None:
        if self._ended is not None or isinstance(error, LoadingCancelled):  # the step thread is about to end
            return
        if isinstance(error, RankError):
            self._fail(error)
        elif found.set_running_or_notify_cancel():
            found.set_exception(error)


class Turn:
    """`async with` it to wait for a turn among the changes, and to give it to the next one."""

    def __init__(self, changes: ModelChanges, turn: Future[None]) -> None:
        self._changes = changes
        self._turn = turn

    async def __aenter__(self) -> None:
        await self._changes.wait_turn(self._turn)

    async def __aexit__(self, *error: object) -> None:
        self._changes.leave_turn(self._turn)


class Commands:
    """`post` hands a command to the step thread."""

    def __init__(self, edge: LoopEdge, post: Callable[[Command], None]) -> None:
        self._edge = edge
        self._post = post
        self._waiting: set[Future[Any]] = set()  # the replies that are not there yet
        self._ended: BaseException | None = None

    async def run(self, make: Callable[[Future[T]], Command]) -> T:
        """Have the step thread carry out a command; returns or raises what it replies."""
        return await self._edge.wait(self.send(make))

    def send(self, make: Callable[[Future[T]], Command]) -> Future[T]:
        """Have the step thread carry out a command, without waiting; returns the future of its reply."""
        reply: Future[T] = Future()
        if self._ended is not None:
            reply.set_exception(self._ended)
            return reply
        self._waiting.add(reply)
        reply.add_done_callback(self._waiting.discard)  # where its task was cancelled
        self._post(make(reply))
        return reply

    def settle(self, done: Done) -> None:
        """Give the step thread's reply to the task that waits for it."""
        if done.reply not in self._waiting:
            return  # its task was cancelled
        self._waiting.remove(done.reply)
        if isinstance(done.value, BaseException):
            done.reply.set_exception(done.value)
        else:
            done.reply.set_result(done.value)

    def end_commands(self, error: BaseException) -> None:
        """The step thread has ended: so do all that wait, with `error`."""
        self._ended = error
        while self._waiting:
            self._waiting.pop().set_exception(error)


MAX_CHANGES = 32_768
"""Changes that are kept for a watcher; with more it is told all names again."""
MAX_PAGES_TOLD = 16_384
"""In one item, so that no message is large."""
DIGESTS_AT_ONCE = 512
"""That are made before the event loop has another turn: about a millisecond."""


@dataclass(slots=True, eq=False)
class _Watch:
    is_listed: bool = False  # whether the names are there, or were asked for
    names: Iterator[bytes] | None = None  # that there were before the changes and are not told
    begins: bool = True  # the first of the names are still to be told
    changes: dict[bytes, bool] | None = None  # that are not told: names, and whether they are there now. None until the names are listed

    def merge(self, changes: dict[bytes, bool]) -> None:
        kept = self.changes
        if kept is None:
            return
        if len(kept) + len(changes) > MAX_CHANGES:
            self.is_listed, self.names, self.changes = False, None, None
            return
        for name, is_there in changes.items():
            kept.pop(name, None)
            kept[name] = is_there


class PageWatches:
    """`post` hands a command to the step thread."""

    def __init__(self, post: Callable[[Command], None]) -> None:
        self._post = post
        self._watches: dict[int, _Watch] = {}
        self._keys = itertools.count()

    async def watch(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        """Yield which pages are cached and how that changes, as `ServedEngine.watch_pages` describes it."""
        key = next(self._keys)
        watch = self._watches[key] = _Watch()
        try:
            while True:
                if not watch.is_listed:
                    watch.is_listed = True
                    self._post(WatchPages(key, most))
                yield await _news(watch, salt)
        finally:
            del self._watches[key]
            if not self._watches:
                self._post(UnwatchPages())

    def on_names(self, report: PageNames) -> None:
        """The step thread has listed the names for a watcher, which may be gone."""
        watch = self._watches.get(report.watch)
        if watch is not None:
            watch.names, watch.begins, watch.changes = iter(report.names), True, {}

    def on_changes(self, report: PagesChanged) -> None:
        """The step thread reports changes, in the order of its lists."""
        for watch in self._watches.values():
            watch.merge(report.changes)


async def _news(watch: _Watch, salt: bytes) -> CachedPages | None:
    if watch.names is not None:
        names = list(itertools.islice(watch.names, MAX_PAGES_TOLD))
        begins, watch.begins = watch.begins, False
        if len(names) < MAX_PAGES_TOLD:
            watch.names = None
        if names or begins:
            return CachedPages(begins, await _digests(names, salt))
    if not watch.changes:
        return None
    changes = list(itertools.islice(watch.changes.items(), MAX_PAGES_TOLD))
    for name, _ in changes:
        del watch.changes[name]
    added = await _digests([name for name, is_there in changes if is_there], salt)
    return CachedPages(False, added, await _digests([name for name, is_there in changes if not is_there], salt))


async def _digests(names: Sequence[bytes], salt: bytes) -> tuple[int, ...]:
    digests: list[int] = []
    for start in range(0, len(names), DIGESTS_AT_ONCE):
        if start:
            await anyio.lowlevel.checkpoint()
        digests += [published_digest(name, salt) for name in names[start : start + DIGESTS_AT_ONCE]]
    return tuple(digests)


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
        """`loaded`: those that the model was loaded with; the runner has them under 1, 2, .."""
        self._changes = changes
        self._edge = edge
        self._by_name = {info.name: _Adapter(key, info.name, info) for key, info in enumerate(loaded, 1)}
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

    def enter_request(self, name: str, user: int) -> Future[None] | None:
        """A request uses it until it leaves. Returns what the request has to wait for if it is being loaded. `user` is a number of the
        request's own. Raises `AdapterNotFoundError`."""
        adapter = self._used[user] = self._find(name)
        adapter.num_users += 1
        if adapter.info is not None:
            return None
        adapter.loaded.append(Future())
        return adapter.loaded[-1]

    def key_of(self, user: int) -> tuple[int, int]:
        """Return the key that the runner has an adapter under, and its number in the names of pages; 0 for a request without one."""
        adapter = self._used.get(user)
        return (0, 0) if adapter is None or adapter.info is None else (adapter.key, adapter.info.key)

    def number_of(self, name: str | None) -> int:
        """Return what the names of pages have of an adapter that is loaded; None: 0. Raises `AdapterNotFoundError`."""
        if name is None:
            return 0
        info = self._find(name).info
        return 0 if info is None else info.key

    def leave_request(self, user: int) -> None:
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
        return await self._changes.run_on(self._load(adapter, path, self._changes.turn()))

    async def _load(self, adapter: _Adapter, path: str, turn: Turn) -> AdapterInfo:
        failure: BaseException | None = None
        try:
            async with turn:
                prepared = await self._changes.change(lambda: LoadAdapter(adapter.key, adapter.name, str(resolve_adapter(path))))
            assert prepared.adapter is not None
            adapter.info = prepared.adapter
            return adapter.info
        except BaseException as error:
            failure = error
            del self._by_name[adapter.name]
            raise
        finally:
            for waiting in adapter.loaded:
                _settle(waiting, failure)
            adapter.loaded.clear()

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
            async with self._changes.turn():
                await self._changes.change_unless_cancelled(UnloadAdapter(adapter.key), lambda: self._by_name.pop(name))
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
