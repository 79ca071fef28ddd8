"""How soon the threads of this process hand the interpreter to each other. For programs that own their process, since it is one setting
for all of it; an engine that is embedded leaves it alone."""

from __future__ import annotations

import sys

SWITCH_INTERVAL = 2e-4
"""Seconds. The step thread waits for the interpreter once per step, and Python's default of 5 ms would add up to as much to each step
beside a busy event loop."""


def switch_often() -> None:
    """Let no thread keep the interpreter for longer than SWITCH_INTERVAL while another one waits for it."""
    if sys.getswitchinterval() > SWITCH_INTERVAL:
        sys.setswitchinterval(SWITCH_INTERVAL)
