"""`Draw`: how random tokens are drawn on a device. `TorchDraw` does it in plain torch: on the CPU, and where Triton cannot run.
`TritonDraw` does it in our kernels.

Owns top-k, top-p and min-p, in an order of tokens that depends on nothing but the row: ties are broken by the lower token id, everywhere,
so that a filter keeps the same tokens whatever the device, the algorithm behind topk, or the neighbours. On a CPU the nucleus is searched
for among the likeliest tokens first. Elsewhere the host would wait for the device to say whether that was enough, so whole rows are sorted
there.

A draw from a whole row goes in two stages, a block of neighbouring ids and then a token of it: it needs noise for the blocks and for one
block's tokens, not for every token. All passes over the vocabulary are made for a few rows at a time, in one buffer that stays in a cache.

The noise is a hash of (seed, position, token id), so that a draw depends on nothing else. Its bits come from integer operations alone and
are the same on every device; wrap-around of int32 and int64 products is relied upon.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from aengine.api.dataclass import dataclass
from aengine.kernels.arrays import to_device
from aengine.kernels.params import DRAW_PARAMS, DrawParams

_log = logging.getLogger("aengine")

Draw = Callable[[Tensor, NDArray[np.void], DrawParams, Tensor | None], Tensor]
"""[m, V] logits of any floating dtype, which stay as they are, and the parameters of the m rows, [m] `DRAW_PARAMS` on the host and again on
the device -> [m] int64 token ids, without waiting for the device. The order is temperature, min_p, top_k, top_p, draw, all in float32; a
row whose temperature is 0 gets its argmax. A row's token depends on its logits and parameters alone. The last argument, [m] float32, gets
the logits of the tokens, if there is one."""


_NARROWEST_BLOCK = 8  # ids; narrower ones cost more than they save


def top_candidates(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[m, V] -> the `count` highest: scores [m, count] float32, descending, and their ids [m, count] int64.

    Most of it is one pass for the maxima of blocks of neighbouring ids. The best `count` blocks, by (maximum, -index), hold the best
    `count` scores: whatever is in another block has `count` scores before it, the first maximum of each of those blocks.
    """
    vocab_size = scores.shape[1]
    width = 1 << max(0, round(math.log2(vocab_size / count) / 2))
    if width < _NARROWEST_BLOCK or vocab_size < 4 * count * width:
        return _highest(scores, count)
    blocks = _highest(_block_maxima(scores, width), count)[1]
    blocks = blocks.sort(dim=-1).values  # so that a lower id stays a lower index
    ids = (blocks[:, :, None] * width + torch.arange(width, device=scores.device)).flatten(1)
    beyond = ids >= vocab_size
    some = scores.gather(1, ids.clamp_(max=vocab_size - 1)).masked_fill_(beyond, -math.inf)
    best, at = _highest(some, count)
    return best, ids.gather(1, at)


def _block_maxima(scores: Tensor, width: int) -> Tensor:
    vocab_size = scores.shape[1]
    whole = vocab_size // width
    maxima = scores[:, : whole * width].view(len(scores), whole, width).amax(-1)
    return maxima if whole * width == vocab_size else torch.cat((maxima, scores[:, whole * width :].amax(-1, keepdim=True)), 1)


