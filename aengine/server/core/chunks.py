"""Starting tasks for many things in chunks, so that they do not hold up the event loop. Knows nothing of what is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

CHUNK_SIZE = 128
"""To begin or end so many requests takes some tens of milliseconds."""

Item = TypeVar("Item")


async def in_chunks(items: Iterable[Item], begin: Callable[[Item], asyncio.Task[None]]) -> None:
    """Call `begin` for the items of a chunk, wait for their tasks, and go on with the next chunk. When it is cancelled it goes on, too, but
    waits no longer for the chunk it was at. What tasks raise is dropped."""
    left = iter(items)
    cancelled: asyncio.CancelledError | None = None
    while tasks := [begin(item) for item in islice(left, CHUNK_SIZE)]:
        try:
            for task in (await asyncio.wait(tasks))[0]:  # cancelling it cancels none of them
                if not task.cancelled():
                    task.exception()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
