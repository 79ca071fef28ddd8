"""`AsyncEngine.embed`, against the hidden states behind the last norm that Transformers computes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import anyio
import dense_cases
import mixture_cases
import numpy as np
import plain_cases
import pytest
import tokenizers
import torch
import transformers
from family_cases import Case
from hang_guard import let_others_run
from oracle_engine import DEMO_DIR, idle
from slow_cases import slow_but
from tokenizers.processors import TemplateProcessing

from aengine import AsyncEngine, ContextLengthError, Embedding, InvalidRequestError, RequestEndedError, SamplingParams
from aengine.models.choice import default_pooling

pytestmark = pytest.mark.anyio
ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])
CASES = {case.name: case for case in (*dense_cases.CASES, *mixture_cases.CASES, *plain_cases.CASES)}
KERNELS, TORCH = {"attention_backend": "auto"}, {"attention_backend": "torch_native"}
FALLBACK = {"model_impl": "transformers"}
QUICK = [("qwen3", KERNELS), ("cohere2", KERNELS), ("deepseek-v3", KERNELS), ("mixtral", TORCH), ("gemma3", FALLBACK)]
OTHERS = [(name, kind) for name in ("qwen3-moe", "gemma3", "granite", "gpt2", "opt", "glm") for kind in (KERNELS, TORCH)]
CUDA = pytest.param(
    *("gemma3", {"device": "cuda"}),
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
SIZES = {"dtype": "float32", "device": "cpu", "page_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16}
STREAM = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@torch.inference_mode()
def hidden_states(path: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """[len(prompt), hidden_size] for each prompt."""
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    return [model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0].numpy() for prompt in prompts]


async def embed_all(engine: AsyncEngine, requests: list[tuple[list[int], dict[str, Any]]]) -> list[Embedding]:
    found: dict[int, Embedding] = {}

    async def run(number: int, prompt: list[int], fields: dict[str, Any]) -> None:
        found[number] = await engine.embed(prompt, **fields)

    async with anyio.create_task_group() as group:
        for number, (prompt, fields) in enumerate(requests):
            group.start_soon(run, number, prompt, fields)
    return [found[number] for number in range(len(requests))]


@pytest.mark.quick_cases(1)
@ASYNCIO
@pytest.mark.parametrize(("name", "options"), [*slow_but(QUICK, [*QUICK, *OTHERS]), CUDA])
async def test_a_crowd_beside_streams(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of several chunks, whose prefixes are shared, in a pool of pages that is too small for all."""
    case: Case = CASES[name]
    case.make().save_pretrained(tmp_path)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 199, length).tolist() for length in case.lengths]
    prompts += [[*prompts[-1][:cut], 5] for cut in (12, 30)]
    expected = hidden_states(tmp_path, prompts)
    requests = [(prompt, {"pooling": pooling, "normalize": False}) for prompt in prompts for pooling in ("last", "mean")]
    async with AsyncEngine(str(tmp_path), kv_cache_memory=1 << 20, **{**SIZES, **options}) as engine:
        page_bytes = engine.model_info.kv_bytes_per_token * 4
    async with AsyncEngine(str(tmp_path), kv_cache_memory=page_bytes * 40, **{**SIZES, **options}) as engine:
        alone = [(await engine.generate(prompt, STREAM)).token_ids for prompt in prompts[3:6]]
        outputs: dict[int, tuple[int, ...]] = {}

        async def generate(number: int) -> None:
            outputs[number] = (await engine.generate(prompts[3 + number], STREAM)).token_ids

        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(generate, number)
            found = await embed_all(engine, requests)
        assert [outputs[number] for number in range(3)] == alone
        assert engine.model_info.hidden_size == expected[0].shape[1]
        assert idle(engine)
    for (prompt, fields), embedding, states in zip(requests, found, [one for one in expected for _ in range(2)], strict=True):
        reference = states[-1] if fields["pooling"] == "last" else states.mean(0)
        assert embedding.values.dtype == np.float32
        assert np.abs(embedding.values - reference).max() < 1e-4 * max(1.0, np.abs(states).max())
        assert embedding.num_tokens == len(prompt)
        assert embedding.cached_tokens < len(prompt) if fields["pooling"] == "last" else not embedding.cached_tokens


