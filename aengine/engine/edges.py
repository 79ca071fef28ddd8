"""The two thread edges: plain data is handed over, and nothing else crosses them.

`Mailbox` brings commands from any thread to the step thread, without a lock. `ReportQueue` brings the step thread's reports to the event
loop without the GIL being released: `call_soon_threadsafe` releases it to wake the loop, which then keeps it for all its callbacks, while
the step thread waits to begin its step. This queue wakes the loop with the GIL held, so the loop runs when the step thread releases it,
which it does in the model.

What the step thread counts: steps, their times and sizes, tokens; and what of it other threads may read. And what notices that it hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import field, replace
from typing import Any, Generic, TypeVar

from aengine.aio.edge import LoopEdge
from aengine.api.dataclass import dataclass
from aengine.api.outputs import EngineStats, Histogram, MemoryUse
from aengine.cache import PageChain, StoredPrefix, TierCounts
from aengine.engine.trace import StepTrace
from aengine.runner.contract import Prepared
from aengine.scheduler.live_sequences import MovingRatio
from aengine.scheduler.plan import IntArray
from aengine.scheduler.sequence import Request, Updates
from aengine.scheduler.sessions import SessionName


@dataclass(frozen=True, slots=True)
class Submit:
    requests: list[Request]  # the sequences of one request


@dataclass(frozen=True, slots=True)
class Cancel:
    key: int


@dataclass(frozen=True, slots=True)
class Park:
    key: int
    parked: bool  # False: schedule it again


@dataclass(frozen=True, slots=True)
class Pause:
    """Run no further step; `Done(reply, 0)` is reported when those in flight have finished."""

    reply: Future[int]  # which the step thread passes back and leaves as it is


@dataclass(frozen=True, slots=True)
class Unpause:
    """Run steps again after a `Pause`."""


@dataclass(frozen=True, slots=True)
class FlushCache:
    """Forget cached prefixes; then `Done(reply, pages freed)` is reported."""

    reply: Future[int]  # as in `Pause`


@dataclass(frozen=True, slots=True)
class Touch:
    """A session is used soon; then `Done(reply, tokens of its prefix)` is reported, 0 for one that is not known."""

    reply: Future[int]  # as in `Pause`
    session: SessionName


@dataclass(frozen=True, slots=True)
class Record:
    """Tell the latest steps; then `Done(reply, a Recording)` is reported, None where they are not recorded."""

    reply: Future[Any]  # as in `Pause`


@dataclass(frozen=True, slots=True)
class Trace:
    """Begin or end a trace of steps; then `Done(reply, None)` is reported."""

    reply: Future[None]  # as in `Pause`
    trace: StepTrace
    ended: bool


@dataclass(frozen=True, slots=True)
class FindKV:
    """See what tiers hold of a prompt; then `Done(reply, it)` is reported, None where there are no tiers, or other weights are in use."""

    reply: Future[StoredPrefix | None]  # as in `Pause`
    token_ids: IntArray
    chain: PageChain  # of these


@dataclass(frozen=True, slots=True)
class WatchPages:
    """Report the names of cached pages (`PageNames`), and from then on how they change (`PagesChanged`)."""

    watch: int  # whom they are listed for
    most: int  # names


@dataclass(frozen=True, slots=True)
class UnwatchPages:
    """Report no changes of cached pages any more."""


class RunningRequests(enum.Enum):
    """What happens to requests that have begun when weights change."""

    KEEP = "keep"  # they go on, with the KV that they have
    RECOMPUTE = "recompute"  # they go on, and their KV is computed anew
    FINISH = "finish"  # they end first; none begins meanwhile
    ABORT = "abort"  # they are cancelled


@dataclass(frozen=True, slots=True)
class Apply:
    """Apply a change, one of weights when no step is in flight; then `Done(reply, 0)` is reported."""

    reply: Future[int]  # an adapter's is set running before anything changes; nothing does if it was cancelled by then
    prepared: Prepared
    running: RunningRequests = RunningRequests.KEEP


@dataclass(frozen=True, slots=True)
class Sleep:
    """Give memory back when no step is in flight, and run none until `Wake`; then `Done(reply, MemoryUse)` is reported. An engine that
    sleeps more deeply already goes on doing so."""

    reply: Future[MemoryUse]  # as in `Pause`
    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """End a sleep, one of level 2 with weights that were prepared; then `Done(reply, MemoryUse)` is reported, or the error if there is
    too little memory."""

    reply: Future[MemoryUse]  # as in `Pause`
    prepared: Prepared | None
    replaces: bool  # the weights are others than before


@dataclass(frozen=True, slots=True)
class Stop:
    """End all requests and the thread."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End the thread with this error, as if a step had raised it."""

    error: BaseException


