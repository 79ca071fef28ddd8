"""`ServerCalls`: what a client asks of a server beside generations: what it is, how busy it is, texts, and what administrators do. Each is
one call that can be repeated."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from aengine.chat_prompts import ChatFields, ChatOptions
from aengine.client.link import Link
from aengine.client.load_watch import watch_load
from aengine.client.messages import (
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
from aengine.client.prompt_ids import write_prompt_ids
from aengine.outputs import AdapterInfo, EngineInfo, EngineStats, LoadReport, MemoryUse, ReplicaInfo, TokenizedText
from aengine.requests import Prompt
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
from aengine.v1.tokenizer_service_pb2 import DetokenizeRequest, RenderChatRequest, TokenizeRequest

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

    # ---- what it is, how busy it is, texts -----------------------------------------------------------------------------

    async def engine_info(self) -> EngineInfo:
        """What limits requests there."""
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

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, for_prompt: bool = False) -> list[int]:
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
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

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Unpack[ChatFields]) -> str:
        request = RenderChatRequest()
        write_chat(messages, ChatOptions(**fields), request.chat)
        return str((await self._ask(lambda link: link.tokenizer.RenderChat, request)).text)

    async def adapters(self) -> tuple[AdapterInfo, ...]:
        """Those that requests can name."""
        return tuple(map(read_adapter, (await self._ask(lambda link: link.model.GetModel, GetModelRequest())).model.adapters))

    # ---- for administrators --------------------------------------------------------------------------------------------

    async def flush_cache(self) -> int:
        """As `AsyncEngine.flush_cache`."""
        return int((await self._ask(lambda link: link.admin.FlushCache, FlushCacheRequest())).freed_pages)

    async def pause(self, *, cancel: bool = False) -> int:
        """As `AsyncEngine.pause`."""
        mode = PauseMode.PAUSE_MODE_CANCEL if cancel else PauseMode.PAUSE_MODE_KEEP
        return int((await self._ask(lambda link: link.admin.PauseGeneration, PauseGenerationRequest(mode=mode))).cancelled_requests)

    async def unpause(self) -> None:
        """As `AsyncEngine.unpause`."""
        await self._ask(lambda link: link.admin.ContinueGeneration, ContinueGenerationRequest())

    async def replicas(self) -> tuple[ReplicaInfo, ...]:
        """Those of a router."""
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
        """As `AsyncEngine.load_adapter`; `path` is a directory on the server."""
        response = await self._ask(lambda link: link.admin.LoadAdapter, LoadAdapterRequest(name=name, path=path))
        return read_adapter(response.adapter)

    async def unload_adapter(self, name: str) -> None:
        """As `AsyncEngine.unload_adapter`."""
        await self._ask(lambda link: link.admin.UnloadAdapter, UnloadAdapterRequest(name=name))

    async def sleep(self, level: int = 1, running: str = "park") -> MemoryUse:
        """As `AsyncEngine.sleep`."""
        mode = write_mode(SleepMode, "SLEEP_MODE", "running", running)
        return read_memory((await self._ask(lambda link: link.admin.Sleep, SleepRequest(level=level, mode=mode))).memory)

    async def wake(self) -> MemoryUse:
        """As `AsyncEngine.wake`."""
        return read_memory((await self._ask(lambda link: link.admin.Wake, WakeRequest())).memory)

    async def update_weights(self, path: str, running: str = "keep") -> int:
        """As `AsyncEngine.update_weights`, from a directory on the server."""
        mode = write_mode(UpdateMode, "UPDATE_MODE", "running", running)
        return int((await self._ask(lambda link: link.admin.UpdateWeights, UpdateWeightsRequest(path=path, mode=mode))).weights_version)
