"""`ClientStream`: what a user of the client iterates. Owns what was read so far, and that dropping a stream cancels its request. Must not
know channels or messages.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from aengine.answers import TWO_READERS, Answers
from aengine.client.active_request import ActiveRequest
from aengine.errors import EngineStateError
from aengine.outputs import Completion, FinishReason, Timing, Token, Usage
from aengine.params import SamplingParams
from aengine.protocols import StreamProtocol


class ClientStream:
    """The tokens of one request, as they come from the server: an async iterator and an async context manager.

    Abandoning it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. A stream has one reader at a time; one that lags far behind parks the request on the server until it catches
    up. With n > 1 the tokens of the sequences come interleaved; `Token.index` tells which one a token belongs to.
    """

    def __init__(self, request: ActiveRequest, params: SamplingParams) -> None:
        """`params` have a seed."""
        self._request = request
        self._params = params
        self._answers = Answers(params)
        self._failed = False  # the reader has got the error

    def __del__(self) -> None:
        if hasattr(self, "_request"):
            self._request.drop()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or a random one."""
        assert self._params.seed is not None
        return self._params.seed

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read. Cached prompt tokens are known at the end."""
        return Usage(self._request.prompt_tokens, self._request.cached_prompt_tokens, self._answers.num_tokens)

    @property
    def timing(self) -> Timing:
        """How long its phases took on the server, known at the end."""
        return self._request.timing

    def completion(self) -> Completion:
        """What was read so far; the whole output once the iteration has ended. After `aclose()` a sequence whose end was
        not read was CANCELLED, and after the stream has raised its finish reason is ERROR."""
        wants_prompt = self._params.prompt_logprobs is not None
        return self._answers.completion(self.usage, self._request.prompt_logprobs if wants_prompt else None)

    async def started(self) -> None:
        """Wait until the server has tokenized the prompt and found it valid. Raises what the stream would raise."""
        await self._request.started.wait()
        if self._request.error is not None:
            raise self._request.error

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free, or after some seconds without the server's word.
        Repeated calls do nothing.

        Unread tokens are dropped: further reading gives the end of each sequence, with FinishReason.CANCELLED.
        """
        self._answers.cut(FinishReason.CANCELLED)
        self._request.discard(sorted(self._answers.open))
        await self._request.aclose()

    async def __aenter__(self) -> ClientStream:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> Token:
        request = self._request
        while not request.tokens:
            if request.error is not None and not self._failed:
                self._failed = True
                self._answers.cut(FinishReason.ERROR)
                raise request.error
            if request.ended:
                raise StopAsyncIteration
            await self._wait()
        token = request.pop()
        self._answers.add(token)
        return token

    async def _wait(self) -> None:
        """For the next token or the end. Cancelling the reading task cancels the request."""
        request = self._request
        if request.waiter is not None:
            raise EngineStateError(TWO_READERS)
        waiter = request.waiter = asyncio.Event()
        try:
            await waiter.wait()
        except BaseException:
            request.cancel()
            raise
        finally:
            request.waiter = None


_CONFORMS: type[StreamProtocol] = ClientStream
