"""A draft model proposes what it would continue with itself, and changes no output. As its own draft model, a model accepts every draft,
so nothing that the draft model has computed is wrong or missing: behind cached prefixes, forks, preemptions, chunks and pauses."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from every_draft import EveryDraft, use_every_draft
from reference import greedy, save_tiny
from test_greedy import make_runner

from aengine.api.errors import ConfigError
from aengine.models.loading.hub import resolve_model
from aengine.runner.contract import Step
from aengine.runner.runner import ModelRunner
from aengine.scheduler.drafters import ModelDrafter
from aengine.scheduler.plan import RowParams
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

PAGE_SIZE = 8
GREEDY = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
VOCAB = 199


class Engine:
    """Scheduler and runner, in lock step."""

    def __init__(self, runner: ModelRunner, *, drafts: bool = True, **config: int) -> None:
        sizes = {"max_num_seqs": runner.max_num_seqs, "max_num_batched_tokens": 64, "num_pages": runner.num_pages, **config}
        made = SchedulerConfig(max_model_len=runner.max_model_len, page_size=PAGE_SIZE, max_drafts=5, has_draft_model=drafts, **sizes)
        self.scheduler = Scheduler(made, drafter=ModelDrafter() if drafts else None)
        self.scheduler._num_steps = runner.steps  # type: ignore[attr-defined]
        self.runner = runner

    def generate(self, *requests: Request) -> tuple[dict[int, list[int]], dict[int, tuple[int, int]]]:
        """What each got, by key; and how many drafts it had, and how many of them were accepted."""
        outputs: dict[int, list[int]] = {request.key: [] for request in requests}
        counts = dict.fromkeys(outputs, (0, 0))
        for request in requests:
            self.scheduler.submit(request)
        while (plan := self.scheduler.schedule()) is not None:
            self.scheduler.commit(plan, self.runner.launch(plan).result())
            self.runner.steps += 1  # type: ignore[attr-defined]
            updates = self.scheduler.take_updates()
            for key, token in zip(updates.keys, updates.token_ids, strict=True):
                outputs[key].append(token)
            for count in updates.drafts:
                drafted, accepted = counts[count.key]
                counts[count.key] = drafted + count.num_drafts, accepted + count.num_accepted
        return outputs, counts


@pytest.fixture(scope="module", params=["cpu", "torch_native"])
def itself(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """A runner of a model that is its own draft model."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny("qwen3", path)
    made = with_draft(path, path, attention_backend=request.param)
    yield made
    made.close()


def with_draft(path: Path, draft: Path, **options: str | int) -> ModelRunner:
    made = make_runner(path, speculative="draft", speculative_model=str(draft), max_drafts=5, page_size=PAGE_SIZE, **options)
    made.steps = 0  # type: ignore[attr-defined]  # that it has run
    return made


@pytest.fixture(autouse=True)
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_draft(monkeypatch)


def request(key: int, prompt: list[int], max_tokens: int = 40, params: RowParams = GREEDY, **fields: object) -> Request:
    return Request(key, np.array(prompt, np.int32), replace(params, seed=key), max_tokens, **fields)  # type: ignore[arg-type]


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]


def all_accepted(counts: dict[int, tuple[int, int]], *keys: int, least: int = 20) -> None:
    for key in keys or counts:
        drafted, accepted = counts[key]
        assert drafted == accepted >= least, f"{key}: {accepted} of {drafted}"


@pytest.mark.quick_cases(1)
def test_every_draft_of_the_model_itself_is_accepted(itself: ModelRunner) -> None:
    """Greedy or drawn: the draft model draws with the same noise. Nothing changes, and max_drafts is kept."""
    drawn = replace(GREEDY, temperature=1.3)
    kinds = [GREEDY, drawn, replace(drawn, top_k=7), replace(drawn, top_p=0.6), replace(drawn, top_p=0.9, min_p=0.02)]
    requests = [request(key, prompt, 40, kinds[key % 5]) for key, prompt in enumerate(prompts([1, 7, 8, 9, 30, 70, 3, 100, 16, 5]))]
    outputs, counts = Engine(itself).generate(*requests)
    assert outputs == Engine(itself, drafts=False).generate(*requests)[0]
    all_accepted(counts, least=30)
    _, counts = Engine(itself).generate(request(1, [5]), request(2, [6], max_drafts=0), request(3, [7], 2))
    assert counts[1][1] > 30
    assert counts[2] == counts[3] == (0, 0)


def test_turns_of_a_chat(itself: ModelRunner) -> None:
    """The second turn has the first one, with its output, in the prefix cache, and the draft model has computed that, too."""
    engine = Engine(itself)
    (prompt,) = prompts([20])
    for key in range(4):
        outputs, counts = engine.generate(request(key, prompt, 30))
        all_accepted(counts)
        assert counts[key][0] >= 23  # 5 in a step, and one token besides
        prompt += outputs[key] + [3, key]
    assert engine.scheduler.stats().cached_prompt_tokens > 200


