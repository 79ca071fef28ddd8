"""`Executor`: a model together with its KV pages, as the runner drives it. Two of them read the same named weights: the torch decoder over
an attention backend, and the CPU stack, which runs all layers of a step in one call.

Owns the contract and the choice. Knows nothing of rows, plans or sampling.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import AttentionMetadata, AttentionSpec, StepLayout
from aengine.config import EngineConfig
from aengine.errors import ConfigError
from aengine.kernels.cpu.step import NO_LAST_TOKENS, LastTokens
from aengine.kernels.warm_memory import WarmMemory
from aengine.models.kv_scales import stored_kv_scales
from aengine.models.spec import ModelSpec
from aengine.models.weights import drawn_weights, stored_weights
from aengine.runner.base import Hold
from aengine.runner.buckets import GraphBytes, GraphSizes
from aengine.runner.capture import Capture

_log = logging.getLogger("aengine")
_DEVICE_BOUND = {
    "attention_backend": {"cpu": "cpu", "flashinfer": "cuda", "triton": "cuda"},
    "quantization": {"int8": "cpu"},
    "kv_cache_dtype": {"fp8": "cuda"},
}


@dataclass(frozen=True, slots=True)
class StepInput:
    """T tokens of a mixed batch, the tokens of one row beside each other. Tensors are on the device."""

    metadata: AttentionMetadata
    input_ids: Tensor  # [T] int32
    positions: Tensor  # [T] int32
    logits_indices: Tensor  # [m] int32, the tokens that are followed by one to sample
    all_hidden: bool  # whether logits of other tokens are wanted, too


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What graphs are recorded for."""

    sizes: GraphSizes
    last_tokens: Tensor  # int32, on the device; the last one belongs to no row
    pages_per_row: int  # most
    page_size: int
    num_heads: int
    head_dim: int


class HiddenStates(Protocol):
    """What the layers made of a step's tokens. Valid until the next step."""

    def logits(self, indices: Tensor) -> Tensor:
        """[n] int32 tokens of the step -> [n, vocab_size] float32 that the caller may change.

        `indices` are the step's `logits_indices`, or any with `all_hidden`.
        """

    def argmax(self, indices: Tensor) -> Tensor:
        """The [n] int64 argmax of `logits`, for less where possible."""


class StepPass(Protocol):
    """A step's way through the model; m of its tokens are followed by one to sample. Tensors are on the device, valid until the next
    step."""

    @property
    def hidden(self) -> HiddenStates: ...
    @property
    def indices(self) -> Tensor:
        """[m] int32, these tokens of the step."""

    @property
    def rows(self) -> Tensor:
        """[m] int32, their rows."""

    @property
    def next_positions(self) -> Tensor:
        """[m] int32, of the tokens to sample."""

    @property
    def chosen(self) -> NDArray[np.int64] | None:
        """[m] the rows' last tokens by now, of a step that chose them."""

    @property
    def keeps_argmax(self) -> bool:
        """Whether the rows' last tokens are the argmax by now."""

    def logits(self) -> Tensor:
        """[m, vocab_size] float32 logits of these tokens, which the caller may change."""

    def argmax(self) -> Tensor:
        """The [m] int64 argmax of `logits`, for less where possible."""


class StepRun(Protocol):
    """A step's way through the model before it is gone. Steps are run in the order in which they were prepared."""

    @property
    def chooses(self) -> bool:
        """Whether it brings the tokens, too, and takes nothing of torch."""

    @property
    def overlaps(self) -> bool:
        """Whether it goes on by itself once it has begun."""

    def begin(self) -> None:
        """Starts it where it overlaps, once the tokens of all steps before are known. Returns at once, and raises nothing."""

    @property
    def has_begun(self) -> bool:
        """Whether it is under way on other threads."""

    def follow(self, hold: Hold) -> None:
        """Where this and the step under way overlap, begins when that one is seen through, unless `hold` is set then."""

    def run(self) -> StepPass:
        """Goes the way, or the rest of it."""


@dataclass(frozen=True, slots=True)
class DevicePass:
    """Satisfies `StepPass` with tensors that are there."""

    hidden: HiddenStates
    indices: Tensor
    rows: Tensor
    next_positions: Tensor
    keeps_argmax: bool
    chosen: ClassVar[None] = None

    def logits(self) -> Tensor:
        return self.hidden.logits(self.indices)

    def argmax(self) -> Tensor:
        return self.hidden.argmax(self.indices)


class Executor(Protocol):
    """Steps are run in order, in the thread that made it."""

    @property
    def name(self) -> str: ...

    def bytes_per_page(self) -> int:
        """Bytes that one page takes in all layers together, K and V."""

    def allocate(self, num_pages: int) -> None:
        """Creates the KV pages, zeroed, the reserved page 0 included. Frees what was allocated before."""

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        """As `AttentionBackend.copy_pages`."""

    def forward(self, step: StepInput) -> HiddenStates:
        """Runs the layers over a step's tokens and stores their KV."""

    def record(self, plan: GraphPlan, capture: Capture) -> GraphBytes | None:
        """Records graphs of steps over the pages that there are; `allocate` drops them. None: this executor has none, or one could not be
        recorded, and then it does not try again."""

    def decode(self, layout: StepLayout, rows: NDArray[np.int32]) -> StepPass | None:
        """Runs a step of decodes alone, every row of which is sampled, from the last tokens of `rows`. None: there is no graph for it."""


