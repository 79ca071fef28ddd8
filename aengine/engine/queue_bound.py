"""How many sequences may wait for their first step, and how many tokens of them. Counted in the event loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aengine.errors import QueueFullError


class QueueBound:
    def __init__(self, max_sequences: int | None, max_tokens: int | None) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._waiting: dict[int, int] = {}  # key of a sequence -> tokens of prompt and known outputs, counted once per request
        self._num_tokens = 0

    def enter(self, keys: Sequence[int]) -> None:
        """Count the sequences of a request, whose tokens are not known yet. Raises `QueueFullError`, and then counts none."""
        waiting = len(self._waiting)
        if self._max_sequences is not None and waiting and waiting + len(keys) > self._max_sequences:
            raise QueueFullError(
                f"{waiting} sequences wait already, and this request has {len(keys)}; max_queued_requests is {self._max_sequences}"
            )
        self._waiting.update(dict.fromkeys(keys, 0))

    def add_tokens(self, keys: Sequence[int], num_tokens: int) -> None:
        """Count the tokens of a request that was entered. Raises `QueueFullError`."""
        alone = len(self._waiting) == len(keys)
        if self._max_tokens is not None and not alone and self._num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"{self._num_tokens} tokens wait already; {num_tokens} more would exceed max_queued_tokens ({self._max_tokens})"
            )
        self._waiting[keys[0]] = num_tokens
        self._num_tokens += num_tokens

    def leave(self, keys: Iterable[int]) -> None:
        """Sequences were admitted to a step, or have ended."""
        for key in keys:
            self._num_tokens -= self._waiting.pop(key, 0)
