"""Recurrent layers on CUDA: what `RecurrentRule` says, over the states in a pool's pages, whose layout is that of `StateLayout`.

A program has some columns of a head's matrix of a row in registers, and computes one token after the other, or those of a prompt block by
block, in an order of sums that depends on no other row. It reads the matrix once, and writes it once, and where it is kept. Launches depend
on shapes alone, so that graphs can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from aengine.kernels.recurrence import LINE_BYTES, RecurrentRule, StateLayout
from aengine.kernels.triton.state_updates import BLOCK, add_block, advance_token, by_blocks, read_block, relate_blocks

ROW_FIELDS = 6
"""How many numbers a row has before the pages that it reads and writes: how many tokens it replays, whether it has drafts, whether there is
no state before it, where its kept states begin and end, and the position of its first token."""
_COLUMNS, _BLOCK_COLUMNS = 32, 16  # of a matrix that a program has: token by token, and of prompts
_CHANNELS, _TOKENS = 128, 16  # that a program convolves
_DELTA, _BY_ROW, _ADDED, _BY_NUMBER = range(4)  # the gated delta rule with a decay for each head, or row; Mamba-2; Mamba-1


class DeviceStates(NamedTuple):
    """The n rows of a step and their states, as in `StepStates`, on a device. Of a row that writes to page 0 nothing is computed."""

    rows: Tensor  # [n, ROW_FIELDS and the pages read and written] int32
    kept: Tensor  # [k, 1 + pages] int32: after how many tokens of the row, and where
    qo_indptr: Tensor  # [n + 1] int32
    most_tokens: int  # of the step that a row has
    replays: bool  # whether any row may replay some


class StateTensors(NamedTuple):
    """Where the tensors of a pool's pages are, which states lie in. All are parts of `memory`."""

    layout: StateLayout
    memory: Tensor  # uint8
    num_keys: int  # tensors of keys, which come before those of values
    places: tuple[int, int, int, int]
    """In units of 4 bytes, of keys and of values: from tensor to tensor; then from page to page."""

    @classmethod
    def of(cls, layout: StateLayout, memory: Tensor, tensors: Sequence[Tensor], num_keys: int) -> StateTensors:
        """`tensors` [num_pages, ..] as of `StateMemory`, one behind the other, whose pages are contiguous."""
        (of_keys, key_page), (of_values, value_page) = map(_strides, (tensors, tensors[num_keys:] or tensors))
        return cls(layout, memory, num_keys, (of_keys, of_values, key_page, value_page))


