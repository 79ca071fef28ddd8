"""How long a test waits for what must come, before it fails instead of hanging, and how it lets other threads run meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

import anyio

HANG_SECONDS = 240
"""Less than a test may take, and far beyond what anything takes on a machine whose cores are busy with something else: a shorter limit
judges the machine."""


def growing(seconds: float) -> Iterator[float]:
    """Ever longer limits for a test that waits for a limit to pass, and in which something must come before it does: to be tried one after
    the other, until it came."""
    while seconds < HANG_SECONDS:
        yield seconds
        seconds *= 4
    raise AssertionError(f"it did not come in {seconds / 4} s")


async def let_others_run() -> None:
    """A turn of the loop in which the other threads get the GIL: where it turns without a pause they wait a switch interval for it, again
    and again, a thousand times as long as they compute."""
    await anyio.sleep(0.0005)
