"""E2M1 codes in words of eight, which become numbers two at a time.

A code has a sign, two bits of exponent and one of mantissa. Of each 32 columns word t has columns 8 i + 2 t in its low half and the columns
after them in its high half, for i from 0 to 3: those that a thread has of a row of the matrix in a product on tensor cores. In a half the
first code has its bits where bfloat16 has them, the second three bits lower, the third six bits lower, and the fourth in the bits left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def e2m1_words(codes: Tensor) -> Tensor:
    """[rows, columns] codes as [rows, columns / 8] int32."""
    first, second, third, fourth = codes.view(len(codes), -1, 4, 4, 2).to(torch.int32).unbind(2)
    halves = _at(first, 15, 6) | _at(second, 12, 3) | _at(third, 9, 0)
    halves |= (fourth >> 3) << 14 | (fourth & 1) << 13 | (fourth >> 1 & 3) << 10
    return (halves[..., 0] | halves[..., 1] << 16).flatten(1)


def _at(codes: Tensor, sign: int, low: int) -> Tensor:
    """With the sign at one bit, and the others from another one on."""
    return (codes >> 3) << sign | (codes & 7) << low


@triton.jit
def e2m1_numbers(words, second: tl.constexpr, dtype: tl.constexpr):
    """The numbers [..., columns, rows] of the first 16 of each 32 columns, or of the second 16, of words [..., columns / 4, rows]."""
    words = words.to(tl.uint32, bitcast=True)
    if second:
        last = ((words << 1) & 0x80008000) | ((words >> 3) & 0x01800180) | ((words >> 7) & 0x00400040)
        numbers = tl.join(_halves(words << 6, dtype), _halves(last, dtype))
    else:
        numbers = tl.join(_halves(words, dtype), _halves(words << 3, dtype))
    blocks: tl.constexpr = words.numel // (4 * words.shape[-1])
    numbers = numbers.reshape([blocks, 4, words.shape[-1], 2, 2]).permute(0, 4, 1, 3, 2)
    if len(words.shape) == 3:
        return numbers.reshape([words.shape[0], 4 * words.shape[1], words.shape[2]])
    else:
        return numbers.reshape([4 * words.shape[0], words.shape[1]])


@triton.jit
def _halves(words, dtype: tl.constexpr):
    """The two numbers of words whose halves have a code where bfloat16 has its bits, and other bits elsewhere: [..., 2]. Exponents are
    smaller than meant by the difference of the biases."""
    bits = words & 0x81C081C0
    if dtype == tl.float16:
        bits = (bits & 0x80008000) | ((bits & 0x01C001C0) << 3)
    halves = tl.join(bits.to(tl.uint16), (bits >> 16).to(tl.uint16))
    if dtype == tl.float32:
        return (halves.to(tl.uint32) << 16).to(tl.float32, bitcast=True) * 2.0**126
    else:
        return (halves.to(dtype, bitcast=True) * (2.0**14 if dtype == tl.float16 else 2.0**126)).to(dtype)
