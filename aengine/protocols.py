"""What an engine is to its user, wherever it runs: `AsyncEngine` in this process, `AsyncClient` in front of a server, or `Router` in front
of several; and what it is to a server, which serves the first and the last.

Code that is written against these serves all of them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from aengine.chat_prompts import ChatFields
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.outputs import (
    AdapterInfo,
    CachedPages,
    Completion,
    Embedding,
    EngineInfo,
    EngineStats,
    MemoryUse,
    ModelInfo,
    ReplicaInfo,
    RequestInfo,
    TokenizedText,
)
from aengine.params import SamplingParams
from aengine.requests import OptionFields, Prompt, RequestOptions
from aengine.served_stream import ServedStream
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


class ServedEngine(EngineProtocol, Protocol):
    """An engine as a server serves it. All is done in the loop that started it."""

    async def wait_stopped(self) -> None:
        """Wait until the engine no longer runs. Raises `EngineDeadError` if it died rather than being closed."""

    @property
    def engine_info(self) -> EngineInfo:
        """What limits requests. Raises `EngineStateError` before `start()`."""

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that are loaded, which requests can name. Raises `EngineStateError` before `start()`."""

    def stats(self) -> EngineStats:
        """What the engine holds now; of a router the sum of its replicas."""

    def watch_pages(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        """Which pages are cached, by their `published_digest` under `salt`: at first a snapshot of at most so many, which may go on in
        further items, then what has changed. None: nothing is known yet, or nothing has changed; items do not wait for a change. Raises
        `InvalidRequestError` if the engine has no cache of its own."""
        raise InvalidRequestError.of("page_digests", "the prefix caches are those of the replicas behind this server")

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Those of a router."""

    async def drain_replica(self, name: str) -> int:
        """Send nothing more to a replica, and have its requests go on elsewhere; returns how many those were. Raises
        `InvalidRequestError` for a name that none has."""

    # ---- requests ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> ServedStream: ...

    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        """All that is wrong with a request, as far as it shows without tokenizing texts: what `stream` would say, and what it would find
        in compiling a grammar or reasoning."""

    def request_info(self, request_id: str) -> RequestInfo | None:
        """How far a request has come; None once the engine has forgotten it, or for an id that it never had."""

    # ---- texts ---------------------------------------------------------------------------------------------------------

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `offsets` where the tokenizer
        cannot tell places."""

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Raises `InvalidRequestError` for ids that the model does not have."""

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """What each token stands for by itself, by its id."""

    # ---- operation -----------------------------------------------------------------------------------------------------

    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no request holds; returns how many pages that freed."""

    async def pause(self, *, cancel: bool = False) -> int:
        """Stop computing; returns when no step runs. Requests are still accepted, and wait; cancellations and deadlines still hold. With
        `cancel` the requests in flight are cancelled; returns how many those were."""

    async def unpause(self) -> None:
        """Compute again."""

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """Give memory back until `wake()`, as `AsyncEngine.sleep` describes it."""

    async def wake(self) -> MemoryUse:
        """End a sleep."""

    async def update_weights(self, source: str, running: str = "keep") -> int:
        """Replace the weights by those of a directory, as `AsyncEngine.update_weights` describes it; returns how often that was done."""

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter, as `AsyncEngine.load_adapter` describes it."""

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, when the requests that use it have ended."""
