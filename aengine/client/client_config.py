"""`ClientConfig`: the settings of a client. Validates what can be validated without the network or the files."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from aengine.api.errors import ConfigError
from aengine.api.fields import POSITIVE, Accepts, FieldChecks, Refusal, check_fields, check_names, integer, is_not

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_RESUME_SECONDS = 600.0  # as long as a server keeps a request without a reader
_ADDRESS = re.compile(r"(?:dns|unix|unix-abstract|ipv4|ipv6):\S+|(?:\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_TOKEN = re.compile(r"[\x21-\x7e]+")  # what metadata can carry
_TLS = Accepts(lambda tls: isinstance(tls, bool | str) and tls != "", "true, false or the path of a PEM file")


def is_url(text: str) -> bool:
    """Whether `text` is the address of a server that speaks HTTP."""
    return text.startswith(("http://", "https://"))


def _address(value: object) -> object:
    match = _ADDRESS.fullmatch(value) if isinstance(value, str) else None
    if match and int(match["port"] or 0) <= 65535:
        return value
    raise Refusal(is_not(value, "host:port with a port in [0, 65535], or a name with a scheme such as unix:"))


def read_token(value: object) -> object:
    if isinstance(value, str) and _TOKEN.fullmatch(value):
        return value
    raise Refusal("must consist of visible ASCII characters")  # without the value: it is a secret


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """Where the server is and how to talk to it. Raises `ConfigError` naming every field that is out of range."""

    address: Annotated[str, _address] = DEFAULT_ADDRESS
    """host:port, or a name that gRPC resolves, such as unix:/run/aengine.sock. Where it means several servers, the client uses the
    first that takes its connection, for everything, and after a lost connection again the first."""
    token: Annotated[str | None, read_token] = field(default=None, repr=False)
    """Sent with every call as `authorization: Bearer <token>`; whoever can read the connection can read it, unless there is TLS."""
    tls: Annotated[bool | str, _TLS] = False
    """True: TLS, trusting the authorities of gRPC. A path: TLS, trusting those in this PEM file. False: plain text."""
    client_cert: str | None = None
    """PEM file with this client's certificate, for servers that ask for one."""
    client_key: str | None = None
    """PEM file with its private key."""
    server_name: str | None = None
    """The name that the server's certificate must have, where it is not the one in the address."""
    connect_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds that start() waits for a server that serves."""
    max_retries: Annotated[int, integer(0, 100)] = 3
    """How often a call is made again that found no server or one that is not ready (UNAVAILABLE), as long as no event has come."""
    auto_resume: bool = False
    """Whether streams survive a lost connection: the server then keeps a request, and the client takes it up where it was cut."""
    resume_timeout: Annotated[float, POSITIVE] = 30.0
    """Seconds that auto_resume tries to get back to the server, at most 600. The server keeps a request without a reader as long."""
    multiplex: bool = False
    """Whether streams share a call (Session), which costs less per token. Such streams are neither retried nor resumed, and reach
    the server in the order of their submission, which calls of their own need not. A request of more than 128 KiB has one all the same."""

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)
        check = FieldChecks()
        for name in ("client_cert", "client_key", "server_name"):
            if getattr(self, name) is not None and self.tls is False:
                check.add_violation(name, is_not(getattr(self, name), "possible without tls"))
        if (self.client_cert is None) != (self.client_key is None):
            missing = "client_cert" if self.client_cert is None else "client_key"
            check.add_violation(missing, is_not(None, "a path: certificate and key belong together"))
        if self.resume_timeout > MAX_RESUME_SECONDS:
            check.add_violation("resume_timeout", is_not(self.resume_timeout, f"at most {MAX_RESUME_SECONDS:g}"))
        if self.multiplex and self.auto_resume:
            check.add_violation("multiplex", is_not(True, "possible with auto_resume: streams that share a call are not resumed"))
        check.finish(ConfigError)

    @classmethod
    def of(cls, address_or_config: str | ClientConfig, **overrides: Any) -> ClientConfig:
        """A config from an address or another config, with some fields replaced. Raises `ConfigError` for unknown names."""
        check_names(cls, overrides)
        if isinstance(address_or_config, ClientConfig):
            return replace(address_or_config, **overrides)
        return cls(**{"address": address_or_config, **overrides})
