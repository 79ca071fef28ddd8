"""Structured output through the whole engine: the bundled model, many requests at once."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace

import anyio
import grammar_decoding
import pytest
from every_draft import use_every_draft
from hang_guard import HANG_SECONDS
from oracle_engine import idle
from slow_cases import NOT_IN_CI

from aengine import AsyncEngine, Completion, FinishReason, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.sampling.grammar import CompiledGrammar
from aengine.structured.grammars import MAX_THREADS, GrammarCompiler

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.anyio
PROMPT = "It is a truth universally acknowledged: "


def wanting(**constraint: object) -> SamplingParams:
    return SamplingParams(structured_output=StructuredOutput(**constraint), temperature=1.0, top_p=1.0, max_tokens=500)  # type: ignore[arg-type]


async def generate_all(engine: AsyncEngine, wanted: list[SamplingParams]) -> list[Completion]:
    results: dict[int, Completion] = {}

    async def run(i: int) -> None:
        results[i] = await engine.generate(PROMPT, replace(wanted[i], seed=i))

    async with anyio.create_task_group() as group:
        for i in range(len(wanted)):
            group.start_soon(run, i)
    return [results[i] for i in range(len(wanted))]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@NOT_IN_CI
async def test_300_schemas() -> None:
    schemas = [grammar_decoding.random_schema(seed) for seed in range(300)]
    async with AsyncEngine("demo", kv_cache_memory=128 << 20) as engine:
        completions = await generate_all(engine, [wanting(json_schema=schema) for schema in schemas])
        ended = [one.finish_reason is FinishReason.EOS for one in completions]
        assert sum(ended) >= 285, "the others ran into max_tokens in a run of white space"
        for schema, one, whole in zip(schemas, completions, ended, strict=True):
            if whole:
                jsonschema.validate(json.loads(one.text), schema)
        assert idle(engine)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_regex_and_choice_match_exactly() -> None:
    regex, choices = r"[A-Z][a-z]{2,8} (is|was) [0-9]{1,3} years old\.", ("yes", "no", "I do not know")
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        for one in await generate_all(engine, [wanting(regex=regex)] * 20):
            assert re.fullmatch(regex, one.text), one.text
            assert one.finish_reason is FinishReason.EOS
        for one in await generate_all(engine, [wanting(choice=choices)] * 20):
            assert one.text in choices


async def test_several_sequences_beside_free_requests() -> None:
    async with AsyncEngine("demo", dtype="float32", kv_cache_memory=64 << 20) as engine:
        free = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
        alone = await engine.generate(PROMPT, free)
        results: list[Completion] = []

        async def run(params: SamplingParams) -> None:
            results.append(await engine.generate(PROMPT, params))

        async with anyio.create_task_group() as group:
            group.start_soon(run, free)
            group.start_soon(run, replace(wanting(regex="[a-f]{5,20}"), n=4, seed=1))
        free_one = next(one for one in results if not one.others)
        first = next(one for one in results if one.others)
        assert free_one.token_ids == alone.token_ids
        texts = [first.text, *(one.text for one in first.others)]
        assert all(re.fullmatch("[a-f]{5,20}", text) for text in texts)
        assert len(set(texts)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_preemption_rebuilds_the_grammar() -> None:
    bytes_per_page = 5 * 2 * 2 * 64 * 16 * 4  # layers, K and V, heads, head_dim, tokens, float32
    wanted = [replace(wanting(regex="([a-z]{6,9}[,.] ){35,40}"), max_tokens=200, repetition_penalty=1.1)] * 6
    texts = []
    for num_pages in (17 + 16, 2000):
        async with AsyncEngine("demo", dtype="float32", max_model_len=256, kv_cache_memory=num_pages * bytes_per_page) as engine:
            completions = await generate_all(engine, wanted)
            assert (engine.stats().preemptions > 0) == (num_pages < 2000)
            texts.append([one.text for one in completions])
    assert texts[0] == texts[1]


async def test_a_bad_schema_disturbs_nobody() -> None:
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        other = engine.stream(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
        with pytest.raises(InvalidRequestError) as caught:
            await engine.generate(PROMPT, wanting(json_schema={"type": "nonsense"}))
        assert caught.value.field == "structured_output.json_schema"
        assert "nonsense" in str(caught.value)
        assert len([token async for token in other]) == 20
        await other.aclose()
        assert idle(engine)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_grammar_does_not_wait_for_those_of_requests_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one, compiled, gone = GrammarCompiler._compile, list[StructuredOutput](), threading.Event()
    slow = wanting(regex="b")

    def count(self: GrammarCompiler, wanted: StructuredOutput, **options: bool) -> CompiledGrammar:
        compiled.append(wanted)
        assert wanted != slow.structured_output or gone.wait(HANG_SECONDS)
        return compile_one(self, wanted, **options)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        await engine.generate(PROMPT, wanting(regex="a"))
        streams = [engine.stream(PROMPT, slow) for _ in range(200)]
        for stream in streams:
            stream.cancel()
        for stream in streams:
            await stream.aclose()
        gone.set()
        await engine.generate(PROMPT, wanting(regex="[ab]+c"))
        assert len(compiled) <= 2 + MAX_THREADS, "those that had begun alone"
        assert engine._core.serving.registry._grammars._threads._work_queue.empty()
        assert idle(engine)


async def test_leaving_while_the_grammar_compiles() -> None:
    async with AsyncEngine("demo", kv_cache_memory=64 << 20) as engine:
        async with engine.stream(PROMPT, wanting(json_schema={"type": "array", "items": {"enum": list(range(300))}})):
            pass
        assert idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_forced_text_is_drafted_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_draft(monkeypatch)
    names = ("date_of_birth", "place_of_residence", "occupation_category")
    schema = {"type": "object", "properties": {name: {"enum": [1, 2]} for name in names}, "required": names, "additionalProperties": False}
    wanted = [replace(wanting(json_schema=schema), temperature=0.0, max_tokens=60)] * 4
    completions = []
    for speculative in ("off", "ngram"):
        async with AsyncEngine("demo", dtype="float32", speculative=speculative, max_drafts=16, kv_cache_memory=64 << 20) as engine:
            # A salt each, so that no n-gram of an answer before drafts what the grammar would.
            completions.append([await engine.generate(PROMPT, one, cache_salt=str(number)) for number, one in enumerate(wanted)])
    off, on = completions
    assert [one.token_ids for one in on] == [one.token_ids for one in off]
    usage = [next(each for each in one.usage.drafts if each.drafter == "grammar") for one in on]
    assert usage[0].accepted > 0
    assert usage[-1].accepted > usage[0].accepted, "how the model cuts the text was learned"
    assert usage[-1].accepted > 0.9 * usage[-1].drafted
