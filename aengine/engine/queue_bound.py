"""How much may wait. Counts the sequences that have not been admitted to a first step, and their prompt tokens, in the event loop."""

from __future__ import annotations

from collections.abc import Iterable

from aengine.errors import QueueFullError


class QueueBound:
    def __init__(self, max_sequences: int | None, max_tokens: int | None) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._waiting: dict[int, int] = {}  # key of a sequence -> prompt tokens that nothing else counts
        self._num_tokens = 0

    def enter(self, keys: range) -> None:
        """The sequences of a request wait; its tokens are not known yet. Raises `QueueFullError`, and then they are not counted."""
        waiting = len(self._waiting)
        if self._max_sequences is not None and waiting and waiting + len(keys) > self._max_sequences:
            raise QueueFullError(
                f"{waiting} sequences wait already, and this request has {len(keys)}; max_queued_requests is {self._max_sequences}"
            )
        self._waiting.update(dict.fromkeys(keys, 0))

    def add_tokens(self, keys: range, num_tokens: int) -> None:
        """These are the prompt of sequences that wait. Raises `QueueFullError`."""
        alone = len(self._waiting) == len(keys)
        if self._max_tokens is not None and not alone and self._num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"{self._num_tokens} prompt tokens wait already; {num_tokens} more would exceed max_queued_tokens ({self._max_tokens})"
            )
        self._waiting[keys[0]] = num_tokens
        self._num_tokens += num_tokens

    def leave(self, keys: Iterable[int]) -> None:
        """The sequences were admitted, or are gone."""
        for key in keys:
            self._num_tokens -= self._waiting.pop(key, 0)
