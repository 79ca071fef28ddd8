"""Types of arguments of `aengine-bench`. They raise ValueError for what is not one."""

from __future__ import annotations


def counts(text: str) -> tuple[int, ...]:
    found = tuple(int(part) for part in text.split(",") if part)
    if any(count < 1 for count in found):
        raise ValueError
    return found


def shares(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if not all(0 <= share <= 1 for share in found):
        raise ValueError
    return found


counts.__name__ = "list of numbers"  # which argparse names
shares.__name__ = "list of numbers in [0, 1]"
