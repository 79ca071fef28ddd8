"""The paths of the HTTP door.

`HttpFrontend`: the life of the HTTP port. Binds it in the running event loop, and closes it; what is served is in the routes.

With TLS there is a context of Python's `ssl` whose certificate is another one as soon as its files are. Connections keep the certificate
that they began with."""

from __future__ import annotations

import asyncio
import socket
import ssl
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from uvicorn.server import ServerState

from aengine.api.errors import AEngineError
from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import CertificateFiles
from aengine.server.core.core import BindError, Core, address_of
from aengine.server.core.decoding import UNCOUNTED_BYTES
from aengine.server.core.resume import ResumableStreams
from aengine.server.http import anthropic, chat_completions, completions, models, ollama, responses
from aengine.server.http import models as texts
from aengine.server.http.batches import FilesAndBatches
from aengine.server.http.bodies import parse
from aengine.server.http.boundary import Handler, HttpApp, Route, read_stream
from aengine.server.http.connection import IDLE_SECONDS, Connection, ConnectionCounts
from aengine.server.http.http_errors import ANTHROPIC
from aengine.server.http.http_exchange import HttpExchange
from aengine.server.http.models import ChatPage

CoreHandler = Callable[[Core, HttpExchange], Awaitable[None]]
TABLE: tuple[tuple[str, str, CoreHandler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions.chat_completions),
    ("POST", "/v1/completions", completions.completions),
    ("POST", "/v1/responses/input_tokens", responses.input_tokens),
    ("POST", "/v1/embeddings", texts.embeddings),
    *(("POST", path, texts.rerank) for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
    *(("POST", f"{prefix}/score", texts.score) for prefix in ("/v1", "")),
    *(("POST", f"{prefix}/classify", texts.classify) for prefix in ("/v1", "")),
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{model}", models.model),
    *(("POST", f"{prefix}/tokenize", texts.tokenize) for prefix in ("", "/v1")),
    *(("POST", f"{prefix}/detokenize", texts.detokenize) for prefix in ("", "/v1")),
    ("GET", "/tokenizer_info", texts.tokenizer_info),
    ("GET", "/version", models.version),
    ("GET", "/load", models.load),
    ("GET", "/metrics", models.metrics),
)
POLLED = ("/load", "/metrics")
ANTHROPIC_TABLE = (
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
)
OLLAMA_TABLE = (
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/embed", ollama.embed),
    ("POST", "/api/embeddings", ollama.embed_one),
    ("POST", "/api/show", ollama.show),
    ("GET", "/api/tags", ollama.tags),
    ("GET", "/api/ps", ollama.running),
    ("GET", "/api/version", ollama.version),
)


def routes(core: Core, resumables: ResumableStreams, stored: responses.StoredResponses, files: FilesAndBatches) -> list[Route]:
    """All routes of the HTTP door, which serve `core`."""
    has_several = core.backend.models is not None

    def bound(verb: str, handler: CoreHandler) -> Handler:
        return partial(_of_model, core, handler) if has_several and verb == "POST" else partial(handler, core)

    found = [Route(verb, path, bound(verb, handler), is_polled=path in POLLED) for verb, path, handler in TABLE]
    found += [Route(verb, path, bound(verb, handler), errors=ANTHROPIC) for verb, path, handler in ANTHROPIC_TABLE]
    found += [Route(verb, path, bound(verb, handler), errors=ollama.ERRORS) for verb, path, handler in OLLAMA_TABLE]
    found.append(Route("POST", "/v1/responses", bound("POST", partial(responses.responses, stored))))
    for verb, handler in (("GET", stored.retrieve), ("POST", stored.cancel), ("DELETE", stored.delete)):
        found.append(Route(verb, "/v1/responses/{response}", handler))
    found += [Route("POST", "/v1/files", files.upload), Route("GET", "/v1/files", files.list_files)]
    found += [Route("GET", "/v1/files/{file}", files.get_file), Route("DELETE", "/v1/files/{file}", files.delete_file)]
    found += [Route("POST", "/v1/batches", files.create), Route("GET", "/v1/batches", files.list_batches)]
    found += [Route("GET", "/v1/batches/{batch}", files.get_batch), Route("POST", "/v1/batches/{batch}", files.cancel)]
    found.append(Route("GET", "/v1/streams/{stream}", partial(read_stream, resumables)))
    found.append(Route("GET", "/health", partial(models.health, core), is_apart=True))
    if core.config.chat_page:
        page = ChatPage()
        found.append(Route("GET", "/", page, is_public=True))
        found.append(Route("GET", "/static/{file}", page, is_public=True, is_polled=True))
    return found


async def _of_model(core: Core, handler: CoreHandler, exchange: HttpExchange) -> None:
    """Have `handler` serve a request with the model that its body names. A stream whose model is still loaded then says so in comments."""
    body, found = await exchange.read_ahead(), dict[str, Any]()
    with suppress(AEngineError):  # what is wrong with it the handler says
        found = parse(body) if len(body) <= UNCOUNTED_BYTES else await exchange.decoding.run(parse, body)
    name = found.get("model")
    loading = asyncio.ensure_future(core.of_model(name if isinstance(name, str) else "", exchange.held))
    try:
        while not (await asyncio.wait((loading,), timeout=PROGRESS_SECONDS))[0]:
            if found.get("stream") is True and exchange.keep is None and not exchange.call.method.startswith("POST /api/"):
                await exchange.begin_events()
                await exchange.send(b": loading the model\n\n")
    finally:
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,))
    await handler(loading.result(), exchange)


