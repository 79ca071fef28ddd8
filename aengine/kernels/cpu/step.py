"""A step as the C interface takes it: pointers to the arrays of a `StepLayout`, and the errors for status codes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from aengine.kernels.cpu.library import CStep
from aengine.kernels.draws import DRAW

IntArray = NDArray[np.int32]
_MESSAGES = {
    2: "a token id of the step is not one of the embedding's",
    3: "a position of the step is outside of the cos/sin table",
    4: "a slot of the step is neither -1 nor in the pool",
    5: "a page of the step is not in the pool",
    6: "a row of the step has no pages, a last page of no or too many tokens, or more queries than tokens",
    7: "a logits index is not that of a token of the step",
    9: "a row of the step has no last token",
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


@dataclass(frozen=True, slots=True)
class LastTokens:
    """How tokens go from one step to the next without the host: contiguous int32 arrays."""

    tokens: IntArray  # [rows], the last token of each row
    input_rows: IntArray  # rows whose last tokens become the first ids of the step when it begins
    output_rows: IntArray  # [m], rows whose last tokens become the sampled ones when the step ends; or none


NO_LAST_TOKENS = LastTokens(_NONE, _NONE, _NONE)
"""All ids are given, and what is sampled is not stored."""


class StepArguments:
    """A `CStep` and the arrays that it points to. Valid as long as the object."""

    def __init__(
        self,
        layout: Layout,
        token_ids: IntArray | None = None,
        logits_indices: IntArray | None = None,
        hidden: Tensor | None = None,
        sampled: NDArray[np.int64] | None = None,
        draws: NDArray[np.void] | None = None,
        last_tokens: LastTokens = NO_LAST_TOKENS,
    ) -> None:
        """`draws` are of `DRAW`. Raises ValueError for too many or too few ids, draws or rows, and for last tokens that could not be
        written back."""
        given = (  # in the order of the fields of `CStep`
            _NONE if token_ids is None else token_ids,
            layout.positions,
            layout.slot_mapping,
            layout.qo_indptr,
            layout.kv_indptr,
            layout.kv_indices,
            layout.last_page_len,
            _NONE if logits_indices is None else logits_indices,
            last_tokens.tokens,
            last_tokens.input_rows,
            last_tokens.output_rows,
        )
        arrays = [np.ascontiguousarray(array, dtype=np.int32) for array in given]
        self._keep = (arrays, hidden, sampled, draws)
        num_tokens, num_logits = len(layout.positions), 0 if logits_indices is None else len(logits_indices)
        tokens, num_inputs, num_outputs = last_tokens.tokens, len(last_tokens.input_rows), len(last_tokens.output_rows)
        self.c = CStep(
            *map(_address, arrays),
            None if hidden is None else hidden.data_ptr(),
            None if sampled is None else _address(sampled),
            None if draws is None else address_of_draws(draws, num_logits),
            num_tokens,
            len(layout.last_page_len),
            num_logits,
            len(tokens),
            num_inputs,
            num_outputs,
        )
        if token_ids is not None and len(token_ids) != num_tokens:
            raise ValueError(f"there are {len(token_ids)} token ids for {num_tokens} positions")
        if arrays[-3] is not tokens:
            raise ValueError(f"the last tokens are not contiguous int32, but {tokens.dtype} with strides {tokens.strides}")
        num_sampled = 0 if sampled is None else len(sampled)
        if num_inputs > num_tokens or num_outputs not in (0, num_sampled):
            raise ValueError(f"{num_inputs} input rows and {num_outputs} output rows do not fit {num_tokens} tokens, {num_sampled} sampled")


_BYTES = ctypes.c_char * 0


def _address(array: NDArray[np.generic]) -> int:
    """The address of a contiguous writable array; raises BufferError or TypeError for others. `array.ctypes` takes four times as long."""
    return ctypes.addressof(_BYTES.from_buffer(array.data))


def address_of_draws(draws: NDArray[np.void], count: int) -> int:
    """The address of `count` contiguous `DRAW`s. Raises ValueError for others."""
    if draws.dtype != DRAW or draws.shape != (count,):
        raise ValueError(f"draws {draws.shape} of dtype {draws.dtype} are not {count} of {DRAW}")
    return _address(draws)


def check(status: int) -> None:
    """Raises the error for a status that a C function returned: MemoryError, ValueError for a step that was refused before anything was
    written, or RuntimeError for a workspace that is in use."""
    if status == 0:
        return
    if status == 1:
        raise MemoryError("no memory for the scratch of a step")
    if status == 8:
        raise RuntimeError("the workspace is in a step that has begun and is not finished")
    raise ValueError(_MESSAGES[status])
