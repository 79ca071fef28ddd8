"""`ImageDecoder`: files of images to pixels, in a process that is killed and begun again when a file is too much for it.

Owns the process and its time limit. Knows neither models nor requests. May be called from any thread; one file is decoded at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from aengine.images import decoding_process

Pixels = NDArray[np.uint8]
MAX_PIXELS = 40_000_000
MAX_SIDE = 16_384
_SECONDS = 10.0
_PIPE = 1 << 20
_PROGRAM = pathlib.Path(decoding_process.__file__)


class ImageError(Exception):
    """A file is no picture that can be taken. The text goes on behind "it"."""


class ImageDecoder:
    def __init__(self, max_pixels: int = MAX_PIXELS, max_side: int = MAX_SIDE, seconds: float = _SECONDS) -> None:
        """The process is started with the first file. `seconds`: that a file may take."""
        self._limits = (max_pixels, max_side)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def decode(self, data: bytes) -> Pixels:
        """[height, width, 3] of a PNG, JPEG, WebP or GIF, of which it is the first frame; turned as EXIF says, alpha over white. Raises
        ImageError."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(EOFError):  # it may have died since, of what another one did
                    return self._bounded(data)
            try:
                return self._bounded(data)
            except EOFError:
                raise ImageError("is broken: the process that decodes it has died of it") from None

    def close(self) -> None:
        with self._lock:
            self._kill()

    def _bounded(self, data: bytes) -> Pixels:
        """Raises EOFError if the process died."""
        try:
            return self._decode(data)
        except ImageError:
            raise
        except TimeoutError:  # an OSError
            self._kill()
            raise ImageError(f"takes more than {self._seconds:g} seconds to decode") from None
        except OSError:
            self._kill()
            raise EOFError from None
        except BaseException:
            self._kill()
            raise

    def _decode(self, data: bytes) -> Pixels:
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        end = time.monotonic() + self._seconds
        _write(process.stdin.fileno(), len(data).to_bytes(8, "big"), end)
        _write(process.stdin.fileno(), data, end)
        line = bytearray()
        source = process.stdout.fileno()
        while not line.endswith(b"\n"):
            line += _read(source, 1, end)
        said = json.loads(line)
        if "refused" in said:
            raise ImageError(said["refused"])
        pixels = np.empty((said["height"], said["width"], 3), np.uint8)
        view, filled = pixels.reshape(-1).data, 0
        while filled < len(view):
            part = _read(source, min(len(view) - filled, _PIPE), end)
            view[filled : filled + len(part)] = part
            filled += len(part)
        return pixels

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            command = [sys.executable, "-I", str(_PROGRAM), *map(str, self._limits)]
            environment = {"OMP_NUM_THREADS": "1", "PATH": os.environ.get("PATH", "")}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = subprocess.Popen(command, bufsize=0, env=environment, **pipes)  # type: ignore[call-overload]
            for pipe in (process.stdin, process.stdout):
                os.set_blocking(pipe.fileno(), False)
                with contextlib.suppress(OSError, AttributeError):  # fewer turns for large pictures
                    fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
            self._process = process
        return self._process

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            process.wait()


def _write(out: int, data: bytes, end: float) -> None:
    view = memoryview(data)
    while len(view):
        _wait(end, write=out)
        with contextlib.suppress(BlockingIOError):
            view = view[os.write(out, view[:_PIPE]) :]


def _read(source: int, most: int, end: float) -> bytes:
    """At least one byte. Raises EOFError at the end."""
    while True:
        _wait(end, read=source)
        with contextlib.suppress(BlockingIOError):
            if data := os.read(source, most):
                return data
            raise EOFError


def _wait(end: float, read: int | None = None, write: int | None = None) -> None:
    poll = select.poll()
    for descriptor, event in _waited(read, write):
        poll.register(descriptor, event)
    if not poll.poll(max(end - time.monotonic(), 0.0) * 1000):
        raise TimeoutError


def _waited(read: int | None, write: int | None) -> Iterator[tuple[int, int]]:
    if read is not None:
        yield read, select.POLLIN | select.POLLHUP
    if write is not None:
        yield write, select.POLLOUT | select.POLLERR
