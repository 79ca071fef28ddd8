"""The thread of the driver that reads what the ranks send and write, and notices when one is gone.

Ranks and replicas of this host as processes: which cores they get, how they start, what they write, and how they end."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aengine.api.errors import (
    AdapterError,
    AEngineError,
    ConfigError,
    InsufficientMemoryError,
    ModelLoadError,
    RankDiedError,
    RankHungError,
)
from aengine.parallel.channel import Channel, ChannelClosedError
from aengine.parallel.messages import Failed, Log, Message, PagesRead, RankLoadProgress

_log = logging.getLogger("aengine")
KEPT_LINES = 20
"""Of a rank's log, in errors."""
END_SECONDS = 1.0
"""A process whose channel is closed ends within this time."""


@dataclass(eq=False, slots=True)
class Follower:
    """A rank as the driver sees it."""

    rank: int
    channel: Channel
    process: FollowerProcess | None  # None: it runs on another host
    host: str = ""  # the other host
    inbox: queue.SimpleQueue[Message | None] = field(default_factory=queue.SimpleQueue)  # None: something failed
    pages: queue.SimpleQueue[PagesRead | None] = field(default_factory=queue.SimpleQueue)  # the answers to `ReadPages`; None as above
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    heard: float = field(default_factory=time.monotonic)  # when it last sent anything
    progress: RankLoadProgress | None = None

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def name(self) -> str:
        return f"rank {self.rank} ({f'host {self.host}' if self.process is None else f'pid {self.process.pid}'})"

    def with_lines(self, what: str) -> str:
        """A sentence about this rank, and its last log lines."""
        lines = "".join(f"\n  {line}" for line in self.lines)
        return f"{self.name} {what}" + (f"; its last log lines:{lines}" if lines else "")


def error_of_rank(rank: int, name: str, text: str) -> AEngineError | None:
    """The error of this class that a rank says it has, if that is one of what it was given."""
    for kind in (AdapterError, ModelLoadError, InsufficientMemoryError):
        if name == kind.__name__:
            return kind(f"rank {rank}: {text}")
    return None


class Watcher:
    def __init__(
        self,
        followers: Sequence[Follower],
        on_failure: Callable[[AEngineError], object],
        on_message: Callable[[Follower, Message], object],
    ) -> None:
        """`on_failure` is called once, in the thread of the watcher, with what happened first; `on_message`, there too, with what is not
        a log line, progress or a failure."""
        self._followers = followers
        self._on_failure = on_failure
        self._on_message = on_message
        self._failed = False
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._main, name="aengine-ranks", daemon=True)
        self._thread.start()

    def hung(self, rank: int, waiting: str) -> RankHungError:
        """The error for a rank that `waiting`, another one, waits for in vain."""
        what = f"did not answer {waiting} within step_timeout"
        for follower in self._followers:
            if follower.rank == rank:
                return RankHungError(follower.with_lines(what), rank, follower.pid, follower.lines)
        return RankHungError(f"rank {rank} {what}", rank, os.getpid())

    def expect_ends(self) -> None:
        """From now on ranks that end are no failures."""
        self._closing = True

    def close(self) -> None:
        """After all processes have ended: returns when all that they wrote is logged."""
        self._closing = True
        os.write(self._wake_write, b"\0")
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _main(self) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        channels, outputs = {}, {}
        for follower in self._followers:
            channels[follower.channel.fileno()] = follower
            if follower.process is not None:
                outputs[follower.process.output] = follower
        for fd in (*channels, *outputs):
            poller.register(fd, select.POLLIN)
        while True:
            ready = [fd for fd, _ in poller.poll()]
            for fd in ready:
                if fd in outputs and not self._log_output(outputs[fd]):
                    poller.unregister(fd)
            for fd in ready:
                if fd in channels and not self._receive(channels[fd]):
                    poller.unregister(fd)
            if ready == [self._wake_read]:
                return

    def _receive(self, follower: Follower) -> bool:
        """Whether there may be more."""
        try:
            message = follower.channel.receive()
        except ChannelClosedError as error:
            self._fail(self._dead(follower, error))
            return False
        follower.heard = time.monotonic()
        if isinstance(message, Log):
            self._log_line(follower, message.level, message.text)
        elif isinstance(message, RankLoadProgress):
            follower.progress = message
        elif isinstance(message, Failed):
            self._fail(self._failure(follower, message))
        else:
            self._on_message(follower, message)
        return True

    def _dead(self, follower: Follower, error: ChannelClosedError) -> RankDiedError:
        """Which rank ended, and how. One that was killed is the cause of the ends of others."""
        code = None if follower.process is None else follower.process.ended(END_SECONDS)
        if code is None or code >= 0:
            for other in self._followers:
                other_code = None if other.process is None else other.process.ended(0)
                if other_code is not None and other_code < 0:
                    follower, code = other, other_code
        if follower.process is not None:
            self._log_output(follower)
        how = error.how if code is None else how_it_ended(code)
        return RankDiedError(follower.with_lines(how), follower.rank, follower.pid, follower.lines)

    def _failure(self, follower: Follower, failed: Failed) -> AEngineError:
        """The error for a rank that said why it ends: its own error if it is one of loading, `hung` for the rank that it waited for, else
        RankDiedError."""
        if failed.error == RankHungError.__name__:
            return self.hung(int(failed.field), follower.name)
        text = f"rank {follower.rank}: {failed.text}"
        if failed.error == ConfigError.__name__:
            return ConfigError.of(failed.field, text)
        error = error_of_rank(follower.rank, failed.error, failed.text)
        if error is not None:
            return error
        what = follower.with_lines(f"failed: {failed.error}: {failed.text}")
        return RankDiedError(what, follower.rank, follower.pid, follower.lines)

    def _fail(self, error: AEngineError) -> None:
        if not self._failed and not self._closing:
            self._failed = True
            self._on_failure(error)

    def _log_output(self, follower: Follower) -> bool:
        assert follower.process is not None
        lines, more = follower.process.read_lines()
        for line in lines:
            self._log_line(follower, logging.WARNING, line)
        return more

    def _log_line(self, follower: Follower, level: int, text: str) -> None:
        follower.lines.extend(text.splitlines())
        _log.log(level, "rank %d: %s", follower.rank, text)


