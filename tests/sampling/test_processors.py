"""Each processor against Transformers' own where the meaning is the same, else against its definition. About a second."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain import GREEDY, Row, processed, step
from tensor_sampler import tensor_sampler
from transformers.generation import logits_process as theirs

from aengine.scheduler.plan import RowParams

VOCAB = 150
CPU = torch.device("cpu")


def applied(params: RowParams, tokens: list[int], prompt_len: int, logits: torch.Tensor) -> torch.Tensor:
    """The [VOCAB] logits that the sampler chooses from."""
    sampler = tensor_sampler(3, VOCAB, CPU)
    row = Row(2, params, list(tokens), prompt_len)
    sampler.update([row.new()])
    changed = logits[None].clone()
    sampled = step(sampler, changed, [row])
    assert row.tokens[-1] == changed[0].argmax()
    assert sampled.impossible is not None
    assert not sampled.impossible.any()
    return changed[0]


@pytest.fixture(params=range(5))
def case(request: pytest.FixtureRequest) -> tuple[torch.Tensor, list[int]]:
    rng = np.random.default_rng(request.param)
    logits = torch.from_numpy(rng.normal(0, 3, VOCAB).astype(np.float32))
    return logits, rng.integers(0, 30, 25).tolist()


Case = tuple[torch.Tensor, list[int]]


@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_repetition(case: Case, penalty: float) -> None:
    logits, tokens = case
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([tokens]), logits[None])[0]
    for prompt_len in (25, 10):
        assert torch.equal(applied(replace(GREEDY, repetition_penalty=penalty), tokens, prompt_len, logits), expected)


def test_frequency_and_presence_count_the_output_only(case: Case) -> None:
    logits, tokens = case
    counts = np.bincount(tokens[10:], minlength=VOCAB)
    one = replace(GREEDY, frequency_penalty=0.7, presence_penalty=-1.1)
    expected = logits.numpy() - np.float32(0.7) * counts - np.float32(-1.1) * (counts > 0)
    assert np.allclose(applied(one, tokens, 10, logits).numpy(), expected, atol=1e-6, rtol=0)
    only_frequency = applied(replace(one, presence_penalty=0.0), tokens, 10, logits).numpy()
    assert np.allclose(only_frequency, logits.numpy() - np.float32(0.7) * counts, atol=1e-6, rtol=0)
    assert torch.equal(applied(one, tokens, 25, logits), logits)  # no output yet


@pytest.mark.parametrize("prompt_len", [3, 25])
def test_bad_words(case: Case, prompt_len: int) -> None:
    logits, tokens = case
    words = [(7,), (*tokens[-3:], 9), (tokens[-1], 11), (tokens[-2], 12), tuple(range(40)), (1, *tokens, 14), (9, 7)]
    expected = theirs.NoBadWordsLogitsProcessor([list(word) for word in words])(torch.tensor([tokens]), logits[None])[0]
    expected[13] = -math.inf  # after all tokens, which Transformers 5.17 does not compare with words that are one token longer
    found = applied(replace(GREEDY, bad_words=(*words, (*tokens, 13))), tokens, prompt_len, logits)
    assert torch.equal(found, expected)
    assert found[[7, 9, 11, 13]].isneginf().all()
    assert found[14].isfinite()


def test_min_tokens(case: Case) -> None:
    logits, tokens = case
    one = replace(GREEDY, min_tokens=4, stop_ids=(3, 140))
    for prompt_len in (25, 22, 21, 20):
        reference = theirs.MinNewTokensLengthLogitsProcessor(prompt_len, 4, [3, 140])
        expected = reference(torch.tensor([tokens]), logits[None])[0]
        assert torch.equal(applied(one, tokens, prompt_len, logits), expected)


def test_banned(case: Case) -> None:
    logits, tokens = case
    expected = theirs.SuppressTokensLogitsProcessor([0, 5, 149])(torch.tensor([tokens]), logits[None])[0]
    assert torch.equal(applied(replace(GREEDY, banned_token_ids=(0, 5, 149)), tokens, 10, logits), expected)


def test_bias(case: Case) -> None:
    logits, tokens = case
    reference = theirs.SequenceBiasLogitsProcessor([[[3], 4.5], [[149], -100.0]])
    expected = reference(torch.tensor([tokens]), logits[None])[0]
    assert torch.equal(applied(replace(GREEDY, logit_bias=((3, 4.5), (149, -100.0))), tokens, 10, logits), expected)


def test_allowed(case: Case) -> None:
    logits, tokens = case
    found = applied(replace(GREEDY, allowed_token_ids=(140, 2, 77)), tokens, 10, logits)
    assert torch.equal(found[[2, 77, 140]], logits[[2, 77, 140]])
    assert found.isneginf().sum() == VOCAB - 3


def test_custom_processors_run_in_order_and_last_before_the_draw() -> None:
    seen = []

    def keep_small(logits: torch.Tensor, token_ids: list[int]) -> None:
        seen.append((logits.shape, logits.dtype, list(token_ids), logits[5].item()))
        logits[20:] = -math.inf
        token_ids.clear()  # nobody else's list

    def favour(logits: torch.Tensor, token_ids: list[int]) -> None:
        logits[len(token_ids)] += 100.0 if logits[20].isneginf() else -100.0

    sampler = tensor_sampler(1, VOCAB, CPU)
    row = Row(0, replace(GREEDY, logit_bias=((5, 2.0),), processors=(keep_small, favour)), [9, 8, 7], 2)
    sampler.update([row.new()])
    for _ in range(3):
        step(sampler, torch.zeros(1, VOCAB), [row])
    assert seen[0] == ((VOCAB,), torch.float32, [9, 8, 7], 2.0)
    assert row.tokens == [9, 8, 7, 3, 4, 5]
    assert [tokens for _, _, tokens, _ in seen] == [row.tokens[:3], row.tokens[:4], row.tokens[:5]]


def test_penalties_need_no_answer_from_the_step_before() -> None:
    """Steps ahead: nothing is observed, and the next step knows the token all the same. Lists grow as they must."""
    one = replace(GREEDY, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, temperature=1.5, seed=3)
    sampler = tensor_sampler(4, VOCAB, CPU)
    rows = [Row(3, one, [5, 6, 5, 7], 2), Row(1, replace(one, repetition_penalty=1.0), [8], 1), Row(2, GREEDY, [9], 1)]
    sampler.update([row.new() for row in rows])
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        logits = torch.randn(3, VOCAB, generator=generator) * 3
        before = [row.tokens.copy() for row in rows]
        expected = [
            processed(original, row.params, tokens, row.prompt_len)
            for original, row, tokens in zip(logits.numpy().copy(), rows, before, strict=True)
        ]
        step(sampler, logits, rows, observe=False)
        np.testing.assert_allclose(logits.numpy(), np.stack(expected), atol=2e-5, rtol=0)


def test_min_tokens_ends_while_the_rows_stay_the_same() -> None:
    sampler = tensor_sampler(2, 10, CPU)
    rows = [
        Row(0, replace(GREEDY, min_tokens=2, stop_ids=(4,)), [1, 1, 1], 3),
        Row(1, replace(GREEDY, min_tokens=1, stop_ids=(4,)), [1], 1),
    ]
    sampler.update([row.new() for row in rows])
    for _ in range(4):
        logits = torch.zeros(2, 10)
        logits[:, 4], logits[:, 6] = 2.0, 1.0
        step(sampler, logits, rows)
    assert [row.tokens[row.prompt_len :] for row in rows] == [[6, 6, 4, 4], [6, 4, 4, 4]]


def test_a_row_of_a_new_sequence_keeps_nothing() -> None:
    """The same row again and again, in steps that look alike: masks, words, the tokens before them, penalties, processors."""
    sampler = tensor_sampler(1, 10, CPU)
    owners = [
        ({"banned_token_ids": (9,)}, [1], 8),
        ({"banned_token_ids": (8,)}, [1], 9),
        ({"bad_words": ((1, 9),)}, [1], 8),
        ({"bad_words": ((2, 9),)}, [1], 9),
        ({"bad_words": ((1, 9, 9), (7, 6))}, [7, 9, 1], 9),
        ({"bad_words": ((1, 9, 9), (7, 6))}, [9], 9),
        ({"allowed_token_ids": (3,)}, [1], 3),
        ({"repetition_penalty": 2.0}, [9, 8], 7),
        ({"repetition_penalty": 2.0}, [7], 9),
        ({"logit_bias": ((2, 50.0),)}, [1], 2),
        ({"processors": (lambda logits, _: logits[9].zero_(),)}, [1], 8),
        ({}, [], 9),
    ]
    for changes, tokens, expected in owners:
        row = Row(0, replace(GREEDY, **changes), list(tokens), len(tokens))
        sampler.update([row.new()])
        step(sampler, torch.arange(10.0)[None].clone() / 10 + 5, [row])
        assert row.tokens[-1] == expected, changes


def raising(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits.fill_(math.nan)
    raise ValueError("no")


def blank(logits: torch.Tensor, token_ids: list[int]) -> None:
    logits.fill_(math.nan)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_rows_that_cannot_choose_fail_alone(temperature: float, filters: dict[str, float]) -> None:
    good = replace(GREEDY, temperature=temperature, repetition_penalty=1.3, logprobs=2, seed=9, **filters)
    bad = [
        replace(good, allowed_token_ids=(3,), bad_words=((3,),)),
        replace(good, processors=(raising,)),
        replace(good, processors=(blank,)),
        replace(good, allowed_token_ids=(3, 4), min_tokens=5, stop_ids=(3, 4)),
    ]
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(4))

    def run(params: list[RowParams], some: torch.Tensor) -> tuple[list[Row], list]:
        sampler = tensor_sampler(6, VOCAB, CPU)
        rows = [Row(i, one, [1, 2, 3], 2) for i, one in enumerate(params)]
        sampler.update([row.new() for row in rows])
        return rows, [step(sampler, some.clone(), rows) for _ in range(4)]

    rows, results = run([good, *bad, good], logits)
    for result in results:
        assert result.impossible is not None
        assert result.impossible.tolist() == [False, True, True, True, True, False]
        assert {row: str(error) for row, error in result.step.failures.items()} == {2: "no"}
    others, alone = run([good, good], logits[[0, 5]])
    assert [rows[0].tokens, rows[5].tokens] == [row.tokens for row in others]
    for crowd, own in zip(results, alone, strict=True):
        assert not own.impossible.any()
        for name in ("token_logprobs", "ranks", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(crowd.logprobs, name)[[0, 5]], getattr(own.logprobs, name))


def test_what_left_nothing_is_named() -> None:
    """The parameter after which no token is left, in the order in which they apply."""
    words = tuple((token,) for token in range(VOCAB))
    wanted: list[tuple[str | None, RowParams]] = [
        (None, replace(GREEDY, allowed_token_ids=(3,), bad_words=((2, 3),))),
        ("banned_token_ids", replace(GREEDY, banned_token_ids=tuple(range(VOCAB)))),
        ("banned_token_ids", replace(GREEDY, allowed_token_ids=(3,), banned_token_ids=(3,), bad_words=words, processors=(blank,))),
        ("bad_words", replace(GREEDY, bad_words=words)),
        ("bad_words", replace(GREEDY, allowed_token_ids=(3,), bad_words=((9, 3), (2, 3), (1, 3)), processors=(blank,))),
        ("min_tokens", replace(GREEDY, allowed_token_ids=(3, 4), min_tokens=2, stop_ids=(3, 4))),
        (None, replace(GREEDY, allowed_token_ids=(3, 4), min_tokens=1, stop_ids=(3, 4))),
        ("logits_processors", replace(GREEDY, bad_words=((8,),), processors=(blank,))),
        ("model", replace(GREEDY, repetition_penalty=1.5)),
    ]
    sampler = tensor_sampler(len(wanted), VOCAB, CPU)
    rows = [Row(i, params, [5, 7, 1], 2) for i, (_, params) in enumerate(wanted)]
    sampler.update([row.new() for row in rows])
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(4))
    logits[-1] = math.nan
    result = step(sampler, logits, rows, observe=False)
    refusals = sampler.observe(result)
    assert [refusals[i].field if i in refusals else None for i in range(len(rows))] == [name for name, _ in wanted]
    assert str(refusals[4]) == "bad_words: no token can be chosen at position 3: it leaves none of those that allowed_token_ids leave"


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 100.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_logits_stay_in_range(temperature: float, filters: dict[str, float]) -> None:
    """A tiny repetition_penalty, which divides, and infinities of processors: there is a likeliest token, and no row fails."""

    def two(logits: torch.Tensor, token_ids: list[int]) -> None:
        logits[[11, 17]] = math.inf

    base = replace(GREEDY, temperature=temperature, **filters)
    wanted = [({7}, replace(base, repetition_penalty=value, seed=seed)) for value in (5e-324, 1e-46, 1e-40, 1e-37) for seed in range(8)]
    wanted += [({11, 17} if temperature else {11}, replace(base, processors=(two,), seed=seed)) for seed in range(8)]
    wanted += [
        (
            {3, 4} if temperature == 100 else {3},
            replace(base, logit_bias=((3, 100.0), (4, 1e-300), (5, -5e-324)), allowed_token_ids=(3, 4), seed=1),
        )
    ]
    wanted += [
        ({3}, replace(base, logit_bias=((3, 100.0), (4, -100.0)), banned_token_ids=(4,), allowed_token_ids=(3,), presence_penalty=5e-324))
    ]
    sampler = tensor_sampler(len(wanted), VOCAB, CPU)
    rows = [Row(i, params, [7, 9], 1) for i, (_, params) in enumerate(wanted)]
    sampler.update([row.new() for row in rows])
    logits = torch.randn(len(wanted), VOCAB, generator=torch.Generator().manual_seed(4))
    logits[:, 7], logits[:, 9] = 2.0, 0.0
    result = step(sampler, logits, rows)
    assert result.impossible is not None
    assert not result.impossible.any()
    assert [row.tokens[-1] in tokens for row, (tokens, _) in zip(rows, wanted, strict=True)] == [True] * len(wanted)
