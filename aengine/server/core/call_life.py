"""`CallLife`: what every call goes through, whichever protocol it comes by. It is counted, its headers are bounded, its caller is
authorised, what its handler raises becomes a `ServiceError`, and its record is passed on once.

Owns the order of these. Must not know how a protocol reads a request or writes a response; that waits for the client show in `Call.waits`,
which `CallsInFlight` watches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from aengine.api.runtime import forget_tracebacks
from aengine.server.core.auth import Authenticator, CertificateName
from aengine.server.core.calls_in_flight import (
    CURRENT_CALL,
    REQUEST_ID_KEY,
    Call,
    CallsInFlight,
    Observers,
    notify,
    request_id_of,
    trace_id_of,
)
from aengine.server.core.errors import ServiceError, describe


class CallLife:
    def __init__(self, authenticator: Authenticator, calls: CallsInFlight, observers: Observers, max_header_bytes: int) -> None:
        self._authenticator = authenticator
        self._calls = calls
        self._observers = observers
        self._max_header_bytes = max_header_bytes

    def begin(
        self,
        method: str,
        peer: str,
        header: Callable[[str], Sequence[str]],
        num_bytes: int,
        *,
        is_apart: bool = False,
        is_polled: bool = False,
    ) -> Call:
        """The call that this task runs from here on. `header` gives the values of a header; all of them have `num_bytes`, and where those
        are more than is allowed, the ids in them are not looked at."""
        values = header if num_bytes <= self._max_header_bytes else _no_values
        request_id, trace_id = request_id_of(values(REQUEST_ID_KEY)), trace_id_of(values("traceparent"))
        call = Call(method, peer, request_id, trace_id, is_polled=is_polled, is_apart=is_apart)
        CURRENT_CALL.set(call)
        return call

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """Around all that is done for the call: afterwards it counts no more, and nothing of its message is kept."""
        try:
            yield
        finally:
            call.answered()
            self._calls.discard(call)

    def admit(self, call: Call, num_bytes: int) -> None:
        """Count the call among those in flight. Raises `ServiceError`: TOO_MANY_CALLS, or METADATA_TOO_LARGE for `num_bytes` of headers."""
        self._calls.add_call(call)
        if num_bytes > self._max_header_bytes:
            raise ServiceError("METADATA_TOO_LARGE", f"{num_bytes} bytes of headers are more than {self._max_header_bytes}")

    async def authorize(
        self, call: Call, authorization: Sequence[str], certificate: CertificateName | None, *, administrates: bool = False
    ) -> None:
        """Find out who makes the call. Raises what `Authenticator.authorize` raises."""
        call.caller = await self._authenticator.authorize(authorization, certificate, administrates=administrates)

    def fail(self, error: Exception, *, answered: bool) -> ServiceError:
        """What the client is told of an `error` of a handler; `answered`: whether it may have a part of the answer."""
        failure = describe(error, answered=answered)
        forget_tracebacks(error)  # they hold the message, and the call, which holds them: both would stay until garbage is collected
        return failure

    def end_call(self, call: Call, code: str, reason: str = "") -> None:
        """Complete the record of the call, and pass it on: before the client learns how it ended. Only the first time counts."""
        if call.code:
            return
        call.code, call.reason, call.seconds = code, reason, time.monotonic() - call.start
        if not call.is_apart:
            notify(self._observers.on_call_end, call)


def _no_values(name: str) -> Sequence[str]:
    return ()
