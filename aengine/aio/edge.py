"""`LoopEdge`: from another thread into an event loop, asyncio's or trio's. `LoopThread`: an event loop of asyncio in a thread of its own,
for what needs asyncio in a program that runs in trio.

Owns the thread, and how a call goes there and comes back. Knows nothing of what runs there.

`AsyncioLife`: that something starts once and ends once, in one event loop of asyncio, whoever closes it and whenever."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import enum
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import anyio
import anyio.lowlevel

from aengine.api.errors import EngineStateError

T = TypeVar("T")
_log = logging.getLogger("aengine")


class LoopEdge:
    """The event loop it was created in, as seen from another thread."""

    def __init__(self) -> None:
        self._native = running_loop()
        self._tasks: set[asyncio.Task[None]] = set()  # spawned; the loop itself holds them weakly
        self.loop: asyncio.AbstractEventLoop | None = self._native if hasattr(self._native, "call_soon_threadsafe") else None  # not trio's
        self._schedule = self._native.run_sync_soon if self.loop is None else self.loop.call_soon_threadsafe

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` in the loop, after whatever was handed over before. Does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):  # raised by both loops when they are closed
            self._schedule(function, *args)

    async def wait(self, future: Future[T]) -> T:
        """The result of `future`, which is cancelled with the waiting task."""
        done = anyio.Event()
        future.add_done_callback(lambda _: self.call_soon(done.set))
        try:
            await done.wait()
            return future.result()
        finally:
            future.cancel()

    def call_later(self, seconds: float, function: Callable[..., object], *args: object) -> Callable[[], object]:
        """Run `function(*args)`, which must not raise, in the loop after `seconds`, unless what is returned was called. To be called in
        the loop."""
        context = contextvars.Context()  # not the caller's
        if hasattr(self._native, "call_later"):
            timer: asyncio.TimerHandle = self._native.call_later(max(0.0, seconds), function, *args, context=context)
            return timer.cancel
        import trio

        scope = trio.CancelScope()

        async def wait() -> None:
            with scope:
                await trio.sleep(max(0.0, seconds))
                function(*args)

        trio.lowlevel.spawn_system_task(wait, context=context)
        return scope.cancel

    def spawn(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in a task of its own, which goes on if the caller is cancelled; returns the future of its outcome. An error that
        nobody waits for any more, since that future was cancelled, is logged. `work` has to end by itself when its owner is closed: what
        it waits for then raises. To be called in the loop."""
        outcome: Future[T] = Future()
        context = contextvars.Context()  # not the caller's
        if hasattr(self._native, "create_task"):
            task = context.run(self._native.create_task, _run(work, outcome))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            import trio

            trio.lowlevel.spawn_system_task(_run, work, outcome, context=context)
        return outcome

    def watch(self, file: int, callback: Callable[[], object]) -> bool:
        """Run `callback` in the loop whenever `file` can be read from. False: this loop has no way to. To be called in the loop."""
        if not hasattr(self._native, "add_reader"):
            return False  # trio has tasks for that
        try:
            contextvars.Context().run(self._native.add_reader, file, callback)  # not in the caller's context
        except NotImplementedError:
            return False
        return True

    def unwatch(self, file: int) -> None:
        self._native.remove_reader(file)

    def check_current(self) -> None:
        """Raise EngineStateError unless called from this loop."""
        if running_loop() is not self._native:
            raise EngineStateError("the engine belongs to another event loop than the one that is running")


async def _run(work: Coroutine[Any, Any, T], outcome: Future[T]) -> None:
    try:
        result = await work
    except anyio.get_cancelled_exc_class():  # the loop ends
        outcome.cancel()
        raise
    except BaseException as error:
        if outcome.set_running_or_notify_cancel():
            outcome.set_exception(error)
        else:
            _log.warning("what nobody waits for any more has failed: %s", error)
    else:
        if outcome.set_running_or_notify_cancel():
            outcome.set_result(result)


def running_loop() -> Any:
    """asyncio's event loop, or trio's TrioToken. Raises `EngineStateError` where none runs."""
    try:
        return anyio.lowlevel.current_token().native_token
    except RuntimeError:
        pass
    try:
        return asyncio.get_running_loop()  # in a callback, where there is no task
    except RuntimeError:
        raise EngineStateError("the engine must be used from a running asyncio or trio event loop") from None


