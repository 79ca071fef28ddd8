"""The packed weights of a model on a CPU: mapped from a file where they were packed before, else from its checkpoint, after which they are
written to a file for later starts.

Owns when files are read and written; the folder is `WeightsCache`'s, and the form of a file that of `models/cpu/packed_weights.py`.
"""

from __future__ import annotations

import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aengine.api import VERSION
from aengine.api.config import EngineConfig
from aengine.api.dataclass import dataclass
from aengine.api.errors import ConfigError
from aengine.kernels.cpu.compiler import KernelsUnavailableError, sources_digest
from aengine.kernels.cpu.library import Workspace, load_kernels
from aengine.kernels.warm_memory import Allocate, lazy_bytes
from aengine.models.cpu.packed_weights import PackedFile, PackedFileError, PackedWeights, open_packed, verify_packed
from aengine.models.cpu.stack import unsupported
from aengine.models.spec import ModelSpec
from aengine.runner.contract import Device
from aengine.runner.cpu.weights_cache import WeightsCache
from aengine.runner.memory import show_bytes
from aengine.runner.model_plan import plan_model
from aengine.runner.setup import ExecutorSetup
from aengine.runner.torch.device import set_thread_count

_log = logging.getLogger("aengine")
_VERSION = 1  # of the form of files, and of how weights are packed beside what the kernels do
_MOST_WAIT = 10.0  # seconds that a close waits for a file that is being written
_LOWEST_PRIORITY = 19


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    packed: PackedWeights
    source: str  # what the log says of them: packed, or mapped
    writing: WeightsWriting | None = None  # the file for later starts, while it is written


class WeightsWriting:
    """A thread that writes packed weights to the cache, beside steps."""

    def __init__(self, cache: WeightsCache, path: pathlib.Path, packed: PackedWeights, digest: str) -> None:
        self._cache, self._path = cache, path
        self._file = PackedFile(packed, {"digest": digest})
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


def load_packed(
    setup: ExecutorSetup, workspace: Workspace, check: Callable[[], object], allocate: Allocate = lazy_bytes, *, keep: bool = True
) -> LoadedWeights:
    """The weights of a model. Parameters and errors are those of `build_executor`. `keep`: whether they are written to a file where they
    were not in one."""
    cache = WeightsCache.of(setup.config) if setup.target is None else None  # of a head with parts of its target there is no file
    path = None if cache is None else cache.path(setup.config, setup.model_dir, _facts(setup, workspace.kernels.level.value))
    if cache is not None and path is not None and (found := _open(path, setup)) is not None:
        check()
        return LoadedWeights(found, f"mapped from {path}")
    from aengine.models.cpu.weight_packing import WeightPacking  # imports torch

    set_thread_count(setup.threads)  # of this thread; other engines and the host program keep theirs
    options: dict[str, Any] = {"shard": setup.shard, "quantization": setup.config.quantization, "allocate": allocate}
    packed = WeightPacking(workspace, setup.native_spec, setup.dtype, **options).pack(setup.weights(check))
    writing = None
    if keep and cache is not None and path is not None:
        writing = WeightsWriting(cache, path, packed, "" if setup.digest is None else setup.digest.hexdigest())
    return LoadedWeights(packed, "packed", writing)


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


def _facts(setup: ExecutorSetup, level: str) -> tuple[object, ...]:
    """What decides packed weights beside the checkpoint."""
    config = setup.config
    return _VERSION, VERSION, level, sources_digest(), str(setup.dtype), config.quantization, repr(setup.spec), repr(setup.shard)


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
    workspace = Workspace(kernels, setup.threads)
    path = cache.path(config, model_dir, _facts(setup, kernels.level.value))
    is_new = _open(path, setup) is None
    if is_new:
        packed = load_packed(setup, workspace, lambda: None, keep=False).packed
        assert setup.digest is not None
        write_file(cache, path, PackedFile(packed, {"digest": setup.digest.hexdigest()}))
        if not path.exists():
            raise ConfigError.of("weights_cache", f"{str(cache.folder)!r} has no room, or cannot be written to: the log says why")
    try:
        verify_packed(path)
    except PackedFileError as error:
        path.unlink(missing_ok=True)
        raise ConfigError.of("weights_cache", f"{path} was damaged and is removed: {error}; pack again") from None
    return path, is_new
