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

from aengine.kernels.paged_cache import LINE_BYTES, StateLayout
from aengine.kernels.recurrence import RecurrentRule
from aengine.kernels.triton.state_updates import BLOCK, add_block, advance_token, by_blocks, read_block, relate_blocks

ROW_FIELDS = 6
"""How many numbers a row has before the pages that it reads and writes: how many tokens it replays, whether it has drafts, whether there is
no state before it, where its kept states begin and end, and the position of its first token."""
_COLUMNS, _BLOCK_COLUMNS = 32, 16  # of a matrix that a program has: token by token, and of prompts
_CHANNELS, _TOKENS = 128, 16  # that a program convolves
_DECODE_CHANNELS = 512  # in a step of decodes alone, of one token
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
    of_line = LINE_BYTES // mixed.itemsize
    places = {
        **{"STATE_PAGES": pages, "PIECES": tensors.layout.pieces_per_page, "LINES": tensors.layout.lines_per_piece},
        **{"tail": at.tail, "INPUTS": at.num_inputs, "TAPS": taps, "CHANNELS": channels, "PER_LINE": of_line},
        **{"HEAD": ROW_FIELDS, "KEY_TENSORS": tensors.num_keys},
    }
    bias, has_bias = (rule.conv if rule.conv_bias is None else rule.conv_bias), rule.conv_bias is not None
    tokens, lines = (1, _DECODE_CHANNELS // of_line) if states.most_tokens == 1 else (_TOKENS, _CHANNELS // of_line)
    _convolve[(num_rows, triton.cdiv(states.most_tokens, tokens), triton.cdiv(channels, lines * of_line))](
        *(mixed, convolved, rule.conv, bias, *memory, mixed.stride(0)), **places, BIAS=has_bias, BT=tokens, BL=lines, num_warps=4
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
            *(replayed, rule.conv, bias, *memory), **places, WIDTH=shape.width, PENDING=pending, BIAS=has_bias, BL=_CHANNELS // of_line
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
        enable_fp_fusion=False,  # a product fused into the sum over threads would give each thread a sum of its own
    )
    if at.num_inputs:
        _keep[(num_rows, triton.cdiv(shape.width, _DECODE_CHANNELS))](
            *(mixed, gates, *memory, states.kept, mixed.stride(0), gates.stride(0)),
            **places,
            WIDTH=shape.width,
            BJ=triton.next_power_of_2(at.num_inputs),
            BL=_DECODE_CHANNELS // of_line,
            num_warps=4,
        )
    return out


@triton.jit
def _lines(
    key_size, value_size, key_page, value_page, pages, piece, line, mask,
    PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr,
):  # fmt: skip
    """Where lines of a state are, counted from a piece on, in units of 4 bytes; `pages` points to its pages. What lies within a line is for
    callers to add, so that compilers see that it is contiguous."""
    piece = piece + line // LINES
    number = (piece % PIECES).to(tl.int64)
    page = tl.load(pages + piece // PIECES, mask=mask, other=0).to(tl.int64)
    of_keys = number * key_size + page * key_page
    of_values = KEY_TENSORS * key_size + (number - KEY_TENSORS) * value_size + page * value_page
    return tl.where(number < KEY_TENSORS, of_keys, of_values) + line % LINES * 16


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["tail"])
def _convolve(
    mixed, out, weight, bias, rows, qo_indptr, memory, key_size, value_size, key_page, value_page, mixed_stride,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Some tokens of a row in some channels: [tokens, lines of an input, channels of a line]."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    first = tl.load(qo_indptr + row).to(tl.int64)
    count = tl.load(qo_indptr + row + 1) - first
    token = chunk * BT + tl.arange(0, BT)
    line, of_line = tl.program_id(2) * BL + tl.arange(0, BL), tl.arange(0, PER_LINE)
    channel = line[:, None] * PER_LINE + of_line[None, :]
    within = channel < CHANNELS
    if chunk * BT < count:
        replays, begins = tl.load(fields), tl.load(fields + 2)
        total = tl.zeros([BT, BL, PER_LINE], dtype=tl.float32)
        for tap in tl.static_range(TAPS):
            at = token - (TAPS - 1) + tap
            own = ((at >= 0) & (token < count))[:, None, None] & within[None, :, :]
            x = tl.load(mixed + ((first + at) * mixed_stride)[:, None, None] + channel[None, :, :], own, 0.0).to(tl.float32)
            if chunk * BT < TAPS - 1:
                known = (at < 0) & (token < tl.where(begins == 0, count, 0))
                places = _lines(
                    key_size, value_size, key_page, value_page, fields + HEAD, tail,
                    line[None, :] * INPUTS + (at + (TAPS - 1) + replays)[:, None], known[:, None] & (line * PER_LINE < CHANNELS)[None, :],
                    PIECES, LINES, KEY_TENSORS,
                )  # fmt: skip
                places = places[:, :, None] * (PER_LINE // 16) + of_line[None, None, :]
                x += tl.load(memory + places, known[:, None, None] & within[None, :, :], 0.0).to(tl.float32)
            total += x * tl.load(weight + channel * TAPS + tap, within, 0.0)[None, :, :]
        if BIAS:
            total += tl.load(bias + channel, within, 0.0)[None, :, :]
        mask = (token < count)[:, None, None] & within[None, :, :]
        to = out + ((first + token) * CHANNELS)[:, None, None] + channel[None, :, :]
        tl.store(to, _silu(total).to(out.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["tail"])
def _replay(
    out, weight, bias, rows, qo_indptr, memory, key_size, value_size, key_page, value_page,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail,
    INPUTS: tl.constexpr, TAPS: tl.constexpr, CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    PENDING: tl.constexpr, BIAS: tl.constexpr, BL: tl.constexpr,
):  # fmt: skip
    """Some channels, convolved, and gates of the tokens that a row replays."""
    row = tl.program_id(0)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    line, of_line = tl.program_id(1) * BL + tl.arange(0, BL), tl.arange(0, PER_LINE)
    element = line[:, None] * PER_LINE + of_line[None, :]
    is_mixed, within = element < CHANNELS, element < WIDTH
    for token in range(0, tl.load(fields)):
        total = tl.zeros([BL, PER_LINE], dtype=tl.float32)
        newest = total
        for tap in tl.static_range(TAPS):
            places = _lines(
                key_size, value_size, key_page, value_page, fields + HEAD, tail, line * INPUTS + token + tap, line * PER_LINE < WIDTH,
                PIECES, LINES, KEY_TENSORS,
            )  # fmt: skip
            newest = tl.load(memory + places[:, None] * (PER_LINE // 16) + of_line[None, :], within, 0.0).to(tl.float32)
            total += newest * tl.load(weight + element * TAPS + tap, is_mixed, 0.0)
        if BIAS:
            total += tl.load(bias + element, is_mixed, 0.0)
        made = tl.where(is_mixed, _silu(total), newest)
        tl.store(out + (row.to(tl.int64) * PENDING + token) * WIDTH + element, made.to(out.dtype.element_ty), within)


@triton.jit
def _of_matrix(
    memory, key_size, value_size, key_page, value_page, pages, piece, line, within, is_key, PIECES: tl.constexpr, LINES: tl.constexpr,
    KEY_TENSORS: tl.constexpr, PER_PIECE: tl.constexpr,
):  # fmt: skip
    """Where some columns of a head's matrix lie in the state with these pages: `within` of one place if its block lies in one piece, and
    else each key is a line of its own."""
    if PER_PIECE:
        place = _lines(key_size, value_size, key_page, value_page, pages, piece, line, piece >= 0, PIECES, LINES, KEY_TENSORS)
    else:
        place = _lines(key_size, value_size, key_page, value_page, pages, piece, line, is_key, PIECES, LINES, KEY_TENSORS)[:, None]
    return memory + place + within


@triton.jit
def _keep_after(kept, kept_at, kept_end, STATE_PAGES: tl.constexpr):
    """After how many tokens of the row the next state is kept; -1: none is."""
    return tl.load(kept + kept_at * (1 + STATE_PAGES), kept_at < kept_end, -1)


@triton.jit
def _keep_matrix(
    matrix, memory, key_size, value_size, key_page, value_page, kept, kept_at, kept_end, piece, line, within, is_key,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, PER_PIECE: tl.constexpr,
):  # fmt: skip
    """Writes the matrix to a kept state; returns the number of the next one, and `_keep_after` of it."""
    pages = kept + kept_at * (1 + STATE_PAGES) + 1
    place = _of_matrix(
        memory, key_size, value_size, key_page, value_page, pages, piece, line, within, is_key, PIECES, LINES, KEY_TENSORS, PER_PIECE
    )
    tl.store(place, matrix, is_key[:, None])
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
    is_key, is_live = key < KEYS, tl.load(writes) > 0
    known, written = key < tl.where(is_live & (begins == 0), KEYS, 0), key < tl.where(is_live, KEYS, 0)
    number, of_block = head * BLOCKS + part * BV // WIDTH, part * BV % WIDTH + tl.arange(0, BV)
    if PER_PIECE:
        piece, line = first_piece + number // PER_PIECE, number % PER_PIECE * (KEYS * WIDTH // 16)
        within = key[:, None] * WIDTH + of_block[None, :]
    else:
        tl.static_assert(WIDTH == 16)
        piece, line = first_piece + number * PER_BLOCK, key
        within = of_block[None, :]
    place = _of_matrix(
        memory, key_size, value_size, key_page, value_page, reads, piece, line, within, known, PIECES, LINES, KEY_TENSORS, PER_PIECE
    )
    matrix = tl.load(place, known[:, None] & (column >= 0)[None, :], 0.0)
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
                    STATE_PAGES, PIECES, LINES, KEY_TENSORS, PER_PIECE,
                )  # fmt: skip
    if has_drafts:
        place = _of_matrix(
            memory, key_size, value_size, key_page, value_page, writes, piece, line, within, written, PIECES, LINES, KEY_TENSORS, PER_PIECE
        )
        tl.store(place, matrix, written[:, None])
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
                        STATE_PAGES, PIECES, LINES, KEY_TENSORS, PER_PIECE,
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
                STATE_PAGES, PIECES, LINES, KEY_TENSORS, PER_PIECE,
            )  # fmt: skip
    if has_drafts == 0:
        place = _of_matrix(
            memory, key_size, value_size, key_page, value_page, writes, piece, line, within, written, PIECES, LINES, KEY_TENSORS, PER_PIECE
        )
        tl.store(place, matrix, written[:, None])


@triton.jit
def _keep_inputs(
    mixed, gates, fields, pages, first, replays, begins, behind, count, line, mixed_stride, gates_stride, memory, key_size, value_size,
    key_page, value_page,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail, INPUTS: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BJ: tl.constexpr,
):  # fmt: skip
    """Writes `count` inputs to a state: those of `TAPS` - 1 tokens before token `behind`, as replayed ones are counted, and from it on:
    [inputs, lines of an input, elements of a line]."""
    number, of_line = tl.arange(0, BJ), tl.arange(0, PER_LINE)
    element = (line[:, None] * PER_LINE + of_line[None, :])[None, :, :]
    token = behind - (TAPS - 1) + number
    at = token - replays
    is_line = (line * PER_LINE < WIDTH)[None, :]
    wanted = (number < count)[:, None, None] & (element < WIDTH)
    own = wanted & (at >= 0)[:, None, None]
    place = first + at.to(tl.int64)
    x = tl.load(mixed + (place * mixed_stride)[:, None, None] + element, own & (element < CHANNELS), 0.0)
    gate = tl.load(gates + (place * gates_stride)[:, None, None] + (element - CHANNELS), own & (element >= CHANNELS), 0.0)
    known = (number < count) & (at < tl.where(begins == 0, 0, -(1 << 30)))
    sources = _lines(
        key_size, value_size, key_page, value_page, fields + HEAD, tail, line[None, :] * INPUTS + (token + (TAPS - 1))[:, None],
        known[:, None] & is_line, PIECES, LINES, KEY_TENSORS,
    )  # fmt: skip
    sources = sources[:, :, None] * (PER_LINE // 16) + of_line[None, None, :]
    earlier = tl.load(memory + sources, known[:, None, None] & (element < WIDTH), 0.0)
    tl.debug_barrier()  # inputs move to places that other threads read
    places = _lines(
        key_size, value_size, key_page, value_page, pages, tail, line[None, :] * INPUTS + number[:, None],
        (number < count)[:, None] & is_line, PIECES, LINES, KEY_TENSORS,
    )  # fmt: skip
    tl.store(memory + places[:, :, None] * (PER_LINE // 16) + of_line[None, None, :], x + gate + earlier, wanted)


@triton.jit(do_not_specialize=["tail"])
def _keep(
    mixed, gates, rows, qo_indptr, memory, key_size, value_size, key_page, value_page, kept, mixed_stride, gates_stride,
    STATE_PAGES: tl.constexpr, PIECES: tl.constexpr, LINES: tl.constexpr, KEY_TENSORS: tl.constexpr, tail, INPUTS: tl.constexpr,
    TAPS: tl.constexpr, CHANNELS: tl.constexpr, PER_LINE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BJ: tl.constexpr,
    BL: tl.constexpr,
):  # fmt: skip
    """Some elements of the inputs that the states of a row have, when nobody reads earlier ones any more."""
    row = tl.program_id(0)
    fields = rows + row * (HEAD + 2 * STATE_PAGES)
    writes = fields + HEAD + STATE_PAGES
    line = tl.program_id(1) * BL + tl.arange(0, BL)
    replays, has_drafts, begins = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2)
    first = tl.load(qo_indptr + row).to(tl.int64)
    count = tl.load(qo_indptr + row + 1) - first
    if tl.load(writes) > 0:
        for state in range(tl.load(fields + 3), tl.load(fields + 4)):
            pages = kept + state * (1 + STATE_PAGES) + 1
            behind = tl.load(pages - 1)
            if behind >= 0:
                _keep_inputs(
                    mixed, gates, fields, pages, first, replays, begins, behind, TAPS - 1, line, mixed_stride, gates_stride, memory,
                    key_size, value_size, key_page, value_page, STATE_PAGES, PIECES, LINES, KEY_TENSORS, tail, INPUTS, TAPS, CHANNELS,
                    PER_LINE, HEAD, WIDTH, BJ,
                )  # fmt: skip
        certain = replays + tl.where(has_drafts > 0, 0, count)
        _keep_inputs(
            mixed, gates, fields, writes, first, replays, begins, certain, TAPS - 1 + tl.where(has_drafts > 0, count, 0), line,
            mixed_stride, gates_stride, memory, key_size, value_size, key_page, value_page, STATE_PAGES, PIECES, LINES, KEY_TENSORS, tail,
            INPUTS, TAPS, CHANNELS, PER_LINE, HEAD, WIDTH, BJ,
        )  # fmt: skip
