"""`PiecewiseGraphs`: steps with prompt tokens, recorded in pieces between which attention runs as usual.

Owns the input and output buffers of the pieces. A step is padded to the next recorded number of tokens; attention and the KV cache get
the real tokens only. Knows nothing of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aengine.attention import AttentionSpec
from aengine.models.decoder import Decoder, ForwardBatch
from aengine.runner.buckets import fitting
from aengine.runner.capture import Capture, InterruptingAttention, LiveAttention, Pieces


class PiecewiseGraphs:
    """`record` makes the graphs of one size, largest size first; from then on `forward` uses them.

    Queries, keys and values of every layer and size keep their memory, since attention reads them between the pieces.
    """

    def __init__(self, model: Decoder, spec: AttentionSpec, sizes: tuple[int, ...], capture: Capture) -> None:
        """`sizes`: numbers of tokens, ascending."""
        self._model = model
        self._capture = capture
        self._sizes = sizes
        largest = sizes[-1]
        device, dtype = model.head_weight.device, model.head_weight.dtype
        self._input_ids = torch.zeros(largest, dtype=torch.int32, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int32, device=device)
        self._attended = torch.zeros(largest, spec.num_heads, spec.head_dim, dtype=dtype, device=device)
        self._hidden = torch.zeros(largest, model.head_weight.shape[1], dtype=dtype, device=device)
        self._live = LiveAttention()
        self._pieces: dict[int, Pieces] = {}

    def record(self, size: int) -> bool:
        """For steps of up to `size` tokens, one of the sizes."""
        pieces = Pieces(self._capture)
        positions = self._positions[:size]
        batch = ForwardBatch(
            input_ids=self._input_ids[:size],
            positions=positions,
            logits_indices=positions[:0],
            attention=InterruptingAttention(pieces, self._live, self._attended),
        )
        pieces.record(lambda: self._write_hidden(batch))
        pieces.replay()  # the first replay takes time and device memory
        self._pieces[size] = pieces
        return True

    def forward(self, batch: ForwardBatch) -> Tensor | None:
        """The hidden states [T, hidden_size], as `Decoder` returns them, valid until the next step. None: no graphs hold the step."""
        count = len(batch.input_ids)
        size = fitting(self._sizes, count)
        if size is None:
            return None
        # The padding is ids and positions of earlier steps, or zeros: any valid ones do.
        self._input_ids[:count].copy_(batch.input_ids)
        self._positions[:count].copy_(batch.positions)
        self._live.step, self._live.num_tokens = batch.attention, count
        self._pieces[size].replay()
        return self._hidden[:count]

    def _write_hidden(self, batch: ForwardBatch) -> None:
        hidden = self._model(batch)
        self._hidden[: len(hidden)].copy_(hidden)
