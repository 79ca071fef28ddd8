"""The kernels that run only within `DecoderStack`, one by one: shapes and dtypes checked, results allocated."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from aengine.attention import StepLayout
from aengine.kernels.cpu.library import (
    BLOCK,
    ELEMENTS,
    PANEL,
    CExperts,
    CHeads,
    CLayer,
    CModel,
    CPackedLinear,
    CPool,
    CpuKernels,
    CStep,
    Workspace,
    check,
)
from aengine.kernels.cpu.ops import as_rows, norm_weight, row_stride
from aengine.kernels.cpu.packing import PackedLinear
from aengine.kernels.cpu.pool import KvPool
from aengine.models.cpu_stack import LastTokens, StepArguments

NO_TOKENS = np.zeros(0, np.int32)
NO_LAST_TOKENS = LastTokens(NO_TOKENS, NO_TOKENS, NO_TOKENS)
STORE, ADD, SILU_MUL = 0, 1, 2  # `Epilogue` of src/abi.h
_SIGNATURES = {  # as those of `aengine.kernels.cpu.library`
    "argmax": (c_int, c_int32, c_void_p, c_int64, c_int64, POINTER(CPackedLinear), c_void_p, c_void_p, c_int),
    "rms_norm": (None, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_float, c_int),
    "experts": (c_int, c_int32, POINTER(CExperts), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
    "heads": (c_int, c_int32, POINTER(CHeads), c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p, c_int),
    "rotate_and_write": (
        *(c_int, POINTER(CModel), POINTER(CLayer), POINTER(CPool), c_int64, POINTER(CStep)),
        *(c_void_p, c_int64, c_int),
    ),
    "attention": (
        *(c_int, POINTER(CPool), c_int64, POINTER(CStep), c_void_p, c_int64, c_void_p, c_int64),
        *(c_int64, c_int64, c_float, c_float, c_void_p, c_int),
    ),
}


def declare(kernels: CpuKernels) -> CpuKernels:
    """The kernels, with the signatures of the functions that only tests call by themselves."""
    for name, (result, *arguments) in _SIGNATURES.items():
        function = getattr(kernels, name)
        function.restype, function.argtypes = result, arguments
    return kernels


def linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m, in_features] -> [m, out_features]: W x + b."""
    return _linear(workspace, x, weight, STORE, weight.out_features)


def add_linear(workspace: Workspace, x: Tensor, weight: PackedLinear, residual: Tensor) -> Tensor:
    """residual + W x + b, rounded once; [m, out_features]."""
    return _linear(workspace, x, weight, ADD, weight.out_features, residual)


def gated_linear(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """silu(gate) * up of an interleaved weight; [m, out_features / 2]."""
    return _linear(workspace, x, weight, SILU_MUL, weight.out_features // 2)


def argmax(workspace: Workspace, x: Tensor, weight: PackedLinear) -> Tensor:
    """[m] int64: the column of the largest of `logits`, without writing them. Of equal ones the lowest; a NaN is the largest."""
    rows = as_rows(x, weight.in_features, weight.dtype)
    out = torch.empty(len(x), dtype=torch.int64)
    status = workspace.kernels.argmax(
        *(ELEMENTS[x.dtype], rows.data_ptr(), row_stride(rows), len(x), ctypes.byref(weight.c)),
        *(out.data_ptr(), workspace.handle, workspace.threads),
    )
    check(status)
    return out


def add_experts(workspace: Workspace, x: Tensor, experts: CExperts, residual: Tensor) -> Tensor:
    """residual + the output of the experts, rounded once; [m, out_features]."""
    rows = as_rows(x, x.shape[1], x.dtype)
    out = torch.zeros(len(x), _padded(residual.shape[1], PANEL), dtype=x.dtype)
    out[:, : residual.shape[1]] = residual
    status = workspace.kernels.experts(
        *(ELEMENTS[x.dtype], ctypes.byref(experts), rows.data_ptr(), row_stride(rows), len(x)),
        *(out.data_ptr(), out.shape[1], workspace.handle, workspace.threads),
    )
    check(status)
    return out[:, : residual.shape[1]]


def multiply_heads(workspace: Workspace, x: Tensor, heads: CHeads, out: Tensor) -> None:
    """Writes to `out` as `heads` says; rows of both are contiguous, those of `x` zero up to a multiple of 16."""
    status = workspace.kernels.heads(
        *(ELEMENTS[x.dtype], ctypes.byref(heads), x.data_ptr(), x.stride(0), len(x)),
        *(out.data_ptr(), out.stride(0), workspace.handle, workspace.threads),
    )
    check(status)


def rms_norm(workspace: Workspace, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[m, size] -> the same shape."""
    size = x.shape[1]
    rows = as_rows(x, size, x.dtype)
    out = torch.empty(len(x), _padded(size, BLOCK), dtype=x.dtype)
    scale = norm_weight(weight)
    workspace.kernels.rms_norm(
        *(ELEMENTS[x.dtype], rows.data_ptr(), row_stride(rows), scale.data_ptr(), out.data_ptr(), out.shape[1]),
        *(len(x), size, eps, workspace.threads),
    )
    return out[:, :size]


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
    kv_heads, dim = pool.c.kv_heads, pool.c.head_dim
    if qkv.stride(1) != 1 or qkv.shape[1] % dim or ELEMENTS[qkv.dtype] != pool.c.element:
        raise ValueError(f"qkv of shape {tuple(qkv.shape)} and dtype {qkv.dtype} does not fit the pool")
    norms = [None if weight is None else norm_weight(weight) for weight in (q_norm, k_norm)]
    table = cos_sin.contiguous()
    model = CModel(cos_sin=table.data_ptr(), heads=qkv.shape[1] // dim - 2 * kv_heads, kv_heads=kv_heads, head_dim=dim)
    model.num_positions, model.eps, model.element = len(table), eps, ELEMENTS[qkv.dtype]
    c_layer = CLayer()
    c_layer.q_norm, c_layer.k_norm = (None if weight is None else weight.data_ptr() for weight in norms)
    step = tokens_of(layout)
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
    layout: StepLayout,
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
    step = tokens_of(layout)
    status = workspace.kernels.attention(
        *(ctypes.byref(pool.c), layer, ctypes.byref(step.c), query.data_ptr(), query.stride(0), out.data_ptr(), out.stride(0)),
        *(query.shape[1], window or 0, scale, soft_cap, workspace.handle, workspace.threads),
    )
    check(status)
    return out


def tokens_of(layout: StepLayout) -> StepArguments:
    """A step without token ids and results."""
    return StepArguments(layout, layout.positions, NO_TOKENS, None, None, None, NO_LAST_TOKENS)


def _linear(workspace: Workspace, x: Tensor, weight: PackedLinear, epilogue: int, width: int, residual: Tensor | None = None) -> Tensor:
    if weight.interleaved != (epilogue == SILU_MUL):
        raise ValueError("a gated product takes an interleaved weight, and nothing else does")
    rows = as_rows(x, weight.in_features, weight.dtype)
    out = torch.empty(len(x), _padded(width, PANEL), dtype=x.dtype)
    if residual is not None:
        out[:, :width] = residual
    status = workspace.kernels.linear(
        *(ELEMENTS[x.dtype], epilogue, rows.data_ptr(), row_stride(rows), len(x), ctypes.byref(weight.c)),
        *(out.data_ptr(), out.shape[1], workspace.handle, workspace.threads),
    )
    check(status)
    return out[:, :width]


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
