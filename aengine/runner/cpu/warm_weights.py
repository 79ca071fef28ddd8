"""Memory for weights on a CPU, committed by the kernel while torch is imported. Does not import torch."""

from __future__ import annotations

import pathlib
import sys

from aengine.api.config import EngineConfig
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.loading.hub import find_checkpoint
from aengine.runner.memory import free_host_memory

_CUDA_DEVICE = pathlib.Path("/dev/nvidiactl")
_SMALLEST = 32 << 20  # bytes: committing less takes no time


def warm_weights(config: EngineConfig, model_dir: pathlib.Path) -> WarmMemory | None:
    """About as much memory as the weights of a checkpoint will take; None where nothing is gained."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not _CUDA_DEVICE.exists())
    if "torch" in sys.modules or not on_cpu or config.load_format == "dummy" or _runs_in_torch(config):
        return None
    size = sum((model_dir / name).stat().st_size for name in find_checkpoint(model_dir, config.load_format).names)
    if config.quantization != "none":  # most checkpoints have 16 bits per weight
        size //= 4 if config.quantization == "int4" else 2
    elif config.dtype == "float32":
        size *= 2
    size //= config.num_ranks
    return WarmMemory(size) if _SMALLEST <= size <= free_host_memory() // 2 else None


def _runs_in_torch(config: EngineConfig) -> bool:
    return config.attention_backend == "torch_native" or config.expert_parallel_size > 1