Command = (
    (Submit | Cancel | Park | Pause | Unpause | FlushCache | Touch | Record | Trace | FindKV | WatchPages | UnwatchPages)
    | (Apply | Sleep | Wake)
    | (Stop | Fail)
)


@dataclass(frozen=True, slots=True)
class Done:
    """The command with this reply was carried out, or it failed and `value` is the error."""

    reply: Future[Any]
    value: object


@dataclass(frozen=True, slots=True)
class WeightsChanged:
    """Tokens that are reported from here on are of weights of this version."""

    version: int


@dataclass(frozen=True, slots=True)
class PageNames:
    """The names of cached pages, as `PrefixIndex.names` lists them, for one who watches them."""

    watch: int
    names: list[bytes]


@dataclass(frozen=True, slots=True)
class PagesChanged:
    """Names of cached pages that have come or gone, as `PrefixIndex.take_changes` tells them."""

    changes: dict[bytes, bool]


StepReport = Updates | Done | WeightsChanged | PageNames | PagesChanged


MAX_WAIT_SECONDS = 3600.0
"""Of one `wait`: a deadline may be further away than the platform can wait."""


class Mailbox:
    """`post` from any thread, also from a destructor; `wait` and `take_commands` from the step thread alone.

    A destructor may run in the middle of any line here, in the thread that runs that line. So there is no lock that a line holds: the
    wake-up is a lock that only the waiting thread acquires, and that `post` releases.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self._wake_up = threading.Lock()  # free: something may have been posted since the last `take_commands`
        self._wake_up.acquire()
        self.on_post: Callable[[], object] = lambda: None
        """Called by `post` once the command is there. Must be as safe in a destructor as `post` itself."""

    @property
    def is_empty(self) -> bool:
        return not self._commands

    def post(self, command: Command) -> None:
        self._commands.append(command)
        self.on_post()
        self.wake_up()

    def wake_up(self) -> None:
        """Ends a `wait`, or the next one. As safe as `post`."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._wake_up.release()

    def wait(self, timeout: float | None = None) -> None:
        """Until something is posted, or `timeout` seconds, or MAX_WAIT_SECONDS if that is less."""
        self._wake_up.acquire(timeout=MAX_WAIT_SECONDS if timeout is None else min(timeout, MAX_WAIT_SECONDS))

    def take_commands(self) -> list[Command]:
        """What was posted since the last call, in order; what is posted meanwhile may be left for the next."""
        if not self._commands:
            return []  # most often; if the wake-up is free by now, the next `wait` returns at once
        self._wake_up.acquire(blocking=False)  # before looking: what is posted from here on releases it again
        return [self._commands.popleft() for _ in range(len(self._commands))]


T = TypeVar("T")


class ReportQueue(Generic[T]):
    """`put_report` from any thread; reports are received in the event loop, in order."""

    def __init__(self, edge: LoopEdge, receive: Callable[[T], object]) -> None:
        """To be created in the loop of `edge`, in which `receive` is called with every report."""
        self._edge = edge
        self._receive = receive
        self._reports: deque[T] = deque()
        self._wake_up = _WakeUp()
        self._is_sent = False  # whether a wake-up was sent that the loop has not seen yet
        self._is_watched = edge.watch(self._wake_up.file, self._receive_all)

    def put_report(self, report: T) -> None:
        """The report is lost once the queue or the loop is closed."""
        if self._is_watched:
            self._reports.append(report)
            if not self._is_sent:
                self._is_sent = True
                self._wake_up.send()
        else:
            self._edge.call_soon(self._receive, report)

    def close(self) -> None:
        """Nothing is received any more. To be called in the loop."""
        if self._is_watched:
            self._edge.unwatch(self._wake_up.file)
        self._receive = _ignore  # holds the queue's owner, which holds the queue

    def _receive_all(self) -> None:
        self._wake_up.clear()
        self._is_sent = False  # before looking: what is put from here on sends another one
        try:
            while self._reports:
                self._receive(self._reports.popleft())
        finally:
            if self._reports:  # `receive` raised, and the other reports must not wait for the next `put_report`
                self._wake_up.send()


@functools.cache
def _write_with_gil() -> Callable[[int, bytes, int], int]:
    """The C library's `write`; `os.write` would release the GIL."""
    write = ctypes.PyDLL(None).write
    write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
    return write


def _ignore(report: object) -> None:
    pass