def _strides(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """From the first tensor to the second one, or 0, and from page to page of the first, in units of 4 bytes."""
    first, second = tensors[0], tensors[min(1, len(tensors) - 1)]
    assert first[0].is_contiguous()
    between = second.storage_offset() - first.storage_offset()
    return between * first.itemsize // 4, first.stride(0) * first.itemsize // 4


def recur(
    tensors: StateTensors, states: DeviceStates, layer: int, rule: RecurrentRule, mixed: Tensor, gates: Tensor | Callable[[Tensor], Tensor]
) -> Tensor:
    """The outputs [T, width] of all tokens of a step, from what is convolved of them, `mixed` [T, channels], and their gates [T, ..], or
    what makes these of what was convolved. `layer` counts the recurrent layers alone."""
    at, num_rows, device = tensors.layout.layers[layer], len(states.rows), mixed.device
    shape, channels, taps = at.shape, len(rule.conv), rule.taps
    convolved, out = (torch.empty(len(mixed), width, dtype=mixed.dtype, device=device) for width in (channels, rule.width))
    if not len(mixed):
        return out
    pages = tensors.layout.num_pages
    numbers, inputs = tensors.memory.view(torch.float32), tensors.memory.view(mixed.dtype)
    memory = (states.rows, states.qo_indptr, inputs, *tensors.places)
    places = {
        **{"STATE_PAGES": pages, "PIECES": tensors.layout.pieces_per_page, "LINES": tensors.layout.lines_per_piece},
        **{"tail": at.tail, "INPUTS": at.num_inputs, "TAPS": taps, "CHANNELS": channels, "PER_LINE": LINE_BYTES // mixed.itemsize},
        **{"HEAD": ROW_FIELDS, "KEY_TENSORS": tensors.num_keys},
    }
    bias, has_bias = (rule.conv if rule.conv_bias is None else rule.conv_bias), rule.conv_bias is not None
    chunks = triton.cdiv(states.most_tokens, _TOKENS)
    _convolve[(num_rows, chunks, triton.cdiv(channels, _CHANNELS))](
        *(mixed, convolved, rule.conv, bias, *memory, mixed.stride(0)), **places, BIAS=has_bias, BT=_TOKENS, BC=_CHANNELS, num_warps=4
    )
    if not isinstance(gates, Tensor):
        gates = gates(convolved)
    assert mixed.stride(1) == 1
    assert gates.stride(1) == 1 or not gates.shape[1]
    pending = at.num_inputs - taps + 1
    replayed = convolved
    if states.replays and pending:
        replayed = torch.empty(num_rows * pending, shape.width, dtype=mixed.dtype, device=device)
        _replay[(num_rows, triton.cdiv(shape.width, _CHANNELS))](
            *(replayed, rule.conv, bias, *memory), **places, WIDTH=shape.width, PENDING=pending, BIAS=has_bias, BC=_CHANNELS, num_warps=4
        )
    per_head = 0 if rule.step_bias is None else len(rule.step_bias) // rule.heads
    kinds = (_DELTA, _BY_ROW) if rule.delta else (_ADDED, _BY_NUMBER)
    kind = kinds[per_head > 1]
    step_bias, skip = (rule.log_decay if each is None else each for each in (rule.step_bias, rule.skip))
    sizes = {
        **{"HEADS": rule.heads, "KEY_HEADS": rule.key_heads, "KEYS": rule.key_dim, "CHANNELS": channels, "GATES": gates.shape[1]},
        **{"STEPS": per_head, "KIND": kind, "BK": max(16, triton.next_power_of_2(rule.key_dim)), "BLOCK": BLOCK},
        "PRECISION": "ieee" if mixed.dtype is torch.float32 else "tf32",
    }
    solved = scores = out
    has_blocks = states.most_tokens > BLOCK and kind != _BY_NUMBER
    width = min(_BLOCK_COLUMNS if has_blocks else _COLUMNS, at.width)
    if has_blocks:
        scores = torch.empty(len(mixed), rule.heads, BLOCK, device=device)
        solved = torch.empty_like(scores) if rule.delta else scores
        relate_blocks[(num_rows, triton.cdiv(states.most_tokens, BLOCK) + 1, rule.heads)](
            *(convolved, gates, solved, scores, rule.log_decay, step_bias, states.rows, states.qo_indptr, gates.stride(0)),
            **sizes,
            FIELDS=states.rows.shape[1],
            num_warps=4,
        )
    _recur[(num_rows, rule.heads, triton.cdiv(rule.value_dim, width))](
        *(convolved, gates, replayed, out, solved, scores, rule.log_decay, step_bias, skip),
        *(states.rows, states.qo_indptr, numbers, *tensors.places, states.kept, gates.stride(0), replayed.stride(0)),
        **{name: places[name] for name in ("STATE_PAGES", "PIECES", "LINES", "KEY_TENSORS", "HEAD")},
        **sizes,
        first_piece=at.first,
        PER_PIECE=at.blocks_per_piece,
        PER_BLOCK=at.pieces_per_block,
        WIDTH=at.width,
        BLOCKS=triton.cdiv(rule.value_dim, at.width),
        VALUES=rule.value_dim,
        PENDING=pending if states.replays else 0,
        HAS_BLOCKS=has_blocks,
        SKIP=rule.skip is not None,
        BV=width,
        num_warps=4,
    )
    if at.num_inputs:
        _keep[(num_rows, triton.cdiv(shape.width, _CHANNELS))](
            *(mixed, gates, *memory, states.kept, mixed.stride(0), gates.stride(0)),
            **places,
            WIDTH=shape.width,
            BJ=triton.next_power_of_2(at.num_inputs),
            BC=_CHANNELS,
            num_warps=4,
        )
    return out


@triton.jit
def _lines(
    key_size, value_size, key_page, value_page, pages, piece, line, mask,
    PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr,
):  # fmt: skip
    """Where lines of a state are, counted from a piece on, in units of 4 bytes; `pages` points to its pages."""
    piece = piece + line // LINES
    number = (piece % PIECES).to(tl.int64)
    page = tl.load(pages + piece // PIECES, mask=mask, other=0).to(tl.int64)
    of_keys = number * key_size + page * key_page
    of_values = KEY_TENSORS * key_size + (number - KEY_TENSORS) * value_size + page * value_page
    return tl.where(number < KEY_TENSORS, of_keys, of_values) + line % LINES * 16


@triton.jit
def _inputs(
    key_size, value_size, key_page, value_page, pages, element, number, mask,
    tail, INPUTS: tl.constexpr, PER_LINE: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr,
    KEY_TENSORS: tl.constexpr,
):  # fmt: skip
    """Where elements of inputs are that a state has, in units of an element."""
    place = _lines(
        key_size,
        value_size,
        key_page,
        value_page,
        pages,
        tail + 0 * element,
        element // PER_LINE * INPUTS + number,
        mask,
        PIECES,
        LINES,
        KEY_TENSORS,
    )
    return place * (PER_LINE // 16) + element % PER_LINE


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["tail"])
def _convolve(
    mixed, out, weight, bias, rows, qo_indptr, memory, key_size, value_size, key_page, value_page, mixed_stride,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Some tokens of a row in some channels."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    first = tl.load(qo_indptr + row).to(tl.int64)
    count = tl.load(qo_indptr + row + 1) - first
    token = chunk * BT + tl.arange(0, BT)
    channel = tl.program_id(2) * BC + tl.arange(0, BC)
    within = channel < CHANNELS
    if chunk * BT < count:
        replays, begins = tl.load(fields), tl.load(fields + 2)
        total = tl.zeros([BT, BC], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - (TAPS - 1) + tap
            own = (at >= 0) & (token < count)
            x = tl.load(mixed + (first + at)[:, None] * mixed_stride + channel[None, :], own[:, None] & within[None, :], 0.0).to(tl.float32)
            if chunk * BT < TAPS - 1:
                known = ((at < 0) & (token < tl.where(begins == 0, count, 0)))[:, None] & within[None, :]
                number, element = tl.broadcast(at[:, None] + (TAPS - 1) + replays, channel[None, :])
                places = _inputs(
                    key_size,
                    value_size,
                    key_page,
                    value_page,
                    fields + HEAD,
                    element,
                    number,
                    known,
                    tail,
                    INPUTS,
                    PER_LINE,
                    PIECES,
                    LINES,
                    KEY_TENSORS,
                )
                x += tl.load(memory + places, known, 0.0).to(tl.float32)
            total += x * tl.load(weight + channel * TAPS + tap, within, 0.0)[None, :]
        if BIAS:
            total += tl.load(bias + channel, within, 0.0)[None, :]
        mask = (token < count)[:, None] & within[None, :]
        tl.store(out + (first + token)[:, None] * CHANNELS + channel[None, :], _silu(total).to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tail"])
def _replay(
    out, weight, bias, rows, qo_indptr, memory, key_size, value_size, key_page, value_page,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, PENDING: tl.constexpr, BIAS: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Some channels, convolved, and gates of the tokens that a row replays."""
    row = tl.program_id(0)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    element = tl.program_id(1) * BC + tl.arange(0, BC)
    is_mixed, within = element < CHANNELS, element < WIDTH
    for token in range(0, tl.load(fields)):
        total = tl.zeros([BC], dtype=tl.float32)
        newest = total
        for tap in tl.static_range(TAPS):
            places = _inputs(
                key_size,
                value_size,
                key_page,
                value_page,
                fields + HEAD,
                element,
                token + tap,
                within,
                tail,
                INPUTS,
                PER_LINE,
                PIECES,
                LINES,
                KEY_TENSORS,
            )
            newest = tl.load(memory + places, within, 0.0).to(tl.float32)
            total += newest * tl.load(weight + element * TAPS + tap, is_mixed, 0.0)
        if BIAS:
            total += tl.load(bias + element, is_mixed, 0.0)
        made = tl.where(is_mixed, _silu(total), newest)
        tl.store(out + (row.to(tl.int64) * PENDING + token) * WIDTH + element, made.to(out.dtype.element_ty), within)


@triton.jit
def _store_matrix(
    matrix, memory, key_size, value_size, key_page, value_page, pages, piece, line, within, mask,
    PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr,
):  # fmt: skip
    """Writes the matrix to the state with these pages."""
    place = _lines(key_size, value_size, key_page, value_page, pages, piece, line, mask, PIECES, LINES, KEY_TENSORS)
    tl.store(memory + place + within, matrix, mask)


@triton.jit
def _keep_after(kept, kept_at, kept_end, STATE_PAGES: tl.constexpr):
    """After how many tokens of the row the next state is kept; -1: none is."""
    return tl.load(kept + kept_at * (1 + STATE_PAGES), kept_at < kept_end, -1)


@triton.jit
def _keep_matrix(
    matrix, memory, key_size, value_size, key_page, value_page, kept, kept_at, kept_end, piece, line, within, mask,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr,
):  # fmt: skip
    """Writes the matrix to a kept state; returns the number of the next one, and `_keep_after` of it."""
    pages = kept + kept_at * (1 + STATE_PAGES) + 1
    _store_matrix(matrix, memory, key_size, value_size, key_page, value_page, pages, piece, line, within, mask, PIECES, LINES, KEY_TENSORS)
    return kept_at + 1, _keep_after(kept, kept_at + 1, kept_end, STATE_PAGES)


@triton.jit(do_not_specialize=["first_piece"])
def _recur(
    convolved, gates, replayed, out, solved, scores, log_decay, step_bias, skip, rows, qo_indptr, memory, key_size, value_size, key_page,
    value_page, kept, gates_stride, replayed_stride,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, CHANNELS: tl.constexpr,
    HEAD: tl.constexpr,
    first_piece, PER_PIECE: tl.constexpr, PER_BLOCK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, GATES: tl.constexpr, STEPS: tl.constexpr,
    PENDING: tl.constexpr, KIND: tl.constexpr, SKIP: tl.constexpr, HAS_BLOCKS: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of a head's matrix of a row, over all tokens of the row."""
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    reads, writes = fields + HEAD, fields + HEAD + STATE_PAGES
    replays, has_drafts, begins = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    kept_at, kept_end = tl.load(fields + 3), tl.load(fields + 4)
    first, end = tl.load(qo_indptr + row), tl.load(qo_indptr + row + 1)
    key, column = tl.arange(0, BK), part * BV + tl.arange(0, BV)
    is_key = (key < KEYS)[:, None] & (column >= 0)[None, :]
    is_live = tl.load(writes) > 0
    known = (key < tl.where(is_live & (begins == 0), KEYS, 0))[:, None] & (column >= 0)[None, :]
    written = (key < tl.where(is_live, KEYS, 0))[:, None] & (column >= 0)[None, :]
    number = head * BLOCKS + part * BV // WIDTH
    flat = key[:, None] * WIDTH + (part * BV % WIDTH + tl.arange(0, BV))[None, :]
    if PER_PIECE:
        piece = first_piece + number // PER_PIECE + 0 * flat
        line = number % PER_PIECE * (KEYS * WIDTH // 16) + flat // 16
    else:
        piece = first_piece + number * PER_BLOCK + 0 * flat
        line = flat // 16
    within = flat % 16
    matrix = tl.load(
        memory + _lines(key_size, value_size, key_page, value_page, reads, piece, line, known, PIECES, LINES, KEY_TENSORS) + within,
        known,
        0.0,
    )
    keep_after = _keep_after(kept, kept_at, kept_end, STATE_PAGES)
    if PENDING:
        for token in range(0, replays):
            given = replayed + (row.to(tl.int64) * PENDING + token) * replayed_stride
            matrix, _ = advance_token(
                matrix, given, given + CHANNELS, head, key, column, log_decay, step_bias, skip,
                HEADS, KEY_HEADS, KEYS, VALUES, GATES, STEPS, KIND, SKIP,
            )  # fmt: skip
            if token + 1 == keep_after:
                kept_at, keep_after = _keep_matrix(
                    matrix, memory, key_size, value_size, key_page, value_page, kept, kept_at, kept_end, piece, line, within, is_key,
                    STATE_PAGES, PIECES, LINES, KEY_TENSORS,
                )  # fmt: skip
    if has_drafts:
        _store_matrix(
            matrix, memory, key_size, value_size, key_page, value_page, writes, piece, line, within, written, PIECES, LINES, KEY_TENSORS
        )
    alone = first  # where tokens begin that are computed one after the other
    if HAS_BLOCKS:
        count, index = end - first, tl.arange(0, BLOCK)
        if by_blocks(fields, count, BLOCK):
            for begin in range(-(tl.load(fields + 5) % BLOCK), count, BLOCK):
                own = (begin + index >= 0) & (begin + index < count)
                tokens = first.to(tl.int64) + begin + index
                outputs, k, fall, added = read_block(
                    matrix, convolved, gates, solved, scores, gates_stride, tokens, own, head, key, column, index, log_decay, step_bias,
                    skip, CHANNELS, HEADS, KEY_HEADS, KEYS, VALUES, GATES, STEPS, KIND, SKIP, PRECISION, BLOCK,
                )  # fmt: skip
                to = out + (tokens * HEADS * VALUES + head * VALUES)[:, None] + column[None, :]
                tl.store(to, outputs.to(out.dtype.element_ty), own[:, None] & (column < VALUES)[None, :])
                while (keep_after > 0) & (keep_after <= begin + BLOCK):
                    inner = add_block(matrix, k, fall, added, keep_after - 1 - begin, index, PRECISION)
                    kept_at, keep_after = _keep_matrix(
                        inner, memory, key_size, value_size, key_page, value_page, kept, kept_at, kept_end, piece, line, within, is_key,
                        STATE_PAGES, PIECES, LINES, KEY_TENSORS,
                    )  # fmt: skip
                matrix = add_block(matrix, k, fall, added, BLOCK - 1, index, PRECISION)
            alone = end
    for token in range(alone, end):
        at = first.to(tl.int64) + (token - first)
        matrix, made = advance_token(
            matrix, convolved + at * CHANNELS, gates + at * gates_stride, head, key, column, log_decay, step_bias, skip,
            HEADS, KEY_HEADS, KEYS, VALUES, GATES, STEPS, KIND, SKIP,
        )  # fmt: skip
        tl.store(out + at * HEADS * VALUES + head * VALUES + column, made.to(out.dtype.element_ty), column < VALUES)
        if replays + token - first + 1 == keep_after:
            kept_at, keep_after = _keep_matrix(
                matrix, memory, key_size, value_size, key_page, value_page, kept, kept_at, kept_end, piece, line, within, is_key,
                STATE_PAGES, PIECES, LINES, KEY_TENSORS,
            )  # fmt: skip
    if has_drafts == 0:
        _store_matrix(
            matrix, memory, key_size, value_size, key_page, value_page, writes, piece, line, within, written, PIECES, LINES, KEY_TENSORS
        )


@triton.jit
def _keep_inputs(
    mixed, gates, fields, pages, first, replays, begins, behind, count, element, mixed_stride, gates_stride, memory, key_size,
    value_size, key_page, value_page,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Writes `count` inputs to a state: those of `TAPS` - 1 tokens before token `behind`, as replayed ones are counted, and from it on."""
    number = tl.arange(0, BJ)
    token = behind - (TAPS - 1) + number
    at = token - replays
    wanted = (number < count)[:, None] & (element < WIDTH)[None, :]
    own = wanted & (at >= 0)[:, None]
    place = first + at.to(tl.int64)
    x = tl.load(mixed + place[:, None] * mixed_stride + element[None, :], own & (element < CHANNELS)[None, :], 0.0)
    gate = tl.load(gates + place[:, None] * gates_stride + (element - CHANNELS)[None, :], own & (element >= CHANNELS)[None, :], 0.0)
    known = wanted & (at < tl.where(begins == 0, 0, -(1 << 30)))[:, None]
    source, wide = tl.broadcast((token + (TAPS - 1))[:, None], element[None, :])
    earlier = tl.load(
        memory
        + _inputs(
            key_size,
            value_size,
            key_page,
            value_page,
            fields + HEAD,
            wide,
            source,
            known,
            tail,
            INPUTS,
            PER_LINE,
            PIECES,
            LINES,
            KEY_TENSORS,
        ),
        known,
        0.0,
    )
    tl.debug_barrier()  # inputs move to places that other threads read
    to, wide = tl.broadcast(number[:, None], element[None, :])
    places = _inputs(
        key_size, value_size, key_page, value_page, pages, wide, to, wanted, tail, INPUTS, PER_LINE, PIECES, LINES, KEY_TENSORS
    )
    tl.store(memory + places, x + gate + earlier, wanted)


@triton.jit(do_not_specialize=["tail"])
def _keep(
    mixed, gates, rows, qo_indptr, memory, key_size, value_size, key_page, value_page, kept, mixed_stride, gates_stride,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr,
    CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BJ: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Some elements of the inputs that the states of a row have, when nobody reads earlier ones any more."""
    row = tl.program_id(0)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    writes = fields + HEAD + STATE_PAGES
    element = tl.program_id(1) * BC + tl.arange(0, BC)
    replays, has_drafts, begins = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    first = tl.load(qo_indptr + row).to(tl.int64)
    count = tl.load(qo_indptr + row + 1) - first
    if tl.load(writes) > 0:
        for state in range(tl.load(fields + 3), tl.load(fields + 4)):
            pages = kept + state * (1 + STATE_PAGES) + 1
            behind = tl.load(pages - 1)
            if behind >= 0:
                _keep_inputs(
                    mixed, gates, fields, pages, first, replays, begins, behind, TAPS - 1, element, mixed_stride, gates_stride, memory,
                    key_size, value_size, key_page, value_page, STATE_PAGES, PIECES, LINES, KEY_TENSORS, tail, INPUTS, TAPS, CHANNELS,
                    PER_LINE, HEAD, WIDTH, BJ,
                )  # fmt: skip
        certain = replays + tl.where(has_drafts > 0, 0, count)
        _keep_inputs(
            mixed, gates, fields, writes, first, replays, begins, certain, TAPS - 1 + tl.where(has_drafts > 0, count, 0), element,
            mixed_stride, gates_stride, memory, key_size, value_size, key_page, value_page, STATE_PAGES, PIECES, LINES, KEY_TENSORS, tail,
            INPUTS, TAPS, CHANNELS, PER_LINE, HEAD, WIDTH, BJ,
        )  # fmt: skip
