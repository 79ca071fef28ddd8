"""The demo model in one GGUF file: model, tokenizer and chat template."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np
import pytest
from gguf_files import byte_level_metadata, config_metadata, converted_name, gguf_bytes, quantize, stored
from safetensors.torch import load_file, save_file

import aengine
from aengine.kernels.arrays import as_tensor
from aengine.models.config.model_config import load_spec
from aengine.models.gguf.gguf_file import open_gguf
from aengine.models.gguf.tensors import read_rows
from aengine.models.quantization.quantization_config import load_quantization
from aengine.tokenizer.tokenizer import Tokenizer

DEMO = pathlib.Path(aengine.__file__).parent / "models" / "demo_model"
PROMPTS = ("Once upon a time", "def add(a, b):")


def write_demo(path: pathlib.Path, kind: str, **changes: Any) -> None:
    config = json.loads((DEMO / "config.json").read_text())
    metadata = {**config_metadata("qwen3", config), **byte_level_metadata(DEMO, "qwen2")}
    metadata |= {"tokenizer.ggml.bos_token_id": 4093, "tokenizer.ggml.eos_token_id": 4093, **changes}
    quantizer = quantize if kind.startswith("Q") else None
    tensors = {converted_name(name): stored(tensor, kind, quantizer) for name, tensor in load_file(DEMO / "model.safetensors").items()}
    path.write_bytes(gguf_bytes(metadata, tensors))


def dequantized_copy(path: pathlib.Path, target: pathlib.Path) -> None:
    """A directory with the values of a GGUF file of the demo model, in float32."""
    names = {converted_name(name): name for name in load_file(DEMO / "model.safetensors")}
    tensors = {}
    for name, tensor in open_gguf(path).tensors.items():
        rows = read_rows(tensor.type, tensor.rows)
        tensors[names[name]] = as_tensor(rows if isinstance(rows, np.ndarray) else rows.dequantized()).float().reshape(tensor.shape)
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    for file in DEMO.iterdir():
        if file.name != "model.safetensors":
            (target / file.name).write_bytes(file.read_bytes())


async def greedy(model: str) -> list[list[int]]:
    async with aengine.AsyncEngine(model, dtype="float32", device="cpu", max_model_len=128) as engine:
        params = aengine.SamplingParams(max_tokens=12, temperature=0.0)
        return [[*(await engine.generate(prompt, params)).token_ids] for prompt in PROMPTS]


@pytest.mark.quick_cases(1)
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0", "Q4_K"])
async def test_tokens_are_those_of_the_dequantised_model(tmp_path: pathlib.Path, kind: str) -> None:
    write_demo(tmp_path / "demo.gguf", kind)
    dequantized_copy(tmp_path / "demo.gguf", tmp_path / "plain")
    quantization = load_quantization(tmp_path / "demo.gguf")
    assert (quantization.method if quantization else None) == ("gguf" if kind.startswith("Q") else None)
    assert await greedy(str(tmp_path / "demo.gguf")) == await greedy(str(tmp_path / "plain"))


def test_the_spec_is_that_of_the_config(tmp_path: pathlib.Path) -> None:
    write_demo(tmp_path / "demo.gguf", "BF16")
    assert load_quantization(tmp_path / "demo.gguf") is None
    found, expected = load_spec(tmp_path / "demo.gguf"), load_spec(DEMO)
    assert found.eos_token_ids == (4093, 4095)  # a control token that ends the turns of a chat is one too
    assert found.layers == expected.layers
    assert (found.dtype, found.tied_head) == (expected.dtype, expected.tied_head)


def test_the_tokenizer_and_the_template_are_those_of_the_directory(tmp_path: pathlib.Path) -> None:
    write_demo(tmp_path / "demo.gguf", "BF16")
    found, expected = Tokenizer.find(tmp_path / "demo.gguf"), Tokenizer.load(DEMO)
    assert found is not None
    assert found.has_chat_template
    texts = ("Once upon a time, 1234 days ago...", "it's  spaced\n\n\tand naïve 日本語 🙂", "<|im_start|>user\nhi<|im_end|>", "")
    for text in texts:
        ids = expected.encode(text)
        assert found.encode(text) == ids
        for skip in (False, True):
            assert found.decode(ids, skip) == expected.decode(ids, skip)
    messages = [{"role": "user", "content": "Hello"}]
    assert found.render_chat(messages).text == expected.render_chat(messages).text


def test_bos_and_eos_are_added_where_the_file_says_so(tmp_path: pathlib.Path) -> None:
    write_demo(
        tmp_path / "demo.gguf",
        "BF16",
        **{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.eos_token_id": 4095},
    )
    found = Tokenizer.find(tmp_path / "demo.gguf")
    assert found is not None
    ids = Tokenizer.load(DEMO).encode("Once")
    assert found.encode("Once") == [4093, *ids, 4095]
    assert found.encode("Once", add_special_tokens=False) == ids
