"""A draft model has the vocabulary of the model, or is refused by the first id that differs. Embeddings may be padded differently."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from oracle_engine import DEMO_DIR
from reference import TINY, save_random

from aengine import AsyncEngine, ConfigError, EngineConfig, SamplingParams
from aengine.engine.loading import load_model
from aengine.tokenizer.tokenizer import Tokenizer

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def tiny(path: Path, vocab_size: int, *, tokenizer: bool = True) -> Path:
    """A random model, with the demo model's tokenizer."""
    save_random(
        "Qwen3",
        {**TINY, "head_dim": 16, "vocab_size": vocab_size, "max_position_embeddings": 2048},
        path,
        seed=vocab_size,
        dtype=torch.float32,
    )
    for name in TOKENIZER if tokenizer else ():
        shutil.copy(DEMO_DIR / name, path)
    return path


def config(model: Path, draft: Path) -> EngineConfig:
    return EngineConfig(model=str(model), speculative="draft", speculative_model=str(draft), kv_cache_memory=8 << 20)


def refusal(model: Path, draft: Path) -> str:
    with pytest.raises(ConfigError, match="speculative_model: ") as caught:
        load_model(config(model, draft), lambda: None)
    return str(caught.value)


def test_another_vocabulary(tmp_path: Path) -> None:
    draft = tiny(tmp_path / "draft", 4096)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    pieces = {token_id: piece for piece, token_id in vocab.items()}
    vocab[pieces[3000]], vocab[pieces[3001]] = 3001, 3000
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(DEMO_DIR, draft)
    assert f"id 3000 is {pieces[3000]!r} and {pieces[3001]!r}, of 4096 and 4096 tokens" in message
    tokenizer = json.loads((DEMO_DIR / "tokenizer.json").read_text())
    for added, difference in (("<more>", "id 4096 is None and '<more>', of 4096 and 4097 tokens"), ("[PAD4096]", None)):
        more = {**tokenizer, "added_tokens": [*tokenizer["added_tokens"], {**tokenizer["added_tokens"][-1], "id": 4096, "content": added}]}
        (draft / "tokenizer.json").write_text(json.dumps(more))
        assert Tokenizer.load(DEMO_DIR).difference(Tokenizer.load(draft)) == difference


def test_sizes_alone_without_a_tokenizer(tmp_path: Path) -> None:
    draft = tiny(tmp_path / "draft", 4097, tokenizer=False)
    assert "its vocabulary has 4097 ids, and the model's 4096" in refusal(DEMO_DIR, draft)


@pytest.mark.quick_cases(1)
@pytest.mark.anyio
@pytest.mark.parametrize(("rows", "draft_rows"), [(4128, 4096), (4096, 4128)])
async def test_embeddings_may_be_padded_differently(rows: int, draft_rows: int, tmp_path: Path) -> None:
    """What one of the two does not have is neither proposed nor read."""
    model, draft = tiny(tmp_path / "model", rows), tiny(tmp_path / "draft", draft_rows)
    prompts = [[5, 4080 + i, rows - 1, i] for i in range(8)]
    params = SamplingParams(max_tokens=20, temperature=1.5, seed=1, ignore_eos=True)
    outputs = []
    for each in (EngineConfig(model=str(model), kv_cache_memory=8 << 20), config(model, draft)):
        async with AsyncEngine(each) as engine:
            outputs.append([(await engine.generate(prompt, params)).token_ids for prompt in prompts])
            counts = engine.stats().draft_tokens
    assert outputs[0] == outputs[1]
    assert counts > 0
