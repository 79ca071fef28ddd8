"""Latent attention to the tokens that an index chooses, against Transformers: sequences of several times as many tokens as are chosen."""

from __future__ import annotations

import asyncio
import pathlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from driver import Driver, record_logits
from family_cases import Case, Reference, reference
from runner_ranks import runner_on_ranks
from test_families import assert_near, config_of
from triton_mode import DEVICES  # before triton is imported

from aengine import AsyncEngine, SamplingParams
from aengine.models.config.model_config import load_spec
from aengine.models.spec import LatentAttention
from aengine.runner.runner import ModelRunner

SIZES: dict[str, Any] = {
    **{"kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 24, "num_key_value_heads": 4},
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "index_topk": 12, "index_head_dim": 32, "index_n_heads": 16},
}
CASE = Case("deepseek-v32", "DeepseekV32", SIZES, lengths=(33,) * 8)
GLM = Case("glm-moe-dsa", "GlmMoeDsa", {**SIZES, "n_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]}, lengths=(33,) * 8)


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return reference(CASE, tmp_path_factory.mktemp("sparse"))


@pytest.mark.parametrize("chunk", [None, 7, 1])
def test_tokens_and_logits(known: Reference, chunk: int | None) -> None:
    runner = ModelRunner(config_of(CASE, known.path, "auto"), known.path)
    assert runner.executor_name == "torch"  # the CPU kernels attend to all tokens
    some = slice(0, 8 if chunk is None else 2)
    seen = record_logits(runner)
    driver = Driver(runner) if chunk is None else Driver(runner, chunk=chunk)
    assert driver.generate(known.prompts[some], 40) == known.tokens[some]
    assert_near(seen[-1], torch.stack([of_prompt[-1] for of_prompt in known.logits[some]]))


def test_another_rope(tmp_path: pathlib.Path) -> None:
    expected = reference(GLM, tmp_path)
    runner = ModelRunner(config_of(GLM, tmp_path, "torch_native"), tmp_path)
    seen = record_logits(runner)
    assert Driver(runner).generate(expected.prompts, 40) == expected.tokens
    assert_near(seen[-1], torch.stack([of_prompt[-1] for of_prompt in expected.logits]))


def test_chosen_tokens_matter(known: Reference) -> None:
    """All tokens would give other ones, or the case would show nothing."""
    spec = load_spec(known.path)
    assert all(isinstance(layer.attention, LatentAttention) and layer.attention.index is not None for layer in spec.layers)
    (known.path / "config.json").rename(known.path / "kept.json")
    try:
        text = (known.path / "kept.json").read_text()
        (known.path / "config.json").write_text(text.replace('"index_topk": 12', '"index_topk": 512'))
        runner = ModelRunner(config_of(CASE, known.path, "torch_native"), known.path)
        assert Driver(runner).generate(known.prompts[:2], 40) != known.tokens[:2]
    finally:
        (known.path / "kept.json").rename(known.path / "config.json")


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu(known: Reference, device: str) -> None:
    """Chunks of prompts and decodes, in graphs."""
    sizes = {"max_num_seqs": 4, "graph_sizes": (4,), "graph_tokens": 16, "max_model_len": 64}
    runner = ModelRunner(config_of(CASE, known.path, "triton", device=device, **sizes), known.path)
    seen = record_logits(runner)
    assert Driver(runner, chunk=12).generate(known.prompts[:4], 6) == [tokens[:6] for tokens in known.tokens[:4]]
    assert_near(seen[-1].cpu(), torch.stack([of_prompt[5] for of_prompt in known.logits[:4]]))
    runner.close()


def test_in_an_engine(known: Reference) -> None:
    """Prefixes that are found, streams side by side, drafts, and preemption."""

    async def run() -> None:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
        options: dict[str, Any] = {"dtype": "float32", "page_size": 4, "max_model_len": 80}
        for more in ({}, {"speculative": "ngram"}, {"max_num_batched_tokens": 9, "max_num_seqs": 3}):
            async with AsyncEngine(str(known.path), kv_cache_memory=4 << 20, **options, **more) as engine:
                first = await asyncio.gather(*(engine.generate(prompt, params) for prompt in known.prompts[:3]))
                assert [list(one.token_ids) for one in first] == known.tokens[:3]
                turn = [*known.prompts[0], *known.tokens[0][:20]]
                again = await engine.generate(turn, replace(params, max_tokens=20))
                assert list(again.token_ids) == known.tokens[0][20:]
                assert again.usage.cached_prompt_tokens >= 48

    asyncio.run(run())


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=lambda options: next(iter(options)))
def test_on_ranks(known: Reference, options: dict[str, int]) -> None:
    """Each of which chooses the same tokens."""
    with runner_on_ranks(replace(config_of(CASE, known.path, "auto"), **options), known.path) as ranked:
        assert Driver(ranked.runner, chunk=9).generate(known.prompts[:2], 20) == [tokens[:20] for tokens in known.tokens[:2]]


def test_what_the_index_needs(tmp_path: pathlib.Path) -> None:
    case = Case("deepseek-v32", "DeepseekV32", {**SIZES, "index_head_dim": 8})
    case.make().config.save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"index_head_dim 8 in config.json is not qk_rope_head_dim 16 or more"):
        load_spec(tmp_path)