@ASYNCIO
async def test_prompts_that_are_preempted() -> None:
    """Streams take the pages of embeddings, which begin again."""
    prompt, greedy = [*range(20, 70)], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async with AsyncEngine("demo", **SIZES) as engine:
        expected = await engine.embed(prompt, pooling="mean")
        page_bytes = engine.model_info.kv_bytes_per_token * 4
    async with AsyncEngine("demo", **{**SIZES, "max_num_batched_tokens": 6}, kv_cache_memory=26 * page_bytes) as engine:
        ended = anyio.Event()

        async def generate() -> None:
            for number in range(2):
                await engine.generate([number + 5] * 8, greedy)
            ended.set()

        async def embed() -> None:
            while not ended.is_set():
                found = await engine.embed(prompt, pooling="mean", priority=1)
                assert np.abs(found.values - expected.values).max() < 1e-5

        async with anyio.create_task_group() as group:
            for work in (generate, generate, embed, embed):
                group.start_soon(work)
        assert engine.stats().preemptions


@ASYNCIO
@pytest.mark.parametrize("sizes", slow_but([], [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]))
@pytest.mark.parametrize("backend", [KERNELS, TORCH])
async def test_several_ranks(sizes: dict[str, int], backend: dict[str, Any]) -> None:
    prompts = [list(range(7, 7 + length)) for length in (1, 5, 40)]
    requests = [(prompt, {"pooling": pooling}) for prompt in prompts for pooling in ("last", "mean")]
    found = []
    for options in ({}, sizes):
        async with AsyncEngine("demo", **SIZES, **backend, **options) as engine:
            found.append(await embed_all(engine, requests))
            assert await engine.generate(prompts[0], STREAM)
    for one, other in zip(*found, strict=True):
        assert np.abs(one.values - other.values).max() < 1e-5


async def test_what_is_made_of_the_states() -> None:
    async with AsyncEngine("demo", **SIZES, adapters={"lora": "demo-lora"}) as engine:
        plain = await engine.embed("It is a truth", normalize=False)
        whole = await engine.embed("It is a truth")
        cut = await engine.embed("It is a truth", dimensions=10)
        assert np.allclose(whole.values, plain.values / np.linalg.norm(plain.values), atol=1e-6)
        assert np.allclose(cut.values, plain.values[:10] / np.linalg.norm(plain.values[:10]), atol=1e-6)
        ids = await engine.tokenize("It is a truth")
        assert np.array_equal((await engine.embed(ids, normalize=False)).values, plain.values)
        messages = [{"role": "user", "content": "It is a truth"}]
        rendered = await engine.tokenize((await engine.render_chat(messages)).text, add_special_tokens=False)
        of_chat, of_ids = await engine.embed(messages), await engine.embed(rendered)
        assert np.allclose(of_chat.values, of_ids.values, atol=1e-6)
        head = transformers.AutoModelForCausalLM.from_pretrained(DEMO_DIR).get_output_embeddings().weight.float()
        for adapter in (None, "lora"):  # the logprobs of the next token follow from the state
            state = torch.from_numpy((await engine.embed(ids, normalize=False, adapter=adapter)).values)
            token = (await engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1), adapter=adapter)).logprobs
            assert token is not None
            assert abs((head @ state).log_softmax(-1).max().item() - token[0].logprob) < 1e-4
            assert adapter is None or np.abs(state.numpy() - plain.values).max() > 0.1
        stats = engine.stats()
        assert stats.completion_tokens == 2


