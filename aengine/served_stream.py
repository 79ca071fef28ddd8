"""`ServedStream`: a stream as a server reads it: several tokens at a time, by a callback, and what it tells of its request.

Knows nothing of where tokens come from: an engine in this process, or a replica of a router.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable

import anyio

from aengine.errors import EngineStateError
from aengine.outputs import RequestInfo, Token
from aengine.params import SamplingParams
from aengine.stream_base import TWO_READERS, StreamProtocol, StreamSource


class ServedSource(StreamSource):
    """The source of a `ServedStream`. `params` have every default filled in."""

    @property
    @abstractmethod
    def unread(self) -> int:
        """How many tokens `pop()` has."""

    @property
    @abstractmethod
    def gone(self) -> bool:
        """Whether nothing is left of the request: its pages are free, and so is its id."""

    @abstractmethod
    def info(self) -> RequestInfo:
        """How far the request has come, also once it is `gone`."""


class ServedStream(StreamProtocol):
    """The tokens of one request."""

    _source: ServedSource

    @property
    def effective_params(self) -> SamplingParams:
        """The parameters in use: what was given, with the defaults of model and engine, and the seed, filled in."""
        return self._source.params

    @property
    def gone(self) -> bool:
        """Whether the engine has forgotten the request: its pages are free, and so is its id."""
        return self._source.gone

    def info(self) -> RequestInfo:
        """How far the request has come, also when the engine has nothing of it any more."""
        return self._source.info()

    def cancel(self) -> None:
        """Cancel the request unless it has ended, without waiting. Its unread tokens can still be read, up to its end with
        FinishReason.CANCELLED."""
        self._source.cancel()

    # ---- several tokens at a time --------------------------------------------------------------------------------------

    @property
    def is_started(self) -> bool:
        """Whether `started()` would return at once."""
        return self._source.ready.is_set() and self._source.error is None

    @property
    def unread(self) -> int:
        """How many tokens can be read without waiting."""
        return self._source.unread

    @property
    def has_news(self) -> bool:
        """Whether `take()` would bring tokens or raise."""
        return not self.ended and (self._source.unread > 0 or self._source.error is not None)

    async def read(self, most: int = sys.maxsize) -> list[Token]:
        """Wait for at least one token; returns what is there, `most` tokens of it. Empty at the end of the stream."""
        while not (tokens := self.take(most)) and not self.ended:
            await self._wait()
        return tokens

    def take(self, most: int = sys.maxsize) -> list[Token]:
        """What can be read without waiting, `most` tokens of it. Raises the error that the stream failed with, after the tokens
        before it."""
        tokens: list[Token] = []
        while len(tokens) < most and (token := self._pop()) is not None:
            tokens.append(token)
        if not tokens:
            self._goes_on()
        return tokens

    async def linger(self, count: int, seconds: float) -> None:
        """Wait until `count` tokens can be read without waiting, or nothing more will come, or `seconds` have passed."""
        source = self._source
        with anyio.move_on_after(seconds):
            while source.unread < count and not source.finished:
                await self._wait(cancels=False)

    def attach(self, waiter: Callable[[], object] | None) -> None:
        """Have `waiter` called whenever there is something new to take, in place of a reading task; None ends that."""
        if waiter is not None and self._source.waiter is not None:
            raise EngineStateError(TWO_READERS)
        self._source.waiter = waiter
