"""Draft heads in the engine: outputs are those without them, and usage names where drafts came from."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
from every_draft import use_every_draft
from head_models import Drafting, eagle, mtp

from aengine import AsyncEngine, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("source", "make"),
    [("eagle", lambda path: eagle(path, own_ids=True)), ("mtp", lambda path: mtp(path, "mimo", from_last_token=True))],
)
async def test_outputs_are_those_without_a_head(
    source: str, make: Callable[[pathlib.Path], Drafting], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, greedy and drawn, with logprobs and several sequences of a request."""
    use_every_draft(monkeypatch)
    drafting = make(tmp_path)
    sampling = [
        SamplingParams(max_tokens=20, temperature=temperature, n=n, logprobs=logprobs, seed=7, ignore_eos=True)
        for temperature, n, logprobs in ((0.0, 1, None), (1.0, 1, 2), (0.8, 3, None))
    ]
    outputs, usages = [], []
    for options in ({}, drafting.options):
        async with AsyncEngine(str(drafting.model_dir), dtype="bfloat16", max_num_seqs=4, kv_cache_memory=64 << 20, **options) as engine:
            completions = [await engine.generate(list(range(1, 30)), params) for params in sampling]
        every = [each for completion in completions for each in (completion, *completion.others)]
        outputs.append([(each.token_ids, each.logprobs) for each in every])
        usages.append([completion.usage for completion in completions])
    assert outputs[0] == outputs[1]
    assert not any(usage.drafts for usage in usages[0])
    for usage in usages[1]:
        assert [drafts.drafter for drafts in usage.drafts] == [source]
        assert usage.accepted_draft_tokens == usage.draft_tokens or source == "eagle"  # which is random
