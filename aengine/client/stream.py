"""`ClientStream`: what a user of the client iterates. Owns what was read so far, and the promises about leaving a stream.

When the user lets go of it in any way, the request is cancelled. Must not know channels or messages.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from aengine.answers import TWO_READERS, Answers
from aengine.client.flight import Flight
from aengine.errors import EngineStateError
from aengine.outputs import Completion, FinishReason, Timing, Token, Usage
from aengine.params import SamplingParams
from aengine.protocols import StreamProtocol


class ClientStream:
    """The tokens of one request, as they come from the server: an async iterator and an async context manager.

    Letting go of it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A stream has one reader at a time; one that lags far behind parks the request on the server until it catches
    up. With n > 1 the tokens of the sequences come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, flight: Flight, params: SamplingParams, seed: int) -> None:
        self._flight = flight
        self._arrivals = flight.arrivals
        self._params = params
        self._seed = seed
        self._answers = Answers(params)
        self._failed = False  # the reader was told the error

    def __del__(self) -> None:
        flight = getattr(self, "_flight", None)
        if flight is not None:
            flight.drop()

    @property
    def request_id(self) -> str:
        return self._flight.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or the one that was drawn."""
        return self._seed

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read. Cached prompt tokens are known at the end."""
        return Usage(self._arrivals.prompt_tokens, self._arrivals.cached_prompt_tokens, self._answers.num_tokens)

    @property
    def timing(self) -> Timing:
        """How long its phases took on the server, known at the end."""
        return self._arrivals.timing

    def completion(self) -> Completion:
        """What was read so far, as one answer; the whole answer once the iteration has ended. After `aclose()` a sequence whose end was
        not read was CANCELLED, and after the stream has raised its finish reason is ERROR."""
        wants_prompt = self._params.prompt_logprobs is not None
        return self._answers.completion(self.usage, self._arrivals.prompt_logprobs if wants_prompt else None)

    async def started(self) -> None:
        """Wait until the server has tokenized the prompt and found it valid. Raises what the stream would raise."""
        await self._arrivals.started.wait()
        if self._arrivals.error is not None:
            raise self._arrivals.error

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free, or the server does not answer for some seconds.
        Repeated calls do nothing.

        What was not read is dropped: whoever reads on gets the end of each sequence, with FinishReason.CANCELLED.
        """
        self._answers.cut(FinishReason.CANCELLED)
        self._flight.cancel()
        self._arrivals.leave(sorted(self._answers.open))
        if not self._flight.landed:
            await self._flight.land()

    async def __aenter__(self) -> ClientStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> Token:
        arrivals = self._arrivals
        while not arrivals.tokens:
            if self._failed or (arrivals.over and arrivals.error is None):
                raise StopAsyncIteration
            if arrivals.error is not None:
                self._failed = True
                self._answers.cut(FinishReason.ERROR)
                raise arrivals.error
            await self._wait()
        token = arrivals.pop()
        self._answers.add(token)
        return token

    async def _wait(self) -> None:
        """For something new. Cancelling the reading task cancels the request."""
        arrivals = self._arrivals
        if arrivals.waiter is not None:
            raise EngineStateError(TWO_READERS)
        news = arrivals.waiter = asyncio.Event()
        try:
            await news.wait()
        except BaseException:
            self._flight.cancel()
            raise
        finally:
            arrivals.waiter = None


_CONFORMS: type[StreamProtocol] = ClientStream
