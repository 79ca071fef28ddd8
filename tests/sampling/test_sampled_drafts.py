"""Tokens sampled with drafts are those sampled one by one, whatever the drafts and the parameters are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from slow_cases import slow_but
from test_grammar import EOS, SPACE_A, VOCAB_SIZE, A, B, C, compiled

from aengine.sampling import grammar
from aengine.sampling.grammar import CompiledGrammar, GrammarError
from aengine.sampling.sampler import Sampler
from aengine.scheduler.plan import NewRow, RowParams

pytest.importorskip("llguidance")
CPU = torch.device("cpu")
STOPS = (C, 40)
GRAMMARS = (
    'start: ("a" | "b" "c" | "ab")+',
    'start: "a" "b" "c" "a"? "b"?',  # ends soon
    'start: ("ab" | "c")+ " a" "z"',  # has a dead end
    "start: /[abc ]*/",  # takes too much: `fill`
)
LENGTH = 16
TOO_MUCH = [B, C]


def fill(self: grammar.GrammarMatcher, bits: np.ndarray, real=grammar.GrammarMatcher.fill) -> None:  # type: ignore[no-untyped-def]
    """As if the mask behind some tokens took too much."""
    if self._tokens[-2:] == TOO_MUCH:
        raise GrammarError.of("structured_output", "the grammar takes too much")
    real(self, bits)


@dataclass
class Sequence:
    row: int
    params: RowParams
    seed: int
    tokens: list[int]
    prompt_len: int
    output: list[tuple[object, ...]] = field(default_factory=list)  # tokens with logprobs; at last why it failed
    failed: bool = False
    num_accepted: int = 0

    def logits(self, position: int) -> torch.Tensor:
        logits = np.random.default_rng((self.seed, position)).normal(0, 2, VOCAB_SIZE).astype(np.float32)
        logits[: SPACE_A + 1] += 4.0
        return torch.from_numpy(logits)


class NotTwice:
    """A processor with a state: it is to be called once for each token."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        self.shown.append(token_ids)
        logits[token_ids[-1]] = -torch.inf
        if len(self.shown) > 12:
            raise ValueError("called too often")


def random_params(rng: random.Random, key: int, grammars: list[CompiledGrammar]) -> RowParams:
    some = lambda share, value, off: value if rng.random() < share else off  # noqa: E731
    return RowParams(
        temperature=rng.choice([0.0, 0.8, 1.5]),
        top_k=rng.choice([0, 4]),
        top_p=rng.choice([1.0, 0.9]),
        min_p=0.0,
        seed=key,
        presence_penalty=some(0.3, 0.7, 0.0),
        frequency_penalty=some(0.3, 0.9, 0.0),
        repetition_penalty=some(0.3, 1.4, 1.0),
        logit_bias=some(0.3, ((rng.randrange(8), 3.0), (EOS, -2.0)), ()),
        allowed_token_ids=some(0.1, tuple(range(0, VOCAB_SIZE, 1 + rng.randrange(2))), None),
        bad_words=some(0.4, ((A, A), (B, C, A), (rng.randrange(8),)), ()),
        min_tokens=some(0.4, rng.randint(1, 9), 0),
        stop_ids=STOPS,
        logprobs=some(0.4, 2, None),
        processors=some(0.2, (NotTwice(),), ()),
        grammar=some(0.7, rng.choice(grammars), None),
    )


def random_sequences(seed: int) -> list[Sequence]:
    rng = random.Random(seed)
    grammars = [compiled(rules) for rules in GRAMMARS]
    rows = rng.sample(range(9), rng.randint(1, 5))
    prompts = [[rng.randrange(8) for _ in range(rng.randint(1, 5))] for _ in rows]
    return [
        Sequence(row, random_params(rng, 1000 * seed + row, grammars), 1000 * seed + row, prompt, len(prompt))
        for row, prompt in zip(rows, prompts, strict=True)
    ]


