"""`HostExecutorBase`: what the executors of the CPU kernels have in common, whether they sample or follow a rank that does."""

from __future__ import annotations

from collections.abc import Callable

from aengine.kernels.warm_memory import WarmMemory
from aengine.models.adapters import Adapter
from aengine.runner.base import IntArray, ReadWeights
from aengine.runner.host_model import HostModel
from aengine.runner.setup import ExecutorSetup
from aengine.runner.stages import Stages


class HostExecutorBase:
    """The part of `Executor` that its `HostModel` does."""

    name = "cpu"

    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """As `build_executor`. Raises KernelsUnavailableError before it reads any weights."""
        self._model = HostModel(setup, warm, check)
        self._stages = Stages.of(setup, self._model.stage)
        self.shard, self.max_adapters = setup.shard, setup.max_adapters

    @property
    def exchange_seconds(self) -> float:
        return self._model.exchange_seconds

    def bytes_per_page(self) -> int:
        return self._model.bytes_per_page()

    def kv_budget(self) -> int:
        return self._model.kv_budget()

    def allocate(self, num_pages: int, max_model_len: int) -> None:
        self._model.allocate(num_pages)

    def sleep(self, level: int, pages: IntArray) -> None:
        self._model.sleep(level, pages)

    def wake(self) -> None:
        """Pages are committed again when they are written."""

    def pack_adapter(self, adapter: Adapter) -> object:
        return self._model.pack_adapter(adapter)

    def set_adapter(self, key: int, packed: object | None) -> None:
        self._model.set_adapter(key, packed)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._model.copy_pages(sources, destinations)

    def prepare_weights(self, read: ReadWeights) -> object:
        return self._model.prepare_weights(read)

    def use_weights(self, prepared: object) -> None:
        self._model.use_weights(prepared)

    def close(self) -> None:
        if self._stages is not None:
            self._stages.close()
        del self._model, self._stages
