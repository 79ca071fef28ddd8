"""The step thread: it owns scheduler and runner from the first to the last instruction, and nothing else touches them.

It takes commands from the mailbox, runs steps while there is work, and reports what changed, once per step. It must not know
streams, text or event loops: reports go to a callback that hands them on.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from aengine.engine.mailbox import Cancel, Command, FlushCache, Mailbox, Park, Pause, Stop, Submit, Unpark, Unpause
from aengine.engine.step_stats import StepStats
from aengine.engine.watchdog import Watchdog
from aengine.errors import StepHangError
from aengine.outputs import EngineStats
from aengine.runner.base import InFlightStep, Runner
from aengine.scheduler import RowsFailed, Scheduler, SchedulerConfig, StepPlan, Updates


class Loaded(Protocol):
    """What loading a model yields, as far as this thread is concerned."""

    @property
    def runner(self) -> Runner: ...


_log = logging.getLogger("aengine")

LoadedT = TypeVar("LoadedT", bound=Loaded)

PUBLISH_SECONDS = 0.05
"""How old the stats may become while steps bring tokens and nothing else."""


@dataclass(frozen=True, slots=True)
class Ready(Generic[LoadedT]):
    """The model is loaded; commands are being served."""

    loaded: LoadedT


@dataclass(frozen=True, slots=True)
class Done:
    """A command with this ticket was carried out."""

    ticket: int
    value: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """The thread is at its end: asked to (no error), or of a failure to load or to run. Nothing follows."""

    error: BaseException | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    stats: EngineStats
    num_received: int  # submissions that the stats know of


Report = Ready[LoadedT] | Updates | Done | Stopped


class LoadingLeft(Exception):
    """The thread is to end before the model is loaded."""


class StepLoop(Generic[LoadedT]):
    """`load` makes the model in the thread; `configure` derives the scheduler's limits from it; `report` must not block or raise."""

    def __init__(
        self,
        load: Callable[[], LoadedT],
        configure: Callable[[LoadedT], SchedulerConfig],
        report: Callable[[Report[LoadedT]], None],
        *,
        step_timeout: float,
    ) -> None:
        """A turn of the loop that takes more than `step_timeout` seconds ends with `Stopped(StepHangError)`."""
        self._load = load
        self._configure = configure
        self._hand_on = report
        self._mailbox = Mailbox()
        self.post = self._mailbox.post
        self._num_received = 0
        self._stats = StepStats()
        self._paused = False
        self._pause_tickets: list[int] = []  # of pauses that wait for the steps under way
        self._published = self._committed = 0.0  # when that was last done, on time.monotonic
        self._untold: Updates | None = None  # what the last step changed, until it is handed on
        self.snapshot = Snapshot(EngineStats(), 0)  # replaced as a whole, so any thread may read it
        self._busy_since: float | None = None  # on time.monotonic
        self._stopping = False
        self._given_up = False
        self._watchdog = Watchdog(step_timeout, lambda: self._busy_since, self._give_up)
        self._thread = threading.Thread(target=self._main, name="aengine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Have all requests and the thread end, or loading at its next `check_wanted`. To be called from any thread."""
        self._stopping = True
        self._mailbox.post(Stop())

    def check_wanted(self) -> None:
        """To be called while loading, now and then: raises `LoadingLeft` once nobody wants the model any more."""
        if self._stopping:
            raise LoadingLeft

    def join(self) -> None:
        """Wait for the thread to end, which it does right after it reported `Stopped`; but for one that was given up."""
        if not self._given_up:
            self._thread.join()

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            loaded = self._load()
            try:
                scheduler = Scheduler(self._configure(loaded))
                self._publish(scheduler)
                self._report(Ready(loaded))
                self._watchdog.start()
                self._serve(scheduler, loaded.runner)
            finally:
                self._watchdog.stop()
                loaded.runner.close()
        except LoadingLeft:
            _log.info("loading was left: the engine is closed")
        except BaseException as failure:  # whatever it is, those who wait must hear of it
            error = failure
        self._report(Stopped(error))

    def _report(self, report: Report[LoadedT]) -> None:
        if not self._given_up:
            self._hand_on(report)

    def _give_up(self, seconds: float) -> None:
        """Called by the watchdog. The thread cannot be ended, but nobody waits for it any longer."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _log.critical("a step hangs for %.1f s; the step thread is at\n%s", seconds, stack)
        error = StepHangError(f"a step hangs for {seconds:.1f} s")
        self._given_up = True  # before anyone can act on the report: the thread may come back at any moment
        self._hand_on(Stopped(error))
        self.stop()  # it may have come back already, and wait

    def _serve(self, scheduler: Scheduler, runner: Runner) -> None:
        flights: deque[tuple[StepPlan, InFlightStep, float]] = deque()  # with the time of their launch
        keys: set[int] = set()  # of every request not yet released
        stopping = False
        while not self._given_up:
            self._busy_since = time.monotonic()
            commands = self._mailbox.take()
            if commands or self._paused:  # whose answers must not overtake what was before them
                self._tell()
            for command in commands:
                stopping |= self._apply(command, scheduler, keys)
            if stopping:
                for key in sorted(keys):
                    scheduler.cancel(key)
            ahead = not flights or flights[-1][1].overlaps
            plan = self._schedule(scheduler, idle=not flights) if ahead else None
            if plan is not None:
                launched = time.monotonic()
                try:
                    flights.append((plan, runner.launch(plan), launched))
                except RowsFailed as failed:
                    scheduler.rollback(plan, failed.errors)
                finally:
                    self._tell()  # now, and not before: the event loop takes the interpreter away, and a step should begin first
            self._tell()
            idle = plan is None and not flights  # a plan may also be missing because a flight must return first
            if flights and (plan is None or len(flights) > 1 or not flights[-1][1].overlaps):
                self._commit(scheduler, flights)
            updates = scheduler.take_updates()
            self._stats.completion_tokens += len(updates.keys)
            keys.difference_update(updates.released)
            if updates:
                if updates.num_requests or time.monotonic() - self._published >= PUBLISH_SECONDS:
                    self._publish(scheduler)
                self._untold = updates
            if flights or idle:
                self._tell()
            if idle:
                if stopping:
                    return
                self._publish(scheduler)
                self._busy_since = None
                deadline = scheduler.next_deadline
                self._mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _commit(self, scheduler: Scheduler, flights: deque[tuple[StepPlan, InFlightStep, float]]) -> None:
        # Apart, so that the flight goes with the last line: tensors let go of the interpreter when they are freed, and a loop that was
        # just told of the step would take it before the next one runs.
        plan, flight, launched = flights.popleft()
        flight.wait(self._mailbox.signal)
        if flights and self._mailbox.signal.value and flights[-1][1].withdraw():  # who has come or gone meanwhile need not wait for it
            scheduler.rollback(flights.pop()[0], {})
        scheduler.commit(plan, flight.result())
        before, self._committed = self._committed, time.monotonic()
        self._stats.add_step(self._committed - max(launched, before), plan.num_decodes + len(plan.token_ids))

    def _tell(self) -> None:
        """Hand on what the last step changed."""
        if self._untold is not None:
            self._report(self._untold)
            self._untold = None

    def _schedule(self, scheduler: Scheduler, *, idle: bool) -> StepPlan | None:
        """The next step, unless the engine is paused. `idle`: no step is under way."""
        if not self._paused:
            return scheduler.schedule()
        scheduler.expire()
        if idle:
            self._end_pauses(scheduler)
        return None

    def _apply(self, command: Command, scheduler: Scheduler, keys: set[int]) -> bool:
        """Carry out a command; True for the one that ends the thread."""
        match command:
            case Submit(requests):
                self._num_received += len(requests)
                for request in requests:
                    keys.add(request.key)
                    scheduler.submit(request)
            case Cancel(key):
                scheduler.cancel(key)
            case Park(key):
                scheduler.park(key)
            case Unpark(key):
                scheduler.unpark(key)
            case Pause(ticket):
                self._paused = True
                self._pause_tickets.append(ticket)
            case Unpause():
                self._paused = False
                self._end_pauses(scheduler)
            case FlushCache(ticket):
                num_pages = scheduler.flush_cache()
                self._publish(scheduler)  # whoever waits sees it in the stats
                self._report(Done(ticket, num_pages))
            case Stop():
                return True
        return False

    def _end_pauses(self, scheduler: Scheduler) -> None:
        """Tell those who wait for the steps under way that these are over, or that they need not be any more."""
        self._publish(scheduler)
        for ticket in self._pause_tickets:
            self._report(Done(ticket, 0))
        self._pause_tickets.clear()

    def _publish(self, scheduler: Scheduler) -> None:
        self._published = time.monotonic()
        self.snapshot = Snapshot(self._stats.combined(scheduler.stats(), paused=self._paused), self._num_received)
