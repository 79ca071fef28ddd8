"""`HttpServer`: a server that speaks HTTP, as its client sees it: JSON, and streams of events (SSE). Each request has a connection of its
own.

Knows nothing of what is said. Imports no gRPC.

`OpenAIClient`: chats and completions of a server with OpenAI's API over HTTP, aengine's own or another, as events and totals.

It is no `EngineBase`: over HTTP there are texts, and no tokens."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import anyio
import httptools
from anyio.abc import ByteStream

from aengine.api import VERSION
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError, ConnectionLostError, ServerError
from aengine.api.fields import POSITIVE, FieldChecks, Refusal, check_fields, is_not, shown
from aengine.api.outputs import FinishReason, Timing, Usage
from aengine.api.params import StructuredOutput
from aengine.api.request import RemoteImage, Video, image_file, images_of, url_of_image
from aengine.chat.text_source import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    ChatMessage,
    ContentDelta,
    Event,
    MessageBuilder,
    ReasoningDelta,
)
from aengine.client.client_config import is_url, read_token

MAX_BYTES = 16 << 20
"""Most bytes of an answer in JSON, and of one event."""


def _url(value: object) -> object:
    try:
        if isinstance(value, str) and is_url(value) and value.isprintable() and " " not in value:
            parts = urlsplit(value)
            if parts.hostname and not parts.query and not parts.fragment and parts.username is None and parts.port != 0:
                return value
    except ValueError:
        pass
    raise Refusal(is_not(value, "http://host:port or https://host, perhaps with a path"))


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConfig:
    """Where a server with HTTP is. Raises `ConfigError` naming every field that is out of range."""

    address: Annotated[str, _url]
    """http://host:port or https://host, perhaps with the path below which the API is. One that does not end in /v1 gets it."""
    token: Annotated[str | None, read_token] = field(default=None, repr=False)
    """Sent with every request as `authorization: Bearer <token>`."""
    tls_ca: str | None = None
    """PEM file with the authorities that sign the server's certificate. Default: those of the system."""
    client_cert: str | None = None
    """PEM file with this client's certificate, for servers that ask for one."""
    client_key: str | None = None
    """PEM file with its private key."""
    connect_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds that a connection may take."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check = FieldChecks()
        if not self.address.startswith("https:"):
            for name in ("tls_ca", "client_cert", "client_key"):
                if getattr(self, name) is not None:
                    check.add_violation(name, is_not(getattr(self, name), "possible without https://"))
        if (self.client_cert is None) != (self.client_key is None):
            missing = "client_cert" if self.client_cert is None else "client_key"
            check.add_violation(missing, is_not(None, "a path: certificate and key belong together"))
        check.finish(ConfigError)


