"""Which files of a model hold its weights: safetensors or PyTorch files, one or sharded, with or without an index.

Reads names and the index, never the weights themselves. Imports no torch.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from aengine.errors import ModelLoadError
from aengine.models.gguf.file import is_gguf
from aengine.models.json_file import read_json

_STEMS = {".safetensors": "model", ".bin": "pytorch_model", ".pt": "pytorch_model", ".pth": "pytorch_model"}
"""Suffixes in the order of preference, each with the usual name of its files."""
_FORMATS = {"auto": tuple(_STEMS), "safetensors": (".safetensors",), "pt": (".bin", ".pt", ".pth")}
_OTHERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state|random_states|adapter_model).*")
"""What training leaves beside the weights in files of the same suffixes."""
_HASHED = 1 << 16
"""Bytes at the beginning and at the end of a file."""
_SHARD = re.compile(r"(.*-)(\d+)-of-(\d{1,6})(\.\w+)")


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    names: tuple[str, ...]  # in the model's directory; of a model that is one file, its whole path
    index: str | None = None  # the file that lists them
    weight_map: Mapping[str, str] | None = None  # of the index: tensor name -> file


def find_checkpoint(model_dir: pathlib.Path, load_format: str = "auto", names: Collection[str] | None = None) -> CheckpointFiles:
    """The files with the weights, of those that `load_format` allows; safetensors before PyTorch's. An index must lie in `model_dir`.

    `names`: those of the files of the model, if they do not all lie in `model_dir` yet. Raises ModelLoadError if there are no weights, or
    some of their files are missing.
    """
    if is_gguf(model_dir):
        return CheckpointFiles((str(model_dir.absolute()),))  # joined to any directory, it is this path
    if names is None:
        names = os.listdir(model_dir)
    for suffix in _FORMATS[load_format]:
        usual = _STEMS[suffix] + suffix
        index = f"{usual}.index.json"
        if index in names:
            return _indexed(model_dir, index, names)
        if usual in names:
            return CheckpointFiles((usual,))
        found = sorted(name for name in names if name.endswith(suffix) and not _OTHERS.fullmatch(name))
        found = [name for name in found if name.startswith(f"{_STEMS[suffix]}-")] or found
        if found:
            _check_all_shards(found)
            return CheckpointFiles(tuple(found))
    raise ModelLoadError(f"there are no weights in {model_dir} (no {', '.join(f'*{suffix}' for suffix in _FORMATS[load_format])})")


def _indexed(model_dir: pathlib.Path, index: str, names: Collection[str]) -> CheckpointFiles:
    weight_map = read_json(model_dir / index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelLoadError(f"{model_dir / index} has no weight_map from tensors to files")
    listed = sorted(set(weight_map.values()))
    missing = [name for name in listed if name not in names]  # a path to elsewhere is never one of the names
    if missing:
        raise ModelLoadError(f"{model_dir / index} lists {shortened(missing)}, which {'is' if len(missing) == 1 else 'are'} missing")
    return CheckpointFiles(tuple(listed), index, weight_map)


def _check_all_shards(names: Collection[str]) -> None:
    for match in filter(None, map(_SHARD.fullmatch, names)):
        first, number, count, suffix = match.groups()
        expected = (f"{first}{shard:0{len(number)}}-of-{count}{suffix}" for shard in range(1, int(count) + 1))
        missing = [name for name in expected if name not in names]
        if missing:
            raise ModelLoadError(
                f"of the {int(count)} files of the checkpoint {shortened(missing)} {'is' if len(missing) == 1 else 'are'} missing"
            )


def checkpoint_digest(model_dir: pathlib.Path, load_format: str) -> str:
    """Hexadecimal digits that tell checkpoints apart: by config.json, and by the name, size, beginning and end of each file. Of load_format
    dummy, by config.json alone. Raises ModelLoadError."""
    digest = hashlib.sha256()
    config = model_dir / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for name in () if load_format == "dummy" else find_checkpoint(model_dir, load_format).names:
        path = model_dir / name
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            digest.update(file.read(_HASHED))
            file.seek(max(0, size - _HASHED))
            digest.update(file.read(_HASHED))
    return digest.hexdigest()[:16]


def shortened(names: Collection[str], limit: int = 8) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(list(names)[:limit]) + more
