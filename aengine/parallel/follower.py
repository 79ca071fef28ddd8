"""The command line of `aengine-worker`: a rank of a model whose engine runs on another host.

`FollowerRanks`: what a rank other than 0 knows of its task and of the driver."""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import AEngineError, ConfigError, FieldError, ModelLoadError, RankHungError
from aengine.parallel.channel import Channel, ChannelClosedError
from aengine.parallel.join import JOIN_SECONDS, JoinError, join_driver, read_secret, split_address
from aengine.parallel.launch import die_with, take_cores
from aengine.parallel.messages import (
    ApplyChange,
    Close,
    DiscardChange,
    Facts,
    Failed,
    LastTokens,
    Log,
    Logits,
    Message,
    Plan,
    PrepareChange,
    RankLoadProgress,
    ReadPages,
    Refused,
    Sizes,
    SleepRank,
    StageAddresses,
    WakeRank,
    Welcome,
    WritePages,
)
from aengine.parallel.ring import Ring, connect_ring, open_port
from aengine.parallel.shard import Shard
from aengine.scheduler.plan import StepPlan


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
    channel = join_driver(given.driver, read_secret(given.secret_file), given.rank, VERSION, given.timeout)
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


_log = logging.getLogger("aengine")
WELCOME_SECONDS = 60.0
PROGRESS_SECONDS = 0.5
"""Between two messages about progress."""
SAME_ERROR_SECONDS = 10.0
"""After which a rank that refuses the configuration says so. If the driver refuses it too, it has ended the rank by then."""
ABORT_SECONDS = 5.0
"""After the driver is gone, the process ends within this time."""


BetweenSteps = ApplyChange | SleepRank | WakeRank | ReadPages | WritePages


class DriverGoneError(Exception):
    """The driver has ended or closed the connection without a word. So does this rank."""


