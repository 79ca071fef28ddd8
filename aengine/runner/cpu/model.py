"""`PagedCpuModel`: what a step of the CPU kernels reads and writes: the packed weights, the KV pages and the last tokens.
Of a rank, its part.

Owns the memory. Knows nothing of sampling, or of which step comes when.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from aengine.api.runtime import trim_heap
from aengine.kernels.arrays import Array
from aengine.kernels.cpu.compiler import KernelsUnavailableError
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.kernels.cpu.ops import KvPool, PackedCpuAdapter, StepAdapters, place_bytes
from aengine.kernels.warm_memory import WarmMemory, lazy_bytes
from aengine.models.adapters import Adapter
from aengine.models.cpu.cpu_operations import Captured, page_parts
from aengine.models.cpu.packed_weights import PackedWeights
from aengine.models.cpu.program import CpuProgram
from aengine.models.cpu.stack import CpuLastTokens, DecoderStack, PreparedStep, unsupported
from aengine.models.cpu.weight_packing import WeightPacking
from aengine.models.sharding import sharded_spec
from aengine.runner.contract import IntArray, ReadWeights, Step
from aengine.runner.cpu.draft import DraftModel
from aengine.runner.cpu.packed_loading import load_packed
from aengine.runner.memory import check_addition, check_memory, cpu_budget, free_host_memory, quantized_bytes, show_bytes, weight_bytes
from aengine.runner.rank_steps import exchange_of
from aengine.runner.setup import ExecutorSetup
from aengine.scheduler.plan import NO_INTS, RowParams, TokenStates

_log = logging.getLogger("aengine")


class PagedCpuModel:
    def __init__(self, setup: ExecutorSetup, warm: WarmMemory | None, check: Callable[[], object]) -> None:
        """Loads the model and packs its weights. Parameters and errors are those of `build_executor`; it also raises
        KernelsUnavailableError, before it reads any weights."""
        spec, dtype = setup.native_spec, setup.dtype
        reason = unsupported(spec, dtype)
        if reason is not None:
            raise KernelsUnavailableError(reason)
        shard = setup.shard
        self._shard, self._spec, self._quantization = shard, spec, setup.config.quantization
        kernels = load_kernels(canonical=setup.config.numerics == "canonical")
        self.workspace = Workspace(kernels, setup.threads, None if shard.size == 1 else exchange_of(setup, kernels))
        self._page_shape = (setup.config.page_size, page_parts(sharded_spec(spec, shard), setup.groups), setup.kv_dtype or dtype)
        self._layers_per_page = setup.groups.layers_per_page
        quantized = quantized_bytes(setup.config, spec, setup.model_dir)
        is_stored_dtype = spec.dtype in (None, dtype.name)
        mapped = setup.config.load_format != "dummy" and is_stored_dtype and "embedding.weight" not in quantized
        copied = spec.vocab_size * spec.hidden_size * dtype.itemsize if spec.tied_head and not mapped else 0  # beside the packed head
        committed = 0 if warm is None else warm.touched
        weights = sum(weight_bytes(setup.config, spec, dtype.itemsize, quantized, shard=shard).values()) + copied
        self._weight_bytes = weights  # without those of a draft model
        self.draft: DraftModel | None = None
        if setup.draft is not None and shard.rank == 0:
            self.draft = DraftModel(setup.draft, self.workspace, spec.vocab_size)
            weights += self.draft.weight_bytes()
        self._num_local = setup.num_local
        available = (free_host_memory() + committed) // self._num_local
        check_memory(weights, self.bytes_per_page(), setup.needs, setup.config, available)
        allocate = lazy_bytes if warm is None else warm.allocate
        start = time.perf_counter()
        loaded = load_packed(setup, self.workspace, check, allocate)
        self._writing = loaded.writing
        self._stack = DecoderStack(loaded.packed, setup.num_positions, groups=setup.groups, states=setup.states)
        if self.draft is not None:
            self.draft.load(check, self._stack)
        elif setup.draft is not None and setup.draft.native_spec.draft_head is not None:
            self._stack.serve(setup.draft.native_spec.draft_head, None)
        self.last_tokens = np.zeros(setup.max_num_seqs, dtype=np.int32)  # by row
        self._adapters: dict[int, PackedCpuAdapter] = {}  # by key
        _log.info(
            "CPU kernels: level %s, %d threads, %s of %s weights in %.2f s, %s",
            kernels.level.value,
            self.workspace.threads,
            show_bytes(self._stack.nbytes),
            setup.weight_form,
            time.perf_counter() - start,
            loaded.source,
        )

    def close(self) -> None:
        """Waits a while for the files of weights that are being written."""
        if self.draft is not None:
            self.draft.close()
        if self._writing is not None:
            self._writing.close()

    def bytes_per_page(self) -> int:
        own = self._layers_per_page * sum(place_bytes(*self._page_shape))
        return own if self.draft is None else own + self.draft.bytes_per_page()

    def kv_budget(self) -> int:
        return cpu_budget() // self._num_local

    def allocate(self, num_pages: int) -> None:
        self._pool = KvPool(self._layers_per_page, num_pages, *self._page_shape)
        if self.draft is not None:
            self.draft.allocate(num_pages)

    def prepare_weights(self, read: ReadWeights, threads: int, partial: bool) -> object:
        """Reads weights and packs them beside those in use, for `use_weights`. May be called from any thread while steps run. Raises
        InsufficientMemoryError before it reads any, and what reading raises."""
        if not partial:
            check_addition("new weights need", self._weight_bytes, free_host_memory() // self._num_local)
        workspace = Workspace(self.workspace.kernels, threads)
        packing = WeightPacking(workspace, self._spec, self._stack.dtype, shard=self._shard, quantization=self._quantization)
        return self._stack.prepare_use(packing.pack(read(self._shard), self._stack.weights if partial else None))

    def use_weights(self, prepared: object) -> None:
        """Computes the steps from now on with weights of `prepare_weights`. No step is in flight."""
        self._stack.use(*cast("tuple[PackedWeights, CpuProgram | None]", prepared))

    def sleep(self, level: int, pages: IntArray) -> None:
        """Gives back the memory of the workspace and of all KV pages but `pages`, with level 2 that of the weights, too."""
        self._pool.keep_pages(pages)
        if self.draft is not None:
            self.draft.sleep(level, pages)
        if level == 2:
            self._stack.drop()
        self.workspace.trim()
        trim_heap()

    def read_pages(self, pages: IntArray, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        return self._pool.read_pages(self.workspace, pages, out)

    def write_pages(self, pages: IntArray, content: NDArray[np.uint8]) -> None:
        self._pool.write_pages(pages, content)

    def copy_pages(self, sources: IntArray, destinations: IntArray) -> None:
        self._pool.copy_pages(self.workspace, sources, destinations)
        if self.draft is not None:
            self.draft.copy_pages(sources, destinations)

    def pack_adapter(self, adapter: Adapter) -> PackedCpuAdapter:
        """An adapter in the form that `set_adapter` takes. May be called from any thread while steps run. Raises AdapterError for one that
        does not fit the model."""
        return self._stack.pack_adapter(adapter)

    def set_adapter(self, key: int, packed: object | None) -> None:
        """Lets rows of steps have the adapter with this key from now on; None: they have it no more."""
        if packed is None:
            self._adapters.pop(key, None)
        else:
            assert isinstance(packed, PackedCpuAdapter)
            self._adapters[key] = packed

    def _adapters_of(self, step: Step, tokens: IntArray | None = None) -> StepAdapters | None:
        """The adapters of a step, and which of them each token has: each of all tokens, or of those at the indices `tokens`. None: no row
        has one."""
        if not len(step.adapters):
            return None
        keys = step.adapters.tolist()
        numbers = {key: number for number, key in enumerate(sorted({*keys} - {0}))}
        of_tokens = np.array([numbers.get(key, -1) for key in keys], np.int32)
        if step.layout.num_tokens > len(keys):
            of_tokens = np.repeat(of_tokens, np.diff(step.layout.qo_indptr))
        return StepAdapters([self._adapters[key] for key in numbers], of_tokens if tokens is None else of_tokens[tokens])

    def prepare(
        self,
        step: Step,
        *,
        greedy: bool = False,
        draw_params: NDArray[np.void] | None = None,
        inputs: Array | None = None,
        captured: Captured | None = None,
    ) -> PreparedStep:
        """A step that brings next tokens if it is `greedy` or has `draw_params`, which become the last tokens of their rows. Otherwise it
        brings hidden states: at the logits indices, or of all tokens if prompts are scored. `inputs` and `captured`: as of
        `DecoderStack.prepare`."""
        num_decodes = step.layout.num_decodes
        token_ids = np.empty(num_decodes, np.int32)  # filled with last tokens when the step begins
        if num_decodes < step.layout.num_rows:
            token_ids = np.concatenate((token_ids, step.token_ids))
        samples = greedy or draw_params is not None
        return self._stack.prepare(
            self.workspace,
            self._pool,
            step.layout,
            token_ids,
            np.arange(len(token_ids), dtype=np.int32) if step.scores_prompts else step.logits_indices,
            greedy=greedy,
            draw_params=draw_params,
            last_tokens=CpuLastTokens(self.last_tokens, step.rows[:num_decodes], step.sampled_rows if samples else NO_INTS),
            kept=None if self.draft is None else self.draft.kept(step.layout.slot_mapping[0]),
            inputs=inputs,
            adapters=self._adapters_of(step),
            positions=step.angles,
            images=step.images,
            captured=captured,
        )

    def captured(self, layers: Sequence[int], experts: bool) -> Captured:
        """What steps are to bring for rows that ask for these layers."""
        return Captured(tuple([layer for layer in layers if layer < self._stack.spec.num_layers]), experts)

    def token_states(
        self, call: PreparedStep, captured: Captured, row: int, start: int, tokens: slice, params: RowParams, factor: float
    ) -> TokenStates:
        """What a step that was run brought of some of its tokens, as `Capture` says."""
        spec, every, hidden = self._stack.spec, call.captured, call.hidden
        assert every is not None
        assert hidden is not None
        columns = captured.residuals(spec)
        normed = _floats(hidden[tokens]) / np.float32(factor)
        states = [_floats(every[tokens, columns[at]]) if at in columns else normed for at in params.pooled_layers]
        experts = None
        if params.pooled_experts:
            chosen = [every[tokens, columns] for columns in captured.experts_of(spec).values()]
            bits = np.stack(chosen, 1).view(np.int16 if every.dtype.itemsize == 2 else np.int32)
            experts = bits.astype(np.int32)
        return TokenStates(row, start, np.stack(states, 1), experts)

    def stage(self, step: Step, inputs: Array | None) -> Array:
        """Computes this stage of a step, as `Compute` says: `inputs` are the hidden states of the stage before, None on the first stage."""
        call = self.prepare(step, inputs=inputs)
        call.run()
        assert call.hidden is not None
        return call.hidden

    @property
    def exchange_seconds(self) -> float:
        """Seconds that this rank has spent in exchanges with others: copying, and waiting for them. 0.0 where there are no others."""
        exchange = self.workspace.exchange
        return 0.0 if exchange is None else exchange.c.nanoseconds / 1e9

    def logits(self, step: Step, hidden: Array, indices: IntArray | None = None) -> NDArray[np.float32]:
        """The logits [m, vocab_size], float32, of the `hidden` states that a step brought, all or those at `indices`. Of several ranks that
        share the vocabulary all call it, and the first gets the logits; the others get theirs alone."""
        tokens = None if step.scores_prompts else step.logits_indices  # whose hidden states they are
        if indices is not None:
            hidden = hidden[indices]
            tokens = indices if tokens is None else tokens[indices]
        part = self._stack.logits(self.workspace, hidden, self._adapters_of(step, tokens))
        every = self._stack.gather_logits(self.workspace, part)
        return part if every is None else every


def _floats(array: Array) -> NDArray[np.float32]:
    return array.astype(np.float32, copy=False)
