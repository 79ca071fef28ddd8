"""What a checkpoint's files say of how it is run: by our own implementation or that of transformers; without an output head, as many for
embeddings are; and how embeddings are made, as sentence-transformers writes it (`modules.json`, and the config of its module Pooling).

And the draft heads of a model: the EAGLE-3 head of a directory of its own, or the first MTP layer of the model's checkpoint; what makes a
head fit its target. Knows nothing of how either is executed.
"""

from __future__ import annotations

import json
import logging
import pathlib
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from aengine.api.config import EngineConfig
from aengine.api.errors import ConfigError, ModelLoadError
from aengine.api.runtime import imports_of
from aengine.models.config.model_config import load_spec
from aengine.models.config.reader import NotNativeError
from aengine.models.fallback import FallbackSpec
from aengine.models.families import FAMILIES
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.loading.weights import open_weights
from aengine.models.model_files import CLASSIFIER, architecture_of, read_json, refuse_config
from aengine.models.named_weights import named_weights, num_active_parameters, num_parameters
from aengine.models.quantization.quantization_config import load_quantization
from aengine.models.spec import DraftHead, HeadKind, ModelSpec
from aengine.models.text_part import read_text_config

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


def eagle_spec(head_dir: pathlib.Path, target: ModelSpec, load_format: str = "auto") -> ModelSpec:
    """That of an EAGLE-3 head for the `target`. It has an embedding and an output head of its own if its checkpoint has them.

    Without `eagle_aux_hidden_state_layer_ids` it taps the layers 2, n / 2 and n - 3 of the n of its target, as in the published code.
    Raises ModelLoadError, and ConfigError for what is no such head, or one of another model.
    """
    spec = load_spec(head_dir)
    head, num_layers = spec.draft_head, target.num_layers
    if head is None:
        raise _refused(head_dir, f"it is a whole model ({spec.architecture}), which speculative 'draft' takes")
    taps = head.taps or (2, num_layers // 2, num_layers - 3)
    dummy = load_format == "dummy"
    stored = set() if dummy else open_weights(spec, head_dir, load_format).tensors.keys()
    names = FAMILIES[spec.family].names
    head = replace(
        head,
        taps=taps,
        target_layers=num_layers,
        own_embedding=f"{names['embedding']}.weight" in stored,
        own_head=dummy or f"{names['head']}.weight" in stored,
    )
    if head.target_size != target.hidden_size:
        raise _refused(head_dir, f"it reads hidden states of {head.target_size} numbers, and the model's have {target.hidden_size}")
    if spec.vocab_size != target.vocab_size:
        raise _refused(head_dir, f"it is for {spec.vocab_size} tokens, and the model has {target.vocab_size}")
    if not all(0 <= tap <= num_layers for tap in taps):
        raise _refused(head_dir, f"it reads hidden states between layers {list(taps)}, and the model has {num_layers} layers")
    if spec.hidden_size != target.hidden_size and not (head.own_embedding and head.own_head):
        raise _refused(head_dir, f"its hidden_size {spec.hidden_size} is not the model's, so it needs embed_tokens and lm_head of its own")
    return replace(spec, draft_head=head, max_position_embeddings=target.max_position_embeddings)


def mtp_spec(model_dir: pathlib.Path, target: ModelSpec, load_format: str = "auto") -> ModelSpec | None:
    """That of the first MTP layer of the checkpoint of `target`, of the kind of the model's last layer; None if it carries none.

    Embedding and output head are the model's: those that some checkpoints have beside the layer are copies. Raises ModelLoadError.
    """
    config = read_text_config(model_dir)
    named = any(config.get(key) for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers"))
    if not FAMILIES[target.family].mtp_names or not named or target.layers[-1].attention is None:
        return None
    assert target.norm is not None, "all of these families have one"
    head = DraftHead(HeadKind.MTP, target.norm, target_size=target.hidden_size, target_layers=target.num_layers)
    spec = replace(target, layers=target.layers[-1:], tied_head=False, draft_head=head)
    combine = named_weights(spec)["combine.weight"].parts[0].source
    if load_format != "dummy" and combine not in open_weights(target, model_dir, load_format).tensors:
        return None  # copies of checkpoints are often saved without it
    return spec


def draft_token_ids(spec: ModelSpec, head_dir: pathlib.Path, load_format: str = "auto") -> NDArray[np.int64] | None:
    """[num_draft_ids], the token that each row of the output head stands for; None if these are all tokens. The checkpoint has them as
    `d2t`: differences from the row's number. Raises ModelLoadError."""
    head = spec.draft_head
    if head is None or not head.own_head or head.num_draft_ids is None:
        return None
    rows = np.arange(head.num_draft_ids)
    stored = None if load_format == "dummy" else open_weights(spec, head_dir, load_format).tensors.get("d2t")
    if stored is None:
        if load_format != "dummy" and head.num_draft_ids != spec.vocab_size:
            raise ModelLoadError(f"{head_dir} lacks d2t, the tokens of its {head.num_draft_ids} logits")
        return None if head.num_draft_ids == spec.vocab_size else rows
    if stored.shape != rows.shape or stored.dtype not in ("int64", "int32"):
        raise ModelLoadError(f"d2t of {head_dir} is {stored.dtype} {list(stored.shape)}, not int64 [{head.num_draft_ids}]")
    ids: NDArray[np.int64] = stored.read_numbers() + rows
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= spec.vocab_size:
        raise ModelLoadError(f"d2t of {head_dir} does not give each logit a token of its own below {spec.vocab_size}")
    return ids


def _refused(head_dir: pathlib.Path, reason: str) -> ConfigError:
    return ConfigError.of("speculative_model", f"{str(head_dir)!r} is not possible: {reason}")
