"""A step as the C border takes it: `StepLayout`'s arrays as pointers, and what a refusal of them means."""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.library import CStep
from aengine.kernels.draws import DRAW
from aengine.kernels.feed import NOTHING, Feed

IntArray = NDArray[np.int32]
_MESSAGES = {
    2: "a token id of the step is not one of the embedding's",
    3: "a position of the step is outside of the cos/sin table",
    4: "a slot of the step is neither -1 nor in the pool",
    5: "a page of the step is not in the pool",
    6: "a row of the step has no pages, a last page of no or too many tokens, or more queries than tokens",
    7: "a wanted token is not one of the step's",
    9: "a row of the step has no latest token",
}


class Layout(Protocol):
    """The part of `aengine.attention.StepLayout` that the kernels read: contiguous int32 arrays."""

    @property
    def positions(self) -> IntArray: ...
    @property
    def slot_mapping(self) -> IntArray: ...
    @property
    def qo_indptr(self) -> IntArray: ...
    @property
    def kv_indptr(self) -> IntArray: ...
    @property
    def kv_indices(self) -> IntArray: ...
    @property
    def last_page_len(self) -> IntArray: ...


_NONE: IntArray = np.zeros(0, np.int32)


class StepArguments:
    """A `CStep` and the arrays that it points to. Valid as long as the object."""

    def __init__(
        self,
        layout: Layout,
        token_ids: IntArray | None = None,
        wanted: IntArray | None = None,
        hidden: Tensor | None = None,
        chosen: NDArray[np.int64] | None = None,
        draws: NDArray[np.void] | None = None,
        feed: Feed = NOTHING,
    ) -> None:
        """`draws` are of `DRAW`. Raises ValueError where there are too many or too few ids, draws or rows, and for latest
        tokens that could not be written back."""
        given = (  # in the order of the fields of `CStep`
            _NONE if token_ids is None else token_ids,
            layout.positions,
            layout.slot_mapping,
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            _NONE if wanted is None else wanted,
            feed.latest,
            feed.fed,
            feed.kept,
        )
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
        self._keep = (arrays, hidden, chosen, draws)
        num_tokens, num_wanted = len(layout.positions), 0 if wanted is None else len(wanted)
        self.c = CStep(
            *map(_address, arrays),
            None if hidden is None else hidden.data_ptr(),
            None if chosen is None else _address(chosen),
            None if draws is None else address_of_draws(draws, num_wanted),
            num_tokens,
            len(layout.last_page_len),
            num_wanted,
            len(feed.latest),
            len(feed.fed),
            len(feed.kept),
        )
        if token_ids is not None and len(token_ids) != num_tokens:
            raise ValueError(f"there are {len(token_ids)} token ids for {num_tokens} positions")
        if arrays[-3] is not feed.latest:
            raise ValueError(f"the latest tokens are not contiguous int32, but {feed.latest.dtype} with strides {feed.latest.strides}")
        num_chosen = 0 if chosen is None else len(chosen)
        if len(feed.fed) > num_tokens or len(feed.kept) not in (0, num_chosen):
            raise ValueError(f"{len(feed.fed)} rows are fed and {len(feed.kept)} kept, of {num_tokens} tokens and {num_chosen} chosen ones")


_BYTES = ctypes.c_char * 0


def _address(array: NDArray[np.generic]) -> int:
    """Of a contiguous and writable array, else this raises BufferError or TypeError. Asking numpy takes four times as long."""
    return ctypes.addressof(_BYTES.from_buffer(array.data))


def address_of_draws(draws: NDArray[np.void], count: int) -> int:
    """Of `count` contiguous `DRAW`s. Raises ValueError for others."""
    if draws.dtype != DRAW or draws.shape != (count,):
        raise ValueError(f"draws {draws.shape} of dtype {draws.dtype} are not {count} of {DRAW}")
    return _address(draws)


def check(status: int) -> None:
    """Raises what a function of the C border returned: MemoryError, ValueError for a step that it refused before it touched anything, or
    RuntimeError for a workspace that is in use."""
    if status == 0:
        return
    if status == 1:
        raise MemoryError("no memory for the scratch of a step")
    if status == 8:
        raise RuntimeError("the workspace is in a step that has begun and was not finished")
    raise ValueError(_MESSAGES[status])
