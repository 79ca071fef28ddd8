"""Tokens sampled with drafts are those sampled one by one, whatever the drafts and the parameters are."""

from __future__ import annotations

import random
from collections import Counter

import drafted
import numpy as np
import pytest
from drafted import Sequence, random_drafts, run
from slow_cases import slow_but
from test_grammar import EOS, B, C, compiled

from aengine.sampling import grammar
from aengine.sampling.grammar import GrammarError

pytest.importorskip("llguidance")
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


def random_sequences(seed: int) -> list[Sequence]:
    return drafted.random_sequences(seed, [compiled(rules) for rules in GRAMMARS])


@pytest.mark.quick_cases(1)
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
