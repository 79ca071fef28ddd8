"""The choice between our own implementation of a model and that of transformers."""

from __future__ import annotations

import logging
import pathlib

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.models.config.json_file import read_json
from aengine.models.config.model_config import load_spec
from aengine.models.config.reader import NotNativeError
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.named_weights import num_active_parameters, num_parameters
from aengine.models.other_formats import refuse_config
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.spec import FallbackSpec, ModelSpec

_log = logging.getLogger("aengine")
AnySpec = ModelSpec | FallbackSpec


def find_spec(model_dir: pathlib.Path, model_impl: str, max_model_len: int | None = None) -> AnySpec:
    """The description of a model, by `EngineConfig.model_impl`, with a log line if transformers runs it; `max_model_len` as in `read_spec`.

    Raises ModelLoadError saying why neither can, or why the one that is asked for cannot.
    """
    reason = "asked for"
    if not is_gguf(model_dir):
        refuse_config(read_json(model_dir / "config.json"))
    if model_impl != "transformers":
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
