"""What the scheduler promises, one promise at a time. Output is compared with the solo run throughout."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from kv_oracle import make_request, solo_run
from simulation import Simulation

from aengine.api.outputs import FinishReason
from aengine.cache import PageChain
from aengine.scheduler.draft_lengths import DraftLengths
from aengine.scheduler.kv import MAX_PREEMPTIONS
from aengine.scheduler.sequence import SchedulerConfig

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200, num_pages=200, page_size=4)


def config(**changes: object) -> SchedulerConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


@pytest.fixture(params=[False, True], ids=["in-turn", "one-ahead"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_a_pause_counts_for_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are timed to know what drafts cost."""
    took: list[float] = []
    for name in ("plain_step_took", "step_took"):
        monkeypatch.setattr(DraftLengths, name, lambda lengths, seconds, *rest, **named: took.append(seconds))
    simulation = Simulation(config(max_drafts=4), drafts=random.Random(0))
    simulation.submit(make_request(1, [1, 2, 3], 60))
    for number in range(200):
        simulation.clock.now += 1.0
        simulation.step()
        if number == 8:
            simulation.scheduler.pause()
            simulation.clock.now += 100.0
    simulation.check_finished()
    assert len(took) > 10
    assert set(took) == {1.0}


def test_uncomputed_tokens_are_those_before_the_next_output() -> None:
    """Of waiting prompts as many as of the latest, until the cache was looked at; of running ones those in no step; of decodes and parked
    ones none."""
    simulation = Simulation(config(max_num_seqs=2, max_num_batched_tokens=16))
    scheduler = simulation.scheduler

    def uncomputed() -> int:
        return scheduler.stats().uncomputed_tokens

    simulation.submit(make_request(0, list(range(12)), 30))
    simulation.run()
    simulation.submit(make_request(1, list(range(40)), 30))
    simulation.submit(make_request(2, [7] * 20, 30))
    simulation.submit(make_request(3, [*range(12), 9, 9], 30))
    assert uncomputed() == 40 + 20 + 14
    simulation.step()
    assert uncomputed() == 40 - 12 - 16 + 20 + 14  # pages of request 0 are found
    scheduler.set_parked(1, True)
    assert uncomputed() == 20 + 14
    scheduler.set_parked(3, True)
    assert uncomputed() == 20
    scheduler.set_parked(1, False)
    scheduler.set_parked(3, False)
    assert uncomputed() == 40 - 12 - 16 + 20 + round(14 * (12 + 28) / (12 + 40))
    simulation.submit(make_request(4, [7] * 50, 30, num_forks=1))
    before = uncomputed()
    simulation.submit(make_request(5, [7] * 50, 30, fork_of=4))
    assert uncomputed() == before + 1
    simulation.run()
    simulation.check_finished()


class TestPrefixSharing:
    def test_two_cold_requests_compute_the_shared_part_once(self, overlap: bool) -> None:
        simulation = Simulation(config(max_num_batched_tokens=16), overlap=overlap)
        prompt = list(range(40))
        simulation.submit(make_request(0, [*prompt, 1], 4))
        simulation.submit(make_request(1, [*prompt, 2], 4))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 40}
        assert simulation.runner.num_computed <= 41 + 1 + 2 * 4

    def test_a_warm_prefix_is_reported(self) -> None:
        simulation = Simulation(CONFIG)
        simulation.submit(make_request(0, list(range(20)), 2))
        simulation.run()
        simulation.submit(make_request(1, list(range(20)), 2))
        simulation.submit(make_request(2, list(range(18)), 2, cache_salt="other"))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 16, 2: 0}

    def test_output_is_cached_too(self) -> None:
        simulation = Simulation(CONFIG)
        first = simulation.submit(make_request(0, [1, 2, 3], 14))
        simulation.run()
        simulation.submit(make_request(1, [*first.tokens.tolist(), 5], 2))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached[1] == 16

    def test_off(self) -> None:
        simulation = Simulation(config(enable_prefix_cache=False))
        for key in range(2):
            simulation.submit(make_request(key, list(range(20)), 2))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 0}
        assert simulation.scheduler.stats().cached_tokens == 0

    @pytest.mark.parametrize("leave", ["cancel", "park"])
    def test_whoever_waits_for_a_prefix_goes_on_when_it_is_abandoned(self, leave: str, overlap: bool) -> None:
        simulation = Simulation(config(max_num_batched_tokens=8), overlap=overlap)
        prompt = list(range(60))
        simulation.submit(make_request(0, [*prompt, 1], 4))
        simulation.submit(make_request(1, [*prompt, 2], 4))
        simulation.step()
        assert simulation.scheduler.stats().waiting == 1
        if leave == "cancel":
            simulation.cancel(0)
        else:
            simulation.scheduler.set_parked(0, True)
        simulation.run()
        assert simulation.received[1] == simulation.runner.truths[1].output
        simulation.scheduler.set_parked(0, False)
        simulation.run()
        simulation.check_finished()


