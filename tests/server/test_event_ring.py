"""The ring of events of a resumable stream, against a list that forgets nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.api.errors import InvalidRequestError
from aengine.server.core.errors import ServiceError
from aengine.server.core.resume import EVENT_BYTES, EventRing

LIMIT = 8 * (EVENT_BYTES + 30)


@given(st.lists(st.one_of(st.binary(max_size=40), st.just(bytes(LIMIT)), st.integers(1, 9), st.tuples(st.integers(0, 60))), max_size=80))
def test_the_ring_keeps_what_was_not_sent_and_stays_in_bounds(moves: list[bytes | int | tuple[int]]) -> None:
    """Moves: bytes are appended where there is room, an integer takes so many events, a tuple seeks."""
    ring = EventRing(max_events=8, max_bytes=LIMIT)
    model: list[bytes] = []
    position = first = 0
    for move in moves:
        if isinstance(move, bytes):
            if ring.has_room:
                model.append(move)
                ring.append(move)
            else:
                assert position < len(model)  # or it would stand still for ever
        elif isinstance(move, int):
            assert ring.take_events(move) == model[position : position + move]
            position = min(position + move, len(model))
        else:
            (number,) = move
            error = ServiceError if number < ring.first else InvalidRequestError if number > len(model) else None
            if error is None:
                ring.seek(number)
                position = number
            else:
                with pytest.raises(error):
                    ring.seek(number)
        assert (ring.end, ring.position) == (len(model), position)
        assert first <= ring.first <= position
        first = ring.first
        assert ring.end - ring.first <= 8
        sizes = [len(event) + EVENT_BYTES for event in model[ring.first :]]
        assert ring.num_bytes == sum(sizes) < LIMIT + max(sizes, default=0) + 1
