"""`DecodeGraphs`: decode steps of a fixed number of rows, recorded from reading last tokens to storing their argmax; of a stage from the
hidden states of the one before to its own.

Owns the buffers that the graphs read and write. A step is padded to the smallest graph that holds it: padding rows read the spare row's
last token, attend to page 0, write no KV, and store their tokens at the spare row. Knows nothing of sampling but argmax.

Tokens whose ids are given, as in a chunk with drafts, are rows of their own, whose last tokens are these ids: a step that verifies drafts
is a decode step of more rows, whatever the lengths of its chunks. The programs of such rows read the same pages at the same time, so the KV
is read from the device's memory about once.

`PiecewiseGraphs`: steps with prompt tokens, recorded in pieces between which attention runs as usual.

Owns the input and output buffers of the pieces. A step is padded to the next recorded number of tokens; attention gets the real tokens
only, and the padding has no slots in the KV cache. Knows nothing of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionStep,
    Gates,
    GraphStep,
    IndexQuery,
    StepLayout,
    StepStates,
    as_decodes,
    empty_layout,
)
from aengine.kernels.arrays import upload
from aengine.kernels.paged_cache import Heads, KvTarget
from aengine.kernels.recurrence import RecurrentRule
from aengine.layers.adapters import AdapterTable
from aengine.models.torch.decoder import ForwardBatch
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.contract import IntArray, Step
from aengine.runner.torch.buckets import DecodeArrays, DecodeFrame, GraphSizes, aligned, fitting
from aengine.runner.torch.capture import Capture, Pieces
from aengine.runner.torch.loading import TorchModel
from aengine.sampling.sampler import SampledTokens


@dataclass(frozen=True, slots=True)
class Forward:
    """What the model made of a step with m sampled rows. Tensors are on the device, valid until the next step."""

    logits: Callable[[Tensor], Tensor]
    """[n] int32 tokens of the step -> [n, vocab_size] as of `TorchModel.scaled_logits`, not to be changed."""
    logits_indices: Tensor  # [m] int32, the tokens that are followed by a sampled one
    rows: Tensor  # [m] int32, their rows
    next_positions: Tensor  # [m] int32, of the tokens to be sampled
    greedy: SampledTokens | None = None
    """The argmax of the logits, if it is computed. Of a step of decodes alone it is stored as the rows' last tokens, too."""
    hidden: Tensor | None = None
    """[T, hidden_size]; of a stage but the last what it sends on, without logits. None: a graph has made logits of them."""


