"""Hidden states and chosen experts of each token, against Transformers, and whatever they are computed beside."""

from __future__ import annotations

import asyncio
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from family_cases import reference
from grpc_harness import serving
from slow_cases import slow_but
from test_families import CASES, config_of
from torch.overrides import TorchFunctionMode

from aengine import AsyncEngine, EngineBase, InvalidRequestError, Router, SamplingParams
from aengine.client import AsyncClient
from aengine.engine import requests
from aengine.wire import response

pytestmark = pytest.mark.anyio
PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"
CONFIG: dict[str, Any] = {"kv_cache_memory": 32 << 20, "max_model_len": 256}
MOE = "olmoe"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def engine() -> Any:
    async with AsyncEngine("demo", **CONFIG) as engine:
        yield engine


def layers_of(engine: EngineBase) -> tuple[int, ...]:
    return tuple(range(engine.model_info.num_layers + 1))


@pytest.mark.parametrize("name", slow_but(["qwen3", "gpt-oss", "lfm2"], [name for name in CASES if name != "gemma3n"]))
async def test_they_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    prompt = reference(case, tmp_path).prompts[-1]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        told = model(torch.tensor([prompt]), output_hidden_states=True, use_cache=False)
    expected = [states[0].numpy() for states in told.hidden_states]
    if "mamba" in name and name != "bamba":  # of these the first is what the first layer makes, and the last stands twice
        expected = [*[None] * 1, *expected[:-2], expected[-1]]
    async with AsyncEngine(config_of(case, tmp_path, "cpu")) as engine:
        info = engine.model_info
        has_experts = info.num_active_parameters != info.num_parameters
        found = await engine.hidden_states(prompt, layers=layers_of(engine), experts=has_experts)
    for ours, theirs in zip(found.values, expected, strict=True):
        if theirs is not None:
            assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, float(np.abs(theirs).max()))
    assert (found.experts is not None) == has_experts


class ChoicesOfExperts(TorchFunctionMode):
    """Records what `torch.topk` finds among the scores of all experts, which is how the routers of Transformers choose."""

    def __init__(self, count: int) -> None:
        """`count`: of the experts that a token has."""
        super().__init__()
        self.count, self.found = count, list[torch.Tensor]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk) and result.indices.shape[-1] == self.count:
            self.found.append(result.indices.reshape(-1, self.count))
        return result


