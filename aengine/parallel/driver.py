"""`DriverRanks`: the other ranks, as rank 0 sees them. `start_ranks` brings them up."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.errors import AEngineError, ModelLoadError, RankDiedError, RankHungError
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.join import accept_ranks, listen, read_secret, split_address
from aengine.parallel.launch import END_SECONDS, FOLLOWER_MODULE, Follower, FollowerProcess, Watcher, error_of_rank, take_cores
from aengine.parallel.messages import (
    ApplyChange,
    ByteArray,
    ChangePrepared,
    Close,
    DiscardChange,
    Facts,
    LastTokens,
    Logits,
    Message,
    PagesRead,
    Plan,
    PrepareChange,
    RankLoadProgress,
    ReadPages,
    Sizes,
    SleepRank,
    StageAddresses,
    WakeRank,
    Welcome,
    WritePages,
    encode,
)
from aengine.parallel.ring import LOOPBACK, Ring, connect_ring, open_port
from aengine.parallel.shard import Shard
from aengine.scheduler.plan import IntArray, StepPlan

_log = logging.getLogger("aengine")
CHECK_SECONDS = 0.2
"""Between two looks at whether loading is to end."""
LOADING_SECONDS = 600.0
"""A rank that loads, or prepares a change, says something within this time."""
CLOSE_SECONDS = 10.0
"""After which a rank that was told to end is killed."""
LOG_SECONDS = 5.0
"""Between two lines about progress."""
VERDICT_SECONDS = 10.0
"""After a connection broke, it is known within this time what happened."""
CAUSE = 0.05
"""Of step_timeout: ranks that wait for each other in a row find out within this time from the first on who does not answer."""
_GIB = 1 << 30
SHARED_BYTES = 130 << 20
"""Of the memory that the ranks of a stage share, of which only what is written takes any: enough for an exchange between 64 ranks."""
MessageT = TypeVar("MessageT", Facts, Sizes, StageAddresses, ChangePrepared)


def start_ranks(
    config: EngineConfig,
    model_dir: Path,
    report_failure: Callable[[BaseException], object],
    *,
    check: Callable[[], object] = lambda: None,
    exchange_bytes: int = SHARED_BYTES,
    command: Sequence[str] = (sys.executable, "-m", FOLLOWER_MODULE),
) -> DriverRanks:
    """Starts all ranks of `config` but the first, which is the caller. They end with the calling thread, at the latest; until `close` it
    keeps to its share of the cores.

    `report_failure` is called once, by another thread, if a rank fails. `check` is called while ranks are waited for, and may raise to end
    that. `exchange_bytes` are shared by the ranks of a stage: `DriverRanks.exchange_fd`. `command` runs a rank.
    """
    shard = Shard.of(config, 0)
    num_local = config.num_local_ranks
    followers: list[Follower] = []
    fds: list[int] = []
    with ExitStack() as stack:  # of what is released if not all ranks start
        store = stack.enter_context(listen("127.0.0.1:0" if config.rank_address is None else beside(config.rank_address)))
        stack.callback(lambda: _end(followers, 0.0))
        host, store_port = store.getsockname()[:2]
        task = Welcome(json.dumps(dataclasses.asdict(config)), str(model_dir), num_local, LOOPBACK.get(host, host), store_port)
        if num_local < shard.num_ranks:
            assert config.rank_address is not None
            assert config.rank_secret_file is not None
            secret = read_secret(config.rank_secret_file)
            with listen(config.rank_address) as port:
                for rank, channel, hello in accept_ranks(port, secret, set(range(num_local, shard.num_ranks)), VERSION, check):
                    followers.append(Follower(rank, channel, None, hello.host))
            for follower in followers:
                follower.channel.send(dataclasses.replace(task, store_host=""), config.step_timeout)
        if exchange_bytes:
            fds = [_shared_memory(exchange_bytes) for _ in range(num_local // shard.size)]  # of the stages that are whole on this host
            for fd in fds:
                stack.callback(os.close, fd)
        for rank in range(1, num_local):
            ours, theirs = socket.socketpair()
            process = FollowerProcess(rank, command, theirs, fds[rank // shard.size] if rank // shard.size < len(fds) else None)
            followers.append(Follower(rank, Channel(ours, f"rank {rank}"), process))
            followers[-1].channel.send(task)
        stack.pop_all()
    for fd in fds[1:]:
        os.close(fd)
    return DriverRanks(config, shard, sorted(followers, key=lambda each: each.rank), report_failure, check, fds[0] if fds else None, store)


class DriverRanks:
    """All methods but `check`, `hung`, `close` and those that prepare and discard changes belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        shard: Shard,
        followers: Sequence[Follower],
        report_failure: Callable[[BaseException], object],
        check: Callable[[], object],
        exchange_fd: int | None,
        store: socket.socket,
    ) -> None:
        self.shard = shard  # of rank 0
        self.num_local = config.num_local_ranks  # ranks on this host, this one included
        self.local_index = 0  # of this rank among them
        self.exchange_fd = exchange_fd  # memory that the ranks of the first stage share; closed by `close`
        self.store: tuple[str, int] = store.getsockname()[:2]  # an address where nobody answers yet
        self.store_fd = store.fileno()  # it listens there; closed by `close`
        self.answers: object = None  # what answers there for as long as this, where no process group of this rank does
        self._store = store
        self._followers = followers
        self._report_failure = report_failure
        self._check = check
        self._config = config
        self._timeout = config.step_timeout
        self._on_failure: list[Callable[[], object]] = []
        self._failure: AEngineError | None = None
        self._failed = threading.Event()
        self._progress: RankLoadProgress | None = None
        self._logged = time.monotonic()
        self._serving = False
        self._closing = threading.Lock()
        self._closed = False
        self._thread, self._cores = threading.get_native_id(), os.sched_getaffinity(0)
        self.threads = take_cores(0, self.num_local, config.threads)  # of a step, on this rank
        self._watcher = Watcher(followers, self._fail, _deliver)

    def check(self, wait: float = 0.0) -> None:
        """Raises what happened to a rank: `RankDiedError`, or its own error if it could not load. `wait` is for those who know already that
        something did: seconds until it is found out what."""
        self._failed.wait(wait)
        if self._failure is not None:
            raise self._failure

    def on_failure(self, callback: Callable[[], object]) -> None:
        """`callback` is called when a rank fails, by another thread, and by `close` at once; it ends what waits for other ranks."""
        self._on_failure.append(callback)
        if self._failure is not None:
            callback()

    def progress(self, loaded: int, total: int) -> None:
        """How many bytes of this rank's weights are loaded. Logs now and then how far all ranks are together."""
        self._progress = RankLoadProgress(loaded, total)
        self._log_progress()

    def same(self, facts: Mapping[str, str]) -> None:
        """Compares what must be the same on all ranks, by name. Raises ModelLoadError with rank, name and both values."""
        for follower in self._followers:
            theirs = json.loads(self._next(follower, Facts).values)
            for name, value in facts.items():
                if theirs.get(name) != value:
                    raise ModelLoadError(f"{follower.name} cannot be used: its {name} is {theirs.get(name)}, that of rank 0 is {value}")

    def connect_stages(self) -> Ring:
        """To be called on all ranks at the same point. The ring is closed when a rank fails."""
        port, address = open_port(self._config, "")
        addresses = [address, *(self._next(follower, StageAddresses).by_rank for follower in self._followers)]
        everywhere = StageAddresses(json.dumps(addresses), secrets.token_hex())
        self._send(everywhere)

        def check() -> None:
            self._check()
            self.check()

        ring = connect_ring(self.shard, port, everywhere, "", self._timeout, check)
        self.on_failure(ring.close)
        return ring

    def agree(self, own: Sizes) -> Sizes:
        """The least of all ranks; of the bytes the sum, and of the digests one. Waits until all have loaded. Raises what happened to a
        rank."""
        sizes = [own, *(self._next(follower, Sizes) for follower in self._followers)]
        agreed = Sizes(
            min(each.num_pages for each in sizes),
            min(each.max_model_len for each in sizes),
            sum(each.bytes_per_page for each in sizes),
            _digest_of([each.weights_digest for each in sizes]),
        )
        self._send(agreed)
        self._serving = True
        return agreed

    def send_plan(self, plan: StepPlan) -> None:
        """What is sent is never taken back. This and what follows raise what happened to a rank, and `RankHungError` for one that does not
        read."""
        self._send(Plan.of(plan))

    def send_logits(self, indices: IntArray) -> None:
        """Asks the first stage for the logits of rows of a step's hidden states: of the oldest step that has not ended."""
        self._send(Logits(indices), self._followers[: self.shard.size - 1])

    def send_last_tokens(self, tokens: IntArray) -> None:
        """Ends that step on the first stage. Later stages know nothing of tokens."""
        self._send(LastTokens(tokens), self._followers[: self.shard.size - 1])

    def prepare_change(self, number: int, change: str) -> None:
        """Has all other ranks prepare a change, beside their steps. May be called from any thread, one at a time."""
        self._send(PrepareChange(number, change))

    def wait_prepared(self, number: int, weights_digest: str) -> str:
        """Waits, in that thread, until they have. Returns the digest of new weights, of which `weights_digest` is that of this rank's part.
        Raises why a rank cannot, or what happened to it."""
        digests = [weights_digest]
        for follower in self._followers:
            while (answer := self._next(follower, ChangePrepared)).number != number:
                pass  # of a change that was discarded
            if answer.error:
                raise error_of_rank(follower.rank, answer.error, answer.text) or AEngineError(
                    f"{follower.name}: {answer.error}: {answer.text}"
                )
            digests.append(answer.weights_digest)
        return _digest_of(digests)

    def apply_change(self, number: int) -> None:
        """Has all other ranks apply a change between two plans: the plans that follow compute with it. All ranks must have prepared it."""
        self._send(ApplyChange(number))

    def discard_change(self, number: int) -> None:
        """May be called from any thread."""
        self._send(DiscardChange(number))

    def send_sleep(self, level: int, pages: IntArray) -> None:
        self._send(SleepRank(level, pages))

    def send_wake(self) -> None:
        self._send(WakeRank())

    def send_read(self, pages: IntArray) -> None:
        """Asks all other ranks for their parts of these pages, which `take_read` returns."""
        self._send(ReadPages(pages))

    def take_read(self) -> list[ByteArray]:
        """What each other rank holds of the pages, one after the other, by rank. Waits for it."""
        found = []
        for follower in self._followers:
            try:
                answer = follower.pages.get(timeout=self._timeout)
            except queue.Empty:
                raise self.hung(follower.rank) from None
            if answer is None:
                self.check()
                raise RankDiedError(f"{follower.name} is gone", follower.rank, follower.pid, follower.lines)
            found.append(answer.content)
        return found

    def send_write(self, pages: IntArray, contents: Sequence[ByteArray]) -> None:
        """Has each other rank write its part of these pages; `contents` by rank."""
        for follower, content in zip(self._followers, contents, strict=True):
            self._send(WritePages(pages, content), [follower])

    def hung(self, rank: int) -> AEngineError:
        """The error for a rank that this one waits for in vain: `RankHungError`, or what happened to the rank that that one waits for. From
        now on `close` waits for none."""
        self._serving = False
        self._failed.wait(CAUSE * self._timeout)
        if self._failure is not None:
            return self._failure
        return self._watcher.hung(rank, "the driver")

    def close(self, *, at_once: bool = False) -> None:
        """Ends all other ranks; if `at_once`, or they do not serve, or one has failed, they are not asked to. Returns when their processes
        are gone. May be called from any thread, and again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._watcher.expect_ends()
            if at_once:
                self._end_waits()
            orderly = self._serving and self._failure is None and not at_once
            if orderly:
                for follower in self._followers:
                    with suppress(ChannelClosedError, ChannelTimeoutError):  # it is gone, or will be killed
                        follower.channel.send(Close(), END_SECONDS)
            _end(self._followers, CLOSE_SECONDS if orderly else 0.0, self._watcher)
            self._store.close()
            if self.exchange_fd is not None:
                os.close(self.exchange_fd)
            with suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(self._thread, self._cores)

    def _log_progress(self) -> None:
        if time.monotonic() - self._logged < LOG_SECONDS:
            return
        self._logged = time.monotonic()
        told = [each for each in (self._progress, *(follower.progress for follower in self._followers)) if each is not None]
        loaded, total = sum(each.loaded for each in told), sum(each.total for each in told)
        if loaded < total:
            ranks = len(self._followers) + 1
            _log.info("loaded %.1f of %.1f GiB of weights on %d of %d ranks", loaded / _GIB, total / _GIB, len(told), ranks)

    def _end_waits(self) -> None:
        """Ends whatever this rank waits for from others, by the callbacks of `on_failure`."""
        for callback in self._on_failure:
            callback()

    def _fail(self, error: AEngineError) -> None:
        """Called by the watcher."""
        self._failure = error
        self._end_waits()
        self._failed.set()
        for follower in self._followers:
            follower.inbox.put(None)
            follower.pages.put(None)
        self._report_failure(error)

    def _send(self, message: Message, followers: Sequence[Follower] | None = None) -> None:
        frame = encode(message)
        for follower in self._followers if followers is None else followers:
            try:
                follower.channel.send_frame(frame, self._timeout)
            except ChannelTimeoutError:
                raise self.hung(follower.rank) from None
            except ChannelClosedError as error:
                self.check(wait=VERDICT_SECONDS)
                raise RankDiedError(follower.with_lines(error.how), follower.rank, follower.pid, follower.lines) from None

    def _next(self, follower: Follower, kind: type[MessageT]) -> MessageT:
        """The next message of a rank that loads or prepares a change."""
        since = time.monotonic()
        while True:
            self._check()
            self.check()
            self._log_progress()
            try:
                message = follower.inbox.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                if time.monotonic() - max(since, follower.heard) > LOADING_SECONDS:
                    what = follower.with_lines(f"loads, and said nothing for {LOADING_SECONDS:g} s")
                    raise RankHungError(what, follower.rank, follower.pid, follower.lines) from None
                continue
            if isinstance(message, kind):
                return message
            self.check()
            raise RankDiedError(f"{follower.name} sent {message} instead of {kind.__name__}", follower.rank, follower.pid, follower.lines)


def _deliver(follower: Follower, message: Message) -> None:
    if isinstance(message, PagesRead):
        follower.pages.put(message)
    else:
        follower.inbox.put(message)


def _digest_of(parts: Sequence[str]) -> str:
    """The digest of weights whose parts have these; empty if none has one."""
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16] if any(parts) else ""


def _end(followers: Sequence[Follower], seconds: float, watcher: Watcher | None = None) -> None:
    """Returns when the processes of all are gone; kills those that live longer than `seconds`."""
    deadline = time.monotonic() + seconds
    processes = [follower.process for follower in followers if follower.process is not None]
    for process in processes:
        if seconds == 0.0 or process.ended(max(0.0, deadline - time.monotonic())) is None:
            process.kill()
    for process in processes:
        process.ended(None)
    for follower in followers:
        if follower.process is None:
            follower.channel.close()
    if watcher is not None:
        watcher.close()
    for follower in followers:
        follower.channel.close()
    for process in processes:
        process.release()


def beside(address: str) -> str:
    """Any port of the same host."""
    return f"[{split_address(address)[0]}]:0"


def _shared_memory(size: int) -> int:
    """A file without a name, of zeros. Only what is written takes memory."""
    fd = os.memfd_create("aengine-exchange")
    os.ftruncate(fd, size)
    return fd