class StagingBuffer:
    """Pinned host memory from which one step at a time is copied to a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.int32)
        self._copied = None if device.type == "cpu" else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def prepare(self, length: int) -> IntArray:
        """Waits until the last copy from here is done; returns room for at least `length` numbers."""
        if self._copied is not None:
            self._copied.synchronize()  # returns at once if it was never recorded
        if len(self._memory) < length:
            self._memory = torch.empty(1 << (length - 1).bit_length(), dtype=torch.int32, pin_memory=self._copied is not None)
        return self._memory.numpy()

    def send(self, begin: int, out: Tensor) -> None:
        """Copies the numbers from `begin` on to `out`, on the current stream, without waiting."""
        out.copy_(self._memory[begin : begin + len(out)], non_blocking=True)

    def mark_read(self) -> None:
        """To be called when everything that reads this memory is on the current stream."""
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: DecodeArrays[Tensor]
    step: GraphStep
    pieces: Pieces


class DecodeGraphs:
    """`record` makes a graph of one size, largest size first; from then on `run` uses it. `record_uneven` does so for the other kernels of
    the attention backend, if it has any, and `record_plain` for steps without adapters, whose graphs have fewer kernels."""

    def __init__(
        self,
        model: TorchModel,
        backend: AttentionBackend,
        sizes: GraphSizes,
        last_tokens: Tensor,
        pages_per_row: int,
        capture: Capture,
        num_rows: int,
        shard: Shard = WHOLE,
        adapters: AdapterTable | None = None,
    ) -> None:
        """`sizes`: all but those of `tokens` count. `last_tokens`: int32 on the device: by row, then room for the given ids of a step,
        then that of the spare row, which belongs to no sequence. `pages_per_row`: the most that a row may have. `num_rows`: those of
        sequences. `shard`: what the model is of the whole one. `adapters`: those of the model, which are on."""
        self._model = model
        self._adapters = adapters
        self._backend = backend
        self._sizes = sizes
        self._last_tokens = last_tokens
        self._capture = capture
        self._num_rows = num_rows
        self._spare_row = len(last_tokens) - 1
        largest = sizes.rows[-1]
        device, dtype = backend.spec.device, backend.spec.dtype
        self._frame = DecodeFrame(largest, backend.spec.num_groups)
        self._num_pages = aligned(largest * pages_per_row)  # in each group, that the inputs have room for
        self._staging = [StagingBuffer(device) for _ in range(3)]  # used in turn: copies of earlier steps may not be done
        self._num_steps = 0
        self._inputs = torch.zeros(self._frame.length(self._num_pages), dtype=torch.int32, device=device)
        self._next_slots = torch.full((largest,), -1, dtype=torch.int32, device=device)
        self._arange = torch.arange(largest + 1, dtype=torch.int32, device=device)
        vocab_size, hidden_size = model.head_shape
        one_stage = shard.num_stages == 1
        self._given = torch.zeros(largest, hidden_size, dtype=dtype, device=device) if shard.stage else None
        self._hidden = None if one_stage else torch.zeros(largest, hidden_size, dtype=dtype, device=device)
        self._logits = torch.zeros(largest if one_stage else 0, vocab_size, dtype=dtype, device=device)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self._chosen = torch.zeros(largest, dtype=dtype, device=device)  # the logits of these tokens
        self._graphs: dict[int, _Graph] = {}
        self._uneven: dict[int, _Graph] = {}
        self._plain: dict[int, _Graph] = {}

    def record(self, size: int) -> bool:
        """Records a graph for steps of up to `size` rows; `size` is one of the sizes. False: the attention backend is not for graphs."""
        return self._record(size, self._backend.graph_step, self._graphs)

    def record_uneven(self, size: int) -> bool:
        """Records a graph for uneven steps of up to `size` rows; `size` is one of the sizes. False: the attention backend has no other
        kernels for them."""
        return self._record(size, self._backend.uneven_graph_step, self._uneven)

    def drop_uneven(self) -> None:
        self._uneven.clear()

    def record_plain(self, size: int) -> bool:
        """Records a graph for steps of up to `size` rows without adapters; `size` is one of the sizes. False as of `record`."""
        assert self._adapters is not None
        self._adapters.on = False
        try:
            return self._record(size, self._backend.graph_step, self._plain)
        finally:
            self._adapters.on = True

    def drop_plain(self) -> None:
        self._plain.clear()

    def _record(self, size: int, step_over: Callable[[AttentionMetadata], GraphStep | None], graphs: dict[int, _Graph]) -> bool:
        nothing = empty_layout(self._frame.num_groups, self._backend.spec.page_size)
        no_rows = nothing.seq_lens
        layout = self._frame.pack(nothing, no_rows, size, self._spare_row, np.zeros(self._frame.length(size), dtype=np.int32))
        inputs = self._frame.split(self._inputs, size, self._num_pages)
        metadata = AttentionMetadata(
            host=layout,
            qo_indptr=self._arange[: size + 1],
            kv_indptr=inputs.kv_indptr,
            kv_indices=inputs.kv_indices,
            last_page_len=inputs.last_page_len,
            slot_mapping=inputs.slot_mapping,
        )
        step = step_over(metadata)
        if step is None:
            return False
        graph = _Graph(inputs, step, Pieces(self._capture))
        self._prepare(graph, nothing, no_rows, size)
        graph.pieces.record(lambda: self._forward(inputs, size, step))
        graph.pieces.replay()  # the first replay takes time and device memory
        graphs[size] = graph
        return True

    def run(self, step: Step, token_ids: Tensor, next_slots: Tensor | None = None, inputs: Tensor | None = None) -> Forward | None:
        """`token_ids` int32 are those of the step, on the device; `next_slots` and `inputs` as of `ForwardBatch`. None: no graph holds
        it."""
        layout, places, count = step.layout, step.rows, step.layout.num_tokens
        only_decodes = len(token_ids) == 0
        if count > self._sizes.rows[-1] or (layout.states is not None and not _may_replay(layout.states, only_decodes)):
            return None
        if not only_decodes:
            given = np.arange(self._num_rows, self._num_rows + len(token_ids), dtype=np.int32)
            layout, places = as_decodes(layout), np.concatenate((step.rows[: layout.num_decodes], given))
            self._last_tokens[self._num_rows : self._num_rows + len(token_ids)].copy_(token_ids)
        graph, size = self._graph_for(layout, plain=len(step.adapters) == 0)
        if next_slots is not None:
            self._next_slots[:count].copy_(next_slots)
            self._next_slots[count:size].fill_(-1)
        if inputs is not None:
            assert self._given is not None
            self._given[:count].copy_(inputs)
        self._prepare(graph, layout, places, size, step.positions)
        graph.pieces.replay()

        def logits(indices: Tensor) -> Tensor:
            return self._model.scaled_logits(self._logits[:count] if len(indices) == count else self._logits.index_select(0, indices))

        if only_decodes and next_slots is None and self._hidden is None:  # a draft head's samples are one position later
            arrays = graph.inputs
            greedy = SampledTokens(self._tokens[:count], self._chosen[:count])
            return Forward(logits, self._arange[:count], arrays.rows[:count], arrays.seq_lens[:count], greedy)
        indices, rows, positions = upload((step.logits_indices, step.sampled_rows, step.next_positions), self._tokens.device)
        if self._hidden is not None:
            return Forward(logits, indices, rows, positions, hidden=self._hidden[:count])
        greedy = SampledTokens(self._tokens.index_select(0, indices), self._chosen.index_select(0, indices))
        return Forward(logits, indices, rows, positions, greedy)

    def _graph_for(self, layout: StepLayout, plain: bool) -> tuple[_Graph, int]:
        """The smallest graph that holds a step of decodes, and its size. `plain`: no row has an adapter."""
        if self._uneven and self._backend.is_uneven(layout):
            graphs, size = self._uneven, fitting(self._sizes.uneven, layout.num_rows)
        elif plain and self._plain and layout.num_rows <= self._sizes.plain[-1]:
            graphs, size = self._plain, fitting(self._sizes.plain, layout.num_rows)
        else:
            graphs, size = self._graphs, fitting(self._sizes.rows, layout.num_rows)
        assert size is not None, "the largest graphs of rows and of uneven ones hold as many"
        return graphs[size], size

    def _prepare(self, graph: _Graph, layout: StepLayout, rows: IntArray, size: int, angles: IntArray | None = None) -> None:
        frame, num_pages = self._frame, layout.kv_indices.shape[1] + size - layout.num_rows
        staging = self._staging[self._num_steps % len(self._staging)]
        self._num_steps += 1
        padded = frame.pack(layout, rows, size, self._spare_row, staging.prepare(frame.length(num_pages)), angles)
        staging.send(0, self._inputs[: frame.begin + num_pages])  # with the page ids of the first group
        for group in range(1, frame.num_groups):
            staging.send(frame.begin + group * num_pages, graph.inputs.kv_indices[group, :num_pages])
        graph.step.prepare(padded)
        staging.mark_read()

    def _forward(self, inputs: DecodeArrays[Tensor], size: int, attention: AttentionStep) -> None:
        last_tokens = self._last_tokens
        batch = ForwardBatch(
            input_ids=last_tokens.index_select(0, inputs.rows),
            positions=inputs.positions,
            logits_indices=self._arange[:size],
            attention=attention,
            slots=inputs.slot_mapping[0],
            next_slots=self._next_slots[:size],
            inputs=None if self._given is None else self._given[:size],
        )
        if self._hidden is not None:
            self._hidden[:size].copy_(self._model(batch))
            return
        logits, tokens = self._logits[:size], self._tokens[:size]
        self._model.head_product(self._model(batch), out=logits)
        torch.max(logits, -1, out=(self._chosen[:size], tokens))
        last_tokens.index_copy_(0, inputs.rows.long(), tokens.to(torch.int32))


class _Attention:
    """The `AttentionStep` of recorded forward passes: each layer's attention interrupts the pieces, and a replay runs `step` there, over
    the first `num_tokens` of the recorded tokens. Keys and values are written in a piece where the target is known, else by `step`, too."""

    pieces: Pieces  # that are recorded now
    targets: AttentionStep  # of what is recorded now

    def __init__(self, out: Tensor, heads_of: Callable[[int], Heads]) -> None:
        """`out`, with room for T tokens of all heads of a layer, is the output of every layer: it is read before the next one writes it."""
        self._heads_of = heads_of
        self.step: AttentionStep | None = None  # None: nothing is run
        self.num_tokens = 0
        self._out = out
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._written = key, value

    def target(self, layer: int) -> KvTarget | None:
        return self.targets.target(layer)

    def attend(
        self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None, index: IndexQuery | None = None
    ) -> Tensor:
        written, self._written = self._written or (), None
        has_index, has_written = index is not None, bool(written)  # alone kept: the tensors are those of a part that is recorded
        shape = (len(query), query.shape[1], self._heads_of(layer).value_dim)
        attended = self._out[: math.prod(shape)].view(shape) if out is None else out

        def run(query: Tensor, *others: Tensor) -> None:
            if self.step is not None:
                count = self.num_tokens
                query, others = query[:count], tuple(each[:count] for each in others)
                if has_written:
                    self.step.write(layer, *others[-2:])
                given = IndexQuery(*others[:2]) if has_index else None
                self.step.attend(layer, query, sinks, attended[:count], given)

        self.pieces.interrupt(run, query, *(index or ()), *written)
        return attended

    def recur(self, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Gates) -> Tensor:
        made = mixed.new_zeros(len(mixed), rule.width)  # those of padding are normed

        def run(mixed: Tensor, *gates_of_tokens: Tensor) -> None:
            if self.step is not None:
                count = self.num_tokens
                given = gates if callable(gates) else gates_of_tokens[0][:count]
                made[:count].copy_(self.step.recur(layer, rule, mixed[:count], given))

        self.pieces.interrupt(run, mixed, *(() if callable(gates) else (gates,)))
        return made

    def convolve(self, places: range, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        convolved = torch.empty_like(inputs)

        def run(inputs: Tensor) -> None:
            if self.step is not None:
                convolved[: self.num_tokens].copy_(self.step.convolve(places, inputs[: self.num_tokens], weight, bias))

        self.pieces.interrupt(run, inputs)
        return convolved


def _may_replay(states: StepStates, only_decodes: bool) -> bool:
    """Whether graphs of decodes hold a step of a model with recurrent layers: its rows keep one state each at most."""
    return only_decodes and bool((np.diff(states.kept_rows) > 0).all())


class PiecewiseGraphs:
    """`record` makes the graphs of one size, largest size first; from then on `forward` uses them."""

    def __init__(
        self, model: TorchModel, backend: AttentionBackend, sizes: tuple[int, ...], capture: Capture, shard: Shard = WHOLE
    ) -> None:
        """`sizes`: numbers of tokens, ascending. `shard`: what the model is of the whole one."""
        spec = backend.spec
        self._model = model
        self._backend = backend
        self._capture = capture
        self._sizes = sizes
        largest = sizes[-1]
        device, dtype = spec.device, spec.dtype
        self._input_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int32, device=device)
        self._slots = torch.full((spec.num_groups, largest), -1, dtype=torch.int32, device=device)
        self._layers = {group: layer for layer, (group, _) in enumerate(spec.places)}  # one of each group
        self._next_slots = torch.full((largest,), -1, dtype=torch.int32, device=device)
        heads = (spec.heads_of(layer) for layer in range(len(spec.scoring)))
        self._attended = torch.zeros(largest * max(each.num_heads * each.value_dim for each in heads), dtype=dtype, device=device)
        self._hidden = torch.zeros(largest, model.head_shape[1], dtype=dtype, device=device)
        self._given = torch.zeros_like(self._hidden) if shard.stage else None  # `inputs` of a batch
        self._attention = _Attention(self._attended, spec.heads_of)
        self._pieces: dict[int, Pieces] = {}

    def record(self, size: int) -> bool:
        """For steps of up to `size` tokens, one of the sizes."""
        pieces = self._attention.pieces = Pieces(self._capture)
        positions, slots, next_slots = self._positions[:size], self._slots[:, :size], self._next_slots[:size]
        given = None if self._given is None else self._given[:size]
        nothing = AttentionMetadata.of(empty_layout(len(self._slots), self._backend.spec.page_size), slots.device)
        self._attention.targets = self._backend.plan(replace(nothing, slot_mapping=slots))
        batch = ForwardBatch(self._input_ids[:size], positions, positions[:0], self._attention, slots[0], next_slots, given)
        try:
            pieces.record(lambda: self._write_hidden(batch))
        finally:
            del self._attention.pieces  # whose actions refer to `_attention`
        pieces.replay()  # the first replay takes time and device memory
        self._pieces[size] = pieces
        return True

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states [T, hidden_size], as the model returns them, valid until the next step. None: no graphs hold the step."""
        count = len(batch.input_ids)
        size = fitting(self._sizes, count)
        if size is None:
            return None
        # The padding is ids and positions of earlier steps, or zeros: any valid ones do.
        self._input_ids[:count].copy_(batch.input_ids)
        self._positions[:count].copy_(batch.positions)
        targets = {group: batch.attention.target(layer) for group, layer in self._layers.items()}
        slots = [(self._slots[group], target.slots) for group, target in targets.items() if target is not None]
        for buffer, given in [*slots, (self._slots[0], batch.slots), (self._next_slots, batch.next_slots)]:
            if given is not None:
                buffer[:count].copy_(given[:count])
                buffer[count:size].fill_(-1)
        if batch.inputs is not None:
            assert self._given is not None
            self._given[:count].copy_(batch.inputs)
        self._attention.step, self._attention.num_tokens = batch.attention, count
        self._pieces[size].replay()
        return self._hidden[:count]

    def _write_hidden(self, batch: ForwardBatch) -> None:
        hidden = self._model(batch)
        self._hidden[: len(hidden)].copy_(hidden)
