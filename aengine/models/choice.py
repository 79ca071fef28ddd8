"""What a checkpoint's files say of how it is run: by our own implementation or that of transformers; without an output head, as many for
embeddings are; and how embeddings are made, as sentence-transformers writes it (`modules.json`, and the config of its module Pooling).
"""

from __future__ import annotations

import json
import logging
import pathlib

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.api.runtime import imports_of
from aengine.models.config.model_config import load_spec
from aengine.models.config.reader import NotNativeError
from aengine.models.fallback import FallbackSpec
from aengine.models.families import FAMILIES
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.loading.weights import open_weights
from aengine.models.model_files import CLASSIFIER, architecture_of, read_json, refuse_config
from aengine.models.named_weights import num_active_parameters, num_parameters
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.spec import ModelSpec

_log = logging.getLogger("aengine")
AnySpec = ModelSpec | FallbackSpec
_KNOWN_POOLINGS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls"}
_WITHOUT_EFFECT = ("Transformer", "Normalize")  # to normalize or not is said by requests


def find_spec(model_dir: pathlib.Path, model_impl: str, max_model_len: int | None = None) -> AnySpec:
    """The description of a model, by `EngineConfig.model_impl`, with a log line if transformers runs it; `max_model_len` as in `read_spec`.

    Raises ModelLoadError saying why neither can, or why the one that is asked for cannot.
    """
    reason = "asked for"
    if not is_gguf(model_dir):
        refuse_config(read_json(model_dir / "config.json"))
    classifies = not is_gguf(model_dir) and architecture_of(read_json(model_dir / "config.json")).endswith(CLASSIFIER)
    if classifies and model_impl == "native":
        raise ModelLoadError(f"{model_dir} classifies texts, which the native implementation does not; choose auto or transformers")
    if classifies:
        reason = "it classifies texts"
    elif model_impl != "transformers":
        try:
            spec = load_spec(model_dir, max_model_len)
            if spec.draft_head is not None:
                raise ModelLoadError(
                    f"{model_dir} is no model, but a draft head of one: give it as speculative_model, with speculative 'eagle'"
                )
            return spec
        except NotNativeError as error:
            if model_impl == "native" or is_gguf(model_dir):
                raise
            reason = str(error)
    elif is_gguf(model_dir):
        raise ModelLoadError("model_impl transformers does not run GGUF files; choose auto or native")
    with imports_of(f"a model in the code of transformers ({reason})"):
        from aengine.models.fallback.fallback_config import read_fallback

    try:
        fallback = read_fallback(model_dir)
    except ModelLoadError as error:
        if model_impl == "transformers":
            raise
        raise ModelLoadError(f"{reason}; transformers cannot run it either: {error}") from error
    _log.warning("the model runs in the code of transformers, without our CPU stack and fused operations, which is slower (%s)", reason)
    return fallback


def implementation_of(spec: AnySpec) -> str:
    """Return `ModelInfo.implementation`: "native", or "transformers" for a `FallbackSpec`."""
    return "native" if isinstance(spec, ModelSpec) else "transformers"


def is_encoder(spec: AnySpec) -> bool:
    """Whether every token sees all tokens of its prompt, and there is no next one."""
    return isinstance(spec, FallbackSpec) and spec.encodes


def labels_of(spec: AnySpec) -> tuple[str, ...]:
    """What a model gives scores of; empty for one that does not classify."""
    return spec.labels if isinstance(spec, FallbackSpec) else ()


def quantization_of(config: EngineConfig, model_dir: pathlib.Path) -> str:
    """Return `ModelInfo.quantization`, from the checkpoint's config.json and the engine's configuration. Raises ModelLoadError."""
    quantization = None if config.load_format == "dummy" else load_quantization(model_dir)
    methods = ["" if quantization is None else quantization.method, config.quantization.replace("none", "")]
    return ", ".join(filter(None, methods))


def parameter_counts(spec: AnySpec) -> tuple[int, int]:
    """All parameters, and those that one token uses."""
    if isinstance(spec, FallbackSpec):
        return spec.num_parameters, spec.num_active_parameters
    return num_parameters(spec), num_active_parameters(spec)


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


def default_pooling(model_dir: pathlib.Path, *, encodes: bool = False) -> str:
    """last, which it is for a checkpoint that says nothing, or cls where that is an encoder's, or mean; or a word for something else, such
    as max_tokens, or Dense for a module of that name."""
    try:
        modules = json.loads((model_dir / "modules.json").read_text(encoding="utf-8"))
    except OSError:
        return "cls" if encodes else "last"
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
                pooling = " and ".join(_KNOWN_POOLINGS.get(mode, mode) for mode in modes) or "unknown"
            elif kind not in _WITHOUT_EFFECT:
                return str(kind)
    except (ModelLoadError, KeyError, TypeError, AttributeError):
        return "unknown"
    return pooling