MIXTURES = [
    *("olmoe", "mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "granitemoe", "glm4-moe", "deepseek-v3", "lfm2-moe", "llama4", "jamba"),
    *("deepseek-v2-lite", "glm4-moe-lite", "minimax-m2", "dots1", "exaone-moe", "ernie4-5-moe", "cohere2-moe", "granite4-moe-nope"),
    *("mimo-v2", "qwen3.5-moe", "minimax", "nemotron-h-moe", "gemma4-experts", "kimi-linear"),
]


@pytest.mark.parametrize("name", slow_but([MOE], MIXTURES))
async def test_experts_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    case = CASES[name]
    prompt = reference(case, tmp_path).prompts[-1]
    for dtype in ("float32", "bfloat16"):
        async with AsyncEngine(config_of(case, tmp_path, "cpu", dtype=dtype)) as engine:
            found = (await engine.hidden_states(prompt, experts=True)).experts
        assert found is not None
        layers, tokens, count = found.shape
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        with torch.no_grad(), ChoicesOfExperts(count) as told:
            model(torch.tensor([prompt]), use_cache=False)
        chosen = [one for one in told.found if len(one) == tokens]
        chosen = chosen[len(chosen) // layers - 1 :: len(chosen) // layers]  # behind what some choose groups by
        expected = np.sort(torch.stack(chosen).numpy())  # some routers do not sort theirs
        assert np.count_nonzero(np.sort(found) != expected) <= (0 if dtype == "float32" else found.size // 5)


async def test_nothing_else_changes_a_bit(engine: AsyncEngine) -> None:
    """Chunks, what is cached, other requests with other layers, and ranks."""
    layers = layers_of(engine)
    expected = (await engine.hidden_states(PROMPT, layers=layers, cache_salt="alone")).values
    assert np.array_equal(expected[-1][-1], (await engine.embed(PROMPT, pooling="last", normalize=False)).values)
    for first in (0, 5, len(expected[0]) - 1):
        assert np.array_equal((await engine.hidden_states(PROMPT, layers=layers, first_token=first)).values, expected[:, first:])
    for options in (
        {"max_num_batched_tokens": 7, "max_num_seqs": 4},
        {"tensor_parallel_size": 2},
        {"speculative": "draft", "speculative_model": "demo"},
    ):
        async with AsyncEngine("demo", **CONFIG, **options) as other:
            wanted = [other.hidden_states(PROMPT, layers=layers[at:]) for at in (0, 1, len(layers) - 1)]
            beside = [other.generate(PROMPT, SamplingParams(max_tokens=20, seed=seed)) for seed in range(2)]
            told = [other.embed(PROMPT, pooling="mean"), other.score("It is", [" a truth"])]
            found = await asyncio.gather(*wanted, *told, *beside)
            for at, one in zip((0, 1, len(layers) - 1), found[:3], strict=True):
                assert np.array_equal(one.values, expected[at:])
            assert [one.token_ids for one in found[5:]] == [
                (await engine.generate(PROMPT, SamplingParams(max_tokens=20, seed=seed))).token_ids for seed in range(2)
            ]


async def test_new_weights_are_seen(tmp_path: pathlib.Path) -> None:
    case = CASES[MOE]
    prompt = reference(case, tmp_path / "one").prompts[-1]
    other = case.make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    other.save_pretrained(tmp_path / "other")
    async with AsyncEngine(config_of(case, tmp_path / "one", "cpu")) as engine:
        before = await engine.hidden_states(prompt, layers=(0, 1, -1), experts=True)
        await engine.update_weights(tmp_path / "other")
        after = await engine.hidden_states(prompt, layers=(0, 1, -1), experts=True)
    async with AsyncEngine(config_of(case, tmp_path / "other", "cpu")) as engine:
        expected = await engine.hidden_states(prompt, layers=(0, 1, -1), experts=True)
    assert not np.array_equal(before.values, after.values)
    assert np.array_equal(after.values, expected.values)
    assert np.array_equal(after.experts, expected.experts)


async def test_over_grpc_and_a_router(engine: AsyncEngine, tmp_path: pathlib.Path) -> None:
    case = CASES[MOE]
    prompt = reference(case, tmp_path).prompts[-1]
    async with (
        AsyncEngine(config_of(case, tmp_path, "cpu")) as moe,
        serving(moe) as serve,
        AsyncClient(serve.server.address) as client,
        Router(backends=(serve.server.address,)) as router,
    ):
        wanted: dict[str, Any] = {"layers": (2, -1), "first_token": 1, "experts": True}
        expected = await moe.hidden_states(prompt, **wanted)
        for far in (client, router):
            assert far.model_info.num_layers == moe.model_info.num_layers
            found = await far.hidden_states(prompt, **wanted)
            assert np.array_equal(found.values, expected.values)
            assert np.array_equal(found.experts, expected.experts)
            plain = await far.embed(prompt, pooling="tokens", dimensions=8)
            assert plain.values.shape == (1, len(prompt), 8)
            np.testing.assert_allclose(np.linalg.norm(plain.values, axis=-1), 1, atol=1e-6)


async def test_large_ones_come_in_pieces(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "_PIECE_BYTES", 1000)
    async with serving(engine, max_message_bytes=4096) as serve, AsyncClient(serve.server.address) as client:
        expected = await engine.hidden_states(PROMPT, layers=layers_of(engine))
        assert expected.values.nbytes > 50 * 1000
        assert np.array_equal((await client.hidden_states(PROMPT, layers=layers_of(engine))).values, expected.values)
        for fields, told in (
            ({"layers": (77,)}, "layers: 77 is not in"),
            ({"first_token": 500}, "first_token: 500 is not in"),
            ({"cache_salt": "x" * 300}, "cache"),
        ):
            with pytest.raises(InvalidRequestError, match=told):
                await client.hidden_states(PROMPT, **fields)
        with pytest.raises(InvalidRequestError, match="prompt: token id 99999 is not in"):
            await client.hidden_states([5, 99999])


async def test_what_is_not_possible(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    most = engine.model_info.num_layers
    for fields, field, told in (
        ({"layers": (most + 1,)}, "layers", f"{most + 1} is not in \\[{-most - 1}, {most}\\]"),
        ({"layers": (-1, most)}, "layers", "names a layer twice"),
        ({"layers": ()}, "layers", "is not a list of one or more layers"),
        ({"layers": "1"}, "layers", "is not a list of layers"),
        ({"first_token": 500}, "first_token", "the prompt has 21 tokens"),
        ({"experts": True}, "experts", "the model has none"),
    ):
        with pytest.raises(InvalidRequestError, match=f"{field}.*{told}"):
            await engine.hidden_states(PROMPT, **fields)
    with pytest.raises(InvalidRequestError, match="go with tokens, not with last"):
        await engine.embed(PROMPT, layers=(1,))
    monkeypatch.setattr(requests, "MOST_STATE_VALUES", 21 * engine.model_info.hidden_size)
    assert (await engine.hidden_states(PROMPT)).values.shape[:2] == (1, 21)
    with pytest.raises(InvalidRequestError, match=r"layers.*2 of 21 tokens are .* numbers, more than"):
        await engine.hidden_states(PROMPT, layers=(0, 1))
    async with AsyncEngine("demo", **CONFIG, attention_backend="torch_native") as other:
        with pytest.raises(InvalidRequestError, match=r"pooling.*tokens needs the CPU kernels"):
            await other.hidden_states(PROMPT)
