"""What tokens make of a head's matrix, which a program has in registers: one token after the other, or a block of them at once.

A block is what a row has of `BLOCK` tokens between multiples of `BLOCK` on the axis of positions, so that where a prompt is cut, on such
a multiple, changes no sum. With S the matrix before the block, a_i the logarithm of token i's decay, G_i = a_1 + .. + a_i, b_i the rate
and v_i the value of a token, the gated delta rule adds k_i w_i^T for each token, where

    w_i = b_i (v_i - e^G_i S^T k_i - sum of e^(G_i - G_j) (k_i . k_j) w_j over j < i)

so that W = T (V - e^G K S), and T, the inverse of a triangular matrix times the rates, is known before S is (Yang et al., "Gated Delta
Networks", 2024, section 3.3). A decay may differ by row of S; then it is part of the products k_i . k_j. Without the delta rule w_i is
b_i v_i. The outputs are e^G Q S + P W with P_ij = e^(G_i - G_j) (q_i . k_j) for j <= i. No exponent is above 0. Knows nothing of pages.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 32


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), which above 20 is x, as torch has it."""
    y = tl.exp(tl.minimum(x, 20.0))
    sum = 1.0 + y
    small = tl.where(sum == 1.0, y, tl.log(sum) * (y / tl.where(sum == 1.0, 1.0, sum - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit
def advance_token(
    matrix, mixed, gates, head, key, column, log_decay, step_bias, skip,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr, STEPS: tl.constexpr,
    KIND: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """The matrix behind a token, and its outputs. `mixed` and `gates` point to what is convolved of the token, and to its gates."""
    is_key, is_value = key < KEYS, column < VALUES
    key_head = head // (HEADS // KEY_HEADS)
    keys = gates if KIND == 3 else mixed
    values = mixed if KIND == 3 else mixed + 2 * KEY_HEADS * KEYS
    q = tl.load(keys + key_head * KEYS + key, is_key, 0.0).to(tl.float32)
    k = tl.load(keys + (KEY_HEADS + key_head) * KEYS + key, is_key, 0.0).to(tl.float32)
    v = tl.load(values + head * VALUES + column, is_value, 0.0).to(tl.float32)
    steps = gates + GATES - HEADS * STEPS + head * STEPS
    if KIND == 0:
        step = _softplus(tl.load(steps).to(tl.float32) + tl.load(step_bias + head))
        matrix *= tl.exp(-tl.exp(tl.load(log_decay + head)) * step)
    elif KIND == 1:
        step = _softplus(tl.load(steps + key, is_key, 0.0).to(tl.float32) + tl.load(step_bias + head * KEYS + key, is_key, 0.0))
        matrix *= tl.exp(-tl.exp(tl.load(log_decay + head)) * step)[:, None]
    elif KIND == 2:
        rate = tl.exp(tl.load(log_decay + head))
        if STEPS:
            step = _softplus(tl.load(steps).to(tl.float32) + tl.load(step_bias + head))
            matrix *= tl.exp(-rate * step)
            v_added = step * v
        else:
            matrix *= tl.exp(-rate)
            v_added = v
    else:
        number = head * VALUES + column
        step = _softplus(tl.load(steps + column, is_value, 0.0).to(tl.float32) + tl.load(step_bias + number, is_value, 0.0))
        of_all = is_key[:, None] & is_value[None, :]
        rates = tl.exp(tl.load(log_decay + number[None, :] * KEYS + key[:, None], of_all, 0.0))
        matrix *= tl.exp(-rates * step[None, :])
        v_added = step * v
    if KIND < 2:
        q = q * (1.0 / tl.sqrt(tl.sum(q * q) + 1e-6)) * (1.0 / tl.sqrt(KEYS * 1.0))
        k = k * (1.0 / tl.sqrt(tl.sum(k * k) + 1e-6))
        rate = 1.0 / (1.0 + tl.exp(-tl.load(gates + head).to(tl.float32)))
        v_added = rate * (v - tl.sum(matrix * k[:, None], 0))
    matrix += k[:, None] * v_added[None, :]
    made = tl.sum(matrix * q[:, None], 0)
    if SKIP:
        if KIND == 3:
            made += tl.load(skip + head * VALUES + column, is_value, 0.0) * v
        else:
            made += tl.load(skip + head) * v
    return matrix, made


@triton.jit
def _block(
    convolved, gates, gates_stride, token, own, head, key, log_decay, step_bias,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, GATES: tl.constexpr, STEPS: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """q and k [tokens, keys] of the tokens of a block that are the row's `own`, the logarithms of the decays from the block's beginning on
    [tokens, 1 or keys], and the rates [tokens]. Those of others are 0, and decay nothing."""
    within, is_key = own[:, None] & (key < KEYS)[None, :], key < KEYS
    place = convolved + token[:, None] * CHANNELS + (head // (HEADS // KEY_HEADS) * KEYS + key)[None, :]
    q = tl.load(place, within, 0.0).to(tl.float32)
    k = tl.load(place + KEY_HEADS * KEYS, within, 0.0).to(tl.float32)
    speed = tl.exp(tl.load(log_decay + head))
    given = gates + token * gates_stride
    steps = given + GATES - HEADS * STEPS + head * STEPS
    rate = tl.where(own, 1.0, 0.0)
    if KIND == 1:
        bias = tl.load(step_bias + head * KEYS + key, is_key, 0.0)
        step = _softplus(tl.load(steps[:, None] + key[None, :], within, 0.0).to(tl.float32) + bias[None, :])
        fall = tl.cumsum(tl.where(within, -speed * step, 0.0), 0)
    else:
        if STEPS:
            rate = _softplus(tl.load(steps, own, 0.0).to(tl.float32) + tl.load(step_bias + head))
        fall = tl.cumsum(tl.where(own, -speed * rate, 0.0), 0)[:, None]
    if KIND < 2:
        q = q * (1.0 / tl.sqrt(tl.sum(q * q, 1) + 1e-6) * (1.0 / tl.sqrt(KEYS * 1.0)))[:, None]
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, 1) + 1e-6))[:, None]
        rate = 1.0 / (1.0 + tl.exp(-tl.load(given + head, own, 0.0).to(tl.float32)))
    return q, k, fall, rate


@triton.jit
def _row(matrix, number, index):
    """A row of a matrix."""
    return tl.sum(tl.where((index == number)[:, None], matrix, 0.0), 0)


@triton.jit
def relate_blocks(
    convolved, gates, solved, scores, log_decay, step_bias, rows, qo_indptr, gates_stride,
    FIELDS: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr,
    GATES: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr, PRECISION: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """T and P of a block of a row in a head, which `read_block` takes: `solved` and `scores` [all tokens, heads, BLOCK]."""
    row, head = tl.program_id(0), tl.program_id(2)
    first = tl.load(qo_indptr + row).to(tl.int64)
    count = tl.load(qo_indptr + row + 1) - first
    index, key = tl.arange(0, BLOCK), tl.arange(0, BK)
    before = tl.load(rows + row * FIELDS + 5) % BLOCK
    token = tl.program_id(1) * BLOCK - before + index
    if by_blocks(rows + row * FIELDS, count, BLOCK) & (tl.program_id(1) * BLOCK - before < count):
        own = (token >= 0) & (token < count)
        q, k, fall, rate = _block(
            convolved, gates, gates_stride, first + token, own, head, key, log_decay, step_bias,
            CHANNELS, HEADS, KEY_HEADS, KEYS, GATES, STEPS, KIND,
        )  # fmt: skip
        if KIND == 1:
            of_queries = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
            of_keys = of_queries
            for other in range(BLOCK):
                decayed = _row(k, other, index)[None, :] * tl.exp(tl.minimum(fall - _row(fall, other, index)[None, :], 0.0))
                is_other = (index == other)[None, :]
                of_queries = tl.where(is_other, tl.sum(q * decayed, 1)[:, None], of_queries)
                of_keys = tl.where(is_other, tl.sum(k * decayed, 1)[:, None], of_keys)
        else:
            shared = tl.exp(tl.minimum(fall - tl.trans(fall), 0.0))
            of_queries = tl.dot(q, tl.trans(k), input_precision=PRECISION) * shared
            of_keys = of_queries
            if KIND == 0:
                of_keys = tl.dot(k, tl.trans(k), input_precision=PRECISION) * shared
        to = ((first + token) * HEADS + head)[:, None] * BLOCK + index[None, :]
        tl.store(scores + to, tl.where(index[:, None] >= index[None, :], of_queries, 0.0), own[:, None])
        if KIND < 2:
            lower = tl.where(index[:, None] > index[None, :], of_keys * rate[:, None], 0.0)
            inverse = tl.where(index[:, None] == index[None, :], 1.0, 0.0)
            for number in range(1, BLOCK):
                missing = tl.sum(_row(lower, number, index)[:, None] * inverse, 0)
                inverse -= tl.where((index == number)[:, None], missing[None, :], 0.0)
            tl.store(solved + to, inverse * rate[None, :], own[:, None])


@triton.jit
def by_blocks(fields, count, BLOCK: tl.constexpr):
    """Whether the `count` tokens of a row with these `fields` are computed in blocks: a prompt's, and never those that may be drafts."""
    return (count > BLOCK) & (tl.load(fields) == 0) & (tl.load(fields + 1) == 0)


@triton.jit
def add_block(matrix, k, fall, added, last, index, PRECISION: tl.constexpr):
    """The matrix behind token `last` of a block, whose tokens add `added` [tokens, columns], from that before it."""
    risen = _row(fall, last, index)
    left = tl.where((index <= last)[:, None], tl.exp(tl.minimum(risen[None, :] - fall, 0.0)), 0.0)
    return matrix * tl.exp(risen)[:, None] + tl.dot(tl.trans(k * left), added, input_precision=PRECISION)


@triton.jit
def read_block(
    matrix, convolved, gates, solved, scores, gates_stride, token, own, head, key, column, index, log_decay, step_bias, skip,
    CHANNELS: tl.constexpr, HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    GATES: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr, SKIP: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The outputs of a block [tokens, columns] and what `add_block` takes: its keys, their decays, and what they add to the matrix."""
    q, k, fall, rate = _block(
        convolved, gates, gates_stride, token, own, head, key, log_decay, step_bias,
        CHANNELS, HEADS, KEY_HEADS, KEYS, GATES, STEPS, KIND,
    )  # fmt: skip
    values = convolved + token[:, None] * CHANNELS + (2 * KEY_HEADS * KEYS + head * VALUES + column)[None, :]
    v = tl.load(values, own[:, None] & (column < VALUES)[None, :], 0.0).to(tl.float32)
    place = (token * HEADS + head)[:, None] * BLOCK + index[None, :]
    risen = tl.exp(fall)
    made = tl.dot(q * risen, matrix, input_precision=PRECISION)
    if KIND < 2:
        missing = v - tl.dot(k * risen, matrix, input_precision=PRECISION)
        added = tl.dot(tl.load(solved + place, own[:, None], 0.0), missing, input_precision=PRECISION)
    else:
        added = rate[:, None] * v
    made += tl.dot(tl.load(scores + place, own[:, None], 0.0), added, input_precision=PRECISION)
    if SKIP:
        made += tl.load(skip + head) * v
    return made, k, fall, added
