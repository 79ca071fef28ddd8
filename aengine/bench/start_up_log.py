"""What an engine says about itself while it starts: which backend and why, graphs, memory. A figure means little without it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Collector(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def start_up_log() -> Iterator[list[str]]:
    """A list that fills, while inside, with the messages of the package at level INFO and above, from all threads."""
    logger = logging.getLogger("aengine")
    lines: list[str] = []
    collector, level = _Collector(lines), logger.level
    logger.addHandler(collector)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(collector)
        logger.setLevel(level)
