"""Draft heads in the CPU kernels: they propose what plain torch makes of the formulas, and change nothing of what is generated."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from every_draft import use_every_draft
from head_models import Drafting, eagle, mtp
from safetensors.torch import load_file, save_file
from slow_cases import slow_but
from test_graphs import graph_runner
from test_greedy import make_runner
from tiny_adapters import write_adapter

from aengine.api.errors import ConfigError, ModelLoadError
from aengine.api.outputs import DraftSource
from aengine.attention import build_layout
from aengine.models.cpu.stack import CpuLastTokens
from aengine.runner.contract import InFlightStep, LoadAdapter, NewWeights
from aengine.runner.cpu.executor import CpuExecutor
from aengine.runner.runner import ModelRunner
from aengine.scheduler.drafters import ModelDrafter
from aengine.scheduler.plan import RowParams, StepPlan
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

MADE: dict[str, Callable[[pathlib.Path], Drafting]] = {
    "eagle": lambda path: eagle(path, own_ids=True),
    "eagle-own-embedding": lambda path: eagle(path, own_ids=False, normed_residual=True),
    "deepseek-v3": lambda path: mtp(path, "deepseek-v3"),
    "glm4-moe": lambda path: mtp(path, "glm4-moe"),
    "mimo": lambda path: mtp(path, "mimo"),
    "qwen3.5": lambda path: mtp(path, "qwen3.5"),
    "qwen3-next": lambda path: mtp(path, "qwen3-next"),
}
pytestmark = pytest.mark.usefixtures("every_draft")
BACKENDS = ("cpu", "torch_native", "graphs")
QUICK = [("eagle", "cpu"), ("deepseek-v3", "cpu"), ("qwen3.5", "cpu"), ("mimo", "cpu"), ("eagle", "graphs"), ("mimo", "torch_native")]
EVERY = [(name, backend) for name in MADE for backend in BACKENDS if (name[:4], backend) != ("qwen", "graphs")]  # recurrences have none


@pytest.fixture
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    use_every_draft(monkeypatch)


@pytest.fixture(scope="module", params=MADE)
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafting:
    return MADE[request.param](tmp_path_factory.mktemp("drafting"))


class Run:
    """A scheduler on a runner, which records what each step is to check."""

    def __init__(self, runner: ModelRunner, *, num_pages: int, max_drafts: int = 3) -> None:
        self.runner = runner
        self.config = SchedulerConfig(
            *(runner.max_num_seqs, runner.max_num_batched_tokens, runner.max_model_len, num_pages, runner.page_size),
            max_drafts=max_drafts,
            state_pages=runner.state_pages,
            has_draft_model=runner.draft_source is not None,
            has_draft_head=runner.draft_source in (DraftSource.HEAD, DraftSource.MTP),
        )
        drafter = None if runner.draft_source is None else ModelDrafter(runner.draft_source)
        self.scheduler = Scheduler(self.config, drafter=drafter)
        self.drafted: list[tuple[int, list[int], list[int]]] = []  # key and tokens of a row, and the drafts behind them
        self.num_steps = 0

    def __call__(self, requests: list[Request], waves: int = 1) -> dict[int, list[int]]:
        """The outputs by key, of requests that come in so many waves."""
        scheduler, outputs = self.scheduler, {request.key: list[int]() for request in requests}
        flights: deque[tuple[StepPlan, InFlightStep]] = deque()
        for wave in range(waves):
            for request in requests[wave::waves]:
                scheduler.submit(request)
            for _ in range(6 if wave + 1 < waves else 10_000):
                plan = scheduler.schedule()
                if plan is not None:
                    step = self._launch(plan)
                    flights.append((plan, step))
                    self.num_steps += 1
                elif not flights:
                    break
                if plan is None or len(flights) > 1 or not flights[-1][1].overlaps:
                    returned, step = flights.popleft()
                    scheduler.commit(returned, step.result())
                updates = scheduler.take_updates()
                for key, token in zip(updates.keys, updates.token_ids, strict=True):
                    outputs[key].append(token)
                assert not any(finished.error for finished in updates.finished)
        return outputs

    def _launch(self, plan: StepPlan) -> InFlightStep:
        executor, steps = self.runner._executor, []
        launch = executor.launch
        executor.launch = lambda step: steps.append(step) or launch(step)  # type: ignore[method-assign]
        try:
            flight = self.runner.launch(plan)
        finally:
            del executor.launch  # type: ignore[attr-defined]
        rows = self.scheduler._rows
        for i in np.flatnonzero(plan.num_sampled > 1):
            row, start = int(plan.rows[i]), int(plan.starts[i])
            known = executor._sampling._drafts(steps[0]).numpy() if executor.name == "torch" else steps[0].drafts
            drafts = known[steps[0].sampled_rows == row][:-1]
            self.drafted.append((int(rows.keys[row]), rows.tokens[row, : start + 1].tolist(), drafts.tolist()))
        return flight


def requests_of(count: int, max_tokens: int = 24, *, seed: int = 0, temperature: float = 0.0) -> list[Request]:
    """Half of them begin with the same tokens."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 199, 40)
    found = []
    for key in range(count):
        prompt = rng.integers(0, 199, rng.integers(1, 70))
        if key % 2:
            prompt[:40] = shared[: len(prompt)]
        params = RowParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, seed=key)
        found.append(Request(key, prompt.astype(np.int32), params, max_tokens, max_drafts=3))
    return found


