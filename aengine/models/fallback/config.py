"""Makes a `FallbackSpec` of a model that transformers knows; and says which of them are refused.

The model is built without memory for its weights (on the "meta" device), and a forward pass over a few tokens shows how each of its layers
calls attention.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from aengine.errors import ModelLoadError
from aengine.models.fallback.attention import PROBE, recording, register
from aengine.models.fallback.spec import FallbackSpec, LayerCall
from aengine.models.json_file import read_json

_PROBE_TOKENS = 3
_NO_INTERFACE = "never calls the attention function of transformers (AttentionInterface), so it cannot run on our KV pages"
_OWN_PARTS = ("attn_config", "ffn_config")  # of a config of one decoder (MPT, DBRX)
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})


def read_fallback(model_dir: pathlib.Path) -> FallbackSpec:
    """Raises ModelLoadError for a model that transformers does not know, or that it does not run here."""
    try:
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types
        if "auto_map" in read_json(model_dir / "config.json"):
            raise ModelLoadError("the model needs code of its own (auto_map in config.json), which is never run") from error
        raise ModelLoadError(f"transformers does not know the model: {_first_line(error)}") from error
    return probe(config)


def probe(config: Any) -> FallbackSpec:
    """As `read_fallback`."""
    _check_config(config)
    dtype = config.dtype  # before it is that of the model that is built
    register()
    try:
        with torch.device("meta"):
            model = build(config, PROBE, torch.bfloat16)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (PROBE,):
            raise ModelLoadError(f"{config.model_type} {_NO_INTERFACE}") from None
        raise ModelLoadError(f"transformers cannot build a {config.model_type}: {_first_line(error)}") from error
    calls = _probe_calls(model.eval(), config)
    head = model.get_output_embeddings()
    if head is None or len(head.weight) != config.vocab_size:
        count = 0 if head is None else len(head.weight)
        raise ModelLoadError(f"{config.model_type} has {count} logits for a vocabulary of {config.vocab_size} tokens")
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    total = sum(parameters.values())
    experts = sum(size for name, size in parameters.items() if ".experts." in name)
    eos = config.eos_token_id
    return FallbackSpec(
        config=config,
        family=config.model_type,
        architecture=type(model).__name__,
        vocab_size=config.vocab_size,
        hidden_size=head.weight.shape[1],
        max_position_embeddings=_context(config),
        num_parameters=total,
        num_active_parameters=total - experts + round(experts * _active_experts(config)),
        attention=tuple(calls.values()),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    )


def build(config: Any, attention: str, dtype: torch.dtype) -> Any:
    """The model with the attention function of this name, on torch's default device, with random weights."""
    from_config: Any = AutoModelForCausalLM.from_config
    return from_config(config, attn_implementation=attention, dtype=dtype)


def base_model(model: Any) -> nn.Module:
    """The model without its head. Raises ModelLoadError."""
    base: nn.Module = model.base_model
    if base is model:
        raise ModelLoadError(f"{type(model).__name__} has no base model apart from its head, which the transformers implementation needs")
    return base


def _check_config(config: Any) -> None:
    name = config.model_type
    if config.is_encoder_decoder:
        raise ModelLoadError(f"{name} is an encoder-decoder; supported are decoder-only models")
    parts = [part for part in config.sub_configs if part not in _OWN_PARTS and getattr(config, part, None) is not None]
    if parts:
        raise ModelLoadError(f"{name} has {', '.join(parts)}: models with other inputs than text are not supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(f"{name} is not a model that generates text (transformers has no ...ForCausalLM of it)")
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else type(quantization).__name__
        raise ModelLoadError(f"quantization_config is not supported (quant_method {method!r}) by the transformers implementation")
    if getattr(config, "add_cross_attention", False):
        raise ModelLoadError(f"{name} with add_cross_attention attends to an encoder; supported are decoder-only models")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
    if others:
        raise ModelLoadError(f"{name} has layers of the type {others[0]!r}; supported are full_attention and sliding_attention")


def _probe_calls(model: Any, config: Any) -> dict[str, LayerCall]:
    name = config.model_type
    if getattr(model, "_is_stateful", False):
        raise ModelLoadError(f"{name} has layers with a recurrent state, which are not supported")
    embeddings = [path for path, _ in model.named_modules() if path.endswith("token_type_embeddings")]
    if embeddings:
        raise ModelLoadError(f"{name} has {embeddings[0]}: token_type_ids are not supported")
    base = base_model(model)
    ids = torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64, device="meta")
    # With a mask of padding transformers does not look into position_ids for several sequences, which it cannot without their values.
    inputs = {"input_ids": ids, "position_ids": ids, "attention_mask": torch.ones_like(ids)}
    for module in model.modules():  # a rope that chooses its frequencies by the positions needs their values, too
        rope = getattr(module, "rope_type", None)
        if rope is not None:
            module.rope_type = dict.fromkeys(rope, "default") if isinstance(rope, dict) else "default"
    with recording(model) as calls, torch.inference_mode():
        try:
            base(**inputs, use_cache=False)
        except ModelLoadError:
            raise
        except Exception as error:
            raise ModelLoadError(f"{name} cannot be probed with tokens and position_ids alone: {_first_line(error)}") from error
    _check_layers(base, calls, model, config)
    return calls


def _check_layers(base: nn.Module, calls: dict[str, LayerCall], model: nn.Module, config: Any) -> None:
    """Every layer must have called our function."""
    count = config.num_hidden_layers
    for path, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and len(layers) == count and any(name.startswith(f"{path}.") for name in calls):
            for index, layer in enumerate(layers):
                if not any(name.startswith(f"{path}.{index}.") for name in calls):
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


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
