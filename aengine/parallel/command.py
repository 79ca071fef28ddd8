"""The command line of `aengine-worker`: a rank of a model whose engine runs on another host."""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from aengine import __version__
from aengine.api.errors import AEngineError, ConfigError
from aengine.parallel.channel import Channel
from aengine.parallel.follower import DriverGoneError, FollowerRanks, follow
from aengine.parallel.join import JOIN_SECONDS, JoinError, join_driver, read_secret, split_address
from aengine.parallel.launch import die_with


def run_worker(
    arguments: Sequence[str], environment: Mapping[str, str], run: Callable[[FollowerRanks], object], name: str = "aengine-worker"
) -> int:
    """Runs a rank, started by its driver or by hand, until the driver closes it; returns the exit code."""
    if any(argument.startswith("--driver-pid=") for argument in arguments):
        return follow(started_ranks(arguments), run)
    given = _parser(environment, name).parse_args(arguments)
    if given.parent_pid is not None:
        die_with(given.parent_pid)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {given.rank} %(levelname)s %(message)s")
    try:
        return follow(_joined_ranks(given), run)
    except (AEngineError, JoinError, DriverGoneError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def started_ranks(arguments: Sequence[str]) -> FollowerRanks:
    """Reads the arguments that `FollowerProcess` gave this process, and returns the ranks as it sees them. The process dies with its driver
    from now on."""
    parser = argparse.ArgumentParser()
    for name in ("rank", "fd", "driver-pid", "exchange-fd"):
        parser.add_argument(f"--{name}", type=int)
    given = parser.parse_args(arguments)
    die_with(given.driver_pid)
    stream = socket.socket(fileno=given.fd)
    for fd in (given.fd, given.exchange_fd):
        if fd is not None:
            os.set_inheritable(fd, False)
    return FollowerRanks(Channel(stream, "the driver"), given.rank, exchange_fd=given.exchange_fd)


def _joined_ranks(given: argparse.Namespace) -> FollowerRanks:
    model_dir = None if given.model is None else Path(given.model)
    if model_dir is not None and not model_dir.exists():
        raise ConfigError.of("model", f"{given.model!r} does not exist")
    channel = join_driver(given.driver, read_secret(given.secret_file), given.rank, __version__, given.timeout)
    return FollowerRanks(channel, given.rank, model_dir=model_dir, place=(given.local_rank, given.local_ranks))


def _parser(environment: Mapping[str, str], name: str) -> argparse.ArgumentParser:
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    parser = argparse.ArgumentParser(
        prog=name,
        allow_abbrev=False,
        description="Run one rank of a model whose engine is on another host, until that engine is closed.",
        epilog="The options of the model are those of the engine.",
    )

    def add(flag: str, kind: Callable[[str], object], default: object, text: str) -> None:
        parser.add_argument(f"--{flag}", type=kind, default=default, required=default is None and flag != "model", help=text)

    add("driver", _address, f"{host}:{port}" if host and port else None, "host:port, the engine's rank_address (MASTER_ADDR:MASTER_PORT)")
    add("rank", _positive, environment.get("RANK"), "which rank this is, from the engine's local_ranks up (RANK)")
    add(
        "secret-file",
        str,
        environment.get("AENGINE_RANK_SECRET_FILE"),
        "a file as the engine's rank_secret_file (AENGINE_RANK_SECRET_FILE)",
    )
    add("model", str, None, "directory of the model on this host; default: the engine's")
    add("local-rank", int, environment.get("LOCAL_RANK", "0"), "which of this host's ranks this is, from 0 (LOCAL_RANK)")
    add("local-ranks", _positive, environment.get("LOCAL_WORLD_SIZE", "1"), "ranks on this host, which share its cores (LOCAL_WORLD_SIZE)")
    parser.add_argument("--parent-pid", type=int, help="the process that starts this one, and that it ends with")
    add("timeout", float, JOIN_SECONDS, "seconds until the engine must be there (%(default)g)")
    return parser


def _address(text: str) -> str:
    try:
        host, port = split_address(text)
    except ValueError:
        host, port = "", 0
    if not host or not 0 < port < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is not an address host:port")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return int(text)
