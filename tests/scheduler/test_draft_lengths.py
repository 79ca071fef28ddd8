"""How many drafts there are, on a clock that steps move by what they are to cost: speculation gains where it can, and loses nearly nothing
where it cannot."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from aengine.api.outputs import DraftSource
from aengine.scheduler.draft_lengths import DraftLengths, StepKind
from aengine.scheduler.drafters import BY_MODEL, Acceptance, Draft, NgramDrafter
from aengine.scheduler.plan import RowParams, StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig

SAMPLED = RowParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)
MAX_LEN = 2048
Seconds = Callable[[int, bool], float]
"""Of a step of so many tokens; whether the step before it had not returned when it was planned."""


class Planted:
    """Satisfies `Drafter`: knows what comes, and is right as often as it is told."""

    learns = True

    def __init__(self, truth: dict[int, np.ndarray], right: Callable[[int], float], proposing: Callable[[], None]) -> None:
        """`right(position)`: how likely a draft is right. `proposing` is called for each proposal."""
        self._truth, self._right, self._proposing = truth, right, proposing
        self._rng = np.random.default_rng(0)
        self._acceptance = Acceptance(0.6)

    def assign(self, row: int, group: object = None, context: object = None) -> None:
        pass

    def release(self, row: int, tokens: object) -> None:
        pass

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        self._proposing()
        known = len(tokens)
        following = self._truth[int(tokens[0])][known : known + most].copy()
        following[self._rng.random(len(following)) >= self._right(known)] += 1
        return Draft(following, DraftSource.NGRAM, self._acceptance.value)

    def observe(self, row: int, num_tokens: int, draft: Draft, num_accepted: int) -> None:
        if self.learns:
            self._acceptance.add_drafts(len(draft.token_ids), num_accepted)


class PlantedModel(Planted):
    """A draft model: it proposes when the step is launched."""

    def propose(self, row: int, tokens: np.ndarray, most: int, *, by_model: bool = True) -> Draft:
        self._proposing()
        return Draft(np.full(most, BY_MODEL, np.int32), DraftSource.MODEL, self._acceptance.value)


def total_seconds(
    num_rows: int,
    num_tokens: int,
    seconds: Seconds,
    right: Callable[[int], float] | None,
    *,
    look: float = 0.0,
    model: float | None = None,
) -> float:
    """Of so many tokens for each of the requests; `right` None: without speculation. `look`: seconds of a proposal for one row.
    `model`: drafts are those of a model, of which a token takes so many seconds."""
    rng = np.random.default_rng(1)
    truth = {key: np.append(np.int32(key), rng.integers(1000, 2000, MAX_LEN, dtype=np.int32)) for key in range(num_rows)}
    now = 0.0

    def proposing() -> None:
        nonlocal now
        now += look

    drafter = None if right is None else (Planted if model is None else PlantedModel)(truth, right, proposing)
    has_model = right is not None and model is not None
    config = SchedulerConfig(num_rows, 4096, MAX_LEN, 1 + num_rows * MAX_LEN // 16, 16, max_drafts=8, has_draft_model=has_model)
    scheduler = Scheduler(config, lambda: now, drafter)
    for key, tokens in truth.items():
        scheduler.submit(Request(key, tokens[:8], SAMPLED, num_tokens))
    draft_seconds = 0.0 if model is None else model

    def pass_time(plan: StepPlan, ahead: bool) -> None:
        nonlocal now
        now += seconds(int(plan.lengths.sum()), ahead)
        if plan.draft_rows is not None:
            now += draft_seconds * int(plan.draft_rows.lengths.sum() + plan.draft_rows.num_drafts.sum())

    run_to_end(scheduler, truth, pass_time, right)
    return now


def run_to_end(
    scheduler: Scheduler,
    truth: dict[int, np.ndarray],
    pass_time: Callable[[StepPlan, bool], None],
    right: Callable[[int], float] | None = None,
) -> int:
    """Step until nothing is left to do; returns the number of steps. `truth`: sequences by their first token."""
    flights: deque[tuple[StepPlan, bool]] = deque()
    by_row: dict[int, int] = {}
    num_steps = 0
    while True:
        plan = scheduler.schedule()
        if plan is not None:
            for new in plan.new_rows:
                by_row[new.row] = int(scheduler._rows.tokens[new.row, 0])
            flights.append((plan, bool(flights)))
        elif not flights:
            return num_steps
        if plan is None or len(flights) > 1 or plan.num_decodes < len(plan.rows):
            returned, ahead = flights.popleft()
            pass_time(returned, ahead)
            num_steps += 1
            scheduler.commit(returned, result_of(returned, truth, by_row, right))
            scheduler.take_updates()


def test_an_output_that_an_ended_request_had_takes_few_steps() -> None:
    """The same again, all but each tenth token of it; not to another tenant, salt or adapter."""
    rng = np.random.default_rng(2)
    output = rng.integers(1000, 2000, 400, dtype=np.int32)
    edited = np.where(np.arange(400) % 10 == 9, output + 1000, output).astype(np.int32)
    truth = {key: np.append(np.int32(key), edited if key == 2 else output) for key in range(6)}
    now = 0.0

    def pass_time(plan: StepPlan, ahead: bool) -> None:
        nonlocal now
        now += memory_bound(int(plan.lengths.sum()), ahead)

    config = SchedulerConfig(1, 4096, MAX_LEN, 1 + MAX_LEN // 16, 16, max_drafts=8, max_adapters=2)
    scheduler = Scheduler(config, lambda: now, NgramDrafter(4000, 1))
    num_steps = []
    options = [{}, {}, {}, {"tenant": "other"}, {"cache_salt": "other"}, {"adapter": 1, "adapter_number": 1}]
    for key, fields in enumerate(options):
        scheduler.submit(Request(key, truth[key][:1], SAMPLED, 390, **fields))  # type: ignore[arg-type] # a tenant is no adapter
        num_steps.append(run_to_end(scheduler, {key: truth[key]}, pass_time, lambda position: 0.0))
    first, again, with_edits, *others = num_steps
    assert min(first, *others) > 300
    assert again < 100
    assert with_edits < 200


def result_of(plan: StepPlan, truth: dict[int, np.ndarray], by_row: dict[int, int], right: Callable[[int], float] | None) -> StepResult:
    tokens, accepted, at, rng = list[int](), list[int](), 0, np.random.default_rng(plan.step)
    for i, row in enumerate(plan.rows.tolist()):
        length, sampled, start = int(plan.lengths[i]), int(plan.num_sampled[i]), int(plan.starts[i])
        ids = plan.token_ids[at : at + length] if i >= plan.num_decodes else plan.token_ids[:0]
        at += length if i >= plan.num_decodes else 0
        if not sampled:
            continue
        end = start + length
        following = truth[by_row[row]][end - sampled + 1 : end + 1]
        wrong = np.zeros(0, int)
        if sampled > 1:
            drafts = ids[length - sampled + 1 :]
            differ = following[:-1] != drafts
            if right is not None and drafts[0] == BY_MODEL:
                differ = rng.random(len(drafts)) >= right(start)
            wrong = np.flatnonzero(differ)
        accepted.append(int(wrong[0]) + 1 if len(wrong) else sampled)
        tokens += following.tolist()
    drafted = bool((plan.num_sampled > 1).any())
    return StepResult(plan.step, np.array(tokens, np.int32), accepted=np.array(accepted, np.int32) if drafted else None)


def memory_bound(num_tokens: int, ahead: bool) -> float:
    """Weights are read once, and each token adds a little; what is not planned ahead waits for its plan."""
    return 0.040 + 0.0003 * num_tokens + (0 if ahead else 0.0003)


def compute_bound(num_tokens: int, ahead: bool) -> float:
    return 0.001 + 0.001 * num_tokens + (0 if ahead else 0.0005)


def gain(
    num_rows: int, num_tokens: int, seconds: Seconds, right: Callable[[int], float], *, look: float = 0.0, model: float | None = None
) -> float:
    plain = total_seconds(num_rows, num_tokens, seconds, None)
    return plain / total_seconds(num_rows, num_tokens, seconds, right, look=look, model=model)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("num_rows", [1, 32])
@pytest.mark.parametrize("seconds", [memory_bound, compute_bound])
def test_drafts_that_are_wrong_cost_next_to_nothing(num_rows: int, seconds: Seconds) -> None:
    assert gain(num_rows, 600, seconds, lambda position: 0.0) > 0.97


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("acceptance", "least"), [(0.4, 1.5), (0.6, 2.0), (0.8, 3.0)])
def test_drafts_that_cost_little_are_made(acceptance: float, least: float) -> None:
    assert gain(1, 1000, memory_bound, lambda position: acceptance) > least


def test_drafts_that_pay_on_average_are_made() -> None:
    """Many a step with drafts loses: what others saved pays for it."""

    def seconds(num_tokens: int, ahead: bool) -> float:
        return 0.001 if num_tokens == 1 else 0.0018 + 0.00004 * num_tokens

    assert gain(1, 1500, seconds, lambda position: 0.7) > 1.2


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
def test_drafts_that_cost_as_much_as_tokens_are_not_made(acceptance: float) -> None:
    assert gain(16, 600, compute_bound, lambda position: acceptance) > 0.97


def test_drafts_that_become_right_are_found() -> None:
    assert gain(1, 2000, memory_bound, lambda position: 0.0 if position < 1000 else 0.9, look=0.0002) > 1.4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("model", [None, 0.001])
def test_looks_take_a_small_part_of_the_time(model: float | None) -> None:
    """A look takes as long as a step."""
    assert gain(1, 2000, compute_bound, lambda position: 0.2, look=compute_bound(1, ahead=True), model=model) > 0.983


@pytest.mark.slow
def test_drafts_that_become_wrong_are_given_up() -> None:
    assert gain(8, 2000, compute_bound, lambda position: 0.95 if position < 100 else 0.0) > 0.975


def test_a_stall_is_not_charged_to_drafts() -> None:
    num_steps = 0

    def seconds(num_tokens: int, ahead: bool) -> float:
        nonlocal num_steps
        num_steps += 1
        return memory_bound(num_tokens, ahead) + (10.0 if num_steps == 50 else 0.0)

    plain = total_seconds(1, 1000, memory_bound, None) + 10.0
    assert plain / total_seconds(1, 1000, seconds, lambda position: 0.9) > 1.8


@pytest.mark.slow
def test_a_drafter_that_is_too_sure_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "learns", False)
    assert gain(1, 2000, lambda num_tokens, ahead: 0.04 + 0.004 * num_tokens, lambda position: 0.0) > 0.975


@pytest.mark.slow
def test_steps_that_become_slow_are_noticed() -> None:
    """Drafts that did pay are given up when wide steps take longer than it was measured."""
    num_steps = 0

    def seconds(num_tokens: int, ahead: bool) -> float:
        nonlocal num_steps
        num_steps += 1
        return 0.04 + (0.0 if num_steps < 200 else 0.05 * (num_tokens - 1))

    plain = total_seconds(1, 2000, seconds, None)
    num_steps = 0
    assert plain / total_seconds(1, 2000, seconds, lambda position: 0.5) > 0.975


def test_nothing_is_drafted_before_steps_without_drafts_were_measured() -> None:
    lengths, kind = DraftLengths(1), StepKind(processed=False)
    for _ in range(6):
        assert not lengths.may_draft(1, kind)
        lengths.plain_step_took(0.01, 1, kind, steady=True, passed=1)
    assert lengths.may_draft(1, kind)
    assert not lengths.may_draft(32, kind)
    assert not lengths.may_draft(1, StepKind(processed=True))


@pytest.mark.parametrize("grammar", [None, object()])
def test_only_plans_with_grammars_want_what_is_forced(grammar: object | None) -> None:
    scheduler = Scheduler(SchedulerConfig(1, 16, 64, 8, 16, max_drafts=8), drafter=Planted({}, lambda position: 0.0, lambda: None))
    scheduler.submit(Request(0, np.zeros(4, np.int32), replace(SAMPLED, grammar=grammar), 8))
    plan = scheduler.schedule()
    assert plan is not None
    assert plan.wants_forced is (grammar is not None)
