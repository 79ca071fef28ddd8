"""Writes GGUF files as the specification says, and the metadata and tensors that llama.cpp's converter would write for a model."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aengine.models.gguf.gguf_file import BLOCKS, TYPES

NUMBERS = {name: number for number, (name, _, _) in TYPES.items()}
Stored = tuple[str, tuple[int, ...], bytes]
"""Type, shape and bytes of a tensor."""


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> tuple[int, bytes]:
    """The kind of a value, and its bytes."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return 8, _string(value)
    if isinstance(value, np.ndarray):
        return 9, struct.pack("<IQ", {"<i4": 5, "<f4": 6}[value.dtype.str], len(value)) + value.tobytes()
    kinds, parts = zip(*map(_value, value), strict=True)
    return 9, struct.pack("<IQ", kinds[0], len(parts)) + b"".join(parts)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, Stored], alignment: int = 32) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        head += _string(key) + struct.pack("<I", kind) + data
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1]) + struct.pack("<IQ", NUMBERS[kind], len(body))
        body += data + bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + body


def stored(tensor: Tensor, kind: str = "F32", quantize: Callable[[np.ndarray, str], bytes] | None = None) -> Stored:
    """In F32, F16 or BF16, or in the type that `quantize` makes."""
    shape = tuple(tensor.shape)
    if quantize is not None and len(shape) > 1 and shape[-1] % BLOCKS[kind][0] == 0:
        return kind, shape, quantize(tensor.float().numpy(), kind)
    if len(shape) == 1 or kind not in ("F16", "BF16"):
        return "F32", shape, tensor.float().numpy().tobytes()
    data = tensor.to({"F16": torch.float16, "BF16": torch.bfloat16}[kind]).contiguous()
    return kind, shape, data.view(torch.uint8).numpy().tobytes()


def quantize(values: np.ndarray, kind: str) -> bytes:
    """The nearest codes of Q8_0, Q4_0 and Q4_K; for Q4_K, the 6-bit scales and minima of all groups are their largest."""
    blocks = values.reshape(-1, BLOCKS[kind][0]).astype(np.float32)
    if kind in ("Q8_0", "Q4_0"):
        largest = np.abs(blocks).max(axis=1, keepdims=True)
        scales = (largest / (127 if kind == "Q8_0" else 7)).astype(np.float16)
        codes = np.rint(blocks / np.where(scales == 0, 1, scales).astype(np.float32))
        if kind == "Q8_0":
            return np.concatenate((scales.view(np.uint8), codes.astype(np.int8).view(np.uint8)), axis=1).tobytes()
        codes = (np.clip(codes, -8, 7) + 8).astype(np.uint8)
        return np.concatenate((scales.view(np.uint8), codes[:, :16] | codes[:, 16:] << 4), axis=1).tobytes()
    assert kind == "Q4_K"
    low = np.maximum(-blocks.min(axis=1, keepdims=True), 0)
    scales = ((blocks.max(axis=1, keepdims=True) + low) / 15 / 63).astype(np.float16)
    minima = (low / 63).astype(np.float16)
    unit = np.where(scales == 0, 1, scales).astype(np.float32) * 63
    codes = np.clip(np.rint((blocks + minima.astype(np.float32) * 63) / unit), 0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(blocks), 128)
    full = np.full((len(blocks), 12), 255, dtype=np.uint8)
    return np.concatenate((scales.view(np.uint8), minima.view(np.uint8), full, packed), axis=1).tobytes()


def byte_level_metadata(model_dir: pathlib.Path, pre: str) -> dict[str, Any]:
    """Of the tokenizer.json of a byte-level BPE in a directory, and its chat template."""
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text())
    vocabulary = {**tokenizer["model"]["vocab"], **{token["content"]: token["id"] for token in tokenizer["added_tokens"]}}
    special = {token["content"] for token in tokenizer["added_tokens"] if token["special"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens], dtype=np.int32),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer["model"]["merges"]],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": (model_dir / "chat_template.jinja").read_text(),
    }


_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Modules of transformers -> llama.cpp's."""


def converted_name(name: str, modules: Mapping[str, str] | None = None) -> str:
    """llama.cpp's name of a parameter of transformers; `modules` are those of a model that differ."""
    module, _, ending = name.rpartition(".")
    known = {**_MODULES, **(modules or {})}
    if not module.startswith(("model.layers.", "transformer.h.", "gpt_neox.layers.", "backbone.layers.")):
        return f"{known[module]}.{ending}"
    _, _, number, rest = f"{module}.".split(".", 3)
    whole = f"{rest}{ending}"  # of some that is the name of a module
    return f"blk.{number}.{known[whole] if whole in known else f'{known[rest[:-1]]}.{ending}'}"


def permuted(rows: Tensor, heads: int) -> Tensor:
    """The rows of q or k of a llama model, whose halves alternate in files of GGUF."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def config_metadata(architecture: str, config: Mapping[str, Any], keys: Sequence[tuple[str, str]] = ()) -> dict[str, Any]:
    """Of the keys that most models have, and of `keys`: llama.cpp's name, key of the config."""
    common = (
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("block_count", "num_hidden_layers"),
        ("feed_forward_length", "intermediate_size"),
        ("attention.head_count", "num_attention_heads"),
        ("attention.head_count_kv", "num_key_value_heads"),
        ("attention.key_length", "head_dim"),
        ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
        ("rope.freq_base", "rope_theta"),
    )
    found = {f"{architecture}.{theirs}": config[ours] for theirs, ours in (*common, *keys) if config.get(ours) is not None}
    return {"general.architecture": architecture, **found}
