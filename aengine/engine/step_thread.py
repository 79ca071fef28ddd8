"""The step thread. `StepLoop` loads the model, owns scheduler and runner from the first to the last instruction, and closes them.
`StepDriver` is what it does once the model is loaded: a turn takes commands, plans and launches a step, commits one, and reports what
changed.

Knows nothing of streams, text or event loops: reports go to a callback that hands them on.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, InsufficientMemoryError, InvalidRequestError, StepHangError
from aengine.api.outputs import MemoryUse
from aengine.api.runtime import forget_locals
from aengine.cache import PageTiers, TierCounts
from aengine.engine.edges import (
    Apply,
    Cancel,
    Command,
    Done,
    Fail,
    FindKV,
    FlushCache,
    Mailbox,
    PageNames,
    PagesChanged,
    Park,
    Pause,
    Record,
    RunningRequests,
    Sleep,
    StepReport,
    StepStats,
    Stop,
    Submit,
    Touch,
    Trace,
    Unpause,
    UnwatchPages,
    Wake,
    WatchPages,
    WeightsChanged,
    watchdog,
)
from aengine.engine.loading import WEIGHTS, LoadedModel, drafter_of, fingerprint_of, scheduler_config
from aengine.engine.recorder import RecordedScheduler, Recording, write_recording
from aengine.engine.tier_traffic import TierTraffic, tiers_of
from aengine.runner.contract import InFlightStep, LoadAdapter, NewWeights, Prepared, Runner
from aengine.scheduler.plan import RowsFailed, StepPlan
from aengine.scheduler.scheduler import Scheduler

_OF_TEXTS = ("texts", "defaults", "max_model_len")  # parts of the fingerprint that KV does not depend on


class _Flight(NamedTuple):
    plan: StepPlan
    step: InFlightStep
    launched: float  # on time.monotonic


class StepDriver:
    """To be used from the step thread alone; `busy_since` may be read from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        mailbox: Mailbox,
        stats: StepStats,
        report: Callable[[StepReport], None],
        facts: Mapping[str, str] | None = None,
        open_tiers: Callable[[str], PageTiers] | None = None,
    ) -> None:
        """`report` must not block or raise. `facts`: parts of the fingerprint beside the weights. `open_tiers`: the tiers of KV for an
        identity of the model; None: there are none."""
        self.busy_since: float | None = None  # when the turn began, on time.monotonic; None while the thread waits for commands
        self._scheduler, self._runner, self._mailbox = scheduler, runner, mailbox
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
        self._facts = dict(facts or {})
        self._adapters: dict[int, tuple[str, str]] = {}  # name and path by key, of those that were loaded after the start
        # A step that has not begun when a command comes is withdrawn (`_commit`), so that the command need not wait for it.
        self._open_tiers, self._tiers = open_tiers, None if open_tiers is None else TierTraffic(scheduler, runner, stats, mailbox.wake_up)
        mailbox.on_post = partial(runner.hold, True)
        runner.on_wanted(mailbox.wake_up)
        self._identify()
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
        for command in self._mailbox.take_commands():
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
                num_pages = self._flush_cache()
                self._publish()  # the caller sees it in the stats
                self._pending.append(Done(reply, num_pages))
            case Touch(reply, session):
                if (count := scheduler.touch(session)) or self._tiers is None:
                    self._pending.append(Done(reply, count))
                else:
                    self._tiers.recall(session, reply)
            case Record(reply):
                self._pending.append(Done(reply, self.recording("")))
            case Trace(reply, trace, ended):
                trace.stop_timing() if ended else trace.time_steps(self, self._scheduler, self._runner)
                self._pending.append(Done(reply, None))
            case FindKV(reply):
                self._pending.append(Done(reply, None if self._tiers is None else self._tiers.stored(command)))
            case WatchPages(watch, most):
                scheduler.prefix_index.log_changes(True)
                self._pending.append(PageNames(watch, scheduler.prefix_index.names(most)))
            case UnwatchPages():
                scheduler.prefix_index.log_changes(False)
            case Apply(reply, prepared):
                if isinstance(prepared.change, NewWeights):
                    self._changes.append(command)
                elif reply.set_running_or_notify_cancel():
                    self._runner.apply(prepared)
                    if isinstance(change := prepared.change, LoadAdapter):
                        self._adapters[change.key] = change.name, change.path
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
        if self._tiers is not None:
            self._tiers.save()
            self._pending += (Done(*recalled) for recalled in self._tiers.end_recalls())
        changing = self._can_change()
        if changing and not self._flights:
            self._change_model()
            changing = False
        if self._paused or self._sleep_level or changing:
            self._scheduler.pause()
            if not self._flights:
                self._end_pauses()
            return False
        if self._tiers is not None:
            self._tiers.write_loaded()
        plan = self._scheduler.schedule()
        if self._tiers is not None:
            self._tiers.begin_loads()
            self._tiers.set_idle(plan is None and not self._flights)
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
        self._wait_for(step)
        if self._flights and not self._mailbox.is_empty and self._flights[-1].step.withdraw():
            self._scheduler.rollback(self._flights.pop().plan, {})
        self._scheduler.commit(plan, step.result())
        before, self._committed = self._committed, time.monotonic()
        self._stats.add_step(self._committed - max(launched, before), plan.num_decodes + len(plan.token_ids), plan.num_prefill)

    def _wait_for(self, step: InFlightStep) -> None:
        step.wait()

    def _collect_updates(self) -> None:
        updates = self._scheduler.take_updates()
        if updates:
            self._stats.completion_tokens += len(updates.keys)
            self._keys.difference_update(updates.released)
            if updates.num_requests or self._stats.are_old():
                self._publish()
            self._pending.append(updates)
        if changes := self._scheduler.prefix_index.take_changes():
            self._pending.append(PagesChanged(changes if self._tiers is None else self._tiers.with_kept(changes)))

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
        self._identify()
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
                self._scheduler.abandon_loads()
                self._flush_cache()
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

    def _identify(self) -> None:
        """Other weights came into use."""
        parts = {**self._facts, WEIGHTS: self._runner.weights_digest}
        if self._tiers is not None and self._open_tiers is not None:
            self._tiers.use(self._open_tiers(fingerprint_of({name: part for name, part in parts.items() if name not in _OF_TEXTS})))
        self._stats.use_identity(self._scheduler.weights_version, parts, fingerprint_of(parts))

    def _flush_cache(self) -> int:
        if self._tiers is not None:
            self._tiers.save(everything=True)
        return self._scheduler.flush_cache()

    def recording(self, failure: str) -> Recording | None:
        """The latest steps, which may have ended with a `failure`; None: they are not recorded. From any thread once this one hangs or has
        ended."""
        if not isinstance(self._scheduler, RecordedScheduler):
            return None
        return self._scheduler.recording(self._stats.identity.parts, self._adapters, failure)

    def close(self) -> None:
        """The tiers; the runner belongs to others."""
        if self._tiers is not None:
            self._tiers.close()

    def _publish(self) -> None:
        tiers = TierCounts() if self._tiers is None else self._tiers.counts()
        self._stats.publish(self._scheduler.stats(), tiers, paused=self._paused, sleep_level=self._sleep_level)


