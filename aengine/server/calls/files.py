"""Whether a file is still the one that was read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fingerprint:
    modified_ns: int
    size: int
    inode: int


def fingerprint(path: Path) -> Fingerprint:
    """Raises `OSError`."""
    status = path.stat()
    return Fingerprint(status.st_mtime_ns, status.st_size, status.st_ino)
