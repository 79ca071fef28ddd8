"""Which steps are measured. Knows nothing of runners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """`rows` sequences compute `length` tokens each, behind `context` known ones."""

    rows: int
    length: int
    context: int

    @property
    def name(self) -> str:
        return f"decode {self.rows} x {self.context}" if self.length == 1 else f"prefill {self.rows} x {self.length} @ {self.context}"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Batch sizes of decode steps, and prompt lengths of prefill steps."""

    decode: tuple[int, ...]
    prefill: tuple[int, ...]


ON_CPU = Defaults(decode=(1, 8, 32), prefill=(1024,))
ON_CUDA = Defaults(decode=(1, 8, 32, 64, 128, 256), prefill=(1024, 4096, 8192))


@dataclass(frozen=True, slots=True)
class StepsWanted:
    """What was asked for; None: the defaults of the device."""

    decode: Sequence[int] | None
    prefill: Sequence[int] | None
    context: int  # known tokens of each row of a decode step
    seconds: float  # that each case is repeated for

    def cases(self, defaults: Defaults) -> list[Case]:
        decode = defaults.decode if self.decode is None else self.decode
        prefill = defaults.prefill if self.prefill is None else self.prefill
        return [Case(rows, 1, self.context) for rows in decode] + [Case(1, length, 0) for length in prefill]
