"""A checkpoint without a tokenizer: token ids go in and come out, in process and over gRPC, and whatever needs text is refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from oracle_engine import DEMO_DIR

from aengine import AsyncEngine, InvalidRequestError, ModelLoadError, NoTokenizerError, SamplingParams, StructuredOutput
from aengine.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.anyio

PROMPT = [50, 60, 70]
MEMORY = 32 << 20


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model without its tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (folder / name).symlink_to(DEMO_DIR / name)
    return folder


@pytest.mark.quick_cases(1)
async def test_ids_go_in_and_come_out(bare: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=1, stop_token_ids=[7], ignore_eos=True)
    async with AsyncEngine("demo", kv_cache_memory=MEMORY) as engine:
        expected = await engine.generate(PROMPT, params)
        assert engine.model_info.tokenizer
    async with AsyncEngine(str(bare), kv_cache_memory=MEMORY) as engine:
        info = engine.model_info
        assert (info.tokenizer, info.chat_template, info.vocab_size) == (False, False, 4096)
        stream = engine.stream(PROMPT, params)
        assert "".join([token.text async for token in stream]) == ""
        assert stream.completion().token_ids == expected.token_ids
        assert stream.completion().logprobs == expected.logprobs
        assert stream.completion().prompt_logprobs == expected.prompt_logprobs
        assert stream.effective_params.detokenize is False
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True, detokenize=False))).text == ""
        with pytest.raises(NoTokenizerError, match="the model has no tokenizer"):
            _ = engine.tokenizer


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_needs_text_is_refused_by_its_name(bare: Path) -> None:
    async with AsyncEngine(str(bare), kv_cache_memory=MEMORY) as engine:
        params = SamplingParams(stop="a", bad_words="b", structured_output=StructuredOutput(regex="a"), detokenize=True)
        with pytest.raises(InvalidRequestError) as caught:
            engine.stream("text", params)
        assert {violation.field: violation.description for violation in caught.value.violations} == {
            "prompt": "a text needs a tokenizer, and this model has none; give token ids",
            **dict.fromkeys(("stop", "bad_words", "structured_output", "detokenize"), "it needs a tokenizer, and this model has none"),
        }
        with pytest.raises(InvalidRequestError, match="prompt: a chat needs a tokenizer, and this model has none; give token ids"):
            engine.stream([{"role": "user", "content": "text"}])
        assert (await engine.generate(PROMPT, SamplingParams(max_tokens=1, ignore_eos=True))).text == ""


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "tokenizer_config.json", "spiece.model"]
)
def test_a_tokenizer_that_cannot_be_read_is_not_overlooked(tmp_path: Path, name: str) -> None:
    for one in ("config.json", "generation_config.json"):
        shutil.copy(DEMO_DIR / one, tmp_path)
    assert Tokenizer.find(tmp_path) is None
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelLoadError):
        Tokenizer.find(tmp_path)
