"""What kernels and attention backends both know of a layer: its K and V as tensors of pages, how it scores keys, and where its recurrent
state lies in pages.

A page is made of pieces: what each of its layers has of keys, then what each has of values. A state takes whole pages, the same number
for every sequence. A layer's part of it begins with a new piece: first the matrix of each head, in blocks of some value columns, which are
[key dimensions][columns] in float32; then, with another piece, the latest inputs, in the dtype of the activations, in lines of 64 bytes:
[lines of an input][inputs]. An input is what a convolution is given of a token, and its gates. They are the `taps` - 1 before the next
token, and where drafts are checked those of tokens behind these that the matrices do not have: when it is known how many of them count,
the next step computes these again, from their inputs. The kernels of the CPU have the same layout (`src/state.h`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Heads(NamedTuple):
    """The heads of a layer. Query head h reads KV head h // (num_heads // num_kv_heads)."""

    num_heads: int
    num_kv_heads: int  # divides num_heads
    key_dim: int  # of a query and of a key
    value_dim: int  # of a value and of what is attended

    @property
    def width(self) -> int:
        """Numbers of a token's keys and values together."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


def layers_per_place(heads: Sequence[Heads]) -> tuple[int, ...]:
    """By layer, how many such as it have room where the widest one has its keys and values."""
    widest = max(each.width for each in heads)
    return tuple(widest // each.width for each in heads)


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The order of the dimensions (pages, tokens of a page, KV heads, head_dim) depends on the attention backend. In int8 a head of a token
    ends with the `SCALE_BYTES` of its scale."""

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0  # what a stored number is multiplied with; other than 1 for float8 alone
    value_scale: float = 1.0
    latent: bool = False  # `values` are a view of the last numbers of `keys`


class KvTarget(NamedTuple):
    """Where a layer's keys and values of T tokens are written."""

    cache: PagedCache  # of tensors [num_pages, page_size, num_kv_heads, width], each page of which is contiguous
    slots: Tensor  # [at least T] int32, page * page_size + offset; -1: the token is skipped


class Span(NamedTuple):
    """Which of the positions up to its own a query sees, as `Scoring` says."""

    window: int | None
    chunked: bool = False

    def first(self, positions: NDArray[Any]) -> NDArray[Any]:
        """The first position that a query at each position sees."""
        if self.window is None:
            return np.zeros_like(positions)
        chunk: NDArray[Any] = positions - positions % self.window
        return chunk if self.chunked else np.maximum(positions - (self.window - 1), 0)


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the attention of a layer scores keys, and which of them a query sees."""

    scale: float  # multiplies the products of query and key
    window: int | None = None  # a query attends to this many latest positions, itself included; None: to all
    soft_cap: float = 0.0  # scores become soft_cap * tanh(score / soft_cap); 0: they do not
    sinks: bool = False
    """Each head has a sink: one more score of every query, neither scaled nor capped, whose value is zero (GPT-OSS)."""
    slopes: tuple[float, ...] = ()
    """By head what the score of a key loses for each position that it is behind its query, after the soft cap (ALiBi, Press et al. 2022).
    Empty: nothing."""
    within_images: bool = False  # a query sees what the step's layout says that its token sees: in an image, all of that image (Gemma 3)
    chunked: bool = False  # a query sees nothing before the last position that is a multiple of the window (Llama 4)

    @property
    def span(self) -> Span:
        return Span(self.window, self.chunked)


SCALE_BYTES = 4  # float32
_INT8_MAX = 127.0


def stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """`x` as a cache of `dtype` holds it: x / scale, saturated and viewed as bytes, where `dtype` is float8; else rounded to `dtype`.

    In int8 [..., width] becomes [..., width + SCALE_BYTES] bytes: the integers nearest to x / s, ties to even, and s, the largest magnitude
    over 127.
    """
    import torch

    if dtype.itemsize > 1:
        return x.to(dtype)
    if dtype is torch.int8:
        wide = x.float()
        absmax = wide.abs().amax(-1, keepdim=True)
        factor = torch.where(absmax > 0, torch.full_like(absmax, _INT8_MAX) / absmax, 0.0)
        scales = absmax / _INT8_MAX + absmax * 0.0  # of an infinity: NaN
        integers = (wide * factor).round_().clamp_(-_INT8_MAX, _INT8_MAX).to(torch.int8)
        return torch.cat((as_bytes(integers), scales.view(torch.uint8)), -1)
    limit = torch.finfo(dtype).max  # some versions of torch make NaN of what is larger
    return as_bytes((x.float() / scale).clamp_(-limit, limit).to(dtype))


def loaded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """The float32 numbers of what `stored` returned."""
    import torch

    if dtype is torch.int8:
        return x[..., :-SCALE_BYTES].view(dtype).float().mul_(x[..., -SCALE_BYTES:].contiguous().view(torch.float32))
    wide = x.view(dtype).float()
    return wide if scale == 1.0 else wide * scale


def write_torch(key: Tensor, value: Tensor, target: KvTarget) -> None:
    """Stores [T, num_kv_heads, width] keys and values in plain torch.

    Tokens without a slot are written to slot 0: it is on the reserved page 0, whose contents only padding rows read. Only the device knows
    which tokens these are, and a graph cannot leave out some.
    """
    cache, where = target.cache, target.slots[: len(key)].clamp(min=0).long()
    for new, pages, scale in ((key, cache.keys, cache.key_scale), (value, cache.values, cache.value_scale)):
        as_bytes(pages).view(-1, *pages.shape[2:]).index_copy_(0, where, stored(new, pages.dtype, scale))


def as_bytes(cache: Tensor) -> Tensor:
    """An 8-bit tensor viewed as bytes, because torch cannot index float8 everywhere; any other tensor as it is."""
    import torch

    return cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache


LINE_BYTES = 64
LINE_FLOATS = LINE_BYTES // 4  # of a line
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
    width = min(next(fitting, LINE_FLOATS), -(-shape.value_dim // LINE_FLOATS) * LINE_FLOATS)
    num_blocks, block_lines = shape.heads * -(-shape.value_dim // width), shape.key_dim * width // LINE_FLOATS
    per_piece, per_block = lines // block_lines, -(-block_lines // lines)
    tail = first + (-(-num_blocks // per_piece) if per_piece else num_blocks * per_block)
    num_inputs, input_lines = shape.taps - 1 + pending, -(-shape.width * itemsize // LINE_BYTES)
    end = tail + -(-input_lines * num_inputs // lines)
    return LayerState(shape, width, num_blocks, first, per_piece, per_block, tail, num_inputs, input_lines, end)
