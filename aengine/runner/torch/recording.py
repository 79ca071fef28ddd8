"""`Recording`: the graphs of all models of an executor.

Owns which sizes are recorded, what follows where one cannot be, and how much memory all will take. To be used on the stream of the steps.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Sequence
from dataclasses import replace

from aengine.runner.memory import show_bytes
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.asleep import DeviceAdapters
from aengine.runner.torch.buckets import GraphBytes, GraphSizes
from aengine.runner.torch.model import PagedTorchModel

_log = logging.getLogger("aengine")


class Recording:
    def __init__(self, setup: ExecutorSetup, models: Sequence[PagedTorchModel], adapters: DeviceAdapters | None) -> None:
        self._setup = setup
        self._models = models
        self._adapters = adapters
        self._capture = setup.capture
        config = setup.config
        self.sizes = GraphSizes.of(
            config.graph_sizes,
            config.graph_tokens,
            setup.max_num_seqs,
            setup.max_num_batched_tokens,
            setup.most_drafts,
            adapters=adapters is not None,
        )

    def record(self, sizes: GraphSizes, max_model_len: int) -> GraphBytes | None:
        """Records graphs of steps over the pages that there are. None: there is nothing that records, or one of decodes could not be
        recorded; then none is used. Raises that error if there are other ranks, which may have graphs. What could not be recorded is not
        tried again."""
        self.drop()
        if self._capture is None:
            return None
        table = None if self._adapters is None else self._adapters.table
        if table is not None:
            table.on = True
        try:
            capture = self._capture(self._setup.device)
            others = replace(sizes, plain=())  # draft heads have no adapters
            taken = [model.record(others if at else sizes, max_model_len, capture, table) for at, model in enumerate(self._models)]
        except Exception as error:  # the same steps run without graphs
            if self._setup.shard.size > 1:
                raise
            _log.warning("no graphs, so that steps take longer: %s", str(error), exc_info=_log.isEnabledFor(logging.DEBUG))
            taken = [None]
        recorded = [one for one in taken if one is not None]
        if len(recorded) < len(taken):
            self.drop()
            self._capture = None
            return None
        every: GraphBytes = functools.reduce(operator.add, recorded)
        kept = {kind: getattr(self.sizes, kind) if getattr(every, kind) else () for kind in ("tokens", "uneven", "plain")}
        self.sizes = replace(self.sizes, **kept)
        return every

    def foresee(self, max_model_len: int) -> int:
        """Bytes that all graphs will take, from recording the largest two of each kind, which are dropped again."""
        taken = self.record(self.sizes.largest_two(), max_model_len)
        self.drop()
        if taken is None:
            return 0
        needed = taken.of_all(self.sizes)
        _log.info("graphs are expected to take %s", show_bytes(needed))
        return needed

    def drop(self) -> None:
        for model in self._models:
            model.graphs = None
