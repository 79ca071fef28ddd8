"""What keeps objects alive: Python's garbage collector where it is paused, and errors."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """No garbage collection in this process. Objects alive at the end count as old, so the next collections do not look through them."""
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


def forget_locals(error: BaseException) -> None:
    """Of the functions that have ended with `error`, and with those that it came from: it would keep them alive as long as it is kept."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += one.__cause__, one.__context__