def server_context(config: ServerConfig) -> ssl.SSLContext:
    """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
    files = CertificateFiles(config)

    def prepared(context: ssl.SSLContext) -> ssl.SSLContext:
        context.set_alpn_protocols(["http/1.1"])
        if files.needs_client:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    first = current = prepared(files.load().context)

    def on_handshake(handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called for each, whether or not the client names a server."""
        nonlocal current
        fresh = files.load_if_changed()
        if fresh is not None:
            current = prepared(fresh.context)
        if current is not first:
            handshake.context = current

    first.sni_callback = on_handshake
    return first


BACKLOG = 2048
UNSENT_BYTES = 64 * 1024
"""Most bytes of a connection that wait in the kernel to be sent: what a client does not take is to be left in the engine."""
CHECK_SECONDS = 5.0
PROGRESS_SECONDS = 1.0
"""Between two signs of life of a stream whose model is loaded."""
CLOSE_SECONDS = 0.5
"""How long the last bytes of connections may take to be sent."""
METHODS = ("GET", "POST", "DELETE")
EXPOSED_HEADERS = ("x-request-id", "x-stream-id", "retry-after")


class HttpFrontend:
    """The HTTP door: serves `core` over HTTP/1.1."""

    ok = "200"  # the code of a call that succeeded

    def __init__(self, core: Core, resumables: ResumableStreams) -> None:
        assert core.config.http_port is not None
        self._resumables = resumables
        self._config = core.config
        self._port = core.config.http_port
        self._stored = responses.StoredResponses(core)
        self._files = FilesAndBatches(core, lambda path, body: served.answer_within(path, body))
        found = routes(core, resumables, self._stored, self._files)
        self.methods = {route.method: route.method for route in found if not route.is_apart}  # with their labels in metrics
        served = HttpApp(core, found, resumables)
        app: Any = served
        self._style_of = served.style_of
        if origins := core.config.http_cors_origins:
            app = CORSMiddleware(app, origins, allow_methods=METHODS, allow_headers=("*",), expose_headers=EXPOSED_HEADERS)
        self._uvicorn = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=int(IDLE_SECONDS),
        )
        self._state = ServerState()
        self._addresses = ConnectionCounts(core.config.max_connections_per_address)
        self._server: asyncio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """host:port; after `start()` with the port that the system picked for 0."""
        return address_of(self._config.host, self._port)

    async def start(self) -> None:
        """Open the port. Raises `BindError`, or `ConfigError` for files that cannot be used."""
        context = await asyncio.to_thread(server_context, self._config) if self._config.tls else None
        self._uvicorn.load()
        make = cast(Callable[[], asyncio.Protocol], lambda: Connection(self._uvicorn, self._state, self._addresses, self._style_of))
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                make, self._config.host, self._port, ssl=context, backlog=BACKLOG, reuse_address=True, start_serving=False
            )
        except OSError as error:
            raise BindError(f"cannot listen on {self.address}: {error.strerror or error}") from error
        for listener in self._server.sockets:
            self._set_options(listener)
        self._port = self._server.sockets[0].getsockname()[1]
        await self._server.start_serving()
        self._watching = asyncio.create_task(self._watch(), name="aengine-idle-connections")

    def begin_serving(self) -> None:
        """The engine takes requests."""
        self._stored.resume()
        self._files.batches.resume()

    def _set_options(self, listener: Any) -> None:
        """Connections inherit them."""
        keepalive = {"TCP_KEEPIDLE": self._config.keepalive_time, "TCP_KEEPINTVL": self._config.keepalive_timeout}
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds dead peers, whose requests are then cancelled
        if sys.platform == "linux":
            for name, seconds in keepalive.items():
                listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(max(round(seconds), 1), 32767))
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 1)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            for connection in self._connections():
                connection.close_if_idle(time.monotonic())

    def _connections(self) -> list[Connection]:
        return [connection for connection in self._state.connections if isinstance(connection, Connection)]

    async def stop(self) -> None:
        """Close the port; no call of a client is under way."""
        await self._resumables.aclose()
        await self._stored.aclose()
        await self._files.batches.aclose()
        if self._watching is not None:
            self._watching.cancel()
        if self._server is None:
            return
        self._server.close()
        open_ones = self._connections()
        for connection in open_ones:
            connection.shutdown()
        if open_ones:
            await asyncio.wait([connection.closed for connection in open_ones], timeout=CLOSE_SECONDS)
        for connection in self._connections():
            connection.abort()
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=CLOSE_SECONDS)
