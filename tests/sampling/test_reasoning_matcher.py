"""Reasoning in the sampler: its markers in any tokens, how it is closed, and the grammar of what follows. Runs in a second."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensor_sampler import TENSORS, tensor_sampler

from aengine.sampling.grammar import CompiledGrammar, GrammarError, Grammars
from aengine.sampling.processors import StepRows
from aengine.sampling.reasoning import CompiledReasoning, Phase, ReasoningMarkers, unclean_ends
from aengine.scheduler.plan import NewRow, RowParams

TEXTS = ["a", "b", "<", "/t>", ">", "</t>", "/t>b", "/t>\n", "/t>a", "<t>", "\n", "</", "t>", "t>b", ""]
EOS = len(TEXTS) - 1
IDS = {text: token_id for token_id, text in enumerate(TEXTS)}
EVERYTHING = set(range(len(TEXTS)))
OPENED = ReasoningMarkers("<t>", "</t>", True, TEXTS.__getitem__)
NOT_OPENED = ReasoningMarkers("<t>", "</t>", False, TEXTS.__getitem__)


class Tokens:
    def __init__(self) -> None:
        self.tokens = [text.encode() for text in TEXTS]
        self.special_token_ids = [EOS]
        self.eos_token_id = EOS
        self.bos_token_id = None

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


def grammar(rules: str) -> CompiledGrammar:
    llguidance = pytest.importorskip("llguidance")
    tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Tokens()), n_vocab=len(TEXTS))
    matcher = llguidance.LLMatcher(tokens, f'%llguidance {{"no_forcing": true}}\n{rules}', log_level=0)
    return CompiledGrammar(matcher, frozenset({EOS}), None)


def of_answers(markers: ReasoningMarkers, rules: str, max_tokens: int | None = None) -> CompiledReasoning:
    """With a grammar of what follows."""
    at_start = None if markers.opened else grammar(rules)
    behind = grammar(rules.replace("start:", "start: /\\n{0,2}/"))
    ends, ends_behind = unclean_ends([text.encode() for text in TEXTS], "</t>")
    banned = {"banned": np.array([EOS, *ends]), "banned_behind": ends_behind}
    return CompiledReasoning(markers, (IDS["\n"], IDS["</t>"], IDS["\n"]), max_tokens, behind, at_start, IDS["<t>"], **banned)


def ids(*texts: str) -> list[int]:
    return [IDS[text] for text in texts]


def rows_of(compiled: CompiledReasoning, output: list[int] = [], row: int = 0) -> Grammars:  # noqa: B006 - it is only read
    rows = Grammars(len(TEXTS), TENSORS)
    params = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=compiled)
    rows.update([NewRow(row, params, 1, np.array([0, *output], np.int32))])
    return rows


def left(rows: Grammars, drafts: list[int] | None = None) -> list[set[int]]:
    """What is left to row 0, behind all its drafts."""
    count = 1 + len(drafts or ())
    logits = torch.zeros(count, len(TEXTS))
    step = StepRows(
        np.zeros(count, np.int32), np.arange(count, dtype=np.int32), None if drafts is None else np.array([*drafts, -1], np.int32)
    )
    rows.apply(logits, step, np.arange(count))
    assert (step.failures, step.postponed) == ({}, set())
    return [set((line > -math.inf).nonzero()[:, 0].tolist()) for line in logits]


def follow(rows: Grammars, *texts: str) -> list[set[int]]:
    """What is left before each of the tokens, and behind them."""
    allowed = left(rows)
    for text in texts:
        assert IDS[text] in allowed[-1], text
        assert rows.observe(np.zeros(1, np.int32), np.array(ids(text))) == {}
        allowed += left(rows)
    return allowed


def test_markers_are_found_however_they_are_cut() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        output = [draw.choice(TEXTS) for _ in range(draw.randrange(1, 9))]
        for markers in (OPENED, NOT_OPENED):
            place = markers.start()
            used = itertools.takewhile(lambda _: place.phase is not Phase.ANSWER, output)  # noqa: B023 - it is used here
            count = 0
            for text in used:
                place, count = markers.behind(place, IDS[text]), count + 1
            whole, read = "".join(output), "".join(output[:count])
            begun = markers.opened or whole.lstrip().startswith("<t>")
            inside = whole if markers.opened else whole.lstrip().removeprefix("<t>")
            if begun:
                _, closing, rest = inside.partition("</t>")
                assert place.phase is (Phase.ANSWER if closing else Phase.REASONING)
                assert place.num_tokens == count
                assert not closing or len(rest) >= len(whole) - len(read)
            else:
                assert place.phase is (Phase.OPENING if "<t>".startswith(whole.lstrip()) else Phase.ANSWER)
                assert place.phase is Phase.OPENING or place.num_tokens == 0


def test_tokens_that_end_reasoning_uncleanly() -> None:
    texts = ["a>b", "a>", "a> \n", ">", ">b", "x>>c", "b", ""]
    ends, behind = unclean_ends([text.encode() for text in texts], "a>")
    assert (ends, {begin: found.tolist() for begin, found in behind.items()}) == ([0], {"a": [4]})
    assert unclean_ends([text.encode() for text in texts], ">")[0] == [0, 4, 5]


def test_nothing_is_limited_before_the_budget_is_used() -> None:
    closing = (IDS["\n"], IDS["</t>"])
    rows = rows_of(CompiledReasoning(OPENED, closing, 3))
    assert follow(rows, "a", "<", "b", "\n", "</t>", "a") == [EVERYTHING] * 3 + [{IDS["\n"]}, {IDS["</t>"]}] + [EVERYTHING] * 2
    assert follow(rows_of(CompiledReasoning(OPENED, closing, 3)), "a", "</", "t>b", "a") == [EVERYTHING] * 5
    assert follow(rows_of(CompiledReasoning(OPENED, closing, 0)))[0] == {IDS["\n"]}
    assert follow(rows_of(CompiledReasoning(NOT_OPENED, closing, 1)), "<t>")[1] == {IDS["\n"]}
    assert follow(rows_of(CompiledReasoning(NOT_OPENED, closing, 1)), "a", "<t>", "a") == [EVERYTHING] * 4, "it did not begin with it"


def test_another_token_than_the_closing_fails_the_row() -> None:
    rows = rows_of(CompiledReasoning(OPENED, (IDS["</t>"],), 0))
    (error,) = rows.observe(np.zeros(1, np.int32), np.array([0])).values()
    assert isinstance(error, GrammarError)
    assert error.field == "reasoning"
    assert [dict(rows.limits(0, 0)).keys(), left(rows)] == [{"reasoning"}, [{IDS["</t>"]}]]


def test_a_grammar_limits_what_follows_alone() -> None:
    compiled = of_answers(OPENED, 'start: "b" "a"*')
    free = EVERYTHING - {EOS}
    allowed = follow(rows_of(compiled), "a", "</", "t>", "b")
    assert allowed[:2] == [free] * 2
    assert free - allowed[2] == {IDS["t>b"]}, "it would end it in the midst of a token"
    assert allowed[3:] == [set(ids("\n", "b")), {IDS["a"], EOS}]
    allowed = follow(rows_of(compiled), "<", "/t>\n", "b")
    assert free - allowed[1] == set(ids("/t>a", "/t>b"))
    assert allowed[2] == set(ids("\n", "b"))
    rows = rows_of(compiled)
    errors = rows.observe(np.zeros(1, np.int32), np.array([EOS]))
    assert [error.field for error in errors.values() if isinstance(error, GrammarError)] == ["reasoning"]


def test_without_reasoning_the_grammar_begins_at_the_start() -> None:
    compiled = of_answers(NOT_OPENED, 'start: "b" "a"?', max_tokens=2)
    allowed = follow(rows_of(compiled), "b", "a")
    assert allowed == [set(ids("b", "<t>")), {IDS["a"], EOS}, {EOS}]
    allowed = follow(rows_of(compiled), "<t>", "a", "\n", "</t>", "\n", "b")
    assert allowed == [
        set(ids("b", "<t>")),
        EVERYTHING - {EOS},
        {IDS["\n"]},
        {IDS["</t>"]},
        {IDS["\n"]},
        set(ids("\n", "b")),
        {IDS["a"], EOS},
    ]


def test_what_comes_before_the_answer_is_written() -> None:
    compiled = replace(of_answers(OPENED, 'start: "b"', max_tokens=2), closing_ids=(IDS["</t>"],), answer_ids=tuple(ids("a", ">")))
    written = [{IDS["a"]}, {IDS[">"]}, set(ids("\n", "b"))]
    assert follow(rows_of(compiled), "</t>", "a", ">")[1:] == written
    assert follow(rows_of(compiled), "b", "b", "</t>", "a", ">")[3:] == written
    assert EVERYTHING - follow(rows_of(compiled), "<")[1] == {EOS, *ids("/t>b", "/t>a")}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("markers", [OPENED, NOT_OPENED])
@pytest.mark.parametrize("max_tokens", [None, 4])
@pytest.mark.parametrize("kind", ["alone", "grammar", "answer"])
def test_drafts_and_preemption_change_nothing(markers: ReasoningMarkers, max_tokens: int | None, kind: str) -> None:
    has_grammar = kind != "alone"
    closing = tuple(ids("\n", "</t>", "\n"))
    compiled = of_answers(markers, 'start: "b" "a"*', max_tokens) if has_grammar else CompiledReasoning(markers, closing, max_tokens)
    if kind == "answer":
        compiled = replace(compiled, answer_ids=tuple(ids("a", ">")))
    draw = random.Random(1)
    for _ in range(30):
        rows = rows_of(compiled)
        output, allowed = [], left(rows)
        while len(output) < 12 and (not output or output[-1] != EOS):
            likely = rows.forced(np.zeros(1, np.int32)).get(0, ())
            assert not has_grammar or all(token in allowed[-1] for token in likely[:1])
            output.append(draw.choice(sorted(allowed[-1])))
            assert rows.observe(np.zeros(1, np.int32), np.array(output[-1:])) == {}
            allowed += left(rows)
        begin = draw.randrange(len(output))
        again = rows_of(compiled, output[:begin])
        drafts = output[begin : -1 if output[-1] == EOS else None]
        assert left(again, drafts) == allowed[begin : begin + len(drafts) + 1]
        assert left(again) == [allowed[begin]], "the drafts were not sampled"


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("budget", [1, 4, 7])
def test_drafts_across_the_budget(budget: int) -> None:
    """The sampler limits a row from its budget on, and before it only what is drafted beyond."""
    closing, draw = tuple(ids("\n", "</t>", "\n")), np.random.default_rng(budget)
    wrong = [draft_row(closing, budget, draw.normal(size=(14, len(TEXTS))), draw, seed) for seed in range(12)]
    assert any(wrong)


def draft_row(closing: tuple[int, ...], budget: int, logits: np.ndarray, draw: np.random.Generator, seed: int) -> bool:
    """A row whose token at each position is sampled from the same logits, one by one and behind drafts. Whether a draft was wrong."""
    outputs: list[list[int]] = []
    was_wrong = False
    for has_drafts in (False, True):
        sampler = tensor_sampler(2, len(TEXTS), torch.device("cpu"))
        params = RowParams(
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            seed=seed,
            grammar=CompiledReasoning(OPENED, closing, budget),
            grammar_from=budget,
        )
        sampler.update([NewRow(1, params, 2, np.zeros(2, np.int32))])
        output: list[int] = []
        while len(output) < len(logits):
            count = int(draw.integers(1, min(6, len(logits) - len(output)) + 1)) if has_drafts else 1
            at = np.arange(len(output), len(output) + count)
            drafts = np.array([*outputs[0][at[0] : at[-1]], -1], np.int32) if has_drafts else None
            if drafts is not None and count > 2 and draw.random() < 0.3:
                drafts[1] = IDS["b"]
            rows, positions = np.ones(count, np.int32), (2 + at).astype(np.int32)
            on_device = torch.from_numpy(rows), torch.from_numpy(positions)
            sampled = sampler.sample(torch.from_numpy(logits[at].astype(np.float32)), rows, positions, *on_device, drafts)
            accepted = None if sampled.accepted is None else sampled.accepted.numpy()
            assert sampler.observe(sampled) == {}
            assert sampler.observe_later(rows, sampled.tokens.numpy(), accepted) == {}
            output += sampled.tokens.tolist()[: count if accepted is None else accepted[0]]
            was_wrong |= accepted is not None and accepted[0] < count
            now = np.array([2 + len(output)], np.int32)
            ended = "</t>" in "".join(TEXTS[token_id] for token_id in output)
            assert (sampler.draw_params(rows[:1], now) is None) == (len(output) >= budget and not sampler_is_done(output, closing, budget))
            assert ended or len(output) < budget + len(closing)
        outputs.append(output)
    assert outputs[0] == outputs[1]
    return was_wrong


def sampler_is_done(output: list[int], closing: tuple[int, ...], budget: int) -> bool:
    """Whether the reasoning of an output is closed, by itself or by force."""
    text = "".join(TEXTS[token_id] for token_id in output[:budget])
    return "</t>" in text or len(output) >= budget + len(closing)


def test_the_closing_is_drafted() -> None:
    rows = rows_of(CompiledReasoning(OPENED, tuple(ids("\n", "</t>", "\n")), 1))
    assert rows.forced(np.zeros(1, np.int32)) == {}
    follow(rows, "a")
    assert rows.forced(np.zeros(1, np.int32))[0].tolist() == ids("\n", "</t>", "\n")
    follow(rows, "\n")
    assert rows.forced(np.zeros(1, np.int32))[0].tolist() == ids("</t>", "\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_device_the_same_is_left() -> None:
    grammars, logits = Grammars(len(TEXTS), TENSORS), torch.randn(4, len(TEXTS))
    params = [
        CompiledReasoning(OPENED, (2,), 0),
        of_answers(OPENED, 'start: "b"'),
        CompiledReasoning(OPENED, (2,), 5),
        grammar('start: "a"'),
    ]
    rows = [RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=one) for one in params]
    grammars.update([NewRow(row, one) for row, one in enumerate(rows)])
    on_device, step = logits.cuda(), StepRows(np.arange(4, dtype=np.int32), np.zeros(4, np.int32))
    for where in (logits, on_device):
        grammars.apply(where, step, np.arange(4))
    assert torch.equal(on_device.cpu(), logits)
