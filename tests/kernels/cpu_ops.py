"""The operations that run only within `DecoderStack`, one by one, as steps of models of one operation.

Shapes and dtypes are checked, results allocated.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_int64
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from row_tensors import arrays, named_arrays
from torch import Tensor

from aengine.attention import StepLayout, build_layout
from aengine.kernels.arrays import INT4, INT8, array_dtype, as_array, as_tensor
from aengine.kernels.cpu import library, ops, packing
from aengine.kernels.cpu.library import (
    BLOCK,
    ELEMENTS,
    PAGE_ELEMENTS,
    PANEL,
    CAttentionOp,
    CEmbedOp,
    CExpertsOp,
    CHeadsOp,
    CLinearOp,
    CModel,
    CNorm,
    CNormOp,
    COp,
    CpuKernels,
    Workspace,
    check,
    stored_dim,
)
from aengine.kernels.cpu.ops import KvPool, PackedLinear, PackedLinears, head_kind, norm_weight
from aengine.kernels.paged_cache import Heads
from aengine.kernels.quantized import Rows
from aengine.models.cpu.stack import CpuLastTokens, DecoderStack, StepArguments
from aengine.models.cpu.weight_packing import WeightPacking
from aengine.models.spec import ModelSpec
from aengine.parallel.shard import WHOLE, Shard

NO_TOKENS = np.zeros(0, np.int32)
NO_LAST_TOKENS = CpuLastTokens(NO_TOKENS, NO_TOKENS, NO_TOKENS)


def pool_of_heads(num_kv_heads: int, key_dim: int, value_dim: int, *, dtype: torch.dtype | np.dtype[Any], **options: Any) -> KvPool:
    """A pool for layers with these heads."""
    pages = dtype if isinstance(dtype, np.dtype) else array_dtype(dtype)
    return KvPool(parts=[(0, Heads(num_kv_heads, num_kv_heads, key_dim, value_dim))], dtype=pages, **options)


def packed_linear(kernels: CpuKernels, parts: Sequence[Rows], *, dtype: torch.dtype, **options: Any) -> PackedLinear:
    return packing.pack_linear(kernels, [*map(arrays, parts)], dtype=array_dtype(dtype), **options)


def packed_linears(kernels: CpuKernels, parts: Sequence[Rows], count: int, *, dtype: torch.dtype, **options: Any) -> PackedLinears:
    return packing.pack_linears(kernels, [*map(arrays, parts)], count, dtype=array_dtype(dtype), **options)


def floats(parts: Sequence[Tensor]) -> NDArray[np.float32]:
    """Tensors one after another."""
    return as_array(torch.cat(tuple(parts)).float())


def packed_stack(
    workspace: Workspace,
    spec: ModelSpec,
    weights: Iterable[tuple[str, Sequence[Rows]]],
    num_positions: int,
    *,
    dtype: torch.dtype,
    shard: Shard = WHOLE,
    quantization: str = "none",
    **options: Any,
) -> DecoderStack:
    packed = WeightPacking(workspace, spec, array_dtype(dtype), shard=shard, quantization=quantization).pack(named_arrays(weights))
    return DecoderStack(packed, num_positions, **options)


def logits(workspace: Workspace, x: Tensor, weight: PackedLinear, soft_cap: float = 0.0) -> Tensor:
    return as_tensor(ops.logits(workspace, as_array(x), weight, soft_cap))


def draw(workspace: Workspace, logits: Tensor, draw_params: NDArray[np.void]) -> Tensor:
    return as_tensor(ops.draw(workspace, as_array(logits), draw_params))


def log_sums(workspace: Workspace, logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    sums, greater = ops.log_sums(workspace, as_array(logits), as_array(own))
    return as_tensor(sums), as_tensor(greater)


def gather_ranks(workspace: Workspace, part: Tensor, firsts: Sequence[int]) -> Tensor | None:
    found = ops.gather_ranks(workspace, as_array(part), firsts)
    return None if found is None else as_tensor(found)


def stack_logits(stack: DecoderStack, workspace: Workspace, hidden: Tensor, *adapters: Any) -> Tensor:
    return as_tensor(stack.logits(workspace, as_array(hidden), *adapters))


def run(
    workspace: Workspace,
    inputs: list[Tensor],
    outputs: list[int],
    *ops: tuple[int, ctypes.Structure],
    attention: tuple[KvPool, StepLayout, int] | None = None,
    head: PackedLinear | None = None,
    num_positions: int = 1 << 30,
) -> Tensor:
    """Runs operations on the rows of `inputs` [m, width], which become the first buffers. `outputs` are the widths of further ones.

    Returns the last buffer, [m, width]; with a `head`, [m] its argmax of them instead. `attention`: pool, layout and query heads.
    """
    rows, dtype = len(inputs[0]), inputs[0].dtype
    if array_dtype(dtype) not in ELEMENTS or any(x.dim() != 2 or x.dtype != dtype for x in inputs):
        raise ValueError(f"inputs of dtype {dtype} are not matrices of bfloat16 or float32")
    inputs = [x.contiguous() for x in inputs]
    if attention is None:
        pages = max(1, -(-rows // BLOCK))
        pool = pool_of_heads(1, BLOCK, BLOCK, layers_per_page=1, num_pages=1, page_size=BLOCK, dtype=dtype)
        count = np.array([rows] if rows else [], np.int32)
        attention = (pool, build_layout(count * 0, 0, count * 0, count, np.zeros((1, 1, pages), np.int32), BLOCK), 1)
    pool, layout, heads = attention
    embeds = [CEmbedOp(x.data_ptr(), None, x.shape[1], buffer, 1.0) for buffer, x in enumerate(inputs)]
    program = [*((library.EMBED, embed) for embed in embeds), *ops]
    widths = [*(x.shape[1] for x in inputs), *outputs]
    strides = [_padded(width, PANEL) for width in widths]
    model = CModel(
        ops=(COp * len(program))(*(COp(kind, ctypes.addressof(item)) for kind, item in program)),
        head=None if head is None else ctypes.pointer(head.c),
        strides=(c_int64 * len(strides))(*strides),
        num_ops=len(program),
        num_buffers=len(strides),
        head_kinds=ctypes.pointer(head_kind(pool.parts[0][1]._replace(num_heads=heads))),
        num_head_kinds=1,
        vocab=max(1, rows),
        num_positions=num_positions,
        hidden=len(strides) - 1,
        element=ELEMENTS[array_dtype(dtype)],
    )
    everything = np.arange(rows, dtype=np.int32)
    hidden = torch.empty(rows, strides[-1], dtype=dtype)
    sampled = None if head is None else np.empty(rows, np.int64)
    step = StepArguments(layout, everything, everything, as_array(hidden), sampled, None, NO_LAST_TOKENS)
    status = workspace.kernels.run_layers(
        *(ctypes.byref(model), ctypes.byref(pool.c), ctypes.byref(step.c), workspace.handle, workspace.threads)
    )
    check(status)
    return hidden[:, : widths[-1]] if sampled is None else torch.from_numpy(sampled)


def linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m, in_features] -> [m, out_features]: W x + b."""
    return _linear(workspace, x, weight, library.STORE, weight.out_features)


