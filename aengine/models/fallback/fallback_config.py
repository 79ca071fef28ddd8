"""Which tensors of a quantised checkpoint belong to the linear modules of a model of transformers, which runs them dequantised.

Knows nothing of formats: those are the schemes of `models/quantization`.

Makes a `FallbackSpec` of a model that transformers knows; and says which of them are refused.

The model is built without memory for its weights (on the "meta" device), and a forward pass over a few tokens shows how each of its layers
calls attention. Of a model that takes images or audio as well, it also shows which of the models inside serve no text: they are left out.
"""

from __future__ import annotations

import inspect
import pathlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from aengine.api.errors import ModelLoadError, one_line
from aengine.kernels.paged_cache import Scoring
from aengine.models.config.reader import MOST_POSITIONS, read_token_ids
from aengine.models.fallback import FallbackSpec, LayerCall
from aengine.models.fallback.attention import PROBE, recording, register
from aengine.models.families.family import Transform
from aengine.models.loading.checkpoint import StoredTensor
from aengine.models.loading.hub import described_problems
from aengine.models.loading.weights import StoredPart, stored_parts
from aengine.models.model_files import CLASSIFIER, architecture_of, is_encoder, read_json
from aengine.models.named_weights import NamedWeight, Part
from aengine.models.quantization.quantization_config import Quantization, read_quantization
from aengine.models.quantization.scheme import Stored


