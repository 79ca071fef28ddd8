"""What an engine is to its user, wherever it runs: `AsyncEngine` in this process, or `AsyncClient` in front of a server.

Code that is written against these two serves both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from aengine.chat_prompts import ChatFields
from aengine.outputs import Completion, Embedding, ModelInfo
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

    async def embed(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        **fields: Unpack[OptionFields],
    ) -> Embedding:
        """The embedding of a prompt. `fields` are those of `options`, the others those of `EmbeddingParams`. Cancelling the caller cancels
        the request. Raises what `stream()` and its iteration raise, and `RequestEndedError` if the request is cancelled by its id or its
        timeout passes."""

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False) -> list[int]:
        """The ids of a text; by default with the special tokens that a prompt of this text gets. `for_prompt`: one that is too long for a
        prompt may be refused as `stream` refuses it, before all of it is tokenized."""

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> str:
        """A conversation as the model's chat template writes it; `fields` are those of `ChatOptions`. Its ids, without special tokens that
        are added, are those of the prompt that the messages make."""
