"""The contract of a graph recorder, and recordings in pieces.

A graph reads and writes memory at fixed addresses: whatever differs from step to step must be in a buffer, never a Python number. What it
allocates while it is recorded it takes again at each replay, from the memory of its recorder.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

Replay = Callable[[], None]


class Capture(Protocol):
    """Records graphs, in the thread that created it."""

    def session(self) -> AbstractContextManager[None]:
        """To be entered around all recording."""

    def begin(self) -> None:
        """Operations are recorded from now on. They may not be executed."""

    def end(self) -> Replay:
        """Returns a replay of what was recorded since `begin`, which can be called any number of times."""

    def memory(self) -> int:
        """Bytes of the device's memory in use; what was taken between two calls is their difference. Waits for the device."""


class Pieces:
    """A recording with interruptions: recorded parts, and between them actions that are run at each replay."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._parts: list[Replay] = []
        self._recording = False

    def record(self, work: Callable[[], None]) -> None:
        """Runs `work`, then records it. It may call `interrupt` of this object, in the same places each time."""
        work()  # libraries are set up at the first call
        self._recording = True
        self._capture.begin()
        try:
            work()
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to raise
                self._capture.end()
            raise
        finally:
            self._recording = False
        self._parts.append(self._capture.end())

    def interrupt(self, action: Callable[..., None], *tensors: Tensor) -> None:
        """To be called by the work: runs `action(*tensors)` now, and at this place of every replay.

        `tensors` are what the parts before have made. This object keeps none of them: once the work has given one up, parts recorded later
        use its memory, and they run after the action.
        """
        if not self._recording:
            return action(*tensors)
        self._parts += (self._capture.end(), functools.partial(action, *map(_borrowed, tensors)))
        action(*tensors)
        self._capture.begin()

    def replay(self) -> None:
        for part in self._parts:
            part()


def _borrowed(tensor: Tensor) -> Tensor:
    """The same tensor at the same memory, which it does not keep."""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return tensor.new_empty(0).set_(borrowed, tensor.storage_offset(), tensor.shape, tensor.stride())