def quantized_parts(model: Any, quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> tuple[StoredPart, ...]:
    """The weights of linear modules that the checkpoint has quantised. `model` may be without memory.

    Raises ModelLoadError naming tensors that are missing, or of another shape or dtype than the format has.
    """
    prefix = f"{model.base_model_prefix}."
    has_prefix = any(name.startswith(prefix) for name in tensors)
    stored = {parent for name in tensors for parent in accumulate(name.split("."), "{}.{}".format)}
    weights = {}
    for name, module in model.named_modules():
        own = name if has_prefix else name.removeprefix(prefix)
        if isinstance(module, nn.Linear | Conv1D) and own in stored:
            shape: tuple[int, ...] = tuple(module.weight.shape)
            transform = Transform(shape, np.transpose, transposed=True) if isinstance(module, Conv1D) else None
            matrix = shape if transform is None else shape[::-1]
            weights[f"{own}.weight"] = NamedWeight(matrix, (Part(f"{own}.weight", shape, matrix[0], transform),), None)
            if module.bias is not None:
                weights[f"{own}.bias"] = NamedWeight(matrix[:1], (Part(f"{own}.bias", matrix[:1], matrix[0]),), None)
    found = tuple(part for parts in stored_parts(weights, quantization, tensors).values() for part in parts if part.scheme is not None)
    expected = {name: described for part in found for name, described in part.expected.items()}
    problems = {
        "it lacks": [name for name in expected if name not in tensors],
        "it has other shapes or dtypes than its quantization_config implies:": [
            f"{name} {list(tensors[name].shape)} {tensors[name].dtype}"
            for name, described in expected.items()
            if name in tensors and not _fits(tensors[name], described)
        ],
    }
    wrong = described_problems({title: sorted(names) for title, names in problems.items()})
    if wrong:
        raise ModelLoadError(f"the checkpoint does not match its config.json: {wrong}")
    return found


def _fits(tensor: StoredTensor, described: Stored) -> bool:
    return tensor.shape in (described.shapes or (tensor.shape,)) and tensor.dtype in (described.dtypes or (tensor.dtype,))


_PROBE_TOKENS = 3
_NO_INTERFACE = "never calls the attention function of transformers (AttentionInterface), so it cannot run on our KV pages"
_OWN_PARTS = ("attn_config", "ffn_config")  # of a config of one decoder (MPT, DBRX)
_COUNT = re.compile(r"(num|n)_\w*(layers?|blocks?|experts)|(en|de)coder_layers|depth")
_MOST_MODULES = 4096
"""Most layers, or experts, that a config may ask for: transformers makes modules for each."""
_MAPPINGS: tuple[Any, ...] = (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
_CLASSIFIES = "aengine_classifies"  # attributes of a config, which say what is made of it
_ENCODES = "aengine_encodes"
_TOKEN_WIDTH = 64  # of the KV heads of one layer: what a token of an encoder takes in the pool, which has to have some size
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


def read_fallback(model_dir: pathlib.Path) -> FallbackSpec:
    """Raises ModelLoadError for a model that transformers does not know, or that it does not run here."""
    _check_counts(read_json(model_dir / "config.json"))
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types
        if "auto_map" in read_json(model_dir / "config.json"):
            raise ModelLoadError("the model needs code of its own (auto_map in config.json), which is never run") from error
        raise ModelLoadError(f"transformers does not know the model that config.json describes: {_said(error)}") from error
    architecture = architecture_of(read_json(model_dir / "config.json"))
    if is_encoder(config.model_type, architecture, bool(getattr(config, "is_decoder", False))):
        setattr(config, _ENCODES, True)
    if architecture.endswith(CLASSIFIER):
        if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
            raise ModelLoadError(f"transformers has no {architecture}")
        setattr(config, _CLASSIFIES, True)
    try:
        return probe(config)
    except ModelLoadError:
        if getattr(config, _CLASSIFIES, False) or getattr(config, _ENCODES, False):
            raise
        part = text_config(config)
        if part is config or config.is_encoder_decoder or type(part) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise
        # The class of the whole may need libraries for images, or masks for them.
        try:
            spec = probe(part)
        except ModelLoadError:
            spec = None
        if spec is None:
            raise
        part.tie_word_embeddings = bool(part.tie_word_embeddings or getattr(config, "tie_word_embeddings", False))
        return replace(spec, is_part=True)


def _check_counts(config: Mapping[str, Any]) -> None:
    """Refuse a number of layers or experts that transformers would make modules of without end. Raises ModelLoadError."""
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(value)
        elif isinstance(value, int) and not 0 <= value <= _MOST_MODULES and _COUNT.fullmatch(key):
            raise ModelLoadError(f"{key} {value} in config.json is not an integer in 0 .. {_MOST_MODULES}")


def probe(config: Any) -> FallbackSpec:
    """Make the spec of the model that has this config of transformers. Raises ModelLoadError as `read_fallback`."""
    text = text_config(config)
    _check_config(config, text)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # transformers is given what it would make of the weights
    dtype = config.dtype or text.dtype  # before it is that of the model that is built
    register()
    try:
        with torch.device("meta"):
            model = build(config, PROBE, torch.bfloat16)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (PROBE,):
            raise ModelLoadError(f"{config.model_type} {_NO_INTERFACE}") from None
        raise ModelLoadError(f"transformers cannot build a {config.model_type} as its config.json says: {_said(error)}") from error
    encodes, classifies = getattr(config, _ENCODES, False), getattr(config, _CLASSIFIES, False)
    calls, entered = _probe_calls(model.eval(), config)
    head = model.get_input_embeddings() if encodes or classifies else model.get_output_embeddings()
    if head is None or len(head.weight) < text.vocab_size or (not encodes and not classifies and len(head.weight) != text.vocab_size):
        count = 0 if head is None else len(head.weight)
        raise ModelLoadError(f"{config.model_type} has {count} logits for a vocabulary of {text.vocab_size} tokens")
    unused = _unused(model, {*entered, *calls})
    leave_out(model, unused)
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(parameters.values())
    padding = padding_of(model) if encodes else None
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    eos = getattr(config, "eos_token_id", None) or getattr(text, "eos_token_id", None)
    return FallbackSpec(
        config=config,
        family=config.model_type,
        architecture=type(model).__name__,
        vocab_size=text.vocab_size,
        hidden_size=head.weight.shape[1],
        max_position_embeddings=_context(text) - (0 if padding is None else padding + 1),
        num_parameters=total,
        num_active_parameters=total - experts + round(experts * _active_experts(text)),
        attention=(LayerCall("", 1, 1, _TOKEN_WIDTH, _TOKEN_WIDTH, Scoring(scale=1.0)),) if encodes else tuple(calls.values()),
        encodes=encodes,
        encoder_layers=tuple(calls) if encodes else (),
        labels=tuple(str(config.id2label[index]) for index in range(config.num_labels)) if classifies else (),
        label_pooling=(getattr(config, "classifier_pooling", None) or "cls") if encodes else "last",
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        eos_token_ids=read_token_ids(eos, "eos_token_id"),
        unused=unused,
    )


def text_config(config: Any) -> Any:
    """That of the part of a model that reads and writes text; of a model for text alone, its config."""
    found = config.get_text_config(decoder=True)
    if not isinstance(found, PreTrainedConfig):
        raise ModelLoadError(f"the config.json of a {config.model_type} has a {type(found).__name__} where its text part is described")
    return found


def generation_class(config: Any) -> Any:
    """The class of transformers that generates text, or that makes of it what the config is read for; None if there is none."""
    if getattr(config, _CLASSIFIES, False):
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if getattr(config, _ENCODES, False):
        return MODEL_MAPPING.get(type(config), None)
    return next((mapping[type(config)] for mapping in _MAPPINGS if type(config) in mapping), None)


def build(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """The model with the attention function of this name, on torch's default device, with random weights."""
    return generation_class(config)._from_config(config, attn_implementation=attention, dtype=dtype)


def leave_out(model: nn.Module, names: Collection[str]) -> None:
    """Takes the modules of these names out of a model that never enters them."""
    for name in names:
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, None)


def base_model(model: Any) -> nn.Module:
    """The model without its head. Raises ModelLoadError."""
    base: nn.Module = model.base_model
    if base is model and not getattr(model.config, _ENCODES, False):
        raise ModelLoadError(f"{type(model).__name__} has no base model apart from its head, which the transformers implementation needs")
    return base


def _check_config(config: Any, text: Any) -> None:
    name = config.model_type
    if config.is_encoder_decoder or text.is_encoder_decoder:
        raise ModelLoadError(f"{name} is an encoder-decoder; supported are decoder-only models")
    if generation_class(config) is None:
        raise ModelLoadError(f"{name} is not a model that generates text (transformers has no ...ForCausalLM of it)")
    parts = [part for part in config.sub_configs if part not in _OWN_PARTS and getattr(config, part, None) is not None]
    if parts and type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        raise ModelLoadError(f"{name} has {', '.join(parts)}: it is no model that transformers runs with text alone")
    context = vars(text).get("max_position_embeddings", 1)  # where no other key, nor its class, stands for it
    if isinstance(context, int) and not 1 <= context <= MOST_POSITIONS:
        raise ModelLoadError(f"max_position_embeddings {context} in config.json is not an integer in 1 .. {MOST_POSITIONS}")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        read_quantization({"quantization_config": quantization})  # so that one that is not supported is refused
    if getattr(text, "add_cross_attention", False):
        raise ModelLoadError(f"{name} with add_cross_attention attends to an encoder; supported are decoder-only models")
    others = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if others:
        raise ModelLoadError(f"{name} has layers of the type {others[0]!r}; supported are full_attention and sliding_attention")


def _probe_calls(model: Any, config: Any) -> tuple[dict[str, LayerCall], set[str]]:
    """What each layer calls attention with, by the names of their modules; and all modules that a forward pass of text enters."""
    name = config.model_type
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(f"{name} has layers with a recurrent state, which are not supported")
    embeddings = [path for path, _ in model.named_modules() if path.endswith("token_type_embeddings")]
    if embeddings and not getattr(config, _ENCODES, False):
        raise ModelLoadError(f"{name} has {embeddings[0]}: token_type_ids are not supported")
    for module in model.modules():  # a rope that chooses its frequencies by the positions needs their values, too
        rope = getattr(module, "rope_type", None)
        if rope is not None:
            module.rope_type = dict.fromkeys(rope, "default") if isinstance(rope, dict) else "default"
    try:
        calls, entered = _forward(model)
    except ModelLoadError:
        raise
    except Exception:  # of a model that looks at numbers, as when it sorts tokens by their experts
        _fill(model)
        try:
            calls, entered = _forward(model)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(
                f"{name} as its config.json says cannot be probed with tokens and position_ids alone: {_said(error)}"
            ) from error
    _check_layers(calls, entered, model, config)
    return calls, entered


def _forward(model: Any) -> tuple[dict[str, LayerCall], set[str]]:
    base = base_model(model)
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device=next(model.parameters()).device)
    encodes = getattr(model.config, _ENCODES, False)
    # With a mask of padding transformers does not look into position_ids for several sequences, which it cannot without their values.
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones_like(ids)}
    if encodes:
        inputs = inputs_of_encoder(base, ids, ids, None)
    with recording(model, encodes=encodes) as calls, _entering(model) as entered, torch.inference_mode():
        base(**inputs, **({} if encodes else {"use_cache": False}))
    return calls, entered


