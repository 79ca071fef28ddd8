"""The floor of a step and of a whole workload: bytes that must be moved over the bandwidth of a large read (of a copy, if that is more),
flops over the rate of a large matrix product, both measured on the spot. Knows the shapes of models, nothing of how steps are run."""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.outputs import ModelInfo
from aengine.bench.load_run import Item
from aengine.kernels.paged_cache import SCALE_BYTES
from aengine.kernels.warm_memory import lazy_bytes
from aengine.models.config.model_config import load_spec
from aengine.models.loading.hub import resolve_model
from aengine.models.named_weights import experts_of, named_weights
from aengine.models.spec import Attention, LatentAttention, ModelSpec
from aengine.runner.memory import quantized_bytes, weight_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """What the device reaches here and now."""

    bytes_per_second: float
    flops_per_second: float  # multiply and add count as two


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step must move and compute."""

    weight_bytes: int
    kv_bytes: int
    flops: int

    def seconds(self, machine: Machine) -> float:
        """If memory and arithmetic could overlap perfectly, the larger of the two alone would do: so this is below any real step."""
        return max((self.weight_bytes + self.kv_bytes) / machine.bytes_per_second, self.flops / machine.flops_per_second)


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


class MachineProbe:
    """Measures a device as often as it is asked, with the same buffers: shared machines drift within seconds."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        size = 1 << 29 if device.type == "cuda" else 1 << 28
        if device.type == "cuda":
            # A decode step reads and hardly writes, and a device may read faster than it copies, or torch's sum may be slower than memory.
            source = torch.ones(size // 4, dtype=torch.float32, device=device)
            target = torch.empty_like(source)
            self._moves: list[tuple[int, Callable[[], object]]] = [(2 * size, lambda: target.copy_(source)), (size, source.sum)]
            self._width = 8192
        else:
            # The sum of a buffer that fits no cache, in huge pages as packed weights are.
            source = torch.from_numpy(lazy_bytes(size)).view(torch.float32).fill_(1.0)
            self._moves = [(size, source.sum)]
            self._width = 1024
        # Not the generator of the device: after a recording that failed it takes everything for a part of it.
        generator = torch.Generator(device).manual_seed(0)
        matrices = torch.randn(2, self._width, self._width, device=device, generator=generator)
        if device.type == "cpu":
            # Without instructions for it torch multiplies bfloat16 a hundred times slower than our kernels, which then widen it.
            few = matrices[:, :128, :128]
            dtype = min((dtype, torch.float32), key=lambda one: best_seconds(partial(torch.matmul, *few.to(one)), device, 5))
        self._multiply = partial(torch.matmul, *matrices.to(dtype))

    def measure(self, repeats: int = 3) -> Machine:
        """The best of `repeats` calls each."""
        moved = max(size / best_seconds(move, self._device, repeats) for size, move in self._moves)
        return Machine(moved, 2 * self._width**3 / best_seconds(self._multiply, self._device, repeats))


def step_work(
    spec: ModelSpec,
    lengths: Sequence[int],
    contexts: Sequence[int],
    num_logits: int,
    item_bytes: int,
    kv_cache_dtype: str = "auto",
    weights: Mapping[str, int] | None = None,
) -> StepWork:
    """The work of a step in which row i computes `lengths[i]` tokens behind `contexts[i]` known ones, and `num_logits` rows have logits.

    Counts the experts that the tokens are expected to go to (`_Parameters.read`), and of a window its tokens alone. `item_bytes`: of a
    weight, where `weights` does not say how many bytes each has, and of a number in the KV cache where `EngineConfig.kv_cache_dtype` does
    not say otherwise."""
    counts, sizes = _parameters(spec, item_bytes, weights)
    num_tokens = sum(lengths)
    kv_bytes, attention = _attention_work(spec, lengths, contexts, item_bytes, kv_cache_dtype, one_by_one=False)
    return StepWork(
        weight_bytes=sizes.read(num_tokens) + (sizes.head if num_logits else 0),
        kv_bytes=kv_bytes,
        flops=2 * counts.per_token * num_tokens + 2 * counts.head * num_logits + attention,
    )


def generation_seconds(
    spec: ModelSpec,
    prompts: Sequence[int],
    outputs: Sequence[int],
    machine: Machine,
    item_bytes: int,
    kv_cache_dtype: str = "auto",
    weights: Mapping[str, int] | None = None,
) -> float:
    """The floor of generating `outputs[i]` tokens behind `prompts[i]`, all requests at once: the prompts computed, then the weights read
    once for each step of the longest output, and the KV of every request for each of its own tokens. The last three are as in `step_work`.
    """
    counts, sizes = _parameters(spec, item_bytes, weights)
    prefill = step_work(spec, prompts, [0] * len(prompts), len(prompts), item_bytes, kv_cache_dtype, weights)
    decoded = [length - 1 for length in outputs]  # prefill gives the first token of an output
    kv_bytes, attention = _attention_work(spec, decoded, prompts, item_bytes, kv_cache_dtype, one_by_one=True)
    rows_by_step = Counter(sum(length > step for length in outputs) for step in range(1, max(outputs)))
    decode = StepWork(
        weight_bytes=sum(count * (sizes.read(rows) + sizes.head) for rows, count in rows_by_step.items()),
        kv_bytes=kv_bytes,
        flops=2 * (counts.per_token + counts.head) * sum(decoded) + attention,
    )
    return prefill.seconds(machine) + decode.seconds(machine)


def generation_floor(config: EngineConfig, info: ModelInfo, items: Sequence[Item], duration: float) -> GenerationFloor:
    """The floor of independent requests that were all sent at once and took `duration` seconds, on the device that ran them, which is
    measured now. The engine must be closed."""
    gc.collect()  # what the engine still held
    device, dtype = torch.device(info.device), getattr(torch, info.dtype)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    machine = MachineProbe(device, dtype).measure(repeats=10)
    model_dir = resolve_model(config.model, config.revision, "dummy")
    spec = load_spec(model_dir)
    prompts, outputs = [len(item.prompt) for item in items], [item.output_tokens for item in items]
    weights = weight_bytes(config, spec, dtype.itemsize, quantized_bytes(config, spec, model_dir)) if info.executor == "cpu" else None
    seconds = generation_seconds(spec, prompts, outputs, machine, dtype.itemsize, config.kv_cache_dtype, weights)
    return GenerationFloor(machine, seconds, sum(outputs) / seconds, seconds / duration if duration else 0.0)


_FLOPS_OF_STATE = 7  # of each number in the state of a gated delta rule, for a token: a product with the decay, and three sums of products


def _pairs(length: int, context: int, window: int | None) -> int:
    """How many pairs of a query and a position that it attends to one layer has, for `length` queries behind `context` positions."""
    seen = np.arange(context + 1, context + length + 1)
    return int((seen if window is None else np.minimum(seen, window)).sum())


def _attention_work(
    spec: ModelSpec, lengths: Sequence[int], contexts: Sequence[int], item_bytes: int, kv_cache_dtype: str, *, one_by_one: bool
) -> tuple[int, int]:
    """Bytes of the KV cache that are read, and of recurrent states that are read and written; and flops. For `lengths[i]` queries behind
    `contexts[i]` positions: all of a row in one step, which reads a position once, or `one_by_one` in steps of their own.

    A latent counts once, although it is a part of the key and the value: one read of it is enough.
    """
    kv_bytes = flops = 0
    attentions = (layer.attention for layer in spec.layers if isinstance(layer.attention, Attention | LatentAttention))
    for kind, count in Counter(attentions).items():
        widths = kind.key_dim + kind.value_dim
        heads, numbers = (1, kind.key_dim) if isinstance(kind, LatentAttention) else (2 * kind.num_kv_heads, widths)
        numbers *= kind.num_kv_heads
        bits = {"auto": 8 * item_bytes, "int4": 4}.get(kv_cache_dtype, 8)
        of_position = numbers * bits // 8 + (SCALE_BYTES * heads if kv_cache_dtype in ("int8", "int4") else 0)
        for length, context in zip(lengths, contexts, strict=True):
            pairs = _pairs(length, context, kind.window)
            seen = pairs if one_by_one else min(context + length, (kind.window or context + 1) + length - 1)
            kv_bytes += count * seen * of_position
            flops += 2 * count * pairs * kind.num_heads * widths
    for shape, count in Counter(spec.states).items():
        matrices = shape.heads * shape.key_dim * shape.value_dim
        state = 4 * matrices + item_bytes * (shape.taps - 1) * shape.width
        kv_bytes += 2 * count * state * (sum(lengths) if one_by_one else len(lengths))
        flops += _FLOPS_OF_STATE * count * matrices * sum(lengths)
    return kv_bytes, flops


@dataclass(frozen=True, slots=True)
class _Parameters:
    """How many there are, or their bytes. Of an embedding only some rows are read, which counts as nothing."""

    always: int  # in the layers, used for every token
    experts: Mapping[float, int]  # top_k / num_experts -> of all experts in such layers
    head: int

    def read(self, num_tokens: int) -> int:
        """How many parameters of the layers, or their bytes, a step of `num_tokens` tokens reads.

        Tokens are taken to choose their experts at random: an expert is not read if none of the tokens chooses it, which has the
        probability (1 - top_k / num_experts) ** num_tokens."""
        return self.always + sum(round(size * (1 - (1 - share) ** num_tokens)) for share, size in self.experts.items())

    @property
    def per_token(self) -> int:
        """How many parameters of the layers one token is multiplied with."""
        return self.read(1)


def _parameters(spec: ModelSpec, item_bytes: int, weights: Mapping[str, int] | None) -> tuple[_Parameters, _Parameters]:
    """How many there are, and their bytes: those of `weights`, by name, or `item_bytes` each."""
    counts = {name: math.prod(weight.shape) for name, weight in named_weights(spec).items()}
    return _summed(spec, counts), _summed(spec, weights or {name: count * item_bytes for name, count in counts.items()})


def _summed(spec: ModelSpec, sizes: Mapping[str, int]) -> _Parameters:
    always = 0
    experts: Counter[float] = Counter()
    for name, size in sizes.items():
        if (mixture := experts_of(spec, name)) is not None:
            experts[mixture.routing.top_k / mixture.num_experts] += size
        elif name.startswith(("layers.", "norm.", "layer_inputs")):
            always += size
    return _Parameters(always, experts, sizes["embedding.weight" if spec.tied_head else "head.weight"])


def best_seconds(action: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Seconds of the fastest of several calls. On a GPU several are queued at a time, so that starting them costs nothing."""
    best = float("inf")
    queued = 8 if device.type == "cuda" else 1
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        for _ in range(queued):
            action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, (time.perf_counter() - start) / queued)
    return best
