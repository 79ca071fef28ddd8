"""`AsyncEngine`: the engine as its user sees it. Owns what each call means.

Everything here runs in the event loop that started the engine. What runs from its start to its end is `EngineCore`, and requests in flight
are the `Registry`'s. Must not know schedulers, batches or devices.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from aengine.api.config import EngineConfig
from aengine.api.engine import EmbeddingFields, ServedEngine
from aengine.api.errors import EngineStateError, FieldViolation, InvalidRequestError
from aengine.api.fields import shown
from aengine.api.outputs import (
    AdapterInfo,
    CachedPages,
    Embedding,
    EngineInfo,
    EngineStats,
    KVPage,
    MemoryUse,
    ModelInfo,
    RenderedChat,
    ReplicaInfo,
    RequestInfo,
    StoredKV,
    TokenizedText,
)
from aengine.api.params import SamplingParams
from aengine.api.request import ChatFields, OptionFields, ProfileOptions, Prompt, RequestOptions, check_params
from aengine.api.stream import TokenStream, read_to_end
from aengine.api.weight_sources import WeightSource
from aengine.cache import PageChain, StoredPrefix
from aengine.engine.core import EngineCore, EnginePhase, Serving
from aengine.engine.edges import FindKV, FlushCache, Pause, Record, Touch, Trace, Unpause
from aengine.engine.loading import LoadedModel, load_model
from aengine.engine.request_source import NO_OUTPUT, StreamState, embedding_of, read_embedding
from aengine.engine.requests import check_request
from aengine.engine.trace import StepTrace
from aengine.models.loading.hub import model_name
from aengine.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from typing_extensions import Unpack


_EXPORTED_BYTES = 4 << 20  # that are read at a time


class AsyncEngine(ServedEngine):
    """An LLM inference engine inside your event loop, asyncio or trio.

        async with AsyncEngine("demo") as engine:
            async for token in engine.stream("It is a truth", SamplingParams(max_tokens=64)):
                print(token.text, end="", flush=True)

    `model_or_config` is a model name (see `EngineConfig.model`) or an `EngineConfig`; `overrides` are fields of `EngineConfig`.
    An engine is started once and belongs to the loop that started it.
    """

    def __init__(self, model_or_config: str | EngineConfig, **overrides: Any) -> None:
        """Raises `ConfigError` naming every field that is unknown or out of range. Loads nothing yet."""
        self._config = EngineConfig.of(model_or_config, **overrides)
        self._core: EngineCore | None = None  # from `start()` on
        self._profiled = False  # now
        self._closed = False

    @property
    def config(self) -> EngineConfig:
        """Once the engine is started, with the default limits of a step filled in."""
        return self._config if self._core is None else self._core.config

    # ---- life cycle ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model and start serving. Raises `ModelLoadError`, `InsufficientMemoryError` or `ConfigError`, and `EngineStateError`
        if the engine is closed meanwhile. Cancelling it, or `aclose()`, leaves the loading between two weights; `aclose()` waits for
        that, also after a `start()` that was cancelled."""
        if self._core is not None or self._closed:
            raise EngineStateError("the engine was started before; make a new one")
        self._core = core = EngineCore(self._config, self._load)
        try:
            await core.wait_settled()
        except BaseException:  # cancelled; where the step thread has ended this does nothing
            core.stop()
            raise

    async def aclose(self) -> None:
        """Cancel all requests and stop. Returns when the step thread has ended and the model is unloaded, whichever task closes it."""
        self._closed = True
        if self._core is not None:
            self._core.stop()
            with anyio.CancelScope(shield=True):
                await self._core.wait_stopped()

    async def wait_stopped(self) -> None:
        if self._core is None:
            raise EngineStateError("the engine is not started")
        await self._core.wait_stopped()
        if self._core.phase is EnginePhase.DEAD:
            raise self._core.death()

    @property
    def healthy(self) -> bool:
        return self._core is not None and self._core.phase is EnginePhase.RUNNING

    @property
    def model_info(self) -> ModelInfo:
        """What is served. Raises `EngineStateError` before `start()`."""
        return self._started().model.info

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; it may be used from any thread. Raises `NoTokenizerError` if it has none, and `EngineStateError` before
        `start()`."""
        return self._started().texts.tokenizer

    @property
    def engine_info(self) -> EngineInfo:
        steps, config = self._started().steps, self.config
        return EngineInfo(
            max_num_seqs=config.num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens or 0,
            max_queued_requests=config.max_queued_requests or 0,
            max_queued_tokens=config.max_queued_tokens or 0,
            max_logprobs=config.max_logprobs,
            page_size=config.page_size,
            num_pages=self.stats().pages_total,
            speculative=config.speculative,
            speculative_model=None if config.speculative_model is None else model_name(config.speculative_model),
            max_drafts=config.max_drafts,
            tensor_parallel_size=config.tensor_parallel_size,
            tensor_parallel_mode=config.tensor_parallel_mode,
            pipeline_parallel_size=config.pipeline_parallel_size,
            fingerprint=steps.stats.identity.fingerprint,
            fingerprint_parts=steps.stats.identity.parts,
        )

    # ---- requests ------------------------------------------------------------------------------------------------------

    def _open(
        self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions | None, fields: OptionFields, *, whole: bool
    ) -> StreamState:
        return self._check_serving().registry.open(prompt, check_params(params), options, fields, [])

    async def _embed(self, prompt: Prompt, options: RequestOptions | None, fields: OptionFields, wanted: EmbeddingFields) -> Embedding:
        registry = self._check_serving().registry
        violations: list[FieldViolation] = []
        params = read_embedding(self.model_info, self.config.pipeline_parallel_size, violations, **wanted)
        state = registry.open(prompt, NO_OUTPUT, options, fields, violations, params)
        return embedding_of(state, params, (await read_to_end(TokenStream(state))).finish_reason, len(self.model_info.labels))

    async def violations(self, prompt: Prompt, params: SamplingParams) -> list[FieldViolation]:
        registry = self._check_serving().registry
        found: list[FieldViolation] = []
        check_request(prompt, params, None, registry.limits, found)
        return found + await registry.grammar_violations(params)

    async def tokenize(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        for_prompt: bool = False,
        literals: Sequence[tuple[int, int]] = (),
        pair: str | None = None,
    ) -> list[int]:
        return await self._check_serving().texts.tokenize(
            text, add_special_tokens=add_special_tokens, for_prompt=for_prompt, literals=literals, pair=pair
        )

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        return await self._check_serving().texts.locate(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return await self._check_serving().texts.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        return await self._check_serving().texts.token_bytes(token_ids)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, session: str | None = None, tenant: str = "", **fields: Unpack[ChatFields]
    ) -> RenderedChat:
        serving = self._check_serving()
        history = serving.registry.history_of(RequestOptions(session=session, tenant=tenant, **fields))
        return await serving.texts.render_chat(messages, history, **fields)

    async def cancel(self, request_id: str) -> bool:
        """End a request; its stream closes with FinishReason.CANCELLED. Returns when its pages are free: True if it was in flight."""
        serving = self._started()
        serving.edge.check_current()
        state = serving.registry.find(request_id)
        if state is None:
            return False
        was_running = not state.finished
        state.cancel()
        await state.wait_released()
        return was_running

    async def touch(self, session: str, tenant: str = "") -> int:
        RequestOptions(session=session, tenant=tenant)  # which checks them
        return await self._check_serving().commands.run(lambda reply: Touch(reply, (tenant, session)))

    async def save_recording(self, path: str) -> int:
        """Write the latest `EngineConfig.recorded_steps` steps to a file, from which `aengine-replay` computes them again; returns how many
        they are. Also after the engine has died of one. The file holds the token ids of prompts and outputs.

        Raises `EngineStateError` before the engine is started, and where nothing is recorded, and OSError.
        """
        died_with = None if self._core is None else self._core.steps.recording
        recording = died_with or await self._check_serving().commands.run(Record)
        if recording is None:
            raise EngineStateError("no steps are recorded: recorded_steps is 0")
        await anyio.to_thread.run_sync(recording.write_file, path)
        return len(list(recording.plans))

    async def profile(self, num_steps: int = 100, seconds: float = 10.0) -> bytes:
        serving = self._check_serving()
        options = ProfileOptions(num_steps, seconds)
        if self._profiled:
            raise EngineStateError("the engine is being profiled")
        self._profiled, ended = True, Future[None]()
        trace = StepTrace(options.num_steps, ended)
        await serving.commands.run(lambda reply: Trace(reply, trace, ended=False))
        trace.time_loop(serving.registry)
        try:
            with anyio.move_on_after(options.seconds):
                await serving.edge.wait(ended)
        finally:
            with anyio.CancelScope(shield=True):
                await serving.commands.run(lambda reply: Trace(reply, trace, ended=True))
            self._profiled = False
        return await anyio.to_thread.run_sync(trace.to_json)

    # ---- KV for other engines ------------------------------------------------------------------------------------------

    async def find_kv(self, token_ids: Sequence[int], *, cache_salt: str = "", adapter: str | None = None) -> StoredKV:
        stored = await self._find_kv(token_ids, cache_salt, adapter)
        if stored is None:
            return StoredKV()
        return StoredKV(stored.tiers.identity, stored.num_found * self.engine_info.page_size)

    async def export_kv(
        self, token_ids: Sequence[int], *, identity: str, cache_salt: str = "", adapter: str | None = None, skip_tokens: int = 0
    ) -> AsyncGenerator[KVPage, None]:
        stored = await self._kv_of(identity, token_ids, cache_salt, adapter)
        begin, end = skip_tokens // self.engine_info.page_size, stored.num_found
        at_a_time = max(1, _EXPORTED_BYTES // stored.sizes[0])
        for first in range(begin, end, at_a_time):
            names = stored.names[first : min(first + at_a_time, end)]
            columns = await anyio.to_thread.run_sync(stored.contents, names)
            for index, (content, digest) in enumerate(columns, first):
                yield KVPage(index, content, digest)
            if len(columns) < len(names):
                return  # somebody has removed it meanwhile
        if end > begin:
            for content, digest in await anyio.to_thread.run_sync(stored.contents, stored.states[end - 1 : end]):
                yield KVPage(end - 1, content, digest, is_state=True)

    async def import_kv(
        self, token_ids: Sequence[int], pages: AsyncIterable[KVPage], *, identity: str, cache_salt: str = "", adapter: str | None = None
    ) -> int:
        stored = await self._kv_of(identity, token_ids, cache_salt, adapter)
        count = 0
        async for page in pages:
            if not await anyio.to_thread.run_sync(stored.put_page, page.index, page.is_state, page.content, page.digest):
                break
            count += not page.is_state
        return count * self.engine_info.page_size

    async def _find_kv(self, token_ids: Sequence[int], cache_salt: str, adapter: str | None) -> StoredPrefix | None:
        try:
            ids = np.array(token_ids, np.int32)
        except (OverflowError, TypeError, ValueError):
            raise InvalidRequestError.of("token_ids", "they are not integers of 32 bits") from None
        serving = self._check_serving()
        version = serving.registry.weights_version
        chain = PageChain(self.engine_info.page_size, cache_salt, serving.adapters.number_of(adapter), version)
        await anyio.to_thread.run_sync(chain.extend, ids)  # of 100k tokens this takes many milliseconds
        return await serving.commands.run(lambda reply: FindKV(reply, ids, chain))

    async def _kv_of(self, identity: str, token_ids: Sequence[int], cache_salt: str, adapter: str | None) -> StoredPrefix:
        stored = await self._find_kv(token_ids, cache_salt, adapter)
        if stored is None:
            raise EngineStateError("the engine keeps no KV beside its pool: host_kv_memory and kv_disk_path are not set")
        if stored.tiers.identity != identity:
            raise EngineStateError(f"the engine computes other KV: its identity is {stored.tiers.identity}, not {shown(identity)}")
        return stored

    def stats(self) -> EngineStats:
        """What the engine holds now; requests still being tokenized or handed over count as waiting."""
        serving = None if self._core is None else self._core.serving
        if serving is None:  # not started, or failed to
            return EngineStats()
        registry = serving.registry
        stats, num_received = serving.steps.stats.published
        underway = registry.num_submitted - num_received + registry.num_preparing
        role = "" if self.config.role == "both" else self.config.role
        return replace(stats, waiting=stats.waiting + underway, role=role)

    def watch_pages(self, salt: bytes, most: int) -> AsyncGenerator[CachedPages | None, None]:
        return self._check_serving().pages.watch(salt, most)

    def replicas(self) -> tuple[ReplicaInfo, ...]:
        return ()

    async def drain_replica(self, name: str) -> int:
        raise InvalidRequestError.of("replica", f"{name!r} is none of this engine, which is not a router")

    def request_info(self, request_id: str) -> RequestInfo | None:
        """How far a request has come; None once the engine has forgotten it, or for an id that it never had."""
        state = self._check_serving().registry.find(request_id)
        return None if state is None else state.info()

    # ---- operation -----------------------------------------------------------------------------------------------------

    async def pause(self, *, cancel: bool = False) -> int:
        """Stop computing; returns when the running step has finished. Requests are still accepted, and wait; cancellations and deadlines
        still hold. With `cancel` the requests in flight are cancelled; returns how many those were."""
        serving = self._check_serving()
        await serving.commands.run(Pause)
        return await serving.registry.cancel_all() if cancel else 0

    async def unpause(self) -> None:
        self._check_serving().steps.post(Unpause())

    async def flush_cache(self) -> int:
        """Forget the cached prefixes that no request holds; returns how many pages that freed."""
        return await self._check_serving().commands.run(FlushCache)

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """Give memory back until `wake()`. Level 1: KV pages, graphs and scratch memory; on a GPU weights move to host memory. Level 2: the
        weights, too, which `wake()` reads again; those of a draft model stay in host memory. Returns when no step runs and the memory is
        free. An engine that sleeps at level 2 already goes on doing so.

        Requests in flight keep their KV in host memory and go on after `wake()` (`running` "park"), are cancelled first, or forbid the
        sleep: `EngineStateError`. Cached prefixes are forgotten. New requests are accepted and wait; cancellations and deadlines hold.
        Raises `InsufficientMemoryError`, and changes nothing, if the host has no memory for what is to be kept.
        """
        return await self._check_serving().weights.sleep(level, running)

    async def wake(self, source: WeightSource | None = None) -> MemoryUse:
        """End a sleep. After one of level 2 the weights are read again from where they came from, or with a `source` others, as by
        `update_weights(source)`; requests that have begun keep their KV. Does nothing if the engine is awake and there is no source.

        Sleeps on after an error: `InsufficientMemoryError`, `ModelLoadError`, or `EngineStateError` if the weights came from memory and
        there is no source.
        """
        return await self._check_serving().weights.wake(source)

    async def update_weights(self, source: WeightSource, running: str = "keep", partial: bool = False) -> int:
        """Replace the weights of the model, while requests go on; returns how often that was done. Tokens say which weights made them
        (`Token.weights_version`); cached prefixes are forgotten.

        `source`: a directory or file with a checkpoint of the same model, tensors in process under the names that the checkpoint has
        (a mapping, or an iterable of pairs), which are copied one by one in another thread; `SharedWeights`, or `GroupWeights`. The host
        has memory for a second set of weights. A `partial` one has some tensors of the checkpoint: the weights that they make are replaced,
        the others stay, and take no memory again. Tensors that are joined in one weight, such as those of q, k and v, come together.

        Requests that have begun go on with the KV that they have (`running` "keep"), go on after their KV is computed again
        ("recompute"), end before the change while no other begins ("finish"), or are cancelled ("abort"). The change goes on if the
        caller is cancelled. Nothing changes if it fails: `ModelLoadError` for weights that cannot be read or do not fit,
        `InsufficientMemoryError`, or what an iterable raises. Raises `EngineStateError` while the engine sleeps.
        """
        return await self._check_serving().weights.update(source, running, partial)

    @property
    def adapters(self) -> tuple[AdapterInfo, ...]:
        return self._started().adapters.infos

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter that PEFT wrote, from a directory, a Hugging Face id, or "demo-lora", while requests go on. Those that name it
        wait until it is loaded, and fail if that fails. Loading goes on if the caller is cancelled.

        Raises `InvalidRequestError` for a name (1..128 of `A-Za-z0-9._:/-`) that is in use, `AdapterError` or `InsufficientMemoryError`.
        """
        return await self._check_serving().adapters.load(name, path)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter, when the requests that use it have ended. New ones are refused from now on; if the caller is cancelled
        meanwhile, the adapter stays. Raises `AdapterNotFoundError`."""
        await self._check_serving().adapters.unload(name)

    # ---- inside --------------------------------------------------------------------------------------------------------

    def _load(self, core: EngineCore) -> LoadedModel:
        return load_model(core.config, core.steps.check_loading, core.steps.fail)

    def _started(self) -> Serving:
        """Also of an engine that was closed since. Raises `EngineStateError` before the model is loaded."""
        if self._core is None or self._core.serving is None:
            raise EngineStateError("the engine is not started")
        return self._core.serving

    def _check_serving(self) -> Serving:
        if self._core is None:
            raise EngineStateError("the engine is closed" if self._closed else "the engine is not started")
        return self._core.check_serving()
