"""`Serving`: what an engine serves with, once its model is loaded.

Lives in the event loop. Knows nothing of how the engine is started and stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

from aengine.config import EngineConfig
from aengine.engine.adapters import Adapters
from aengine.engine.commands import Commands
from aengine.engine.loading import LoadedModel
from aengine.engine.model_changes import ModelChanges
from aengine.engine.model_weights import ModelWeights
from aengine.engine.registry import Registry
from aengine.engine.step_loop import StepLoop
from aengine.engine.texts import Texts
from aengine.engine.workers import Workers
from aengine.errors import EngineDeadError, EngineStateError
from aengine.loop_edge import LoopEdge


@dataclass(frozen=True, slots=True)
class Serving:
    model: LoadedModel
    registry: Registry
    changes: ModelChanges
    adapters: Adapters
    weights: ModelWeights
    texts: Texts

    @classmethod
    def of(cls, model: LoadedModel, config: EngineConfig, edge: LoopEdge, steps: StepLoop, commands: Commands, workers: Workers) -> Serving:
        def sleep_level() -> int:
            return steps.stats.published[0].sleep_level

        def check_awake() -> None:
            if sleep_level():
                raise EngineStateError("the engine sleeps; wake it first")

        runner = model.runner
        changes = ModelChanges(runner, edge, commands.send, steps.fail, steps.check_loading, check_awake)
        adapters = Adapters(model.adapters, changes, edge)
        registry = Registry(config, model, adapters, edge, steps.post, workers)
        weights = ModelWeights(runner, changes, registry, edge, commands.run, sleep_level)
        return cls(model, registry, changes, adapters, weights, Texts(model.tokenizer, registry.limits, edge))

    def end(self, reason: EngineStateError | EngineDeadError) -> None:
        """The step thread has ended: all that wait get the `reason`."""
        self.changes.end(reason)
        self.registry.end_all(reason)
        self.texts.close()
