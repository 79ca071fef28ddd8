"""`ServerConfig`: how a server is set up. Validates what can be known without touching files, the network or the engine."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any

from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.api.fields import (
    MAX_INT32,
    NOT_NEGATIVE,
    POSITIVE,
    Accepts,
    FieldChecks,
    Size,
    check_fields,
    check_names,
    integer,
    one_of,
    text,
)
from aengine.router.router_config import RouterConfig

IMAGE_URL = re.compile(r"https://([A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?)(?::([0-9]{1,5}))?(/[!-\[\]-~]*)?")
"""A URL that an image may have: its host, its port and its path, in ASCII, without a user or what parsers read differently."""
GROUPS = {
    "host": "address",
    "tls_cert": "security",
    "max_message_bytes": "limits",
    "journal": "stored responses",
    "models": "several models",
    "drain_seconds": "life",
    "log_level": "logging",
    "metrics_host": "metrics",
}
"""The first field of each group, and the title of the group, for the help."""
_IMAGE_URLS = Accepts(
    lambda urls: isinstance(urls, tuple) and all(isinstance(url, str) and IMAGE_URL.fullmatch(url) for url in urls),
    "a tuple of https://host/, each perhaps with a port or a part of the path",
)
_MODELS = Accepts(
    lambda models: (
        isinstance(models, Mapping) and all(isinstance(one, str) for pair in models.items() for one in pair) and "" not in models
    ),
    "a mapping from names to paths",
)
_NAMES = Accepts(lambda names: isinstance(names, tuple) and all(isinstance(name, str) and name for name in names), "a tuple of names")
_ALIASES = Accepts(
    lambda names: isinstance(names, tuple) and all(isinstance(name, str) and all(name.split("=", 1)) for name in names),
    "a tuple of names, each perhaps with =name behind it",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that is fixed for the life of a server. Raises `ConfigError` naming every field that is out of range."""

    host: Annotated[str, text("an address")] = "127.0.0.1"
    """Address to listen on. One that is not loopback needs TLS or insecure."""
    port: Annotated[int | None, integer(0, 65535)] = 50051
    """Port of gRPC; 0 lets the system pick one. None: no gRPC."""
    http_port: Annotated[int | None, integer(0, 65535)] = None
    """Port of HTTP, with the API of OpenAI; 0 lets the system pick one. None: no HTTP."""
    http_cors_origins: Annotated[tuple[str, ...], _NAMES] = ()
    """Origins of the pages, beside the server's own, that may call it over HTTP, such as https://example.com; * for all."""
    served_model_name: Annotated[tuple[str, ...], _NAMES] = ()
    """Names by which clients know the model; the first is told to those that ask for none. Default: its Hugging Face id, or the last part
    of its path."""
    model_aliases: Annotated[tuple[str, ...], _ALIASES] = ()
    """Further names that clients may ask for, with * for anything, such as claude-*; or name=adapter, for an adapter. They are not
    listed."""
    unsupported_tools: Annotated[str, one_of("ignore", "refuse")] = "ignore"
    """What becomes of tools that no client runs, such as web_search, over HTTP: ignore (left out, and told in a header), refuse."""
    http_hosts: Annotated[tuple[str, ...], _NAMES] = ()
    """Names, beside those of this machine, that requests over HTTP may have in Host, such as that of a proxy before the server;
    * for all. On a loopback address without tokens or clients' certificates, and with this set, others are refused, and so are
    pages of other origins than those of http_cors_origins."""
    image_urls: Annotated[tuple[str, ...], _IMAGE_URLS] = ()
    """How URLs begin that images are fetched from, each https://host/, or with a port or a part of the path. None: no images are fetched;
    clients send the images themselves, or data: URLs."""
    chat_page: bool = True
    """Serve a page to chat on at / over HTTP."""
    insecure: bool = False
    """Allow plain text on an address that can be reached from elsewhere."""
    tls_cert: Annotated[str | None, text("a path")] = None
    """PEM file with the server's certificate and its chain. Read again when it changes."""
    tls_key: Annotated[str | None, text("a path")] = None
    """PEM file with the certificate's private key, not encrypted. Read again when it changes."""
    tls_client_ca: Annotated[str | None, text("a path")] = None
    """PEM file with the authorities that sign clients' certificates. With it a client must have one."""
    token_file: Annotated[str | None, text("a path")] = None
    """File of bearer tokens, one `name token` or `token` per line; # begins a comment. With it every call except health
    checks needs a token. Read again when it changes."""
    admin_token_file: Annotated[str | None, text("a path")] = None
    """File of bearer tokens, as token_file, that may call AdminService too."""
    admin_client_names: Annotated[tuple[str, ...], _NAMES] = ()
    """Common names of clients' certificates that may call AdminService too. A certificate with several common
    names has no name."""
    receipt_key: Annotated[str | None, text("a path")] = None
    """PEM file with an Ed25519 private key, which receipts are signed with. None: they are not signed."""
    weights_roots: Annotated[tuple[str, ...], _NAMES] = ()
    """Directories that AdminService may load adapters and weights from. None: it loads nothing."""
    debug_errors: bool = False
    """Tell clients the traceback of an internal error. It may show what other clients sent."""
    max_message_bytes: Annotated[int, Size(1024, MAX_INT32)] = 16 * 1024 * 1024
    """Largest message in either direction, in bytes, or a size such as 8MiB."""
    max_metadata_bytes: Annotated[int, Size(1024, 2**24)] = 16 * 1024
    """Largest metadata of a call in bytes, or a size such as 32KiB, as HTTP/2 counts them: 32 bytes for each entry beside its own."""
    max_calls: Annotated[int, integer(1, MAX_INT32)] = 8192
    """Most calls at a time on all connections; more are refused. Health checks have the same limit of their own."""
    max_concurrent_streams: Annotated[int, integer(1, MAX_INT32)] = 1024
    """Most calls at a time on one connection; more wait."""
    max_decoding_bytes: Annotated[int, integer(1024, 2**40)] = 256 * 1024 * 1024
    """Most bytes at a time of messages above 64 KiB whose calls are not answered yet. Further ones wait up to 10 seconds, then they
    are refused."""
    max_decoding_bytes_per_caller: Annotated[int, integer(1024, 2**40)] = 128 * 1024 * 1024
    """The same for one caller: the name of its token or certificate, or else its address."""
    max_sequences_per_caller: Annotated[int | None, integer(1, MAX_INT32)] = None
    """Most sequences (a request has n) of one caller at a time, running and waiting; more are refused. None: any number."""
    max_waiting_tokens_per_caller: Annotated[int | None, integer(1, MAX_INT32)] = None
    """Most prompt tokens of one caller's generations that have no token yet, unless one of them alone has more; more are refused. None:
    any number."""
    max_connections_per_address: Annotated[int, integer(1, MAX_INT32)] = 4096
    """Most connections of one address (of IPv6: of 64 bits of it) at a time over HTTP; more are refused."""
    max_connection_age: Annotated[float | None, POSITIVE] = None
    """Seconds after which the server asks a client to reconnect, so that load spreads over new servers. None: never."""
    max_connection_age_grace: Annotated[float | None, POSITIVE] = None
    """Seconds that the calls of such a connection may still take. None: to their end."""
    keepalive_time: Annotated[float, POSITIVE] = 60.0
    """Seconds of silence after which a connection is pinged, to find peers that are gone."""
    keepalive_timeout: Annotated[float, POSITIVE] = 20.0
    """Seconds after which a connection is closed that did not acknowledge a ping."""
    min_ping_interval: Annotated[float, POSITIVE] = 10.0
    """Seconds. The connection of a client that pings more often is closed."""
    max_ping_strikes: Annotated[int, integer(0, MAX_INT32)] = 2
    """How many pings that come too early are tolerated. 0: all."""
    stall_seconds: Annotated[float, POSITIVE] = 300.0
    """Seconds that a call waits for its client to read a message or to send the request. Then the call is ended."""
    journal: Annotated[str | None, text("a path")] = None
    """Directory of what outlives the process: stored responses, files and batches. Resumable streams, batches, and responses in the
    background go on after it was killed. None: all of them end with it."""
    journal_size: Annotated[int, Size(1 << 16, 2**50)] = 256 * 1024 * 1024
    """Bytes that all that is stored takes at most, such as 1GB; beyond, the oldest of the caller who has most are dropped."""
    journal_seconds: Annotated[float, POSITIVE] = 30 * 86_400.0
    """Seconds after which a stored response, a file or a batch is dropped."""
    models: Annotated[Mapping[str, str], _MODELS] = field(default_factory=dict)
    """Further models by name, each loaded when a request asks for it: NAME=PATH, a path alone, or a directory of models. The options of the
    engine are theirs too; a table [models.NAME] of the file of --config has others, and pin and keep_alive."""
    models_memory: Annotated[int | None, Size(1 << 20)] = None
    """Bytes that the weights and KV caches of all models may take together: those that nobody uses give theirs back. None: any number."""
    models_keep_alive: Annotated[float, POSITIVE] = 300.0
    """Seconds without a request after which one of several models sleeps; after as many more it gives its weights back, and then all."""
    drain_seconds: Annotated[float, NOT_NEGATIVE] = 30.0
    """Seconds that requests in flight may go on after SIGTERM or SIGINT. Requests that are left are cancelled."""
    drain_delay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Seconds between telling health watchers of a drain and refusing new requests, for load balancers to notice."""
    uvloop: Annotated[str, one_of("auto", "on", "off")] = "auto"
    """Use the event loop of uvloop: auto (if it is installed), on, off."""
    log_level: Annotated[str, one_of("debug", "info", "warning", "error")] = "info"
    """Least severe lines to log: debug, info, warning, error."""
    log_format: Annotated[str, one_of("text", "json")] = "text"
    """Format of log lines: text, json (one object per line)."""
    access_log: bool = True
    """Log a line for each call, except for health checks."""
    metrics_host: Annotated[str, text("an address")] = "127.0.0.1"
    """Address of the metrics, over HTTP and without authentication."""
    metrics_port: Annotated[int | None, integer(0, 65535)] = None
    """Port of the metrics; 0 lets the system pick one. None: no metrics."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check = FieldChecks()
        if self.port is None and self.http_port is None:
            check.add_violation("port", "either port or http_port must be set")
        for name, needed in (
            ("tls_cert", "tls_key"),
            ("tls_key", "tls_cert"),
            ("tls_client_ca", "tls_cert"),
            ("admin_client_names", "tls_client_ca"),
            ("max_connection_age_grace", "max_connection_age"),
        ):
            if getattr(self, name) and not getattr(self, needed):
                check.add_violation(name, f"{getattr(self, name)!r} needs {needed} as well")
        if not check.violations and self.exposed and not self.insecure:
            check.add_violation(
                "host", f"{self.host!r} can be reached from elsewhere: it needs TLS (tls_cert and tls_key), or insecure for plain text"
            )
        check.finish(ConfigError)

    @property
    def tls(self) -> bool:
        return self.tls_cert is not None

    @property
    def exposed(self) -> bool:
        """Whether what is sent can be read by others: plain text on an address that is not loopback."""
        return not self.tls and not is_loopback(self.host)

    @property
    def checks_origins(self) -> bool:
        """Whether requests over HTTP must be for a name of the server, and of pages that may call it: else any page that a browser on
        this machine shows could have its requests computed."""
        asks_nobody = is_loopback(self.host) and self.token_file is None and self.tls_client_ca is None
        return asks_nobody or bool(self.http_hosts)

    @classmethod
    def of(cls, config: ServerConfig | None = None, **overrides: Any) -> ServerConfig:
        """`config`, or the defaults, with `overrides`; an unknown name is refused with the names there are."""
        check_names(cls, overrides)
        return replace(config or cls(), **overrides)


def is_loopback(host: str) -> bool:
    """Whether it means the machine itself wherever it is asked for."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name means what the network says


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """One of several models of a server, beside the first."""

    name: str
    engine: EngineConfig
    router: RouterConfig | None = None  # over replicas that compute it, in place of an engine of this process
    pin: bool = False  # it is loaded at the start, and stays
    keep_alive: float | None = None  # in place of `ServerConfig.models_keep_alive`
