"""The address that a server listens on.

The objects that the services share: the engine, the admission of generations, their observers, and their streams by owner. Tasks for
many things at once are started in chunks, so that they do not hold up the event loop.

A request belongs to the caller who made it: the name of a token or of a certificate, and where neither is asked for all callers are one.
Others neither see it nor meet its id, unless they are administrators.

What the doors of one server share.

`CallLife`: what every call goes through, whichever protocol it comes by. It is counted, its headers are bounded, its caller is
authorised, what its handler raises becomes a `ServiceError`, and its record is passed on once.

Owns the order of these. Must not know how a protocol reads a request or writes a response; that waits for the client show in `Call.waits`,
which `CallsInFlight` watches.

The model's tokenizer and chat template for calls: their limits, and the names of fields in errors.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import field, replace
from fnmatch import fnmatchcase
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from prometheus_client import CollectorRegistry

from aengine.api.dataclass import dataclass
from aengine.api.engine import ServedEngine, not_forkable
from aengine.api.errors import AEngineError, InvalidRequestError, RequestIdInUseError
from aengine.api.outputs import ModelInfo, RenderedChat, RequestInfo, RequestState, TokenizedText
from aengine.api.receipt import read_receipt_key
from aengine.api.request import ChatFields
from aengine.api.runtime import forget_tracebacks
from aengine.api.stream import TokenStream
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import Authenticator, CertificateName
from aengine.server.core.calls_in_flight import (
    CURRENT_CALL,
    REQUEST_ID_KEY,
    Admission,
    Call,
    Caller,
    CallsInFlight,
    Observers,
    notify,
    request_id_of,
    trace_id_of,
)
from aengine.server.core.decoding import Decoding
from aengine.server.core.errors import ServiceError, clip, describe
from aengine.server.core.image_urls import ImageUrls
from aengine.server.core.journal import Journal
from aengine.server.core.model_pool import ModelPool

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

MAX_TEXT_BYTES = 4 * 1024 * 1024
MAX_PIECES_TEXT_BYTES = 256 * 1024
"""Pieces and offsets are many times as large as their text, and are made with the GIL held."""
MAX_TOKEN_IDS = 1024 * 1024


class TokenizedChat(NamedTuple):
    """A chat as the template writes it."""

    rendered: RenderedChat
    token_ids: list[int]


class ServedTexts:
    """Asks `engine`. Fields in errors have the names of the arguments."""

    def __init__(self, engine: ServedEngine, image_urls: ImageUrls) -> None:
        self._engine = engine
        self._image_urls = image_urls

    async def tokenize(self, text: str, *, add_special_tokens: bool = True, literals: Sequence[tuple[int, int]] = ()) -> list[int]:
        """The token ids of a text. Raises `InvalidRequestError` for one of more than MAX_TEXT_BYTES, and what the engine raises."""
        check_size("text", _num_bytes(text), MAX_TEXT_BYTES)
        with _renamed({"prompt": "text"}):
            return await self._engine.tokenize(text, add_special_tokens=add_special_tokens, literals=literals)

    async def tokenize_pair(self, first: str, second: str) -> list[int]:
        """The token ids of two texts that are one input. Raises what `tokenize` raises."""
        check_size("text", _num_bytes(first) + _num_bytes(second), MAX_TEXT_BYTES)
        with _renamed({"prompt": "text"}):
            return await self._engine.tokenize(first, pair=second)

    async def locate(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `tokenize` gives, with their pieces and places. Raises `InvalidRequestError`, of `with_pieces` where the tokenizer
        cannot tell places."""
        check_size("text", _num_bytes(text), MAX_PIECES_TEXT_BYTES)
        with _renamed({"prompt": "text", "offsets": "with_pieces"}):
            return await self._engine.locate(text, add_special_tokens=add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises `InvalidRequestError` for ids that the model does not have."""
        check_ids(token_ids)
        return await self._engine.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    async def render(self, messages: Sequence[Mapping[str, Any]], fields: ChatFields) -> TokenizedChat:
        """A chat as the model's template writes it, with its token ids. Raises `InvalidRequestError`, of `prompt` for the messages and of
        the names of `fields`."""
        chat = await self._engine.render_chat(await self._image_urls.resolved(messages), **fields)
        return TokenizedChat(chat, await self._engine.tokenize(chat.text, add_special_tokens=False, literals=chat.literals))


@contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise error.moved(lambda field: names.get(field, field)) from error


def check_ids(token_ids: Sequence[int]) -> None:
    """Raises `InvalidRequestError` (token_ids) for more than MAX_TOKEN_IDS."""
    if len(token_ids) > MAX_TOKEN_IDS:
        raise InvalidRequestError.of("token_ids", f"{len(token_ids)} ids are more than {MAX_TOKEN_IDS}")


def check_size(field: str, size: int, limit: int) -> None:
    """Raises `InvalidRequestError` for more bytes than `limit`."""
    if size > limit:
        raise InvalidRequestError.of(field, f"{size} bytes are more than {limit}")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


class CallLife:
    def __init__(self, authenticator: Authenticator, calls: CallsInFlight, observers: Observers, max_header_bytes: int) -> None:
        self._authenticator = authenticator
        self._calls = calls
        self._observers = observers
        self._max_header_bytes = max_header_bytes

    def begin(
        self,
        method: str,
        peer: str,
        header: Callable[[str], Sequence[str]],
        num_bytes: int,
        *,
        is_apart: bool = False,
        is_polled: bool = False,
    ) -> Call:
        """The call that this task runs from here on. `header` gives the values of a header; all of them have `num_bytes`, and where those
        are more than is allowed, the ids in them are not looked at."""
        values = header if num_bytes <= self._max_header_bytes else _no_values
        request_id, trace_id = request_id_of(values(REQUEST_ID_KEY)), trace_id_of(values("traceparent"))
        call = Call(method, peer, request_id, trace_id, is_polled=is_polled, is_apart=is_apart)
        call.traceparent = None if trace_id is None else values("traceparent")[0]
        CURRENT_CALL.set(call)
        return call

    @contextmanager
    def hold(self, call: Call) -> Iterator[None]:
        """Around all that is done for the call: afterwards it counts no more, and nothing of its message is kept."""
        try:
            yield
        finally:
            call.answered()
            self._calls.discard(call)

    def admit(self, call: Call, num_bytes: int) -> None:
        """Count the call among those in flight. Raises `ServiceError`: TOO_MANY_CALLS, or METADATA_TOO_LARGE for `num_bytes` of headers."""
        self._calls.add_call(call)
        if num_bytes > self._max_header_bytes:
            raise ServiceError("METADATA_TOO_LARGE", f"{num_bytes} bytes of headers are more than {self._max_header_bytes}")

    async def authorize(
        self, call: Call, authorization: Sequence[str], certificate: CertificateName | None, *, administrates: bool = False
    ) -> None:
        """Find out who makes the call. Raises what `Authenticator.authorize` raises."""
        call.caller = await self._authenticator.authorize(authorization, certificate, administrates=administrates)

    def fail(self, error: Exception, *, answered: bool) -> ServiceError:
        """What the client is told of an `error` of a handler; `answered`: whether it may have a part of the answer."""
        failure = describe(error, answered=answered)
        forget_tracebacks(error)  # they hold the message, and the call, which holds them: both would stay until garbage is collected
        return failure

    def end_call(self, call: Call, code: str, reason: str = "") -> None:
        """Complete the record of the call, and pass it on: before the client learns how it ended. Only the first time counts."""
        if call.code:
            return
        call.code, call.reason, call.seconds = code, reason, time.monotonic() - call.start
        if not call.is_apart:
            notify(self._observers.on_call_end, call)


def _no_values(name: str) -> Sequence[str]:
    return ()


class BindError(AEngineError):
    """The server cannot listen on an address."""


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Thing = TypeVar("Thing")


class RequestIndex(Generic[Thing]):
    """Things by request id, with their owners. Several things may have the same id."""

    def __init__(self) -> None:
        self._by_id: dict[str, dict[Thing, str | None]] = {}  # with the name of the owner, in the order in which they came

    def add_request(self, request_id: str, owner: Caller, thing: Thing) -> None:
        self._by_id.setdefault(request_id, {})[thing] = owner.name

    def discard(self, request_id: str, thing: Thing) -> None:
        things = self._by_id.get(request_id, {})
        things.pop(thing, None)
        if not things:
            self._by_id.pop(request_id, None)

    def __iter__(self) -> Iterator[Thing]:
        return chain.from_iterable(self._by_id.values())

    def find(self, request_id: str, caller: Caller) -> list[Thing]:
        """The things of that id that the caller may see: its own, newest first, then those of others."""
        things = self._by_id.get(request_id, {})
        own = [thing for thing, owner in things.items() if owner == caller.name]
        others = [thing for thing, owner in things.items() if owner != caller.name] if caller.sees_all else []
        return own[::-1] + others[::-1]


MOST_ENDED = 4096


class EndedRequests:
    """The latest requests that have ended: whose they were, and the ids that the engine had for them and has given to no others since."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, tuple[str | None, str]] = OrderedDict()  # name of the caller and its id, by the engine's id
        self._engine_ids: dict[tuple[str | None, str], str] = {}

    def note_begin(self, engine_id: str) -> None:
        if (owner := self._owners.pop(engine_id, None)) is not None:
            self._engine_ids.pop(owner, None)

    def note_end(self, request_id: str, owner: Caller, engine_id: str) -> None:
        self.note_begin(engine_id)
        if (before := self._engine_ids.get((owner.name, request_id))) is not None:
            self.note_begin(before)
        self._owners[engine_id] = owner.name, request_id
        self._engine_ids[owner.name, request_id] = engine_id
        if len(self._owners) > MOST_ENDED:
            self.note_begin(next(iter(self._owners)))

    def find(self, request_id: str, caller: Caller) -> str | None:
        return self._engine_ids.get((caller.name, request_id))


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of the server that generations use."""

    engine: ServedEngine
    admission: Admission
    observers: Observers = field(default_factory=Observers)
    max_message_bytes: int = 16 * 1024 * 1024  # of one message
    streams: RequestIndex[TokenStream] = field(default_factory=RequestIndex)  # of the generations in flight
    ended: EndedRequests = field(default_factory=EndedRequests)
    embeddings: RequestIndex[str] = field(default_factory=RequestIndex)  # in flight, by the ids that the engine has for them
    image_urls: ImageUrls = field(default_factory=ImageUrls)
    served_names: tuple[str, ...] = ()  # of the model, in place of the one that the engine has for it
    aliases: tuple[str, ...] = ()  # as of `ServerConfig.model_aliases`
    receipt_key: Ed25519PrivateKey | None = None  # that receipts are signed with
    models: ModelPool | None = None  # where there are several
    root: Backend | None = None  # that of the first model; None: this is it

    async def of_model(self, name: str, held: ExitStack) -> Backend:
        """What a call of the model `name` uses, which stays loaded until `held` is closed. Raises what `ModelPool.hold` raises."""
        if self.models is None:
            return self
        root = self.root or self
        return self.models.view_of(root, await self.models.hold(name, held))

    def for_model(self, engine: ServedEngine, name: str) -> Backend:
        """That of another model of the same server."""
        of_requests: dict[str, Any] = {"streams": RequestIndex(), "ended": EndedRequests(), "embeddings": RequestIndex()}
        return replace(self, engine=engine, served_names=(name,), root=self, **of_requests)

    @property
    def every(self) -> list[Backend]:
        """The backends of all models that are loaded, this one first."""
        others = [] if self.models is None else [one.backend for one in self.models if one.backend is not None and one.engine is not None]
        return [self, *(other for other in others if other is not self)]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names by which clients know the model, without those of adapters; the first is told to those that ask for none. Raises
        `EngineStateError` before the engine is started."""
        return self.served_names or (self.engine.model_info.name,)

    @property
    def listed_names(self) -> list[str]:
        """All that clients may ask for as a model, each once: `model_names`, then the adapters."""
        others = () if self.models is None or self.root is not None else self.models.others
        return list(dict.fromkeys([*self.model_names, *(adapter.name for adapter in self.engine.adapters), *others]))

    @property
    def model_info(self) -> ModelInfo:
        """What is served, under the first of its names. Raises `EngineStateError` before the engine is started."""
        return self._named(self.model_names[0])

    def require_model(self, name: str, adapter: str | None = None) -> tuple[ModelInfo, str | None]:
        """The model that `name` means, under this name, and the adapter if it is the name of one. Empty is the served one; raises
        `ServiceError` (MODEL_NOT_FOUND) for another name, and `InvalidRequestError` where `adapter`, which the request asks for, is
        another one."""
        names = self.model_names
        if name in ("", *names):
            return self._named(name or names[0]), None
        known = [loaded.name for loaded in self.engine.adapters]
        if name not in known:
            aliases = (alias.partition("=") for alias in self.aliases)
            asked, name = name, next((target for alias, _, target in aliases if fnmatchcase(name, alias)), name)
            if name in ("", *names):
                return self._named(asked), None
        if name not in known:
            others = () if self.models is None else self.models.others
            there = ", ".join(map(repr, dict.fromkeys((*(self.root or self).model_names, *others))))
            message = f"model {clip(name)!r} is not served here; there is {there}"
            raise ServiceError("MODEL_NOT_FOUND", message, resource=("model", name))
        if adapter not in (None, name):
            raise InvalidRequestError.of("adapter", f"{adapter!r} is not the adapter that is asked for as the model, {name!r}")
        return self._named(names[0]), name

    def info_of(self, name: str) -> ModelInfo | None:
        """What is known of one of `listed_names`. None: it was never loaded."""
        if self.models is not None and name not in self.model_names and name in self.models.others:
            return self.models.others[name].info
        return self.model_info

    def _named(self, name: str) -> ModelInfo:
        info = self.engine.model_info
        return info if info.name == name else replace(info, name=name)

    def find(self, request_id: str, caller: Caller) -> RequestInfo | None:
        """The state of a request; None if there is none of that id, or it is another caller's. Raises what `ServedEngine.request_info`
        raises."""
        for backend in self.every[1:]:
            if streams := backend.streams.find(request_id, caller):
                return streams[0].info()
        if streams := self.streams.find(request_id, caller):
            return streams[0].info()
        if embeddings := self.embeddings.find(request_id, caller):
            return self.engine.request_info(embeddings[0])
        info = self.engine.request_info(request_id)  # of the program around this server
        return info if caller.sees_all else None

    def engine_id(self, request_id: str | None, caller: Caller) -> str | None:
        """The engine's id for a new request: the same, unless a request of another caller has it; None for a random one. Raises
        `RequestIdInUseError`."""
        if request_id is None:
            return None
        known = self.find(request_id, caller)
        if known is not None and known.state is not RequestState.FINISHED:
            raise RequestIdInUseError.of("request_id", f"{request_id!r} is in use by a request in flight")
        return request_id if self.engine.request_info(request_id) is None else None

    def engine_id_of(self, request_id: str, caller: Caller) -> str:
        """The engine's id of a request that runs or has ended. Raises `InvalidRequestError` (prompt) if the caller has none of that id."""
        if streams := self.streams.find(request_id, caller):
            return streams[0].request_id
        found = self.ended.find(request_id, caller)
        if found is None and not caller.sees_all:
            raise not_forkable(request_id, is_known=False)
        return found or request_id

    async def cancel(self, request_id: str, caller: Caller) -> bool:
        """End the caller's request of that id, those of others too where the caller is an administrator. Returns when their pages are
        free: whether any was in flight."""
        if self.root is None and len(every := self.every) > 1:
            return any([await backend._cancel(request_id, caller) for backend in every])
        return await self._cancel(request_id, caller)

    async def _cancel(self, request_id: str, caller: Caller) -> bool:
        streams, embeddings = self.streams.find(request_id, caller), self.embeddings.find(request_id, caller)
        if not streams and not embeddings and caller.sees_all:
            return await self.engine.cancel(request_id)
        # One that is gone may have left its id in the engine to another.
        ids = embeddings + [stream.request_id for stream in streams if not stream.gone]
        return any([await self.engine.cancel(engine_id) for engine_id in ids])


CHUNK_SIZE = 128
"""To begin or end so many requests takes some tens of milliseconds."""

Item = TypeVar("Item")


async def in_chunks(items: Iterable[Item], begin: Callable[[Item], asyncio.Task[None]]) -> None:
    """Call `begin` for the items of a chunk, wait for their tasks, and go on with the next chunk. When it is cancelled it goes on, too, but
    waits no longer for the chunk it was at. What tasks raise is dropped."""
    left = iter(items)
    cancelled: asyncio.CancelledError | None = None
    while tasks := [begin(item) for item in islice(left, CHUNK_SIZE)]:
        try:
            for task in (await asyncio.wait(tasks))[0]:  # cancelling it cancels none of them
                if not task.cancelled():
                    task.exception()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


logger = logging.getLogger(__name__)
MAX_LOGGED = 256


class Core:
    """Serves `engine` by no door of its own. Must be made, used and closed in one event loop."""

    def __init__(self, engine: ServedEngine, config: ServerConfig, models: ModelPool | None = None) -> None:
        """`models`: where there are several, of which `engine` has the first."""
        self.engine = engine
        self.config = config
        self.serving = False  # what health says
        self.admission = Admission(config.max_sequences_per_caller, config.max_waiting_tokens_per_caller)
        self.observers = Observers()  # of calls and generations
        self.authenticator = Authenticator(config)
        self.calls = CallsInFlight(config.max_calls, config.stall_seconds)
        self.journal = Journal(config.journal, config.journal_size, config.journal_seconds)
        self.life = CallLife(self.authenticator, self.calls, self.observers, config.max_metadata_bytes)
        names = tuple(dict.fromkeys(config.served_model_name))
        urls = ImageUrls(config.image_urls)
        self.backend = Backend(
            engine,
            self.admission,
            self.observers,
            config.max_message_bytes,
            image_urls=urls,
            served_names=names,
            aliases=config.model_aliases,
            receipt_key=None if config.receipt_key is None else read_receipt_key(config.receipt_key),
            models=models,
        )
        self.texts = ServedTexts(engine, urls)
        self.decoding = Decoding(config.max_decoding_bytes, config.max_decoding_bytes_per_caller)
        self.metrics: CollectorRegistry | None = None  # to be read in other threads; None until a door shows them
        self._logged: set[str] = set()

    async def of_model(self, name: str, held: ExitStack) -> Core:
        """What serves the model `name`, which stays loaded until `held` is closed. Raises what `ModelPool.hold` raises."""
        backend = await self.backend.of_model(name, held)
        if backend is self.backend:
            return self
        view = copy(self)
        view.engine, view.backend, view.texts = backend.engine, backend, ServedTexts(backend.engine, backend.image_urls)
        return view

    def log_ignored(self, ignored: Mapping[str, str]) -> None:
        """What a request asked for and did not get, and why. Each is logged once, of the first `MAX_LOGGED`."""
        for what, why in ignored.items():
            if what not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(what)
                logger.info("ignored from now on: %s (%s)", what, why)
