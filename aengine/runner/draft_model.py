"""`DraftModel`: a smaller model of the same vocabulary in the CPU kernels, which proposes tokens for the model to check."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aengine.errors import ConfigError
from aengine.kernels.cpu.library import Workspace
from aengine.kernels.cpu.pool import KvPool, page_bytes
from aengine.models.cpu_stack import DecoderStack, LastTokens, unsupported
from aengine.models.weight_bytes import quantized_bytes, weight_bytes
from aengine.runner.base import IntArray, Step
from aengine.runner.setup import ExecutorSetup

_NO_ROWS: IntArray = np.zeros(0, np.int32)
_NO_TOKENS = LastTokens(_NO_ROWS, _NO_ROWS, _NO_ROWS)


class DraftModel:
    """Has KV pages of its own, with the numbers of the model's."""

    def __init__(self, setup: ExecutorSetup, workspace: Workspace, vocab_size: int) -> None:
        """`setup` is the draft model's. Raises ConfigError for a model that cannot be one."""
        self._setup = setup
        spec, dtype = setup.native_spec, setup.dtype
        reason = unsupported(spec, dtype)
        if spec.vocab_size != vocab_size:
            reason = f"it has {spec.vocab_size} tokens, and the model {vocab_size}"
        elif any(window is not None for window in setup.groups.windows):
            reason = "it has layers with windows"
        if reason is not None:
            raise ConfigError.of("speculative_model", f"{str(setup.model_dir)!r} is not possible: {reason}")
        attention = spec.layers[0].attention
        self._workspace = workspace
        self._page_shape = (setup.config.page_size, attention.num_kv_heads, attention.key_dim, attention.value_dim, setup.kv_dtype or dtype)
        self._layers_per_page = setup.groups.layers_per_page

    def load(self, check: Callable[[], object]) -> None:
        """Raises what loading raises."""
        setup = self._setup
        self._stack = DecoderStack(
            self._workspace,
            setup.native_spec,
            setup.weights(check),
            setup.max_model_len,
            dtype=setup.dtype,
            groups=setup.groups,
            quantization=setup.config.quantization,
        )

    def weight_bytes(self) -> int:
        setup = self._setup
        quantized = quantized_bytes(setup.config, setup.native_spec, setup.model_dir)
        return sum(weight_bytes(setup.config, setup.native_spec, setup.dtype.itemsize, quantized).values())

    def bytes_per_page(self) -> int:
        return self._layers_per_page * page_bytes(*self._page_shape)

    def allocate(self, num_pages: int) -> None:
        page_size, num_kv_heads, key_dim, value_dim, dtype = self._page_shape
        self._pool = KvPool(
            layers_per_page=self._layers_per_page,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._pool.copy_pages(self._workspace, sources, destinations)

    def run(self, step: Step, draw_params: NDArray[np.void]) -> IntArray:
        """[m] tokens drawn from its logits; the noise is that of the model, so that both likely draw the same."""
        layout, indices = step.layout, step.logits_indices
        call = self._stack.prepare(
            self._workspace, self._pool, layout, step.token_ids, indices, draw_params=draw_params, last_tokens=_NO_TOKENS
        )
        call.run()
        assert call.sampled is not None
        return call.sampled.astype(np.int32)