FOLLOWER_MODULE = "aengine.runner.follower"
"""Run by ranks that the driver starts."""
_PR_SET_PDEATHSIG = 1
_CPUS = Path("/sys/devices/system/cpu")


def take_cores(index: int, count: int, threads: int | None) -> int:
    """Keeps the calling thread, and those that it starts, to its share of the CPUs that it may use now: as many for each of `count` ranks,
    none for two, and those that share a socket or a core for one rank. With fewer CPUs than ranks, all keep them all. Returns the threads
    of a step: `threads`, or as many as there are CPUs."""
    cores = sorted(os.sched_getaffinity(0), key=lambda cpu: (_topology(cpu, "physical_package_id"), _topology(cpu, "core_id"), cpu))
    each = len(cores) // count
    if each:
        os.sched_setaffinity(0, cores[each * index : each * (index + 1)])
    return threads or max(1, each)


def _topology(cpu: int, name: str) -> int:
    try:
        return int((_CPUS / f"cpu{cpu}" / "topology" / name).read_text())
    except (OSError, ValueError):
        return 0


class ChildProcess:
    """A program that this process runs on its host, and what it writes. Ends with the thread that starts it, at the latest, if it calls
    `die_with`."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> None:
        """`environment`: of the program, which finds the modules that are found here; None: that of this process."""
        self._partial = b""
        own, theirs = os.pipe()
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                pass_fds=pass_fds,
                env={**(os.environ if environment is None else environment), "PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
                start_new_session=True,  # a Ctrl-C in the terminal is for this process alone
            )
        except BaseException:
            os.close(own)
            raise
        finally:
            os.close(theirs)
        os.set_blocking(own, False)
        self.pid = self._process.pid
        self.output = own  # its stdout and stderr

    def read_lines(self) -> tuple[list[str], bool]:
        """What it has written since the last call, and whether there may be more later."""
        data = b""
        while True:
            try:
                piece = os.read(self.output, 1 << 16)
            except BlockingIOError:
                break
            data += piece
            if not piece:
                lines = (self._partial + data).splitlines()
                self._partial = b""
                return [line.decode(errors="replace") for line in lines], False
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines], True

    def ended(self, timeout: float | None) -> int | None:
        """Waits for the end. Returns the exit code, or the number of the signal, negative; None if it still runs."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        """Sends the process SIGTERM, which asks it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """Sends the process SIGKILL, which ends it at once."""
        self._process.kill()

    def release(self) -> None:
        """Closes the pipe of its output. The process must have ended."""
        os.close(self.output)


class FollowerProcess(ChildProcess):
    """A rank that runs on this host."""

    def __init__(self, rank: int, command: Sequence[str], stream: socket.socket, exchange_fd: int | None) -> None:
        """Runs `command` with what `worker_arguments` reads. `stream` is the rank's end of its channel, and is closed here."""
        fds = [stream.fileno(), *([] if exchange_fd is None else [exchange_fd])]
        arguments = [f"--rank={rank}", f"--fd={stream.fileno()}", f"--driver-pid={os.getpid()}"]
        if exchange_fd is not None:
            arguments.append(f"--exchange-fd={exchange_fd}")
        with stream:
            super().__init__([*command, *arguments], pass_fds=fds)


def how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def die_with(parent: int) -> None:
    """Called by a started process: the kernel kills it when the thread that started it is gone. The signals that ask a program to end are
    for the driver alone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
