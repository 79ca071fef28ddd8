"""Which replica a request goes to, and what counts as load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.api.outputs import CachedPages, EngineStats, LoadReport
from aengine.router.replica_load import (
    FIRST_WEIGHT,
    MOST_LOAD,
    PageNaming,
    PagePrefix,
    ReplicaLoad,
    ReplicaRouting,
    RequestPlacement,
    RoutedPrompt,
    RoutingPolicy,
)

SALT = b"salt of tests"
PAGE = 16


def prompt_of(token_ids: list[int], **fields: object) -> RoutedPrompt:
    pages = PagePrefix(token_ids, "", SALT)
    return RoutedPrompt(len(token_ids), pages.beginning, pages.digests, **fields)  # type: ignore[arg-type]


def random_prompt(seed: int, length: int = 320) -> RoutedPrompt:
    return prompt_of(np.random.default_rng(seed).integers(1000, size=length).tolist())


def make_replicas(count: int, **fields: float) -> list[ReplicaLoad]:
    return [ReplicaLoad(f"replica-{i}", page_size=PAGE, max_num_seqs=64, **fields) for i in range(count)]  # type: ignore[arg-type]


def tell(replica: ReplicaLoad, now: float = 0.0, *, draining: bool = False, pages: CachedPages | None = None, **stats: float) -> None:
    known = {"prefill_tokens_per_second": 10_000.0, "mean_step_seconds": 0.01, "pages_total": 10_000, **stats}
    replica.report(LoadReport(EngineStats(**known), draining, pages), now)  # type: ignore[arg-type]


def holds(replica: ReplicaLoad, prompt: RoutedPrompt, now: float = 0.0) -> None:
    """The replica reports that it has the prompt in its cache."""
    tell(replica, now, pages=CachedPages(snapshot=True, added=tuple(prompt.digests(PageNaming(PAGE)))))


def cached_tokens(replica: ReplicaLoad, prompt: RoutedPrompt) -> int:
    return prompt.num_tokens - replica.outlook(prompt, 0.0).uncached


def chosen(routing: ReplicaRouting, prompt: RoutedPrompt, replicas: list[ReplicaLoad], now: float = 0.0) -> ReplicaLoad:
    replica = routing.choose(prompt, replicas, now)
    assert replica is not None
    return replica


def place(
    routing: ReplicaRouting, prompt: RoutedPrompt, replicas: list[ReplicaLoad], now: float = 0.0
) -> tuple[ReplicaLoad, RequestPlacement]:
    replica = chosen(routing, prompt, replicas, now)
    return replica, replica.place(prompt, now)


@pytest.fixture(params=RoutingPolicy)
def routing(request: pytest.FixtureRequest) -> ReplicaRouting:
    return ReplicaRouting(request.param, seed=0)


@pytest.fixture
def by_prefix() -> ReplicaRouting:
    return ReplicaRouting(seed=0)


class TestWhoCanTake:
    def test_nobody(self, routing: ReplicaRouting) -> None:
        assert routing.choose(random_prompt(0), [], 0.0) is None

    def test_replicas_that_do_not_serve_are_left_out(self, routing: ReplicaRouting) -> None:
        idle, draining, excluded, serving = replicas = make_replicas(4)
        idle.serving = False
        tell(draining, draining=True)
        for seed in range(20):
            assert routing.choose(random_prompt(seed), replicas, 0.0, {excluded.name}) is serving
        serving.serving = False
        assert routing.choose(random_prompt(0), replicas, 0.0, {excluded.name}) is None

    def test_the_generation_that_a_request_began_with_is_required(self, routing: ReplicaRouting) -> None:
        old, new = replicas = make_replicas(2)
        for replica in replicas:
            tell(replica)
        tell(new, weights_version=1)
        prompts = [prompt_of([seed] * 40, generation=replica.generation) for seed in range(5) for replica in replicas]
        assert [routing.choose(prompt, replicas, 0.0) for prompt in prompts] == [old, new] * 5
        assert new.generation_of(0) == old.generation
        assert routing.choose(prompt_of([1], generation=new.generation_of(2)), replicas, 0.0) is None

    @pytest.mark.parametrize("stats", [{"paused": True}, {"sleep_level": 1}])
    def test_a_paused_replica_is_chosen_only_if_all_are(self, routing: ReplicaRouting, stats: dict[str, float]) -> None:
        paused, other = replicas = make_replicas(2)
        tell(paused, **stats)
        assert all(routing.choose(random_prompt(seed), replicas, 0.0) is other for seed in range(10))
        other.serving = False
        assert routing.choose(random_prompt(0), replicas, 0.0) is paused


class TestPolicies:
    def test_round_robin_takes_turns(self) -> None:
        routing, replicas = ReplicaRouting(RoutingPolicy.ROUND_ROBIN), make_replicas(3)
        assert [chosen(routing, random_prompt(0), replicas) for _ in range(6)] == replicas * 2

    def test_least_loaded_has_the_fewest_requests(self) -> None:
        routing, replicas = ReplicaRouting(RoutingPolicy.LEAST_LOADED, seed=0), make_replicas(3)
        placed = [place(routing, random_prompt(seed), replicas) for seed in range(6)]
        assert [replica.outstanding for replica in replicas] == [2, 2, 2]
        replica, placement = placed[0]
        replica.end_request(placement, 1.0)
        assert chosen(routing, random_prompt(9), replicas) is replica

    def test_hashing_moves_only_the_prompts_of_a_replica_that_goes(self) -> None:
        routing, replicas = ReplicaRouting(RoutingPolicy.HASH), make_replicas(5)
        prompts = [random_prompt(seed) for seed in range(200)]
        before = [chosen(routing, prompt, replicas) for prompt in prompts]
        assert {replica.name for replica in before} == {replica.name for replica in replicas}
        gone = replicas.pop(2)
        for prompt, replica in zip(prompts, before, strict=True):
            assert replica is gone or chosen(routing, prompt, replicas) is replica

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=80), st.integers(2, 6))
    @settings(deadline=None)
    def test_hashing_is_bounded_by_load(self, seeds: list[int], count: int) -> None:
        routing, replicas = ReplicaRouting(RoutingPolicy.HASH), make_replicas(count)
        for number, seed in enumerate(seeds, 1):
            place(routing, random_prompt(seed), replicas)
            assert max(replica.outstanding for replica in replicas) < MOST_LOAD * number / count + 1


class TestPrefixes:
    def test_a_prompt_goes_where_its_prefix_is_reported(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(8)
        for seed, replica in enumerate(replicas):
            holds(replica, random_prompt(seed))
        assert [chosen(by_prefix, random_prompt(seed), replicas) for seed in range(8)] == replicas

    def test_a_prompt_goes_where_its_prefix_was_sent(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(8)
        first, placement = place(by_prefix, random_prompt(0), replicas)
        first.first_token(placement, 0.1)
        assert chosen(by_prefix, random_prompt(0), replicas, 0.1) is first

    def test_a_conversation_alone_stays_where_it_began(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(8)
        history = list(range(300))
        places = []
        for turn in range(8):
            replica, placement = place(by_prefix, prompt_of(history), replicas, float(turn))
            replica.first_token(placement, turn + 0.1)
            replica.end_request(placement, turn + 0.5, output_tokens=60)
            places.append(replica.name)
            history += range(1000 * turn, 1000 * turn + 160)
        assert len(set(places)) == 1

    def test_what_was_sent_counts_until_reports_tell(self) -> None:
        (replica,) = make_replicas(1)
        tell(replica, pages=CachedPages(snapshot=True))
        placement = replica.place(random_prompt(0), 1.0)
        tell(replica, 2.0, pages=CachedPages(snapshot=False))
        assert cached_tokens(replica, random_prompt(0)) == 304  # it still waits
        replica.first_token(placement, 3.0)
        tell(replica, 3.01, pages=CachedPages(snapshot=False))
        assert cached_tokens(replica, random_prompt(0)) == 304  # the report may be older
        tell(replica, 4.0, pages=CachedPages(snapshot=False))
        assert cached_tokens(replica, random_prompt(0)) == 0

    def test_what_ended_without_a_token_is_not_expected_to_be_there(self) -> None:
        (replica,) = make_replicas(1)
        placement = replica.place(random_prompt(0), 1.0)
        replica.end_request(placement, 1.5)
        replica.end_request(placement, 1.5)
        replica.first_token(placement, 1.6)
        tell(replica, 3.0, pages=CachedPages(snapshot=True))
        assert (cached_tokens(replica, random_prompt(0)), replica.outstanding, replica.load(2.0)) == (0, 0, 0.0)

    def test_without_reports_of_pages_as_many_as_fit_are_remembered(self) -> None:
        (replica,) = make_replicas(1)
        tell(replica, pages_total=40)
        for seed in range(3):  # of 19 pages each
            placement = replica.place(random_prompt(seed), seed)
            replica.first_token(placement, seed)
            replica.end_request(placement, seed)
        assert [cached_tokens(replica, random_prompt(seed)) > 0 for seed in range(3)] == [False, True, True]

    def test_prefixes_of_an_adapter_have_its_key_at_each_replica(self, by_prefix: ReplicaRouting) -> None:
        keys = [{"story": 1}, {"story": 2}, {}]
        replicas = [ReplicaLoad(f"replica-{i}", page_size=PAGE, adapters=adapters) for i, adapters in enumerate(keys)]
        prompt = prompt_of(list(range(320)), adapter="story")
        for replica in replicas:
            tell(replica, pages=CachedPages(snapshot=True, added=tuple(prompt.digests(PageNaming(PAGE, adapter=2)))))
        assert [cached_tokens(replica, prompt) for replica in replicas] == [0, 304, 0]
        assert chosen(by_prefix, prompt, replicas) is replicas[1]

    def test_new_weights_make_other_names(self) -> None:
        (replica,) = make_replicas(1)
        holds(replica, random_prompt(0))
        assert cached_tokens(replica, random_prompt(0)) == 304
        tell(replica, weights_version=1)
        assert cached_tokens(replica, random_prompt(0)) == 0

    def test_unknown_prompts_are_spread_and_each_always_to_the_same(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(4)
        found = [chosen(by_prefix, random_prompt(seed), replicas).name for seed in range(100)]
        assert found == [chosen(ReplicaRouting(seed=1), random_prompt(seed), replicas).name for seed in range(100)]
        assert all(found.count(replica.name) >= 10 for replica in replicas)


class TestLoad:
    def test_a_long_queue_outweighs_a_prefix(self, by_prefix: ReplicaRouting) -> None:
        full, empty = replicas = make_replicas(2)
        tell(empty)
        holds(full, random_prompt(0))
        assert chosen(by_prefix, random_prompt(0), replicas) is full
        tell(full, uncomputed_tokens=5_000)
        assert chosen(by_prefix, random_prompt(0), replicas) is empty

    def test_a_huge_prompt_keeps_short_ones_away(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(3)
        for replica in replicas:
            tell(replica)
        huge, _ = place(by_prefix, random_prompt(0, 30_000), replicas)
        assert all(place(by_prefix, random_prompt(seed), replicas)[0] is not huge for seed in range(1, 60))

    @given(
        st.lists(st.tuples(st.integers(0, 2), st.integers(20, 2000), st.sampled_from(["wait", "begin", "end"])), max_size=60),
        st.integers(2, 5),
    )
    @settings(deadline=None)
    def test_no_replica_gets_more_than_its_share(self, requests: list[tuple[int, int, str]], count: int) -> None:
        routing, replicas = ReplicaRouting(seed=0), make_replicas(count)
        for now, (seed, length, then) in enumerate(requests):
            prompt = random_prompt(seed, length)
            mean = sum(replica.load(now) for replica in replicas) / count
            replica = chosen(routing, prompt, replicas, now)
            assert replica.load(now) <= MOST_LOAD * mean + length or not replica.outstanding
            placement = replica.place(prompt, now)
            if then != "wait":
                replica.first_token(placement, now)
            if then == "end":
                replica.end_request(placement, now, 50)

    def test_a_burst_is_spread_before_any_report(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(5)
        for replica in replicas:
            tell(replica)
        for seed in range(100):
            place(by_prefix, random_prompt(seed), replicas)
        assert all(15 <= replica.outstanding <= 25 for replica in replicas)
        tell(replicas[0], 0.05)  # too early to tell of them
        assert replicas[0].outlook(random_prompt(999), 0.05).backlog == 320 * replicas[0].outstanding
        tell(replicas[0], 0.2, uncomputed_tokens=4000)
        assert replicas[0].outlook(random_prompt(999), 0.2).backlog == 4000

    def test_what_was_computed_counts_and_not_what_was_expected(self) -> None:
        replicas = make_replicas(2)
        for replica, cached in zip(replicas, (None, 300), strict=True):
            placement = replica.place(random_prompt(0), 0.0)
            replica.first_token(placement, 0.0)
            replica.end_request(placement, 1.0, 50, cached)
        assert [replica.load(1.0) for replica in replicas] == [320 + 50, 20 + 50]

    @pytest.mark.parametrize(("factor", "least", "most"), [(4.0, 3.0, 5.0), (1.4, 0.9, 1.1)])
    def test_replicas_that_are_clearly_faster_get_more(self, by_prefix: ReplicaRouting, factor: float, least: float, most: float) -> None:
        slow, fast = replicas = make_replicas(2)
        for replica, seconds in ((slow, factor), (fast, 1.0)):
            for seed in range(40):
                placement = replica.place(random_prompt(seed), 0.0)
                replica.first_token(placement, 0.0)
                replica.end_request(placement, seconds, 50)
        for seed in range(100, 200):
            place(by_prefix, random_prompt(seed), replicas, 2000.0)
        assert least < fast.outstanding / slow.outstanding < most

    def test_rates_measured_by_chance_do_not_shift_load(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(3)
        for replica, rate in zip(replicas, (800.0, 3000.0, 5000.0), strict=True):
            tell(replica, prefill_tokens_per_second=rate)
        for seed in range(90):
            place(by_prefix, random_prompt(seed), replicas)
        assert all(25 <= replica.outstanding <= 35 for replica in replicas)

    def test_a_full_batch_is_left_alone(self, by_prefix: ReplicaRouting) -> None:
        full, other = replicas = make_replicas(2)
        for replica in replicas:
            tell(replica)
        holds(full, random_prompt(0))
        placement = full.place(random_prompt(0), 0.0)
        full.first_token(placement, 0.0)
        full.end_request(placement, 200.0, output_tokens=500)
        tell(full, 1000.0, running=64)
        assert chosen(by_prefix, random_prompt(0), replicas, 1000.0) is other
        tell(full, 1000.0, running=10)
        assert chosen(by_prefix, random_prompt(0), replicas, 1000.0) is full
        tell(full, 1000.0, running=10, pages_used=9_999)
        assert chosen(by_prefix, random_prompt(0), replicas, 1000.0) is other

    def test_a_replica_that_came_back_begins_slowly(self, by_prefix: ReplicaRouting) -> None:
        replicas = make_replicas(3)
        back = ReplicaLoad("back", page_size=PAGE, now=100.0, slow_start_seconds=50.0)
        assert [back.weight(now) for now in (100.0, 125.0, 150.0, 999.0)] == pytest.approx([FIRST_WEIGHT, (1 + FIRST_WEIGHT) / 2, 1, 1])
        for seed in range(90):  # what the others have had before
            place(by_prefix, random_prompt(seed), replicas, 100.0)
        for replica in [*replicas, back]:
            tell(replica, 100.0)
        placed = [place(by_prefix, random_prompt(seed), [*replicas, back], 100.0)[0] for seed in range(100, 200)]
        assert 1 <= placed.count(back) <= 15
