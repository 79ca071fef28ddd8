"""The packed weights of a model on a CPU, from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aengine.kernels.arrays import array_dtype
from aengine.kernels.cpu.library import Workspace
from aengine.kernels.warm_memory import Allocate, lazy_bytes
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.runner.setup import ExecutorSetup


def load_packed(setup: ExecutorSetup, workspace: Workspace, check: Callable[[], object], allocate: Allocate = lazy_bytes) -> PackedWeights:
    """The weights of a model, read and packed. Parameters and errors are those of `build_executor`."""
    from aengine.models.cpu.weight_packing import WeightPacking  # imports torch

    options: dict[str, Any] = {"shard": setup.shard, "quantization": setup.config.quantization, "allocate": allocate}
    return WeightPacking(workspace, setup.native_spec, array_dtype(setup.dtype), **options).pack(setup.weights(check))
