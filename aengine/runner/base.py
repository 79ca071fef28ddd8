"""What an engine expects of a runner. Owns the contract alone: importing it loads neither torch nor a model."""

from __future__ import annotations

import ctypes
from typing import Protocol

from aengine.scheduler.plan import StepPlan, StepResult

Hold = ctypes.c_int32
"""Not 0: what has not begun shall not begin by itself. Written by any thread at any time, and read by those that compute."""


class InFlightStep(Protocol):
    """A step that was launched and may still be running on the device."""

    @property
    def overlaps(self) -> bool:
        """Whether it goes on by itself, so that the next step may be planned and launched before the result is there."""

    def wait(self, hold: Hold | None = None) -> None:
        """Until the step is done. One that could not begin before that begins at once with a `hold` that is 0 at that moment, else when
        the result of this one is asked for, not earlier."""

    def result(self) -> StepResult:
        """Waits, too. May be called more than once."""

    def withdraw(self) -> bool:
        """Takes the step, the latest that was launched, back as if it had not been, where it has not begun. False: it has."""


class Runner(Protocol):
    """Executes plans in the order of their step numbers. All methods are called from one thread, the one that created it."""

    num_pages: int  # of the pool, the reserved page 0 included
    page_size: int  # tokens
    max_model_len: int  # tokens
    max_num_seqs: int  # rows are 0 .. max_num_seqs - 1
    max_num_batched_tokens: int  # of one step

    def launch(self, plan: StepPlan) -> InFlightStep:
        """Starts a step, or prepares one that is computed when its result is asked for. Tokens sampled in earlier steps are known to it,
        also when their results were not yet asked for."""

    def close(self) -> None:
        """Releases the weights and the KV cache."""