class FollowerRanks:
    """All methods but `progress`, `on_failure` and `send` belong to one thread."""

    def __init__(
        self,
        channel: Channel,
        rank: int,
        *,
        exchange_fd: int | None = None,
        model_dir: Path | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Waits for the task. On another host than the driver's, `model_dir` says where the model is, and `place` which of how many ranks
        of the host this one is. Keeps the whole process to its share of the cores, so torch should not be imported before."""
        self._channel = channel
        welcome = self._receive(WELCOME_SECONDS)
        if isinstance(welcome, Refused):
            raise ModelLoadError(f"the driver refuses rank {rank}: {welcome.reason}")
        if not isinstance(welcome, Welcome):
            raise DriverGoneError(f"it began with {welcome}")
        options: dict[str, Any] = json.loads(welcome.config)
        options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        self.config = EngineConfig(**options)
        self.shard = Shard.of(self.config, rank)
        self.model_dir = model_dir or Path(welcome.model_dir)
        self.local_index, self.num_local = place or (rank, welcome.num_local)  # among the ranks of this host
        self.threads = take_cores(self.local_index, self.num_local, self.config.threads)  # of a step, on this rank
        self.exchange_fd = exchange_fd  # memory that the ranks of this stage share, if they are all on the driver's host
        self.store = welcome.store_host or channel.peer_host, welcome.store_port  # where the driver listens: `DriverRanks.store_fd`
        self._told = 0.0  # of progress, when
        self._on_failure: list[Callable[[], object]] = []
        self.on_change: Callable[[PrepareChange | DiscardChange], object] = lambda message: None
        """Called with these messages, in their order, in the thread that waits for others. Must not wait."""
        self._ahead: Message | None = None  # received, and not asked for yet
        self._driver_gone = False
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="aengine-driver", daemon=True).start()

    def on_failure(self, callback: Callable[[], object]) -> None:
        """`callback` is called by another thread when the driver is gone; it ends what waits for other ranks."""
        self._on_failure.append(callback)
        if self._driver_gone:
            callback()

    def progress(self, loaded: int, total: int) -> None:
        """Tells how many bytes of the rank's weights are loaded."""
        if time.monotonic() - self._told >= PROGRESS_SECONDS or loaded == total:
            self._told = time.monotonic()
            self.send(RankLoadProgress(loaded, total))

    def same(self, facts: Mapping[str, str]) -> None:
        """Tells what has to be the same on all ranks; the driver compares it."""
        self._channel.send(Facts(json.dumps(dict(facts))))

    def connect_stages(self) -> Ring:
        """To be called on all ranks at the same point. The ring is closed when the driver is gone."""
        port, address = open_port(self.config, self._channel.own_host)
        self._channel.send(StageAddresses(address, ""))
        everywhere = self._receive()
        if not isinstance(everywhere, StageAddresses):
            raise DriverGoneError(f"it sent {everywhere} instead of addresses")
        ring = connect_ring(self.shard, port, everywhere, self._channel.peer_host, self.config.step_timeout)
        self.on_failure(ring.close)
        return ring

    def agree(self, own: Sizes) -> Sizes:
        """The least of all ranks; of the bytes the sum, and of the digests one."""
        self._channel.send(own)
        sizes = self._receive()
        if not isinstance(sizes, Sizes):
            raise DriverGoneError(f"it sent {sizes} instead of the sizes")
        return sizes

    def next_task(self) -> StepPlan | BetweenSteps | None:
        """Waits for the next step, or what comes between two; None: there is none any more. Raises DriverGoneError."""
        message = self._next()
        if isinstance(message, BetweenSteps):
            return message
        if isinstance(message, Plan):
            return message.step_plan()
        if isinstance(message, Close):
            self._ended.set()
            return None
        raise DriverGoneError(f"it sent {message} instead of a plan")

    def receive(self) -> Logits | LastTokens:
        """What the driver says within a step. Raises DriverGoneError."""
        message = self._next()
        if isinstance(message, Logits | LastTokens):
            return message
        raise DriverGoneError(f"it sent {message} within a step")

    def send(self, message: Message) -> None:
        with suppress(ChannelClosedError):  # nobody reads it
            self._channel.send(message)

    def ends_step(self) -> bool:
        """Waits for what the driver says next. Whether that is for a step that has been launched."""
        self._ahead = self._next()
        return isinstance(self._ahead, Logits | LastTokens)

    def _next(self) -> Message:
        message, self._ahead = self._ahead, None
        while message is None or isinstance(message, PrepareChange | DiscardChange):
            if message is not None:
                self.on_change(message)
            message = self._receive()
        return message

    def _receive(self, timeout: float | None = None) -> Message:
        try:
            return self._channel.receive(timeout)
        except ChannelClosedError as error:
            raise DriverGoneError(str(error)) from None

    def _watch(self) -> None:
        """Ends the process when the driver is gone, whatever its main thread is doing."""
        poller = select.poll()
        poller.register(self._channel.fileno(), getattr(select, "POLLRDHUP", 0))
        poller.poll()
        self._driver_gone = True
        for callback in self._on_failure:
            callback()
        if not self._ended.wait(ABORT_SECONDS):
            os._exit(1)


class _LogToDriver(logging.Handler):
    def __init__(self, ranks: FollowerRanks) -> None:
        super().__init__()
        self._ranks = ranks

    def emit(self, record: logging.LogRecord) -> None:
        self._ranks.send(Log(record.levelno, self.format(record)))


def follow(ranks: FollowerRanks, run: Callable[[FollowerRanks], object]) -> int:
    """Runs a rank until the driver closes it, with the log at the driver's; returns the exit code. The driver is told what `run` raises."""
    handler = _LogToDriver(ranks)
    logger = logging.getLogger("aengine")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        run(ranks)
    except DriverGoneError as error:
        logger.warning("the driver is gone: %s", error)
        return 1
    except BaseException as error:
        if not isinstance(error, AEngineError):
            logger.error("%s", "".join(traceback.format_exception(error)).rstrip())
        if isinstance(error, ConfigError):
            time.sleep(SAME_ERROR_SECONDS)
        field, text = "", str(error)
        if isinstance(error, FieldError):
            field, text = error.field, error.violations[0].description
        elif isinstance(error, RankHungError):
            field = str(error.rank)
        ranks.send(Failed(type(error).__name__, field, text))
        return 1
    finally:
        logger.removeHandler(handler)
    return 0
