"""Random requests that are cut short and go on elsewhere: what each got as a whole is what the rest must be."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import anyio
import pytest
from speculation_cases import CONTEXT, Case, random_cases, uncut

from aengine import Completion, EngineBase, Reasoning, StructuredOutput
from aengine.api.outputs import Token
from aengine.api.stream import TokenStream

WIDE = "Ünïcödé 👩\u200d👩\u200d👧 漢字 and naïve "  # which the model goes on with pieces of characters
REASONINGS = (
    Reasoning(closing="</think>\n", opened=True, max_tokens=5),
    Reasoning(closing=".", opened=True, max_tokens=60),
    Reasoning(closing="e ", opened=True),
    Reasoning(opening="<think>", closing="</think>", max_tokens=3, opened=True, answer="So: "),
)


@dataclass
class Got:
    """What a request got, by sequence."""

    tokens: list[list[Token]]
    completion: Completion
    error: str | None = None


@dataclass
class Cut:
    """Where a request was cut, and what is to come."""

    known: list[list[int] | None]
    rest: list[list[Token]] = field(default_factory=list)


def requests(seed: int, count: int, *, remote: bool = False) -> list[tuple[Case, dict[str, Any]]]:
    """With their options. `remote`: without what cannot be sent to a server."""
    rng = random.Random(seed)
    found = []
    for case in uncut(random_cases(seed, count)):
        params, prompt = case.params, case.prompt
        if rng.random() < 0.2:
            prompt, params = WIDE, replace(params, temperature=1.7 if params.temperature != 0.0 else 0.0)
        if rng.random() < 0.15 and params.detokenize is not False and params.max_tokens:
            answer = StructuredOutput(regex="[a-z]{2,9}( [a-z]{2,9}){1,3}\\.") if rng.random() < 0.5 else params.structured_output
            params = replace(params, reasoning=rng.choice(REASONINGS), structured_output=answer, ignore_eos=False, max_tokens=40)
        if remote:
            params = replace(params, logits_processors=())
        if isinstance(prompt, str) and len(prompt) > CONTEXT // 2:
            prompt = prompt[: CONTEXT // 2]
        found.append((replace(case, prompt=prompt, params=params), {"adapter": "lora"} if rng.random() < 0.15 else {}))
    return found


def cut(whole: Got, rng: random.Random) -> Cut | None:
    """At a random place of each sequence; some have ended. None: nothing is left to come."""
    known: list[list[int] | None] = []
    rest: list[list[Token]] = []
    for tokens in whole.tokens:
        ended = bool(tokens) and tokens[-1].finish_reason is not None
        most = len(tokens) - (ended and tokens[-1].token_id >= 0)
        if ended and rng.random() < 0.25:
            known.append(None)
            rest.append([])
            continue
        at = rng.choice([0, most, rng.randint(0, most), rng.randint(0, most)])
        known.append([token.token_id for token in tokens[:at] if token.token_id >= 0])
        rest.append(tokens[at:])
    return None if all(ids is None for ids in known) else Cut(known, rest)


async def get(engine: EngineBase, case: Case, options: Mapping[str, Any]) -> Got:
    tokens: list[list[Token]] = [[] for _ in range(case.params.n)]
    error = None
    async with engine.stream(case.prompt, case.params, **options) as stream:
        try:
            async for token in stream:
                tokens[token.index].append(token)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        return Got(tokens, stream.completion(), error)


async def get_all(engine: EngineBase, wanted: Sequence[tuple[Case, Mapping[str, Any]]], at_once: int) -> list[Got]:
    found: list[Got | None] = [None] * len(wanted)
    limiter = anyio.Semaphore(at_once)

    async def run(number: int) -> None:
        async with limiter:
            found[number] = await get(engine, *wanted[number])

    async with anyio.create_task_group() as group:
        for number in range(len(wanted)):
            group.start_soon(run, number)
    return [one for one in found if one is not None]


async def check_rests(
    wholes_of: EngineBase, rests_of: EngineBase, wanted: Sequence[tuple[Case, dict[str, Any]]], seed: int, at_once: int
) -> int:
    """Every request as a whole at one engine, and its rest at another, `at_once` at a time. Returns how many sequences went on."""
    wholes = await get_all(wholes_of, wanted, at_once)
    rng = random.Random(seed)
    cuts = [cut(whole, rng) for whole in wholes]
    asked = [
        (number, (case, {**options, "known_outputs": one.known}))
        for number, ((case, options), one) in enumerate(zip(wanted, cuts, strict=True))
        if one is not None and not (wholes[number].error and case.params.n > 1)  # of which any sequence may have failed first
    ]
    rests = await get_all(rests_of, [request for _, request in asked], at_once)
    for (number, (case, _)), rest in zip(asked, rests, strict=True):
        one = cuts[number]
        assert one is not None
        try:
            check_rest(case, wholes[number], one, rest)
        except AssertionError:
            print(f"request {number} of seed {seed}, cut at {one.known}: {wanted[number]}")
            raise
    return sum(ids is not None and len(ids) > 0 for number, _ in asked for ids in cuts[number].known)  # type: ignore[union-attr]


async def check_forks(engine: EngineBase, wanted: Sequence[tuple[Case, dict[str, Any]]], seed: int, at_once: int) -> int:
    """Every request, `at_once` at a time, with forks of one of its sequences at random places, while it runs and when it has ended: these
    bring what it brings behind them. Returns how many forks there were."""
    rng, limiter, count = random.Random(seed), anyio.Semaphore(at_once), 0

    async def run(case: Case, options: Mapping[str, Any]) -> None:
        nonlocal count
        forks: list[tuple[int, int, TokenStream]] = []
        params, error = case.params, None
        tokens: list[list[Token]] = [[] for _ in range(params.n)]
        async with limiter, AsyncExitStack() as opened:
            stream = await opened.enter_async_context(engine.stream(case.prompt, params, **options))
            try:
                async for token in stream:
                    tokens[token.index].append(token)
                    if rng.random() < 0.1 and len(forks) < 2 and token.finish_reason is None:
                        at = rng.choice([len(tokens[token.index]), rng.randint(0, len(tokens[token.index]))])
                        forks.append((token.index, at, await opened.enter_async_context(stream.fork(at, index=token.index))))
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
            index = rng.randrange(params.n)
            most = sum(token.token_id >= 0 for token in tokens[index][:-1])
            if error is None:
                at = rng.randint(0, most)
                ended = engine.fork(stream.request_id, at, params.of_sequence(index) if params.seed else None, index=index)
                forks.append((index, at, await opened.enter_async_context(ended)))
            whole = stream.completion()
            for index, at, fork in forks:
                found: list[Token] = []
                failed = await _read_into(fork, found)
                if failed is not None:
                    assert failed == error
                    continue
                expected = tokens[index][at:]
                assert error is not None or [_exact(token)[:2] for token in found] == [_exact(token)[:2] for token in expected], (index, at)
                assert fork.completion().finish_reason == (whole, *whole.others)[index].finish_reason or error is not None
                count += 1

    async with anyio.create_task_group() as group:
        for case, options in wanted:
            group.start_soon(run, case, options)
    return count


async def _read_into(stream: TokenStream, found: list[Token]) -> str | None:
    """Returns the error that it ends with."""
    try:
        async for token in stream:
            found.append(token)
    except Exception as failure:
        return f"{type(failure).__name__}: {failure}"
    return None


def check_rest(case: Case, whole: Got, one: Cut, rest: Got) -> None:
    assert rest.error == whole.error
    for index, (found, expected) in enumerate(zip(rest.tokens, one.rest, strict=True)):
        assert [_exact(token) for token in found] == [_exact(token) for token in expected], index
        assert _floats(found) == pytest.approx(_floats(expected), abs=1e-4)
    mine, other = rest.completion, whole.completion
    assert _prompt(mine) == pytest.approx(_prompt(other), abs=1e-4)
    left_out = sum(
        token.token_id >= 0 for ids, tokens in zip(one.known, whole.tokens, strict=True) if ids is None for token in tokens
    )  # known nowhere
    assert mine.usage.prompt_tokens == other.usage.prompt_tokens
    assert mine.usage.cached_prompt_tokens <= mine.usage.prompt_tokens
    assert mine.usage.completion_tokens == other.usage.completion_tokens - left_out
    if not left_out:
        assert mine.usage.reasoning_tokens == other.usage.reasoning_tokens
    for ids, found_one, tokens in zip(one.known, (mine, *mine.others), one.rest, strict=True):
        assert found_one.text == "".join(token.text for token in tokens)
        assert (found_one.finish_reason is None) == (ids is None)


def _exact(token: Token) -> tuple[Any, ...]:
    top = None if token.top_logprobs is None else list(token.top_logprobs)
    return token.token_id, token.text, token.rank, top, token.finish_reason, token.stop_reason


def _floats(tokens: Sequence[Token]) -> list[float]:
    return [x for one in tokens if one.logprob is not None for x in (one.logprob, *(one.top_logprobs or {}).values())]


def _prompt(completion: Completion) -> list[float]:
    found = completion.prompt_logprobs or ()
    return [x for one in found if one is not None for x in (one.logprob, one.rank, *one.top_logprobs.values())]
