"""`ModelChanges`: changes of the model that runs, one at a time and in their order. Each is prepared in a thread of its own while steps go
on, and then applied by the step thread.

Lives in the event loop. Knows nothing of what the changes are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from aengine.engine.mailbox import Apply, Command, RunningRequests
from aengine.engine.step_loop import LoadingCancelled
from aengine.errors import RankError
from aengine.loop_edge import LoopEdge
from aengine.runner.base import Runner
from aengine.runner.changes import Change, Prepared

OnEnd = Callable[[Prepared | None, BaseException | None], object]
"""Called in the loop, once: with what was applied, or with an error, and then nothing has changed."""


class ModelChanges:
    """`async with` it to have a turn among the changes for something else."""

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
        self._underway: set[OnEnd] = set()
        self._ended: BaseException | None = None

    def start(self, make: Callable[[], Change], on_end: OnEnd, running: RunningRequests = RunningRequests.KEEP) -> None:
        """Make a change in the thread, prepare and apply it."""
        if self._ended is not None:
            on_end(None, self._ended)
            return
        self._underway.add(on_end)
        turn: Future[None] = Future()
        turn.add_done_callback(partial(self._begin, make, on_end, running))
        self._wait_for(turn)

    async def prepare(self, change: Change) -> Prepared:
        """In a turn of the caller's, who applies it. Raises what preparing raises, or why the engine has ended."""
        found: Future[Prepared] = Future()

        def on_end(prepared: Prepared | None, error: BaseException | None) -> None:
            if not found.set_running_or_notify_cancel():
                if prepared is not None:
                    self._runner.discard(prepared)
            elif prepared is not None:
                found.set_result(prepared)
            else:
                found.set_exception(error)

        def on_prepared(prepared: Prepared | None, error: BaseException | None) -> None:
            self._underway.remove(on_end)
            on_end(prepared, error)

        self._underway.add(on_end)
        self._prepare(lambda: change, on_prepared)
        return await self._edge.wait(found)

    def end(self, error: BaseException) -> None:
        """The step thread has ended: so does all that is under way, with `error`."""
        self._ended = error
        self._thread.shutdown(wait=False, cancel_futures=True)
        for turn in list(self._turns):
            if not turn.done():
                turn.set_exception(error)
        while self._underway:
            self._underway.pop()(None, error)

    async def __aenter__(self) -> None:
        turn: Future[None] = Future()
        self._wait_for(turn)
        try:
            await self._edge.wait(turn) if not turn.done() else turn.result()
        except BaseException:
            self._leave(turn)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._leave(self._turns[0])

    def _wait_for(self, turn: Future[None]) -> None:
        self._turns.append(turn)
        self._go_on()

    def _leave(self, turn: Future[None]) -> None:
        self._turns.remove(turn)
        self._go_on()

    def _go_on(self) -> None:
        if not self._turns or self._turns[0].done():
            return
        if self._ended is None:
            self._turns[0].set_result(None)
        else:
            self._turns[0].set_exception(self._ended)

    def _begin(self, make: Callable[[], Change], on_end: OnEnd, running: RunningRequests, turn: Future[None]) -> None:
        if self._ended is not None:
            return
        try:
            self._check()
        except Exception as error:
            self._finish(on_end, turn, None, error)
            return

        def on_prepared(prepared: Prepared | None, error: BaseException | None) -> None:
            if prepared is None:
                self._finish(on_end, turn, None, error)
                return
            reply = self._send(lambda reply: Apply(reply, prepared, running))
            reply.add_done_callback(lambda reply: self._finish(on_end, turn, prepared, reply.exception()))

        self._prepare(make, on_prepared)

    def _prepare(self, make: Callable[[], Change], on_prepared: OnEnd) -> None:
        """`on_prepared` is not called if the engine ends before."""

        def on_done(work: Future[Prepared]) -> None:
            if self._ended is not None:
                return
            error = work.exception()
            if isinstance(error, RankError):
                self._fail(error)
            elif not isinstance(error, LoadingCancelled):  # else the step thread is about to end
                on_prepared(None if error is not None else work.result(), error)

        def prepare() -> Prepared:
            try:
                return self._runner.prepare(make())
            except Exception:
                self._check_ending()  # where the runner was closed meanwhile
                raise

        work = self._thread.submit(prepare)
        work.add_done_callback(partial(self._edge.call_soon, on_done))

    def _finish(self, on_end: OnEnd, turn: Future[None], prepared: Prepared | None, error: BaseException | None) -> None:
        if self._ended is not None:
            return
        self._underway.remove(on_end)
        self._leave(turn)
        on_end(prepared, error)
