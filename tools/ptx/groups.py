"""Copies and products that threads issue, commit in groups, and wait for: cp.async and wgmma."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tools.ptx.program import Instruction

Threads = NDArray[np.bool_]


@dataclass
class Pending:
    """`action` does the work of some threads. `threads`: those whose work is not done. `groups`: [threads], how many groups each had
    committed when it was issued."""

    action: Callable[[Threads], None]
    threads: Threads
    groups: NDArray[np.int64]
    instruction: Instruction


class AsyncGroups:
    """Work is done when its thread waits for it, the last moment that hardware may choose."""

    def __init__(self, threads: int) -> None:
        self.pending: list[Pending] = []
        self._committed = np.zeros(threads, np.int64)

    def issue(self, action: Callable[[Threads], None], threads: Threads, instruction: Instruction) -> None:
        self.pending.append(Pending(action, threads.copy(), self._committed.copy(), instruction))

    def commit(self, threads: Threads) -> None:
        self._committed += threads

    def wait(self, newest: int, threads: Threads) -> None:
        """Does all work of these threads but that of their `newest` groups and of none, in the order in which it was issued."""
        for one in self.pending:
            done = one.threads & threads & (one.groups < self._committed - newest)
            if done.any():
                one.action(done)
                one.threads &= ~done
        self.pending = [one for one in self.pending if one.threads.any()]
