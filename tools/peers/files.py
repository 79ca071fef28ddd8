"""GGUF files that every engine reads: shapes of Qwen3 with random weights, and the bundled model, in types of GGUF."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gguf
import ml_dtypes  # noqa: F401  # bfloat16 in NumPy
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file

from aengine.models.loading.hub import DEMO, resolve_model

Numbers = NDArray[np.float32]
Weights = Callable[[str, tuple[int, int]], Numbers | None]
"""The numbers of a matrix by its name in GGUF; None: any."""


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names and [out_features, in_features], but for the embedding."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            for name, rows, columns in (
                ("attn_q", query, self.hidden),
                ("attn_k", key, self.hidden),
                ("attn_v", key, self.hidden),
                ("attn_output", self.hidden, query),
                ("ffn_gate", self.intermediate, self.hidden),
                ("ffn_up", self.intermediate, self.hidden),
                ("ffn_down", self.hidden, self.intermediate),
            ):
                yield f"blk.{layer}.{name}.weight", (rows, columns)

    def norms(self) -> Iterator[tuple[str, int]]:
        for layer in range(self.layers):
            for name, size in (
                ("attn_norm", self.hidden),
                ("ffn_norm", self.hidden),
                ("attn_q_norm", self.head_dim),
                ("attn_k_norm", self.head_dim),
            ):
                yield f"blk.{layer}.{name}.weight", size
        yield "output_norm.weight", self.hidden


SHAPES = {
    "60m": Shape(12, 512, 1536, 8, 4, 64, 32_000),
    "0.6b": Shape(28, 1024, 3072, 16, 8, 128, 32_000),
    "1.7b": Shape(28, 2048, 6144, 16, 8, 128, 32_000),
}
TYPES = ("BF16", "Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q2_K", "TQ2_0")
_HALVES = {"Q2_K": (80, 82), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block of random bytes has float16 numbers
_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def write_random(name: str, kind: str, path: pathlib.Path) -> None:
    """The shape of this name, its matrices in a type but for the embedding, which is the head: that is BF16 beside BF16, else Q8_0."""
    random = np.random.default_rng(0)

    def numbers(_: str, shape: tuple[int, int]) -> Numbers | None:
        return None if kind in _HALVES else random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)

    _write(SHAPES[name], kind, path, numbers, lambda _, size: np.ones(size, np.float32), random)


def write_demo(kind: str, path: pathlib.Path) -> None:
    """The bundled model. Raises NotImplementedError for a type that the gguf package cannot make."""
    folder = resolve_model(DEMO)
    config = json.loads((folder / "config.json").read_text())
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
    )
    stored = {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}

    def read(name: str, _: object) -> Numbers:
        if name in ("token_embd.weight", "output_norm.weight"):
            source = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
        else:
            _, layer, part, _ = name.split(".")
            source = f"model.layers.{layer}.{_NAMES[part]}.weight"
        return stored[source].astype(np.float32)

    _write(Shape(*(config[each] for each in names)), kind, path, read, read, np.random.default_rng(0), config["rope_theta"])


def _write(
    shape: Shape,
    kind: str,
    path: pathlib.Path,
    matrix: Weights,
    norm: Callable[[str, int], Numbers],
    random: np.random.Generator,
    rope_theta: float = 1e6,
) -> None:
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(rope_theta)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    of_head = gguf.GGMLQuantizationType.BF16 if kind == "BF16" else gguf.GGMLQuantizationType.Q8_0
    embedding = matrix("token_embd.weight", (shape.vocab_size, shape.hidden))
    if embedding is None:
        embedding = random.standard_normal((shape.vocab_size, shape.hidden), dtype=np.float32) * np.float32(0.02)
    writer.add_tensor("token_embd.weight", quantize(embedding, of_head), raw_dtype=of_head)
    for name, size in shape.matrices():
        found, of_blocks = matrix(name, size), gguf.GGMLQuantizationType[kind]
        if size[1] % GGML_QUANT_SIZES[of_blocks][0]:  # as llama.cpp does with rows that are no multiple of a block
            of_blocks = gguf.GGMLQuantizationType.Q8_0
        data = _random_blocks(kind, size, random) if found is None else quantize(found, of_blocks)
        writer.add_tensor(name, data, raw_dtype=of_blocks)
    for name, width in shape.norms():
        writer.add_tensor(name, norm(name, width))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_blocks(kind: str, shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.uint8]:
    elements, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scale = (random.random(blocks.shape[:2]) * 1e-3).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)
