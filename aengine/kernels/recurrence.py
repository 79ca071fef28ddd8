"""The recurrent states of a model in plain torch: what the inputs of some tokens make of them, one token after the other, and the reading
and writing of the pages that `StateLayout` describes. The reference of the CPU kernels. Knows nothing of rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.paged_cache import LINE_BYTES, LINE_FLOATS, StateLayout, as_bytes

_LEAST_SQUARE = 1e-6  # of what is divided by its length


class StateMemory:
    """The states in the tensors of a pool's pages."""

    def __init__(self, layout: StateLayout, tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
        """`tensors` [num_pages, numbers of a page], each of which has the pieces of one layer of a page. `dtype`: of the inputs of
        convolutions."""
        self._layout = layout
        self._tensors = [as_bytes(tensor) for tensor in tensors[: layout.pieces_per_page]]
        self._dtype = dtype

    def load(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """What a recurrent layer has in n states with the given `pages` [n, pages of a state]: matrices [n, heads, key_dim, value_dim] in
        float32, and inputs [n, taps - 1 and those pending, width]."""
        at = self._layout.layers[layer]
        shape, count = at.shape, len(pages)
        found = self._pieces(pages, at.first, at.tail)
        block = shape.key_dim * at.width
        if at.blocks_per_piece:
            found = found[:, :, : at.blocks_per_piece * block]
        else:
            found = found.view(count, -1, at.pieces_per_block * found.shape[-1])[:, :, :block]
        blocks = found.reshape(count, -1, shape.key_dim, at.width)[:, : at.num_blocks]
        matrices = blocks.view(count, shape.heads, -1, shape.key_dim, at.width).transpose(2, 3).flatten(3)
        return matrices[..., : shape.value_dim].contiguous(), self.load_inputs(layer, pages)

    def load_inputs(self, layer: int, pages: Tensor) -> Tensor:
        """The inputs of what `load` returns."""
        at, count, per_line = self._layout.layers[layer], len(pages), LINE_BYTES // self._dtype.itemsize
        found = self._pieces(pages, at.tail, at.end).flatten(1).view(self._dtype)
        lines = found.view(count, found.shape[1] // per_line, per_line)
        inputs = lines[:, : at.input_lines * at.num_inputs].view(count, at.input_lines, at.num_inputs, per_line).transpose(1, 2)
        return inputs.reshape(count, at.num_inputs, at.input_lines * per_line)[..., : at.shape.width]

    def store(self, layer: int, pages: Tensor, matrices: Tensor, inputs: Tensor) -> None:
        """Writes what `load` returns of n states, no page of which is another's; there may be fewer inputs."""
        at = self._layout.layers[layer]
        shape, count, words = at.shape, len(pages), self._layout.lines_per_piece * LINE_FLOATS
        columns = -(-shape.value_dim // at.width) * at.width
        padded = F.pad(matrices, (0, columns - shape.value_dim))
        blocks = padded.view(count, shape.heads, shape.key_dim, -1, at.width).transpose(2, 3).reshape(count, at.num_blocks, -1)
        per_piece = at.blocks_per_piece or 1
        missing = (at.tail - at.first) // at.pieces_per_block * per_piece - at.num_blocks
        blocks = F.pad(blocks, (0, 0, 0, missing)).view(count, -1, per_piece * blocks.shape[-1])
        padded = F.pad(blocks, (0, at.pieces_per_block * words - blocks.shape[-1]))
        self._write(pages, at.first, padded.view(count, -1, words))
        per_line = LINE_BYTES // self._dtype.itemsize
        wide = F.pad(inputs, (0, at.input_lines * per_line - shape.width, 0, at.num_inputs - inputs.shape[1]))
        lines = wide.view(count, at.num_inputs, at.input_lines, per_line).transpose(1, 2).flatten(1)
        lines = F.pad(lines, (0, (at.end - at.tail) * words * 4 // self._dtype.itemsize - lines.shape[1]))
        self._write(pages, at.tail, lines.view(torch.float32).view(count, at.end - at.tail, words))

    def _pieces(self, pages: Tensor, begin: int, end: int) -> Tensor:
        """[n, pieces, floats]"""
        words = self._layout.lines_per_piece * LINE_FLOATS
        found = []
        for piece in range(begin, end):
            tensor, read = self._tensors[piece % self._layout.pieces_per_page], pages[:, piece // self._layout.pieces_per_page]
            raw = tensor.index_select(0, read)
            found.append(raw.view(torch.uint8)[:, : words * 4].contiguous().view(torch.float32))
        return torch.stack(found, 1) if found else torch.zeros(len(pages), 0, words, device=pages.device)

    def _write(self, pages: Tensor, begin: int, content: Tensor) -> None:
        """`content` [n, pieces, floats]; what a piece has beside these becomes zero."""
        for number in range(content.shape[1]):
            piece = begin + number
            tensor, to = self._tensors[piece % self._layout.pieces_per_page], pages[:, piece // self._layout.pieces_per_page]
            raw = content[:, number].contiguous().view(torch.uint8)
            raw = F.pad(raw, (0, tensor.shape[1] * tensor.dtype.itemsize - raw.shape[1]))
            tensor.index_copy_(0, to.long(), raw.view(tensor.dtype))


@dataclass(frozen=True, slots=True)
class RecurrentRule:
    """What a recurrent layer does with its state, as `models/spec.py: Recurrence` has it. An input has the numbers to convolve, and the
    gates, of which those for the steps are the last ones: one for each head, for each row of its matrix, or without `delta` for each
    column. If v alone is convolved, q and k are the first gates."""

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    conv: Tensor  # [channels, taps] float32
    conv_bias: Tensor | None  # [channels] float32
    log_decay: Tensor  # float32 [heads], or [heads * value_dim, key_dim]
    step_bias: Tensor | None  # float32, as long as there are gates for the steps; None: there are none, and steps are 1
    skip: Tensor | None  # float32 [heads] or [heads * value_dim], of what is added of v to the outputs
    delta: bool  # the gated delta rule: what is missing of v is added to the matrix

    @property
    def width(self) -> int:
        """How many numbers it makes of a token."""
        return self.heads * self.value_dim

    @property
    def taps(self) -> int:
        return self.conv.shape[1]

    def advance(self, matrices: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs [n, t, heads * value_dim] of t tokens of n rows, and their matrices [n, heads, key_dim, value_dim] in float32 behind
        these, which are given as they were before; `inputs` [n, taps - 1 + t, channels and gates] of the tokens and of those before."""
        channels, keys = len(self.conv), self.key_heads * self.key_dim
        v = convolve(inputs[..., :channels], self.conv, self.conv_bias).float()
        gates = inputs[:, self.taps - 1 :, channels:].float()
        rows, length, _ = v.shape
        if channels == self.width:
            q, k, gates = torch.split(gates, [keys, keys, gates.shape[-1] - 2 * keys], -1)
        else:
            q, k, v = torch.split(v, [keys, keys, self.width], -1)
        q, k = (part.view(rows, length, self.key_heads, self.key_dim) for part in (q, k))
        v, steps, speeds = v.view(rows, length, self.heads, self.value_dim), self._steps(gates), self._log_decay.exp()
        if self.delta:
            rates = gates[..., : self.heads].sigmoid().unsqueeze(-1)
            q, k = _unit(q) * self.key_dim**-0.5, _unit(k)
        else:
            rates = steps.squeeze(-2)
        q, k = (part.repeat_interleave(self.heads // self.key_heads, 2) for part in (q, k))
        outputs = torch.empty(rows, length, self.heads, self.value_dim, device=inputs.device)
        for at in range(length):
            matrices = matrices * torch.exp(-speeds * steps[:, at])
            added = v[:, at] if not self.delta else v[:, at] - torch.einsum("nhkv,nhk->nhv", matrices, k[:, at])
            matrices = matrices + k[:, at, :, :, None] * (rates[:, at] * added)[:, :, None]
            outputs[:, at] = torch.einsum("nhkv,nhk->nhv", matrices, q[:, at])
        if self.skip is not None:
            outputs += self.skip.view(self.heads, -1) * v
        return outputs.flatten(2).to(inputs.dtype), matrices

    def _steps(self, gates: Tensor) -> Tensor:
        """[n, t, heads, key_dim or 1, value_dim or 1]"""
        rows, length, count = gates.shape
        if self.step_bias is None:
            return gates.new_ones(rows, length, self.heads, 1, 1)
        number = len(self.step_bias)
        steps = F.softplus(gates[..., count - number :] + self.step_bias).view(rows, length, self.heads, number // self.heads)
        return steps.unsqueeze(-1 if self.delta else -2)

    @property
    def _log_decay(self) -> Tensor:
        """[heads, key_dim or 1, value_dim or 1]"""
        if self.log_decay.ndim == 1:
            return self.log_decay.view(self.heads, 1, 1)
        return self.log_decay.view(self.heads, self.value_dim, self.key_dim).transpose(1, 2)


def convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A causal depthwise convolution with SiLU: [n, taps - 1 + t, channels] -> [n, t, channels]. Sums are made in float32 from the oldest
    input to the newest, and the bias is added last."""
    taps, wide = weight.shape[1], inputs.float()
    length = inputs.shape[1] - taps + 1
    total = torch.zeros_like(wide[:, :length])
    for tap in range(taps):
        total += wide[:, tap : tap + length] * weight[:, tap]
    if bias is not None:
        total += bias
    return F.silu(total).to(inputs.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST_SQUARE)
