"""Grammars in the sampler: masks for the rows that have one, and matchers that follow the tokens. Runs in a second."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tensor_sampler import TENSORS

from aengine.sampling import grammar
from aengine.sampling.grammar import CompiledGrammar, GrammarError, Grammars
from aengine.sampling.processors import StepRows
from aengine.scheduler.plan import NewRow, RowParams

llguidance = pytest.importorskip("llguidance")

VOCAB_SIZE = 70  # three words of bitmask, the last one not full
A, B, AB, C, EOS, SPACE_A = 0, 1, 2, 3, 4, 5
TEXTS = [b"a", b"b", b"ab", b"c", b"", b" a"]


class Tokens:
    def __init__(self) -> None:
        self.tokens = [*TEXTS, *[b""] * (VOCAB_SIZE - len(TEXTS))]
        self.special_token_ids = [EOS, *range(len(TEXTS), VOCAB_SIZE)]
        self.eos_token_id = EOS
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def compiled(rules: str, first: np.ndarray | None = None, **limits: int) -> CompiledGrammar:
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), n_vocab=VOCAB_SIZE)
    source = f'%llguidance {{"no_forcing": true}}\n{rules}'
    matcher = llguidance.LLMatcher(tokens, source, log_level=0, limits=llguidance.LLParserLimits(**limits))
    return CompiledGrammar(matcher, frozenset({EOS}), first)


def new_row(row: int, grammar: CompiledGrammar | None, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> NewRow:
    params = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=grammar)
    return NewRow(row, params, len(prompt), np.array(prompt + output, np.int32))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def mask(rows: Grammars, logits: torch.Tensor, indices: np.ndarray) -> tuple[dict[int, Exception], set[int]]:
    """Masks the logits of all these rows. Returns the rows that failed, and the indices of those that are postponed."""
    step = StepRows(indices, np.zeros_like(indices))
    rows.apply(logits, step, np.arange(len(indices)))
    return step.failures, step.postponed


def allowed(rows: Grammars, *indices: int) -> list[set[int]]:
    """What the mask leaves to each row."""
    logits = torch.zeros(len(indices), VOCAB_SIZE)
    assert mask(rows, logits, ints(*indices)) == ({}, set())
    left = [set((line > -math.inf).nonzero()[:, 0].tolist()) for line in logits]
    limits = [dict(rows.limits(row, 0)) for row in indices]
    assert left == [set(np.flatnonzero(one["structured_output"]).tolist()) if one else EVERYTHING for one in limits]
    return left


EVERYTHING = set(range(VOCAB_SIZE))


def test_rows_with_and_without_a_grammar() -> None:
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(7, compiled('start: "a" "b"* "c"')), new_row(3, None), new_row(0, compiled('start: "c"'))])
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    mask(rows, logits, ints(3, 0, 7))
    assert torch.equal(logits[0], before[0])
    assert [line.isfinite().nonzero()[:, 0].tolist() for line in logits[1:]] == [[C], [A, AB]]
    assert torch.equal(logits[logits.isfinite()], before[logits.isfinite()])  # what is allowed keeps its logit


def test_mask_follows_the_tokens_to_the_end() -> None:
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(1, compiled('start: "a" "b"? "c"?')), new_row(2, None)])
    assert allowed(rows, 1) == [{A, AB}]
    assert rows.observe(ints(2, 1), ints(C, A)) == {}
    assert allowed(rows, 1) == [{B, C, EOS}]  # it could stop here, or go on
    assert rows.observe(ints(1), ints(C)) == {}
    assert allowed(rows, 1) == [{EOS}]
    assert rows.observe(ints(1), ints(EOS)) == {}
    assert allowed(rows, 1) == [EVERYTHING]  # left alone from now on
    assert rows.observe(ints(1), ints(B)) == {}


def test_rows_share_a_grammar_but_not_their_place_in_it() -> None:
    rows, shared = Grammars(VOCAB_SIZE, TENSORS), compiled('start: "a" | "b" "c"')
    rows.update([new_row(row, shared) for row in range(3)])
    rows.observe(ints(0, 2), ints(A, B))
    assert allowed(rows, 0, 1, 2) == [{EOS}, {A, B}, {C}]


def test_state_comes_back_from_the_tokens() -> None:
    """After a preemption the tokens of the prompt do not count, those of the output do, on whatever row."""
    rows, shared = Grammars(VOCAB_SIZE, TENSORS), compiled('start: "a" "b" "c"')
    rows.update([new_row(4, shared, prompt=(C, C, B), output=(A, B)), new_row(5, shared, prompt=(A,))])
    assert allowed(rows, 4, 5) == [{C}, {A, AB}]


def test_a_row_of_a_new_sequence() -> None:
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(0, compiled('start: "a"'))])
    rows.update([new_row(0, compiled('start: "b"'))])
    assert allowed(rows, 0) == [{B}]
    rows.update([new_row(0, None)])
    assert allowed(rows, 0) == [EVERYTHING]


def test_a_token_against_the_grammar_fails_its_row_alone() -> None:
    rows, shared = Grammars(VOCAB_SIZE, TENSORS), compiled('start: "a" "c"')
    rows.update([new_row(0, shared), new_row(1, shared), new_row(2, shared)])
    errors = rows.observe(ints(0, 1, 2), ints(A, B, 69))
    assert set(errors) == {1, 2}
    assert isinstance(errors[1], GrammarError)
    assert "token 1" in str(errors[1])
    assert allowed(rows, 0, 1) == [{C}, {A}]
    with pytest.raises(GrammarError):
        rows.update([new_row(0, shared, output=(B,))])
    assert allowed(rows, 0) == [EVERYTHING]  # nothing is left of what the row was before


def test_a_dead_end_leaves_nothing_to_its_row_alone() -> None:
    """The grammar wants what no token can write."""
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(0, compiled('start: "a" "z"')), new_row(1, compiled('start: "a" "c"'))])
    rows.observe(ints(0, 1), ints(A, A))
    assert allowed(rows, 9, 0, 1) == [EVERYTHING, set(), {C}]


def test_first_tokens_are_limited_once() -> None:
    bits = np.zeros(3, np.int32)
    bits[0] = 1 << SPACE_A
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(0, compiled("start: (/ ?a/)*", first=bits))])
    assert allowed(rows, 0) == [{SPACE_A}]
    rows.observe(ints(0), ints(SPACE_A))
    assert allowed(rows, 0) == [{A, SPACE_A, EOS}]
    rows.update([new_row(0, compiled("start: (/ ?a/)*", first=bits), prompt=(B,), output=(SPACE_A,))])
    assert allowed(rows, 0) == [{A, SPACE_A, EOS}]


def test_what_takes_too_much_fails_its_row_alone() -> None:
    rows = Grammars(VOCAB_SIZE, TENSORS)
    costly = compiled("start: /[ab]*a[ab]{9}/", max_lexer_states=4)
    rows.update([new_row(0, costly), new_row(1, compiled('start: "c"'))])
    logits = torch.zeros(2, VOCAB_SIZE)
    errors, postponed = mask(rows, logits, ints(0, 1))
    assert (set(errors), postponed) == ({0}, set())
    assert "takes too much" in str(errors[0])
    assert logits[1].isfinite().nonzero()[:, 0].tolist() == [C]
    with pytest.raises(GrammarError, match="takes too much"):
        costly.try_out(VOCAB_SIZE, 5)


def test_rows_for_which_there_is_no_time_come_first_in_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MASK_SECONDS", 0.0)  # what is left for all rows but the first
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(row, compiled('start: "a" "c"')) for row in range(3)])
    late: list[set[int]] = []
    for _ in range(3):
        logits = torch.zeros(3, VOCAB_SIZE)
        errors, postponed = mask(rows, logits, ints(0, 1, 2))
        assert errors == {}
        for row in range(3):
            assert bool(logits[row].isfinite().all()) == (row in postponed), "it is masked, or left as it was"
        late.append(postponed)
    assert late == [{1, 2}, {0, 2}, {0, 1}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_on_the_device_are_those_of_the_cpu() -> None:
    rows = Grammars(VOCAB_SIZE, TENSORS)
    rows.update([new_row(row, compiled(f'start: "{"abc"[row % 3]}"')) for row in range(0, 40, 2)])
    logits = torch.randn(30, VOCAB_SIZE)
    on_device = logits.cuda()
    chosen = np.random.default_rng(0).permutation(40)[:30].astype(np.int32)
    mask(rows, logits, chosen)
    mask(rows, on_device, chosen)
    assert torch.equal(on_device.cpu(), logits)
