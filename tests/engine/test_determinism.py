"""What nothing changes: each row of the table in docs/determinism.md is a case here, and each column is compared bit by bit."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from every_draft import use_every_draft
from grpc_harness import Serving, serving
from http_harness import serving_http

from aengine import AsyncEngine, EngineBase, Router, SamplingParams
from aengine.api.engine import run_all
from aengine.client import AsyncClient
from aengine.engine.tier_traffic import TierTraffic
from aengine.kernels.cpu.compiler import supported_levels

pytestmark = pytest.mark.anyio
DOC = Path(__file__).resolve().parents[2] / "docs" / "determinism.md"
SETTINGS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "kv_cache_dtype": "int8"},
}
COMMON: dict[str, Any] = {"kv_cache_memory": 32 << 20, "max_model_len": 256}
SHARED = [5 + (31 * place) % 900 for place in range(50)]
PROMPTS: list[Any] = [
    [7],
    SHARED,
    [*SHARED, 9, 10],
    [*SHARED[:33], *range(700, 760)],
    "It is a truth universally acknowledged, that a single man",
    "And it came to pass",
]
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0.0, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=30, seed=3, temperature=0.9, top_p=0.9, logprobs=1),
    SamplingParams(max_tokens=20, seed=4, temperature=1.1, presence_penalty=0.5, repetition_penalty=1.1, logprobs=0, prompt_logprobs=0),
]


@dataclass(frozen=True)
class Outcome:
    """What came of one request, in the columns of the table."""

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[Any, ...]
    prompt_logprobs: tuple[Any, ...]


async def outcome(engine: EngineBase, prompt: Any, params: SamplingParams) -> Outcome:
    one = await engine.generate(prompt, params)
    told = tuple([(each.logprob, each.rank, tuple(each.top_logprobs.items())) for each in one.logprobs or ()])
    of_prompt = tuple([each and (each.logprob, each.rank, tuple(each.top_logprobs.items())) for each in one.prompt_logprobs or ()])
    return Outcome(one.token_ids, one.text, told, of_prompt)


async def facts(engine: EngineBase, *, at_once: int = 64) -> tuple[list[Outcome], list[bytes]]:
    """Of all prompts with all parameters, so many at a time; and of embeddings of the prompts."""
    wanted = [partial(outcome, engine, prompt, params) for params in PARAMS for prompt in PROMPTS]
    outcomes = await run_all(wanted, at_once)
    embeddings = [(await engine.embed(prompt, pooling=pooling)).values.tobytes() for prompt in PROMPTS[1:4] for pooling in ("mean", "last")]
    return outcomes, embeddings


@asynccontextmanager
async def engine_with(setting: str, **options: Any) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", **{**COMMON, **SETTINGS[setting], **options}) as engine:
        yield engine


async def with_options(setting: str, folder: Path, **options: Any) -> Any:
    async with engine_with(setting, **options) as engine:
        return await facts(engine)


async def preempted(setting: str, folder: Path) -> Any:
    async with engine_with(setting, max_model_len=128, kv_cache_memory=460_000 * (2 if setting == "float32" else 1)) as engine:
        found = await facts(engine)
        assert engine.stats().preemptions > 0
        return found


async def drafted(setting: str, folder: Path) -> Any:
    async with engine_with(setting, speculative="draft", speculative_model="demo") as engine:
        found = await facts(engine)
        assert engine.stats().accepted_draft_tokens > 0
        return found


async def from_tiers(setting: str, folder: Path) -> Any:
    """What one process has written to files, the next one reads."""
    for _ in range(2):
        async with engine_with(setting, kv_disk_path=str(folder)) as engine:
            found = await facts(engine)
            loaded = engine.stats().loaded_tokens
    assert loaded > 0
    return found


async def asleep(setting: str, folder: Path) -> Any:
    async with engine_with(setting) as engine:
        found = []
        async with anyio.create_task_group() as group:

            async def run() -> None:
                found.append(await facts(engine))

            group.start_soon(run)
            for _ in range(3):
                await anyio.sleep(0.01)
                await engine.sleep(1, "park")
                await engine.wake()
        return found[0]


async def over_grpc(setting: str, folder: Path) -> Any:
    async with engine_with(setting) as engine, serving(engine) as serve, AsyncClient(serve.server.address) as client:
        return await facts(client)


async def over_a_router(setting: str, folder: Path) -> Any:
    async with engine_with(setting) as engine, serving(engine) as one, serving(engine) as other, over(one, other) as router:
        return await facts(router)


def over(*serves: Serving) -> Router:
    return Router(backends=tuple([serve.server.address for serve in serves]))


CHANGES: Mapping[str, Callable[[str, Path], Awaitable[Any]]] = {
    "alone, or in any crowd": partial(with_options, max_num_seqs=3),
    "threads": partial(with_options, threads=1),
    "chunks of prompts": partial(with_options, max_num_batched_tokens=17, max_num_seqs=6),
    "prefix cache": partial(with_options, enable_prefix_cache=False),
    "page size": partial(with_options, page_size=4),
    "preemption": preempted,
    "drafts from the text": partial(with_options, speculative="ngram"),
    "drafts of a model": drafted,
    "tiers and a restart": from_tiers,
    "sleep": asleep,
    "gRPC": over_grpc,
    "replicas of a router": over_a_router,
    "tensor parallel ranks, exact": partial(with_options, tensor_parallel_size=2),
    "stages": partial(with_options, pipeline_parallel_size=2),
}
"""The rows of the table, and how each is made."""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def known() -> dict[str, Any]:
    """By setting, what comes of each request alone."""
    found = {}
    for setting in SETTINGS:
        async with engine_with(setting) as engine:
            found[setting] = await facts(engine, at_once=1)
    return found


QUICK = {("bf16", change) for change in CHANGES} | {
    ("int4", "alone, or in any crowd"),
    ("float32", "chunks of prompts"),
    ("int8", "preemption"),
}


@pytest.mark.parametrize(
    ("setting", "change"),
    [pytest.param(*pair, marks=() if pair in QUICK else pytest.mark.slow) for pair in ((s, c) for s in SETTINGS for c in CHANGES)],
)
async def test_nothing_changes_a_bit(
    setting: str, change: str, known: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_every_draft(monkeypatch)
    monkeypatch.setattr(TierTraffic, "_is_worth", lambda *given: True)  # however fast the model computes
    outcomes, embeddings = await CHANGES[change](setting, tmp_path)
    expected, of_embeddings = known[setting]
    for column in ("tokens", "text", "logprobs", "prompt_logprobs"):
        assert [getattr(one, column) for one in outcomes] == [getattr(one, column) for one in expected], column
    assert embeddings == of_embeddings


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_logprob_is_what_scoring_gives(setting: str, known: dict[str, Any]) -> None:
    """The logprob that a token was sampled with is, bit for bit, that which it has in a prompt."""
    async with engine_with(setting) as engine:
        for index, params in enumerate(PARAMS):
            for number, prompt in enumerate(PROMPTS[:4]):
                one = known[setting][0][index * len(PROMPTS) + number]
                (score,) = await engine.score(prompt, [list(one.tokens)])
                assert [each.logprob for each in score.tokens] == [logprob for logprob, *_ in one.logprobs]
                assert params.logprobs is not None


async def test_http_shows_the_same(known: dict[str, Any]) -> None:
    """Tokens and logprobs, as far as OpenAI's API tells them."""
    async with engine_with("bf16") as engine, serving_http(engine) as serve:
        for number, prompt in enumerate(PROMPTS):
            body = {"prompt": prompt, "max_tokens": 24, "temperature": 0.0, "logprobs": 2, "return_token_ids": True}
            (choice,) = (await serve.post("/v1/completions", body)).json()["choices"]
            one = known["bf16"][0][number]
            assert (tuple(choice["token_ids"]), choice["text"]) == (one.tokens, one.text)
            assert choice["logprobs"]["token_logprobs"] == [logprob for logprob, *_ in one.logprobs]


