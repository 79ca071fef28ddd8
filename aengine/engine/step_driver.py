"""`StepDriver`: what the step thread does once the model is loaded. A turn takes commands, plans and launches a step, commits one, and
reports what changed.

Knows nothing of streams, text or event loops: reports go to a callback that hands them on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from aengine.engine.mailbox import (
    Apply,
    Cancel,
    Command,
    Fail,
    FlushCache,
    Mailbox,
    Park,
    Pause,
    RunningRequests,
    Sleep,
    Stop,
    Submit,
    Unpause,
    UnwatchPages,
    Wake,
    WatchPages,
)
from aengine.engine.step_stats import StepStats
from aengine.errors import AEngineError, InsufficientMemoryError, InvalidRequestError
from aengine.outputs import MemoryUse
from aengine.runner.base import InFlightStep, Runner
from aengine.runner.changes import NewWeights, Prepared
from aengine.scheduler.plan import RowsFailed, StepPlan
from aengine.scheduler.request import Updates
from aengine.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Done:
    """The command with this reply was carried out, or it failed and `value` is the error."""

    reply: Future[Any]
    value: object


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """Tokens that are reported from here on are of weights of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class PageNames:
    """The names of cached pages, as `PrefixIndex.names` lists them, for one who watches them."""

    watch: int
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class PagesChanged:
    """Names of cached pages that have come or gone, as `PrefixIndex.take_changes` tells them."""

    changes: dict[bytes, bool]


StepReport = Updates | Done | WeightsChanged | PageNames | PagesChanged


class _Flight(NamedTuple):
    plan: StepPlan
    step: InFlightStep
    launched: float  # on time.monotonic


