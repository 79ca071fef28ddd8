"""Whether files are still those that were read."""

from __future__ import annotations

from pathlib import Path

Fingerprint = tuple[tuple[int, int, int], ...] | None


def fingerprint(*paths: Path) -> Fingerprint:
    """Time of modification in nanoseconds, size and inode of each; None where one cannot be read."""
    try:
        return tuple((status.st_mtime_ns, status.st_size, status.st_ino) for status in [path.stat() for path in paths])
    except OSError:
        return None
