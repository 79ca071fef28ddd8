"""gRPC's server for asyncio, but for how calls are accepted.

`grpc.aio` accepts one call of each method in a turn of the event loop, dies of a path that is not UTF-8, with every call that it serves,
and cannot end a call whose client takes nothing. Here several are accepted at a time, paths of methods that do not exist are not looked at,
and a `Carrier` ends its call.

Owns all that is used of grpc's private module, in the releases that pyproject.toml allows. Does not know what calls do.

The name in a client's certificate, from what gRPC says of it.

TLS credentials of gRPC. Connections keep the certificate that they began with.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import grpc
from grpc import aio
from grpc._cython import cygrpc
from grpc.aio._server import Server

from aengine.server.config.options import ServerConfig
from aengine.server.core.auth import CertificateFiles, CertificateName, Loaded
from aengine.server.core.errors import ServiceError

ACCEPT_AT_ONCE = 8
"""Calls of one method that are accepted in a turn of the event loop."""
NO_METHOD = "none"
"""Stands for the path of a call of a method that does not exist."""


class Carrier:
    """gRPC's part of a call, which lasts until the client has taken the last of it."""

    task: asyncio.Task[None] | None = None  # until it is done: its context holds this

    def cut(self) -> None:
        """End it whatever the client does, once the task that calls this is done, which must be the call's own: what the client has not
        taken is dropped, and it gets CANCELLED."""
        own = asyncio.current_task()
        assert own is not None
        loop = own.get_loop()
        # Later, not here: should the client end the call meanwhile, gRPC would see its task cancelled while that reads the end of `own`.
        own.add_done_callback(lambda _: loop.call_soon(self._cancel))

    def _cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


CARRIER: ContextVar[Carrier | None] = ContextVar("CARRIER", default=None)
"""The carrier of the call that a task runs."""


def make_server(interceptors: Sequence[aio.ServerInterceptor], options: Sequence[tuple[str, int]]) -> aio.Server:
    """A server like that of `aio.server`."""
    return cast(aio.Server, _Server(tuple(interceptors), tuple(options)))


class _Server(Server):
    def __init__(self, interceptors: tuple[aio.ServerInterceptor, ...], options: tuple[tuple[str, int], ...]) -> None:
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, interceptors, options)


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    """The methods that it overrides are those that its base class waits with for the next call; here they do so for good."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, interceptors: tuple[aio.ServerInterceptor, ...], options: tuple[tuple[str, int], ...]
    ) -> None:
        super().__init__(loop, None, (), interceptors, options, None)
        self._accept_loop = loop
        self._chain = interceptors
        self._methods: dict[str, Any] = {}
        self._carried: set[asyncio.Task[None]] = set()

    def add_registered_method_handlers(self, handlers: Mapping[str, Any]) -> None:
        super().add_registered_method_handlers(handlers)
        self._methods.update(handlers)

    def resolve_handler(self, details: Any) -> Any:
        """Called by grpc: the handler of a method, None if there is none."""
        return self._methods.get(details.method)

    async def _request_registered_call(self, method: bytes) -> None:
        request = super()._request_registered_call
        await self._accept(lambda: request(method), method.decode())

    async def _request_call(self) -> None:
        await self._accept(super()._request_call, NO_METHOD)

    async def _accept(self, request: Callable[[], Awaitable[Any]], method: str) -> None:
        """Take calls until the server shuts down, and `request` raises."""

        async def accept() -> None:
            while True:
                self._begin(await request(), method)

        await asyncio.gather(*(accept() for _ in range(ACCEPT_AT_ONCE)))

    def _begin(self, state: Any, method: str) -> None:
        carrier = Carrier()
        CARRIER.set(carrier)
        work = cygrpc._handle_rpc(method, self, self._chain, state, self._accept_loop, False)
        carrier.task = self._accept_loop.create_task(cygrpc._schedule_rpc_coro(work, state, self._accept_loop, method))
        self._carried.add(carrier.task)

        def forget(task: asyncio.Task[None]) -> None:
            self._carried.discard(task)
            carrier.task = None

        carrier.task.add_done_callback(forget)


_VALUE = rb"(?:[^\\,+]|\\[0-9A-Fa-f]{2}|\\[^0-9A-Fa-f])*"
_ATTRIBUTE = re.compile(rb"([^=,+\\]+)=(" + _VALUE + rb")(?:[,+]|\Z)")
_ESCAPE = re.compile(rb"\\([0-9A-Fa-f]{2}|.)", re.DOTALL)


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> CertificateName | None:
    """The name of the client's certificate, None without one. Raises `ServiceError` for one whose common name cannot be shown as it is.

    Core gives the common name as a C string, which ends at the first NUL of the name: `root\\0x` would be `root`. So the name is read from
    the whole subject, which core gives in the form of RFC 2253, with escapes.
    """
    for pem in auth_context.get("x509_pem_cert", ()):
        names = [name for subject in auth_context.get("x509_subject", ()) for name in _common_names(subject)]
        return CertificateName.of(names, pem)
    return None


def _common_names(subject: bytes) -> list[str]:
    names: list[str] = []
    end = 0
    while end < len(subject):
        attribute = _ATTRIBUTE.match(subject, end)
        if attribute is None:
            raise ServiceError("BAD_CREDENTIALS", "the subject of the client's certificate cannot be read")
        end = attribute.end()
        if attribute[1] == b"CN":
            names.append(_text(attribute[2]))
    return names


def _text(value: bytes) -> str:
    if value.startswith(b"#"):
        raise ServiceError("BAD_CREDENTIALS", "the common name of the client's certificate is not a text")
    raw = _ESCAPE.sub(lambda escape: bytes.fromhex(escape[1].decode()) if len(escape[1]) == 2 else escape[1], value)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise ServiceError("BAD_CREDENTIALS", "the common name of the client's certificate is not UTF-8") from None


def server_credentials(config: ServerConfig) -> grpc.ServerCredentials:
    """Raises `ConfigError` naming the option whose file is not usable. Blocks."""
    files = CertificateFiles(config)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """gRPC calls this for each handshake, in a thread of its own: a new configuration, None if nothing changed. Must not raise."""
        fresh = files.load_if_changed()
        return None if fresh is None else _configuration(fresh)

    first = _configuration(files.load())
    return grpc.dynamic_ssl_server_credentials(first, fetch, files.needs_client)  # type: ignore[arg-type]


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    content = loaded.content
    return grpc.ssl_server_certificate_configuration([(content["tls_key"], content["tls_cert"])], content.get("tls_client_ca"))
