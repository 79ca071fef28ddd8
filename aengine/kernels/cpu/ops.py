"""The kernels one by one, on tensors: shapes and dtypes checked, results allocated.

For the head of a model, for tests and for measurements; `stack` runs whole layers. Activations are bf16 or float32.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.library import ADD, BLOCK, ELEMENTS, LOGITS, PANEL, SILU_MUL, STORE, CLayer, CModel, Workspace
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import KvPool
from aengine.kernels.cpu.step import Layout, StepArguments, address_of_draws, check


def linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m, in_features] -> [m, out_features]: W x + b."""
    return _linear(workspace, x, weight, STORE, weight.out_features)


def add_linear(workspace: Workspace, x: Tensor, weight: PackedLinear, residual: Tensor) -> Tensor:
    """residual + W x + b, rounded once; [m, out_features]."""
    return _linear(workspace, x, weight, ADD, weight.out_features, residual)


def gated_linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """silu(gate) * up of an interleaved weight; [m, out_features / 2]."""
    return _linear(workspace, x, weight, SILU_MUL, weight.out_features // 2)


def logits(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """W x + b in float32, contiguous; [m, out_features]."""
    return _linear(workspace, x, weight, LOGITS, weight.out_features)


def argmax(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m] int64: the column of the largest of `logits`, without writing them. Of equal ones the lowest; a NaN is the largest."""
    rows = _rows(x, weight.in_features, weight.dtype)
    out = torch.empty(len(x), dtype=torch.int64)
    status = workspace.kernels.argmax(
        *(ELEMENTS[x.dtype], rows.data_ptr(), _stride(rows), len(x), ctypes.byref(weight.c)),
        *(out.data_ptr(), workspace.handle, workspace.threads),
    )
    check(status)
    return out


def draw(workspace: Workspace, logits: Tensor, draws: NDArray[np.void]) -> Tensor:
    """[m, vocab] float32 with contiguous rows and m of `DRAW` -> [m] int64 token ids."""
    count, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError("logits are not contiguous float32")
    out = torch.empty(count, dtype=torch.int64)
    where = address_of_draws(draws, count)
    check(workspace.kernels.draw(logits.data_ptr(), count, vocab, where, out.data_ptr(), workspace.handle, workspace.threads))
    return out


def rms_norm(workspace: Workspace, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[m, size] -> the same shape."""
    size = x.shape[1]
    rows = _rows(x, size, x.dtype)
    out = torch.empty(len(x), _padded(size, BLOCK), dtype=x.dtype)
    scale = norm_weight(weight)
    workspace.kernels.rms_norm(
        *(ELEMENTS[x.dtype], rows.data_ptr(), _stride(rows), scale.data_ptr(), out.data_ptr(), out.shape[1]),
        *(len(x), size, eps, workspace.threads),
    )
    return out[:, :size]


def rotate_and_write(
    workspace: Workspace,
    qkv: Tensor,
    cos_sin: Tensor,
    pool: KvPool,
    layer: int,
    layout: Layout,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalises (where there is a norm weight) and rotates the q and k heads of `qkv` in place, writes k and v to the pages of `layer`.

    `qkv` is [T, (q heads + 2 kv heads) * head_dim] with contiguous columns; `cos_sin` is [positions, head_dim] float32.
    """
    kv_heads, dim = pool.c.kv_heads, pool.c.head_dim
    if qkv.stride(1) != 1 or qkv.shape[1] % dim or ELEMENTS[qkv.dtype] != pool.c.element:
        raise ValueError(f"qkv of shape {tuple(qkv.shape)} and dtype {qkv.dtype} does not fit the pool")
    norms = [None if weight is None else norm_weight(weight) for weight in (q_norm, k_norm)]
    table = cos_sin.contiguous()
    model = CModel(cos_sin=table.data_ptr(), heads=qkv.shape[1] // dim - 2 * kv_heads, kv_heads=kv_heads, head_dim=dim)
    model.num_positions, model.eps, model.element = len(table), eps, ELEMENTS[qkv.dtype]
    c_layer = CLayer()
    c_layer.q_norm, c_layer.k_norm = (None if weight is None else weight.data_ptr() for weight in norms)
    step = StepArguments(layout)
    status = workspace.kernels.rotate_and_write(
        *(ctypes.byref(model), ctypes.byref(c_layer), ctypes.byref(pool.c), layer, ctypes.byref(step.c)),
        *(qkv.data_ptr(), qkv.stride(0), workspace.threads),
    )
    check(status)


def attention(
    workspace: Workspace,
    query: Tensor,
    pool: KvPool,
    layer: int,
    layout: Layout,
    *,
    scale: float,
    window: int | None,
    soft_cap: float = 0.0,
) -> Tensor:
    """Causal attention of [T, heads, head_dim] queries over the pages of `layer`; the same shape.

    A query sees the `window` latest positions (None: all), itself included; with a `soft_cap` c scores become c * tanh(score / c).
    """
    if query.shape[2] != pool.c.head_dim or query.shape[1] % pool.c.kv_heads or ELEMENTS[query.dtype] != pool.c.element:
        raise ValueError(f"queries of shape {tuple(query.shape)} and dtype {query.dtype} do not fit the pool")
    if query.stride()[1:] != (query.shape[2], 1):
        query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype)
    step = StepArguments(layout)
    status = workspace.kernels.attention(
        *(ctypes.byref(pool.c), layer, ctypes.byref(step.c), query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0)),
        *(query.shape[1], window or 0, scale, soft_cap, workspace.handle, workspace.threads),
    )
    check(status)
    return out


def norm_weight(weight: Tensor) -> Tensor:
    """A norm's weight as the kernels read it: float32, zeros up to a multiple of 16."""
    return F.pad(weight.float(), (0, -len(weight) % BLOCK)).contiguous()


def _linear(workspace: Workspace, x: Tensor, weight: PackedLinear, epilogue: int, width: int, residual: Tensor | None = None) -> Tensor:
    if weight.interleaved != (epilogue == SILU_MUL):
        raise ValueError("a gated product takes an interleaved weight, and nothing else does")
    rows = _rows(x, weight.in_features, weight.dtype)
    if epilogue == LOGITS:
        out = torch.empty(len(x), width)
    else:
        out = torch.empty(len(x), _padded(width, PANEL), dtype=x.dtype)
        if residual is not None:
            out[:, :width] = residual
    status = workspace.kernels.linear(
        *(ELEMENTS[x.dtype], epilogue, rows.data_ptr(), _stride(rows), len(x), ctypes.byref(weight.c)),
        *(out.data_ptr(), out.shape[1], workspace.handle, workspace.threads),
    )
    check(status)
    return out[:, :width]


def _rows(x: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """`x` as the kernels read activations: contiguous columns, zeros up to a multiple of 16."""
    if x.dim() != 2 or x.shape[1] != width or x.dtype != dtype or dtype not in ELEMENTS:
        raise ValueError(f"activations of shape {tuple(x.shape)} and dtype {x.dtype} are not [m, {width}] of {dtype}")
    if width % BLOCK:
        return F.pad(x, (0, -width % BLOCK))
    return x if x.stride(1) == 1 else x.contiguous()


def _stride(rows: Tensor) -> int:
    return rows.stride(0) if len(rows) > 1 else rows.shape[1]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
