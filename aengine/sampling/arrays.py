"""What sampling does with the numbers of a step: `HostArrays` in NumPy, where the kernels of a CPU computed the logits, and `DeviceArrays`
in torch, without waiting for the device.

Both have the same operations, in the same order and rounding, so that what is sampled is written once. Knows nothing of requests.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.arrays import Numbers

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_NARROWEST_BLOCK = 8  # ids; narrower ones cost more than they save


class HostArrays:
    on_host = True

    def put_array(self, array: NDArray[Any]) -> Numbers:
        """An array of the host, where the numbers are."""
        return array

    def arange(self, count: int) -> Numbers:
        return np.arange(count)

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Numbers:
        return np.zeros(shape, dtype)

    def empty(self, shape: tuple[int, ...]) -> Numbers:
        """[shape] float32, any numbers."""
        return np.empty(shape, np.float32)

    def joined(self, parts: list[Numbers]) -> Numbers:
        """Parts one after the other in the first dimension."""
        return np.concatenate(parts)

    def where(self, chosen: Numbers, one: Numbers, other: Numbers) -> Numbers:
        return np.where(chosen, one, other)

    def at_most(self, numbers: Numbers, limit: float) -> Numbers:
        """In place."""
        return np.minimum(numbers, np.float32(limit), out=numbers)

    def floats(self, numbers: Numbers) -> Numbers:
        """In float32, rows contiguous."""
        return np.ascontiguousarray(numbers, dtype=np.float32)

    def doubles(self, numbers: Numbers) -> Numbers:
        """In float64."""
        return numbers.astype(np.float64)

    def flat(self, numbers: Numbers) -> Numbers:
        """Return the same memory in one dimension."""
        return numbers.reshape(-1)

    def of_columns(self, numbers: Numbers, ids: Numbers) -> Numbers:
        """[m, V] at [m, k] ids -> [m, k]."""
        return np.take_along_axis(numbers, ids, 1)

    def sums_by_id(self, table: Numbers, ids: Numbers, values: Numbers) -> Numbers:
        """[m, k]: for each of [m, k] ids the sum of the `values` of the same id in its row. `table` [m, V] is room for them."""
        np.put_along_axis(table, ids, np.float32(0.0), 1)
        lines = np.arange(len(ids))[:, None] * table.shape[1]
        np.add.at(table.reshape(-1), (ids + lines).reshape(-1), values.reshape(-1))
        return np.take_along_axis(table, ids, 1)

    def add_at(self, flat: Numbers, at: Numbers, values: Numbers) -> None:
        """Adds values in place; an index may come several times."""
        np.add.at(flat, at, values)

    def top_candidates(self, scores: Numbers, count: int) -> tuple[Numbers, Numbers]:
        """[m, V] -> the `count` highest: scores [m, count] float32, descending, and their ids [m, count] int64.

        Most of it is one pass for the maxima of blocks of neighbouring ids, as in `draw.top_candidates`."""
        vocab_size = scores.shape[1]
        width = 1 << max(0, round(math.log2(vocab_size / count) / 2))
        if width < _NARROWEST_BLOCK or vocab_size < 4 * count * width:
            return _highest(scores, count)
        maxima = np.maximum.reduceat(scores, np.arange(0, vocab_size, width), axis=1)
        blocks = np.sort(_highest(maxima, count)[1])  # so that a lower id stays a lower index
        ids = (blocks[:, :, None] * width + np.arange(width)).reshape(len(scores), -1)
        some = np.take_along_axis(scores, np.minimum(ids, vocab_size - 1), 1)
        some[ids >= vocab_size] = -np.inf
        best, at = _highest(some, count)
        return best, np.take_along_axis(ids, at, 1)

    def likeliest(self, logits: Numbers) -> tuple[Numbers, Numbers]:
        """The argmax of each line of [m, V] logits, and its logit."""
        tokens = logits.argmax(-1)
        return tokens, logits[np.arange(len(tokens)), tokens]

    def num_accepted(self, tokens: Numbers, drafts: Numbers, firsts: NDArray[np.int64]) -> Numbers:
        """Return what `num_accepted_on_host` does, where the numbers are."""
        return num_accepted_on_host(tokens, drafts, firsts)

    def tensor_of(self, row: Numbers) -> Tensor:
        """A tensor that shares the memory of a row. Imports torch."""
        from aengine.kernels.arrays import as_tensor

        return as_tensor(row)


class DeviceArrays:
    on_host = False

    def __init__(self, device: torch.device) -> None:
        import torch

        from aengine.kernels.arrays import to_device
        from aengine.sampling.draw import num_accepted, top_candidates

        self.device = device
        self._torch, self._to_device = torch, to_device
        self.top_candidates, self._num_accepted = top_candidates, num_accepted

    def put_array(self, array: NDArray[Any]) -> Numbers:
        return self._to_device(array, self.device)

    def arange(self, count: int) -> Numbers:
        return self._torch.arange(count, device=self.device)

    def zeros(self, shape: tuple[int, ...], dtype: type[np.generic]) -> Numbers:
        return self._torch.zeros(shape, dtype=getattr(self._torch, np.dtype(dtype).name), device=self.device)

    def empty(self, shape: tuple[int, ...]) -> Numbers:
        return self._torch.empty(shape, device=self.device)

    def joined(self, parts: list[Numbers]) -> Numbers:
        return self._torch.cat(parts)

    def where(self, chosen: Numbers, one: Numbers, other: Numbers) -> Numbers:
        return self._torch.where(chosen, one, other)

    def at_most(self, numbers: Numbers, limit: float) -> Numbers:
        return numbers.clamp_(max=limit)

    def floats(self, numbers: Numbers) -> Numbers:
        return numbers.float().contiguous()

    def doubles(self, numbers: Numbers) -> Numbers:
        return numbers.to(self.device).double()

    def flat(self, numbers: Numbers) -> Numbers:
        return numbers.view(-1)

    def of_columns(self, numbers: Numbers, ids: Numbers) -> Numbers:
        return numbers.gather(1, ids)

    def sums_by_id(self, table: Numbers, ids: Numbers, values: Numbers) -> Numbers:
        return table.scatter_(1, ids, 0.0).scatter_add_(1, ids, values).gather(1, ids)

    def add_at(self, flat: Numbers, at: Numbers, values: Numbers) -> None:
        flat.index_add_(0, at, values)

    def likeliest(self, logits: Numbers) -> tuple[Numbers, Numbers]:
        chosen, tokens = logits.max(-1)
        return tokens, chosen

    def num_accepted(self, tokens: Numbers, drafts: Numbers, firsts: NDArray[np.int64]) -> Numbers:
        if self.device.type == "cpu":
            return self._torch.from_numpy(num_accepted_on_host(tokens.numpy(), drafts.numpy(), firsts))
        return self._num_accepted(tokens, drafts, self.put_array(firsts.astype(np.int32)))

    def tensor_of(self, row: Numbers) -> Tensor:
        found: Tensor = row
        return found


Arrays: TypeAlias = HostArrays | DeviceArrays


def num_accepted_on_host(tokens: NDArray[np.integer], drafts: NDArray[np.int32], firsts: NDArray[np.int64]) -> NDArray[np.int32]:
    """[rows]: how many of each row's tokens count.

    `tokens` [m] were sampled, the tokens of a row one after another. `drafts` [m] are -1 at a row's last token. `firsts` [rows] are the
    indices of the rows' first tokens.
    """
    ends = (tokens != drafts).nonzero()[0]
    counts: NDArray[np.int32] = (ends[ends.searchsorted(firsts)] - firsts + 1).astype(np.int32)
    return counts


def on_host(numbers: Numbers) -> NDArray[Any]:
    """Numbers that are in host memory, as an array."""
    found: NDArray[Any] = numbers if isinstance(numbers, np.ndarray) else numbers.numpy()
    return found


def _highest(scores: NDArray[np.float32], count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The `count` highest of each row by (score, -index), with their indices."""
    bits = (scores + np.float32(0.0)).view(np.int32)  # there is no -0.0 after this: it equals 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers in the order of the floats
    keys = (ordered.astype(np.int64) << 32) | (0x7FFFFFFF - np.arange(scores.shape[1]))  # all distinct
    best = keys if count == scores.shape[1] else np.partition(keys, -count, axis=1)[:, -count:]
    best = -np.sort(-best, axis=1)
    found = 0x7FFFFFFF - (best & 0xFFFFFFFF)
    return np.take_along_axis(scores, found, 1), found
