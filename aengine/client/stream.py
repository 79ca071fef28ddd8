"""`ClientStream`: what a user of the client iterates."""

from __future__ import annotations

from aengine.client.active_request import ActiveRequest
from aengine.stream_base import StreamProtocol


class ClientStream(StreamProtocol):
    """The tokens of one request, as they come from the server.

    `aclose()` returns when the server has confirmed that the request is cancelled, or after some seconds. A reader that lags far behind
    parks the request on the server until it catches up. Cached prompt tokens and the timing are known at the end.
    """

    _source: ActiveRequest

    def __del__(self) -> None:
        if hasattr(self, "_source"):
            self._source.drop()
