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


class DraftModel:
    """Has KV pages of its own, with the numbers of the model's."""

    def __init__(self, setup: ExecutorSetup, workspace: Workspace, vocab_size: int) -> None:
        """`setup` is the draft model's. Raises ConfigError for a model that cannot be one."""
        self._setup = setup
        spec, dtype = setup.native_spec, setup.dtype
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise ConfigError.of("speculative_model", f"{str(setup.model_dir)!r} is not possible: {reason}")
        attention = spec.layers[0].attention
        self._workspace = workspace
        self._page_shape = (setup.config.page_size, attention.num_kv_heads, attention.key_dim, attention.value_dim, setup.kv_dtype or dtype)
        self._groups = setup.groups
        self._vocab_size = vocab_size
        self._last_tokens = np.zeros(setup.max_num_seqs, np.int32)  # by row

    def load(self, check: Callable[[], object]) -> None:
        """Raises what loading raises."""
        setup = self._setup
        self._stack = DecoderStack(
            self._workspace,
            setup.native_spec,
            setup.weights(check),
            setup.max_model_len,
            dtype=setup.dtype,
            groups=self._groups,
            quantization=setup.config.quantization,
        )

    def weight_bytes(self) -> int:
        setup = self._setup
        quantized = quantized_bytes(setup.config, setup.native_spec, setup.model_dir)
        return sum(weight_bytes(setup.config, setup.native_spec, setup.dtype.itemsize, quantized).values())

    def bytes_per_page(self) -> int:
        return self._groups.layers_per_page * page_bytes(*self._page_shape)

    def allocate(self, num_pages: int) -> None:
        page_size, num_kv_heads, key_dim, value_dim, dtype = self._page_shape
        self._pool = KvPool(
            layers_per_page=self._groups.layers_per_page,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
        )

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._pool.copy_pages(self._workspace, sources, destinations)

    def run(self, step: Step, draw_params: NDArray[np.void] | None) -> IntArray:
        """[m] tokens drawn from its logits with the noise of the model, so that both likely draw the same; the likeliest ones without
        `draw_params`. Decodes go on from what was drawn last for their rows.

        Vocabularies may be padded differently: ids that it does not have become its last one, and those that the model does not have
        the model's last one.
        """
        layout, num_decodes, vocab_size = step.layout, step.layout.num_decodes, self._stack.spec.vocab_size
        token_ids = step.token_ids if not num_decodes else np.concatenate((np.empty(num_decodes, np.int32), step.token_ids))
        call = self._stack.prepare(
            self._workspace,
            self._pool,
            layout,
            token_ids if vocab_size >= self._vocab_size else np.minimum(token_ids, vocab_size - 1),
            step.logits_indices,
            greedy=draw_params is None,
            draw_params=draw_params,
            last_tokens=LastTokens(self._last_tokens, step.rows[:num_decodes], step.sampled_rows),
        )
        call.run()
        assert call.sampled is not None
        tokens = call.sampled.astype(np.int32)
        return tokens if vocab_size <= self._vocab_size else np.minimum(tokens, self._vocab_size - 1)
