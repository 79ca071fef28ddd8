"""Holding Python's garbage collector back for a while."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Without garbage collection in this process. What is alive in the end counts as old: the next collections do not look through it."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if gc.get_freeze_count() == 0:  # else somebody has frozen what is to stay frozen
            gc.freeze()
            gc.unfreeze()  # into the oldest generation
        if collects:
            gc.enable()