@pytest.fixture
def make(drafting: Drafting, backend: str) -> Iterator[Callable[..., ModelRunner]]:
    made: list[ModelRunner] = []

    def one(**options) -> ModelRunner:
        settings = {"max_num_batched_tokens": 48, "page_size": 4, **options}
        if backend == "graphs":
            made.append(graph_runner(drafting.model_dir, graph_sizes=(4, 24), **settings))
        else:
            made.append(make_runner(drafting.model_dir, attention_backend=backend, **settings))
        return made[-1]

    yield one
    for runner in made:
        runner.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("drafting", "backend"), slow_but(QUICK, EVERY), indirect=["drafting"])
def test_a_head_proposes_what_plain_torch_does(drafting: Drafting, backend: str, make: Callable[..., ModelRunner]) -> None:
    """In chunks and waves, with preemption and shared prefixes; and outputs are those without it.

    The head's KV of the last token in a page depends on the token after it, so where sequences part behind a shared page it is that of one
    of them, and the others may get other drafts.
    """
    requests = requests_of(14)
    expected = Run(make(), num_pages=60)(requests, waves=3)
    run = Run(make(**drafting.options), num_pages=60)
    assert run(requests, waves=3) == expected
    if backend == "graphs":
        assert run.runner._executor._draft.model.graphs.decodes._num_steps > run.num_steps
    stats = run.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    shared = [(tokens, drafts) for key, tokens, drafts in run.drafted if key % 2]
    alone = [(tokens, drafts) for key, tokens, drafts in run.drafted if not key % 2]
    assert len(alone) > 40
    for tokens, drafts in alone[::4]:
        assert drafts == drafting.drafts(tokens, len(drafts)), len(tokens)
    assert np.mean([drafts == drafting.drafts(tokens, len(drafts)) for tokens, drafts in shared[::4]]) > 0.8


