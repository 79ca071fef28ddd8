"""Grammars in the sampler: masks for the rows that have one, and matchers that follow the tokens. Runs in a second."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from aengine.sampling.grammar import CompiledGrammar, GrammarError, GrammarRows
from aengine.scheduler.plan import NewRow, RowParams

xgrammar = pytest.importorskip("xgrammar")

VOCAB_SIZE = 70  # three words of bitmask, the last one not full
A, B, AB, C, EOS, SPACE_A = 0, 1, 2, 3, 4, 5
TEXTS = [b"a", b"b", b"ab", b"c", b"", b" a"]


def compiled(ebnf: str, texts: list[bytes] = TEXTS, first: torch.Tensor | None = None) -> CompiledGrammar:
    info = xgrammar.TokenizerInfo(texts, xgrammar.VocabType.RAW, vocab_size=VOCAB_SIZE, stop_token_ids=[EOS])
    return CompiledGrammar(xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False).compile_grammar(ebnf), first)


def new_row(row: int, grammar: CompiledGrammar | None, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()) -> NewRow:
    params = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=grammar)
    return NewRow(row, params, len(prompt), np.array(prompt + output, np.int32))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def allowed(rows: GrammarRows, *indices: int) -> list[set[int]]:
    """What the mask leaves to each row."""
    logits = torch.zeros(len(indices), VOCAB_SIZE)
    rows.mask(logits, ints(*indices))
    left = [set((line > -math.inf).nonzero()[:, 0].tolist()) for line in logits]
    told = [rows.allowed(row) for row in indices]
    assert left == [EVERYTHING if one is None else set(np.flatnonzero(one).tolist()) for one in told]
    return left


EVERYTHING = set(range(VOCAB_SIZE))


def test_rows_with_and_without_a_grammar() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    assert not rows
    rows.update([new_row(7, compiled('root ::= "a" "b"* "c"')), new_row(3, None), new_row(0, compiled('root ::= "c"'))])
    assert rows
    logits = torch.randn(3, VOCAB_SIZE)
    before = logits.clone()
    rows.mask(logits, ints(3, 0, 7))
    assert torch.equal(logits[0], before[0])
    assert [line.isfinite().nonzero()[:, 0].tolist() for line in logits[1:]] == [[C], [A, AB]]
    assert torch.equal(logits[logits.isfinite()], before[logits.isfinite()])  # what is allowed keeps its logit


def test_mask_follows_the_tokens_to_the_end() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    rows.update([new_row(1, compiled('root ::= "a" "b"? "c"?')), new_row(2, None)])
    assert allowed(rows, 1) == [{A, AB}]
    assert rows.observe(ints(2, 1), ints(C, A)) == {}
    assert allowed(rows, 1) == [{B, C, EOS}]  # it could stop here, or go on
    assert rows.observe(ints(1), ints(C)) == {}
    assert allowed(rows, 1) == [{EOS}]
    assert rows.observe(ints(1), ints(EOS)) == {}
    assert allowed(rows, 1) == [EVERYTHING]  # left alone from now on
    assert rows.observe(ints(1), ints(B)) == {}


def test_rows_share_a_grammar_but_not_their_place_in_it() -> None:
    rows, grammar = GrammarRows(VOCAB_SIZE), compiled('root ::= "a" | "b" "c"')
    rows.update([new_row(row, grammar) for row in range(3)])
    rows.observe(ints(0, 2), ints(A, B))
    assert allowed(rows, 0, 1, 2) == [{EOS}, {A, B}, {C}]


def test_state_comes_back_from_the_tokens() -> None:
    """After a preemption the tokens of the prompt do not count, those of the output do, on whatever row."""
    rows, grammar = GrammarRows(VOCAB_SIZE), compiled('root ::= "a" "b" "c"')
    rows.update([new_row(4, grammar, prompt=(C, C, B), output=(A, B)), new_row(5, grammar, prompt=(A,))])
    assert allowed(rows, 4, 5) == [{C}, {A, AB}]


def test_a_row_that_changes_hands() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    rows.update([new_row(0, compiled('root ::= "a"'))])
    rows.update([new_row(0, compiled('root ::= "b"'))])
    assert allowed(rows, 0) == [{B}]
    rows.update([new_row(0, None)])
    assert allowed(rows, 0) == [EVERYTHING]
    assert not rows


def test_a_token_against_the_grammar_fails_its_row_alone() -> None:
    rows, grammar = GrammarRows(VOCAB_SIZE), compiled('root ::= "a" "c"')
    rows.update([new_row(0, grammar), new_row(1, grammar), new_row(2, grammar)])
    errors = rows.observe(ints(0, 1, 2), ints(A, B, 69))
    assert set(errors) == {1, 2}
    assert isinstance(errors[1], GrammarError)
    assert "token 1" in str(errors[1])
    assert allowed(rows, 0, 1) == [{C}, {A}]
    with pytest.raises(GrammarError):
        rows.update([new_row(0, grammar, output=(B,))])
    assert allowed(rows, 0) == [EVERYTHING]  # nothing is left of what the row was before


def test_a_dead_end_leaves_nothing_to_its_row_alone() -> None:
    """The grammar wants what no token can write."""
    rows = GrammarRows(VOCAB_SIZE)
    rows.update([new_row(0, compiled('root ::= "a" "z"')), new_row(1, compiled('root ::= "a" "c"'))])
    rows.observe(ints(0, 1), ints(A, A))
    assert allowed(rows, 9, 0, 1) == [EVERYTHING, set(), {C}]


def test_first_tokens_are_limited_once() -> None:
    bits = torch.zeros(3, dtype=torch.int32)
    bits[0] = 1 << SPACE_A
    rows = GrammarRows(VOCAB_SIZE)
    rows.update([new_row(0, compiled('root ::= (" "? "a")*', first=bits))])
    assert allowed(rows, 0) == [{SPACE_A}]
    rows.observe(ints(0), ints(SPACE_A))
    assert allowed(rows, 0) == [{A, SPACE_A, EOS}]
    rows.update([new_row(0, compiled('root ::= (" "? "a")*', first=bits), prompt=(B,), output=(SPACE_A,))])
    assert allowed(rows, 0) == [{A, SPACE_A, EOS}]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_masks_on_the_device_are_those_of_the_cpu() -> None:
    rows = GrammarRows(VOCAB_SIZE)
    rows.update([new_row(row, compiled(f'root ::= "{"abc"[row % 3]}"')) for row in range(0, 40, 2)])
    logits = torch.randn(30, VOCAB_SIZE)
    on_device = logits.cuda()
    chosen = np.random.default_rng(0).permutation(40)[:30].astype(np.int32)
    rows.mask(logits, chosen)
    rows.mask(on_device, chosen)
    assert torch.equal(on_device.cpu(), logits)
