"""`EngineBase`: what an engine is to its user, wherever it runs: `AsyncEngine` in this process, `AsyncClient` in front of a server, or
`Router` in front of several. `ServedEngine`: what it is to a server, which serves the first and the last.

Code that is written against these serves all of them. Owns the signatures of requests, which each engine takes by `_open` and `_embed`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import anyio
import numpy as np
from numpy.typing import NDArray

from aengine.api.dataclass import dataclass
from aengine.api.errors import FieldViolation, InvalidRequestError
from aengine.api.fields import shown
from aengine.api.outputs import (
    AdapterInfo,
    CachedPages,
    Completion,
    Embedding,
    EngineInfo,
    EngineStats,
    KVPage,
    MemoryUse,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    RequestInfo,
    Score,
    StoredKV,
    TokenizedText,
)
from aengine.api.params import SamplingParams
from aengine.api.request import ChatFields, ForkPoint, OptionFields, Prompt, RequestOptions, check_params
from aengine.api.stream import StreamSource, TokenStream, read_to_end

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


T = TypeVar("T")


async def run_all(
    work: Sequence[Callable[[], Awaitable[T]]], most: int = sys.maxsize, done: Callable[[T], object] = lambda result: None
) -> list[T]:
    """What all of it gives, in its order, `most` at a time. `done` is called with each result as it comes. The first that raises cancels
    the others, and its error is what is raised."""
    left, found = enumerate(work), dict[int, T]()
    failures: list[Exception] = []

    async def run(scope: anyio.CancelScope) -> None:
        for index, function in left:
            try:
                found[index] = await function()
            except Exception as error:
                failures.append(error)
                scope.cancel()
                return
            done(found[index])

    async with anyio.create_task_group() as group:
        for _ in range(min(most, len(work))):
            group.start_soon(run, group.cancel_scope)
    if failures:
        raise failures[0]
    return [found[index] for index in range(len(found))]


def output_of_fork(point: ForkPoint, outputs: Sequence[Sequence[int]]) -> tuple[list[int], int]:
    """The output that a fork begins with, of a request with these, and how many tokens of it are shared. Raises `InvalidRequestError`
    (index, at) where there is no such place."""
    if not 0 <= point.index < len(outputs):
        raise InvalidRequestError.of("index", f"{point.index} is not in [0, {len(outputs) - 1}]")
    output = outputs[point.index]
    if point.at is not None and not 0 <= point.at <= len(output):
        raise InvalidRequestError.of("at", f"{point.at} is not in [0, {len(output)}], the tokens that the request has so far")
    shared = output[: point.at]
    return [*shared, *point.then], len(shared)


def refuse_history(keep_history: str) -> None:
    """Raises `InvalidRequestError` (keep_history) where the engine that has the ids of sessions is another one."""
    if keep_history != "text":
        raise InvalidRequestError.of("keep_history", "'ids' is for the engine itself and for chats that its server renders")


def not_forkable(request_id: str, *, is_known: bool) -> InvalidRequestError:
    """Make the error of a fork of a request that has no tokens yet, or that is not known."""
    why = "cannot be forked: its prompt is not tokenized yet" if is_known else "is not known, or has ended too long ago"
    return InvalidRequestError.of("prompt", f"request {shown(request_id)} {why}")


def seeded(prompt: Prompt, params: SamplingParams | None) -> SamplingParams:
    """The parameters of a request that is sent on: with a seed, so that a second attempt has the same one; those of a fork that has the
    parameters of its source only say what is told of tokens."""
    given = check_params(params)
    return given.only_told() if isinstance(prompt, ForkPoint) and prompt.same_params else given.with_seed()


class EmbeddingFields(TypedDict, total=False):
    """The fields of `EmbeddingParams` as keyword arguments."""

    pooling: str | None
    normalize: bool
    dimensions: int | None
    layers: tuple[int, ...]
    first_token: int
    experts: bool


@dataclass(frozen=True, slots=True)
class Classification:
    """What a model that classifies says of a text."""

    labels: tuple[str, ...]
    scores: NDArray[np.float32]  # of each label, before they are made probabilities
    num_tokens: int

    @property
    def probabilities(self) -> list[float]:
        """How likely each of the labels is: together 1, unless there is but one."""
        scores = self.scores.astype(float)
        if len(scores) == 1:
            return [float(1 / (1 + np.exp(-scores[0])))]
        powers = np.exp(scores - scores.max())
        return [float(one) for one in powers / powers.sum()]

    @property
    def label(self) -> str:
        """The most likely one."""
        return self.labels[int(self.scores.argmax())]


class EngineBase(ABC):
    """Takes requests between `start()` and `aclose()`; it is started once and belongs to the loop that started it."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None:
        """Cancel what runs here and stop."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """Whether the engine is serving requests now."""

    @property
    @abstractmethod
    def model_info(self) -> ModelInfo:
        """What is served. Raises `EngineStateError` before `start()`."""

    # ---- requests ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def _open(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions | None,
        fields: OptionFields,
        *,
        whole: bool,
    ) -> StreamSource:
        """Submit a request for `stream()`, or with `whole` for `generate()`, whose caller sees no single token."""

    @abstractmethod
    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        """Submit a request for `embed()`, and wait for what it gives."""

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> TokenStream:
        """Submit a request at once; iterate the result for its tokens.

        `prompt`: text, token ids, chat messages (rendered with the model's chat template), or a `ForkPoint`. `options`, or `fields` of it
        as keyword arguments: `request_id`, `priority`, `tenant`, `timeout`, `cache_salt`, `adapter`, `known_outputs`; for chats `tools`,
        `add_generation_prompt`, `continue_final_message`, `template_kwargs` (see `RequestOptions`).

        Raises `InvalidRequestError`, `RequestIdInUseError`, `QueueFullError`, `EngineStateError` or `EngineDeadError`. What is not found
        at once is raised by the first iteration, and by `TokenStream.started()`: an engine tokenizes long texts and chats in the
        background, a client and a router ask their servers. These two cannot send `logits_processors`, and numbers have a precision of
        32 bits there.
        """
        return TokenStream(self._open(prompt, params, options, fields, whole=False))

    def fork(
        self,
        request_id: str,
        /,
        at: int | None = None,
        params: SamplingParams | None = None,
        *,
        index: int = 0,
        then: Sequence[int] = (),
        **fields: Unpack[OptionFields],
    ) -> TokenStream:
        """`TokenStream.fork` of a request by its id, which runs or has ended not long ago: the latest some thousand are remembered. `at`:
        None for all that it has so far. `params`: None for those of the sequence `index`, without logprobs."""
        return self.stream(ForkPoint(request_id, at, index, then, params is None), params, **fields)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        **fields: Unpack[OptionFields],
    ) -> Completion:
        """`stream()`, read to its end. Cancelling the caller cancels the request."""
        return await read_to_end(TokenStream(self._open(prompt, params, options, fields, whole=True)))

    async def embed(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        pooling: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        layers: tuple[int, ...] = (-1,),
        first_token: int = 0,
        experts: bool = False,
        **fields: Unpack[OptionFields],
    ) -> Embedding:
        """The embedding of a prompt. `fields` are those of `options`, the others those of `EmbeddingParams`. Cancelling the caller cancels
        the request. Raises what `stream()` and its iteration raise, and `RequestEndedError` if the request is cancelled by its id or its
        timeout passes. A client refuses `request_id`: an embedding ends with its call."""
        wanted = EmbeddingFields(pooling=pooling, normalize=normalize, dimensions=dimensions)
        return await self._embed(prompt, options, fields, {**wanted, "layers": layers, "first_token": first_token, "experts": experts})

    async def hidden_states(
        self,
        prompt: Prompt,
        options: RequestOptions | None = None,
        *,
        layers: tuple[int, ...] = (-1,),
        first_token: int = 0,
        experts: bool = False,
        **fields: Unpack[OptionFields],
    ) -> Embedding:
        """The hidden states of a prompt's tokens from `first_token` on, as `EmbeddingParams` says; `values` are [layers, tokens,
        hidden_size]. They are those that its tokens were sampled with. What precedes `first_token` may come of the prefix cache, so a long
        prompt can be asked for piece by piece. Raises what `embed` raises."""
        told = EmbeddingFields(pooling="tokens", normalize=False, layers=layers, first_token=first_token, experts=experts)
        return await self.embed(prompt, options, **told, **fields)

    async def classify(self, text: str | Sequence[int], pair: str | None = None, **fields: Unpack[OptionFields]) -> Classification:
        """The scores that a model which classifies gives a text, or token ids, or two texts together: `ModelInfo.labels` has what they are
        of. Raises what `embed` raises."""
        ids = await self.tokenize(text, pair=pair) if pair is not None and isinstance(text, str) else text
        found = await self.embed(ids, pooling="label", normalize=False, **fields)
        return Classification(self.model_info.labels, found.values, found.num_tokens)

    async def rerank(self, query: str, documents: Sequence[str], **fields: Unpack[OptionFields]) -> list[float]:
        """How well each document fits a query, the more the better. Of a model with one label it is how likely that is of both together;
        of one that makes embeddings the cosine of theirs. Raises what `embed` raises, and `InvalidRequestError` (model) for a model
        with several labels."""
        if len(labels := self.model_info.labels) > 1:
            raise InvalidRequestError.of("model", f"it tells {len(labels)} labels apart, and does not say how well two texts fit")
        if labels:
            whole = await run_all([partial(self.classify, query, document, **fields) for document in documents])
            return [one.probabilities[0] for one in whole]
        asked, *told = await run_all([partial(self.embed, text, **fields) for text in (query, *documents)])
        return [float(asked.values @ one.values) for one in told]

    async def score(
        self,
        prompt: str | Sequence[int],
        continuations: Sequence[str | Sequence[int]],
        *,
        top_logprobs: int = 0,
        **fields: Unpack[OptionFields],
    ) -> list[Score]:
        """How likely each of the texts or token ids is behind the prompt, which is computed once. What of a text's tokens is not as in the
        prompt alone counts as the text's, where the two make one token. `top_logprobs`: how many alternatives are told. `fields`: as of
        `stream`, of all. Cancelling the caller cancels the requests. Raises what `generate` raises; the first failure cancels the others,
        and `InvalidRequestError` (continuations) names an empty text.
        """
        own = await self._ids_of(prompt)
        return await run_all([partial(self._score, prompt, own, at, each, top_logprobs, fields) for at, each in enumerate(continuations)])

    async def _score(
        self,
        prompt: str | Sequence[int],
        own: list[int],
        index: int,
        continuation: str | Sequence[int],
        top_logprobs: int,
        fields: OptionFields,
    ) -> Score:
        if isinstance(prompt, str) and isinstance(continuation, str):
            whole = await self._ids_of(prompt + continuation)
        else:
            whole = [*own, *(await self._ids_of(continuation, is_whole=False))]
        start = 0
        while start < min(len(own), len(whole)) and own[start] == whole[start]:
            start += 1
        if start == len(whole) or not len(continuation):
            raise InvalidRequestError.of(f"continuations[{index}]", "has no token behind those of the prompt")
        if not start:
            raise InvalidRequestError.of("prompt", "has no token that the others could follow")
        told = {"prompt_logprobs": top_logprobs, "prompt_logprobs_from": start, "detokenize": False}
        done = await self.generate(whole, SamplingParams(max_tokens=1, temperature=0.0, **told), **fields)  # type: ignore[arg-type]
        assert done.prompt_logprobs is not None
        return Score(tuple([each for each in done.prompt_logprobs[start:] if each is not None]), done.usage)

    async def _ids_of(self, text: str | Sequence[int], *, is_whole: bool = True) -> list[int]:
        """The ids of a prompt, or of what is not the beginning of one."""
        return await self.tokenize(text, add_special_tokens=is_whole, for_prompt=True) if isinstance(text, str) else list(text)

    @abstractmethod
    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""

    @abstractmethod
    async def touch(self, session: str, tenant: str = "") -> int:
        """Say that a request of a session is about to come: what of its prefix has left memory for host memory or files comes back, and its
        time begins anew. Returns the number of tokens of its latest request, output included; 0 for a session that is not known."""

    @abstractmethod
    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        for_prompt: bool = False,
        literals: Sequence[tuple[int, int]] = (),
        pair: str | None = None,
    ) -> list[int]:
        """The ids of a text; by default with the special tokens that a prompt of this text gets. `for_prompt`: one that is too long for a
        prompt may be refused as `stream` refuses it, before all of it is tokenized. `literals`: as of `RenderedChat`. `pair`:
        the second of two texts that are one input of a model that compares them, with the special tokens around them."""

    @abstractmethod
    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str | None = None, tenant: str = "", **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        """A conversation as the model's chat template writes it; `fields` are those of `ChatOptions`, `session` is what `keep_history` is
        for. The ids that `tokenize` gives for its text and literals, without special tokens that are added, are those of the prompt that
        the messages make, behind its `history`."""


class ServedEngine(EngineBase):
    """An engine as a server serves it. All is done in the loop that started it."""

    @abstractmethod
    async def wait_stopped(self) -> None:
        """Wait until the engine no longer runs. Raises `EngineDeadError` if it died rather than being closed."""

    @property
    @abstractmethod
    def engine_info(self) -> EngineInfo:
        """What limits requests. Raises `EngineStateError` before `start()`."""

    @property
    @abstractmethod
    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The loaded adapters, which requests can name. Raises `EngineStateError` before `start()`."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """What the engine holds now; of a router the sum of its replicas."""

    def watch_pages(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        """Which pages are cached, by their `published_digest` under `salt`: at first a snapshot of at most so many, which may go on in
        further items, then what has changed. None: nothing is known yet, or nothing has changed; items do not wait for a change. Raises
        `InvalidRequestError` if the engine has no cache of its own."""
        raise InvalidRequestError.of("page_digests", "the prefix caches are those of the replicas behind this server")

    # ---- KV for other engines ------------------------------------------------------------------------------------------

    async def find_kv(self, token_ids: Sequence[int], *, cache_salt: str = "", adapter: str | None = None) -> StoredKV:
        """How much of a prompt's KV is kept in host memory or in files, with what has been computed of it by now. `token_ids`: of a prompt
        and the output behind it; of an image the numbers that its pages are called by."""
        raise InvalidRequestError.of("prefix", "KV is kept by the replicas behind this server")

    def export_kv(
        self, token_ids: Sequence[int], *, identity: str, cache_salt: str = "", adapter: str | None = None, skip_tokens: int = 0
    ) -> AsyncGenerator[KVPage, None]:
        """That KV, page by page, without that of the first `skip_tokens`: for `import_kv` of an engine whose `StoredKV.identity` is the
        same. Raises `EngineStateError` for another one, and for an engine that keeps none."""
        raise InvalidRequestError.of("prefix", "KV is kept by the replicas behind this server")

    async def import_kv(
        self, token_ids: Sequence[int], pages: AsyncIterable[KVPage], *, identity: str, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        """Keep KV that another engine has exported, so that the next request whose prompt begins with it finds it. What was damaged on its
        way is not kept, nor what is behind it. Returns the number of tokens whose pages have come. Raises what `export_kv` raises."""
        raise InvalidRequestError.of("prefix", "KV is kept by the replicas behind this server")

    @abstractmethod
    def replicas(self) -> tuple[ReplicaInfo, ...]:
        """The replicas of a router; none for an engine that is no router."""

    @abstractmethod
    async def drain_replica(self, name: str) -> int:
        """Send nothing more to a replica, and have its requests go on elsewhere; returns how many those were. Raises
        `InvalidRequestError` for a name that none has."""

    # ---- requests ------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        """All that is wrong with a request, as far as it shows without tokenizing texts: what `stream` would say, and what it would find
        in compiling a grammar or reasoning."""

    @abstractmethod
    def request_info(self, request_id: str) -> RequestInfo | None:
        """How far a request has come; None once the engine has forgotten it, or for an id that it never had."""

    # ---- texts ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `offsets` where the tokenizer
        cannot tell places."""

    @abstractmethod
    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD. Raises `InvalidRequestError` for ids that the model does not have."""

    @abstractmethod
    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """What each token stands for by itself, by its id."""

    # ---- operation -----------------------------------------------------------------------------------------------------

    @abstractmethod
    async def profile(self, num_steps: int = 100, seconds: float = 10.0) -> bytes:
        """When the parts of the next steps begin and end, as JSON that chrome://tracing and ui.perfetto.dev draw. Returns after `num_steps`
        steps (1..10000), or `seconds` (> 0, at most 600), with what came by then.

        Raises `InvalidRequestError` (num_steps, seconds), and `EngineStateError` from a router, which computes no steps.
        """

    @abstractmethod
    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no request holds; returns how many pages that freed."""

    @abstractmethod
    async def pause(self, *, cancel: bool = False) -> int:
        """Stop computing; returns when no step runs. Requests are still accepted, and wait; cancellations and deadlines still hold. With
        `cancel` the requests in flight are cancelled; returns how many those were."""

    @abstractmethod
    async def unpause(self) -> None:
        """Run steps again after a `pause()`."""

    @abstractmethod
    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """Give memory back until `wake()`, as `AsyncEngine.sleep` describes it."""

    @abstractmethod
    async def wake(self) -> MemoryUse:
        """End a sleep; returns the memory in use before and after."""

    @abstractmethod
    async def update_weights(self, source: str, running: str = "keep", partial: bool = False) -> int:
        """Replace the weights by those of a directory, as `AsyncEngine.update_weights` describes it; returns how often that was done."""

    @abstractmethod
    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter, as `AsyncEngine.load_adapter` describes it."""

    @abstractmethod
    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, when the requests that use it have ended."""


EngineProtocol = EngineBase  # the name from when it was no base class
