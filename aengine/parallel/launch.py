"""Ranks and replicas of this host as processes: which cores they get, how they start, what they write, and how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLLOWER_MODULE = "aengine.runner.worker"
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