_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class Stopped:
    """The thread has ended: because of `stop` (no error), or because loading or running failed. Nothing follows."""

    error: BaseException | None


Report = LoadedModel | StepReport | Stopped
"""The model comes when it is loaded, and commands are being served."""


class LoadingCancelled(Exception):
    """The thread is to end before the model is loaded."""


class StepLoop:
    """`load` makes the model in the thread; `report` must not block or raise."""

    def __init__(self, load: Callable[[], LoadedModel], config: EngineConfig, report: Callable[[Report], None]) -> None:
        """A turn of the loop that takes more than `config.step_timeout` seconds ends with `Stopped(StepHangError)`."""
        self._load = load
        self._config = config
        self._report = report
        self._mailbox = Mailbox()
        self.post = self._mailbox.post
        self.stats = StepStats()
        self._stopping = False
        self._given_up = False
        self._abandon: Callable[[], object] = object  # which does nothing
        self._record: Callable[[str], Recording | None] = _nothing
        self.recording: Recording | None = None  # of the steps before it failed or hung
        self._failure: BaseException | None = None  # of what the runner depends on
        self._thread = threading.Thread(target=self._main, name="aengine-step", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends all requests and the thread, or loading at its next `check_loading`. May be called from any thread."""
        self._stopping = True
        self._mailbox.post(Stop())

    def fail(self, error: BaseException) -> None:
        """Ends the thread, because the runner cannot go on: what a step raises from here on comes from this. May be called from any
        thread."""
        self._failure = self._failure or error
        self._mailbox.post(Fail(error))

    def check_loading(self) -> None:
        """To be called while loading, now and then: raises `LoadingCancelled` after `stop`, and what `fail` was called with."""
        if self._failure is not None:
            raise self._failure
        if self._stopping:
            raise LoadingCancelled

    def join(self) -> None:
        """Waits until the thread has ended, which is right after it reported `Stopped`; does not wait for one that was given up."""
        if not self._given_up:
            self._thread.join()

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            loaded = self._load()
            self._abandon = loaded.runner.abandon
            with ExitStack() as stack:
                stack.push(partial(_close, loaded.runner))
                scheduler = self._make_scheduler(loaded)
                tiers = tiers_of(self._config, loaded.runner)
                driver = StepDriver(scheduler, loaded.runner, self._mailbox, self.stats, self._notify, loaded.facts, tiers)
                self._record = driver.recording
                stack.callback(driver.close)
                stack.callback(driver.notify)
                self._notify(loaded)
                stack.enter_context(watchdog(self._config.step_timeout, lambda: driver.busy_since, self._give_up))
                while not self._given_up and driver.run_turn():
                    pass
        except LoadingCancelled:
            _log.info("loading was cancelled: the engine is closed")
        except BaseException as failure:  # whatever it is, those who wait must be told
            error = self._failure or failure
            self._save_recording(error)
            forget_locals(failure)  # what was loaded, if not all could be
        # What is left of the model refers to the engine, which refers to this: no garbage collection is needed to free them.
        self._load, self._abandon, self._record, self._mailbox.on_post = _is_loaded_once, object, _nothing, object
        self._notify(Stopped(error))

    def _make_scheduler(self, loaded: LoadedModel) -> Scheduler:
        config, drafter = self._config, drafter_of(self._config, loaded)
        limits = scheduler_config(config, loaded.runner, loaded.info)
        if not config.recorded_steps:
            return Scheduler(limits, drafter=drafter)
        kv_bytes = loaded.info.kv_bytes_per_token * limits.page_size * limits.num_pages // len(limits.windows)
        return RecordedScheduler(limits, config.recorded_steps, drafter, engine_config=asdict(config), kv_bytes=kv_bytes)

    def _notify(self, report: Report) -> None:
        if not self._given_up:
            self._report(report)

    def _give_up(self, seconds: float) -> None:
        """Called by the watchdog. The thread cannot be ended, but nobody waits for it any longer."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _log.critical("a step hangs for %.1f s; the step thread is at\n%s", seconds, stack)
        error = StepHangError(f"a step hangs for {seconds:.1f} s")
        self._given_up = True  # before anyone can act on the report: the thread may come back at any moment
        self._save_recording(error)
        self._report(Stopped(error))
        self._abandon()
        self.stop()  # it may have come back already, and wait

    def _save_recording(self, error: BaseException) -> None:
        """Keep the latest steps, and have a thread of its own write them, which the program waits for."""
        try:
            self.recording = self._record(f"{type(error).__name__}: {error}")
        except Exception as second:  # comes of the first: the thread may be anywhere
            _log.warning("the latest steps cannot be told: %s: %s", type(second).__name__, second)
        if self.recording is not None and self._config.recording_dir is not None:
            path = Path(self._config.recording_dir) / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.recording"
            threading.Thread(target=write_recording, args=(self.recording, path), name="aengine-recording").start()


def _nothing(failure: str) -> None:
    pass


def _is_loaded_once() -> LoadedModel:
    raise AssertionError("the thread runs once")


def _close(runner: Runner, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """With the `error` that ends the thread, if one does."""
    if error is None:
        return runner.close()
    forget_locals(error)  # of the step: graphs and memory that the runner is to release
    try:
        runner.close()
    except Exception as second:  # comes of the first
        _log.warning("closing a runner that has failed: %s: %s", type(second).__name__, second)
