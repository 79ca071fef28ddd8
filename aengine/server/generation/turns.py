"""Doing something to each of many, without holding the event loop up: a few in a turn. Knows nothing of what is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

AT_ONCE = 128
"""How many have their turn together: so many requests take some tens of milliseconds to begin or to end."""

Item = TypeVar("Item")


async def each_in_turn(items: Iterable[Item], begin: Callable[[Item], asyncio.Task[None]]) -> None:
    """Call `begin` for each, wait for the tasks of those that have their turn together, and go on. When it is cancelled the rest are begun
    at once. What tasks raise is dropped."""
    left = iter(items)
    try:
        while tasks := [begin(item) for item in islice(left, AT_ONCE)]:
            await _wait(tasks)
    finally:
        await _wait([begin(item) for item in left])


async def _wait(tasks: list[asyncio.Task[None]]) -> None:
    """Until all have ended; cancelling it cancels none of them."""
    for task in (await asyncio.wait(tasks))[0] if tasks else ():
        if not task.cancelled():
            task.exception()
