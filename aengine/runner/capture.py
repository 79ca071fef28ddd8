"""Recording what a step does on a device, to do it again without launching each operation.

Owns the contract of a recorder, and how a forward pass is recorded in pieces between which attention runs as usual. Everything recorded
reads and writes memory that stays where it is: whatever differs from step to step must be in a buffer, never a number of Python's.
Knows neither models nor what records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from aengine.attention import AttentionStep

Replay = Callable[[], None]
_REHEARSALS = 2  # before recording: libraries set themselves up at the first call, autotuners choose


class Capture(Protocol):
    """Records in the thread that made it."""

    @property
    def holds_attention(self) -> bool:
        """Whether the attention of a `GraphStep` can be recorded with what is around it."""

    def session(self) -> AbstractContextManager[None]:
        """Around all recording."""

    def begin(self) -> None:
        """From here on operations are recorded. They may not be carried out."""

    def end(self) -> Replay:
        """What was recorded since `begin`, to be called any number of times."""

    def memory(self) -> int:
        """Bytes of the device that are in use, of which the difference between two calls tells what came between. Waits for the device."""


class Pieces:
    """A recording with interruptions: parts that are recorded, and between them what is done anew at each replay."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._parts: list[Replay] = []
        self._recording = False

    def record(self, work: Callable[[], None]) -> None:
        """Tries `work`, then records it. Its interruptions must be of this object, and in the same places each time."""
        for _ in range(_REHEARSALS):
            work()
        self._recording = True
        self._capture.begin()
        try:
            work()
        except BaseException:
            with contextlib.suppress(Exception):  # the error that came first is the one to tell
                self._capture.end()
            raise
        finally:
            self._recording = False
        self._parts.append(self._capture.end())

    def interrupt(self, action: Replay) -> None:
        """Within the work: ends a part, does `action`, now and at this place of every replay, and begins another part."""
        if not self._recording:
            return action()
        self._parts += (self._capture.end(), action)
        action()
        self._capture.begin()

    def replay(self) -> None:
        for part in self._parts:
            part()


@dataclass(slots=True)
class LiveAttention:
    """The attention that the interruptions of a replay run, over the first tokens of the recorded ones."""

    step: AttentionStep | None = None  # None: there are no tokens
    num_tokens: int = 0


class InterruptingAttention:
    """Satisfies `AttentionStep`, for a forward pass that is recorded: each layer's attention is an interruption."""

    def __init__(self, pieces: Pieces, live: LiveAttention, out: Tensor) -> None:
        """`out` [at least T, num_heads, head_dim] takes the output of every layer: one has been read before the next comes."""
        self._pieces = pieces
        self._live = live
        self._out = out
        self._written: tuple[Tensor, Tensor] | None = None

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._written = key, value

    def attend(self, layer: int, query: Tensor) -> Tensor:
        assert self._written is not None, "a layer writes before it attends"
        key, value = self._written
        out, live = self._out[: len(query)], self._live

        def run() -> None:
            if live.step is not None:
                count = live.num_tokens
                live.step.write(layer, key[:count], value[:count])
                out[:count].copy_(live.step.attend(layer, query[:count]))

        self._pieces.interrupt(run)
        return out
