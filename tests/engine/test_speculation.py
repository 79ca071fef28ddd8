"""Speculation changes nothing of what requests get: tokens, texts, ends, errors and logprobs are those without it.

Random requests over all sampling parameters; their drafts are right, wrong, half right and beyond their ends.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
from every_draft import use_every_draft
from slow_cases import slow_but
from speculation_cases import (
    CONTEXT,
    TEXTS,
    Case,
    KnownDrafts,
    Outcome,
    assert_same,
    beyond_stops,
    outcomes,
    random_cases,
    uncut,
    use_drafter,
)

from aengine import AsyncEngine, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
# A crowd that is preempted, and parked where its readers are slow.
CROWD = {"page_size": 4, "max_num_seqs": 24, "max_num_batched_tokens": 128, "max_unread_tokens": 6}
_expected: dict[object, tuple[list[Outcome], list[Outcome]]] = {}


def engine_of(numbers: str, **options: Any) -> AsyncEngine:
    return AsyncEngine("demo", **{"max_model_len": CONTEXT, "max_drafts": 6, **NUMBERS[numbers], **options})


async def expected_of(drawn: tuple[int, int, bool], numbers: str) -> tuple[list[Outcome], list[Outcome]]:
    """What the requests get without speculation; and what those get that stop, if they do not."""
    key = drawn, numbers
    if key not in _expected:
        cases = random_cases(drawn[0], drawn[1], processed=drawn[2])
        async with engine_of(numbers) as engine:
            _expected[key] = await outcomes(engine, uncut(cases), 32), await outcomes(engine, beyond_stops(cases), 32)
    return _expected[key]


PAGE_BYTES = {"float32": 20480, "bfloat16": 10240, "int8": 5440}
FEW, DRAWN = (12, 50, True), (1, 30, False)  # seed, count, processed
SOME, MANY, MANY_DRAWN = (6, 200, True), [(seed, 250, True) for seed in range(2, 4)], (7, 200, False)
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8", "threads": 2},  # with two threads steps run ahead
}
DRAFTERS = ["known", "ngram", "auto", "alone"]
QUICK = [*((drafter, "float32", FEW) for drafter in DRAFTERS), ("known", "bfloat16", FEW), ("known", "float32", DRAWN)]
SLOW = [
    *(("known", "float32", drawn) for drawn in [*MANY, MANY_DRAWN]),
    *itertools.product(["known"], ["bfloat16", "int8"], [MANY[0], MANY_DRAWN]),
    *((drafter, "bfloat16", SOME) for drafter in ["draft", *DRAFTERS[1:]]),
    ("auto", "int8", SOME),
]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("drafter", "numbers", "drawn"), slow_but(QUICK, [*QUICK, *SLOW]))
async def test_requests_get_the_same(drafter: str, numbers: str, drawn: tuple[int, int, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """`drafter`: known has drafts of what is known to come, alone too, for one request after another; of draft and auto the model itself
    is the draft model."""
    cases = random_cases(drawn[0], drawn[1], processed=drawn[2])
    expected, further = await expected_of(drawn, numbers)
    use_every_draft(monkeypatch)
    options = {"speculative": "ngram", "kv_cache_memory": 80 * PAGE_BYTES[numbers], **CROWD}
    if drafter in ("known", "alone"):
        use_drafter(monkeypatch, KnownDrafts([*expected, *further], random.Random(drawn[0])))
    elif drafter in ("draft", "auto"):
        options |= {"speculative": drafter, "speculative_model": "demo"}
        options["kv_cache_memory"] *= 2
    async with engine_of(numbers, **options) as engine:
        found = await outcomes(engine, cases, 1 if drafter == "alone" else 32)
        stats = engine.stats()
    assert_same(cases, found, expected)
    least = len(cases) / (4 if drafter == "ngram" else 1)
    assert stats.accepted_draft_tokens > least
    assert stats.draft_tokens - stats.accepted_draft_tokens > least
    if drafter != "alone" and len(cases) >= SOME[1]:  # of few it depends on when they come
        assert stats.preemptions


@pytest.mark.parametrize("drafter", ["known", "draft"])
async def test_right_drafts_are_accepted(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is its own draft model draws the same tokens with the same noise."""
    sampled = [SamplingParams(seed=seed, temperature=seed % 3 / 2, max_tokens=20, ignore_eos=True) for seed in range(5)]
    cases = [Case(text, params) for text, params in zip(TEXTS, sampled, strict=True)]
    use_every_draft(monkeypatch)
    options = {"speculative": "draft", "speculative_model": "demo"} if drafter == "draft" else {"speculative": "ngram"}
    if drafter == "known":
        async with engine_of("float32") as engine:
            expected = await outcomes(engine, cases, 8)
        use_drafter(monkeypatch, KnownDrafts(expected))
    async with engine_of("float32", **options) as engine:
        await outcomes(engine, cases, 8)
        stats = engine.stats()
    assert stats.accepted_draft_tokens == stats.draft_tokens > 60


async def test_what_is_given_as_draft_context_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first token on; of another text, and where there are no n-gram drafts, nothing changes but the drafts."""
    use_every_draft(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    async with engine_of("float32") as engine:
        plain = await engine.generate(TEXTS[0], params)
        assert (await engine.generate(TEXTS[0], replace(params, draft_context=plain.text))).token_ids == plain.token_ids
    accepted = {}
    for name, context in (("none", ()), ("its output", (plain.text,)), ("others", (TEXTS[1], TEXTS[2]))):
        async with engine_of("float32", speculative="ngram") as engine:
            found = await engine.generate(TEXTS[0], replace(params, draft_context=context))
        assert found.token_ids == plain.token_ids
        accepted[name] = sum(one.accepted for one in found.usage.drafts)
    assert accepted["its output"] > max(30, accepted["none"], accepted["others"])