def inputs_of_encoder(base: nn.Module, ids: Tensor, positions: Tensor, types: Tensor | None) -> dict[str, Tensor]:
    """What the base model of an encoder is called with: [1, T] ids, positions from 0 on, and types of tokens, as far as it takes them."""
    taken = inspect.signature(base.forward).parameters
    inputs = {"input_ids": ids, "position_ids": positions}
    if "token_type_ids" in taken:
        inputs["token_type_ids"] = torch.zeros_like(ids) if types is None else types
    return {name: tensor for name, tensor in inputs.items() if name in taken or "kwargs" in taken}


def padding_of(model: nn.Module) -> int | None:
    """The id of the padding behind whose position those of the tokens begin, as with RoBERTa's models; None: they begin at 0."""
    embeddings = next((module for name, module in model.named_modules() if name.rpartition(".")[2] == "embeddings"), None)
    is_behind = hasattr(embeddings, "create_position_ids_from_input_ids")
    padding: int | None = getattr(embeddings, "padding_idx", None) if is_behind else None
    return padding


@contextmanager
def _entering(model: nn.Module) -> Iterator[set[str]]:
    """While open, the names of the modules that a forward pass enters are written down."""
    entered: set[str] = set()
    hooks = [module.register_forward_pre_hook(lambda _, __, name=name: entered.add(name)) for name, module in model.named_modules()]
    try:
        yield entered
    finally:
        for hook in hooks:
            hook.remove()