def test_what_others_computed_without_the_draft_model(itself: ModelRunner) -> None:
    """It catches up with a cached prefix, a part in each step, before it proposes; what another has computed meanwhile is known."""
    engine = Engine(itself, max_num_batched_tokens=32)
    (prompt,) = prompts([150])
    engine.generate(request(0, prompt, 30, max_drafts=0))
    steps = itself.steps  # type: ignore[attr-defined]
    _, counts = engine.generate(request(1, prompt, 60))
    all_accepted(counts)
    assert itself.steps - steps < 30  # type: ignore[attr-defined]
    _, counts = engine.generate(request(2, [*prompt, 1], 30))
    all_accepted(counts)
    assert counts[2][0] >= 23


@pytest.mark.quick_cases(1)
def test_preempted(itself: ModelRunner) -> None:
    engine = Engine(itself, num_pages=40)
    requests = [request(key, prompt, 60) for key, prompt in enumerate(prompts([20] * 8))]
    outputs, counts = engine.generate(*requests)
    assert engine.scheduler.stats().preemptions > 3
    assert outputs == Engine(itself, drafts=False).generate(*requests)[0]
    all_accepted(counts)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("length", [16, 21])
def test_forks(itself: ModelRunner, length: int) -> None:
    """The prompt is computed once, by the draft model, too."""
    engine = Engine(itself)
    (prompt,) = prompts([length])
    params = replace(GREEDY, temperature=1.5)
    forks = [request(key, prompt, 40, params, fork_of=0) for key in (1, 2, 3)]
    computed: list[int] = []
    draft, itself._executor.draft = itself._executor.draft, lambda step: (computed.append(step.layout.num_tokens), draft(step))[1]  # type: ignore[method-assign]
    try:
        _, counts = engine.generate(request(0, prompt, 40, params, num_forks=3), *forks)
    finally:
        itself._executor.draft = draft  # type: ignore[method-assign]
    all_accepted(counts)
    assert sum(computed) < length + 4 * 40
    _, counts = engine.generate(
        request(4, [*prompt, 1], num_forks=1, max_drafts=0), request(5, [*prompt, 1], fork_of=4)
    )  # its pages lack what the draft model would have computed
    all_accepted(counts, 5)


@pytest.mark.quick_cases(1)
def test_pauses(itself: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not drafted for a while: the draft model lacks their tokens then."""

    class Sometimes(EveryDraft):
        steps = 0

        def may_draft(self, *_: object) -> bool:
            Sometimes.steps += 1
            return Sometimes.steps % 20 > 11  # false for some 40 steps, since it is asked in one of eight then

    monkeypatch.setattr("aengine.scheduler.drafts.DraftLengths", Sometimes)
    requests = [request(key, prompt, 120) for key, prompt in enumerate(prompts([4, 40, 90]))]
    outputs, counts = Engine(itself).generate(*requests)
    all_accepted(counts)
    assert outputs == Engine(itself, drafts=False).generate(*requests)[0]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", ["llama", "qwen2-tied-windowed"])
def test_it_proposes_its_own_continuation(family: str, tmp_path: Path) -> None:
    """As transformers computes it: also of a model with windows, which the other has not."""
    save_tiny("qwen3", tmp_path / "model")
    model = save_tiny(family, tmp_path / "draft")
    runner = with_draft(tmp_path / "model", tmp_path / "draft")
    engine, checked = Engine(runner), 0
    launch = runner._executor.launch

    def checking(step: Step) -> object:
        nonlocal checked
        if step.drafts is not None:
            rows = engine.scheduler._rows
            firsts = step.first_samples()
            found = [drafts[:-1].tolist() for drafts in np.split(step.drafts, firsts[1:])]
            known = [
                rows.tokens[row, : step.next_positions[first]].tolist()
                for row, first in zip(step.sampled_rows[firsts], firsts, strict=True)
            ]
            expected = greedy(model, known, 5)
            assert [tokens[: len(drafts)] for tokens, drafts in zip(expected, found, strict=True)] == found
            checked += sum(map(len, found))
        return launch(step)

    runner._executor.launch = checking  # type: ignore[method-assign, assignment]
    engine.generate(*(request(key, prompt, 12) for key, prompt in enumerate(prompts([1, 16, 30]))))
    assert checked > 100
    runner.close()


def test_its_weights_and_pages_are_quantised_alike_with_two_threads(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    runner = with_draft(tmp_path, tmp_path, dtype="bfloat16", quantization="int8", kv_cache_dtype="int8", threads=2)
    _, counts = Engine(runner).generate(*(request(key, prompt) for key, prompt in enumerate(prompts([9, 40]))))
    all_accepted(counts)
    runner.close()


def test_what_cannot_be_a_draft_model(tmp_path: Path) -> None:
    save_tiny("mistral-windowed", tmp_path / "windowed")
    with pytest.raises(ConfigError, match="is not possible: all layers of the model have windows"):
        with_draft(tmp_path / "windowed", tmp_path / "windowed")
    with pytest.raises(ConfigError, match="has a context of 256 tokens, and sequences may have 2048: lower max_model_len"):
        with_draft(resolve_model("demo"), tmp_path / "windowed")