async def canonical_digests() -> dict[str, str]:
    """By setting, of what comes of each request with canonical numerics."""
    found = {}
    for setting in SETTINGS:
        async with engine_with(setting, numerics="canonical") as engine:
            found[setting] = hashlib.sha256(repr(await facts(engine)).encode()).hexdigest()
    return found


MACHINES = {
    "no vectors": {"AENGINE_CPU_LEVEL": "fused", "ATEN_CPU_CAPABILITY": "default"},
    "AVX2": {"AENGINE_CPU_LEVEL": "avx2", "ATEN_CPU_CAPABILITY": "avx2"},
    "another compiler": {"CXX": "clang++"},
}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
async def test_other_machines_give_the_same_bits(machine: str) -> None:
    """With canonical numerics: a process that knows fewer instructions, in our kernels and in torch, or has kernels of another compiler."""
    environ = MACHINES[machine]
    if not any(level.value == environ.get("AENGINE_CPU_LEVEL", level.value) for level in supported_levels()):
        pytest.skip("this CPU has no such level")
    if shutil.which(environ.get("CXX", "c++")) is None:
        pytest.skip("there is no such compiler")
    code = "import asyncio, json, test_determinism; print(json.dumps(asyncio.run(test_determinism.canonical_digests())))"
    other = await anyio.run_process([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environ})
    assert json.loads(other.stdout) == await canonical_digests()


# tests/attention/test_batch_invariant.py, tests/models/test_triton_families.py::test_batch_invariant_numerics
ON_CUDA = 'CUDA with `numerics="batch_invariant"`: crowds, chunks, prefix cache, preemption, drafts'


def test_the_table_has_these_rows() -> None:
    rows = re.findall(r"^\| ([^|]+?) +\|(.*)\|$", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    promised = [name for name, cells in rows if cells.replace(" ", "").split("|")[:5] == ["bits"] * 5]
    assert promised == [*CHANGES, ON_CUDA]
