"""A grammar without a parser: even and odd ids take turns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aengine.sampling.grammar import Compiled, ForcedText, GrammarError, Matcher


@dataclass(frozen=True)
class TakingTurns(Compiled):
    vocab_size: int
    in_bits: bool  # whether its matchers set bits, or name the ids that may not come

    def start(self) -> Matcher:
        return _Matcher(self)


class _Matcher(Matcher):
    parameter = "structured_output"

    def __init__(self, compiled: TakingTurns) -> None:
        self._compiled = compiled
        self._parity = 0  # of the next token

    def fill(self, bits: np.ndarray) -> np.ndarray | None:
        if not self._compiled.in_bits:
            return np.arange(1 - self._parity, self._compiled.vocab_size, 2)
        bits.view(np.uint32).fill(0xAAAAAAAA if self._parity else 0x55555555)
        return None

    def accept(self, token: int) -> bool:
        if token % 2 != self._parity:
            raise GrammarError.of(self.parameter, "not its turn")
        self._parity ^= 1
        return False

    def likely(self, learned: ForcedText) -> list[int]:
        return []

    def learn(self, token: int, learned: ForcedText) -> None:
        pass

    def place(self) -> object:
        return self._parity

    def go_back(self, place: object) -> None:
        assert isinstance(place, int)
        self._parity = place
