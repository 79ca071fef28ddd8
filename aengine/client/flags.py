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
from typing import Any

from aengine.checks import shown
from aengine.client.config import ClientConfig
from aengine.errors import AEngineError, ConfigError

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


def add_server_flags(group: argparse._ArgumentGroup, address: str | None) -> None:
    """The flags that `client_config` reads; `address` is the default."""
    group.add_argument("--address", default=address, help="host:port" + ("" if address is None else " (default: %(default)s)"))
    group.add_argument("--token-file", metavar="FILE", help="file with the token that the server requires")
    group.add_argument("--tls", action="store_true", help="connect with TLS, trusting the usual authorities")
    group.add_argument("--tls-ca", metavar="FILE", help="connect with TLS, trusting the authorities in this PEM file")
    group.add_argument("--tls-cert", dest="client_cert", metavar="FILE", help="PEM file with a certificate of this client")
    group.add_argument("--tls-key", dest="client_key", metavar="FILE", help="PEM file with its private key")
    group.add_argument("--server-name", metavar="NAME", help="the name in the server's certificate, if it is not the address")
    group.add_argument(
        "--connect-timeout", type=float, default=10.0, metavar="SECONDS", help="how long to wait for the server (default: %(default)s)"
    )


def client_config(options: argparse.Namespace, **fields: Any) -> ClientConfig:
    """From the flags and other `fields`. Raises `ConfigError`."""
    token = None if options.token_file is None else read_file("token_file", options.token_file).strip()
    names = ("address", "client_cert", "client_key", "server_name", "connect_timeout")
    return ClientConfig(token=token, tls=options.tls_ca or options.tls, **{name: getattr(options, name) for name in names}, **fields)


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
