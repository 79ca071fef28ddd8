"""GGUF files that are broken or lie get one sentence, and nothing outside them is read."""

from __future__ import annotations

import pathlib
import random
import shutil
import struct
from contextlib import suppress
from typing import Any

import pytest
import torch
from gguf_files import Stored, gguf_bytes, stored

from aengine.api.config import EngineConfig
from aengine.api.errors import ModelLoadError
from aengine.models.choice import find_spec
from aengine.models.config.model_config import load_spec
from aengine.models.gguf.gguf_file import open_gguf
from aengine.models.loading.hub import resolve_model
from aengine.models.loading.weights import stored_weights
from aengine.tokenizer.tokenizer import Tokenizer

LLAMA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
TENSORS: dict[str, Stored] = {
    "token_embd.weight": stored(torch.ones(8, 32)),
    "output_norm.weight": stored(torch.ones(32)),
    **{f"blk.0.{name}_norm.weight": stored(torch.ones(32)) for name in ("attn", "ffn")},
    **{f"blk.0.{name}.weight": stored(torch.ones(32, 32)) for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
    **{f"blk.0.ffn_{name}.weight": stored(torch.ones(32, 32)) for name in ("gate", "up", "down")},
}
BYTES = gguf_bytes(LLAMA, TENSORS)


def load(path: pathlib.Path) -> None:
    spec = load_spec(path)
    for _, parts in stored_weights(spec, path):
        assert parts


def refused(path: pathlib.Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: pathlib.Path) -> pathlib.Path:
    return tmp_path / "model.gguf"


def test_the_whole_file_is_loaded(path: pathlib.Path) -> None:
    path.write_bytes(BYTES)
    load(path)


@pytest.mark.quick_cases(24)
@pytest.mark.parametrize("end", [*range(0, 60), *range(60, len(BYTES) - 32, 997), len(BYTES) - 1])
def test_a_file_that_is_cut_off(path: pathlib.Path, end: int) -> None:
    message = refused(path, BYTES[:end])
    assert "\n" not in message
    assert "is not a GGUF file" in message if end < 4 else "is cut off" in message


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("seed", range(60))
def test_bytes_that_are_changed(path: pathlib.Path, seed: int) -> None:
    """Any sentence, or the model with other numbers."""
    rng = random.Random(seed)
    data = bytearray(BYTES)
    for _ in range(3):
        data[rng.randrange(4, 1100)] = rng.choice((0, 1, 127, 128, 255))
    path.write_bytes(data)
    with suppress(ModelLoadError):
        load(path)


def with_tensor(name: str, kind: str, shape: tuple[int, ...], data: bytes) -> bytes:
    return gguf_bytes(LLAMA, {**TENSORS, name: (kind, shape, data)})


def test_offsets_and_shapes(path: pathlib.Path) -> None:
    at = BYTES.index(b"blk.0.ffn_down.weight") + len("blk.0.ffn_down.weight") + 4 + 16 + 4
    for offset, message in ((1 << 40, "is cut off: blk.0.ffn_down.weight ends at byte"), (33, "not a multiple of its alignment 32")):
        assert message in refused(path, BYTES[:at] + struct.pack("<Q", offset) + BYTES[at + 8 :])
    assert "type 99, which is not supported" in refused(path, BYTES[: at - 4] + struct.pack("<I", 99) + BYTES[at:])
    huge = BYTES[: at - 20] + struct.pack("<QQ", 1 << 62, 1 << 62) + BYTES[at - 4 :]
    assert "is cut off: blk.0.ffn_down.weight" in refused(path, huge)
    assert "whose blocks of 256 values do not fill its rows" in refused(path, with_tensor("x.weight", "Q4_K", (2, 32), bytes(144)))
    other = with_tensor("blk.0.ffn_up.weight", "F32", (16, 32), bytes(16 * 32 * 4))
    assert "mlp.up_proj.weight [16, 32] instead of [32, 32]" in refused(path, other)


def test_tensors_and_metadata(path: pathlib.Path) -> None:
    assert "a tensor blk.0.ssm_a.weight, which is not known" in refused(path, with_tensor("blk.0.ssm_a.weight", "F32", (32,), bytes(128)))
    assert "unexpected model.layers.0.self_attn.q_norm" in refused(path, with_tensor("blk.0.attn_q_norm.weight", "F32", (16,), bytes(64)))
    lacking = {name: tensor for name, tensor in TENSORS.items() if name != "blk.0.attn_v.weight"}
    assert "it lacks model.layers.0.self_attn.v_proj.weight" in refused(path, gguf_bytes(LLAMA, lacking))
    assert "llama.attention.head_count 0 in model.gguf is not a positive integer" in refused(
        path, gguf_bytes({**LLAMA, "llama.attention.head_count": 0}, TENSORS)
    )
    assert "llama.attention.head_count 'two' in model.gguf is not" in refused(
        path, gguf_bytes({**LLAMA, "llama.attention.head_count": "two"}, TENSORS)
    )
    for layers, message in ((12, "is more than the file's 11 tensors"), (2**31, "in model.gguf is not an integer of at most 1024")):
        assert f"block_count {layers} {message}" in refused(path, gguf_bytes({**LLAMA, "llama.block_count": layers}, TENSORS))
    assert "differs between layers" in refused(path, gguf_bytes({**LLAMA, "llama.attention.head_count": [2, 4]}, TENSORS))
    assert "has no general.architecture" in refused(path, gguf_bytes({}, TENSORS))
    scaled = {**LLAMA, "llama.rope.scaling.type": "spiral"}
    assert "llama.rope.scaling.type 'spiral' is not supported" in refused(path, gguf_bytes(scaled, TENSORS))
    assert "general.alignment 7" in refused(path, gguf_bytes({**LLAMA, "general.alignment": 7}, TENSORS))
    assert "version 1 of GGUF" in refused(path, BYTES[:4] + struct.pack("<I", 1) + BYTES[8:])
    count = struct.pack("<Q", 1 << 60)
    assert "the count of tensors is" in refused(path, BYTES[:8] + count + BYTES[16:])
    assert "the count of metadata is" in refused(path, BYTES[:16] + count + BYTES[24:])


def test_errors_name_the_file_and_its_keys(path: pathlib.Path) -> None:
    def refusal(**changes: object) -> str:
        return refused(path, gguf_bytes({**LLAMA, **{key.replace("__", "."): value for key, value in changes.items()}}, TENSORS))

    assert "llama.attention.head_count 3 is not a multiple of llama.attention.head_count_kv 2" in refusal(
        llama__attention__head_count=3, llama__attention__head_count_kv=2, llama__attention__key_length=16
    )
    assert refusal(llama__context_length="x") == "llama.context_length 'x' in model.gguf is not a positive integer"
    assert "llama.rope.dimension_count 17 is not an even number in [2, 16]" in refusal(llama__rope__dimension_count=17)
    assert "does not match the metadata of model.gguf: it has other shapes" in refusal(llama__feed_forward_length=64)
    scaled = {"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": -4.0}
    assert "llama.attention.causal False in model.gguf is not supported" in refusal(llama__attention__causal=False)
    assert refusal(**scaled) == "rope parameter llama.rope.scaling.factor -4.0 is not a positive number"


def write_parts(folder: pathlib.Path, count: int = 3) -> list[pathlib.Path]:
    paths = [folder / f"model-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    names = sorted(TENSORS)
    for number, part in enumerate(paths):
        described = {"split.no": number, "split.count": count, "split.tensors.count": len(TENSORS)}
        part.write_bytes(gguf_bytes({**({} if number else LLAMA), **described}, {name: TENSORS[name] for name in names[number::count]}))
    return paths


def test_a_model_in_parts(tmp_path: pathlib.Path, path: pathlib.Path) -> None:
    """Each of them stands for all."""
    path.write_bytes(BYTES)
    whole = open_gguf(path)
    for part in write_parts(tmp_path):
        load(part)
        tensors = open_gguf(part).tensors
        assert tensors.keys() == whole.tensors.keys()
        assert all((tensor.data == whole.tensors[name].data).all() for name, tensor in tensors.items())


def test_parts_that_do_not_belong_together(tmp_path: pathlib.Path) -> None:
    def refusal(given: pathlib.Path) -> str:
        with pytest.raises(ModelLoadError) as caught:
            load(given)
        return str(caught.value)

    first, second, third = write_parts(tmp_path)
    alone = first.rename(tmp_path / "model.gguf")
    assert f"{alone} is one of 3 files of a model, but is not called NAME-00001-of-00003.gguf" in refusal(alone)
    assert f"{first} is missing: {third} is one of 3 files of a model" in refusal(third)
    first, second, third = write_parts(tmp_path)
    third.unlink()
    assert f"{third} is missing" in refusal(first)
    second.rename(third)
    assert f"{second} is missing" in refusal(first)
    shutil.copy(third, second)
    assert f"{third} has split.no 1 and split.count 3 instead of 2 and 3" in refusal(first)
    metadata = {"split.no": 2, "split.count": 3}
    third.write_bytes(gguf_bytes(metadata, TENSORS))
    assert f"{third} has the tensor blk.0.attn_k.weight, which another file of the model has too" in refusal(first)
    third.write_bytes(gguf_bytes(metadata, {}))
    assert "files of" in refusal(first)
    assert "have 8 tensors, but split.tensors.count is 11" in refusal(first)


def test_a_model_is_found_by_its_name(path: pathlib.Path) -> None:
    path.write_bytes(BYTES)
    assert resolve_model(EngineConfig(model=str(path)).model) == path
    with pytest.raises(ModelLoadError, match=r"has no config\.json; a GGUF model is given by the path of its file"):
        resolve_model(str(path.parent))
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model(str(path.with_name("other.gguf")))
    with pytest.raises(ModelLoadError, match="transformers does not run GGUF files"):
        find_spec(path, "transformers")


PIECES = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "ab"], "tokenizer.ggml.scores": [1.0, 0.0, 0.0]}
TOKENS = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": ["a", "b", "ab"]}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({**TOKENS, "tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model 't5' is not supported; supported are gpt2, llama and gemma4"),
        ({**TOKENS, "tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported"),
        ({**TOKENS}, "no list of strings tokenizer.ggml.merges"),
        ({**TOKENS, "tokenizer.ggml.merges": ["a c"]}, "'a c', which does not merge two tokens into one"),
        ({**TOKENS, "tokenizer.ggml.merges": ["a"]}, "'a', which does not merge"),
        ({**TOKENS, "tokenizer.ggml.tokens": ["ab"], "tokenizer.ggml.merges": ["a b"]}, "merges 'a', which is no token"),
        ({**TOKENS, "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.bos_token_id": 3}, "bos_token_id 3 is not the id of one of 3 tokens"),
        ({**TOKENS, "tokenizer.ggml.token_type": [1]}, "1 tokenizer.ggml.token_type for 3 tokens"),
        (
            {**TOKENS, "tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [1.0]},
            "a number in tokenizer.ggml.scores for each of 3 tokens",
        ),
    ],
)
def test_tokenizers(path: pathlib.Path, metadata: dict[str, Any], message: str) -> None:
    path.write_bytes(gguf_bytes(metadata, TENSORS))
    with pytest.raises(ModelLoadError, match=message):
        Tokenizer.find(path)


def test_strings_are_decoded_when_they_are_asked_for(path: pathlib.Path) -> None:
    metadata = {**LLAMA, **TOKENS, "tokenizer.ggml.tokens": ["a", "XY", "ab"]}
    path.write_bytes(gguf_bytes(metadata, TENSORS).replace(b"XY", b"\xff\xfe"))
    load(path)
    tokens = open_gguf(path).metadata["tokenizer.ggml.tokens"]
    assert (len(tokens), tokens[0], tokens[-1], tokens[::2]) == (3, "a", "ab", ["a", "ab"])
    with pytest.raises(ModelLoadError, match=r"tokenizer.ggml.tokens in .* has an entry 1 that is not UTF-8"):
        Tokenizer.find(path)


def test_a_file_without_a_tokenizer_has_none(path: pathlib.Path) -> None:
    path.write_bytes(gguf_bytes({**LLAMA, "tokenizer.ggml.model": "no_vocab"}, TENSORS))
    assert Tokenizer.find(path) is None
    path.write_bytes(BYTES)
    assert Tokenizer.find(path) is None
    assert open_gguf(path).metadata["llama.context_length"] == 64
