"""The floor of a whole workload, for setting a throughput beside it: what the device would need if every byte moved at the speed of a large
copy and every operation ran at that of a large matrix product, measured on the spot, after the engine has let go of the device."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aengine.bench.floor import Machine, MachineProbe, generation_seconds
from aengine.bench.workload import Item
from aengine.config import EngineConfig
from aengine.models.hub import resolve_model
from aengine.models.spec import load_spec
from aengine.outputs import ModelInfo


@dataclass(frozen=True, slots=True)
class GenerationFloor:
    machine: Machine
    seconds: float  # for all requests at once
    output_tokens_per_second: float
    fraction: float  # floor over what it took

    def show(self) -> str:
        at = f"{self.machine.bytes_per_second / 1e9:.0f} GB/s and {self.machine.flops_per_second / 1e12:.3g} TFLOP/s"
        throughput = f"{self.output_tokens_per_second:.0f} output tok/s"
        return f"floor {self.seconds:.3g} s, {throughput} at {at}: {100 * self.fraction:.1f} % of it reached"


def generation_floor(config: EngineConfig, info: ModelInfo, items: Sequence[Item], duration: float) -> GenerationFloor:
    """Of independent requests that are all sent at once, on the device that ran them in `duration` seconds."""
    gc.collect()  # what the engine still held
    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    machine = MachineProbe(device, dtype).measure(repeats=10)
    spec = load_spec(resolve_model(config.model, config.revision, weights=False))
    prompts, outputs = [len(item.prompt) for item in items], [item.output_tokens for item in items]
    kv_item_bytes = 1 if config.kv_cache_dtype == "fp8" else None
    seconds = generation_seconds(spec, prompts, outputs, machine, dtype.itemsize, kv_item_bytes)
    return GenerationFloor(machine, seconds, sum(outputs) / seconds, seconds / duration if duration else 0.0)