def _highest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row by (score, -index), float32, with their indices."""
    scores = scores.float()
    bits = (scores + 0.0).view(torch.int32)  # there is no -0.0 after this: it equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    keys = (ordered.to(torch.int64) << 32) | (0x7FFFFFFF - torch.arange(scores.shape[1], device=scores.device))  # all distinct
    best = keys.sort(dim=-1, descending=True).values if count == scores.shape[1] else keys.topk(count, dim=-1).values
    found = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    return scores.gather(1, found), found


def kept_candidates(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, total: Tensor | None) -> Tensor:
    """Which of the candidates a draw may take: [m, n] bool, always the first one.

    `scores` are descending, after temperature; parameters are [m], top_k 0 being off. `total` [m, 1] float64 is the mass
    that top_p refers to, relative to the first candidate; None: the candidates that min_p and top_k leave.
    """
    rank = torch.arange(scores.shape[1], device=scores.device)
    kept = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    kept &= ~(scores - scores[:, :1] < min_p.log()[:, None])
    # float64: the sums are then the same for any number of candidates, up to what no draw can notice
    mass = (scores - scores[:, :1]).exp().masked_fill_(~kept, 0.0).to(torch.float64)
    reached = mass.cumsum(-1)
    needed = top_p[:, None] * (reached[:, -1:] if total is None else total)
    kept &= reached - mass < needed
    kept[:, 0] = True  # also for a top_p that is zero in float32
    return kept


_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # odd fraction of 2^64, as a signed number


def row_keys(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """[m] int64 seeds and [m] integer positions -> [m, 2] int32: 64 bits per row, SplitMix64 (Steele et al. 2014) of both.

    Each `stream` gives keys that are independent of those of the others.
    """
    counter = positions.to(torch.int64) + (stream << 40)  # beyond every position
    state = _mix64(seeds + _GOLDEN) + counter * _GOLDEN
    return _mix64(state).view(torch.int32).view(-1, 2)


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """[vocab_size] int32: well mixed, distinct bits per token id."""
    ids = torch.arange(vocab_size, dtype=torch.int32, device=device)
    return _mix32(ids.mul_(0x9E3779B9 - (1 << 32)))


def uniform_bits(keys: Tensor, hashes: Tensor) -> Tensor:
    """[m, 2] keys with [n] or [m, n] token hashes -> [m, n] int32, uniform over 0 .. 2^31 - 1."""
    bits = hashes ^ keys[:, :1]
    bits.mul_(0x7FEB352D)
    _xor_shift(bits, 15)
    # The second half of the key enters here: rows that share the first half by chance still differ.
    bits.add_(keys[:, 1:])
    return _mix32(bits).bitwise_and_(0x7FFFFFFF)


def log_exponential(keys: Tensor, hashes: Tensor) -> Tensor:
    """log E for independent E ~ Exp(1): float32 [m, n]. argmax(logits - log E) is a draw from softmax(logits) (Gumbel-max).

    Always finite. Small E decide a draw, so resolution is kept there: E = -log(1 - u) with u down to 2^-32.
    """
    uniform = uniform_bits(keys, hashes).to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix64(z: Tensor) -> Tensor:
    z = (z ^ _shift64(z, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    z = (z ^ _shift64(z, 27)) * (0x94D049BB133111EB - (1 << 64))
    return z ^ _shift64(z, 31)


def _shift64(z: Tensor, by: int) -> Tensor:
    return (z >> by) & ((1 << (64 - by)) - 1)  # logical: torch shifts the sign in


def _mix32(x: Tensor) -> Tensor:
    """In place: the "lowbias32" finaliser (Wellons, "Prospecting for hash functions", 2018)."""
    _xor_shift(x, 16)
    x.mul_(0x7FEB352D)
    _xor_shift(x, 15)
    x.mul_(0x846CA68B - (1 << 32))
    return _xor_shift(x, 16)


def _xor_shift(x: Tensor, by: int) -> Tensor:
    return x.bitwise_xor_((x >> by).bitwise_and_((1 << (32 - by)) - 1))


_WIDTH = 64  # ids per block
_BUFFER_ELEMENTS = 1 << 18  # on a CPU: 1 MiB, half of what a core usually has for itself


@dataclass(frozen=True, slots=True)
class Masses:
    """The masses of m rows: a mass is exp(score - best), or 0 where min_p drops the token."""

    blocks: Tensor  # [m, ceil(V / 64)] float32, sums over blocks
    best: Tensor  # [m, 1] float32, the highest score

    def total(self) -> Tensor:
        """The sum of each row's masses, [m, 1] float64."""
        return self.blocks.sum(-1, keepdim=True, dtype=torch.float64)


