"""`ClientConfig`: the settings of a client, validated as far as that needs neither the network nor the files; and what command lines of
clients share: the flags that say where the server is, values that are read from files, and exit codes.

Imports no gRPC, so that a program can read its flags first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any

from aengine.api.dataclass import dataclass
from aengine.api.errors import AEngineError, ConfigError
from aengine.api.fields import POSITIVE, Accepts, FieldChecks, Refusal, check_fields, check_names, integer, is_not, shown

TOKEN_VARIABLE = "AENGINE_TOKEN"
"""The variable with the token that a server requires."""
GRPC = "grpc://"
"""What an address of gRPC may begin with."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""
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


def exit_code(program: str, run: Callable[[], int]) -> int:
    """That of `run`; 1 after an error, which is printed."""
    try:
        return run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except AEngineError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of stdout has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 1


def add_server_flags(group: argparse._ArgumentGroup, address: str | None, *, whole: bool = True) -> None:
    """The flags that `client_config` and `http_fields` read; `address` is the default. Without `whole` the help shows the first two."""

    def add(flag: str, text: str, **fields: Any) -> None:
        shown = whole or flag in ("--address", "--token-file")
        group.add_argument(flag, help=text if shown else argparse.SUPPRESS, **fields)

    default = "" if address is None else " (default: %(default)s)"
    add("--address", f"host:port of gRPC, or http://host:port of HTTP{default}", default=address)
    token = f"file with the token that the server requires; without it the token is that of {TOKEN_VARIABLE}, if there is one"
    add("--token-file", token, metavar="FILE")
    add("--tls", "connect with TLS, trusting the usual authorities; https:// means it", action="store_true")
    add("--tls-ca", "connect with TLS, trusting the authorities in this PEM file", metavar="FILE")
    add("--tls-cert", "PEM file with a certificate of this client", dest="client_cert", metavar="FILE")
    add("--tls-key", "PEM file with its private key", dest="client_key", metavar="FILE")
    add("--server-name", "the name in the server's certificate, if it is not the address", metavar="NAME")
    add("--connect-timeout", "how long to wait for the server (default: %(default)s)", type=float, default=10.0, metavar="SECONDS")


def client_config(options: argparse.Namespace, **fields: Any) -> ClientConfig:
    """The configuration of a gRPC client, from the flags and other `fields`. Raises `ConfigError`."""
    names = ("client_cert", "client_key", "server_name", "connect_timeout")
    fields |= {name: getattr(options, name) for name in names}
    return ClientConfig(address=options.address.removeprefix(GRPC), token=_token(options), tls=options.tls_ca or options.tls, **fields)


def http_fields(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of an `HttpConfig`, from the same flags. Raises `ConfigError`."""
    for name in ("tls", "server_name"):
        if getattr(options, name):
            raise ConfigError.of(name, "is for gRPC: https:// is TLS, and its certificate has the name of the host")
    names = ("address", "tls_ca", "client_cert", "client_key", "connect_timeout")
    return {"token": _token(options), **{name: getattr(options, name) for name in names}}


def _token(options: argparse.Namespace) -> str | None:
    if options.token_file is not None:
        return read_file("token_file", options.token_file).strip()
    return os.environ.get(TOKEN_VARIABLE) or None


def read_json(field: str, text: str) -> Any:
    """Raises `ConfigError` of `field`, as the other functions here."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError.of(field, f"{shown(text)} is not JSON: {error}") from None


def read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError.of("prompt", f"stdin is not UTF-8: {error.reason} at byte {error.start}") from None


def read_file(field: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise ConfigError.of(field, f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError.of(field, f"{path} is not UTF-8") from None
