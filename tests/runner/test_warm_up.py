"""What runs before the first request on a device, here on a CPU: it calls whatever later steps call, and leaves nothing behind."""

from __future__ import annotations

import itertools
import pathlib
import random
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from driver import GREEDY, sampled
from every_draft import use_every_draft
from reference import save_tiny
from slow_cases import slow_but
from test_drafts import OfAModel, random_requests, run
from test_graphs import eager_runner, graph_runner
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import VOCAB, random_steps

from aengine.runner.runner import ModelRunner
from aengine.runner.setup import warm_up_params, warm_up_steps
from aengine.sampling.draw import TorchDraw
from aengine.scheduler.plan import RowParams

KINDS = (
    GREEDY,
    sampled(1),
    *(sampled(2, 0.9, top_p=p, min_p=m, top_k=k) for p in (1.0, 0.9) for m in (0.0, 0.05) for k in (0, 5, 70)),
    replace(sampled(3), repetition_penalty=1.2),
    replace(GREEDY, frequency_penalty=0.2, logprobs=3),
    replace(sampled(4, 0.8, top_p=0.8), logit_bias=((3, 5.0), (9, -100.0)), prompt_logprobs=2),
    replace(sampled(5), allowed_token_ids=tuple(range(50, 90)), min_tokens=3, stop_ids=(60, 61)),
    replace(sampled(6), banned_token_ids=(1, 2), bad_words=((5,), (6, 7))),
    replace(sampled(7), processors=(lambda logits, tokens: None,), logprobs=0),
)


TO_HOST = {"aten.detach.default", "aten.resolve_conj.default", "aten.resolve_neg.default", "aten.copy_.default"}  # how results are read
NOTHING = {"aten.alias.default"}  # a slice of the whole


class Called(TorchDispatchMode):
    """The operations of torch, by name and by the dtypes of what they are given."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func) not in TO_HOST | NOTHING:
            self.found.add((str(func), *(str(one.dtype) for one in args if isinstance(one, torch.Tensor))))
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("make", slow_but([eager_runner], [eager_runner, graph_runner]))
def test_later_steps_call_nothing_new(tiny: pathlib.Path, make: Any) -> None:
    runner: ModelRunner = make(tiny)
    with Called() as before:
        runner._executor.warm_up()
    with Called() as later:
        random_steps(runner, 1, 60, params=KINDS)
    assert len(later.found) > 60
    missing = sorted(later.found - before.found)
    assert not missing, "\n".join(map(str, missing))


@pytest.mark.slow
def test_later_steps_with_drafts_call_nothing_new(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_draft(monkeypatch)
    runner = eager_runner(tiny, speculative="draft", speculative_model=str(tiny), max_drafts=8)
    with Called() as before:
        runner._executor.warm_up()
    with Called() as later:
        run(runner, random_requests(random.Random(0), VOCAB)[:30], 0, OfAModel(), 60)
    missing = sorted(later.found - before.found)
    assert not missing, "\n".join(map(str, missing))


def test_every_way_to_draw_is_tried(tiny: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[tuple[Any, ...]] = set()

    def noting(name: str) -> Any:
        inner = getattr(TorchDraw, name)

        def noted(self: TorchDraw, logits: Any, params: Any, *more: Any, **named: Any) -> Any:
            called.add((name, *(one for one in more if isinstance(one, bool))))
            return inner(self, logits, params, *more, **named)

        return noted

    for name in ("whole", "nucleus", "top_k"):
        monkeypatch.setattr(TorchDraw, name, noting(name))
    eager_runner(tiny)._executor.warm_up()
    assert called == {("whole", False), ("whole", True), ("nucleus", False), ("nucleus", True), ("top_k",)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("max_num_seqs", [1, 5, 24])
def test_it_leaves_nothing_behind(tiny: pathlib.Path, max_num_seqs: int) -> None:
    runner = eager_runner(tiny, max_num_seqs=max_num_seqs)
    runner._executor.warm_up()
    assert not runner._executor._scorer._prompts
    most = min(4, max_num_seqs)
    assert random_steps(runner, 3, 20, most=most, params=KINDS) == random_steps(
        eager_runner(tiny, max_num_seqs=max_num_seqs), 3, 20, most=most, params=KINDS
    )


def test_every_parameter_is_tried() -> None:
    """A new one of `RowParams` shows here."""
    kinds = warm_up_params(VOCAB)
    unused = {name for name in (one.name for one in fields(RowParams)) if len({getattr(one, name) for one in kinds}) == 1}
    pooled = {"pooled_layers", "pooled_from", "pooled_experts"}
    assert unused == {"seed", "grammar", "grammar_source", "grammar_from", "prompt_logprobs_from", *pooled}
    steps = list(warm_up_steps(4, VOCAB, 16, 1))
    assert len(steps) == 3 * -(-len(kinds) // 4)
    assert len(list(warm_up_steps(4, VOCAB, 16, 1, most_drafts=2))) == 4 * -(-len(kinds) // 4)
    few = [int(step.layout.qo_indptr[-1]) for _, step in itertools.islice(warm_up_steps(4, VOCAB, 16, 1, most_tokens=64), len(steps), None)]
    assert few == [16, 32, 64]
