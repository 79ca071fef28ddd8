"""How far the loading of weights is: a bar on a terminal, now and then a line of the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from types import TracebackType

_log = logging.getLogger("aengine")
LOG_SECONDS = 5.0
_GIB = 1 << 30


class LoadProgress:
    """Of `total` bytes. Loading that is done within `LOG_SECONDS` is not logged."""

    def __init__(self, total: int, report: Callable[[int, int], object] | None = None) -> None:
        """`report(loaded, total)` is called instead of showing anything."""
        self._total = total
        self._report = report
        self._loaded = 0
        self._logged = time.monotonic()
        self._bar = None
        if report is None and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024, leave=False)

    def add(self, size: int) -> None:
        self._loaded += size
        if self._report is not None:
            self._report(self._loaded, self._total)
        elif self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            _log.info("loaded %.1f of %.1f GiB of weights", self._loaded / _GIB, self._total / _GIB)

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.close()
