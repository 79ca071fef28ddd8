"""An asyncio loop per test, in a process where gRPC has one poller for all of them.

An event of a call goes to whichever loop reads it first, which hands it to the loop of the call. Where that one is closed, it raises in the
other, in a test that has nothing to do with it. It is dropped instead: nobody waits in a loop that is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


class GrpcLoop(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        if self.is_closed() and str(getattr(callback, "__module__", "")).startswith("grpc."):
            return asyncio.Handle(callback, args, self, context)  # that never runs
        return super().call_soon_threadsafe(callback, *args, context=context)


ASYNCIO = ("asyncio", {"loop_factory": GrpcLoop})
"""What a fixture `anyio_backend` returns."""
