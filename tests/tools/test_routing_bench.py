"""Simulated replicas, the trace of conversations, and what policies make of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from aengine.bench.cli import main
from aengine.router.replica_load import MAX_PAGES, PageNaming, RoutingPolicy
from tools.lab.routing import RoutingFigures, Simulation, SimulationOptions
from tools.lab.routing_options import STEP_COSTS
from tools.lab.sessions import SessionOptions, make_sessions
from tools.lab.simulated_replica import ReplicaOptions, SimulatedReplica, StepCosts, Work

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "amd-epyc-2cores-step.json"
COSTS = StepCosts(step=1.0, prefill_token=0.01, decode_row=0.1)
REPLICA = ReplicaOptions(COSTS, max_num_seqs=4, max_num_batched_tokens=64, num_pages=32, page_size=16)
SMALL_CACHES = SimulationOptions(3, ReplicaOptions(STEP_COSTS, num_pages=896))


def work(key: int, prompt_tokens: int, output_tokens: int = 1, chain: int | None = None) -> Work:
    """`chain`: what its tokens are; equal ones begin with the same."""
    pages = (prompt_tokens + output_tokens) // REPLICA.page_size
    return Work(key, prompt_tokens, output_tokens, [1000 * (key if chain is None else chain) + page for page in range(pages)])


def run(replica: SimulatedReplica) -> list[tuple[float, list[int], list[int]]]:
    """When each step ended, with the keys of requests that got their first token, and of those that ended."""
    seen = []
    while (now := replica.next_time) is not None:
        first, ended = replica.advance()
        seen.append((pytest.approx(now), [one.key for one in first], [one.key for one in ended]))
    return seen


class TestStepCosts:
    def test_they_are_fitted_to_measured_steps(self) -> None:
        fitted = StepCosts.of_results(RESULTS, "qwen3-0.6b")
        given = (STEP_COSTS.step, STEP_COSTS.prefill_token, STEP_COSTS.decode_row)
        assert (fitted.step, fitted.prefill_token, fitted.decode_row) == pytest.approx(given, rel=0.01)

    def test_an_unknown_model_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"no steps of nothing; it has qwen3-60m, qwen3-0\.6b"):
            StepCosts.of_results(RESULTS, "nothing")


class TestReplica:
    def test_prompts_are_computed_in_chunks_beside_decodes(self) -> None:
        replica = SimulatedReplica(REPLICA)
        replica.submit(work(1, 20, 4), 5.0)
        replica.submit(work(2, 100), 5.5)
        chunk = COSTS.seconds(63, 1)  # one token of the budget is the decode's
        last = COSTS.seconds(37, 1)
        begin = 5 + COSTS.seconds(20, 0)
        times = [begin, begin + chunk, begin + chunk + last, begin + chunk + last + COSTS.seconds(0, 1)]
        assert run(replica) == [(times[0], [1], []), (times[1], [], []), (times[2], [2], [2]), (times[3], [], [1])]

    def test_steps_planned_ahead_are_cut_short_by_a_request(self) -> None:
        replica = SimulatedReplica(REPLICA)
        replica.submit(work(1, 10, 11), 0.0)
        replica.advance()  # at 1.1; ten decode steps of 1.1 seconds are under way
        assert replica.next_time == pytest.approx(12.1)
        assert replica.submit(work(2, 10), 4.0) == pytest.approx(1.1 + 3 * 1.1)
        assert [(first, ended) for _, first, ended in run(replica)] == [([], []), ([2], [2]), ([], [1])]

    def test_a_cached_prefix_is_not_computed_again(self) -> None:
        replica = SimulatedReplica(REPLICA)
        replica.submit(work(1, 64, 1), 0.0)
        run(replica)
        again = work(1, 64, 1)
        replica.submit(again, 10.0)
        run(replica)
        assert (again.cached_tokens, replica.computed_tokens) == (48, 64 + 16)

    def test_requests_with_the_same_prompt_compute_it_once(self) -> None:
        replica = SimulatedReplica(REPLICA)
        works = [work(key, 65, 1, chain=0) for key in range(4)]
        for one in works:
            replica.submit(one, 0.0)
        run(replica)
        assert [one.cached_tokens for one in works] == [0, 64, 64, 64]

    def test_the_least_recently_used_prefix_goes_first_and_reports_tell(self) -> None:
        replica = SimulatedReplica(REPLICA)
        held: set[int] = set()
        for key in (1, 2, 1, 3):  # 15 pages each, of which 32 are there
            replica.submit(work(key, 240, 0), 0.0)
            run(replica)
            pages = replica.report().pages
            assert pages is not None
            assert held.isdisjoint(pages.added)
            assert held.issuperset(pages.removed)
            held = held.difference(pages.removed).union(pages.added)
        assert [sum(digest // 1000 == key for digest in held) for key in (1, 2, 3)] == [14, 3, 15]  # the last page of 1 was used only once

    def test_pages_limit_what_runs(self) -> None:
        replica = SimulatedReplica(REPLICA)
        for key in range(3):
            replica.submit(work(key, 200, 30), 0.0)
        for _ in range(7):
            replica.advance()
        stats = replica.report().stats
        assert (stats.running, stats.waiting, stats.uncomputed_tokens, stats.pages_used) == (2, 1, 200, 30)


class TestSessions:
    def test_each_turn_continues_the_one_before(self) -> None:
        sessions = make_sessions(SessionOptions(num_sessions=20, rate=1.0, huge_share=0.2, huge_len=9000))
        naming = PageNaming(16)
        for session in sessions:
            for turn, following in zip(session.turns, session.turns[1:], strict=False):
                digests = following.prompt.digests(naming)
                common = turn.digests[: len(digests)]
                assert list(digests[: len(common)]) == list(common)
                assert following.prompt.num_tokens > turn.prompt.num_tokens + turn.output_tokens
            assert len(session.turns[-1].prompt.digests(naming)) <= MAX_PAGES
        assert any(session.turns[0].prompt.num_tokens > 9000 for session in sessions)

    def test_system_prompts_are_shared(self) -> None:
        sessions = make_sessions(SessionOptions(num_sessions=50, rate=1.0, num_system_prompts=1))
        assert len({tuple(session.turns[0].digests[:10]) for session in sessions}) == 1

    def test_bursts_begin_at_once(self) -> None:
        starts = [session.start for session in make_sessions(SessionOptions(num_sessions=30, rate=1.0, burst=10))]
        assert starts == sorted(starts)
        assert len(set(starts)) == 3

    @pytest.mark.parametrize("fields", [{"num_sessions": 0}, {"rate": 0.0}, {"huge_share": 2.0}, {"mean_turns": 0.5}])
    def test_what_makes_no_sense_is_refused(self, fields: dict[str, float]) -> None:
        with pytest.raises(ValueError, match=next(iter(fields))):
            SessionOptions(**{"num_sessions": 1, "rate": 1.0, **fields})  # type: ignore[arg-type]


def figures(policy: RoutingPolicy, sessions: SessionOptions, options: SimulationOptions = SMALL_CACHES) -> RoutingFigures:
    return Simulation(policy, make_sessions(sessions), options).run()


MULTI_TURN = SessionOptions(num_sessions=180, rate=0.15)


class TestSimulation:
    def test_prefixes_against_round_robin(self) -> None:
        """What is promised of three replicas with small caches."""
        prefix, in_turns = (figures(policy, MULTI_TURN) for policy in (RoutingPolicy.PREFIX, RoutingPolicy.ROUND_ROBIN))
        assert prefix.requests == in_turns.requests
        assert prefix.hit_rate >= 1.8 * in_turns.hit_rate
        assert prefix.ttft_p50 <= 0.7 * in_turns.ttft_p50
        assert max(prefix.token_imbalance, prefix.busy_imbalance, prefix.request_imbalance) <= 1.3

    @pytest.mark.parametrize("policy", RoutingPolicy)
    def test_every_request_is_answered_and_the_same_seed_gives_the_same(self, policy: RoutingPolicy) -> None:
        sessions = replace(MULTI_TURN, num_sessions=40)
        first, second = (figures(policy, sessions) for _ in range(2))
        assert first.requests == sum(len(session.turns) for session in make_sessions(sessions))
        assert replace(first, decisions_per_second=0.0) == replace(second, decisions_per_second=0.0)

    def test_one_hot_system_prompt_does_not_pile_up(self) -> None:
        hot = SessionOptions(num_sessions=300, rate=0.6, num_system_prompts=1, system_len=1500, mean_turns=2)
        found = figures(RoutingPolicy.PREFIX, hot, replace(SMALL_CACHES, num_replicas=6))
        assert max(found.token_imbalance, found.request_imbalance) <= 1.5
        assert found.hit_rate > 0.8

    def test_bursts_are_spread_though_reports_are_old(self) -> None:
        bursts = SessionOptions(num_sessions=400, rate=0.4, burst=100, mean_turns=1)
        options = replace(SMALL_CACHES, num_replicas=8, report_delay=0.1)
        found = figures(RoutingPolicy.PREFIX, bursts, options)
        least = figures(RoutingPolicy.LEAST_LOADED, bursts, options)
        assert found.token_imbalance <= 1.3
        assert found.ttft_p90 < least.ttft_p90

    @pytest.mark.slow
    def test_a_slow_replica_gets_less(self) -> None:
        options = replace(SMALL_CACHES, slow_share=0.34, slow_factor=4.0)
        prefix, in_turns = (figures(policy, MULTI_TURN, options) for policy in (RoutingPolicy.PREFIX, RoutingPolicy.ROUND_ROBIN))
        assert prefix.busy_imbalance < in_turns.busy_imbalance
        assert prefix.ttft_p90 < 0.5 * in_turns.ttft_p90

    def test_a_replica_that_comes_back_loses_no_request(self) -> None:
        found = figures(RoutingPolicy.PREFIX, MULTI_TURN, replace(SMALL_CACHES, restart=200.0))
        assert found.requests >= sum(len(session.turns) for session in make_sessions(MULTI_TURN))
        assert found.request_imbalance <= 1.3


def test_the_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "route.json"
    options = ["--replicas", "2,3", "--policy", "prefix,hash", "--sessions", "5", "--steps", str(RESULTS), "--steps-of", "qwen3-60m"]
    assert main(["route", *options, "--json", str(file)]) == 0
    results = json.loads(file.read_text())["figures"]["results"]
    assert [(one["policy"], one["num_replicas"]) for one in results] == [("prefix", 2), ("hash", 2), ("prefix", 3), ("hash", 3)]
    assert all(np.isfinite(one["ttft_p99"]) for one in results)
    assert "decisions a second" in capsys.readouterr().out


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--policy", "best"], "best"),
        (["--sessions", "0"], "num_sessions: 0"),
        (["--pages", "0"], "num_pages: 0"),
        (["--report-seconds", "0"], "report_seconds"),
        (["--step-costs", "1,2,3", "--steps", "x"], "--step-costs"),
    ],
)
def test_bad_options_are_refused(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["route", *options]) == 1
    assert message in capsys.readouterr().err
