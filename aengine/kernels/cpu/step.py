"""What a step hands to the C interface: last tokens, addresses of arrays, and the errors for the status codes that come back."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.kernels.draw_params import DRAW_PARAMS

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


@dataclass(frozen=True, slots=True)
class LastTokens:
    """How tokens go from one step to the next without the host: contiguous int32 arrays."""

    tokens: IntArray  # [rows], the last token of each row
    input_rows: IntArray  # rows whose last tokens become the first ids of the step when it begins
    output_rows: IntArray  # [m], rows whose last tokens become the sampled ones when the step ends; or none


_BYTES = ctypes.c_char * 0


def address(array: NDArray[np.generic]) -> int:
    """The address of a contiguous writable array; raises BufferError or TypeError for others. `array.ctypes` takes four times as long."""
    return ctypes.addressof(_BYTES.from_buffer(array.data))


def address_of_params(draw_params: NDArray[np.void], count: int) -> int:
    """The address of `count` contiguous records of `DRAW_PARAMS`. Raises ValueError for others."""
    if draw_params.dtype != DRAW_PARAMS or draw_params.shape != (count,):
        raise ValueError(f"draw_params {draw_params.shape} of dtype {draw_params.dtype} are not {count} of {DRAW_PARAMS}")
    return address(draw_params)


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