class HttpServer:
    """Makes requests below the URL of `config`. Raises `ConfigError` for files that cannot be used."""

    def __init__(self, config: HttpConfig) -> None:
        self._config = config
        parts = urlsplit(config.address)
        assert parts.hostname is not None
        self.address = config.address
        self._host, self._port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self._authority = parts.netloc
        path = parts.path.rstrip("/")
        self._path = path if path.endswith("/v1") else f"{path}/v1"
        self._tls = _tls_context(config) if parts.scheme == "https" else None

    async def get(self, path: str) -> Any:
        """The JSON at `path`, below /v1. Raises `ServerError`, and `ConnectionLostError`."""
        async with self._request("GET", path, b"") as answer:
            return _read_json(await answer.read_all())

    async def post(self, path: str, body: Any) -> tuple[int, Mapping[str, str], Any]:
        """The status, the headers and the JSON that the server answers the JSON `body` with, be it an error. Raises `ServerError` for what
        is no JSON, and `ConnectionLostError`."""
        async with self._request("POST", path, json.dumps(body).encode(), checks=False) as answer:
            raw = await answer.read_all()
            try:
                return answer.status, answer.headers, json.loads(raw)
            except (ValueError, RecursionError):
                raise ServerError(f"{self.address}: the answer is no JSON", answer.code) from None

    async def events(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """The JSON of each event that the server answers the JSON `body` with; of an answer that is no stream, this one. To be closed by
        who reads it, which ends the request. Raises `ServerError`, and `ConnectionLostError`."""
        async with self._request("POST", path, json.dumps(body).encode()) as answer:
            if not answer.headers.get("content-type", "").startswith("text/event-stream"):
                yield _read_json(await answer.read_all())
                return
            unread = b""
            while piece := await answer.read():
                *lines, unread = (unread + piece).split(b"\n")
                if len(unread) > MAX_BYTES:
                    raise ServerError(f"{self.address}: an event has more than {MAX_BYTES} bytes", answer.code)
                for line in lines:
                    if line.startswith(b"data:"):
                        text = line[5:].strip()
                        if text == b"[DONE]":
                            return
                        yield _read_json(text)

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes, *, checks: bool = True) -> AsyncIterator[_Answer]:
        """The answer, of which the head is there. Raises `ServerError` for one that is an error, if it `checks` that."""
        head = [
            f"{method} {self._path}{path} HTTP/1.1",
            f"host: {self._authority}",
            f"user-agent: aengine/{VERSION}",
            "accept: application/json, text/event-stream",
            "connection: close",
        ]
        if self._config.token is not None:
            head.append(f"authorization: Bearer {self._config.token}")
        if method == "POST":
            head += ["content-type: application/json", f"content-length: {len(body)}"]
        stream = await self._connect()
        try:
            answer = _Answer(stream, self.address)
            with suppress(OSError, anyio.BrokenResourceError):  # who refuses need not read all: the answer says why
                await stream.send("\r\n".join([*head, "", ""]).encode() + body)
            await answer.read_head()
            if checks and answer.status >= 300:
                raise _refused(answer.code, await answer.read_all())
            yield answer
        finally:
            await anyio.aclose_forcefully(stream)

    async def _connect(self) -> ByteStream:
        try:
            with anyio.fail_after(self._config.connect_timeout):
                if self._tls is None:
                    return await anyio.connect_tcp(self._host, self._port)
                return await anyio.connect_tcp(self._host, self._port, ssl_context=self._tls, tls_standard_compatible=False)
        except TimeoutError:
            raise ConnectionLostError(f"{self.address} cannot be reached within {self._config.connect_timeout:g} s") from None
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream) as error:
            raise ConnectionLostError(f"{self.address} cannot be reached: {_reason(error)}") from error


class _Answer:
    """One answer, as it comes from `stream`."""

    def __init__(self, stream: ByteStream, address: str) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._stream = stream
        self._address = address
        self._parser = httptools.HttpResponseParser(self)
        self._has_head = self._complete = False
        self._body: list[bytes] = []  # what is not read

    @property
    def code(self) -> str:
        return f"HTTP {self.status}"

    async def read_head(self) -> None:
        """Wait for status and headers. Raises `ConnectionLostError`, and `ServerError` for what is not HTTP."""
        while not self._has_head:
            await self._receive()
        self.status = self._parser.get_status_code()

    async def read(self) -> bytes:
        """What came of the body; empty at its end. Raises what `read_head` raises."""
        while not self._body and not self._complete:
            await self._receive()
        body = b"".join(self._body)
        self._body.clear()
        return body

    async def read_all(self) -> bytes:
        """The whole body. Raises what `read_head` raises, and `ServerError` for one that is too long."""
        body = b""
        while piece := await self.read():
            body += piece
            if len(body) > MAX_BYTES:
                raise ServerError(f"{self._address}: an answer has more than {MAX_BYTES} bytes", self.code)
        return body

    async def _receive(self) -> None:
        try:
            self._parser.feed_data(await self._stream.receive())
        except anyio.EndOfStream as error:
            if not self._has_head or {"content-length", "transfer-encoding"} & set(self.headers):
                raise ConnectionLostError(f"{self._address} closed the connection before its answer was complete") from error
            self._complete = True  # the end of the connection is that of the body
        except (OSError, anyio.BrokenResourceError) as error:
            raise ConnectionLostError(f"the connection to {self._address} was lost: {_reason(error)}") from error
        except httptools.HttpParserError as error:
            raise ServerError(f"{self._address} does not speak HTTP: {error}", "HTTP") from error

    # ---- called by the parser ------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._complete = True