class StepDriver:
    """To be used from the step thread alone; `busy_since` may be read from any thread."""

    def __init__(
        self, scheduler: Scheduler, runner: Runner, mailbox: Mailbox, stats: StepStats, report: Callable[[StepReport], None]
    ) -> None:
        """`report` must not block or raise."""
        self.busy_since: float | None = None  # when the turn began, on time.monotonic; None while the thread waits for commands
        self._scheduler = scheduler
        self._runner = runner
        self._mailbox = mailbox
        self._stats = stats
        self._report = report
        self._pending: list[StepReport] = []  # that are not reported yet
        self._flights: deque[_Flight] = deque()  # oldest first
        self._keys: set[int] = set()  # of every request that is not released yet
        self._paused = False
        self._pause_replies: list[Future[int]] = []  # of pauses that wait for the steps in flight
        self._changes: deque[Apply | Sleep | Wake] = deque()  # that no step may be in flight for
        self._sleep_level = 0  # the level; 0: awake
        self._stopping = False
        self._committed = 0.0  # when the last step was, on time.monotonic
        # A step that has not begun when a command comes is withdrawn (`_commit`), so that the command need not wait for it.
        mailbox.on_post = partial(runner.hold, True)
        runner.on_wanted(mailbox.wake_up)
        self._publish()

    def run_turn(self) -> bool:
        """False: there was a `Stop`, and nothing is left of any request."""
        self.busy_since = time.monotonic()
        self._take_commands()
        planned = self._plan_and_launch()
        self.notify()  # now and not before the launch: the event loop takes the GIL, and a step should begin first
        idle = not planned and not self._flights  # there may also be no plan because a step in flight must return first
        if self._flights and (not planned or self._must_commit()):
            self._commit()
        self._collect_updates()
        if self._flights or idle:  # a step is running already, or none will be launched
            self.notify()
        if not idle:
            return True
        if self._stopping:
            return False
        if not self._runner.join_step() and not self._can_change():
            self._wait()
        return True

    def notify(self) -> None:
        """Reports everything that is pending, in order."""
        for report in self._pending:
            self._report(report)
        self._pending.clear()

    def _take_commands(self) -> None:
        self._runner.hold(False)  # before looking, as `post` holds after adding
        for command in self._mailbox.take():
            self._apply(command)
        if self._stopping:
            for key in sorted(self._keys):
                self._scheduler.cancel(key)

    def _apply(self, command: Command) -> None:
        scheduler = self._scheduler
        match command:
            case Submit(requests):
                self._stats.num_received += len(requests)
                for request in requests:
                    self._keys.add(request.key)
                    scheduler.submit(request)
            case Cancel(key):
                scheduler.cancel(key)
            case Park(key, parked):
                scheduler.set_parked(key, parked)
            case Pause(reply):
                self._paused = True
                self._pause_replies.append(reply)
            case Unpause():
                self._paused = False
                self._end_pauses()
            case FlushCache(reply):
                num_pages = scheduler.flush_cache()
                self._publish()  # the caller sees it in the stats
                self._pending.append(Done(reply, num_pages))
            case WatchPages(watch, most):
                scheduler.prefix_index.log_changes(True)
                self._pending.append(PageNames(watch, scheduler.prefix_index.names(most)))
            case UnwatchPages():
                scheduler.prefix_index.log_changes(False)
            case Apply(reply, prepared):
                if isinstance(prepared.change, NewWeights):
                    self._changes.append(command)
                else:
                    self._runner.apply(prepared)
                    self._pending.append(Done(reply, 0))
            case Sleep() | Wake():
                self._changes.append(command)
            case Stop():
                self._stopping = True
            case Fail(error):
                raise error

    def _plan_and_launch(self) -> bool:
        """Launches the next step, unless the newest one in flight must return first. False: there is none."""
        if self._must_commit():
            return False
        changing = self._can_change()
        if changing and not self._flights:
            self._change_model()
            changing = False
        if self._paused or self._sleep_level or changing:
            self._scheduler.pause()
            if not self._flights:
                self._end_pauses()
            return False
        plan = self._scheduler.schedule()
        if plan is None:
            return False
        launched = time.monotonic()
        try:
            self._flights.append(_Flight(plan, self._runner.launch(plan), launched))
        except RowsFailed as failed:
            self._scheduler.rollback(plan, failed.errors)
        return True

    def _must_commit(self) -> bool:
        """Whether the oldest step in flight must return before the next one is planned."""
        flights = self._flights
        return len(flights) >= self._runner.max_in_flight and not (len(flights) == 1 and flights[0].step.overlaps)

    def _commit(self) -> None:
        """Waits for the oldest step in flight. It is dropped when this returns, so before its updates are reported: tensors release the
        GIL when they are freed, and an event loop that was just notified would take it before the next step runs."""
        plan, step, launched = self._flights.popleft()
        step.wait()
        if self._flights and not self._mailbox.is_empty and self._flights[-1].step.withdraw():
            self._scheduler.rollback(self._flights.pop().plan, {})
        self._scheduler.commit(plan, step.result())
        before, self._committed = self._committed, time.monotonic()
        self._stats.add_step(self._committed - max(launched, before), plan.num_decodes + len(plan.token_ids), plan.num_prefill)

    def _collect_updates(self) -> None:
        updates = self._scheduler.take_updates()
        if updates:
            self._stats.completion_tokens += len(updates.keys)
            self._keys.difference_update(updates.released)
            if updates.num_requests or self._stats.are_old():
                self._publish()
            self._pending.append(updates)
        if changes := self._scheduler.prefix_index.take_changes():
            self._pending.append(PagesChanged(changes))

    def _can_change(self) -> bool:
        """Whether a change of the model waits for the steps in flight alone, and not for requests that have begun."""
        if not self._changes or self._stopping:
            return False
        change = self._changes[0]
        return not (isinstance(change, Apply) and change.running is RunningRequests.FINISH and self._scheduler.drain())

    def _change_model(self) -> None:
        """Carries out what waited for the steps in flight."""
        while self._can_change():
            command = self._changes.popleft()
            value: object = 0
            match command:
                case Sleep() | Wake():
                    value = self._sleep_or_wake(command)
                case Apply(_, prepared, running):
                    self._use_weights(prepared, running)
            self._publish()  # the caller sees it in the stats
            self._pending.append(Done(command.reply, value))

    def _use_weights(self, prepared: Prepared, running: RunningRequests) -> None:
        scheduler = self._scheduler
        if running is RunningRequests.ABORT:
            scheduler.cancel_begun()
        self._runner.apply(prepared)
        self._version_changed(recompute=running is RunningRequests.RECOMPUTE)
        scheduler.end_draining()

    def _version_changed(self, *, recompute: bool = False) -> None:
        self._scheduler.use_weights(recompute=recompute)
        self._pending.append(WeightsChanged(self._scheduler.weights_version))

    def _sleep_or_wake(self, command: Sleep | Wake) -> MemoryUse | AEngineError:
        """An error changes nothing."""
        before = self._runner.memory_used()
        try:
            if isinstance(command, Wake):
                if self._sleep_level:
                    self._runner.wake(command.prepared)
                self._sleep_level = 0
                if command.replaces:
                    self._version_changed()
            elif command.level > self._sleep_level:
                self._scheduler.flush_cache()
                self._runner.sleep(command.level, self._scheduler.held_pages())
                self._sleep_level = command.level
        except (InsufficientMemoryError, InvalidRequestError) as error:
            return error
        return MemoryUse(before, self._runner.memory_used())

    def _end_pauses(self) -> None:
        """The steps in flight have finished, or the engine goes on."""
        self._publish()
        self._pending += (Done(reply, 0) for reply in self._pause_replies)
        self._pause_replies.clear()

    def _wait(self) -> None:
        """For a command, or the next deadline of a request."""
        self._publish()
        self.busy_since = None
        deadline = self._scheduler.next_deadline
        self._mailbox.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def _publish(self) -> None:
        self._stats.publish(self._scheduler.stats(), paused=self._paused, sleep_level=self._sleep_level)
