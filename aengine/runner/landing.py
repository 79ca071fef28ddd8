"""Host memory that sampled tokens are copied to, used again once they were read. Knows nothing of what the tokens mean."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Landing:
    """Of one step at a time."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self._device = device
        self._memory = torch.zeros(max_rows, dtype=torch.int64, pin_memory=not on_cpu)
        # One that sleeps while it waits, rather than spin: the event loop needs the core, and the driver its lock.
        self._done = None if on_cpu else torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def copy(self, tokens: Tensor | NDArray[np.int64]) -> Tensor:
        """Starts the copy of [m] int64 tokens, which are on the device; what is returned is their place here."""
        assert isinstance(tokens, Tensor)
        place = self._memory[: len(tokens)]
        place.copy_(tokens, non_blocking=True)
        return place

    def close(self) -> None:
        """Everything that `wait` is to wait for has been put on the current stream."""
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until it is done. Other threads may run meanwhile."""
        if self._done is not None:
            self._done.synchronize()


class Landings:
    """As many as there are steps in flight; one is made when all others are taken, so that none is written before it was read."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self.device = device
        self._max_rows = max_rows
        self._free: list[Landing] = []

    def take(self) -> Landing:
        return self._free.pop() if self._free else Landing(self._max_rows, self.device)

    def give_back(self, landing: Landing) -> None:
        self._free.append(landing)


def as_int32(tokens: Tensor | NDArray[np.int64]) -> NDArray[np.int32]:
    """A copy, of host memory."""
    return (tokens if isinstance(tokens, np.ndarray) else tokens.numpy()).astype(np.int32)
