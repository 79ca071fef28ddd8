"""How soon a thread of this process gives up the GIL to another. For programs that own their process, since it is one setting for all of
it; an embedded engine does not change it."""

from __future__ import annotations

import sys

SWITCH_INTERVAL = 2e-4
"""Seconds. The step thread waits for the GIL once per step, and Python's default of 5 ms would add up to as much to each step
beside a busy event loop."""


def switch_often() -> None:
    """Let no thread hold the GIL for longer than SWITCH_INTERVAL while another one waits for it."""
    if sys.getswitchinterval() > SWITCH_INTERVAL:
        sys.setswitchinterval(SWITCH_INTERVAL)
