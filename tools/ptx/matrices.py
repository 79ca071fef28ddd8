"""Matrices that a warp holds together: how their elements are spread over lanes and registers, and their products.

As PTX ISA 9.7.15 has it. Knows nothing of memory. Products are summed in float32, as exactly as NumPy does; hardware aligns terms to the
largest one and cuts them off, which differs by about 1e-6 of the largest term.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tools.ptx.numbers import Bits, values
from tools.ptx.program import PtxError

_KINDS = {"f16": "f16", "bf16": "bf16", "tf32": "f32", "e4m3": "e4m3", "e5m2": "e5m2"}
_UNITS = {"f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "e4m3": np.uint8, "e5m2": np.uint8}


def spread(rows: NDArray[np.uint32], turned: bool) -> Bits:
    """What each lane holds of 8 x 8 matrices of 16-bit elements: [matrices, threads], of rows [warps, matrices, 8, 4 words]. Lane 4 g + t
    has elements 2 t and 2 t + 1 of row g; of the transposed matrix if `turned`."""
    if turned:
        rows = np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32)
    return rows.swapaxes(0, 1).reshape(rows.shape[1], -1).astype(np.uint64)


def gathered(held: Bits, turned: bool) -> NDArray[np.uint32]:
    """The other way: rows [warps, matrices, 8, 4 words] of what lanes hold, [matrices, threads]."""
    rows = np.ascontiguousarray(held.astype(np.uint32).reshape(len(held), -1, 8, 4).swapaxes(0, 1))
    return np.ascontiguousarray(rows.view(np.uint16).swapaxes(2, 3)).view(np.uint32) if turned else rows


def product(opcode: Sequence[str], a: Bits, b: Bits, c: Bits) -> Bits:
    """mma.sync.aligned.m16n8k*.row.col.f32: registers [4, threads] of D, of those of A [4 or 2, threads], B [2 or 1, threads] and C."""
    shape, d_kind, a_kind, b_kind, c_kind = opcode[3], *opcode[-4:]
    if not shape.startswith("m16n8k") or (d_kind, c_kind) != ("f32", "f32") or a_kind not in _KINDS or opcode[4:6] != ("row", "col"):
        raise PtxError(f"{'.'.join(opcode)} is not modelled")
    left = np.concatenate([_rows(a[0::2], _KINDS[a_kind]), _rows(a[1::2], _KINDS[a_kind])], 1)  # [warps, 16, depth]
    right = _rows(b, _KINDS[b_kind])  # [warps, 8 columns, depth]
    with np.errstate(all="ignore"):
        tile = np.matmul(left.astype(np.float32), right.astype(np.float32).swapaxes(1, 2)).reshape(
            -1, 2, 8, 4, 2
        )  # warp, half, g, t, element
        parts = np.ascontiguousarray(tile.transpose(1, 4, 0, 2, 3)).reshape(4, -1)
        total = np.asarray(c.astype(np.uint32).view(np.float32) + parts, np.float32)
    return total.view(np.uint32).astype(np.uint64)


def _rows(held: Bits, kind: str) -> NDArray[np.float64]:
    """[warps, 8, depth]: each register has 16 bytes of each of eight rows, four by each lane."""
    words = np.ascontiguousarray(held.astype(np.uint32).reshape(len(held), -1, 8, 4).transpose(1, 2, 0, 3))  # [warps, 8, registers, 4]
    elements = words.reshape(words.shape[0], 8, -1).view(_UNITS[kind])
    return values(elements.astype(np.uint64), kind)
