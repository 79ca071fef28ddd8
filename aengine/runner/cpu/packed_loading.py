"""The packed weights of a model on a CPU: mapped from a file where they were packed before, else from its checkpoint, after which they are
written to a file for later starts.

Owns when files are read and written; and the folder of the files: their names, which tell all that decides what is in them, who may have
written there, and how much they take of the disk. The form of a file is that of `models/cpu/packed_weights.py`.
"""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.kernels.cpu.compiler import KernelsUnavailableError, cache_directory, sources_digest
from aengine.kernels.cpu.library import CpuKernels, Workspace, load_kernels
from aengine.kernels.warm_memory import Allocate, WarmMemory, lazy_bytes
from aengine.models.cpu.packed_weights import PackedFile, PackedFileError, PackedWeights, open_packed, verify_packed
from aengine.models.cpu.stack import unsupported
from aengine.models.cpu.weight_packing import WeightPacking
from aengine.models.loading.hub import find_checkpoint
from aengine.models.spec import ModelSpec
from aengine.runner.contract import Device
from aengine.runner.memory import free_host_memory, show_bytes
from aengine.runner.model_plan import plan_model
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.device import CUDA_DEVICE

SUFFIX, TABLES_SUFFIX = ".weights", ".tokens"
_VERSION = 1  # of the form of files, and of how weights are packed beside what the kernels do
_LEAST_WARM = 32 << 20  # bytes: committing less takes no time
_MARGIN = 1 << 30  # bytes of the disk that are left to others


class WeightsCache:
    """The files of packed weights, and of tokenizers' tables, in one folder."""

    def __init__(self, folder: pathlib.Path, size: int) -> None:
        """`size`: the most bytes of all files."""
        self.folder, self.size = folder, size

    @classmethod
    def of(cls, config: EngineConfig, environ: Mapping[str, str] = os.environ) -> WeightsCache | None:
        """The folder that is configured; None: weights are not kept."""
        where = environ.get("AENGINE_PACKED_WEIGHTS") or "auto" if config.weights_cache == "auto" else config.weights_cache
        if where == "off" or config.load_format == "dummy":
            return None
        folder = cache_directory(environ) / "weights" if where == "auto" else pathlib.Path(where).expanduser()
        return cls(folder, config.weights_cache_size)

    def has(self, config: EngineConfig, model_dir: pathlib.Path) -> bool:
        """Whether some weights of this checkpoint are there, packed in whatever form."""
        prefix = _checkpoint_name(config, model_dir)
        with suppress(OSError):
            return any(name.startswith(prefix) and name.endswith(SUFFIX) for name in os.listdir(self.folder))
        return False

    def path(self, config: EngineConfig, model_dir: pathlib.Path, facts: tuple[object, ...]) -> pathlib.Path:
        """Where weights of a checkpoint are, or will be, that are packed as the facts say."""
        return self.folder / f"{_checkpoint_name(config, model_dir)}-{_digest(facts)}{SUFFIX}"

    def tables_path(self, file: pathlib.Path) -> pathlib.Path:
        """Where the tables of a file with a tokenizer are, or will be. Raises OSError."""
        digest = _digest((_VERSION, VERSION, sources_digest(), _stamp(file)))
        return self.folder / f"{_readable(file.parent.resolve())}-{digest}{TABLES_SUFFIX}"

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
                elif entry.name.endswith((SUFFIX, TABLES_SUFFIX)):
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
        facts.append((name, *_stamp(model_dir / name)))
    return f"{_readable(model_dir.resolve())}-{_digest((config.load_format, *facts))}"


def _stamp(file: pathlib.Path) -> tuple[int, ...]:
    """Numbers that are others when a file is another one."""
    about = os.stat(file)
    return about.st_size, about.st_mtime_ns, about.st_ino, about.st_dev


def _readable(path: pathlib.Path) -> str:
    return "".join(letter if letter.isalnum() or letter in "-." else "-" for letter in path.name)[:40]


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


_log = logging.getLogger("aengine")
_MOST_WAIT = 10.0  # seconds that a close waits for a file that is being written
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    packed: PackedWeights
    source: str  # what the log says of them: packed, or mapped
    writing: WeightsWriting | None = None  # the file for later starts, while it is written


