"""`ReasoningMarkers`: where the reasoning of an output begins and ends, found in the text of its tokens. Knows no logits."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass


class Phase(enum.Enum):
    """Which part of an output its next token belongs to."""

    OPENING = 0  # reasoning may begin
    REASONING = 1
    ANSWER = 2  # reasoning has ended, or there is none


class ReasoningPlace(NamedTuple):
    """How far an output has come relative to its reasoning: what is needed to find the next marker in the text that follows."""

    phase: Phase
    text: str = ""
    """OPENING: the output. REASONING: its longest end with which the closing could begin. ANSWER: empty."""
    num_tokens: int = 0  # of the output up to here; up to the end of the reasoning in the answer, 0 if there is none


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """What reasoning stands between: none is empty, or has white space around it. A marker may be cut into tokens in any way, but for one
    that is cut within a character."""

    opening: str
    closing: str
    opened: bool  # the output begins within reasoning
    text_of: Callable[[int], str]
    """The text that a token adds to one that has begun, of special tokens too."""

    def start(self) -> ReasoningPlace:
        return ReasoningPlace(Phase.REASONING if self.opened else Phase.OPENING)

    def behind(self, place: ReasoningPlace, token_id: int) -> ReasoningPlace:
        """The place behind a token; `place` is not in the answer."""
        text, num_tokens = place.text + self.text_of(token_id), place.num_tokens + 1
        if place.phase is Phase.OPENING:
            written = text.lstrip()
            if not written.startswith(self.opening):
                return ReasoningPlace(Phase.OPENING, text, num_tokens) if self.opening.startswith(written) else ReasoningPlace(Phase.ANSWER)
            text = written.removeprefix(self.opening)
        if self.closing in text:
            return ReasoningPlace(Phase.ANSWER, "", num_tokens)
        ends = (text[begin:] for begin in range(max(0, len(text) - len(self.closing) + 1), len(text)))
        return ReasoningPlace(Phase.REASONING, next(filter(self.closing.startswith, ends), ""), num_tokens)


def unclean_ends(texts: Sequence[bytes], marker: str) -> tuple[list[int], dict[str, NDArray[np.int64]]]:
    """Tokens, by their `texts`, that hold a marker and more than white space behind it; and by beginnings of the marker, those that hold
    the rest of it and so much behind it."""
    whole = marker.encode()
    rests: defaultdict[bytes, list[tuple[str, bytes]]] = defaultdict(list)  # by their first byte, with what comes before
    for cut in range(1, len(marker)):
        rest = marker[cut:].encode()
        rests[rest[:1]].append((marker[:cut], rest))
    ends: list[int] = []
    ends_behind: defaultdict[str, list[int]] = defaultdict(list)
    for token_id, text in enumerate(texts):
        if whole in text and text.partition(whole)[2].strip():
            ends.append(token_id)
        for begin, rest in rests.get(text[:1], ()):
            if text.startswith(rest) and text[len(rest) :].strip():
                ends_behind[begin].append(token_id)
    return ends, {begin: np.array(ids, np.int64) for begin, ids in ends_behind.items()}
