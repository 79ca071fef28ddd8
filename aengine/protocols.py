"""What an engine is to its user, wherever it runs: `AsyncEngine` in this process, or `AsyncClient` in front of a server.

Code that is written against these two serves both.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from aengine.outputs import Completion, ModelInfo, Timing, Token, Usage
from aengine.params import SamplingParams
from aengine.requests import OptionFields, Prompt, RequestOptions

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class StreamProtocol(Protocol):
    """The tokens of one request, as they are generated: an async iterator and an async context manager.

    Abandoning it in any way (leaving its `async with`, `break` and dropping it, cancelling the task that reads it, `aclose()`)
    cancels the request. It has one reader at a time: a second one gets `EngineStateError`, and the first reads on.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def seed(self) -> int:
        """The seed in use: the given one, or a random one."""

    @property
    def usage(self) -> Usage:
        """Token counts so far; completion tokens are those that were read."""

    @property
    def timing(self) -> Timing:
        """How long its phases took, as far as that is known."""

    def completion(self) -> Completion:
        """What was read so far; the whole output once the iteration has ended. After `aclose()` a sequence whose end was not read was
        CANCELLED, and after the stream has raised its finish reason is ERROR."""

    async def started(self) -> None:
        """Wait until the prompt is tokenized and found valid. Raises what the stream would raise."""

    async def aclose(self) -> None:
        """Cancel the request unless it has ended; returns when its pages are free. Repeated calls do nothing.

        Unread tokens are dropped: further reading gives the end of each sequence, with FinishReason.CANCELLED.
        """

    async def __aenter__(self) -> StreamProtocol: ...

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None: ...

    def __aiter__(self) -> StreamProtocol: ...

    async def __anext__(self) -> Token: ...


class EngineProtocol(Protocol):
    """Takes requests between `start()` and `aclose()`; it is started once and belongs to the loop that started it."""

    async def start(self) -> None: ...

    async def aclose(self) -> None:
        """Cancel what runs here and stop."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    @property
    def healthy(self) -> bool:
        """Whether requests are being served."""

    @property
    def model_info(self) -> ModelInfo:
        """What is served. Raises `EngineStateError` before `start()`."""

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> StreamProtocol:
        """Submit a request at once; iterate the result for its tokens. `fields` are those of `options`. What is wrong with the request is
        raised here, or by the first iteration and by `StreamProtocol.started()`."""

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """`stream()`, read to its end. Cancelling the caller cancels the request."""
        async with self.stream(prompt, params, options, **fields) as stream:
            async for _ in stream:
                pass
            return stream.completion()

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
