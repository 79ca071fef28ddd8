"""New weights of a model that runs: from what `NewWeights` names to what executors read.

They are checked as a checkpoint is when a model is loaded, before anything changes.
"""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from aengine.errors import InsufficientMemoryError, ModelLoadError
from aengine.kernels.quantized import Rows
from aengine.models.checkpoint import Checkpoint, StoredTensor, open_checkpoint, read_safetensors
from aengine.models.gguf.file import is_gguf
from aengine.models.hub import resolve_model
from aengine.models.model_config import load_spec
from aengine.models.quantization.config import Quantization, load_quantization
from aengine.models.spec import ModelSpec
from aengine.models.weights import checkpoint_weights, with_family_names
from aengine.parallel.shard import Shard
from aengine.runner.memory import free_host_memory, show_bytes
from aengine.runner.setup import ExecutorSetup
from aengine.weight_sources import GroupWeights, SharedWeights

_MAY_DIFFER = ("architecture", "dtype", "eos_token_ids", "initializer_range", "max_position_embeddings")
"""Of what a config.json says; else new weights are of another model."""
_TABLES = ("embedding.weight", "positions.weight")  # executors may read them where they are
_SHARED = "/dev/shm"


def new_weights(setup: ExecutorSetup, source: Any, check: Callable[[], object], shard: Shard) -> Iterator[tuple[str, tuple[Rows, ...]]]:
    """As `ExecutorSetup.weights`, of a shard: from a directory or safetensors file, from named tensors, or None: from where the model came.

    None of it is in memory that others can change. `check` is called before each weight. Raises what that raises, ModelLoadError, and
    what the iterator of a source raises.
    """
    if source is None:
        yield from setup.of(shard).weights(check)
        return
    spec = setup.native_spec
    checkpoint, quantization = _opened(source, setup, spec, check)
    described = "the model"
    for name, parts in checkpoint_weights(spec, with_family_names(spec, checkpoint), described, quantization, shard, lambda *_: None):
        check()
        copied = name in _TABLES and not _is_staged(source)
        yield name, tuple(part.clone() if copied and isinstance(part, Tensor) else part for part in parts)


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
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="aengine-weights-", dir=_SHARED if os.path.isdir(_SHARED) else None) as folder:
            path = os.path.join(folder, "model.safetensors")
            staged = _staged(_named(source, setup.device), check)
            if staged.duplicates:
                raise ModelLoadError(f"the new weights have more than one {staged.duplicates[0]}")
            save_file({name: stored.tensor() for name, stored in staged.tensors.items()}, path)
            yield path


def _is_staged(source: Any) -> bool:
    return not isinstance(source, str | os.PathLike | SharedWeights)


def _opened(source: Any, setup: ExecutorSetup, spec: ModelSpec, check: Callable[[], object]) -> tuple[Checkpoint, Quantization | None]:
    own = None if setup.config.load_format == "dummy" else load_quantization(setup.model_dir)
    if _is_staged(source):
        return _staged(_named(source, setup.device), check), own
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


def _named(source: Any, device: torch.device) -> Iterable[Any]:
    if isinstance(source, GroupWeights):
        return source.receive(device)
    if isinstance(source, Mapping):
        return source.items()
    if isinstance(source, Iterable):
        return source
    raise ModelLoadError(
        f"weights come from a directory, an iterable of names and tensors, SharedWeights or GroupWeights, not from {type(source).__name__}"
    )


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _staged(tensors: Iterable[Any], check: Callable[[], object]) -> Checkpoint:
    """Copies of the tensors, each made before the next is asked for."""
    found: dict[str, StoredTensor] = {}
    duplicates = []
    for entry in tensors:
        check()
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (None, entry)
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ModelLoadError(f"new weights are pairs of a name and a tensor, not {type(entry).__name__}")
        free = free_host_memory()
        if tensor.nbytes > free:
            raise InsufficientMemoryError(
                f"{name} of the new weights takes {show_bytes(tensor.nbytes)}, but {show_bytes(free)} are available"
            )
        copied = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        if name in found:
            duplicates.append(name)
        found[name] = StoredTensor(tuple(copied.shape), str(copied.dtype).removeprefix("torch."), partial(_same, copied))
    return Checkpoint(found, tuple(duplicates))