def add_linear(workspace: Workspace, x: Tensor, weight: PackedLinear, residual: Tensor) -> Tensor:
    """residual + W x + b, rounded once; [m, out_features]."""
    return _linear(workspace, x, weight, library.ADD, weight.out_features, residual)


def gated_linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """silu(gate) * up of an interleaved weight; [m, out_features / 2]."""
    return _linear(workspace, x, weight, library.GATED, weight.out_features // 2)


def argmax(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m] int64: the column of the largest of `logits`, without writing them. Of equal ones the lowest; a NaN is the largest."""
    return run(workspace, [x], [], head=weight)


def experts(workspace: Workspace, x: Tensor, op: CExpertsOp, residual: Tensor | None = None) -> Tensor:
    """The output of the experts, or residual + op.multiplier times that, rounded once; [m, in_features]."""
    op.out, op.epilogue = 1, library.STORE if residual is None else library.ADD
    inputs, outputs = ([x], [x.shape[1]]) if residual is None else ([x, residual], [])
    return run(workspace, inputs, outputs, (library.EXPERTS, op))


def multiply_heads(workspace: Workspace, x: Tensor, op: CHeadsOp, out: Tensor) -> Tensor:
    """`out` [m, width] with what `op` writes to it."""
    op.out = 1
    return run(workspace, [x, out], [], (library.HEADS, op))


def activated_linear(workspace: Workspace, x: Tensor, weight: PackedLinear, activation: int) -> Tensor:
    """activation(W x + b) [m, out_features]; of an interleaved weight activation(gate) * up [m, out_features / 2]."""
    if weight.interleaved:
        return _linear(workspace, x, weight, library.GATED, weight.out_features // 2, activation=activation)
    return _linear(workspace, x, weight, library.ACTIVATE, weight.out_features, activation=activation)


def norm(
    workspace: Workspace, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: int, residual: Tensor | None = None
) -> Tensor:
    """[m, size] -> the same shape: the norm; or residual + 0.7 norm(x), normed by the same norm in the same pass."""
    rows = [_norm_weight(weight), torch.empty(0) if bias is None else _norm_weight(bias)]
    c_norm = CNorm(rows[0].data_ptr(), None if bias is None else rows[1].data_ptr(), len(weight), eps, kind)
    if residual is None:
        return run(workspace, [x], [len(weight)], (library.NORM, CNormOp(c_norm, None, 0, 0, 1, scale=1.0)))
    after = CNormOp(c_norm, None, 0, 1, 2, scale=1.0)
    add = CNormOp(c_norm, ctypes.addressof(after), 0, 0, 1, True, 0.7, 1.0)
    return run(workspace, [x, residual], [len(weight)], (library.NORM, add))


def rms_norm(workspace: Workspace, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[m, size] -> the same shape."""
    return norm(workspace, x, weight, None, eps, library.RMS_NORM)


def rotate_and_write(
    workspace: Workspace,
    qkv: Tensor,
    cos_sin: Tensor,
    pool: KvPool,
    layer: int,
    layout: StepLayout,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalises (where there is a norm weight) and rotates the q and k heads of `qkv` in place, writes k and v to the pages of `layer`.

    `qkv` is [T, (q heads + 2 kv heads) * head_dim] with contiguous columns; `cos_sin` is [positions, head_dim] float32.
    """
    kv_heads, dim = pool.parts[0][1].num_kv_heads, cos_sin.shape[1]
    if qkv.stride(1) != 1 or qkv.shape[1] % dim or not _fits(pool, qkv.dtype):
        raise ValueError(f"qkv of shape {tuple(qkv.shape)} and dtype {qkv.dtype} does not fit the pool")
    heads = qkv.shape[1] // dim - 2 * kv_heads
    weights = [None if weight is None else _norm_weight(weight) for weight in (q_norm, k_norm)]
    norms = [CNorm(None if weight is None else weight.data_ptr(), None, dim, eps, library.RMS_NORM) for weight in weights]
    table = cos_sin.contiguous()
    op = CAttentionOp(table.data_ptr(), None, None, None, *norms, CNorm(), 0, 0, layer, 0, heads, kv_heads, dim, dim, dim)
    op.key_first, op.value_first = heads * dim, (heads + kv_heads) * dim
    attended = (pool, layout, heads)
    qkv.copy_(run(workspace, [qkv], [], (library.ROTATE, op), attention=attended, num_positions=len(table)))


def write(workspace: Workspace, queries: Tensor, keys: Tensor, values: Tensor, pool: KvPool, layer: int, layout: StepLayout) -> None:
    """Writes [T, kv heads, width] keys and values to the pages of `layer`, as a model without rope does; queries are [T, heads * width]."""
    heads, (kv_heads, dim), width = queries.shape[1] // keys.shape[2], keys.shape[1:], values.shape[2]
    op = CAttentionOp(None, None, None, None, CNorm(), CNorm(), CNorm(), 0, 0, layer, 0, heads, kv_heads, dim, width)
    op.key, op.value = 1, 2
    run(workspace, [queries, keys.flatten(1), values.flatten(1)], [], (library.ROTATE, op), attention=(pool, layout, heads))


def attention(
    workspace: Workspace,
    query: Tensor,
    pool: KvPool,
    layer: int,
    layout: StepLayout,
    *,
    scale: float,
    window: int | None,
    soft_cap: float = 0.0,
    value_dim: int | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """Causal attention of [T, heads, key_dim] queries over the pages of `layer`; [T, heads, value_dim], None: as wide as keys.

    A query sees the `window` latest positions (None: all), itself included; with a `soft_cap` c scores become c * tanh(score / c). `sinks`
    and `slopes` are [heads] float32.
    """
    heads, dim = query.shape[1:]
    if stored_dim(dim) != stored_dim(pool.parts[0][1].key_dim) or heads % pool.parts[0][1].num_kv_heads or not _fits(pool, query.dtype):
        raise ValueError(f"queries of shape {tuple(query.shape)} and dtype {query.dtype} do not fit the pool")
    width = dim if value_dim is None else value_dim
    given = [None if each is None else each.data_ptr() for each in (sinks, slopes)]
    op = CAttentionOp(
        None, given[0], None, given[1], CNorm(), CNorm(), CNorm(), 0, 0, layer, 0, heads, pool.parts[0][1].num_kv_heads, dim, width
    )
    op.window, op.scale, op.soft_cap, op.out = window or 0, scale, soft_cap, 1
    attended = (pool, layout, heads)
    return run(workspace, [query.flatten(1)], [heads * width], (library.ATTEND, op), attention=attended).view(-1, heads, width)


def _linear(
    workspace: Workspace,
    x: Tensor,
    weight: PackedLinear,
    epilogue: int,
    width: int,
    residual: Tensor | None = None,
    activation: int = library.SILU,
) -> Tensor:
    if weight.interleaved != (epilogue == library.GATED):
        raise ValueError("a gated product takes an interleaved weight, and nothing else does")
    if x.shape[1] != weight.in_features or array_dtype(x.dtype) != weight.dtype:
        raise ValueError(f"activations of shape {tuple(x.shape)} and dtype {x.dtype} are not [m, {weight.in_features}] of {weight.dtype}")
    op = CLinearOp(ctypes.pointer(weight.c), library.NO_MATRIX, 0, 1, epilogue, activation, 1.0)
    inputs, outputs = ([x], [width]) if residual is None else ([x, residual], [])
    return run(workspace, inputs, outputs, (library.LINEAR, op))


def _fits(pool: KvPool, dtype: torch.dtype) -> bool:
    return pool.c.element in (ELEMENTS[array_dtype(dtype)], PAGE_ELEMENTS[INT8], PAGE_ELEMENTS[INT4])


def _norm_weight(weight: Tensor) -> Tensor:
    return as_tensor(norm_weight(as_array(weight.float())))


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