@pytest.mark.parametrize(
    ("drafting", "backend"), slow_but([("eagle", "cpu")], itertools.product(MADE, ("cpu", "torch_native"))), indirect=["drafting"]
)
def test_rows_with_adapters_get_what_they_get_without_a_head(
    drafting: Drafting, make: Callable[..., ModelRunner], tmp_path: pathlib.Path
) -> None:
    write_adapter(tmp_path, drafting.model_dir, embedding=True, head=True)
    requests = [dataclasses.replace(request, adapter=request.key // 2 % 2) for request in requests_of(8)]
    outputs = []
    for options in ({}, drafting.options):
        runner = make(max_adapters=1, **options)
        runner.apply(runner.prepare(LoadAdapter(1, "one", str(tmp_path))))
        run = Run(runner, num_pages=60)
        outputs.append(run(requests, waves=2))
    assert outputs[0] == outputs[1]
    assert {key // 2 % 2 for key, _, _ in run.drafted} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafting", "backend"),
    slow_but([("eagle", "cpu")], [("eagle", "cpu"), ("eagle-own-embedding", "cpu"), ("eagle", "torch_native")]),
    indirect=["drafting"],
)
def test_drafts_are_of_the_new_weights_of_the_model(drafting: Drafting, make: Callable[..., ModelRunner]) -> None:
    """Of what the head shares with it, too."""
    old = {name: tensor.clone() for name, tensor in drafting.model.state_dict().items()}
    runner, requests = make(**drafting.options), requests_of(4)
    before = Run(runner, num_pages=60)(requests)
    try:
        with torch.no_grad():
            for parameter in drafting.model.parameters():
                parameter += 0.3 * parameter.abs().mean() * torch.randn_like(parameter)
        runner.apply(runner.prepare(NewWeights(drafting.model.state_dict())))
        run = Run(runner, num_pages=60)
        assert run(requests) != before
        for _, tokens, drafts in run.drafted[::4]:
            assert drafts == drafting.drafts(tokens, len(drafts)), len(tokens)
    finally:
        drafting.model.load_state_dict(old)


ON_RANKS = [*itertools.product(("eagle", "eagle-own-embedding", "deepseek-v3", "mimo"), ("cpu",)), ("deepseek-v3", "torch_native")]


@pytest.mark.slow
@pytest.mark.parametrize(("drafting", "backend"), slow_but([("mimo", "cpu")], ON_RANKS), indirect=["drafting"])
def test_on_two_ranks(drafting: Drafting, backend: str, make: Callable[..., ModelRunner]) -> None:
    """The head is on the first rank alone, with the model's embedding and output head whole."""
    requests = requests_of(4)
    expected = Run(make(), num_pages=200)(requests)
    run = Run(make(**drafting.options, tensor_parallel_size=2), num_pages=200)
    assert run(requests) == expected
    assert run.runner._ranks is not None
    alone = [(tokens, drafts) for key, tokens, drafts in run.drafted if not key % 2]
    assert len(alone) > 15
    for tokens, drafts in alone[::4]:
        assert drafts == drafting.drafts(tokens, len(drafts)), len(tokens)


def test_drafts_of_a_head_that_is_right_are_accepted(tmp_path: pathlib.Path) -> None:
    """Greedy ones, and drawn ones, since the noise is the model's."""
    drafting = mtp(tmp_path, "mimo", from_last_token=True)
    for temperature in (0.0, 1.0):
        runners = [make_runner(tmp_path, **options) for options in ({}, drafting.options)]
        plain, run = (Run(runner, num_pages=200) for runner in runners)
        requests = requests_of(6, 24, temperature=temperature)
        assert run(requests) == plain(requests)
        stats = run.scheduler.stats()
        assert stats.accepted_draft_tokens == stats.draft_tokens > 90
        assert run.num_steps < plain.num_steps / 2
        for runner in runners:
            runner.close()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("drafting", "backend"),
    slow_but([("mimo", "cpu"), ("mimo", "torch_native")], EVERY),
    indirect=["drafting"],
)
def test_forks_have_the_hidden_states_of_their_prompt(drafting: Drafting, make: Callable[..., ModelRunner]) -> None:
    """Its last page is copied. Each of them may not have another token, so that they part."""
    prompt = np.arange(30, dtype=np.int32)
    run = Run(make(**drafting.options), num_pages=200)
    requests = []
    for key in range(3):
        params = RowParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, banned_token_ids=tuple(range(key, 199, 3)))
        forks = {"fork_of": 0} if key else {"num_forks": 2}
        requests.append(Request(key, prompt, params, 12, max_drafts=3, **forks))
    run(requests)
    for key, tokens, drafts in run.drafted:
        assert drafts == drafting.drafts(tokens, len(drafts)), (key, len(tokens))
    assert {key for key, _, _ in run.drafted} == {0, 1, 2}


