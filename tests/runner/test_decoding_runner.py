"""Logprobs of outputs and prompts against Transformers, page copies, failures, rows rebuilt after a preemption. About 10 seconds."""

from __future__ import annotations

import math
import pathlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from driver import GREEDY, Driver, Sequence_, sampled
from reference import save_tiny
from test_greedy import make_runner

from aengine.api.errors import NothingToChooseError
from aengine.attention import AttentionMetadata, AttentionSpec, Scoring, build_layout
from aengine.attention.torch_native import TorchNativeBackend
from aengine.runner import results
from aengine.scheduler.plan import NewRow, PromptLogprobs, StepPlan, StepResult, TokenLogprobs

Tiny = tuple[pathlib.Path, object]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("tiny")
    return path, save_tiny("qwen3", path)


@torch.no_grad()
def expected_logprobs(model, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab_size] float64: line i is what the model says of token i + 1."""
    return model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)


def check(found: TokenLogprobs, expected: torch.Tensor, tokens: list[int], width: int) -> None:
    """`expected` [m, vocab_size] against what was found for m tokens."""
    assert len(found.token_logprobs) == len(tokens)
    for i, token in enumerate(tokens):
        line = expected[i]
        assert found.token_logprobs[i] == pytest.approx(line[token].item(), abs=1e-4)
        assert abs(int(found.ranks[i]) - 1 - int((line > line[token]).sum())) <= int((line - line[token]).abs().lt(1e-4).sum()) - 1
        top = line.topk(width).values
        np.testing.assert_allclose(found.top_logprobs[i, :width], top, atol=1e-4)
        np.testing.assert_allclose(line[found.top_ids[i, :width].astype(np.int64)], top, atol=1e-4)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("chunk", [None, 5])
def test_output_logprobs_are_those_of_the_raw_model(tiny: Tiny, chunk: int | None) -> None:
    path, model = tiny
    params = [
        replace(sampled(1, 1.3, top_k=20), logprobs=5),
        GREEDY,
        replace(GREEDY, logprobs=0),
        replace(sampled(2), logprobs=3, repetition_penalty=1.5, presence_penalty=1.0, banned_token_ids=(1, 2), logit_bias=((7, 5.0),)),
        replace(sampled(3), logprobs=1, allowed_token_ids=tuple(range(100, 110))),
    ]
    driver = Driver(make_runner(path), chunk=chunk)
    rng = np.random.default_rng(0)
    sequences = [driver.add(rng.integers(0, 199, 4 + i).tolist(), one) for i, one in enumerate(params)]
    for _ in range(8):
        before = [len(s.output) for s in sequences]
        order = sorted(sequences, key=lambda s: not s.decodes)  # as in the plan
        result = driver.run_step(sequences)
        grown = [s for s in order if len(s.output) > before[sequences.index(s)]]
        assert (result.logprobs is None) == all(s.params.logprobs is None for s in grown)
        for j, s in enumerate(grown):
            if s.params.logprobs is not None:
                one = TokenLogprobs(*(getattr(result.logprobs, name)[j : j + 1] for name in TokenLogprobs.__slots__))
                check(one, expected_logprobs(model, s.tokens[:-1])[-1:], s.tokens[-1:], s.params.logprobs)
    assert set(sequences[4].output) <= set(range(100, 110))


def run_prompts(driver: Driver, sequences: list[Sequence_]) -> dict[int, list[PromptLogprobs]]:
    pieces: dict[int, list[PromptLogprobs]] = {s.row: [] for s in sequences}
    for _ in range(20):
        for piece in driver.run_step(sequences).prompt_logprobs:
            pieces[piece.row].append(piece)
    return pieces


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("block", [1 << 24, 3 * 199])
def test_prompt_logprobs(tiny: Tiny, chunk: int | None, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_BLOCK_ELEMENTS", block)
    path, model = tiny
    rng = np.random.default_rng(1)
    driver = Driver(make_runner(path), chunk=chunk)
    sequences = [
        driver.add(rng.integers(0, 199, length).tolist(), replace(GREEDY, prompt_logprobs=width))
        for length, width in ((14, 4), (1, 2), (2, 0), (9, None), (11, 2))
    ]
    plain = Driver(make_runner(path)).generate([s.prompt for s in sequences], 4)
    pieces = run_prompts(driver, sequences)
    assert not driver.runner._executor._scorer._prompts, "kept for nobody"
    assert [s.output[:4] for s in sequences] == plain
    for s in sequences:
        width = s.params.prompt_logprobs
        if width is None or len(s.prompt) == 1:
            assert pieces[s.row] == []
            continue
        expected = expected_logprobs(model, s.prompt)
        position = 1
        for piece in pieces[s.row]:
            assert piece.start == position
            position += len(piece.logprobs.token_logprobs)
            tokens = s.prompt[piece.start : position]
            assert piece.logprobs.top_ids.shape == (len(tokens), width)
            check(piece.logprobs, expected[piece.start - 1 : position - 1], tokens, width)
        assert position == len(s.prompt)
        assert len(pieces[s.row]) == 1 if chunk is None else len(pieces[s.row]) > len(s.prompt) // 8


def favour_length(logits: torch.Tensor, tokens: list[int]) -> None:
    logits[len(tokens)] += 3.0
    logits[tokens[-1]] -= 3.0


def test_preempted_rows_go_on_as_if_nothing_had_happened(tiny: Tiny) -> None:
    path, _ = tiny
    params = [
        replace(sampled(1), repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
        replace(sampled(2, 1.5), min_tokens=9, stop_ids=tuple(range(50)), bad_words=((60,), (70, 71), (80, 81, 82))),
        replace(GREEDY, processors=(favour_length,), logprobs=1),
        sampled(4, top_p=0.9),
    ]
    prompts = [[3 * i + j for j in range(10)] for i in range(4)]

    def run(preempted_at: tuple[int, ...]) -> list[list[int]]:
        driver = Driver(make_runner(path))
        sequences = [driver.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for at in range(16):
            if at in preempted_at:
                for s in sequences[at % 2 :]:
                    driver.preempt(s)
            driver.run_step(sequences)
        return [s.output for s in sequences]

    undisturbed = run(())
    assert run((4, 9)) == undisturbed
    assert run((5, 6, 12)) == undisturbed
    assert min(undisturbed[1][:9]) >= 50


def test_rows_that_fail_in_a_step(tiny: Tiny) -> None:
    path, _ = tiny

    def give_up(logits: torch.Tensor, tokens: list[int]) -> None:
        logits.fill_(math.nan)
        if len(tokens) > 6:
            raise KeyError("seven")

    driver = Driver(make_runner(path))
    prompt = [1, 2, 3, 4, 5]
    good = driver.add(prompt, replace(sampled(1), frequency_penalty=0.1))
    hollow = driver.add(prompt, replace(GREEDY, allowed_token_ids=(8,), banned_token_ids=(8,)))
    custom = driver.add(prompt, replace(GREEDY, processors=(give_up,)))
    expected = Driver(make_runner(path)).generate([prompt], 4, good.params)[0]
    results: list[StepResult] = [driver.run_step([good, hollow]), driver.run_step([good, hollow])]
    for result in results:
        assert result.failures.keys() == {hollow.row}
        assert isinstance(result.failures[hollow.row], NothingToChooseError)
        assert str(result.failures[hollow.row]).startswith("banned_token_ids: no token can be chosen")
    failure = driver.run_step([good, custom]).failures[custom.row]
    assert isinstance(failure, NothingToChooseError)
    assert failure.field == "logits_processors"
    long = driver.add([1] * 7, custom.params)
    failures = driver.run_step([good, long]).failures
    assert repr(failures[long.row]) == "KeyError('seven')"
    assert good.output == expected


def test_a_result_is_observed_once(tiny: Tiny) -> None:
    path, _ = tiny
    seen: list[int] = []
    runner = make_runner(path)
    driver = Driver(runner)
    s = driver.add([1, 2, 3], replace(GREEDY, processors=(lambda _, tokens: seen.append(len(tokens)),)))
    launch = runner.launch

    def launch_and_ask_twice(plan: StepPlan):
        step = launch(plan)
        assert step.result() is step.result()
        return step

    runner.launch = launch_and_ask_twice
    for _ in range(3):
        driver.run_step([s])
    assert seen == [3, 4, 5]


def test_the_token_of_a_failure_is_none(tiny: Tiny) -> None:
    """What stands in its place is not taken for a token of the sequence."""
    path, _ = tiny
    seen: list[int] = []

    def fail_once(logits: torch.Tensor, tokens: list[int]) -> None:
        seen.append(len(tokens))
        if len(seen) == 2:
            raise ValueError

    driver = Driver(make_runner(path))
    s = driver.add([1, 2, 3], replace(GREEDY, processors=(fail_once,)))
    for _ in range(4):
        driver.run_step([s])
    assert seen == [3, 4, 4, 5]


def test_page_copies_precede_the_step(tiny: Tiny) -> None:
    """A sequence goes on from a copy of another's pages, and the other writes over the original meanwhile."""
    path, _ = tiny
    runner = make_runner(path, page_size=4)
    driver = Driver(runner)
    prompt = list(range(20, 30))  # two whole pages and half of one
    first = driver.add(prompt)
    driver.run_step([first])
    pages = runner._page_table[0, first.row, :3].copy()
    fork_row = driver.free_rows.pop()
    target = driver.free_pages.pop()
    ints = lambda *values: np.array(values, dtype=np.int32)  # noqa: E731
    plan = StepPlan(
        step=driver.step,
        rows=ints(fork_row, first.row),
        num_decodes=0,
        starts=ints(9, 9),
        lengths=ints(2, 2),
        num_sampled=np.ones(2, np.int32),
        token_ids=ints(prompt[9], 100, 150, 151),  # `first` overwrites what the copy was taken of
        new_rows=(NewRow(fork_row, GREEDY),),
        page_groups=ints(0, 0, 0),
        page_rows=ints(fork_row, fork_row, fork_row),
        page_cols=ints(0, 1, 2),
        page_ids=ints(pages[0], pages[1], target),
        copy_from=ints(pages[2]),
        copy_to=ints(target),
    )
    forked = runner.launch(plan).result().tokens[0]
    other = Driver(make_runner(path)).generate([[*prompt, 100]], 1)[0]
    assert [forked] == other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copied_pages_hold_the_same_in_all_layers(dtype: torch.dtype) -> None:
    spec = AttentionSpec(4, 2, 8, tuple(Scoring(1.0, window) for window in (None, 3, None)), 4, dtype, torch.device("cpu"))
    backend = TorchNativeBackend(spec)
    backend.allocate(9)
    rows, table = np.array([0], dtype=np.int32), np.array([[[1, 2]]], dtype=np.int32)

    def attended(pages: list[int], write: bool) -> torch.Tensor:
        table[0, 0] = pages
        layout = build_layout(rows, 0, np.array([0], np.int32), np.array([7], np.int32), table, 4)
        if not write:
            layout.slot_mapping.fill(-1)
        arrays = (layout.qo_indptr, layout.kv_indptr, layout.kv_indices, layout.last_page_len, layout.slot_mapping)
        step = backend.plan(AttentionMetadata(layout, *map(torch.from_numpy, arrays)))
        generator = torch.Generator().manual_seed(0)
        out = []
        for layer in range(3):
            query, key, value = (torch.randn(7, heads, 8, generator=generator).to(dtype) for heads in (4, 2, 2))
            step.write(layer, key, value)
            out.append(step.attend(layer, query))
        return torch.stack(out)

    original = attended([1, 2], write=True)
    backend.copy_pages(np.array([1, 2], np.int32), np.array([7, 4], np.int32))
    assert torch.equal(attended([7, 4], write=False), original)
    assert torch.equal(attended([1, 2], write=False), original)
    backend.copy_pages(np.array([7, 4], np.int32), np.array([4, 7], np.int32))  # read before written: an exchange
    assert torch.equal(attended([4, 7], write=False), original)
