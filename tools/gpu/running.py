"""Runs a command within a time limit: what it prints is shown and kept, and nothing of it is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

GRACE = 4.0
"""Seconds from the interrupt, upon which a command may write what it has, to the end of all its processes. Half way they are aborted:
Python's faulthandler then shows where they are, also in a call that does not return."""


@dataclass(frozen=True, slots=True)
class Run:
    code: int
    seconds: float
    timed_out: bool


def run(command: tuple[str, ...], limit: float, environment: Mapping[str, str], write: Callable[[str], object]) -> Run:
    """In a process group of its own, which is interrupted at the end of `limit` seconds and killed `GRACE` later, as what it leaves is.
    `write` gets each line that is printed."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", start_new_session=True,
    )  # fmt: skip
    reader = threading.Thread(target=_read, args=(process.stdout, write), daemon=True)
    reader.start()
    timed_out = False
    try:
        process.wait(max(0.0, limit - GRACE))
    except subprocess.TimeoutExpired:
        timed_out = True
        for number in (signal.SIGINT, signal.SIGABRT):
            _signal(process, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE / 2)
                break
    finally:
        _signal(process, signal.SIGKILL)
        process.wait()
        reader.join(GRACE)  # a process that left the group may hold the pipe
    return Run(process.returncode, time.monotonic() - begin, timed_out)


def _read(lines: IO[str] | None, write: Callable[[str], object]) -> None:
    assert lines is not None
    for line in lines:
        write(line)


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
