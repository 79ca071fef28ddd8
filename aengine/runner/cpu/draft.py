"""`DraftModel`: in the CPU kernels, a smaller model of the same vocabulary or a draft head. It proposes tokens for the model to check."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from aengine.api.errors import ConfigError
from aengine.kernels.cpu.library import Workspace
from aengine.kernels.cpu.ops import KvPool, draw, place_bytes
from aengine.kernels.warm_memory import keep_rows, lazy_bytes
from aengine.models.choice import draft_token_ids
from aengine.models.cpu.cpu_operations import page_parts
from aengine.models.cpu.stack import CpuLastTokens, DecoderStack, KeptHidden, PreparedStep, unsupported
from aengine.runner.contract import IntArray, Step
from aengine.runner.cpu.packed_loading import WeightsWriting, load_packed
from aengine.runner.memory import quantized_bytes, weight_bytes
from aengine.runner.setup import ExecutorSetup


class DraftModel:
    """Has KV pages of its own, with the numbers of the model's. For a head there are hidden states beside them, a row for each slot: those
    that it reads at the slot's position. Steps of the model write them as they write keys and values, so both are there together."""

    def __init__(self, setup: ExecutorSetup, workspace: Workspace, vocab_size: int) -> None:
        """`setup` is the draft model's. Raises ConfigError for a model that cannot be one."""
        self._setup = setup
        spec, dtype = setup.native_spec, setup.dtype
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise ConfigError.of("speculative_model", f"{str(setup.model_dir)!r} is not possible: {reason}")
        self._workspace = workspace
        self._page_shape = (setup.config.page_size, page_parts(spec, setup.groups), setup.kv_dtype or dtype)
        self._groups = setup.groups
        self._vocab_size = vocab_size
        self._kept_width = 0 if spec.draft_head is None else spec.hidden_size
        self._writing: WeightsWriting | None = None
        self._last_tokens = np.zeros(setup.max_num_seqs, np.int32)  # by row

    def load(self, check: Callable[[], object], model: DecoderStack) -> None:
        """Raises what loading raises. Steps of the `model` that were prepared before are void."""
        setup = self._setup
        head = setup.native_spec.draft_head
        loaded = load_packed(setup, self._workspace, check)
        self._writing = loaded.writing
        self._stack = DecoderStack(loaded.packed, setup.max_model_len, groups=self._groups, target=None if head is None else model)
        self._token_ids = draft_token_ids(setup.native_spec, setup.model_dir, setup.config.load_format)
        if head is not None:
            model.serve(head, self._stack)

    def close(self) -> None:
        """Waits a while for the file of the weights, if it is being written."""
        if self._writing is not None:
            self._writing.close()

    def weight_bytes(self) -> int:
        setup = self._setup
        quantized = quantized_bytes(setup.config, setup.native_spec, setup.model_dir)
        return sum(weight_bytes(setup.config, setup.native_spec, setup.dtype.itemsize, quantized).values())

    def bytes_per_page(self) -> int:
        hidden = self._setup.config.page_size * self._kept_width * self._setup.dtype.itemsize
        return self._groups.layers_per_page * sum(place_bytes(*self._page_shape)) + hidden

    def allocate(self, num_pages: int) -> None:
        self._pool = KvPool(self._groups.layers_per_page, num_pages, *self._page_shape)
        shape, dtype = (num_pages, self._setup.config.page_size, self._kept_width), self._stack.dtype
        self._hidden = lazy_bytes(math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)

    def sleep(self, level: int, pages: IntArray) -> None:
        """Gives back the memory of KV pages and of hidden states, except for those of `pages`. The draft model keeps its weights at every
        level."""
        self._pool.keep_pages(pages)
        if self._kept_width:
            keep_rows(self._hidden.reshape(len(self._hidden), -1), pages)

    def kept(self, slots: IntArray) -> KeptHidden | None:
        """What a step needs to write hidden states to these slots; None: this is no head."""
        return KeptHidden(self._hidden.reshape(-1, self._kept_width), slots) if self._kept_width else None

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._pool.copy_pages(self._workspace, sources, destinations)
        self._hidden[destinations] = self._hidden[sources]

    def run(self, step: Step, draw_params: NDArray[np.void] | None) -> IntArray:
        """[m] tokens drawn from its logits with the noise of the model, so that both likely draw the same; the likeliest ones without
        `draw_params`. Decodes go on from what was drawn last for their rows.

        Vocabularies may be padded differently: ids that it does not have become its last one, and those that the model does not have
        the model's last one.
        """
        layout, num_decodes, vocab_size = step.layout, step.layout.num_decodes, self._stack.spec.vocab_size
        token_ids = step.token_ids if not num_decodes else np.concatenate((np.empty(num_decodes, np.int32), step.token_ids))
        own_ids = self._token_ids is not None
        call = self._stack.prepare(
            self._workspace,
            self._pool,
            layout,
            token_ids if vocab_size >= self._vocab_size else np.minimum(token_ids, vocab_size - 1),
            step.logits_indices,
            greedy=draw_params is None and not own_ids,
            draw_params=None if own_ids else draw_params,
            last_tokens=CpuLastTokens(self._last_tokens, step.rows[:num_decodes], step.sampled_rows[: 0 if own_ids else None]),
            kept=self.kept(step.kept_slots),
        )
        if self._workspace.threads > 1 and not own_ids:
            call.begin()  # on the threads that the model's steps run on; others would spin on the cores of these afterwards
        call.run()
        if own_ids:
            tokens = self._draw(call, draw_params)
            self._last_tokens[step.sampled_rows] = tokens
            return tokens
        assert call.sampled is not None
        tokens = call.sampled.astype(np.int32)
        return tokens if vocab_size <= self._vocab_size else np.minimum(tokens, self._vocab_size - 1)

    def _draw(self, call: PreparedStep, draw_params: NDArray[np.void] | None) -> IntArray:
        """[m] int32 tokens, drawn from the logits of an output head that has some of the tokens alone. The noise of a token belongs to its
        id among all."""
        assert call.hidden is not None
        assert self._token_ids is not None
        logits = self._stack.logits(self._workspace, call.hidden)
        if draw_params is None:
            best: IntArray = self._token_ids[logits.argmax(-1)].astype(np.int32)
            return best
        every = np.full((len(logits), self._vocab_size), -np.inf, np.float32)
        every[:, self._token_ids] = logits
        drawn: IntArray = draw(self._workspace, every, draw_params).astype(np.int32)
        return drawn
