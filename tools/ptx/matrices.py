"""Matrices that a warp holds together: how their elements are spread over lanes and registers, and their products.

As PTX ISA 9.7.15 has it. Knows nothing of memory. Products are summed in float32, as exactly as NumPy does; hardware aligns terms to the
largest one and cuts them off, which differs by about 1e-6 of the largest term.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.ptx.numbers import Bits, values
from tools.ptx.program import PtxError

KINDS = {"f16": "f16", "bf16": "bf16", "tf32": "f32", "e4m3": "e4m3", "e5m2": "e5m2"}
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
    if not shape.startswith("m16n8k") or (d_kind, c_kind) != ("f32", "f32") or a_kind not in KINDS or opcode[4:6] != ("row", "col"):
        raise PtxError(f"{'.'.join(opcode)} is not modelled")
    left = np.concatenate([_rows(a[0::2], KINDS[a_kind]), _rows(a[1::2], KINDS[a_kind])], 1)  # [warps, 16, depth]
    right = _rows(b, KINDS[b_kind])  # [warps, 8 columns, depth]
    with np.errstate(all="ignore"):
        tile = np.matmul(left.astype(np.float32), right.astype(np.float32).swapaxes(1, 2))
        tile = tile.reshape(-1, 2, 8, 4, 2)  # warp, half, g, t, element
        parts = np.ascontiguousarray(tile.transpose(1, 4, 0, 2, 3)).reshape(4, -1)
        total = np.asarray(c.astype(np.uint32).view(np.float32) + parts, np.float32)
    return total.view(np.uint32).astype(np.uint64)


@dataclass(frozen=True)
class GroupShape:
    """Of a product of four warps: rows of A and columns of B, whether in memory those lie behind one another instead of the depth, and the
    kinds of their elements."""

    rows: tuple[int, int]
    turned: tuple[bool, bool]
    kinds: tuple[str, str]

    @classmethod
    def of(cls, opcode: Sequence[str], numbers: Sequence[int], in_registers: bool) -> GroupShape:
        """`numbers`: the signs of A and B, and what is transposed; of A only if it is in memory."""
        match = re.fullmatch(r"m64n(\d+)k\d+", opcode[4])
        if match is None or opcode[5] != "f32" or any(kind not in KINDS for kind in opcode[6:8]) or tuple(numbers[:2]) != (1, 1):
            raise PtxError(f"{'.'.join(opcode)} is not modelled")
        turns = [bool(one) for one in numbers[2:]] or [False, False]
        turned = (False, turns[-1]) if in_registers else (turns[0], turns[1])
        return cls((64, int(match[1])), turned, (KINDS[opcode[6]], KINDS[opcode[7]]))


def places(descriptor: int, rows: int, turned: bool) -> NDArray[np.int64]:
    """Where the 16-byte pieces of a matrix lie in shared memory, by its descriptor: [rows, 2 of its depth]; if `turned`, for 16-bit
    elements, [rows / 8, 16 of its depth]. PTX ISA, "Shared memory matrix layout"."""
    start, leading, stride = ((descriptor >> at & 0x3FFF) << 4 for at in (0, 16, 32))
    mode = descriptor >> 62 & 3
    if descriptor >> 49 & 7:
        raise PtxError("a base offset in a descriptor of wgmma is not modelled")
    width = {0: 16, 1: 128, 2: 64, 3: 32}[mode]
    if turned:
        piece, depth = np.arange(rows // 8)[:, None], np.arange(16)[None]
        per_row = width // 16
        at = start + piece // per_row * leading + piece % per_row * 16 + depth % 8 * width + depth // 8 * stride
    else:
        row, piece = np.arange(rows)[:, None], np.arange(2)[None]
        at = start + row // 8 * stride + row % 8 * width + piece * (16 if mode else leading)
    return at ^ ((at >> 7 & {0: 0, 1: 7, 2: 3, 3: 1}[mode]) << 4)


def elements(pieces: NDArray[np.uint8], kind: str, turned: bool) -> NDArray[np.float32]:
    """[rows, depth], of the bytes at `places`."""
    numbers = values(np.ascontiguousarray(pieces).view(_UNITS[kind]).astype(np.uint64), kind).astype(np.float32)
    if turned:  # [rows / 8, 16 of depth, 8 rows]
        return numbers.swapaxes(1, 2).reshape(-1, pieces.shape[1])
    return numbers.reshape(len(pieces), -1)


def held_rows(held: Bits, kind: str) -> NDArray[np.float32]:
    """[64, depth] of A, of four warps' registers [4, 128]."""
    tiles = np.concatenate([_rows(held[0::2], kind), _rows(held[1::2], kind)], 1)
    return tiles.reshape(64, -1).astype(np.float32)


def spread_product(left: NDArray[np.float32], right: NDArray[np.float32]) -> NDArray[np.float32]:
    """Registers [columns / 2, 128 threads] of left [64, depth] times right [columns, depth]: register 4 j + 2 h + e of warp w has row
    16 w + g + 8 h and column 8 j + 2 t + e in lane 4 g + t."""
    with np.errstate(all="ignore"):
        tile = np.matmul(left, right.T).reshape(4, 2, 8, -1, 4, 2)  # warp, half, g, j, t, e
    return np.ascontiguousarray(tile.transpose(3, 1, 5, 0, 2, 4)).reshape(-1, 128)


def _rows(held: Bits, kind: str) -> NDArray[np.float64]:
    """[warps, 8, depth]: each register has 16 bytes of each of eight rows, four by each lane."""
    words = np.ascontiguousarray(held.astype(np.uint32).reshape(len(held), -1, 8, 4).transpose(1, 2, 0, 3))  # [warps, 8, registers, 4]
    elements = words.reshape(words.shape[0], 8, -1).view(_UNITS[kind])
    return values(elements.astype(np.uint64), kind)
