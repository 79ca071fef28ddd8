"""`ClientStream`: what a user of the client iterates."""

from __future__ import annotations

from aengine.client.active_request import ActiveRequest
from aengine.stream_base import StreamBase


class ClientStream(StreamBase[ActiveRequest]):
    """The tokens of one request, as they come from the server: an async iterator and an async context manager.

    Abandoning it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. `aclose()` returns when the server has confirmed that, or after some seconds. A stream has one reader at a time;
    one that lags far behind parks the request on the server until it catches up. With n > 1 the tokens of the sequences come interleaved;
    `Token.index` tells which one a token belongs to. Cached prompt tokens and the timing are known at the end.
    """

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._source.drop()