class MassDraw:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.hashes = token_hashes(vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device
        self._rows_at_once = max(1, _BUFFER_ELEMENTS // vocab_size)
        self._buffer: Tensor | None = None

    def masses(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> Masses:
        """Computes the masses of the tokens for [m, V] logits. `with_min_p`: whether some rows have a min_p; else it is 0 for all."""
        blocks = torch.empty(len(logits), -(-self._vocab_size // _WIDTH), dtype=torch.float32, device=self._device)
        best = torch.empty(len(logits), 1, dtype=torch.float32, device=self._device)
        count = self._rows_at_once if self._device.type == "cpu" else max(1, len(logits))
        for begin in range(0, len(logits), count):
            rows = slice(begin, begin + count)
            work, best[rows] = self.fill(logits[rows], params[rows], with_min_p)
            _sum_blocks(work, out=blocks[rows])
        return Masses(blocks, best)

    def fill(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> tuple[Tensor, Tensor]:
        """[c, V] masses, in the buffer, and the best scores [c, 1]."""
        work = self._work(len(logits))
        torch.div(logits, params.temperature[:, None], out=work)
        best = work.amax(-1, keepdim=True)
        return _to_masses(work, best, params, with_min_p), best

    def draw(self, logits: Tensor, masses: Masses, params: DrawParams, with_min_p: bool, stream: int = 0) -> Tensor:
        """[m] int64 token ids, with probabilities in proportion to their masses."""
        num_blocks = masses.blocks.shape[1]
        noise = log_exponential(row_keys(params.seed, params.positions, 2 * stream + 1), self.hashes[:num_blocks])
        block = torch.sub(masses.blocks.log(), noise, out=noise).argmax(-1, keepdim=True)
        ids = block * _WIDTH + torch.arange(_WIDTH, device=self._device)
        ids.clamp_(max=self._vocab_size - 1)  # the last token several times over, always with the same noise: it wins no more often
        some = _to_masses(logits.gather(1, ids) / params.temperature[:, None], masses.best, params, with_min_p)
        noise = log_exponential(row_keys(params.seed, params.positions, 2 * stream), self.hashes[ids])
        winner = torch.sub(some.log_(), noise, out=noise).argmax(-1, keepdim=True)
        return ids.gather(1, winner)[:, 0]

    def _work(self, rows: int) -> Tensor:
        if self._device.type != "cpu":
            return torch.empty(rows, self._vocab_size, device=self._device)
        if self._buffer is None or len(self._buffer) < rows:
            self._buffer = torch.empty(rows, self._vocab_size)
        return self._buffer[:rows]


def _to_masses(scores: Tensor, best: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
    """In place."""
    scores.sub_(best)
    if with_min_p:
        scores.masked_fill_(scores < params.min_p.log()[:, None], -math.inf)
    return scores.exp_()


def _sum_blocks(masses: Tensor, out: Tensor) -> None:
    whole = masses.shape[1] // _WIDTH
    torch.sum(masses[:, : whole * _WIDTH].view(len(masses), whole, _WIDTH), -1, out=out[:, :whole])
    if whole < out.shape[1]:
        torch.sum(masses[:, whole * _WIDTH :], -1, keepdim=True, out=out[:, whole:])


_GREEDY, _MIN_P, _TOP_P, _TOP_K = -1, 1, 2, 4  # kinds of rows: a greedy one, one with some of the limits
_TOP_K_GROUPS = (64, 1024)  # rows up to the same bound are drawn together, so that one large top_k does not burden the others
_CANDIDATES = (64, 1024)  # of a row with top_p, before it is treated as one with a wide nucleus


def with_chosen(tokens: Tensor, logits: Tensor, chosen: Tensor | None) -> Tensor:
    """The [m] tokens. Their logits, of [m, V], become `chosen` [m], if it is given."""
    if chosen is not None:
        chosen.copy_(logits.gather(1, tokens[:, None])[:, 0])
    return tokens


class TorchDraw:
    """A `Draw`. Rows of one kind are drawn together, so that no row pays for a neighbour's filter."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._mass_draw = MassDraw(vocab_size, device)

    def __call__(self, logits: Tensor, host_params: NDArray[np.void], params: DrawParams, chosen: Tensor | None = None) -> Tensor:
        top_k = host_params["top_k"]
        kinds = _MIN_P * (host_params["min_p"] > 0.0) + _TOP_P * (host_params["top_p"] < 1.0)
        kinds = np.where(top_k > 0, _TOP_K + np.searchsorted(_TOP_K_GROUPS, top_k), kinds)
        kinds[host_params["temperature"] == 0.0] = _GREEDY
        tokens = torch.empty(len(logits), dtype=torch.int64, device=self._device)
        for kind in np.unique(kinds).tolist():
            members = np.flatnonzero(kinds == kind)
            most = int(top_k[members].max())
            if len(members) == len(kinds):
                return self._draw_kind(kind, logits, params, most, chosen)
            rows = to_device(members, self._device)
            tokens.index_copy_(0, rows, self._draw_kind(kind, logits.index_select(0, rows), params.select(rows), most))
        return with_chosen(tokens, logits, chosen)

    def _draw_kind(self, kind: int, logits: Tensor, params: DrawParams, most: int, chosen: Tensor | None = None) -> Tensor:
        if kind == _GREEDY:
            best, tokens = logits.max(-1)
            if chosen is not None:
                chosen.copy_(best)
            return tokens
        if kind >= _TOP_K:
            return self.top_k(logits, params, most, chosen)
        return (self.nucleus if kind & _TOP_P else self.whole)(logits, params, bool(kind & _MIN_P), chosen)

    def whole(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        """From all tokens that min_p leaves. `with_min_p`: whether rows have one; else it is 0 for all. `chosen`: as of `Draw`."""
        masses = self._mass_draw.masses(logits, params, with_min_p)
        return with_chosen(self._mass_draw.draw(logits, masses, params, with_min_p), logits, chosen)

    def nucleus(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        """From the likeliest tokens that have top_p of the mass that min_p leaves. `with_min_p`, `chosen`: as above."""
        return with_chosen(self._from_nucleus(logits, params, with_min_p), logits, chosen)

    def _from_nucleus(self, logits: Tensor, params: DrawParams, with_min_p: bool) -> Tensor:
        total = self._mass_draw.masses(logits, params, with_min_p).total()
        if self._device.type != "cpu":
            return self._from_candidates(logits, params, total, self._vocab_size)[0]
        tokens = torch.empty(len(logits), dtype=torch.int64)
        rest = torch.arange(len(logits))
        for count in _CANDIDATES:
            tokens[rest], kept = self._from_candidates(logits, params, total, min(count, self._vocab_size))
            wider = kept[:, -1].nonzero()[:, 0]  # the nucleus may have more tokens than these
            if count >= self._vocab_size or not len(wider):
                return tokens
            rest, logits, params, total = rest[wider], logits[wider], params.select(wider), total[wider]
        tokens[rest] = self._from_wide_nucleus(logits, params)
        return tokens

    def top_k(self, logits: Tensor, params: DrawParams, most: int, chosen: Tensor | None = None) -> Tensor:
        """From the likeliest top_k tokens, `most` at most, under min_p and top_p. `chosen`: as above."""
        count = min(most, self._vocab_size)  # a draft model may have fewer tokens
        return with_chosen(self._from_candidates(logits, params, None, count)[0], logits, chosen)

    def _from_candidates(self, logits: Tensor, params: DrawParams, total: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
        """Tokens from among the `count` likeliest, and which of these could be drawn: [m, count] bool. `total`: as of `kept_candidates`."""
        best, ids = top_candidates(logits, count)
        scores = best / params.temperature[:, None]
        kept = kept_candidates(scores, params.min_p, params.top_k, params.top_p, total)
        noise = log_exponential(row_keys(params.seed, params.positions), self._mass_draw.hashes[ids])
        winner = torch.sub(scores, noise, out=noise).masked_fill_(~kept, -math.inf).argmax(-1, keepdim=True)
        return ids.gather(1, winner)[:, 0], kept

    def _from_wide_nucleus(self, logits: Tensor, params: DrawParams) -> Tensor:
        """By rejection: draws from the whole row until the mass before the token, in the order of (logit, -id), is less than top_p.

        Each draw is accepted with a probability of top_p at least, so that a few passes take the place of a sort.
        """
        tokens = torch.empty(len(logits), dtype=torch.int64)
        ids = torch.arange(self._vocab_size)
        for i in range(len(logits)):
            row, p = logits[i : i + 1], params[i : i + 1]
            masses = self._mass_draw.masses(row, p, True)
            needed = p.top_p[:, None] * masses.total()
            for attempt in itertools.count(1):  # 0 are the draws of which the first is final
                token = self._mass_draw.draw(row, masses, p, True, stream=attempt)
                before = (row > row[:, token]) | ((row == row[:, token]) & (ids < token))
                if self._mass_draw.fill(row, p, True)[0].mul_(before).sum(dtype=torch.float64) < needed:
                    tokens[i] = token
                    break
        return tokens


class TritonDraw(TorchDraw):
    """A `Draw` by our Triton kernels on CUDA, wherever triton is installed. Rows with a top_k above that of the kernels are drawn by torch.
    Tokens are those of `TorchDraw` up to the rounding of sums, but for a nucleus that `TorchDraw` draws from by rejection on a CPU."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        from aengine.kernels.triton import sampling, top_k  # which not every machine has

        super().__init__(vocab_size, device)
        self._kernels, self._top_k_kernels = sampling, top_k

    def run_once(self, dtypes: Iterable[torch.dtype]) -> None:
        """Every kernel, for logits of each of the dtypes, so that none is compiled while a request waits. Raises whatever the compiler
        raises."""
        record = np.zeros(1, dtype=DRAW_PARAMS)
        record["temperature"], record["top_p"] = 1.0, 0.5
        packed = to_device(record.view(np.int32).reshape(1, -1), self._device)
        params = DrawParams(packed, torch.zeros(1, dtype=torch.int32, device=self._device))
        for dtype in dtypes:
            logits = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
            for with_min_p in (False, True):
                self.whole(logits, params, with_min_p)
            self.nucleus(logits, params, True)
            self.top_k(logits, params, self._top_k_kernels.MOST.value)

    def whole(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        return self._kernels.draw_in_blocks(logits, params, with_min_p, chosen)

    def nucleus(self, logits: Tensor, params: DrawParams, with_min_p: bool, chosen: Tensor | None = None) -> Tensor:
        return self._kernels.draw_from_nucleus(logits, params, chosen)

    def top_k(self, logits: Tensor, params: DrawParams, most: int, chosen: Tensor | None = None) -> Tensor:
        if most > self._top_k_kernels.MOST.value:
            return super().top_k(logits, params, most, chosen)
        return self._top_k_kernels.draw_from_top_k(logits, params, chosen)


def num_accepted(tokens: Tensor, drafts: Tensor, firsts: Tensor) -> Tensor:
    """[rows] int32: how many of each row's tokens count, as `num_accepted_on_host` says it, on the device and without waiting for it.
    `drafts` [m] and `firsts` [rows] are int32."""
    count = len(tokens)
    indices = torch.arange(count, dtype=torch.int32, device=tokens.device)
    ends = torch.where(tokens == drafts, count, indices).flip(0).cummin(0).values.flip(0)  # where the row that goes on here ends
    return ends.index_select(0, firsts) - firsts + 1


_FINITE = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max


def log_sums(logits: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """`LogSums` in torch, whose own sums of rows are added up in an order that depends on the number of rows and threads. Those of doubles
    differ by less than a float32 shows; a CPU, which is slow in them, adds halves of the row to each other instead."""
    best = logits.amax(-1, keepdim=True).clamp(*_FINITE)  # without a number, or with one that is infinite, the sum says so
    masses = (logits - best).exp_()
    if logits.device.type != "cpu":
        return masses.sum(-1, keepdim=True, dtype=torch.float64).log().float() + best, (logits > own).sum(-1)
    width = masses.shape[1]
    while width > 1:
        half = width // 2
        masses[:, :half] += masses[:, width - half : width]
        width -= half
    return masses[:, :1].log() + best, (logits > own).sum(-1)


def select_draw(vocab_size: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Draw:
    """For this device, with one log line where there is a choice. `dtype`: that of logits as the model gives them, beside float32."""
    if device.type == "cpu":
        return TorchDraw(vocab_size, device)
    try:
        draw = TritonDraw(vocab_size, device)
        draw.run_once({torch.float32, dtype})
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as reason:  # not installed, or no compiler for it
        _log.warning("sampling: torch, which sorts whole rows for top_p, because triton cannot run: %s", reason)
        return TorchDraw(vocab_size, device)
    _log.debug("sampling: triton")
    return draw