class LoopThread:
    """Made, started and stopped in one event loop, from which all calls come."""

    def __init__(self, name: str) -> None:
        self.edge = LoopEdge()
        self._loop = _Loop()
        self._stop = asyncio.Event()
        self._stopping = False
        self._ended = anyio.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()  # what is posted before the loop runs waits for it

    async def stop(self) -> None:
        """Cancel what runs there, and end the thread. Repeated calls do nothing."""
        self._stopping = True
        self.post(self._stop.set)
        with anyio.CancelScope(shield=True):
            await self._ended.wait()

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run `function(*args)` there, after whatever was posted before; from any thread. Does nothing once the loop has ended."""
        self._loop.call_soon_threadsafe(function, *args, context=contextvars.Context())  # in the caller's it would be trio that runs

    async def call(self, function: Callable[[], Awaitable[T]]) -> T:
        """What `function` gives, which is called and awaited there. Cancelling the caller cancels it, and returns when it has ended. Raises
        `EngineStateError` if the loop is stopped."""
        self.edge.check_current()
        if self._stopping:
            raise EngineStateError("the engine is closed")
        call = _Call(function, self.edge)
        self.post(call.begin)
        try:
            await call.ended.wait()
        except BaseException:
            self.post(call.cancel)
            with anyio.CancelScope(shield=True):
                await call.ended.wait()
            raise
        return call.result()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self.edge.call_soon(self._ended.set)

    async def _serve(self) -> None:
        await self._stop.wait()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


class _Loop(asyncio.SelectorEventLoop):
    """Drops what comes when it is closed. gRPC has one poller for all loops of a process, so that the last events of a call here may be
    handed over by another loop, where they would raise."""

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        try:
            return super().call_soon_threadsafe(callback, *args, context=context)
        except RuntimeError:
            return asyncio.Handle(callback, args, self, context)  # that never runs


class _Call(Generic[T]):
    """A call on its way there and back. `ended` belongs to the loop of the caller; so does the rest once it is set."""

    def __init__(self, function: Callable[[], Awaitable[T]], edge: LoopEdge) -> None:
        self.ended = anyio.Event()
        self._function = function
        self._edge = edge
        self._task: asyncio.Task[T]

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: self._edge.call_soon(self.ended.set))

    def cancel(self) -> None:
        self._task.cancel()

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        if self._task.cancelled():
            raise EngineStateError("the engine was closed")
        return self._task.result()

    async def _run(self) -> T:
        return await self._function()


Work = Callable[[], Awaitable[object]]


class _Phase(enum.Enum):
    NEW = enum.auto()
    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()


class AsyncioLife:
    """`name`: what it is the life of, in errors. `close` gives back all that there is; it is called once, and cannot be cancelled."""

    def __init__(self, name: str, close: Work) -> None:
        self._name = name
        self._close = close
        self._phase = _Phase.NEW
        self._closed = asyncio.Event()

    @property
    def running(self) -> bool:
        return self._phase is _Phase.RUNNING

    def check_running(self) -> None:
        """Raises `EngineStateError` unless it runs, in this loop."""
        if self._phase is not _Phase.RUNNING:
            raise EngineStateError(f"the {self._name} is {'closed' if self._phase is _Phase.CLOSED else 'not started'}")
        if asyncio.get_running_loop() is not self._loop:
            raise EngineStateError(f"the {self._name} belongs to another event loop")

    async def start(self, work: Work) -> None:
        """Do `work`. Raises what it raises, when all is given back, and `EngineStateError` if it is closed meanwhile."""
        if self._phase is not _Phase.NEW:
            raise EngineStateError(f"the {self._name} was started before; make a new one")
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise EngineStateError(f"the {self._name} needs the event loop of asyncio: use `async with`, or aengine.on_asyncio") from None
        self._phase = _Phase.STARTING
        self._starting = anyio.CancelScope()
        try:
            with self._starting:
                await work()
            if self._starting.cancel_called:
                raise EngineStateError(f"the {self._name} was closed while it was starting")
        except BaseException:
            await self._end()
            raise
        self._phase = _Phase.RUNNING

    async def aclose(self, finish: Work) -> None:
        """Returns when it is closed, whoever closes it. `finish`: what is done first where it runs; it can be cancelled."""
        phase, self._phase = self._phase, _Phase.CLOSED
        match phase:
            case _Phase.NEW:
                self._closed.set()
            case _Phase.STARTING:
                self._starting.cancel()  # and `start()` ends it
            case _Phase.RUNNING:
                try:
                    await finish()
                finally:
                    await self._end()
            case _Phase.CLOSED:
                pass
        await self._closed.wait()

    async def wait_closed(self) -> None:
        """Raises `EngineStateError` if it was not started."""
        if self._phase is _Phase.NEW:
            raise EngineStateError(f"the {self._name} is not started")
        await self._closed.wait()

    async def _end(self) -> None:
        self._phase = _Phase.CLOSED
        try:
            with anyio.CancelScope(shield=True):
                await self._close()
        finally:
            self._closed.set()