def _read_json(body: bytes) -> Any:
    """Raises `ServerError` for what is no JSON, and for an object with an error."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ServerError(f"the server answers with what is no JSON: {shown(body)}", "HTTP 200") from None
    if isinstance(value, dict) and value.get("error"):
        raise _told(value, "HTTP 200", "")
    return value


def _refused(code: str, body: bytes) -> ServerError:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    return _told(value, code, " ".join(body.decode("utf-8", "replace").split())[:300])


def _told(value: Any, code: str, otherwise: str) -> ServerError:
    """The error that a JSON object says, in the forms of OpenAI and others."""
    error = value.get("error", value) if isinstance(value, dict) else None
    if isinstance(error, dict):
        message, reason = error.get("message") or error.get("detail") or otherwise, error.get("code") or error.get("type") or ""
    else:
        message, reason = error or otherwise, ""
    return ServerError(f"{code}: {message}" if message else code, code, str(reason))


def _tls_context(config: HttpConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
    except OSError as error:
        raise ConfigError.of("tls_ca", f"cannot use {config.tls_ca}: {_reason(error)}") from error
    if config.client_cert is not None:
        try:
            context.load_cert_chain(config.client_cert, config.client_key)
        except OSError as error:
            raise ConfigError.of("client_cert", f"cannot use {config.client_cert}: {_reason(error)}") from error
    return context


def _reason(error: BaseException) -> str:
    while (inner := error.__cause__ or next(iter(getattr(error, "exceptions", ())), None)) is not None:
        error = inner
    if isinstance(error, OSError) and error.errno and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


_FINISH_REASONS = {
    "stop": FinishReason.EOS,
    "tool_calls": FinishReason.EOS,
    "function_call": FinishReason.EOS,
    "length": FinishReason.MAX_TOKENS,
    "repetition": FinishReason.REPETITION,
}
"""Those that have another name become ERROR."""
_NAMES = {"template_kwargs": "chat_template_kwargs"}  # which more servers know


@dataclass(frozen=True, slots=True)
class HttpModel:
    """What a server over HTTP tells of its model."""

    name: str
    max_model_len: int | None = None  # of prompt and output; None: it does not tell
    chat_template: bool = True  # whether it answers chats; servers that do not tell do

    def describe(self) -> str:
        """Describe the model in one line for people."""
        return self.name + (f": context of {self.max_model_len:,} tokens" if self.max_model_len is not None else "")


class OpenAIClient:
    """Each request has a connection of its own. `model`: what to ask for; None: the first model that the server lists."""

    def __init__(self, config: HttpConfig, model: str | None = None) -> None:
        """Raises `ConfigError` for files that cannot be used."""
        self._server = HttpServer(config)
        self._asked = model
        self.model = HttpModel(model or "")  # once started
        self._limit: int | None = None

    async def start(self) -> None:
        """Find the model. Raises `ConfigError` for one that the server does not list, `ServerError` and `ConnectionLostError`."""
        try:
            listed = (await self._server.get("/models"))["data"]
            models = {str(one["id"]): one for one in listed}
        except ServerError:
            if self._asked is None:
                raise
            return  # some have no list
        except (KeyError, TypeError):
            raise ServerError(f"{self._server.address} lists no models as OpenAI's API does", "HTTP 200") from None
        name = self._asked or next(iter(models), None)
        if name is None:
            raise ServerError(f"{self._server.address} lists no model", "HTTP 200")
        if name not in models:
            raise ConfigError.of("model", f"{name!r} is not served at {self._server.address}; there is {shown(list(models))}")
        told = models[name]
        context = told.get("max_model_len")
        self.model = HttpModel(name, context if isinstance(context, int) else None, told.get("chat_template") is not False)
        if told.get("owned_by") == "aengine":
            self._limit = self.model.max_model_len

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> OpenAIStream:
        """The answer to `messages`, in the form of chat templates. `fields`: parameters and options, by our names."""
        body = {**_body(self.model.name, fields), "messages": [_message(message) for message in messages]}
        if tools is not None:
            body["tools"] = list(tools)
        return OpenAIStream(self._server.events("/chat/completions", body))

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> OpenAIStream:
        """The continuation of a text. Where nothing limits it, that of an aengine goes on to the end of the context; others have defaults
        of their own."""
        limit = {} if self._limit is None else {"max_tokens": self._limit}
        return OpenAIStream(self._server.events("/completions", {**limit, **_body(self.model.name, fields), "prompt": prompt}))


class OpenAIStream:
    """The events of one answer: an async iterator for one reader. The request is made when it is first read."""

    timing = Timing()  # which servers do not tell

    def __init__(self, chunks: AsyncGenerator[Any, None]) -> None:
        self.usage = Usage()  # so far, if the server tells it
        self.finish_reason: FinishReason | None = None  # None while the output has not ended
        self._chunks = chunks
        self._built = MessageBuilder()
        self._calls: dict[int, int] = {}  # our numbers of calls, from 0, by those of the server
        self._open: dict[int, str] = {}  # arguments of calls that have not ended, by our numbers

    @property
    def message(self) -> ChatMessage:
        """What the events so far add up to."""
        return self._built.message()

    async def aclose(self) -> None:
        """End the request, whose events need not have been read."""
        await self._chunks.aclose()

    async def __aiter__(self) -> AsyncIterator[Event]:
        async for chunk in self._chunks:
            for event in self._read(chunk):
                self._built.add_event(event)
                yield event
        if self.finish_reason is None:
            raise ConnectionLostError("the answer broke off: the server did not say why it ended")

    def _read(self, chunk: Any) -> list[Event]:
        """Raises `ServerError` for a chunk of another form."""
        try:
            if usage := chunk.get("usage"):
                self.usage = _usage(usage)
            for choice in chunk.get("choices") or ():
                delta = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
                events = self._read_delta(delta)
                if reason := choice.get("finish_reason"):
                    self.finish_reason = _FINISH_REASONS.get(reason, FinishReason.ERROR)
                    events += self._end_calls()
                return events
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"the server sent what is no chunk of OpenAI's API: {shown(chunk)}", "HTTP 200") from error
        return []

    def _read_delta(self, delta: Mapping[str, Any]) -> list[Event]:
        events: list[Event] = []
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            events.append(ReasoningDelta(text=reasoning))
        if content := delta.get("content") or delta.get("refusal"):
            events.append(ContentDelta(text=content))
        for position, call in enumerate(delta.get("tool_calls") or ()):
            index, function = call.get("index", position), call.get("function") or {}
            if index not in self._calls:
                events += self._end_calls()
                self._calls[index] = len(self._calls)
                self._open[self._calls[index]] = ""
                events.append(CallStarted(index=self._calls[index], id=call["id"], name=function["name"]))
            if arguments := function.get("arguments"):
                self._open[self._calls[index]] += arguments
                events.append(ArgumentsDelta(index=self._calls[index], text=arguments))
        return events

    def _end_calls(self) -> list[Event]:
        ended: list[Event] = [CallEnded(index=index, complete=_is_object(arguments)) for index, arguments in self._open.items()]
        self._open.clear()
        return ended


def _body(model: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    asked = {_NAMES.get(name, name): _plain(value) for name, value in fields.items()}
    return {"model": model, **asked, "stream": True, "stream_options": {"include_usage": True}}


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutput):
        return {name: given for name, given in asdict(value).items() if given not in (None, False, ())}
    return value


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """In the form of OpenAI's: arguments are text, and the reasoning of before is not sent, which some servers refuse."""
    written = {name: value for name, value in message.items() if name not in ("reasoning_content", "tool_calls")}
    if calls := message.get("tool_calls"):
        written["tool_calls"] = [{**call, "function": {**call["function"], "arguments": _as_text(call)}} for call in calls]
    if isinstance(content := message.get("content"), list | tuple):
        written["content"] = [_part(part) for part in content]
    return written


def _part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if part.get("type") == "text":
        return part
    (image,) = images_of([{"content": [part]}])
    if isinstance(image, Video):
        return {"type": "video", "video": [url_of_image(image_file(frame)) for frame in image.frames], "fps": image.fps}
    url = image.url if isinstance(image, RemoteImage) else url_of_image(image_file(image))
    return {"type": "image_url", "image_url": {"url": url}}


def _as_text(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _usage(usage: Mapping[str, Any]) -> Usage:
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    return Usage(
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_prompt_tokens=int(prompt.get("cached_tokens") or 0),
        completion_tokens=int(usage.get("completion_tokens") or 0),
        reasoning_tokens=int(completion.get("reasoning_tokens") or 0),
        image_tokens=int(prompt.get("image_tokens") or 0),
        rewritten_tokens=int(prompt.get("rewritten_tokens") or 0),
        loaded_prompt_tokens=int(prompt.get("loaded_tokens") or 0),
    )


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
