"""Random requests over all sampling parameters, what they got, and a drafter that knows what they will get.

Speculation changes nothing of what a request gets: `outcomes` with it are those without it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from aengine import AsyncEngine, SamplingParams, StructuredOutput, TokenStream
from aengine.api.outputs import DraftSource, FinishReason, Token, TokenLogprob
from aengine.engine import step_thread
from aengine.scheduler.drafters import Draft

VOCAB_SIZE, EOS = 4096, 4093  # of the demo model
CONTEXT = 144
TEXTS = (
    "It is a truth universally acknowledged",
    "The morning was so fine, that the morning was so fine, that the",
    "a b c d a b c d a b c d a b",
    '{"name": "Jane", "age": 7}',
    "Is",
)
WORDS = (" the", " of", "ed", ", ", ".", " to her", "ing", " w", "\n", "an", " and", "ve")


@dataclass(frozen=True)
class Case:
    """A request, and how it is read."""

    prompt: str | list[int]
    params: SamplingParams
    cancel_after: int | None = None  # tokens
    slow: bool = False  # reads nothing until all others have ended


@dataclass
class Outcome:
    """What a request got."""

    tokens: list[list[Token]]  # by sequence
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    prompt_ids: list[int] = field(default_factory=list)


def random_cases(seed: int, count: int, *, processed: bool = True) -> list[Case]:
    """If not `processed`, tokens are drawn in the kernels, which is only done where it is so for all rows of a step."""
    rng = random.Random(seed)
    return [_case(rng, processed) for _ in range(count)]


def _case(rng: random.Random, processed: bool) -> Case:
    def some(most: int, least: int = 1) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB_SIZE), rng.randint(least, most)))

    if rng.random() < 0.5:
        prompt: str | list[int] = rng.choice(TEXTS)[: rng.randint(2, 60)]
    else:
        repeated = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
        prompt = repeated * rng.randint(1, 4)
    max_tokens: int | None = rng.randint(1, 24)
    if rng.random() < 0.02:
        prompt, max_tokens = [rng.randrange(VOCAB_SIZE) for _ in range(CONTEXT - rng.randint(2, 20))], None
    least = rng.randint(0, max_tokens or 0)
    pieces: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.choice([0.0, 0.3, 1.0, 1.5]),
        "top_p": lambda: rng.choice([0.3, 0.9, 1.0]),
        "top_k": lambda: rng.choice([0, 1, 5, 100]),
        "min_p": lambda: rng.choice([0.0, 0.05, 0.5]),
        "presence_penalty": lambda: rng.choice([-1.0, 0.7]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.4, 2.0]),
        "repetition_penalty": lambda: rng.choice([0.8, 1.3]),
        "logit_bias": lambda: {token: rng.choice([-100.0, 3.0, 8.0]) for token in (EOS, *some(6))},
        "allowed_token_ids": lambda: some(3000, 2000) if rng.random() < 0.8 else some(3),
        "banned_token_ids": lambda: some(500),
        "bad_words": lambda: rng.sample(WORDS, rng.randint(1, 5)),
        "min_tokens": lambda: least,
        "stop": lambda: rng.sample(WORDS, rng.randint(1, 4)),
        "stop_token_ids": lambda: tuple(rng.sample(range(1200), 128)),  # merged early, so they are common
        "ignore_eos": lambda: True,
        "include_stop_str_in_output": lambda: True,
        "skip_special_tokens": lambda: False,
        "detokenize": lambda: False,
        "logprobs": lambda: rng.choice([0, 1, 3]),
        "prompt_logprobs": lambda: rng.choice([0, 2]),
        "max_drafts": lambda: rng.choice([0, 1, 2, 16]),
        "n": lambda: rng.choice([2, 3]),
        "logits_processors": lambda: rng.sample(PROCESSORS, rng.randint(1, 3)),
        "structured_output": lambda: rng.choice(STRUCTURES),
    }
    rare = ("detokenize", "prompt_logprobs", "n", "structured_output", "logits_processors", "allowed_token_ids")
    names = [name for name in pieces if rng.random() < (0.15 if name in rare else 0.25)]
    if not processed:
        names = [name for name in names if name in _OF_DRAWS]
    fields = {name: pieces[name]() for name in names}
    if fields.get("structured_output"):
        fields.pop("ignore_eos", None)
        fields.pop("allowed_token_ids", None)
        max_tokens = max_tokens and rng.randint(max(20, least), 40)
    if fields.get("temperature") == 0.0:
        fields.pop("n", None)
    if fields.get("stop"):
        fields.pop("detokenize", None)
    if "allowed_token_ids" in fields:
        allowed = set(fields["allowed_token_ids"])
        fields["banned_token_ids"] = tuple(token for token in fields.get("banned_token_ids", ()) if token not in allowed)
    params = SamplingParams(seed=rng.getrandbits(64), max_tokens=max_tokens, **fields)
    return Case(prompt, params, rng.randint(0, 9) if rng.random() < 0.1 else None, rng.random() < 0.1)


_OF_DRAWS = {"temperature", "top_p", "top_k", "min_p", "stop", "stop_token_ids", "ignore_eos", "max_drafts", "n"}


def not_twice(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[token_ids[-1]] = -torch.inf


def by_length(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[(len(token_ids) * 97) % VOCAB_SIZE] += 6.0


def fails_at_30(logits: torch.Tensor, token_ids: list[int]) -> None:
    if len(token_ids) == 30:
        raise ValueError("30 tokens are too many")


def nothing_after_comma(logits: torch.Tensor, token_ids: list[int]) -> None:
    if token_ids[-1] % 41 == 3:
        logits[:] = -torch.inf


def repeats(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits[token_ids[-min(5, len(token_ids))]] += 15.0


def by_logits(logits: torch.Tensor, token_ids: list[int]) -> None:
    """The next token depends on the logits of all tokens so far, as masks and penalties have left them."""
    seen = logits[sorted(set(token_ids))].clamp(-1e4, 1e4)
    logits[round(float(seen.sum()) * 100) % VOCAB_SIZE] += 20.0


PROCESSORS = (not_twice, by_length, fails_at_30, nothing_after_comma, repeats, by_logits, by_logits)
SCHEMA = {
    "type": "object",
    "properties": {
        "identifier": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["letter", "message", "telegram"]},
        "is_answered": {"type": "boolean"},
    },
    "required": ["identifier", "kind", "is_answered"],
    "additionalProperties": False,
}
STRUCTURES = (
    StructuredOutput(json_schema=SCHEMA),
    StructuredOutput(json_object=True),
    StructuredOutput(regex=r"(Mr|Mrs|Miss)\. [A-Z][a-z]{2,9} of Longbourn, [0-9]{4}"),
    StructuredOutput(choice=("acknowledged universally", "acknowledged by all", "unknown")),
    StructuredOutput(grammar='root ::= "She said: " word (", " word)* "."\nword ::= [a-z]+'),
)


class KnownDrafts:
    """A drafter that knows what was generated; of outcomes that begin with the same tokens it takes the last. Satisfies `Drafter`."""

    def __init__(self, outcomes: Sequence[Outcome], rng: random.Random | None = None) -> None:
        """`rng`: drafts are also wrong, half right, and beyond the end. None: they are right."""
        self._rng = rng
        self._following: dict[bytes, list[int]] = {}
        for outcome in outcomes:
            for tokens in outcome.tokens:
                ids = [*outcome.prompt_ids, *(token.token_id for token in tokens)]
                for end in range(len(outcome.prompt_ids), len(ids)):
                    self._following[np.array(ids[:end], np.int32).tobytes()] = ids[end:]

    def assign(self, row: int, group: object = None, context: object = None) -> None:
        pass

    def release(self, row: int, tokens: object) -> None:
        pass

    def observe(self, *given: Any) -> None:
        pass

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        right = self._following.get(tokens.astype(np.int32).tobytes(), [])
        rng = self._rng
        if rng is None:
            return Draft(np.array(right[:most], np.int32), DraftSource.NGRAM)
        num_right = rng.choice([0, rng.randint(0, most), most, most])
        wrong = [rng.choice([rng.randrange(VOCAB_SIZE), EOS, int(rng.choice(tokens)), int(tokens[-1])]) for _ in range(most)]
        ids = [*right[:num_right], *wrong][: rng.choice([most, most, rng.randint(1, most)])]
        return Draft(np.array(ids, np.int32), DraftSource.NGRAM)


def use_drafter(patch: pytest.MonkeyPatch, drafter: KnownDrafts) -> None:
    patch.setattr(step_thread, "drafter_of", lambda config, loaded: drafter)


async def outcomes(engine: AsyncEngine, cases: Sequence[Case], at_once: int) -> list[Outcome]:
    """Of all cases, `at_once` of them at a time. A slow reader begins to read when fewer than that are left to begin."""
    found: list[Outcome | None] = [None] * len(cases)
    limiter = anyio.Semaphore(at_once)
    num_left = len(cases)
    nearly_all = anyio.Event()

    async def run(number: int) -> None:
        nonlocal num_left
        case = cases[number]
        async with limiter:
            stream = engine.stream(case.prompt, case.params)
            if case.slow:
                slow.start_soon(read, number, stream)
            else:
                await read(number, stream)
        num_left -= 1
        if not num_left:
            nearly_all.set()

    async def read(number: int, stream: TokenStream) -> None:
        case = cases[number]
        if case.slow:
            await nearly_all.wait()
        tokens: list[list[Token]] = [[] for _ in range(case.params.n)]
        error = None
        count = 0
        async with stream:
            try:
                async for token in stream:
                    tokens[token.index].append(token)
                    count += 1
                    if case.cancel_after is not None and count > case.cancel_after:
                        break
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"
        completion = stream.completion()
        ids = engine.tokenizer.encode(case.prompt) if isinstance(case.prompt, str) else case.prompt
        found[number] = Outcome(tokens, completion.prompt_logprobs, error, ids)

    async with anyio.create_task_group() as slow, anyio.create_task_group() as group:
        for number in range(len(cases)):
            group.start_soon(run, number)
    return [outcome for outcome in found if outcome is not None]


def assert_same(cases: Sequence[Case], found: Sequence[Outcome], expected: Sequence[Outcome]) -> None:
    """`expected` is of cases that are not cancelled. Of several sequences of a request any may be the first to fail, which ends all."""
    for number, (case, mine, other) in enumerate(zip(cases, found, expected, strict=True)):
        cancelled, several = case.cancel_after is not None, case.params.n > 1
        about = f"number {number}: {case}"
        if not cancelled:
            assert mine.error == other.error or (several and mine.error and other.error), f"{mine.error}, {other.error}: {about}"
        for one, wanted in zip(mine.tokens, other.tokens, strict=True):
            if cancelled and one and one[-1].finish_reason is FinishReason.CANCELLED:
                one = one[:-1]
            if not cancelled and (mine.error is None or not several):
                assert len(one) == len(wanted), about
            length = min(len(one), len(wanted))
            assert len(one) == length or mine.error or (several and other.error), about
            assert [_exact(token) for token in one[:length]] == [_exact(token) for token in wanted[:length]], about
            assert _floats(one[:length]) == pytest.approx(_floats(wanted[:length]), abs=1e-4), about
        if not cancelled:
            assert _prompt_floats(mine) == pytest.approx(_prompt_floats(other), abs=1e-4), about


def _exact(token: Token) -> tuple[Any, ...]:
    top = None if token.top_logprobs is None else list(token.top_logprobs)
    return token.token_id, token.text, token.rank, top, token.finish_reason, token.stop_reason


def _floats(tokens: Sequence[Token]) -> list[float]:
    return [x for one in tokens if one.logprob is not None for x in (one.logprob, *(one.top_logprobs or {}).values())]


def _prompt_floats(outcome: Outcome) -> list[float]:
    return [x for one in outcome.prompt_logprobs or () if one is not None for x in (one.logprob, one.rank, *one.top_logprobs.values())]


def uncut(cases: Sequence[Case]) -> list[Case]:
    """The same requests, read to their ends."""
    return [dataclasses.replace(case, cancel_after=None, slow=False) for case in cases]


def beyond_stops(cases: Sequence[Case]) -> list[Case]:
    """Those that stop at a string or an id, without that."""
    free: dict[str, Any] = {"stop": (), "stop_token_ids": ()}
    return [
        dataclasses.replace(case, params=dataclasses.replace(case.params, ignore_eos=case.params.structured_output is None, **free))
        for case in uncut(cases)
        if case.params.stop or case.params.stop_token_ids
    ]