class HostHidden(HiddenStates, Protocol):
    @property
    def chosen(self) -> NDArray[np.int64] | None:
        """[m] what follows the wanted tokens, and then there are no logits; of a step that chooses."""


class HostRun(Protocol):
    """A step that is ready to run, once, after the ones that were prepared earlier."""

    @property
    def overlaps(self) -> bool:
        """Whether other threads go ahead with it once it has begun."""

    def begin(self) -> None:
        """Starts it, where it overlaps; returns at once. What is wrong with it `run` will say. Its token ids must be there."""

    @property
    def has_begun(self) -> bool:
        """Whether other threads are at it."""

    def follow(self, hold: Hold) -> None:
        """As `StepRun.follow`."""

    def run(self) -> HostHidden:
        """Runs it, or sees it through."""


@runtime_checkable
class HostExecutor(Executor, Protocol):
    """One that takes a step as it is on the host."""

    def prepare(
        self,
        layout: StepLayout,
        token_ids: NDArray[np.int32],
        wanted: NDArray[np.int32],
        *,
        all_hidden: bool,
        greedy: bool = False,
        draw_params: NDArray[np.void] | None = None,
        feed: LastTokens = NO_LAST_TOKENS,
    ) -> HostRun:
        """The layers over [T] `token_ids`, the first of which may come of `feed` when they begin. `wanted`: as the `logits_indices` of a
        `StepInput`. The step chooses what follows them where it is `greedy` or has `draw_params` (of `DRAW_PARAMS`); not
        with `all_hidden`."""

    def draw(self, logits: Tensor, draw_params: NDArray[np.void]) -> Tensor:
        """[m, vocab_size] contiguous float32 logits -> [m] int64: what the same step would have chosen."""


@dataclass(frozen=True, slots=True)
class ExecutorSetup:
    """What an executor is built from."""

    config: EngineConfig
    spec: ModelSpec
    model_dir: pathlib.Path
    dtype: torch.dtype  # of weights, activations and KV cache
    device: torch.device
    num_positions: int  # longest sequence
    warm: WarmMemory | None = None  # of about the weights' size, for weights on a CPU
    check: Callable[[], object] = lambda: None  # called before each weight; raises where loading is to be left

    def weights(self) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
        """Each named weight with its parts; read or drawn as it is asked for. Raises what `check` raises."""
        if self.config.load_format == "dummy":
            weights = drawn_weights(self.spec, self.dtype, self.device, self.config.seed)
        else:
            weights = stored_weights(self.spec, self.model_dir)
        for weight in weights:
            self.check()
            yield weight

    def attention(self) -> AttentionSpec:
        """Reads the scales of an fp8 KV cache. Raises ModelLoadError."""
        spec, fp8 = self.spec, self.config.kv_cache_dtype == "fp8"
        scales = stored_kv_scales(spec, self.model_dir) if fp8 and self.config.load_format != "dummy" else None
        if fp8:
            _log.info("fp8 KV cache: %s", "its scales are 1" if scales is None else "scaled as the checkpoint says")
        return AttentionSpec(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            windows=spec.windows,
            page_size=self.config.page_size,
            dtype=self.dtype,
            device=self.device,
            kv_dtype=torch.float8_e4m3fn if fp8 else None,
            kv_scales=scales,
        )


def build_executor(setup: ExecutorSetup) -> Executor:
    """The executor for this device, model and configuration, with one log line that says which and why.

    Raises ConfigError for one that was asked for and is not possible, and ModelLoadError.
    """
    from aengine.runner.torch_executor import TorchExecutor

    config = setup.config
    on_cpu = setup.device.type == "cpu"
    for name, elsewhere in _DEVICE_BOUND.items():
        value = getattr(config, name)
        if value in elsewhere and (elsewhere[value] == "cpu") != on_cpu:
            raise ConfigError.of(name, f"{value!r} needs device {elsewhere[value]}")
    if not on_cpu:
        return TorchExecutor(setup)
    if config.attention_backend != "torch_native":
        from aengine.kernels.cpu import KernelsUnavailableError
        from aengine.runner.cpu_executor import CpuExecutor

        try:
            return CpuExecutor(setup)
        except KernelsUnavailableError as reason:
            if config.attention_backend == "cpu":
                raise ConfigError.of("attention_backend", f"'cpu' is not possible here: {reason}") from None
            _log.warning("running in plain torch, which is several times slower than the CPU kernels: %s", reason)
    if config.quantization != "none":
        raise ConfigError.of("quantization", f"{config.quantization!r} needs the CPU kernels")
    return TorchExecutor(setup)
