"""How much may wait. Counts the requests that have not been admitted to a first step, and their prompt tokens, in the event loop."""

from __future__ import annotations

from aengine.errors import QueueFullError


class QueueBound:
    def __init__(self, max_requests: int | None, max_tokens: int | None) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting: dict[int, int] = {}  # key -> prompt tokens
        self._num_tokens = 0

    def enter(self, key: int, num_tokens: int) -> None:
        """A request waits; or is counted anew, once its tokens are known. Raises `QueueFullError`, and then it is not counted."""
        self.leave(key)
        if self._max_requests is not None and len(self._waiting) >= self._max_requests:
            raise QueueFullError(f"{len(self._waiting)} requests wait already; max_queued_requests is {self._max_requests}")
        if self._max_tokens is not None and self._waiting and self._num_tokens + num_tokens > self._max_tokens:
            raise QueueFullError(
                f"{self._num_tokens} prompt tokens wait already; {num_tokens} more would exceed max_queued_tokens ({self._max_tokens})"
            )
        self._waiting[key] = num_tokens
        self._num_tokens += num_tokens

    def leave(self, key: int) -> None:
        """The request was admitted, or is gone."""
        self._num_tokens -= self._waiting.pop(key, 0)
