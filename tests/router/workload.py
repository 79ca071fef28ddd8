"""Seeded requests of every kind, and what they bring."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio

from aengine import Completion, EngineBase, Reasoning, SamplingParams, StructuredOutput, Token

TEXTS = (
    *("It is a truth universally acknowledged, that", "In the beginning", "And it came to pass", "My dear Mr. Bennet,"),
    *("Call me", "The LORD said unto Moses", "She was not at all afraid of being", "Emma Woodhouse, handsome, clever, and rich,"),
)
SCHEMA = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}, "required": ["name"]}'
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9},
    {"top_k": 20, "min_p": 0.02},
    {"temperature": 1.3, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    {"n": 3, "temperature": 0.9},
    {"n": 2, "stop": (",",), "min_tokens": 5},
    {"stop": ("the LORD", " and "), "include_stop_str_in_output": True, "min_tokens": 10},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 0},
    {"structured_output": StructuredOutput(regex=r"[a-z]{30,60}( [a-z]{3,9}){5,12}")},
    {"structured_output": StructuredOutput(json_schema=SCHEMA), "temperature": 1.2},
    {"structured_output": StructuredOutput(choice=("yes, I think so", "no, never", "perhaps tomorrow"))},
    {"bad_words": ("the", "LORD"), "logit_bias": {11: -5.0, 273: 3.0}},
    {"banned_token_ids": (11, 13), "ignore_eos": True},
    {"reasoning": Reasoning(opening="<think>", closing="</think>", opened=True, max_tokens=25)},
    {"max_drafts": 0, "temperature": 0.5},
)


@dataclass(frozen=True)
class Case:
    prompt: Any
    params: SamplingParams


@dataclass
class Result:
    """What came of a stream."""

    tokens: list[list[Token]]  # by sequence
    completion: Completion
    first: float  # seconds before the first token
    pause: float  # the longest between two tokens

    def facts(self) -> Any:
        """What must be the same wherever it is computed."""
        one = self.completion
        return (
            [
                [(token.token_id, token.text, token.finish_reason, token.stop_reason, token.rank, _rounded(token)) for token in tokens]
                for tokens in self.tokens
            ],
            [
                None if entry is None else (entry.token_id, round(entry.logprob, 3), list(entry.top_logprobs)[:1])
                for entry in one.prompt_logprobs or ()
            ],
            (one.usage.prompt_tokens, one.usage.completion_tokens),
        )


def _rounded(token: Token) -> Any:
    return None if token.logprob is None else round(token.logprob, 3)


def make_cases(count: int, seed: int, most_tokens: int = 150) -> list[Case]:
    random_ = random.Random(seed)
    cases = []
    for index in range(count):
        fields: dict[str, Any] = {"max_tokens": random_.randrange(most_tokens // 3, most_tokens), **KINDS[index % len(KINDS)]}
        prompt: Any = random_.choice(TEXTS)
        form = random_.randrange(4)
        if form == 0:
            prompt = [random_.randrange(4, 4000) for _ in range(random_.randrange(1, 120))]
        elif form == 1:
            prompt = [{"role": "user", "content": prompt}]
        cases.append(Case(prompt, SamplingParams(seed=random_.randrange(2**63), **fields)))
    return cases


async def run_case(engine: EngineBase, case: Case, on_token: Callable[[], object] = lambda: None) -> Result:
    tokens: list[list[Token]] = [[] for _ in range(case.params.n)]
    longest, first = 0.0, None
    begin = last = time.monotonic()
    async with engine.stream(case.prompt, case.params) as stream:
        async for token in stream:
            now = time.monotonic()
            if first is None:
                first = now - begin
            else:
                longest = max(longest, now - last)
            last = now
            on_token()
            tokens[token.index].append(token)
    return Result(tokens, stream.completion(), first or 0.0, longest)


async def run_all(engine: EngineBase, cases: list[Case], at_once: int = 32) -> list[Result]:
    results: dict[int, Result] = {}
    limit = anyio.CapacityLimiter(at_once)

    async def run(index: int) -> None:
        async with limit:
            results[index] = await run_case(engine, cases[index])

    async with anyio.create_task_group() as group:
        for index in range(len(cases)):
            group.start_soon(run, index)
    return [results[index] for index in range(len(cases))]
