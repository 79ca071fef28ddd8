"""The torch decoder over an attention backend, as an `Executor`: CUDA, the reference, and the CPU where there are no kernels."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import StepLayout, select_backend
from aengine.layers.select import select_ops
from aengine.models.batch import ForwardBatch
from aengine.models.decoder import Decoder
from aengine.models.weights import fused
from aengine.runner.buckets import GraphBytes
from aengine.runner.capture import Capture
from aengine.runner.executor import ExecutorSetup, GraphPlan, StepInput, StepPass
from aengine.runner.step_graphs import StepGraphs

_log = logging.getLogger("aengine")


class TorchHidden:
    """The hidden states of all tokens of a step."""

    def __init__(self, model: Decoder, hidden: Tensor, batch: ForwardBatch) -> None:
        self._model = model
        self._hidden = hidden
        self._batch = batch

    def logits(self, indices: Tensor) -> Tensor:
        return self._model.logits(self._hidden, replace(self._batch, logits_indices=indices))

    def argmax(self, indices: Tensor) -> Tensor:
        return self.logits(indices).argmax(-1)


class TorchExecutor:
    """Satisfies `Executor`."""

    name = "torch"

    def __init__(self, setup: ExecutorSetup) -> None:
        self._backend = select_backend(setup.config.attention_backend, setup.attention())
        if setup.config.load_format == "dummy":
            weights = {name: tensor for name, (tensor,) in setup.weights()}
        else:
            weights = fused(setup.weights(), setup.dtype, setup.device)
        self._graphs: StepGraphs | None = None
        self._may_record = True
        ops = select_ops(self._backend.name, setup.dtype, setup.spec.head_dim, setup.device)
        self._model = Decoder(setup.spec, weights, setup.num_positions, ops)

    def bytes_per_page(self) -> int:
        return self._backend.bytes_per_page()

    def allocate(self, num_pages: int) -> None:
        self._graphs = None
        self._backend.allocate(num_pages)

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        self._backend.copy_pages(sources, destinations)

    def forward(self, step: StepInput) -> TorchHidden:
        batch = ForwardBatch(
            input_ids=step.input_ids,
            positions=step.positions,
            logits_indices=step.logits_indices,
            attention=self._backend.plan(step.metadata),
        )
        hidden = None if self._graphs is None else self._graphs.forward(batch)
        return TorchHidden(self._model, self._model(batch) if hidden is None else hidden, batch)

    def record(self, plan: GraphPlan, capture: Capture) -> GraphBytes | None:
        self._graphs = None
        if not self._may_record:
            return None
        try:
            graphs = StepGraphs(self._model, self._backend, plan, capture)
            taken = graphs.record()
        except Exception as error:  # the same steps run without graphs
            _log.warning("no graphs, so that steps take longer: %s", error, exc_info=_log.isEnabledFor(logging.DEBUG))
            taken = None
        self._may_record = taken is not None
        self._graphs = graphs if taken else None
        return taken

    def decode(self, layout: StepLayout, rows: NDArray[np.int32]) -> StepPass | None:
        return None if self._graphs is None else self._graphs.decode(layout, rows)
