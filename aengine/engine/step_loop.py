"""The step thread: it loads the model, owns scheduler and runner from the first to the last instruction, and closes them."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType

from aengine.config import EngineConfig
from aengine.engine.loading import LoadedModel
from aengine.engine.mailbox import Fail, Mailbox, Stop
from aengine.engine.step_driver import StepDriver, StepReport
from aengine.engine.step_stats import StepStats
from aengine.engine.watchdog import watchdog
from aengine.errors import StepHangError
from aengine.garbage import forget_locals
from aengine.runner.base import Runner
from aengine.scheduler.drafter import Drafter, DraftSource
from aengine.scheduler.request import SchedulerConfig
from aengine.scheduler.scheduler import Scheduler
from aengine.speculation.best_of import BestOfBoth
from aengine.speculation.by_model import ModelDrafter
from aengine.speculation.ngram import NgramDrafter

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
        self._abandon: Callable[[], object] = lambda: None
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
                scheduler = Scheduler(_scheduler_config(self._config, loaded.runner), drafter=_drafter(self._config, loaded))
                driver = StepDriver(scheduler, loaded.runner, self._mailbox, self.stats, self._notify)
                stack.callback(driver.notify)
                self._notify(loaded)
                stack.enter_context(watchdog(self._config.step_timeout, lambda: driver.busy_since, self._give_up))
                while not self._given_up and driver.run_turn():
                    pass
        except LoadingCancelled:
            _log.info("loading was cancelled: the engine is closed")
        except BaseException as failure:  # whatever it is, those who wait must be told
            error = self._failure or failure
            forget_locals(failure)  # what was loaded, if not all could be
        self._notify(Stopped(error))

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
        self._report(Stopped(error))
        self._abandon()
        self.stop()  # it may have come back already, and wait


def _close(runner: Runner, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
    """With the `error` that ends the thread, if one does."""
    if error is None:
        return runner.close()
    forget_locals(error)  # of the step: graphs and memory that the runner is to release
    try:
        runner.close()
    except Exception as second:  # comes of the first
        _log.warning("closing a runner that has failed: %s: %s", type(second).__name__, second)


def _drafter(config: EngineConfig, loaded: LoadedModel) -> Drafter | None:
    if loaded.drafter is not None:
        return loaded.drafter
    if config.speculative == "off":
        return None
    source = loaded.runner.draft_source
    model = None if source is None else ModelDrafter(source)
    if model is not None and config.speculative != "auto":
        return model
    ngram = NgramDrafter(loaded.info.vocab_size, loaded.runner.max_num_seqs)
    return ngram if model is None else BestOfBoth(ngram, model)


def _scheduler_config(config: EngineConfig, runner: Runner) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=runner.max_num_seqs,
        max_num_batched_tokens=runner.max_num_batched_tokens,
        max_model_len=runner.max_model_len,
        num_pages=runner.num_pages,
        page_size=runner.page_size,
        windows=runner.windows,
        max_in_flight=runner.max_in_flight,
        max_adapters=runner.max_adapters or None,
        enable_prefix_cache=config.enable_prefix_cache,
        max_drafts=config.max_drafts,
        has_draft_model=runner.draft_source is not None,
        has_draft_head=runner.draft_source in (DraftSource.HEAD, DraftSource.MTP),
        tenant_weights=config.tenant_weights,
        ageing_seconds=config.ageing_seconds,
    )
