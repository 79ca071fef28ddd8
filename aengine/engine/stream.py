"""`TokenStream`: what a user of an engine iterates. Must not know schedulers or threads."""

from __future__ import annotations

from aengine.engine.stream_state import StreamState
from aengine.served_stream import ServedStream


class TokenStream(ServedStream):
    """The tokens of one request of this process's engine. A reader that lags by more than `max_unread_tokens` parks the request until it
    catches up."""

    _source: StreamState
