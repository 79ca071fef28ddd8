"""GGUF files that every engine reads: shapes of Qwen3 with random weights, and the bundled model, in types of GGUF."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import gguf
import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

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
TYPES = ("BF16", "F16", "Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q2_K", "TQ2_0")
_FILE_TYPES = {"BF16": 32, "F16": 1, "Q8_0": 7, "Q6_K": 18, "Q4_K": 15, "Q4_0": 2, "Q2_K": 10, "TQ2_0": 37}  # in LlamaFileType
_HALVES = {"Q2_K": (80, 82), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block of random bytes has float16 numbers
_TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
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


class Models:
    """The files of shapes, and of the bundled model, in a folder. Each is made when it is first asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder

    def file(self, name: str, kind: str) -> pathlib.Path:
        """A file of GGUF. Raises NotImplementedError for a type in which the bundled model cannot be written."""
        path = self._folder / f"{name}-{kind}.gguf"
        if not path.exists():
            partial = path.with_suffix(".begun")
            if name == DEMO:
                write_demo(kind, partial)
            else:
                write_random(name, kind, partial)
            partial.rename(path)
        return path

    def checkpoint(self, name: str) -> pathlib.Path:
        """A directory as Transformers writes it."""
        if name == DEMO:
            return resolve_model(DEMO)
        folder = self._folder / name
        if not folder.exists():
            write_checkpoint(name, folder)
        return folder


def write_random(name: str, kind: str, path: pathlib.Path) -> None:
    """The shape of this name, its matrices in a type; the embedding, which is the head, is of 16 bits beside such, else Q8_0."""
    random = np.random.default_rng(0)

    def numbers(_: str, shape: tuple[int, int]) -> Numbers | None:
        return None if kind in _HALVES else _numbers(random, shape)

    _write(SHAPES[name], kind, path, numbers, lambda _, size: np.ones(size, np.float32), random)


def _numbers(random: np.random.Generator, shape: tuple[int, int]) -> Numbers:
    return random.standard_normal(shape, dtype=np.float32) * np.float32(shape[1] ** -0.5)


def write_checkpoint(name: str, folder: pathlib.Path) -> None:
    """The shape of this name as Transformers stores it, in bfloat16, with the numbers that `write_random` gives it; and a tokenizer, which
    some engines ask for."""
    shape, random = SHAPES[name], np.random.default_rng(0)
    tensors = {}
    for matrix, size in (("token_embd.weight", (shape.vocab_size, shape.hidden)), *shape.matrices()):
        tensors[_stored_name(matrix)] = _numbers(random, size)
    for norm, width in shape.norms():
        tensors[_stored_name(norm)] = np.ones(width, np.float32)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
    }
    partial = folder.with_name(f"{folder.name}-begun")
    partial.mkdir(exist_ok=True)
    (partial / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model(DEMO) / file, partial)
    save_file({key: value.astype(ml_dtypes.bfloat16) for key, value in tensors.items()}, partial / "model.safetensors")
    partial.rename(folder)


def _stored_name(name: str) -> str:
    """In Transformers, of a tensor of GGUF."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


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
        return stored[_stored_name(name)].astype(np.float32)

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
    writer.add_file_type(_FILE_TYPES[kind])
    _add_tokenizer(writer, shape.vocab_size)
    of_head = gguf.GGMLQuantizationType[kind if kind in ("BF16", "F16") else "Q8_0"]
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


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """One of bytes, and of words that no text has: prompts are ids, but not every engine loads a model without a tokenizer."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that are written as themselves, in the alphabet of GPT-2
    others = [256 + number for number in range(256 - len(printed))]
    words = [*map(chr, (*printed, *others)), "ab", "<|im_end|>"]
    words += [f"word{number}" for number in range(vocab_size - len(words))]
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([control if word == "<|im_end|>" else normal for word in words])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(words.index("<|im_end|>"))
    writer.add_bos_token_id(words.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")


def _random_blocks(kind: str, shape: tuple[int, int], random: np.random.Generator) -> NDArray[np.uint8]:
    elements, size = GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = random.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scale = (random.random(blocks.shape[:2]) * 1e-3).astype(np.float16)
        blocks[:, :, at : at + 2] = scale.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return blocks.reshape(shape[0], -1)
