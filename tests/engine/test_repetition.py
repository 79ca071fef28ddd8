"""`stop_on_repetition`: a sequence ends with the first token with which its output is as many copies of the same tokens as asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aengine import AsyncEngine, Completion, FinishReason, InvalidRequestError, RepetitionStop, SamplingParams
from aengine.scheduler.sequence import OutputCycles

EVERY = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, detokenize=False)
PROMPTS = [[5 + 17 * number, 40, 3 + number] for number in range(12)]


def end_of(output: Sequence[int], stop: RepetitionStop, first: int = 0) -> int | None:
    """How many tokens of the output there are when it ends: as the docstring says, and from the token `first` on."""
    for end in range(first + 1, len(output) + 1):
        for length in range(stop.min_cycle, stop.max_cycle + 1):
            size = length * stop.min_count
            if size <= end and list(output[end - size : end]) == list(output[end - size : end - size + length]) * stop.min_count:
                return end
    return None


def test_ends_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        stop = RepetitionStop(max_cycle=int(rng.integers(1, 9)), min_count=int(rng.integers(2, 5)))
        stop = RepetitionStop(max_cycle=stop.max_cycle, min_cycle=int(rng.integers(1, stop.max_cycle + 1)), min_count=stop.min_count)
        output = rng.integers(0, 2 + int(rng.integers(3)), 60).astype(np.int32)
        known = int(rng.integers(0, 20))
        least = int(rng.integers(0, 30))
        cycles = OutputCycles(stop, output[:known], least)
        ends = [at + 1 for at in range(known, len(output)) if cycles.add_token(int(output[at]))]
        expected = [end for end in range(max(known + 1, least), len(output) + 1) if end_of(output[:end], stop, end - 1) == end]
        assert ends == expected


def cycle(prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any) -> list[Completion]:
    async def run() -> list[Completion]:
        async with AsyncEngine("demo", dtype="float32", **options) as engine:
            return list(await asyncio.gather(*(engine.generate(list(prompt), params) for prompt in prompts)))

    return asyncio.run(run())


def with_stop(stop: RepetitionStop, **changes: Any) -> SamplingParams:
    given = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True, "detokenize": False, **changes}
    return SamplingParams(**given, stop_on_repetition=stop)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative": "ngram"},
        pytest.param({"speculative": "draft", "speculative_model": "demo"}, marks=pytest.mark.slow),
        {"max_num_seqs": 4, "kv_cache_memory": "4MiB"},
    ],
    ids=["plain", "ngram", "draft", "small"],
)
def test_outputs_end_where_they_repeat_themselves(options: dict[str, Any]) -> None:
    """With drafts, of which those behind the end are dropped, and after preemptions."""
    stop = RepetitionStop(max_cycle=24, min_count=3)
    whole = cycle(PROMPTS, EVERY)
    ends = [end_of(each.token_ids, stop) for each in whole]
    assert sum(end is not None for end in ends) > 3, "greedy outputs of the demo model repeat themselves"
    for output, known, end in zip(cycle(PROMPTS, with_stop(stop), **options), whole, ends, strict=True):
        assert output.token_ids == known.token_ids[:end]
        assert output.finish_reason is (FinishReason.MAX_TOKENS if end is None else FinishReason.REPETITION)
        assert output.finish_reason.cuts
        assert output.usage.completion_tokens == len(output.token_ids)


def test_known_outputs_least_tokens_and_other_ends() -> None:
    stop = RepetitionStop(max_cycle=24, min_count=3)
    whole = next(each for each in zip(PROMPTS, cycle(PROMPTS, EVERY), strict=True) if end_of(each[1].token_ids, stop) is not None)
    prompt, tokens = whole[0], whole[1].token_ids
    end = end_of(tokens, stop)
    assert end is not None

    async def run() -> None:
        async with AsyncEngine("demo", dtype="float32") as engine:
            for known in (1, end - 1, end - 2):
                again = await engine.generate(prompt, with_stop(stop, max_tokens=350), known_outputs=[list(tokens[:known])])
                assert (again.token_ids, again.finish_reason) == (tokens[known:end], FinishReason.REPETITION)
            later = await engine.generate(prompt, with_stop(stop, min_tokens=end + 7))
            assert (later.token_ids, later.finish_reason) == (tokens[: end + 7], FinishReason.REPETITION)
            at_limit = await engine.generate(prompt, with_stop(stop, max_tokens=end))
            assert at_limit.finish_reason is FinishReason.REPETITION
            by_token = await engine.generate(prompt, with_stop(stop, stop_token_ids=[tokens[end - 1]]))
            assert by_token.finish_reason is FinishReason.STOP_TOKEN
            async with engine.stream(prompt, with_stop(stop, max_tokens=350)) as stream:
                begun = [(await stream.__anext__()).token_id for _ in range(end // 2)]
                rest = [token async for token in stream.fork()]
                assert (*begun, *(token.token_id for token in rest)) == tokens[:end]
                assert rest[-1].finish_reason is FinishReason.REPETITION
            several = await engine.generate(prompt, with_stop(stop, temperature=0.05, n=4, seed=1, detokenize=True))
            for each in (several, *several.others):
                assert (each.finish_reason is FinishReason.REPETITION) is (end_of(each.token_ids, stop) == len(each.token_ids))

    asyncio.run(run())


def test_what_is_refused() -> None:
    for given, sentence in (
        ({"max_cycle": 0}, "stop_on_repetition: max_cycle: 0 is not in \\[1, 1024\\]"),
        ({"min_count": 1}, "stop_on_repetition: min_count: 1 is not in \\[2, 4096\\]"),
        ({"min_cycle": 9, "max_cycle": 8}, "stop_on_repetition: min_cycle: 9 is more than max_cycle, 8"),
        ({"cycle": 9}, "stop_on_repetition: has no field 'cycle'; its fields are max_cycle, min_cycle, min_count"),
        (7, "stop_on_repetition: a int is not RepetitionStop"),
    ):
        with pytest.raises(InvalidRequestError, match=sentence):
            SamplingParams(stop_on_repetition=given)  # type: ignore[arg-type]
    assert SamplingParams(stop_on_repetition={"min_count": 3}).stop_on_repetition == RepetitionStop(min_count=3)  # type: ignore[arg-type]
