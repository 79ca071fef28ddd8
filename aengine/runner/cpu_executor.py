"""The CPU stack as an `Executor`: one call of our own kernels runs all layers of a step."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.attention import StepLayout
from aengine.kernels.cpu import KernelsUnavailableError, KvPool, Workspace, load_kernels, ops
from aengine.kernels.cpu.memory import lazy_zeros, warm_zeros
from aengine.kernels.cpu.pool import page_bytes
from aengine.kernels.cpu.step import NO_LAST_TOKENS, LastTokens
from aengine.layers.rotary import cos_sin_cache
from aengine.models.cpu_stack import DecoderStack, PreparedStep, unsupported
from aengine.runner.base import Hold
from aengine.runner.capture import Capture
from aengine.runner.executor import ExecutorSetup, GraphPlan, StepInput
from aengine.runner.memory import show_bytes

_log = logging.getLogger("aengine")


class CpuRun:
    """Satisfies `HostRun`."""

    def __init__(self, executor: CpuExecutor, stack: DecoderStack, workspace: Workspace, step: PreparedStep, *, all_hidden: bool) -> None:
        self._executor = executor
        self._stack = stack
        self._workspace = workspace
        self._step = step
        self._all = all_hidden
        # What follows another step takes torch's threads, which go on spinning on the cores that the next step needs.
        self.overlaps = step.sampled is not None and workspace.threads > 1

    def begin(self) -> None:
        if self.overlaps:
            self._step.begin()

    @property
    def has_begun(self) -> bool:
        return self._step.has_begun

    def follow(self, hold: Hold) -> None:
        if self.overlaps:
            self._executor.following = (self._step, hold)

    def run(self) -> CpuHidden:
        following, self._executor.following = self._executor.following, None
        self._step.run(*(following or ()))
        return CpuHidden(self._stack, self._workspace, self._step, all_hidden=self._all)


class CpuHidden:
    """The normed hidden states of the wanted tokens, [T or m, hidden_size], or of a step that chooses what follows them."""

    def __init__(self, stack: DecoderStack, workspace: Workspace, step: PreparedStep, *, all_hidden: bool) -> None:
        self._stack = stack
        self._workspace = workspace
        self._step = step
        self._all = all_hidden

    def logits(self, indices: Tensor) -> Tensor:
        return self._stack.logits(self._workspace, self._of(indices))

    @property
    def chosen(self) -> NDArray[np.int64] | None:
        return self._step.sampled

    def argmax(self, indices: Tensor) -> Tensor:
        return self.logits(indices).argmax(-1)

    def _of(self, indices: Tensor) -> Tensor:
        hidden = self._step.hidden
        assert hidden is not None, "a step that chooses has no logits"
        return hidden.index_select(0, indices) if self._all else hidden


class CpuExecutor:
    """Satisfies `Executor`. Making one raises KernelsUnavailableError before it reads any weights, or ModelLoadError."""

    name = "cpu"
    following: tuple[PreparedStep, Hold] | None = None

    def __init__(self, setup: ExecutorSetup) -> None:
        reason = unsupported(setup.spec, setup.dtype)
        if reason is not None:
            raise KernelsUnavailableError(reason)
        kernels = load_kernels()
        self._workspace = Workspace(kernels, torch.get_num_threads())
        cos_sin = cos_sin_cache(setup.spec.rope, setup.num_positions, setup.device)
        int8 = setup.config.quantization == "int8"
        allocate = lazy_zeros if setup.warm is None else warm_zeros(setup.warm)
        start = time.perf_counter()
        self._stack = DecoderStack(self._workspace, setup.spec, setup.weights(), cos_sin, dtype=setup.dtype, int8=int8, allocate=allocate)
        seconds = time.perf_counter() - start
        spec = setup.spec
        self._shape = (setup.config.page_size, spec.num_kv_heads, spec.head_dim, setup.dtype)
        self._num_layers = spec.num_layers
        self._pool: KvPool | None = None
        _log.info(
            "CPU kernels: level %s, %d threads, %s of %s weights packed in %.2f s",
            kernels.level.value,
            self._workspace.threads,
            show_bytes(self._stack.nbytes),
            "int8" if int8 else str(setup.dtype).removeprefix("torch."),
            seconds,
        )

    def bytes_per_page(self) -> int:
        return 2 * self._num_layers * page_bytes(*self._shape)

    def allocate(self, num_pages: int) -> None:
        self._pool = None
        page_size, num_kv_heads, head_dim, dtype = self._shape
        self._pool = KvPool(
            num_layers=self._num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )

    def copy_pages(self, sources: NDArray[np.int32], destinations: NDArray[np.int32]) -> None:
        assert self._pool is not None, "allocated"
        self._pool.copy_pages(self._workspace, sources, destinations)

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
    ) -> CpuRun:
        assert self._pool is not None, "allocated"
        if all_hidden:
            wanted = np.arange(len(token_ids), dtype=np.int32)
        step = self._stack.prepare(
            self._workspace, self._pool, layout, token_ids, wanted, greedy=greedy, draw_params=draw_params, last_tokens=feed
        )
        return CpuRun(self, self._stack, self._workspace, step, all_hidden=all_hidden)

    def draw(self, logits: Tensor, draw_params: NDArray[np.void]) -> Tensor:
        return ops.draw(self._workspace, logits, draw_params)

    def forward(self, step: StepInput) -> CpuHidden:
        token_ids, wanted = step.input_ids.numpy(), step.logits_indices.numpy()
        return self.prepare(step.metadata.host, token_ids, wanted, all_hidden=step.all_hidden).run()

    def record(self, plan: GraphPlan, capture: Capture) -> None:
        return None  # a step is one call already

    def decode(self, layout: StepLayout, rows: NDArray[np.int32]) -> None:
        return None
