"""Random workloads against the KV-content oracle, and proof that the oracle sees what it is there to see."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
from kv_oracle import OracleError, make_request, solo_run
from simulation import Simulation
from slow_cases import slow_but

import aengine.scheduler.scheduler as scheduler_module
import aengine.scheduler.sequence as request_module
from aengine.api.outputs import FinishReason
from aengine.cache import PageCache, PageChain, PageNeeds, Prefix, PrefixIndex, Windows
from aengine.scheduler.drafts import DraftProgress
from aengine.scheduler.kv import KVCacheManager
from aengine.scheduler.live_sequences import LiveSequences
from aengine.scheduler.plan import StepPlan, StepResult
from aengine.scheduler.scheduler import Scheduler
from aengine.scheduler.sequence import Request, SchedulerConfig, Sequence
from aengine.scheduler.states import RowStates
from aengine.scheduler.tier_loads import TierLoads

WORKLOADS = 3000
PARTS = 60
VOCAB_SIZE = 50
GROUPS: list[Windows] = [(None,), (None,), (None,), (None, 12), (None, 3, 3, 40), (1, 20, 20), (17,)]


def random_config(rng: random.Random, max_in_flight: int = 1) -> SchedulerConfig:
    page_size = rng.choice([1, 1, 16, 16, 16, 64])
    max_model_len = rng.choice([24, 60, 130])
    pages_of_one = -(-max_model_len // page_size)
    max_num_seqs = rng.choice([1, 2, 5, 16])
    max_num_batched_tokens = max(max_num_seqs, rng.choice([1, 8, 16, 40, 300]))
    windows = rng.choice(GROUPS)
    pages_of_one = PageNeeds(windows, page_size, max_num_batched_tokens).pages(pages_of_one)
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        num_pages=1 + pages_of_one + rng.choice([0, 0, 1, pages_of_one // 2, 2 * pages_of_one, 8 * pages_of_one]),
        page_size=page_size,
        windows=windows,
        max_drafts=20,
        enable_prefix_cache=rng.random() < 0.85,
        ageing_seconds=rng.choice([5.0, 50.0]),
        max_in_flight=max_in_flight,
        has_draft_model=windows[0] is None and (drawn := rng.random()) < 0.6,
        has_draft_head=windows[0] is None and drawn < 0.2 and max_in_flight == 1,
        max_adapters=rng.choice([None, None, 1, 2]),
    )


def with_states(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """The configuration for a model with recurrent states."""
    state_pages = rng.choice([1, 4])
    return dataclasses.replace(
        config,
        state_pages=state_pages,
        state_interval=config.page_size * rng.choice([0, 1, 2, 4]),
        num_pages=config.num_pages + state_pages * rng.choice([2, 2, 3, 10, 30]),
    )


def random_request(rng: random.Random, key: int, prefixes: list[list[int]], config: SchedulerConfig, now: float) -> Request:
    prompt = list(rng.choice(prefixes))[: rng.randint(0, config.max_model_len - 2)]
    prompt += [rng.randrange(50) for _ in range(rng.choice([0, 1, 3, 20]))]
    prompt = prompt[: config.max_model_len - 1] or [rng.randrange(50)]
    room = config.max_model_len - len(prompt)
    fills_context = rng.random() < 0.2
    request = make_request(
        key,
        prompt,
        room if fills_context else rng.randint(1, room),
        fills_context=fills_context,
        eos_token_ids=frozenset({7}) if rng.random() < 0.5 else frozenset(),
        stop_token_ids=frozenset({3, 9}) if rng.random() < 0.2 else frozenset(),
        priority=rng.choice([0, 0, 0, -1, 2]),
        tenant=rng.choice(["", "a", "b"]),
        arrival=now,
        deadline=now + rng.choice([3.0, 30.0]) if rng.random() < 0.05 else None,
        cache_salt=rng.choice(["", "", "", "salt"]),
        adapter=rng.choice([0, 0, 0, 1, 2, 3]),
    )
    if rng.random() < 0.3:  # any object: it is the sampler's
        request = dataclasses.replace(
            request, params=dataclasses.replace(request.params, grammar="a grammar", grammar_from=rng.choice([0, 0, 4, 99]))
        )
    session = rng.choice([None, None, "first", "second"])
    return dataclasses.replace(request, max_drafts=rng.choice([0, 1, 4, 20]), session=session)


def without_output(request: Request, rng: random.Random, config: SchedulerConfig) -> Request:
    """With a prompt that may fill the whole context."""
    prompt = request.prompt if rng.random() < 0.7 else np.resize(request.prompt, config.max_model_len)
    params = dataclasses.replace(request.params, pooling=rng.choice(["last", "mean"]))
    return dataclasses.replace(request, prompt=prompt, params=params, max_tokens=0, fills_context=False)


def with_output(request: Request, rng: random.Random) -> Request:
    """Now and then one that has a part of its output already."""
    if not request.max_tokens or rng.random() < 0.6:
        return request
    output = solo_run(request, VOCAB_SIZE).output
    return dataclasses.replace(request, output=np.array(output[: rng.randint(0, len(output) - 1)], np.int32))


def fork_at_random(simulation: Simulation, key: int, rng: random.Random) -> Request | None:
    """A request that goes on from somewhere in the output of another one, which runs or has ended."""
    source = rng.choice(list(simulation.runner.truths.values())).request
    output = [*source.output.tolist(), *simulation.received.get(source.key, [])]
    if not source.max_tokens or not output:
        return None
    at = rng.randint(0, len(output) - 1) if rng.random() < 0.5 else len(output) - 1
    return dataclasses.replace(
        source,
        key=key,
        params=dataclasses.replace(source.params, seed=key),
        output=np.array(output[:at], np.int32),
        arrival=simulation.clock.now,
        deadline=None,
        num_forks=0,
        fork_of=source.key,
        fork_at=len(source.prompt) + at,
    )


def run_workload(seed: int, max_in_flight: int = 1) -> Simulation:
    rng = random.Random(seed)
    config = random_config(rng, max_in_flight)
    drafts = random.Random(seed) if seed % 2 else None
    if seed % 4 == 2 or seed % 8 == 5:  # without drafts and with them
        config = with_states(config, random.Random(seed))
    tiers = random.Random(seed) if seed % 3 == 0 else None
    forking, touching = random.Random(seed), random.Random(seed)
    share, seconds = touching.choice([0.0, 0.2, 0.9]), touching.choice([5.0, 1000.0])
    config = dataclasses.replace(config, session_share=share, session_seconds=seconds)
    simulation = Simulation(config, overlap=rng.random() < 0.5, rng=rng if rng.random() < 0.3 else None, drafts=drafts, tiers=tiers)
    prefixes = [[rng.randrange(50) for _ in range(config.max_model_len)] for _ in range(rng.randint(1, 3))]
    p_submit, p_cancel, p_park = rng.choice([0.3, 1.0]), rng.choice([0.0, 0.0, 0.1]), rng.choice([0.0, 0.1, 0.3])
    p_flush = rng.choice([0.0, 0.0, 0.1])
    updates = random.Random(seed)  # of weights
    embeddings = random.Random(seed)
    outputs = random.Random(seed)
    p_fork = forking.choice([0.0, 0.1, 0.4])
    p_weights = updates.choice([0.0, 0.0, 0.1])
    num_requests = rng.randint(1, 14)
    parked: set[int] = set()
    key = 0
    idle = 0
    while True:
        while key < num_requests and rng.random() < p_submit:
            request = random_request(rng, key, prefixes, config, simulation.clock.now)
            num_forks = rng.choice([0, 0, 0, 0, 1, 3])
            if embeddings.random() < 0.15:
                request, num_forks = without_output(request, embeddings, config), 0
            simulation.submit(with_output(dataclasses.replace(request, num_forks=num_forks), outputs))
            key += 1
            for _ in range(num_forks):
                params = dataclasses.replace(request.params, seed=key)
                max_tokens = rng.randint(1, request.max_tokens)
                fork = dataclasses.replace(request, key=key, params=params, max_tokens=max_tokens, fills_context=False, fork_of=request.key)
                simulation.submit(with_output(fork, outputs))
                key += 1
        if key and num_requests < 30 and forking.random() < p_fork:
            forked = fork_at_random(simulation, key, forking)
            if forked is not None:
                simulation.submit(forked)
                key, num_requests = key + 1, num_requests + 1
        if key and rng.random() < p_cancel:
            simulation.cancel(rng.randrange(key))
        if key and rng.random() < p_park and len(simulation.plans) < 1000:  # readers become steady in the end
            parked.add(chosen := rng.randrange(key))
            simulation.scheduler.set_parked(chosen, True)
        if parked and rng.random() < 0.2:
            simulation.scheduler.set_parked(parked.pop(), False)
        if touching.random() < 0.1:
            simulation.scheduler.touch((touching.choice(["", "a", "b"]), touching.choice(["first", "second", "third"])))
        if rng.random() < p_flush:
            simulation.scheduler.flush_cache()
        if updates.random() < p_weights and simulation.changing is None:
            simulation.changing = updates.choice(["keep", "keep", "recompute", "finish", "abort"])
        simulation.clock.now += 1.0
        worked = simulation.step()
        idle = 0 if worked else idle + 1
        if not worked and key >= num_requests:
            if not parked:
                break
            simulation.scheduler.set_parked(parked.pop(), False)
        assert idle < 200
        assert len(simulation.plans) < 8000, "no progress"
    simulation.check_finished()
    return simulation


@pytest.mark.parametrize("part", slow_but([0], range(PARTS)))
def test_random_workloads(part: int) -> None:
    for seed in range(part, WORKLOADS, PARTS):
        print(f"workload {seed}")
        run_workload(seed)


def fails(seeds: range) -> bool:
    for seed in seeds:
        try:
            run_workload(seed)
        except (OracleError, AssertionError, KeyError):
            return True
    return False


@pytest.mark.slow
class TestTheOracleCanFail:
    """Each of these breaks one promise of the code on purpose."""

    def test_release_one_step_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = LiveSequences.finish

        def finish(self: LiveSequences, sequence: Sequence, reason: FinishReason, **details: Any) -> None:
            if sequence.row >= 0:
                self._rows.flights[sequence.row] = 0
            real(self, sequence, reason, **details)

        monkeypatch.setattr(LiveSequences, "finish", finish)
        assert fails(range(200))

    def test_publish_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = KVCacheManager.admit

        def admit(self: KVCacheManager, sequence: Sequence, prefix: Prefix, tenant_id: int, primary: Sequence | None = None) -> None:
            real(self, sequence, prefix, tenant_id, primary)
            row = np.array([sequence.row], np.int32)
            self.publish(row, self.rows.num_known[row])

        monkeypatch.setattr(KVCacheManager, "admit", admit)
        assert fails(range(200))

    def test_broken_ref_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def retain(self: PageCache, pages: np.ndarray) -> None:
            for page in pages.tolist():
                if self.refs[page] == 0:
                    self._cached.pop(page, None)
                    self.refs[page] = 1

        monkeypatch.setattr(PageCache, "retain", retain)
        assert fails(range(200))

    def test_fork_without_its_copy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = KVCacheManager.admit

        def admit(self: KVCacheManager, sequence: Sequence, prefix: Prefix, tenant_id: int, primary: Sequence | None = None) -> None:
            real(self, sequence, prefix, tenant_id, primary)
            self.changes.copies.clear()

        monkeypatch.setattr(KVCacheManager, "admit", admit)
        assert fails(range(200))

    def test_what_was_not_loaded_is_published(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = TierLoads.end_load
        monkeypatch.setattr(TierLoads, "end_load", lambda self, load, num_loaded: real(self, load, len(load.names)))
        assert fails(range(200))

    def test_salt_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_module, "PageChain", lambda size, salt, adapter, version: PageChain(size, "", adapter, version))
        assert fails(range(400))

    def test_adapter_not_in_the_hash(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_module, "PageChain", lambda size, salt, adapter, version: PageChain(size, salt, 0, version))
        assert fails(range(400))

    def test_cached_prefixes_survive_new_weights(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Scheduler, "use_weights", lambda self, *, recompute: None)
        assert fails(range(200))

    def test_pages_given_back_one_token_early(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = KVCacheManager.leave_behind
        monkeypatch.setattr(KVCacheManager, "leave_behind", lambda self, rows, committed: real(self, rows, committed + 2))
        assert fails(range(200))

    def test_pages_given_back_while_a_step_reads_them(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = KVCacheManager.leave_behind
        monkeypatch.setattr(KVCacheManager, "leave_behind", lambda self, rows, _: real(self, rows, self.rows.num_computed[rows]))
        assert fails(range(200))

    def test_prefixes_without_their_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A window one token shorter when prefixes are looked up."""
        real = PageCache.match

        def match(self: PageCache, chain: PageChain, tokens: np.ndarray, needs: PageNeeds) -> Prefix:
            windows = [None] * needs.num_full + [max(1, kind.window - 1) for kind in needs.kinds for _ in range(kind.num_groups)]
            return real(self, chain, tokens, PageNeeds(tuple(windows), needs.page_size, 1, needs.state_pages))

        monkeypatch.setattr(PageCache, "match", match)
        assert fails(range(200))

    def test_pages_under_the_name_of_another_group(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = PageCache.publish
        monkeypatch.setattr(PageCache, "publish", lambda self, pages, *rest: real(self, pages[::-1], *rest))
        assert fails(range(200))

    def test_rejected_drafts_counted_as_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = scheduler_module.new_tokens

        def all_accepted(table: Any, plan: StepPlan, result: StepResult) -> Any:
            if result.accepted is not None:
                result = dataclasses.replace(result, accepted=plan.num_sampled[plan.num_sampled > 0])
            return real(table, plan, result)

        monkeypatch.setattr(scheduler_module, "new_tokens", all_accepted)
        assert fails(range(200))

    def test_pages_given_back_with_accepted_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = KVCacheManager.give_back

        def give_back(self: KVCacheManager, drafted: np.ndarray) -> None:
            self.rows.num_tokens[drafted] -= 2
            real(self, drafted)
            self.rows.num_tokens[drafted] += 2

        monkeypatch.setattr(KVCacheManager, "give_back", give_back)
        assert fails(range(400))

    def test_a_page_that_is_handed_out_counts_as_computed_by_the_draft_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = PageCache.allocate

        def allocate(self: PageCache, count: int) -> np.ndarray:
            before = self.marked.copy()
            pages = real(self, count)
            self.marked[pages] = before[pages]
            return pages

        monkeypatch.setattr(PageCache, "allocate", allocate)
        assert fails(range(60, 100))

    def test_the_draft_model_computes_its_last_draft(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = DraftProgress.commit

        def commit(self: DraftProgress, plan: StepPlan, committed: np.ndarray) -> None:
            if plan.draft_rows is not None:
                drafted = plan.draft_rows
                plan = dataclasses.replace(plan, draft_rows=dataclasses.replace(drafted, num_drafts=drafted.num_drafts + 1))
            real(self, plan, committed)

        monkeypatch.setattr(DraftProgress, "commit", commit)
        assert fails(range(200))

    def test_a_head_computes_a_chunk_with_the_model(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DraftProgress, "follow", lambda self, row, start, length: self.catch_up(row, start + length))
        assert fails(range(100))

    def test_what_a_head_computed_of_its_own_hidden_states_is_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = DraftProgress.commit

        def commit(self: DraftProgress, plan: StepPlan, committed: np.ndarray) -> None:
            self._is_head = False
            real(self, plan, committed)

        monkeypatch.setattr(DraftProgress, "commit", commit)
        assert fails(range(100))

    def test_a_state_is_taken_for_that_of_more_tokens(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = PageCache.publish_state
        names: list[bytes] = []

        def publish_state(self: PageCache, pages: np.ndarray, name: bytes, page_tokens: bytes) -> None:
            names.append(name)
            real(self, pages, names[-2] if len(names) > 1 else name, page_tokens)

        monkeypatch.setattr(PageCache, "publish_state", publish_state)
        monkeypatch.setattr(PrefixIndex, "find", lambda index, name, _: index._by_name.get(name, (0,))[0])
        assert fails(range(60))

    def test_a_state_is_released_before_the_step_that_begins_with_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = RowStates.begin

        def begin(self: RowStates, row: int, sequence: Sequence, num_computed: int, source: np.ndarray | None, num_found: int) -> None:
            real(self, row, sequence, num_computed, source, num_found)
            if source is not None:
                self._cache.release_state(source)
                self._rows[row].source = None

        monkeypatch.setattr(RowStates, "begin", begin)
        assert fails(range(2, 600, 4))

    def test_a_row_without_a_token_goes_on_with_its_state(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = Scheduler._settle_drafts

        def settle(self: Scheduler, plan: StepPlan, committed: np.ndarray) -> list[Sequence]:
            real(self, plan, committed)
            return []

        monkeypatch.setattr(Scheduler, "_settle_drafts", settle)
        assert fails(range(2, 400, 4))

    def test_a_state_is_kept_behind_drafts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def keep_of_chunk(self: RowStates, row: int, start: int, length: int, *, has_drafts: bool) -> list[bytes]:
            return real(self, row, start + has_drafts * length, length, has_drafts=has_drafts)

        real = RowStates.keep_of_chunk
        monkeypatch.setattr(RowStates, "keep_of_chunk", keep_of_chunk)
        assert fails(range(5, 400, 8))

    def test_a_state_is_found_after_fewer_tokens_than_it_is_of(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = RowStates._name_at

        def name_at(self: RowStates, sequence: Sequence, length: int) -> bytes | None:
            page_size = self._cache.page_size
            return real(self, sequence, length - page_size if length > page_size else length)

        monkeypatch.setattr(RowStates, "_name_at", name_at)
        assert fails(range(2, 400, 4))
