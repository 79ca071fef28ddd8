"""What is special about checkpoints for embeddings: how these are made, as sentence-transformers writes it (`modules.json`, and the config
of its module Pooling), and that many have no output head."""

from __future__ import annotations

import json
import pathlib

from aengine.api.errors import ModelLoadError
from aengine.models.config.json_file import read_json
from aengine.models.families import FAMILIES
from aengine.models.loading.weights import open_weights
from aengine.models.spec import ModelSpec

_KNOWN = {"lasttoken": "last", "mean_tokens": "mean"}
_WITHOUT_EFFECT = ("Transformer", "Normalize")  # to normalize or not is said by requests


def has_output_head(spec: ModelSpec, model_dir: pathlib.Path, load_format: str) -> bool:
    """False for a checkpoint that was saved without its head, though its config.json does not tie the head to the embedding. Looks only at
    those of sentence-transformers, and of base models. Raises ModelLoadError."""
    if spec.tied_head or load_format == "dummy" or model_dir.is_file():
        return True
    architectures = read_json(model_dir / "config.json").get("architectures") or [""]
    if architectures[0] == spec.architecture and not (model_dir / "modules.json").is_file():
        return True
    head = FAMILIES[spec.family].names["head"]
    return any(name.startswith(f"{head}.") for name in open_weights(spec, model_dir, load_format).tensors)


def default_pooling(model_dir: pathlib.Path) -> str:
    """last, which it is for a checkpoint that says nothing, or mean; or a word for something else, such as cls_token, or Dense for a module
    of that name."""
    try:
        modules = json.loads((model_dir / "modules.json").read_text(encoding="utf-8"))
    except OSError:
        return "last"
    except ValueError:
        return "unknown"
    pooling = "last"
    try:
        for module in modules:
            kind = module["type"].rpartition(".")[2]
            if kind == "Pooling":
                config = read_json(model_dir / module["path"] / "config.json")
                modes = [
                    key.removeprefix("pooling_mode_") for key, value in config.items() if key.startswith("pooling_mode_") and value is True
                ]
                pooling = " and ".join(_KNOWN.get(mode, mode) for mode in modes) or "unknown"
            elif kind not in _WITHOUT_EFFECT:
                return str(kind)
    except (ModelLoadError, KeyError, TypeError, AttributeError):
        return "unknown"
    return pooling
