"""`EngineCore`: one life of an engine, from the start of its step thread to its end. Owns that thread, the queues to and from it and the
phase; `Serving` is what requests and operations go through, from the moment that the model is loaded.

Lives in the event loop that made it. Must not know what a user of `AsyncEngine` calls, nor schedulers, batches or devices.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import anyio

from aengine.aio.edge import LoopEdge
from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import EngineDeadError, EngineStateError
from aengine.engine.edges import Done, PageNames, PagesChanged, ReportQueue, WeightsChanged
from aengine.engine.loading import LoadedModel
from aengine.engine.operations import Adapters, Commands, ModelChanges, PageWatches
from aengine.engine.registry import Registry
from aengine.engine.requests import QUICK_CHARACTERS
from aengine.engine.step_thread import Report, StepLoop, Stopped
from aengine.engine.text import Texts
from aengine.engine.weight_updates import ModelWeights
from aengine.engine.workers import Workers
from aengine.scheduler.sequence import Updates

_log = logging.getLogger("aengine")


@dataclass(frozen=True, slots=True)
class Serving:
    edge: LoopEdge
    steps: StepLoop
    commands: Commands
    pages: PageWatches
    model: LoadedModel
    registry: Registry
    changes: ModelChanges
    adapters: Adapters
    weights: ModelWeights
    texts: Texts

    def end_serving(self, reason: EngineStateError | EngineDeadError) -> None:
        """The step thread has ended: all that wait get the `reason`."""
        self.changes.end_changes(reason)
        self.registry.end_all(reason)
        self.texts.close()
        if self.model.images is not None:
            self.model.images.close()


class EnginePhase(enum.Enum):
    STARTING = enum.auto()
    RUNNING = enum.auto()
    CLOSED = enum.auto()
    DEAD = enum.auto()


class EngineCore:
    def __init__(self, config: EngineConfig, load: Callable[[EngineCore], LoadedModel]) -> None:
        """To be created in the loop. Starts the step thread, in which `load` loads the model."""
        self.config = config  # once the model is loaded, with the default limits of a step filled in
        self.phase = EnginePhase.STARTING
        self.serving: Serving | None = None  # from the moment that the model is loaded
        self.edge = LoopEdge()
        self.workers = Workers("aengine-tokenizer", quick=QUICK_CHARACTERS)
        self.reports: ReportQueue[Report] = ReportQueue(self.edge, self._receive)
        self.steps = StepLoop(partial(load, self), config, self.reports.put_report)
        self.commands = Commands(self.edge, self.steps.post)
        self.pages = PageWatches(self.steps.post)
        self._settled = anyio.Event()  # serving, or failed to
        self._stopped = anyio.Event()  # the step thread has ended
        self._error: BaseException | None = None
        self.steps.start()

    async def wait_settled(self) -> None:
        """Returns when the model is served. Raises what loading raised, and `EngineStateError` if the engine is closed meanwhile."""
        await self._settled.wait()
        if self._error is not None:
            raise self._error
        if self.phase is EnginePhase.CLOSED:
            raise EngineStateError("the engine was closed while it was starting")

    def stop(self) -> None:
        """Have the step thread end, if it runs."""
        if self.phase in (EnginePhase.STARTING, EnginePhase.RUNNING):
            self.steps.stop()
        if self.phase is not EnginePhase.DEAD:
            self.phase = EnginePhase.CLOSED

    async def wait_stopped(self) -> None:
        """Returns when the step thread has ended and the model is unloaded."""
        await self._stopped.wait()

    def check_serving(self) -> Serving:
        """What is served with. Raises `EngineStateError` unless that is now and in this loop, or why the engine is dead."""
        match self.phase:
            case EnginePhase.RUNNING:
                self.edge.check_current()
                assert self.serving is not None, "the phase says so"
                return self.serving
            case EnginePhase.STARTING:
                raise EngineStateError("the engine is not started")
            case EnginePhase.CLOSED:
                raise EngineStateError("the engine is closed")
            case EnginePhase.DEAD:
                raise self.death()

    def death(self) -> EngineDeadError:
        """Why the engine is dead, of one that is."""
        dead = EngineDeadError(f"the step thread died: {type(self._error).__name__}: {self._error}")
        dead.__cause__ = self._error
        return dead

    @property
    def _registry(self) -> Registry:
        assert self.serving is not None, "steps run on a model that is loaded"
        return self.serving.registry

    # ---- reports of the step thread ------------------------------------------------------------------------------------

    def _receive(self, report: Report) -> None:
        """Take a report of the step thread. What that raises ends the engine: all that wait are told, `start()` too."""
        if self._stopped.is_set():
            return  # from a thread that was given up and came back
        try:
            self._take_report(report)
        except BaseException as error:
            self.steps.fail(error)
            if not isinstance(error, Exception):
                raise  # an interrupt that happened to arrive here

    def _take_report(self, report: Report) -> None:
        match report:
            case Updates():
                self._registry.update(report)
            case WeightsChanged(version):
                self._registry.weights_version = version
            case LoadedModel(runner):
                self.config = replace(self.config, max_num_seqs=runner.max_num_seqs, max_num_batched_tokens=runner.max_num_batched_tokens)
                self.serving = self._serve(report)
                if self.phase is EnginePhase.STARTING:
                    self.phase = EnginePhase.RUNNING
                self._settled.set()
            case PageNames():
                self.pages.on_names(report)
            case PagesChanged():
                self.pages.on_changes(report)
            case Done():
                self.commands.settle(report)
            case Stopped(error):
                self._on_stopped(error)

    def _serve(self, model: LoadedModel) -> Serving:
        def sleep_level() -> int:
            return steps.stats.published[0].sleep_level

        def check_awake() -> None:
            if sleep_level():
                raise EngineStateError("the engine sleeps; wake it first")

        edge, steps, commands, runner = self.edge, self.steps, self.commands, model.runner
        changes = ModelChanges(runner, edge, commands.send, steps.fail, steps.check_loading, check_awake)
        adapters = Adapters(model.adapters, changes, edge)
        registry = Registry(self.config, model, adapters, edge, steps.post, self.workers, steps.stats.parts_of)
        weights = ModelWeights(runner, changes, registry, commands.run, sleep_level)
        texts = Texts(model.tokenizer, registry.limits, edge, model.images)
        return Serving(edge, steps, commands, self.pages, model, registry, changes, adapters, weights, texts)

    def _on_stopped(self, error: BaseException | None) -> None:
        """The step thread has ended: no report follows, so all that wait end now."""
        self.steps.join()
        self.reports.close()
        self.workers.close()
        self._error = error
        if self.phase is EnginePhase.RUNNING:
            self.phase = EnginePhase.DEAD
            # Whoever asks for something is told; but clients of a server are not told the cause, which is for its log.
            # As text: a record with the error would keep all that the engine held, as long as a handler keeps the record.
            _log.critical("%s", "".join(traceback.format_exception(self.death())).rstrip())
        elif self.phase is EnginePhase.STARTING:
            self.phase = EnginePhase.CLOSED
        reason = self.death() if error is not None else EngineStateError("the engine is closed")
        if self.serving is not None:
            self.serving.end_serving(reason)
        self.commands.end_commands(reason)
        self._settled.set()
        self._stopped.set()
