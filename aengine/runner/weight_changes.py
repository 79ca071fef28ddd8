"""Changes of a model that runs: new weights, from what `NewWeights` names to what executors read, checked as a checkpoint is when a model
is loaded, before anything changes; and `Changing`, which prepares changes and applies them between two steps, here and on the ranks that
follow.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from aengine.api.errors import AdapterError, AEngineError, InsufficientMemoryError, InvalidRequestError, ModelLoadError
from aengine.api.outputs import AdapterInfo
from aengine.api.weight_sources import GroupWeights, SharedWeights
from aengine.kernels.arrays import Array, as_array
from aengine.kernels.quantized import Rows
from aengine.models.adapters import adapter_number, load_adapter
from aengine.models.config.model_config import load_spec
from aengine.models.fallback import FallbackSpec
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.loading.checkpoint import Checkpoint, StoredTensor, WeightsDigest, open_checkpoint, read_safetensors
from aengine.models.loading.hub import resolve_model
from aengine.models.loading.weights import checkpoint_weights, with_family_names
from aengine.models.quantization.quantization_config import Quantization, load_quantization
from aengine.models.spec import ModelSpec
from aengine.parallel.driver import DriverRanks
from aengine.parallel.shard import Shard
from aengine.runner.contract import Change, Executor, IntArray, LoadAdapter, NewWeights, Prepared, UnloadAdapter, change_to_json
from aengine.runner.memory import check_addition, free_host_memory, show_bytes
from aengine.runner.rank_steps import naming_ranks
from aengine.runner.setup import ExecutorSetup

if TYPE_CHECKING:
    from torch import Tensor

_MAY_DIFFER = ("architecture", "dtype", "eos_token_ids", "initializer_range", "max_position_embeddings")
"""The fields of a `ModelSpec` that new weights may have otherwise; with another field changed they are of another model."""
_TABLES = ("embedding.weight", "positions.weight", "layer_embedding.weight")  # executors may read them where they are
_SHARED = "/dev/shm"


def new_weights(
    setup: ExecutorSetup, source: Any, partial: bool, check: Callable[[], object], shard: Shard
) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    """Yields each named weight of a shard with its parts, as `ExecutorSetup.weights` does: from a directory or safetensors file, from named
    tensors, or None: from where the model came. `partial`: those that are there.

    None of it is in memory that others can change. It is added to the digest of the setup. `check` is called before each weight. Raises
    what that raises, ModelLoadError, and what the iterator of a source raises.
    """
    if source is None:
        yield from setup.of(shard).weights(check)
        return
    spec = setup.native_spec
    checkpoint, quantization = _opened(source, setup, spec, check)
    own = setup.config.load_format
    whole = open_checkpoint(setup.model_dir, own) if partial and own != "dummy" else None
    named, quiet = with_family_names(spec, checkpoint, whole), lambda *_: None
    for name, parts in checkpoint_weights(spec, named, "the model", quantization, shard, quiet, setup.digest, partial):
        check()
        copied = name in _TABLES and not _is_staged(source)
        yield name, tuple(part.copy() if copied and isinstance(part, np.ndarray) else part for part in parts)


@contextmanager
def as_path(source: Any, setup: ExecutorSetup, check: Callable[[], object]) -> Iterator[str | None]:
    """The source as other ranks can read it, while the context lasts. Raises ModelLoadError for one that ranks of other hosts cannot."""
    if source is None:
        yield None
        return
    if not isinstance(source, str | os.PathLike) and setup.ranks is not None and setup.ranks.num_local < setup.shard.num_ranks:
        raise ModelLoadError(f"with ranks on other hosts new weights come from a directory, not from {type(source).__name__}")
    if isinstance(source, SharedWeights):
        yield str(source.path)
    elif not _is_staged(source):
        yield str(source)
    else:
        from safetensors.numpy import save_file

        with tempfile.TemporaryDirectory(prefix="aengine-weights-", dir=_SHARED if os.path.isdir(_SHARED) else None) as folder:
            path = os.path.join(folder, "model.safetensors")
            staged = _staged(_named(source, setup), check)
            if staged.duplicates:
                raise ModelLoadError(f"the new weights have more than one {staged.duplicates[0]}")
            save_file({name: stored.read_numbers() for name, stored in staged.tensors.items()}, path)
            yield path


def _is_staged(source: Any) -> bool:
    return not isinstance(source, str | os.PathLike | SharedWeights)


def _opened(source: Any, setup: ExecutorSetup, spec: ModelSpec, check: Callable[[], object]) -> tuple[Checkpoint, Quantization | None]:
    own = None if setup.config.load_format == "dummy" else load_quantization(setup.model_dir)
    if _is_staged(source):
        return _staged(_named(source, setup), check), own
    path = source.path if isinstance(source, SharedWeights) else pathlib.Path(os.path.expanduser(source))
    if isinstance(source, SharedWeights) and not path.exists():
        raise ModelLoadError(f"there is no shared memory {source.name!r} with weights")
    if path.is_file() and not is_gguf(path):
        return Checkpoint(dict(read_safetensors(path)), ()), own
    if not path.is_dir() or (path / "config.json").is_file():
        path = resolve_model(str(source))
        _check_same_model(spec, load_spec(path))
        own = load_quantization(path)
    return open_checkpoint(path), own


def _check_same_model(spec: ModelSpec, new: ModelSpec) -> None:
    for field in fields(ModelSpec):
        ours, theirs = getattr(spec, field.name), getattr(new, field.name)
        if field.name not in _MAY_DIFFER and ours != theirs:
            shown = f" ({theirs} instead of {ours})" if isinstance(ours, int | float | str) else ""
            raise ModelLoadError(f"the new weights are of another model: its {field.name} differs{shown}")


def _named(source: Any, setup: ExecutorSetup) -> Iterable[Any]:
    if isinstance(source, GroupWeights):
        return source.receive(setup.torch_device)
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, Iterable):
        return source
    raise ModelLoadError(
        f"weights come from a directory, an iterable of names and tensors, SharedWeights or GroupWeights, not from {type(source).__name__}"
    )


def _same(array: Array) -> Array:
    return array


def _is_tensor(given: object) -> TypeGuard[Tensor]:
    return "torch" in sys.modules and isinstance(given, sys.modules["torch"].Tensor)


def _copied(tensor: Tensor) -> Array:
    import torch

    return as_array(tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format))


def _staged(tensors: Iterable[Any], check: Callable[[], object]) -> Checkpoint:
    """Copies of the tensors, each made before the next is asked for."""
    found: dict[str, StoredTensor] = {}
    duplicates = []
    for entry in tensors:
        check()
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(name, str) or not (isinstance(tensor, np.ndarray) or _is_tensor(tensor)):
            raise ModelLoadError(f"new weights are pairs of a name and a tensor, not {type(entry).__name__}")
        free = free_host_memory()
        if tensor.nbytes > free:
            raise InsufficientMemoryError(
                f"{name} of the new weights takes {show_bytes(tensor.nbytes)}, but {show_bytes(free)} are available"
            )
        copied = np.array(tensor, order="C") if isinstance(tensor, np.ndarray) else _copied(tensor)
        if name in found:
            duplicates.append(name)
        found[name] = StoredTensor(copied.shape, str(copied.dtype), partial(_same, copied))
    return Checkpoint(found, tuple(duplicates))


class Changing:
    """The methods are those of `Runner`. With several ranks none applies a change before all have prepared it."""

    def __init__(self, setup: ExecutorSetup, executor: Executor, check: Callable[[], object], weights_digest: str) -> None:
        """`check` is called before each weight, and may raise to end the preparation. `weights_digest`: of the weights that were loaded."""
        self._setup = setup
        self._executor = executor
        self._check = check
        self.weights_digest = weights_digest
        self._numbers = itertools.count(1)
        self._asleep = False

    def prepare(self, change: Change) -> Prepared:
        return self._prepare(change) if self._setup.followers is None else self._prepare_on(self._setup.followers, change)

    def apply(self, prepared: Prepared) -> None:
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.apply_change(prepared.number)
            self._apply(prepared)

    def discard(self, prepared: Prepared) -> None:
        if self._setup.followers is not None:
            with suppress(AEngineError):  # a rank is gone, and with it the engine
                self._setup.followers.discard_change(prepared.number)

    def sleep(self, level: int, pages: IntArray) -> None:
        if level == 2 and isinstance(self._setup.spec, FallbackSpec):
            raise InvalidRequestError.of("level", "2 is not possible with a model in the code of transformers, which cannot be read again")
        if level == 2 and self._setup.replicas is not None:
            raise InvalidRequestError.of(
                "level", "2 is not possible with expert_parallel_size > 1: others compute with the experts held here"
            )
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.send_sleep(level, pages)
            self._executor.sleep(level, pages)
        self._asleep = True

    def wake(self, prepared: Prepared | None) -> None:
        if prepared is not None:
            self.apply(prepared)
        with self._on_all_ranks() as ranks:
            if ranks is not None:
                ranks.send_wake()
            self._executor.wake()
        self._asleep = False

    @contextmanager
    def _on_all_ranks(self) -> Iterator[DriverRanks | None]:
        """Around what no rank can take back if it fails on another one, for lack of memory, too."""
        ranks = self._setup.followers
        if ranks is None:
            yield None
            return
        with naming_ranks(ranks):
            try:
                yield ranks
            except InsufficientMemoryError as error:
                raise ModelLoadError(f"rank 0: {error}") from error

    def _prepare_on(self, ranks: DriverRanks, change: Change) -> Prepared:
        if isinstance(change, NewWeights):
            with as_path(change.source, self._setup, self._check) as path:
                return self._prepare_with(ranks, replace(change, source=path))
        return self._prepare_with(ranks, change)

    def _prepare_with(self, ranks: DriverRanks, change: Change) -> Prepared:
        number = next(self._numbers)
        ranks.prepare_change(number, change_to_json(change))
        try:
            prepared = self._prepare(change, number)
            return replace(prepared, weights_digest=ranks.wait_prepared(number, prepared.weights_digest))
        except BaseException:
            with suppress(AEngineError):  # of those, the first one counts
                ranks.discard_change(number)
            raise

    def _prepare(self, change: Change, number: int = 0) -> Prepared:
        """On this rank."""
        match change:
            case LoadAdapter(_, name, path):
                return self._load_adapter(change, name, path, number)
            case UnloadAdapter():
                return Prepared(change, None, number)
            case NewWeights() if self._setup.replicas is not None:
                raise ModelLoadError(
                    "weights are not replaced with expert_parallel_size > 1: the other engines would go on with the old ones"
                )
            case NewWeights(source, only_some):
                digest = WeightsDigest(self.weights_digest if only_some else "")
                read = partial(new_weights, replace(self._setup, digest=digest), source, only_some, self._check)
                threads = self._setup.threads if self._asleep else 1  # else the cores are the steps'
                return Prepared(change, self._executor.prepare_weights(read, threads, only_some), number, weights_digest=digest.hexdigest())

    def _load_adapter(self, change: LoadAdapter, name: str, path: str, number: int) -> Prepared:
        setup = self._setup
        if not self._executor.max_adapters and isinstance(setup.spec, ModelSpec):
            raise AdapterError("no adapter can be loaded: max_adapters is 0")
        adapter = load_adapter(pathlib.Path(path), setup.spec, setup.dtype, self._executor.shard, setup.config.max_adapter_rank)
        check_addition(f"adapter {name!r} needs", adapter.nbytes, free_host_memory() // setup.num_local)
        packed = self._executor.pack_adapter(adapter)
        key = adapter_number(pathlib.Path(path))
        return Prepared(change, packed, number, AdapterInfo(name, adapter.low_rank, adapter.modules, adapter.nbytes, key=key))

    def _apply(self, prepared: Prepared) -> None:
        match prepared.change:
            case LoadAdapter(key):
                self._executor.set_adapter(key, prepared.content)
            case UnloadAdapter(key):
                self._executor.set_adapter(key, None)
            case NewWeights():
                self._executor.use_weights(prepared.content)
                self.weights_digest = prepared.weights_digest
