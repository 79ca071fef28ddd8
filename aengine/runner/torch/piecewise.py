"""`PiecewiseGraphs`: steps with prompt tokens, recorded in pieces between which attention runs as usual.

Owns the input and output buffers of the pieces. A step is padded to the next recorded number of tokens; attention gets the real tokens
only, and the padding has no slots in the KV cache. Knows nothing of rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from aengine.attention import AttentionBackend, AttentionMetadata, AttentionStep, empty_layout
from aengine.kernels.paged_cache import KvTarget
from aengine.models.torch.decoder import ForwardBatch
from aengine.parallel.shard import WHOLE, Shard
from aengine.runner.torch.buckets import fitting
from aengine.runner.torch.capture import Capture, Pieces
from aengine.runner.torch.loading import TorchModel


class _Attention:
    """The `AttentionStep` of recorded forward passes: each layer's attention interrupts the pieces, and a replay runs `step` there, over
    the first `num_tokens` of the recorded tokens. Keys and values are written in a piece where the target is known, else by `step`, too."""

    pieces: Pieces  # that are recorded now
    targets: AttentionStep  # of what is recorded now

    def __init__(self, out: Tensor) -> None:
        """`out` [at least T, num_heads, value_dim] is the output of every layer: it is read before the next layer writes it."""
        self.step: AttentionStep | None = None  # None: nothing is run
        self.num_tokens = 0
        self._out = out
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._written = key, value

    def target(self, layer: int) -> KvTarget | None:
        return self.targets.target(layer)

    def attend(self, layer: int, query: Tensor, sinks: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        written, self._written = self._written or (), None
        attended = self._out[: len(query)] if out is None else out

        def run(query: Tensor, *written: Tensor) -> None:
            if self.step is not None:
                count = self.num_tokens
                if written:
                    key, value = written
                    self.step.write(layer, key[:count], value[:count])
                self.step.attend(layer, query[:count], sinks, attended[:count])

        self.pieces.interrupt(run, query, *written)
        return attended


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
        self._attended = torch.zeros(largest, spec.num_heads, spec.value_dim, dtype=dtype, device=device)
        self._hidden = torch.zeros(largest, model.head_shape[1], dtype=dtype, device=device)
        self._given = torch.zeros_like(self._hidden) if shard.stage else None  # `inputs` of a batch
        self._attention = _Attention(self._attended)
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