def run(sequences: list[Sequence], steps: Iterator[dict[int, list[int]]], length: int) -> None:
    """Samples until all have `length` tokens or failed. `steps`: the drafts of each step by row."""
    sampler = Sampler(9, VOCAB_SIZE, CPU)
    sampler.update([NewRow(one.row, one.params, one.prompt_len, np.array(one.tokens, np.int32)) for one in sequences])
    while going := [one for one in sequences if not one.failed and len(one.output) < length]:
        drafts = {one.row: [] for one in going} | next(steps)
        going = [one for one in going if one.row in drafts]
        rows = np.array([one.row for one in going for _ in range(1 + len(drafts[one.row]))], np.int32)
        positions = np.array([len(one.tokens) + i for one in going for i in range(1 + len(drafts[one.row]))], np.int32)
        logits = torch.stack([one.logits(len(one.tokens) + i) for one in going for i in range(1 + len(drafts[one.row]))])
        given = np.array([draft for one in going for draft in (*drafts[one.row], -1)], np.int32) if any(drafts.values()) else None
        sampled = sampler.sample(logits, rows, positions, torch.from_numpy(rows), torch.from_numpy(positions), given)
        failures = sampler.observe(sampled)
        accepted = [1] * len(going) if sampled.accepted is None else sampled.accepted.tolist()
        lines = [] if sampled.logprob_rows is None else sampled.logprob_rows.tolist()
        first = 0
        for one, count in zip(going, accepted, strict=True):
            for index in range(first, first + count if one.row not in failures else first):
                token = int(sampled.tokens[index])
                one.tokens.append(token)
                scores: tuple[object, ...] = ()
                if one.params.logprobs is not None:
                    scores = tuple(column[lines.index(index)].tolist() for column in sampled.logprobs)  # type: ignore[union-attr]
                one.output.append((token, *scores))
            one.num_accepted += max(0, count - 1)
            if one.row in failures:
                one.failed = True
                one.output.append((str(failures[one.row]),))
            first += 1 + len(drafts[one.row])


def random_drafts(rng: random.Random, sequences: list[Sequence], known: dict[int, list[int]]) -> Iterator[dict[int, list[int]]]:
    """Right, wrong and half right ones."""
    while True:
        drafts = {}
        for one in sequences:
            right = known[one.row][len(one.tokens) :][: rng.randrange(7)]
            if right and rng.random() < 0.4:
                right[-1] = rng.randrange(8)
            drafts[one.row] = right + [rng.randrange(8)] * rng.randrange(2)
        yield drafts


@pytest.mark.parametrize("seconds", [1.0, 0.0])
@pytest.mark.parametrize("part", slow_but([0], range(5)))
def test_tokens_logprobs_and_failures_are_those_without_drafts(part: int, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar.GrammarMatcher, "fill", fill)
    seen: Counter[str] = Counter()
    for seed in range(part * 20, part * 20 + 20):
        monkeypatch.setattr(grammar, "MASK_SECONDS", 1.0)
        expected, found = random_sequences(seed), random_sequences(seed)
        run(expected, iter(dict, None), LENGTH)
        monkeypatch.setattr(grammar, "MASK_SECONDS", seconds)
        run(found, random_drafts(random.Random(seed), found, {one.row: one.tokens for one in expected}), LENGTH)
        for one, other in zip(found, expected, strict=True):
            assert one.output[:LENGTH] == other.output, one.params
            if one.params.processors:
                shown, expected_shown = (each.params.processors[0].shown for each in (one, other))  # type: ignore[attr-defined]
                assert shown[: len(expected_shown)] == expected_shown, "a processor is called once for each token"
            seen["failed"] += one.failed
            seen["dead end"] += "structured_output: no token" in str(one.output[-1])
            seen["too much"] += "too much" in str(one.output[-1])
            seen["ended"] += one.params.grammar is not None and EOS in one.tokens[one.prompt_len :]
            seen["accepted"] += one.num_accepted
    assert min(seen.values()) > 0, seen