async def test_what_is_refused_or_ends_early() -> None:
    async with AsyncEngine("demo", **SIZES, max_model_len=64) as engine:
        most = await engine.embed([5] * 64)  # generation needs room for a token
        assert most.num_tokens == 64
        for prompt in ([5] * 65, "so " * 300):
            with pytest.raises(
                ContextLengthError, match=r"^prompt: \d+ tokens( or more)? are more than what fits into the context of 64 tok"
            ):
                await engine.embed(prompt)
        with pytest.raises(InvalidRequestError) as refused:
            await engine.embed([5], pooling="most", priority=1000)
        assert [violation.field for violation in refused.value.violations] == ["pooling", "priority"]
        with pytest.raises(InvalidRequestError, match=r"^dimensions: 257 is not in \[1, 256\]$"):
            await engine.embed([5], dimensions=257)
        with pytest.raises(InvalidRequestError, match=r"^prompt: it is empty"):
            await engine.embed([])
        await engine.pause()

        async def cancel() -> None:
            while not await engine.cancel("a"):
                await let_others_run()

        async with anyio.create_task_group() as group:
            group.start_soon(cancel)
            with pytest.raises(RequestEndedError, match=r"^request 'a' has no embedding: it was cancelled$"):
                await engine.embed([5] * 40, request_id="a")
        with pytest.raises(RequestEndedError, match=r"^request 'b' has no embedding: its timeout passed$"):
            await engine.embed([5] * 40, request_id="b", timeout=0.01)
        with anyio.move_on_after(0.01):
            await engine.embed([5] * 40)
        await engine.unpause()
        assert idle(engine)


def test_the_checkpoint_says_which_pooling(tmp_path: Path) -> None:
    def written(modes: list[str], *others: str) -> str:
        kinds = ["Transformer", "Pooling", *others]
        modules = [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        config = {f"pooling_mode_{mode}": mode in modes for mode in ("cls_token", "mean_tokens", "lasttoken")}
        (tmp_path / "1_Pooling").mkdir(exist_ok=True)
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, "include_prompt": True, **config}))
        return default_pooling(tmp_path)

    assert default_pooling(tmp_path) == "last"
    assert default_pooling(tmp_path, encodes=True) == "cls"
    assert written(["lasttoken"], "Normalize") == "last"
    assert written(["mean_tokens"]) == "mean"
    assert written(["cls_token"]) == "cls"
    assert written(["cls_token", "mean_tokens"]) == "cls and mean"
    assert written([]) == "unknown"
    assert written(["mean_tokens"], "Dense") == "Dense"
    (tmp_path / "modules.json").write_text("[{}]")
    assert default_pooling(tmp_path) == "unknown"


@ASYNCIO
async def test_a_checkpoint_for_embeddings(tmp_path: Path) -> None:
    """Its tokenizer appends a token to each text, as that of Qwen3-Embedding does, and it is pooled as it says."""
    for file in DEMO_DIR.iterdir():
        os.symlink(file, tmp_path / file.name)
    (tmp_path / "tokenizer.json").unlink()
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    end = tokenizer.id_to_token(0)
    tokenizer.post_processor = TemplateProcessing(single=f"$A {end}", special_tokens=[(end, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "modules.json").write_text(json.dumps([{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]))
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        ids = await engine.tokenize("It is a truth")
        assert ids[-1] == 0
        found = await engine.embed("It is a truth", normalize=False)
        assert found.num_tokens == len(ids)
    (states,) = hidden_states(DEMO_DIR, [ids])
    assert np.abs(found.values - states.mean(0)).max() < 1e-4
    config.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        with pytest.raises(
            InvalidRequestError, match=r"^pooling: that of the checkpoint is max_tokens, which is not supported; choose last or "
        ):
            await engine.embed("It is a truth")
        assert await engine.embed("It is a truth", pooling="last")


@ASYNCIO
async def test_a_checkpoint_without_an_output_head(tmp_path: Path) -> None:
    """As that of a base model is saved."""
    CASES["qwen3"].make().base_model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3Model"]
    prompt = [*range(5, 50)]
    (states,) = hidden_states(tmp_path, [prompt])
    async with AsyncEngine(str(tmp_path), **SIZES) as engine:
        assert not engine.model_info.output_head
        assert np.abs((await engine.embed(prompt, normalize=False)).values - states[-1]).max() < 1e-4
        with pytest.raises(InvalidRequestError, match=r"^prompt: the model only makes embeddings: its checkpoint has no output head$"):
            await engine.generate(prompt, STREAM)
