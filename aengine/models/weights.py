"""Loads the named weights of a spec from safetensors: every parameter exactly once, and no other tensors.

Owns the reading of checkpoint files and the fusing of their tensors. Does not know how the weights are used.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from aengine.errors import ModelLoadError
from aengine.models.named_weights import kv_scale_of, named_weights
from aengine.models.spec import ModelSpec, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def checkpoint_files(model_dir: pathlib.Path) -> list[pathlib.Path]:
    """The safetensors files of a model, one or sharded. Raises ModelLoadError when there are none or one is missing."""
    index = model_dir / INDEX_FILE
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (model_dir / name).is_file()]
        if missing or not names:
            raise ModelLoadError(f"{index} lists {missing[0]}, which is missing" if missing else f"{index} lists no files")
        return [model_dir / name for name in names]
    if (model_dir / SINGLE_FILE).is_file():
        return [model_dir / SINGLE_FILE]
    raise ModelLoadError(f"{model_dir} holds no weights: neither {SINGLE_FILE} nor {INDEX_FILE}")


def checkpoint_dtype(model_dir: pathlib.Path) -> torch.dtype:
    """The dtype of a checkpoint's first tensor, for a config.json without a dtype."""
    with ExitStack() as stack:
        name, file = next(iter(open_checkpoint(checkpoint_files(model_dir), stack).items()))
        return stored_dtype(file, name)


def stored_weights(spec: ModelSpec, model_dir: pathlib.Path) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Each of `named_weights(spec)` with its parts: tensors of the checkpoint's dtype on the CPU, mapped from its files.

    Raises ModelLoadError naming tensors that are missing, unexpected, stored twice, of another shape, or quantized.
    """
    weights = named_weights(spec)
    with ExitStack() as stack:
        files = open_checkpoint(checkpoint_files(model_dir), stack)
        _check_names(spec, files, {part.source for weight in weights.values() for part in weight.parts})
        for name in _progress(weights):
            weight = weights[name]
            parts: list[Tensor] = []
            for part in weight.parts:
                expected = [part.rows, *weight.shape[1:]]
                stored = files[part.source].get_slice(part.source).get_shape()
                if stored != expected:
                    raise ModelLoadError(f"tensor {part.source} has shape {stored} in the checkpoint; config.json implies {expected}")
                stored_dtype(files[part.source], part.source)
                parts.append(files[part.source].get_tensor(part.source))
            yield name, tuple(parts)


def random_weights(spec: ModelSpec, dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """Random values for each of `named_weights(spec)`, in one part; equal for equal seeds and device types."""
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in named_weights(spec).items():
        tensor = torch.empty(weight.shape, dtype=dtype, device=device)
        if weight.fill is None:
            tensor.normal_(0.0, spec.initializer_range, generator=generator)
        else:
            tensor.fill_(weight.fill)
        yield name, (tensor,)


def fused(weights: Iterable[tuple[str, tuple[Tensor, ...]]], dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """Parameter name -> a new tensor of `dtype` on `device` with the parts one after another."""
    tensors: dict[str, Tensor] = {}
    for name, parts in weights:
        target = torch.empty((sum(len(part) for part in parts), *parts[0].shape[1:]), dtype=dtype, device=device)
        row = 0
        for part in parts:
            target[row : row + len(part)].copy_(part)
            row += len(part)
        tensors[name] = target
    return tensors


def open_checkpoint(paths: list[pathlib.Path], stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the safetensors file that holds it, which is open until `stack` is closed. Raises ModelLoadError."""
    files: dict[str, Any] = {}
    for path in paths:
        try:
            file = stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path} is not a readable safetensors file: {error}") from error
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is not iterable
            if name in files:
                raise ModelLoadError(f"tensor {name} is stored in more than one checkpoint file")
            files[name] = file
    if not files:
        raise ModelLoadError(f"{paths[0]} holds no tensors")
    return files


def _check_names(spec: ModelSpec, files: dict[str, Any], expected: set[str]) -> None:
    # Older Llama checkpoints have the rotary frequencies, which follow from the config. KV scales are read in kv_scales.py.
    present = {name for name in files if not name.endswith(".rotary_emb.inv_freq") and kv_scale_of(name, spec) is None}
    missing, unexpected = sorted(expected - present), sorted(present - expected)
    if spec.tied_head and unexpected == [_HEAD] and not missing:
        # A tied head may be stored too, but only with the values of the embedding.
        if torch.equal(files[_HEAD].get_tensor(_HEAD), files[_EMBEDDING].get_tensor(_EMBEDDING)):
            return
        raise ModelLoadError(f"config.json ties the output head to the embedding, but the checkpoint's {_HEAD} differs from it")
    if missing or unexpected:
        lists = (f"{title} {_some(names)}" for title, names in (("lacks", missing), ("has unexpected", unexpected)) if names)
        raise ModelLoadError(f"the checkpoint does not match its config.json: it {' and '.join(lists)}")


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def stored_dtype(file: Any, name: str) -> torch.dtype:
    """The dtype of a tensor in an open file. Raises ModelLoadError for one that is not supported."""
    stored = file.get_slice(name).get_dtype()
    if stored not in _DTYPES:
        raise ModelLoadError(f"tensor {name} is stored as {stored}; supported are {', '.join(_DTYPES)}")
    return _DTYPES[stored]


def _progress(weights: dict[str, Any]) -> Iterator[str]:
    """The names, with a progress bar if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield from weights
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    yield from tqdm(weights, desc="Loading weights", unit="tensor", leave=False)