def _fill(model: nn.Module) -> None:
    """Gives a model without memory the number 0 everywhere, in float32 on the CPU: each tensor is one number, expanded."""
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for own in tables:
            for name, tensor in own.items():
                if tensor is not None and tensor.is_meta:
                    dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
                    zeros = torch.zeros((), dtype=dtype).expand(tensor.shape)
                    own[name] = nn.Parameter(zeros, requires_grad=False) if own is module._parameters else zeros


def _unused(model: nn.Module, entered: Collection[str]) -> tuple[str, ...]:
    """The names of the models inside a model that a forward pass of text does not enter."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = (name, *(f"{name}.{below}" for below, _ in module.named_modules() if below))
        if isinstance(module, PreTrainedModel) and not any(one in entered for one in inside) and not _is_in(name, found):
            found.append(name)
    return tuple(found)


def _is_in(name: str, modules: Sequence[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _check_layers(calls: dict[str, LayerCall], entered: set[str], model: nn.Module, config: Any) -> None:
    """Every layer that is entered must have called our function."""
    text = text_config(config)
    counts = (text.num_hidden_layers, getattr(text, "num_layers", None))  # of attentions, and of layers that have two
    for path, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) in counts and any(name.startswith(f"{path}.") for name in calls):
            for index, layer in enumerate(layers):
                if f"{path}.{index}" in entered and not any(name.startswith(f"{path}.{index}.") for name in calls):
                    raise ModelLoadError(
                        f"layer {index} of {config.model_type} ({type(layer).__name__}) never calls the attention function of transformers:"
                        " it is recurrent, or has an attention of its own; neither is supported"
                    )
            return
    raise ModelLoadError(f"{config.model_type} {_NO_INTERFACE}")


def _context(config: Any) -> int:
    """The longest sequence. With a longrope it is that of the short frequencies: beyond it, transformers chooses those of all sequences of
    a batch by the longest one."""
    context = getattr(config, "max_position_embeddings", None)
    if not isinstance(context, int) or context < 1:
        raise ModelLoadError(f"config.json of {config.model_type} lacks max_position_embeddings")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(value for value in ropes.values() if isinstance(value, dict))):
        if rope.get("rope_type") == "longrope":
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context


def _active_experts(config: Any) -> float:
    """The share of the experts that one token uses."""
    used = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        number = getattr(config, key, None)
        if isinstance(number, int) and number and isinstance(used, int):
            return min(1.0, used / number)
    return 1.0


def _said(error: BaseException) -> str:
    said = one_line(error)
    return said if said == type(error).__name__ else f"{type(error).__name__}: {said}"