class WeightsWriting:
    """A thread that writes packed weights to the cache, beside steps."""

    def __init__(self, cache: WeightsCache, path: pathlib.Path, file: PackedFile) -> None:
        self._cache, self._path, self._file = cache, path, file
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aengine-weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits a while for the file, which a later start needs; then gives it up."""
        self._thread.join(_MOST_WAIT)
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        write_file(self._cache, self._path, self._file, self._check)
        del self._file

    def _check(self) -> None:
        if self._ends.is_set():
            raise PackedFileError("the engine was closed")


def write_file(cache: WeightsCache, path: pathlib.Path, file: PackedFile, check: Callable[[], object] = lambda: None) -> bool:
    """Writes a file of packed weights to the cache, with a line in the log. Returns whether it is there."""
    reason = cache.check_room(file.nbytes)
    start = time.perf_counter()
    if reason is None:
        try:
            file.write(path, check)
            cache.make_room(path)
        except (OSError, PackedFileError) as error:
            reason = str(error)
    if reason is not None:
        _log.warning("packed weights are not kept for later starts: %s", reason)
        return False
    _log.info("packed weights kept for later starts: %s in %s, %.1f s", show_bytes(file.nbytes), path, time.perf_counter() - start)
    return True


def load_packed(setup: ExecutorSetup, workspace: Workspace, check: Callable[[], object], allocate: Allocate = lazy_bytes) -> LoadedWeights:
    """The weights of a model. Parameters and errors are those of `build_executor`."""
    cache = WeightsCache.of(setup.config) if setup.target is None else None  # of a head with parts of its target there is no file
    path = None if cache is None else cache.path(setup.config, setup.model_dir, _facts(setup, workspace.kernels))
    if cache is not None and path is not None and (found := _open(path, setup)) is not None:
        check()
        return LoadedWeights(found, f"mapped from {path}")
    packed = _pack(setup, workspace, check, allocate)
    writing = None if cache is None or path is None else WeightsWriting(cache, path, _file_of(packed, setup))
    return LoadedWeights(packed, "packed", writing)


def _pack(setup: ExecutorSetup, workspace: Workspace, check: Callable[[], object], allocate: Allocate = lazy_bytes) -> PackedWeights:
    options: dict[str, Any] = {"shard": setup.shard, "quantization": setup.config.quantization, "allocate": allocate}
    return WeightPacking(workspace, setup.native_spec, setup.dtype, **options).pack(setup.weights(check))


def _file_of(packed: PackedWeights, setup: ExecutorSetup) -> PackedFile:
    return PackedFile(packed, {"digest": "" if setup.digest is None else setup.digest.hexdigest()})


def _open(path: pathlib.Path, setup: ExecutorSetup) -> PackedWeights | None:
    """The weights of a file; None if there is none that can be used."""
    try:
        about = path.stat(follow_symlinks=False)
        if about.st_uid != os.geteuid():
            raise PackedFileError("it belongs to another user")
        packed, facts = open_packed(path, setup.native_spec, setup.dtype, setup.shard)
        with suppress(OSError):
            os.utime(path)  # the latest use
    except FileNotFoundError:
        return None
    except (OSError, PackedFileError, ValueError, KeyError, TypeError) as error:
        _log.warning("packed weights in %s cannot be used (%s); they are packed again", path, error)
        with suppress(OSError):
            path.unlink()
        return None
    if setup.digest is not None:
        setup.digest.known = facts["digest"]
    return packed


def _facts(setup: ExecutorSetup, kernels: CpuKernels) -> tuple[object, ...]:
    """What decides packed weights beside the checkpoint."""
    of_kernels = kernels.level.value, kernels.sources
    return _VERSION, VERSION, *of_kernels, str(setup.dtype), setup.config.quantization, repr(setup.spec), repr(setup.shard)


def pack_to_file(config: EngineConfig, model_dir: pathlib.Path) -> tuple[pathlib.Path, bool]:
    """Packs the weights of a model into the file that a start with this configuration maps, and checks all of it. Returns where it is, and
    whether it was not there before. Raises ConfigError, ModelLoadError, and InsufficientMemoryError."""
    cache = WeightsCache.of(config)
    if cache is None:
        raise ConfigError.of("weights_cache", "'off' keeps no weights")
    setup = plan_model(config, model_dir, Device("cpu"), None, None, None).setup
    if not isinstance(setup.spec, ModelSpec) or (reason := unsupported(setup.spec, setup.dtype)) is not None:
        why = reason if isinstance(setup.spec, ModelSpec) else "it runs in the code of transformers"
        raise ConfigError.of("model", f"{config.model!r} is not computed by the CPU kernels: {why}")
    try:
        kernels = load_kernels(canonical=config.numerics == "canonical")
    except KernelsUnavailableError as error:
        raise ConfigError.of("attention_backend", f"'cpu' is not possible here: {error}") from None
    path = cache.path(config, model_dir, _facts(setup, kernels))
    is_new = _open(path, setup) is None
    if is_new:
        packed = _pack(setup, Workspace(kernels, setup.threads), lambda: None)
        if not write_file(cache, path, _file_of(packed, setup)):
            raise ConfigError.of("weights_cache", f"{str(cache.folder)!r} has no room, or cannot be written to: the log says why")
    try:
        verify_packed(path)
    except PackedFileError as error:
        path.unlink(missing_ok=True)
        raise ConfigError.of("weights_cache", f"{path} was damaged and is removed: {error}; pack again") from None
    return path, is_new


def warm_weights(config: EngineConfig, model_dir: pathlib.Path) -> WarmMemory | None:
    """About as much memory as the weights of a checkpoint will take; None where nothing is gained."""
    on_cpu = config.device == "cpu" or (config.device == "auto" and not CUDA_DEVICE.exists())
    if not on_cpu or config.load_format == "dummy" or _runs_in_torch(config):
        return None
    cache = WeightsCache.of(config)
    if cache is not None and cache.has(config, model_dir):  # they are likely mapped
        return None
    size = sum((model_dir / name).stat().st_size for name in find_checkpoint(model_dir, config.load_format).names)
    if config.quantization != "none":  # most checkpoints have 16 bits per weight
        size //= 4 if config.quantization == "int4" else 2
    elif config.dtype == "float32":
        size *= 2
    size //= config.num_ranks
    return WarmMemory(size) if _LEAST_WARM <= size <= free_host_memory() // 2 else None


def _runs_in_torch(config: EngineConfig) -> bool:
    return config.attention_backend == "torch_native" or config.expert_parallel_size > 1
