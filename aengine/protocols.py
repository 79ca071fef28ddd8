"""What an engine is to its user, wherever it runs: `AsyncEngine` in this process, or `AsyncClient` in front of a server.

Code that is written against these two serves both.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from aengine.outputs import Completion, ModelInfo
from aengine.params import SamplingParams
from aengine.requests import OptionFields, Prompt, RequestOptions
from aengine.stream_base import StreamProtocol, read_to_end

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


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
        return await read_to_end(self.stream(prompt, params, options, **fields))

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