class TestForks:
    @pytest.mark.parametrize("length", [1, 16, 17, 30])
    @pytest.mark.parametrize("prefix_cache", [False, True])
    def test_forks_share_the_pages_of_the_prompt(self, length: int, prefix_cache: bool, overlap: bool) -> None:
        simulation = Simulation(config(max_num_batched_tokens=8, enable_prefix_cache=prefix_cache), overlap=overlap)
        prompt = list(range(length))
        simulation.submit(make_request(0, prompt, 10, num_forks=3))
        for key in range(1, 4):
            simulation.submit(make_request(key, prompt, 10, fork_of=0))
        most = 0
        while simulation.step():
            most = max(most, simulation.scheduler.stats().pages_used)
        simulation.check_finished()
        assert simulation.runner.num_computed == length + 3 + 4 * 9  # the prompt once; its last token for every fork
        shared, whole = (length - 1) // 4, -(-(length + 9) // 4)
        assert most <= shared + 4 * (whole - shared)

    @pytest.mark.parametrize("length", [1, 16, 17])
    @pytest.mark.parametrize("prefix_cache", [False, True])
    def test_forks_that_have_output_share_the_prompt(self, length: int, prefix_cache: bool, overlap: bool) -> None:
        simulation = Simulation(config(enable_prefix_cache=prefix_cache), overlap=overlap)
        for key, known in enumerate([3, 0, 5, 9]):
            request = make_request(key, list(range(length)), 10, **({"fork_of": 0} if key else {"num_forks": 3}))
            output = solo_run(request, simulation.vocab_size).output[:known]
            simulation.submit(dataclasses.replace(request, output=np.array(output, np.int32)))
        assert simulation.scheduler.stats().uncomputed_tokens == length + 3 + 1 + 5 + 9
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: length - 1, 2: length, 3: length}
        assert simulation.runner.num_computed == length + 9 + 10 + 9 + 9

    def test_a_prompt_that_forks_share_is_named_once(self, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        named: list[bytes | memoryview] = []
        append = PageChain.append

        def count(self: PageChain, page_tokens: bytes | memoryview) -> None:
            named.append(page_tokens)
            append(self, page_tokens)

        monkeypatch.setattr(PageChain, "append", count)
        simulation = Simulation(config(max_num_batched_tokens=8), overlap=overlap)
        simulation.submit(make_request(0, list(range(40)), 1, num_forks=9))
        for key in range(1, 10):
            simulation.submit(make_request(key, list(range(40)), 1, fork_of=0))
        simulation.run()
        simulation.check_finished()
        assert len(named) == 10

    @pytest.mark.parametrize("overlap", [True])
    def test_forks_do_without_their_primary(self, overlap: bool) -> None:
        simulation = Simulation(config(max_num_batched_tokens=8), overlap=overlap)
        simulation.submit(make_request(0, [1] * 20, 10, num_forks=1))
        simulation.submit(make_request(1, [1] * 20, 10, fork_of=0))
        simulation.step()
        simulation.cancel(0)
        simulation.run()
        simulation.check_finished()


class TestLockstep:
    def test_rows_that_need_their_last_token_are_never_in_two_steps_at_once(self) -> None:
        simulation = Simulation(CONFIG, overlap=True)
        for key in range(3):
            request = make_request(key, [key] * 5, 20)
            params = dataclasses.replace(request.params, processors=(lambda logits, token_ids: None,)) if key == 1 else request.params
            simulation.submit(dataclasses.replace(request, params=params))
        row_keys: set[int] = set()
        while simulation.step():
            for first, second in simulation.at_once:
                row_keys |= {simulation.runner.truth_of(row).request.key for row in set(first.rows.tolist()) & set(second.rows.tolist())}
            simulation.at_once.clear()
        assert row_keys == {0, 2}
        simulation.check_finished()


class TestPreemption:
    def test_two_that_do_not_fit_together_take_turns(self, overlap: bool) -> None:
        simulation = Simulation(config(num_pages=1 + 25, max_model_len=100), overlap=overlap)
        for key in range(2):
            simulation.submit(make_request(key, [key + 1] * 20, 80, arrival=float(key)))
        simulation.run()
        simulation.check_finished()
        preemptions = simulation.scheduler.stats().preemptions
        assert 1 <= preemptions <= MAX_PREEMPTIONS

    def test_preemptions_per_request_are_bounded(self, overlap: bool) -> None:
        simulation = Simulation(config(num_pages=1 + 30, max_model_len=100, max_num_seqs=8), overlap=overlap)
        counts: dict[int, int] = {}
        preempt = simulation.scheduler._live.preempt

        def counted(sequence: object) -> None:
            key = sequence.request.key  # type: ignore[attr-defined]
            counts[key] = counts.get(key, 0) + 1
            preempt(sequence)  # type: ignore[arg-type]

        simulation.scheduler._live.preempt = counted  # type: ignore[method-assign]
        for key in range(12):
            simulation.submit(make_request(key, [key + 1] * 5, 95, arrival=float(key)))
        simulation.run()
        simulation.check_finished()
        assert counts
        assert max(counts.values()) <= MAX_PREEMPTIONS

    def test_the_newest_of_the_lowest_priority_gives_way(self) -> None:
        simulation = Simulation(config(num_pages=1 + 20, max_model_len=80, enable_prefix_cache=False))
        for key, priority in enumerate([0, 5, 5, 0]):
            simulation.submit(make_request(key, [key + 1] * 12, 40, priority=priority, arrival=float(key)))
        victims: list[int] = []
        preempt = simulation.scheduler._live.preempt
        simulation.scheduler._live.preempt = lambda one: (victims.append(one.request.key), preempt(one))[0]  # type: ignore[method-assign, func-returns-value]
        simulation.run()
        simulation.check_finished()
        assert victims[0] == 2

    def test_a_parked_one_gives_way_first_and_continues_where_it_was(self, overlap: bool) -> None:
        simulation = Simulation(config(num_pages=1 + 25, max_model_len=100, enable_prefix_cache=False), overlap=overlap)
        simulation.submit(make_request(0, [1] * 40, 30, priority=-5, arrival=0.0))
        for _ in range(10):
            simulation.step()
        received = len(simulation.received[0])
        simulation.scheduler.set_parked(0, True)
        simulation.submit(make_request(1, [2] * 80, 20, arrival=1.0))
        simulation.run()
        assert simulation.finished.keys() == {1}
        assert len(simulation.received[0]) <= received + 1
        assert simulation.scheduler.stats().parked == 1
        assert simulation.scheduler.stats().pages_used == 0
        simulation.scheduler.set_parked(0, False)
        simulation.run()
        simulation.check_finished()

    def test_a_parked_one_keeps_its_pages_while_memory_allows(self, overlap: bool) -> None:
        simulation = Simulation(CONFIG, overlap=overlap)
        simulation.submit(make_request(0, [1] * 40, 30))
        for _ in range(5):
            simulation.step()
        simulation.scheduler.set_parked(0, True)
        simulation.run()
        used, computed = simulation.scheduler.stats().pages_used, simulation.runner.num_computed
        assert used >= 10
        simulation.submit(make_request(1, [2] * 40, 5))
        simulation.run()
        assert simulation.scheduler.stats().pages_used == used
        simulation.scheduler.set_parked(0, False)
        simulation.run()
        simulation.check_finished()
        assert simulation.runner.num_computed <= computed + 45 + 30

    def test_a_parked_one_gives_up_its_row(self) -> None:
        simulation = Simulation(config(max_num_seqs=1))
        simulation.submit(make_request(0, [1] * 8, 20))
        simulation.step()
        simulation.scheduler.set_parked(0, True)
        simulation.submit(make_request(1, [2] * 8, 5))
        simulation.run()
        assert simulation.finished.keys() == {1}
        simulation.scheduler.set_parked(0, False)
        simulation.run()
        simulation.check_finished()


class TestOrder:
    def order_of_starts(self, simulation: Simulation) -> list[int]:
        simulation.run()
        simulation.check_finished()
        return list(simulation.cached)

    def test_priority_then_arrival(self) -> None:
        simulation = Simulation(config(max_num_seqs=1))
        simulation.clock.now = 9.0
        for key, (priority, arrival) in enumerate([(0, 3.0), (1, 0.0), (-1, 9.0), (0, 2.0)]):
            simulation.submit(make_request(key, [key], 3, priority=priority, arrival=arrival))
        assert self.order_of_starts(simulation) == [2, 3, 0, 1]

    def test_waiting_improves_priority(self) -> None:
        simulation = Simulation(config(max_num_seqs=1, ageing_seconds=10.0))
        simulation.clock.now = 100.0
        simulation.submit(make_request(0, [1], 3, priority=0, arrival=100.0))
        simulation.submit(make_request(1, [2], 3, priority=5, arrival=35.0))  # has waited for six levels
        simulation.submit(make_request(2, [3], 3, priority=5, arrival=65.0))  # for three
        assert self.order_of_starts(simulation) == [1, 0, 2]

    def test_nothing_starves(self) -> None:
        simulation = Simulation(config(max_num_seqs=1, ageing_seconds=5.0))
        simulation.submit(make_request(0, [1], 2, priority=3, arrival=0.0))
        key = 1
        while 0 not in simulation.finished:
            simulation.submit(make_request(key, [key % 50], 2, priority=0, arrival=simulation.clock.now))
            key += 1
            for _ in range(2):
                simulation.step()
            simulation.clock.now += 1.0
            assert key < 100
        assert key > 10

    @pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
    def test_fair_share_between_tenants(self, weight: float, share: float) -> None:
        """One tenant has ten times the load; while both are backlogged each is served its share."""
        simulation = Simulation(config(max_num_seqs=4, num_pages=400, tenant_weights={"quiet": weight}))
        key = 0
        for i in range(300):
            for tenant in ["loud"] * 10 + ["quiet"] if i < 30 else []:
                simulation.submit(make_request(key, [key % 50, 1, 2, 3], 16, tenant=tenant, arrival=float(i), eos_token_ids=frozenset()))
                key += 1
        served = {"loud": 0, "quiet": 0}
        while simulation.scheduler._queue._alive.min() > 4:  # both are backlogged
            simulation.step()
            plan = simulation.plans[-1]
            for row, length in zip(plan.rows.tolist(), plan.lengths.tolist(), strict=True):
                served[simulation.runner.truth_of(row).request.tenant] += length
        assert sum(served.values()) > 500
        assert served["quiet"] / sum(served.values()) == pytest.approx(share, abs=0.05)

    @pytest.mark.slow
    def test_a_tenant_that_fills_the_rows_leaves_one_for_others(self) -> None:
        """Twenty requests of many sequences wait and run; another tenant's first token comes a step after its request."""
        simulation = Simulation(config(max_num_seqs=16, num_pages=400, max_num_batched_tokens=64))
        forks, key = 32, 0
        for _ in range(20):
            first = key
            for _ in range(forks):
                of = {"num_forks": forks - 1} if key == first else {"fork_of": first}
                simulation.submit(make_request(key, [1, 2, 3], 30, tenant="many", eos_token_ids=frozenset(), **of))
                key += 1
        for _ in range(12):
            simulation.step()
        assert simulation.scheduler.stats().running == 15
        for tenant in ("few", "other"):
            simulation.submit(make_request(key, [7, 8, key % 50], 4, tenant=tenant, arrival=1.0, eos_token_ids=frozenset()))
            started = simulation.scheduler._num_steps
            while not simulation.received[key]:
                simulation.step()
            assert simulation.scheduler._num_steps - started <= 3, "the step under way, its own, and the one that overlaps it"
            simulation.run()
            key += 1

    def test_a_tenant_that_fills_the_pages_gives_some_to_others(self, overlap: bool) -> None:
        """To the first request of each: that computes a step later than it would alone, however long the others are and have waited."""
        simulation = Simulation(config(max_num_seqs=16, num_pages=100), overlap=overlap)
        for key in range(40):
            simulation.submit(make_request(key, [key, 1, 2], 90, tenant="many", eos_token_ids=frozenset()))
        for _ in range(30):
            simulation.step()
        simulation.clock.now += 100.0
        for key in range(40, 46):
            while simulation.scheduler._cache.available > 6:
                simulation.step()
            prompt = [key % 50, 7, *range(22)]  # which fits into one step
            simulation.submit(make_request(key, prompt, 4, tenant=f"few{key}", arrival=simulation.clock.now, eos_token_ids=frozenset()))
            before = simulation.scheduler._num_steps
            while not simulation.received[key]:
                simulation.step()
            assert simulation.scheduler._num_steps - before <= 2 + 2 * overlap, "that under way, one without it, its own, and one ahead"
        simulation.run()
        simulation.check_finished()

    def test_the_rows_of_those_who_are_not_named_are_all(self) -> None:
        simulation = Simulation(config(max_num_seqs=16, num_pages=400))
        for key in range(20):
            simulation.submit(make_request(key, [key], 30, eos_token_ids=frozenset()))
        for _ in range(4):
            simulation.step()
        assert simulation.scheduler.stats().running == 16

    def test_an_idle_tenant_saves_up_no_credit(self) -> None:
        simulation = Simulation(config(max_num_seqs=1, ageing_seconds=1e9))
        simulation.clock.now = 100.0
        for key in range(40):
            simulation.submit(make_request(key, [key], 8, tenant="busy", arrival=float(key)))
        for _ in range(160):
            simulation.step()
        for key in range(40, 50):
            simulation.submit(make_request(key, [key], 8, tenant="late", arrival=100.0))
        already = set(simulation.cached)
        simulation.run()
        simulation.check_finished()
        order = ["late" if key >= 40 else "busy" for key in simulation.cached if key not in already][:10]
        assert 4 <= order.count("late") <= 6


class TestDeadlines:
    def test_what_cannot_start_in_time_costs_no_prefill(self) -> None:
        simulation = Simulation(config(max_num_seqs=1))
        simulation.submit(make_request(0, [1], 50, deadline=None))
        simulation.submit(make_request(1, [2], 5, deadline=10.0))
        for _ in range(20):
            simulation.step()
            simulation.clock.now += 1.0
        assert simulation.finished[1].reason is FinishReason.DEADLINE
        assert 1 in simulation.released
        assert 1 not in simulation.cached
        simulation.run()
        simulation.check_finished()

    def test_an_expired_one_ends_with_what_it_has(self, overlap: bool) -> None:
        simulation = Simulation(CONFIG, overlap=overlap)
        simulation.submit(make_request(0, [1], 100, deadline=10.0))
        for _ in range(30):
            simulation.step()
            simulation.clock.now += 1.0
        assert simulation.finished[0].reason is FinishReason.DEADLINE
        assert 8 <= len(simulation.received[0]) <= 11
        simulation.check_finished()

    def test_deadlines_of_gone_requests_are_forgotten(self) -> None:
        simulation = Simulation(CONFIG)
        for key in range(500):
            simulation.submit(make_request(key, [1], 1, deadline=1e9))
            simulation.run()
        assert len(simulation.scheduler._deadlines) < 100


class TestSteps:
    @pytest.mark.quick_cases(1)
    def test_a_running_decode_gets_a_token_in_every_step(self, overlap: bool) -> None:
        """However many long prompts arrive."""
        simulation = Simulation(
            config(max_num_seqs=64, max_model_len=1200, num_pages=40000, max_num_batched_tokens=256, page_size=16), overlap=overlap
        )
        simulation.submit(make_request(0, [1, 2, 3], 60))
        simulation.step()
        for key in range(1, 30):
            simulation.submit(make_request(key, [(key * 7 + i) % 50 for i in range(640)], 4, arrival=float(key)))
            simulation.step()
            if 0 in simulation.finished:
                break
            assert 0 in [
                simulation.runner.truth_of(row).request.key for row in simulation.plans[-1].rows[: simulation.plans[-1].num_decodes]
            ]
            assert int(simulation.plans[-1].lengths.sum()) == 256
        simulation.run()
        simulation.check_finished()

    def test_a_finished_one_does_not_run_past_its_length(self, overlap: bool) -> None:
        simulation = Simulation(CONFIG, overlap=overlap)
        simulation.submit(make_request(0, [1, 2, 3], 5))
        simulation.run()
        simulation.check_finished()
        assert simulation.runner.num_computed == 3 + 4

    def test_what_a_step_in_flight_uses_is_released_only_when_it_returned(self) -> None:
        simulation = Simulation(CONFIG, overlap=True)
        simulation.submit(make_request(0, [1] * 9, 50))
        for _ in range(4):
            simulation.step()
        assert simulation.flights
        simulation.cancel(0)
        assert simulation.scheduler.stats().pages_used > 0
        assert simulation.scheduler.stats().running == 0
        simulation.step()
        assert simulation.scheduler.stats().pages_used == 0
        simulation.check_finished()

    def test_what_is_still_to_be_copied_counts_as_held(self, overlap: bool) -> None:
        """A fork was planned, the plan was taken back, and the sequence that it copies a page from has ended."""
        simulation = Simulation(CONFIG, overlap=overlap)
        simulation.submit(make_request(0, [1] * 20, 30, num_forks=1))
        simulation.submit(make_request(1, [1] * 20, 30, fork_of=0))
        while (plan := simulation.scheduler.schedule()) is not None and not len(plan.copy_from):
            simulation.scheduler.commit(plan, simulation.runner.launch(plan).result())
            simulation._receive()
        assert plan is not None
        simulation.scheduler.rollback(plan, {})
        simulation.cancel(0)
        simulation.scheduler.flush_cache()
        held = simulation.scheduler.held_pages()
        assert set(plan.copy_from.tolist()) <= set(held.tolist())
        simulation.runner.keep(held)
        simulation.run()
        simulation.check_finished()

    def test_failed_rows_leave_the_others_untouched(self, overlap: bool) -> None:
        simulation = Simulation(CONFIG, overlap=overlap)
        for key in range(4):
            simulation.submit(make_request(key, [key] * 10, 30))
        for _ in range(5):
            simulation.step()
        plan = simulation.scheduler.schedule()
        assert plan is not None
        row = int(plan.rows[2])
        failing = simulation.runner.truth_of(row).request.key
        error = RuntimeError("no")
        simulation.scheduler.rollback(plan, {row: error})
        simulation.forced.add(failing)
        simulation.run()
        simulation.check_finished()
        assert simulation.finished[failing].error is error
        assert simulation.finished[failing].reason is FinishReason.ERROR