def changed(path: pathlib.Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200}, "it is for 200 tokens, and the model has 199"),
        ({"target_hidden_size": 32}, "it reads hidden states of 32 numbers, and the model's have 64"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}},
            r"it reads hidden states between layers \[2, 3, 7\], and the model has 6 layers",
        ),
        (
            {"hidden_size": 128, "target_hidden_size": 64},
            "its hidden_size 128 is not the model's, so it needs embed_tokens and lm_head of its own",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, r"it is a whole model \(LlamaForCausalLM\), which speculative 'draft' takes"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path: pathlib.Path, changes: dict[str, object], message: str) -> None:
    drafting = eagle(tmp_path, own_ids=True)
    changed(tmp_path / "head", **changes)
    with pytest.raises(ConfigError, match=f"^speculative_model: '.*head' is not possible: {message}$"):
        make_runner(drafting.model_dir, **drafting.options)


def test_what_a_checkpoint_of_a_head_lacks_is_named(tmp_path: pathlib.Path) -> None:
    drafting = eagle(tmp_path, own_ids=True)
    path = tmp_path / "head" / "model.safetensors"
    stored = load_file(path)
    for message, tensors in {
        r"lacks d2t, the tokens of its 50 logits$": {key: tensor for key, tensor in stored.items() if key != "d2t"},
        "does not give each logit a token of its own below 199$": {**stored, "d2t": stored["d2t"] + 199},
        "lacks fc.weight$": {key: tensor for key, tensor in stored.items() if key != "fc.weight"},
        "unexpected midlayer.x$": {**stored, "midlayer.x": torch.zeros(1)},
    }.items():
        save_file(tensors, path)
        with pytest.raises(ModelLoadError, match=message):
            make_runner(drafting.model_dir, **drafting.options)
    with pytest.raises(ModelLoadError, match=r"is no model, but a draft head of one: give it as speculative_model, with"):
        make_runner(tmp_path / "head")


def test_mtp_needs_a_checkpoint_with_a_layer_for_it(tmp_path: pathlib.Path) -> None:
    drafting = mtp(tmp_path, "mimo")
    missing = "^speculative: 'mtp' is not possible: the checkpoint carries no MTP layer of a kind that is supported$"
    stored = load_file(tmp_path / "model.safetensors")
    save_file({key: tensor for key, tensor in stored.items() if "mtp" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=missing):
        make_runner(tmp_path, **drafting.options)
    sources = []
    for tensors, mode in ((None, "off"), (None, "auto"), (stored, "off"), (stored, "auto")):
        if tensors is not None:
            save_file(tensors, tmp_path / "model.safetensors")
        runner = make_runner(tmp_path, speculative=mode)
        sources.append(runner.draft_source)
        runner.close()
    assert sources == [None, None, None, DraftSource.MTP]
    changed(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigError, match=missing):
        make_runner(tmp_path, **drafting.options)


def test_steps_with_no_room_for_hidden_states_are_refused(tmp_path: pathlib.Path) -> None:
    mtp(tmp_path, "mimo")
    runner = make_runner(tmp_path, speculative="mtp")
    executor, one = runner._executor, np.array([0], np.int32)
    assert isinstance(executor, CpuExecutor)
    model = executor._model
    assert model.draft is not None
    layout = build_layout(one, 0, one, one + 2, np.ones((1, 1, 1), np.int32), runner.page_size)
    no_tokens = CpuLastTokens(one[:0], one[:0], one[:0])
    for slots, message in (
        (None, r"the model keeps hidden states \[\d+, 64\] of float32"),
        ([3], "there are 1 slots for hidden states of 2 tokens"),
        ([3, 1 << 30], "a slot of the step is neither -1 nor in the pool"),
    ):
        kept = None if slots is None else model.draft.kept(np.array(slots, np.int32))
        with pytest.raises(ValueError, match=message):
            model._stack.prepare(model.workspace, model._pool, layout, layout.positions, one, last_tokens=no_tokens, kept=kept).run()
    runner.close()
