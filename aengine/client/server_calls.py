"""`ServerCalls`: what a client asks of a server beside generations: what it is, how busy it is, texts, and what administrators do. Each is
one call that can be repeated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from aengine.api.outputs import AdapterInfo, EngineInfo, EngineStats, LoadReport, MemoryUse, RenderedChat, ReplicaInfo, TokenizedText
from aengine.api.request import ChatFields, ChatOptions, Prompt
from aengine.client.call import write_prompt_ids
from aengine.client.health import watch_load
from aengine.client.link import Link
from aengine.v1.admin_service_pb2 import (
    ContinueGenerationRequest,
    DrainRequest,
    FlushCacheRequest,
    LoadAdapterRequest,
    PauseGenerationRequest,
    PauseMode,
    SleepMode,
    SleepRequest,
    UnloadAdapterRequest,
    UpdateMode,
    UpdateWeightsRequest,
    WakeRequest,
)
from aengine.v1.engine_service_pb2 import GetLoadRequest, GetServerInfoRequest
from aengine.v1.generation_pb2 import GenerationSpec
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.tokenizer_service_pb2 import DetokenizeRequest, RenderChatRequest, TextSpan, TokenizeRequest
from aengine.wire.client_messages import (
    read_adapter,
    read_engine_info,
    read_load,
    read_memory,
    read_replica,
    write_chat,
    write_mode,
    write_prompt,
    write_watch,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ServerCalls(ABC):
    """All raise `EngineStateError` while the client does not run."""

    @abstractmethod
    def _running_link(self) -> Link:
        """The connection. Raises `EngineStateError` while the client does not run."""

    async def _ask(self, method: Callable[[Link], Any], request: Message) -> Any:
        link = self._running_link()
        return await link.ask(method(link), request)

    async def _change(self, method: Callable[[Any], Any], request: Message) -> Any:
        """`_ask` of an administrator, for what may take as long as a step, a request or the reading of a model: without a deadline."""
        link = self._running_link()
        return await link.ask(method(link.admin), request, None)

    # ---- what it is, how busy it is, texts -----------------------------------------------------------------------------

    async def engine_info(self) -> EngineInfo:
        """Return what limits requests on the server, and how its model is computed."""
        return read_engine_info(await self._ask(lambda link: link.engine.GetServerInfo, GetServerInfoRequest()))

    async def load(self) -> EngineStats:
        """How busy the server is. Histograms stay empty: those are for its metrics."""
        return read_load((await self._ask(lambda link: link.engine.GetLoad, GetLoadRequest())).load)

    async def watch_load(self, *, min_interval: float | None = None, digest_salt: bytes | None = None) -> AsyncGenerator[LoadReport, None]:
        """How busy the server is, now, whenever that changes and at least once a second; at most every `min_interval` seconds, 0.01 to 1
        (default 0.1). It has no end; close it when no more is wanted.

        With `digest_salt`, 8 to 64 secret bytes, also which pages of prompts are cached there, first all of them: by their
        `aengine.cache.published_digest`. For administrators, where the server asks who its callers are: else `ServerError`. Raises
        what a lost connection or a server that stops means to any call, and `EngineStateError` when the client is closed.
        """
        async with aclosing(watch_load(self._running_link(), write_watch(min_interval, digest_salt))) as reports:
            async for report in reports:
                yield report

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False, literals: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        places = [TextSpan(start=start, end=end) for start, end in literals]
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens, literals=places)
        return list((await self._ask(lambda link: link.tokenizer.Tokenize, request)).token_ids)

    async def prompt_ids(self, prompt: Prompt, options: ChatOptions | None = None) -> Sequence[int]:
        """The ids of a prompt, with the options of chats. Raises what `stream()` raises for the prompt."""
        spec = GenerationSpec()
        write_prompt(prompt, options or ChatOptions(), spec.prompt)
        return list(await write_prompt_ids(self._running_link(), spec))

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD."""
        request = DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._ask(lambda link: link.tokenizer.Detokenize, request)).text)

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens, with_pieces=True)
        found = await self._ask(lambda link: link.tokenizer.Tokenize, request)
        return TokenizedText(list(found.token_ids), list(found.pieces), list(found.start_offsets), list(found.end_offsets))

    async def token_bytes(self, token_ids: Collection[int]) -> dict[int, bytes]:
        """What each token stands for by itself, by its id."""
        ids = list(token_ids)
        found = await self._ask(lambda link: link.tokenizer.Detokenize, DetokenizeRequest(token_ids=ids, with_token_bytes=True))
        return dict(zip(ids, found.token_bytes, strict=True))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> RenderedChat:
        request = RenderChatRequest()
        write_chat(messages, ChatOptions(**fields), request.chat)
        found = await self._ask(lambda link: link.tokenizer.RenderChat, request)
        return RenderedChat(found.text, tuple([(place.start, place.end) for place in found.literals]))

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Return the server's adapters, which requests can name."""
        return tuple(map(read_adapter, (await self._ask(lambda link: link.model.GetModel, GetModelRequest())).model.adapters))

    # ---- for administrators: what may take long has no deadline but that of the caller ----------------------------------

    async def flush_cache(self) -> int:
        """Have the server forget the cached prefixes that no request holds; returns how many pages that freed."""
        return int((await self._change(lambda admin: admin.FlushCache, FlushCacheRequest())).freed_pages)

    async def pause(self, *, cancel: bool = False) -> int:
        """Have the server stop computing; returns when no step runs. Requests are still accepted, and wait. With `cancel` the requests
        in flight are cancelled; returns how many those were."""
        mode = PauseMode.PAUSE_MODE_CANCEL if cancel else PauseMode.PAUSE_MODE_KEEP
        return int((await self._change(lambda admin: admin.PauseGeneration, PauseGenerationRequest(mode=mode))).cancelled_requests)

    async def unpause(self) -> None:
        """Have the server run steps again after a `pause()`."""
        await self._ask(lambda link: link.admin.ContinueGeneration, ContinueGenerationRequest())

    async def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Return the replicas of a router; none for a server that is no router."""
        response = await self._ask(lambda link: link.engine.GetLoad, GetLoadRequest())
        return tuple(map(read_replica, response.replicas))

    async def drain_replica(self, name: str) -> int:
        """Have a router send nothing more to a replica; returns how many requests go on elsewhere."""
        return int((await self._ask(lambda link: link.admin.Drain, DrainRequest(replica=name))).requests_in_flight)

    async def drain(self, grace: float | None = None) -> int:
        """Have the server shut down, within `grace` seconds (default: as it is configured); returns how many requests it has in flight."""
        request = DrainRequest()
        if grace is not None:
            request.grace.FromNanoseconds(round(grace * 1e9))
        return int((await self._ask(lambda link: link.admin.Drain, request)).requests_in_flight)

    async def load_adapter(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter from the directory `path` on the server, as `AsyncEngine.load_adapter` describes it."""
        response = await self._change(lambda admin: admin.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return read_adapter(response.adapter)

    async def unload_adapter(self, name: str) -> None:
        """Have the server forget an adapter, when the requests that use it have ended."""
        await self._change(lambda admin: admin.UnloadAdapter, UnloadAdapterRequest(name=name))

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """Have the server give memory back until `wake()`, as `AsyncEngine.sleep` describes it."""
        mode = write_mode(SleepMode, "SLEEP_MODE", "running", running)
        return read_memory((await self._change(lambda admin: admin.Sleep, SleepRequest(level=level, mode=mode))).memory)

    async def wake(self) -> MemoryUse:
        """End a sleep of the server; returns the memory in use before and after."""
        return read_memory((await self._change(lambda admin: admin.Wake, WakeRequest())).memory)

    async def update_weights(self, path: str, running: str = "keep") -> int:
        """Replace the weights by those of a directory on the server, as `AsyncEngine.update_weights` describes it; returns how often
        that was done."""
        mode = write_mode(UpdateMode, "UPDATE_MODE", "running", running)
        return int((await self._change(lambda admin: admin.UpdateWeights, UpdateWeightsRequest(path=path, mode=mode))).weights_version)
