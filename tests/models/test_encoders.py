"""Encoders and models that classify, in the code of Transformers: what they say of texts, beside Transformers itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_models import MODELS, save_encoder

from aengine import LLM, AsyncEngine
from aengine.api.errors import ConfigError, InvalidRequestError, ModelLoadError

pytestmark = pytest.mark.anyio

ERROR = 1e-4
PROMPTS = [np.random.default_rng(1).integers(4, 118, size=length).tolist() for length in (1, 7, 40, 100, 23, 90)]
SIZES: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 8 << 20, "max_num_seqs": 4}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def hidden_of(model: Any, ids: list[int], **inputs: Any) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = model.base_model(input_ids=torch.tensor([ids]), **inputs).last_hidden_state[0]
    return states


FEW = ("bert", "xlm-r", "modernbert-mean", "bert-labels", "qwen3-one")


@pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
async def test_what_transformers_says(name: str, tmp_path: Path) -> None:
    """Prompts of all lengths at once, more than a step has: each is computed in one step, with others beside it."""
    model = save_encoder(name, tmp_path)
    async with AsyncEngine(str(tmp_path), max_num_batched_tokens=128, **SIZES) as engine:
        info = engine.model_info
        assert (info.encoder, info.implementation, info.output_head) == (name != "qwen3-one", "transformers", False)
        poolings = ("cls", "mean", "last") if info.encoder else ("last", "mean")
        assert info.pooling == poolings[0]
        asked = [(ids, pooling) for ids in PROMPTS for pooling in poolings]
        found = await asyncio.gather(*[engine.embed(ids, pooling=pooling, normalize=False) for ids, pooling in asked])
        for (ids, pooling), one in zip(asked, found, strict=True):
            states = hidden_of(model, ids)
            expected = {"cls": states[0], "last": states[-1], "mean": states.mean(0)}[pooling]
            assert np.abs(expected.numpy() - one.values).max() < ERROR, (len(ids), pooling)
        if info.labels:
            told = await asyncio.gather(*[engine.classify(ids) for ids in PROMPTS])
            for ids, said in zip(PROMPTS, told, strict=True):
                with torch.inference_mode():
                    logits = model(input_ids=torch.tensor([ids])).logits[0]
                assert np.abs(logits.numpy() - said.scores).max() < ERROR
                right = torch.sigmoid(logits) if len(logits) == 1 else torch.softmax(logits, 0)
                assert np.abs(right.numpy() - np.array(said.probabilities)).max() < ERROR
                assert said.label == model.config.id2label[int(logits.argmax())]
        else:
            with pytest.raises(InvalidRequestError, match="pooling: label is for models that classify"):
                await engine.classify(PROMPTS[0])
        with pytest.raises(InvalidRequestError, match="prompt: the model only makes embeddings"):
            await engine.generate(PROMPTS[0])


@pytest.mark.parametrize("name", ["bert-one", "xlm-r-one", "qwen3-one"])
async def test_pairs_of_texts(name: str, tmp_path: Path) -> None:
    """BERT tells the second text by the types of its tokens."""
    model = save_encoder(name, tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    documents = ["w1 w2", "w3 w9 w9 w40", "w7"]
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        found = await engine.rerank("w5 w6", documents)
        for document, one in zip(documents, found, strict=True):
            inputs = tokenizer("w5 w6", document, return_tensors="pt", return_token_type_ids=name == "bert-one")
            assert name != "bert-one" or int(inputs["token_type_ids"].sum()) > 0
            with torch.inference_mode():
                assert abs(float(torch.sigmoid(model(**inputs).logits[0, 0])) - one) < ERROR


async def test_others_are_ranked_by_their_embeddings(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        found = await engine.rerank("w5 w6", ["w1 w2", "w5 w6"])
    states = [hidden_of(model, tokenizer(text)["input_ids"])[0] for text in ("w5 w6", "w1 w2")]
    assert abs(float(torch.nn.functional.cosine_similarity(*states, dim=0)) - found[0]) < ERROR
    assert abs(found[1] - 1.0) < 1e-5


async def test_one_of_several_labels_does_not_rank(tmp_path: Path) -> None:
    save_encoder("bert-labels", tmp_path)
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        with pytest.raises(InvalidRequestError, match="model: it tells 3 labels apart"):
            await engine.rerank("w1", ["w2"])


async def test_a_prompt_fits_into_one_step(tmp_path: Path) -> None:
    save_encoder("bert", tmp_path)
    async with AsyncEngine(str(tmp_path), max_num_batched_tokens=32, **SIZES) as engine:
        assert engine.model_info.max_model_len == 32
        with pytest.raises(InvalidRequestError):
            await engine.embed([5] * 33)
        long = await engine.embed([5, 9] * 16)
        assert long.num_tokens == 32
        again = await engine.embed([5, 9] * 16)
        assert again.cached_tokens == 0, "nothing is kept of a prompt"
    with pytest.raises(ConfigError, match="max_model_len: 64 is more than max_num_batched_tokens, 32"):
        await AsyncEngine(str(tmp_path), max_num_batched_tokens=32, max_model_len=64, **SIZES).start()


async def test_positions_of_roberta_leave_room_for_the_padding(tmp_path: Path) -> None:
    model = save_encoder("xlm-r", tmp_path)
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        assert engine.model_info.max_model_len == 199
        ids = [5, 0, 7, 0, 0, 9]  # the padding itself, which is no text
        states = hidden_of(model, ids, attention_mask=torch.ones((1, 6), dtype=torch.int64))
        assert np.abs(states[0].numpy() - (await engine.embed(ids, normalize=False)).values).max() < ERROR


async def test_pooling_of_sentence_transformers(tmp_path: Path) -> None:
    model = save_encoder("bert", tmp_path)
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}))
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        found = await engine.embed(PROMPTS[2], normalize=False)
    assert np.abs(hidden_of(model, PROMPTS[2]).mean(0).numpy() - found.values).max() < ERROR


async def test_the_native_implementation_says_what_it_cannot(tmp_path: Path) -> None:
    save_encoder("qwen3-one", tmp_path)
    with pytest.raises(ModelLoadError, match="classifies texts, which the native implementation does not"):
        await AsyncEngine(str(tmp_path), model_impl="native", **SIZES).start()


def test_without_a_loop(tmp_path: Path) -> None:
    save_encoder("bert-labels", tmp_path)
    with LLM(str(tmp_path), **SIZES) as llm:
        assert len(llm.embed(["w1", "w2 w3"])) == 2
