"""Output that a sequence has before its first step: where it leaves the sequence's text, its reasoning and its grammar.

Pure functions in steps for a worker thread; what they find is what the tokens would have left behind had they been generated here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aengine.checks import shown
from aengine.engine.output_text import OutputText
from aengine.engine.workers import Steps
from aengine.errors import InvalidRequestError
from aengine.sampling.markers import Phase, ReasoningMarkers, ReasoningPlace

if TYPE_CHECKING:
    from aengine.sampling.grammar import Compiled

_STEP_TOKENS = 512
"""Some milliseconds of work."""


class OutputPlace(NamedTuple):
    """Where a sequence is."""

    text: OutputText | None  # None where nothing is decoded
    reasoning: ReasoningPlace | None  # None without markers


def follow_outputs(
    known: Mapping[int, NDArray[np.int32]],
    new_text: Callable[[], OutputText | None],
    markers: ReasoningMarkers | None,
    grammar: Compiled | None,
    stop_ids: Collection[int],
) -> Steps[dict[int, OutputPlace]]:
    """The places of the sequences that have output, by index. `known`: the ids that each has.

    Raises `InvalidRequestError` (known_outputs) for tokens behind which a sequence does not go on: one of `stop_ids`, a stop string, or
    what its grammar or reasoning does not allow.
    """
    places: dict[int, OutputPlace] = {}
    left = sum(map(len, known.values()))
    for index, ids in known.items():
        ending = np.flatnonzero(np.isin(ids, list(stop_ids)))
        if len(ending):
            raise _refused(index, f"token {int(ids[ending[0]])} ends it; give None for a sequence that has ended")
        text, place = new_text(), None if markers is None else markers.start()
        matcher = None if grammar is None else grammar.start()
        for begin in range(0, len(ids), _STEP_TOKENS):
            for token in ids[begin : begin + _STEP_TOKENS].tolist():
                if text is not None:
                    text.push(token)
                    if text.stopped is not None:
                        raise _refused(
                            index, f"its text has the stop string {shown(text.stopped)}; give None for a sequence that has ended"
                        )
                if markers is not None and place is not None and place.phase is not Phase.ANSWER:
                    place = markers.behind(place, token)
                try:
                    if matcher is not None and matcher.accept(token):
                        matcher = None
                except InvalidRequestError as error:
                    raise _refused(index, error.violations[0].description) from error
            yield left - begin
        left -= len(ids)
        places[index] = OutputPlace(text, place)
    return places


def _refused(index: int, why: str) -> InvalidRequestError:
    return InvalidRequestError.of("known_outputs", f"entry {index}: {why}")
