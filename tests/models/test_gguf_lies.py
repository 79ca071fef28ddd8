"""GGUF files with random lies: each is refused in one sentence, or loads; no other errors, and no memory for a count that lies."""

from __future__ import annotations

import pathlib
import random
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import Stored, gguf_bytes, quantize, stored
from slow_cases import slow_but

from aengine.api.errors import ModelLoadError
from aengine.kernels.quantized import QuantizedRows
from aengine.models.config.model_config import load_spec
from aengine.models.loading.weights import stored_weights
from aengine.models.quantization.quantization_config import load_quantization
from aengine.tokenizer.tokenizer import Tokenizer

_COMMON = {
    **{"context_length": 64, "embedding_length": 32, "block_count": 2, "feed_forward_length": 32, "attention.head_count": 2},
    **{"attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1e4, "rope.dimension_count": 16},
    **{"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16},
}
_MOE = {
    **{"expert_count": 2, "expert_used_count": 1, "expert_feed_forward_length": 32, "expert_shared_count": 1, "expert_gating_func": 2},
    **{"expert_weights_scale": 1.5, "expert_weights_norm": True, "leading_dense_block_count": 1, "nextn_predict_layers": 0},
    **{"expert_group_count": 1, "expert_group_used_count": 1, "attention.q_lora_rank": 32, "attention.kv_lora_rank": 32},
    **{
        "attention.key_length_mla": 48,
        "attention.value_length_mla": 32,
        "attention.head_count_kv": 1,
        "rope.scaling.yarn_log_multiplier": 0.1,
    },
}
_WORDS = ["a", "b", "ab", "c", "abc", "<end>"]
_BYTE_LEVEL = {
    **{
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": _WORDS,
        "tokenizer.ggml.merges": ["a b", "ab c"],
    },
    **{"tokenizer.ggml.token_type": np.array([1, 1, 1, 1, 1, 3], dtype=np.int32), "tokenizer.ggml.eos_token_id": 5},
    **{"tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages[0]['content'] }}", "tokenizer.ggml.bos_token_id": 5},
}
_PIECES = ["<unk>", "<s>", "<0x41>", "a", "b", "ab", "\u2581"]
_SENTENCE_PIECE = {
    **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": _PIECES, "tokenizer.ggml.add_space_prefix": True},
    **{"tokenizer.ggml.token_type": np.array([2, 3, 6, 1, 1, 1, 1], dtype=np.int32), "tokenizer.ggml.unknown_token_id": 0},
    **{"tokenizer.ggml.scores": np.array([0, 0, 0, -1, -2, -3, -4], dtype=np.float32), "tokenizer.ggml.bos_token_id": 1},
}


QUICK = [(name, range(100)) for name in ("llama", "deepseek2")]


def _matrices(kind: str, *names: str, shape: tuple[int, ...] = (32, 32)) -> dict[str, Stored]:
    return {name: stored(torch.rand(shape), kind, None if kind == "F32" else quantize) for name in names}


def _vectors(*names: str, size: int = 32) -> dict[str, Stored]:
    return {name: stored(torch.ones(size)) for name in names}


def _llama() -> tuple[dict[str, Any], dict[str, Stored]]:
    layers = {}
    for layer in range(2):
        names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        layers |= _matrices("Q8_0" if layer else "Q4_0", *(f"blk.{layer}.{name}.weight" for name in names))
        layers |= _vectors(f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight")
    tensors = {
        **_matrices("Q8_0", "token_embd.weight"),
        **_vectors("output_norm.weight"),
        **_vectors("rope_freqs.weight", size=8),
        **layers,
    }
    return {"general.architecture": "llama", **{f"llama.{key}": value for key, value in _COMMON.items()}, **_BYTE_LEVEL}, tensors


def _deepseek() -> tuple[dict[str, Any], dict[str, Stored]]:
    tensors = {**_matrices("Q8_0", "token_embd.weight"), **_vectors("output_norm.weight")}
    for layer in range(2):
        at = f"blk.{layer}."
        tensors |= _vectors(*(f"{at}{name}_norm.weight" for name in ("attn", "ffn", "attn_q_a", "attn_kv_a")))
        tensors |= _matrices("Q8_0", f"{at}attn_q_a.weight") | _matrices("Q8_0", f"{at}attn_q_b.weight", shape=(96, 32))
        tensors |= _matrices("Q8_0", f"{at}attn_kv_a_mqa.weight", shape=(48, 32)) | _matrices(
            "Q8_0", f"{at}attn_output.weight", shape=(32, 64)
        )
        tensors |= _matrices("Q8_0", f"{at}attn_k_b.weight", f"{at}attn_v_b.weight", shape=(2, 32, 32))
        if layer:
            tensors |= _matrices("Q8_0", *(f"{at}ffn_{name}_exps.weight" for name in ("gate", "up", "down")), shape=(2, 32, 32))
            tensors |= _matrices("F32", f"{at}ffn_gate_inp.weight", shape=(2, 32)) | _vectors(f"{at}exp_probs_b.bias", size=2)
            tensors |= _matrices("Q8_0", *(f"{at}ffn_{name}_shexp.weight" for name in ("gate", "up", "down")))
        else:
            tensors |= _matrices("Q8_0", *(f"{at}ffn_{name}.weight" for name in ("gate", "up", "down")))
    keys = {f"deepseek2.{key}": value for key, value in {**_COMMON, **_MOE}.items()}
    return {"general.architecture": "deepseek2", **keys, **_SENTENCE_PIECE}, tensors


MODELS = {"llama": _llama(), "deepseek2": _deepseek()}
ODD = (
    *(0, 1, 3, 7, 33, 255, 2**31 - 1, 2**32 - 1, True, False, 0.0, -1.0, 1e-30, 3e38, float("nan"), float("inf"), "", "x", "yarn", "\n"),
    *([""], ["a", "b"], ["a b"], [1], [True, False], [0.5, float("nan")], ["x" * 600], np.array([-1], dtype=np.int32)),
    *(np.zeros(0, dtype=np.int32), np.array([1, 1, 3, 1, 1, 1], dtype=np.int32), np.array([float("nan")] * 7, dtype=np.float32)),
)
"""Values that no key or few keys have."""


def lying(rng: random.Random, name: str) -> bytes:
    metadata, tensors = MODELS[name]
    metadata, tensors = dict(metadata), dict(tensors)
    kind = rng.randrange(5)
    if kind in (0, 1):
        for key in rng.sample(sorted(metadata), rng.choice((1, 1, 2, 4))):
            if rng.random() < 0.2:
                del metadata[key]
            else:
                metadata[key] = rng.choice(ODD)
    elif kind == 2:
        for key in rng.sample(sorted(tensors), rng.choice((1, 1, 2))):
            stored_kind, shape, data = tensors.pop(key)
            rows = rng.choice(
                (shape[::-1], (*shape, 1), shape[1:] or (1,), (*shape[:-1], 2 * shape[-1]), (2**40, 32), (2**63, 2), (1,) * 4, shape)
            )
            other = rng.choice(
                (key, key.replace("0", "1"), key.replace("weight", "bias"), "blk.999999999.attn_q.weight", "x" * 300, "\n", key)
            )
            tensors[other] = rng.choice((stored_kind, "F32", "F16", "Q4_K", "F64", "MXFP4")), rows, data[: rng.choice((len(data), 64))]
    data = bytearray(gguf_bytes(metadata, tensors))
    start = max(0, data.find(b"output_norm.weight")) if rng.random() < 0.5 else 0
    if kind == 3:
        del data[rng.randrange(len(data)) :]
    elif kind == 4:
        header = len(data) - sum(len(each[2]) for each in tensors.values())
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(start, header)
            data[at] = rng.choice((0, 1, 2, 127, 128, 255, data[at] ^ 1 << rng.randrange(8)))
        if rng.random() < 0.3:
            at = rng.randrange(start, header)
            data[at : at + 8] = struct.pack("<Q", rng.choice((1 << 62, (1 << 64) - 1, 1 << 32, 1 << 20, 0)))
    return bytes(data)


def read_all(path: pathlib.Path) -> None:
    tokenizer = Tokenizer.find(path)
    if tokenizer is not None:
        tokenizer.decode(tokenizer.encode("abc A b"))
    spec = load_spec(path)
    for _, parts in stored_weights(spec, path, quantization=load_quantization(path)):
        for part in parts:
            assert (part.dequantized() if isinstance(part, QuantizedRows) else part).ndim > 0


def refusal(path: pathlib.Path, name: str, seed: int) -> str | None:
    """The sentence; None if the file was loaded."""
    path.write_bytes(lying(random.Random(seed), name))
    try:
        read_all(path)
    except ModelLoadError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_files_load(tmp_path: pathlib.Path, name: str) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(*MODELS[name]))
    read_all(tmp_path / "model.gguf")


@pytest.mark.parametrize(("name", "seeds"), slow_but(QUICK, [*QUICK, *((name, range(100, 2000)) for name in MODELS)]))
def test_lies_are_refused_in_one_sentence_or_do_no_harm(tmp_path: pathlib.Path, name: str, seeds: range) -> None:
    found = {seed: refusal(tmp_path / "model.gguf", name, seed) for seed in seeds}
    assert {seed: sentence for seed, sentence in found.items() if sentence is not None and len(sentence.splitlines()) != 1} == {}
    assert 0.3 < sum(sentence is not None for sentence in found.values()) / len(seeds) < 1


def test_lies_take_no_memory(tmp_path: pathlib.Path) -> None:
    tracemalloc.start()
    try:
        for seed in range(5000, 5040):
            refusal(tmp_path / "model.gguf", "llama", seed)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
