"""The recurrent states of a model: where they lie in the pages of its KV pool, and in plain torch what the inputs of some tokens make of
them, one token after the other.

A page is made of pieces: what each of its layers has of keys, then what each has of values. A state takes whole pages, the same number
for every sequence. A layer's part of it begins with a new piece: first the matrix of each head, in blocks of some value columns, which are
[key dimensions][columns] in float32; then, with another piece, the latest inputs, in the dtype of the activations, in lines of 64 bytes:
[lines of an input][inputs]. An input is what a convolution is given of a token, and its gates. They are the `taps` - 1 before the next
token, and where drafts are checked those of tokens behind these that the matrices do not have: when it is known how many of them count,
the next step computes these again, from their inputs.

The kernels of the CPU have the same layout (`src/state.h`), and the recurrences here are their reference. Knows nothing of rows of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aengine.api.dataclass import dataclass
from aengine.kernels.paged_cache import as_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_LEAST_SQUARE = 1e-6  # of what is divided by its length
LINE_BYTES = 64
_FLOATS = LINE_BYTES // 4  # of a line
_WIDTHS = (64, 32, 16)  # columns of a block; one of 128 keys and 64 columns fits the first cache of a core
_BLOCK_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a recurrent layer keeps of a sequence: a matrix [key_dim, value_dim] for each head, and inputs [.., width] of tokens."""

    heads: int
    key_dim: int
    value_dim: int
    width: int
    taps: int  # of the causal convolution


@dataclass(frozen=True, slots=True)
class LayerState:
    """Where a layer's part lies: pieces are counted over all pages of a state."""

    shape: StateShape
    width: int  # columns of a block
    num_blocks: int
    first: int  # piece of the blocks
    blocks_per_piece: int  # 0: a block takes several pieces
    pieces_per_block: int
    tail: int  # piece that the inputs begin with
    num_inputs: int
    input_lines: int  # that one input takes
    end: int  # piece behind all of it


@dataclass(frozen=True, slots=True)
class StateLayout:
    layers: tuple[LayerState, ...]  # of recurrent layers alone
    lines_per_piece: int  # that are used
    pieces_per_page: int
    num_pages: int  # of a state

    @classmethod
    def of(cls, shapes: Sequence[StateShape], pieces_per_page: int, piece_bytes: int, itemsize: int, pending: int = 0) -> StateLayout:
        """`piece_bytes`: of the smallest piece. `itemsize`: bytes of an activation. `pending`: most tokens of which there are inputs that
        the matrices do not have."""
        lines, first, layers = piece_bytes // LINE_BYTES, 0, []
        for shape in shapes:
            layers.append(_layer_state(shape, first, lines, itemsize, pending))
            first = layers[-1].end
        return cls(tuple(layers), lines, pieces_per_page, -(-first // pieces_per_page))


def _layer_state(shape: StateShape, first: int, lines: int, itemsize: int, pending: int) -> LayerState:
    fitting = (width for width in _WIDTHS if 4 * width * shape.key_dim <= min(_BLOCK_BYTES, lines * LINE_BYTES))
    width = min(next(fitting, _FLOATS), -(-shape.value_dim // _FLOATS) * _FLOATS)
    num_blocks, block_lines = shape.heads * -(-shape.value_dim // width), shape.key_dim * width // _FLOATS
    per_piece, per_block = lines // block_lines, -(-block_lines // lines)
    tail = first + (-(-num_blocks // per_piece) if per_piece else num_blocks * per_block)
    num_inputs, input_lines = shape.taps - 1 + pending, -(-shape.width * itemsize // LINE_BYTES)
    end = tail + -(-input_lines * num_inputs // lines)
    return LayerState(shape, width, num_blocks, first, per_piece, per_block, tail, num_inputs, input_lines, end)


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
        import torch
        import torch.nn.functional as F

        at = self._layout.layers[layer]
        shape, count, words = at.shape, len(pages), self._layout.lines_per_piece * _FLOATS
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
        import torch

        words = self._layout.lines_per_piece * _FLOATS
        found = []
        for piece in range(begin, end):
            tensor, read = self._tensors[piece % self._layout.pieces_per_page], pages[:, piece // self._layout.pieces_per_page]
            raw = tensor.index_select(0, read)
            found.append(raw.view(torch.uint8)[:, : words * 4].contiguous().view(torch.float32))
        return torch.stack(found, 1) if found else torch.zeros(len(pages), 0, words, device=pages.device)

    def _write(self, pages: Tensor, begin: int, content: Tensor) -> None:
        """`content` [n, pieces, floats]; what a piece has beside these becomes zero."""
        import torch
        import torch.nn.functional as F

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
        import torch

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
        import torch.nn.functional as F

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
    import torch
    import torch.nn.functional as F

    taps, wide = weight.shape[1], inputs.float()
    length = inputs.shape[1] - taps + 1
    total = torch.zeros_like(wide[:, :length])
    for tap in range(taps):
        total += wide[:, tap : tap + length] * weight[:, tap]
    if bias is not None:
        total += bias
    return F.silu(total).to(inputs.dtype)


def _unit(x: Tensor) -> Tensor:
    import torch

    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _LEAST_SQUARE)
