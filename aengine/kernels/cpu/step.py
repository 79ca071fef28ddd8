"""A step as the C border takes it: `StepLayout`'s arrays as pointers, and what a refusal of them means."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.library import CStep

IntArray = NDArray[np.int32]
_MESSAGES = {
    2: "a token id of the step is not one of the embedding's",
    3: "a position of the step is outside of the cos/sin table",
    4: "a slot of the step is neither -1 nor in the pool",
    5: "a page of the step is not in the pool",
    6: "a row of the step has no pages, a last page of no or too many tokens, or more queries than tokens",
    7: "a wanted token is not one of the step's",
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


class StepArguments:
    """A `CStep` and the arrays that it points to. Valid as long as the object."""

    def __init__(self, layout: Layout, token_ids: Tensor | None = None, wanted: Tensor | None = None, hidden: Tensor | None = None) -> None:
        names = ("positions", "slot_mapping", "qo_indptr", "kv_indptr", "kv_indices", "last_page_len")
        arrays = [np.ascontiguousarray(getattr(layout, name), dtype=np.int32) for name in names]
        tensors = [None if one is None else one.int().contiguous() for one in (token_ids, wanted)]
        self._keep = (arrays, tensors, hidden)
        positions, slots, qo_indptr, kv_indptr, kv_indices, last_page_len = (one.__array_interface__["data"][0] for one in arrays)
        ids, rows = tensors
        self.c = CStep(
            token_ids=None if ids is None else ids.data_ptr(),
            positions=positions,
            slots=slots,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=last_page_len,
            wanted=None if rows is None else rows.data_ptr(),
            hidden=None if hidden is None else hidden.data_ptr(),
            num_tokens=len(arrays[0]),
            num_rows=len(arrays[5]),
            num_wanted=0 if rows is None else len(rows),
        )
        if ids is not None and len(ids) != len(arrays[0]):
            raise ValueError(f"there are {len(ids)} token ids for {len(arrays[0])} positions")


def check(status: int) -> None:
    """Raises what a function of the C border returned: MemoryError, or ValueError for a step that it refused before it touched anything."""
    if status == 0:
        return
    if status == 1:
        raise MemoryError("no memory for the scratch of a step")
    raise ValueError(_MESSAGES[status])
