"""What command lines of clients share: the flags that say where the server is, values that are read from files, and exit codes.

Imports no gRPC, so that a program can read its flags first.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aengine.api.errors import AEngineError, ConfigError
from aengine.api.fields import shown
from aengine.client.client_config import ClientConfig

if TYPE_CHECKING:
    from aengine.client.openai import HttpConfig

TOKEN_VARIABLE = "AENGINE_TOKEN"
"""The variable with the token that a server requires."""
GRPC = "grpc://"
"""What an address of gRPC may begin with."""
INTERRUPTED = 128 + signal.SIGINT
"""The exit code after Ctrl-C."""


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
    """The flags that `client_config` and `http_config` read; `address` is the default. Without `whole` the help shows the first two."""

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


def http_config(options: argparse.Namespace) -> HttpConfig:
    """The configuration of an HTTP client, from the same flags. Raises `ConfigError`."""
    from aengine.client.openai import HttpConfig

    for name in ("tls", "server_name"):
        if getattr(options, name):
            raise ConfigError.of(name, "is for gRPC: https:// is TLS, and its certificate has the name of the host")
    names = ("address", "tls_ca", "client_cert", "client_key", "connect_timeout")
    return HttpConfig(token=_token(options), **{name: getattr(options, name) for name in names})


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
