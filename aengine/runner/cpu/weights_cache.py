"""The folder in which packed weights are kept for later starts.

Owns the names of its files, which tell all that decides what is in them; who may have written there; and how much they take of the disk.
Imports no torch, and knows nothing of what is in a file.
"""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b

from aengine.api.config import EngineConfig
from aengine.models.loading.hub import find_checkpoint

SUFFIX = ".weights"
_MARGIN = 1 << 30  # bytes of the disk that are left to others


class WeightsCache:
    """The files of packed weights in one folder."""

    def __init__(self, folder: pathlib.Path, size: int) -> None:
        """`size`: the most bytes of all files."""
        self.folder, self.size = folder, size

    @classmethod
    def of(cls, config: EngineConfig, environ: Mapping[str, str] = os.environ) -> WeightsCache | None:
        """The folder that is configured; None: weights are not kept."""
        where = environ.get("AENGINE_WEIGHTS_CACHE") or "auto" if config.weights_cache == "auto" else config.weights_cache
        if where == "off" or config.load_format == "dummy":
            return None
        if where == "auto":
            base = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "~", ".cache")
            where = os.path.join(base, "aengine", "weights")
        return cls(pathlib.Path(where).expanduser(), config.weights_cache_size)

    def has(self, config: EngineConfig, model_dir: pathlib.Path) -> bool:
        """Whether some weights of this checkpoint are there, packed in whatever form."""
        prefix = _checkpoint_name(config, model_dir)
        with suppress(OSError):
            return any(name.startswith(prefix) and name.endswith(SUFFIX) for name in os.listdir(self.folder))
        return False

    def path(self, config: EngineConfig, model_dir: pathlib.Path, facts: tuple[object, ...]) -> pathlib.Path:
        """Where weights of a checkpoint are, or will be, that are packed as the facts say."""
        return self.folder / f"{_checkpoint_name(config, model_dir)}-{_digest(facts)}{SUFFIX}"

    def check_room(self, size: int) -> str | None:
        """Why a file of so many bytes cannot be written; None: it can."""
        if size > self.size:
            return f"they take {size >> 20} MiB, and weights_cache_size is {self.size >> 20} MiB"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            about = self.folder.stat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o022:
                return f"others may write to {self.folder}"
            free = shutil.disk_usage(self.folder).free
        except OSError as error:
            return f"{self.folder} cannot be used: {error.strerror}"
        return None if free >= size + _MARGIN else f"the disk of {self.folder} has {free >> 20} MiB left"

    def make_room(self, kept: pathlib.Path) -> None:
        """Removes the files that were used longest ago, beyond the size of all, but not `kept`; and what writers left that are gone."""
        found = []
        for entry in os.scandir(self.folder):
            with suppress(OSError):
                if entry.name.endswith(".writing") and not _is_running(entry.name):
                    os.unlink(entry.path)
                elif entry.name.endswith(SUFFIX):
                    about = entry.stat(follow_symlinks=False)
                    found.append((about.st_mtime, about.st_size, pathlib.Path(entry.path)))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total > self.size and path != kept:
                with suppress(OSError):
                    path.unlink()  # who has mapped it keeps it
                total -= size


def _checkpoint_name(config: EngineConfig, model_dir: pathlib.Path) -> str:
    """What the names of files with weights of this checkpoint begin with: another one for each change of its files."""
    names = {*find_checkpoint(model_dir, config.load_format).names, *(path.name for path in model_dir.glob("*.json"))}
    facts = []
    for name in sorted(names):
        about = os.stat(model_dir / name)
        facts.append((name, about.st_size, about.st_mtime_ns, about.st_ino, about.st_dev))
    readable = "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in model_dir.resolve().name)[:40]
    return f"{readable}-{_digest((config.load_format, *facts))}"


def _digest(facts: tuple[object, ...]) -> str:
    return blake2b(repr(facts).encode(), digest_size=12).hexdigest()


def _is_running(name: str) -> bool:
    """Whether the process that writes a file of this name is there."""
    number = name.split(".")[-2]
    if not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