class _WakeUp:
    """A pipe, whose `file` can be read from between `send` and `clear`. It is closed with the object and not before, so that no thread can
    be about to write to a file that was opened in its place."""

    def __init__(self) -> None:
        self.file, self._writer = os.pipe()
        os.set_blocking(self.file, False)
        os.set_blocking(self._writer, False)
        self._write = _write_with_gil()

    def send(self) -> None:
        self._write(self._writer, b"x", 1)  # fails if the pipe is full, and then it can be read from

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.file, 4096)

    def __del__(self) -> None:
        os.close(self.file)
        os.close(self._writer)


STEP_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
STEP_TOKENS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


PUBLISH_SECONDS = 0.05
"""How old the published stats may become while steps bring tokens and nothing else."""

REMEMBERED_IDENTITIES = 64
MEAN_OF_STEPS = 100
MEAN_OF_PREFILL_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Identity:
    """What the engine computes with now."""

    fingerprint: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)  # it is made of
    since: float = 0.0  # seconds since the epoch


class StepStats:
    """To be filled and published by the step thread."""

    def __init__(self) -> None:
        self.completion_tokens = 0
        self.num_received = 0  # submissions
        self.published = EngineStats(), 0
        """The last stats that were published, and how many submissions they count. It is replaced as a whole, so any thread may read it."""
        self.identity = Identity()
        """As `published`."""
        self._identities: dict[int, Identity] = {}  # of the latest versions of the weights
        self._published_at = 0.0  # when, on time.monotonic
        self._num_steps = 0
        self._seconds = Histogram(STEP_SECONDS)
        self._tokens = Histogram(STEP_TOKENS)
        self._mean_seconds = 0.0  # of the latest steps
        # Fades by tokens and not by steps, so that long chunks, which tell best how fast prompts are computed, are not soon outnumbered.
        self._prefill_rate = MovingRatio(MEAN_OF_PREFILL_TOKENS)

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second, of the latest steps; 0.0: there were none."""
        return self._prefill_rate.value

    def use_identity(self, version: int, parts: Mapping[str, str], fingerprint: str) -> None:
        """Weights of this version come into use."""
        self.identity = self._identities[version] = Identity(fingerprint, parts, time.time())
        self._identities.pop(version - REMEMBERED_IDENTITIES, None)

    def parts_of(self, version: int) -> Mapping[str, str]:
        """What the engine computed with while it had weights of this version; what it computes with now, if that was long ago. From any
        thread."""
        return self._identities.get(version, self.identity).parts

    def add_step(self, seconds: float, num_tokens: int, num_prefill: int) -> None:
        """`num_prefill`: those of the tokens that are of prompts, or computed again."""
        self._num_steps += 1
        self._seconds.observe(seconds)
        self._tokens.observe(num_tokens)
        self._mean_seconds += (seconds - self._mean_seconds) / min(self._num_steps, MEAN_OF_STEPS)
        if num_prefill:
            self._prefill_rate.add_sums(num_prefill, seconds, num_prefill)

    def are_old(self) -> bool:
        return time.monotonic() - self._published_at >= PUBLISH_SECONDS

    def publish(self, stats: EngineStats, tiers: TierCounts, *, paused: bool, sleep_level: int) -> None:
        """Publish the scheduler's `stats`, with what tiers and this count added, for other threads to read."""
        self._published_at = time.monotonic()
        stats = replace(
            stats,
            steps=self._num_steps,
            completion_tokens=self.completion_tokens,
            loaded_tokens=tiers.loaded_tokens,
            saved_tokens=tiers.saved_tokens,
            host_kv_bytes=tiers.host_bytes,
            disk_kv_bytes=tiers.disk_bytes,
            paused=paused,
            sleep_level=sleep_level,
            fingerprint=self.identity.fingerprint,
            weights_time=self.identity.since,
            mean_step_seconds=self._mean_seconds,
            prefill_tokens_per_second=self._prefill_rate.value,
            step_seconds=self._seconds.snapshot(),
            step_tokens=self._tokens.snapshot(),
        )
        self.published = stats, self.num_received


@contextmanager
def watchdog(limit: float, busy_since: Callable[[], float | None], on_hang: Callable[[float], None]) -> Iterator[None]:
    """While the context lasts, calls `on_hang(seconds)` once, from a thread of its own, when `busy_since()` (on time.monotonic, None while
    idle) lies more than `limit` seconds back."""
    ended = threading.Event()

    def watch() -> None:
        pause = limit
        while not ended.wait(pause):
            since = busy_since()
            busy = 0.0 if since is None else time.monotonic() - since
            if busy > limit:
                return on_hang(busy)
            pause = max(limit - busy, limit / 20)

    threading.Thread(target=watch, name="aengine-watchdog", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
