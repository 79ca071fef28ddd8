"""Sequences whose layers have sliding windows: pages behind a window are free for others, and prefixes are still found."""

from __future__ import annotations

import dataclasses

import pytest
from kv_oracle import make_request
from simulation import Simulation

from aengine.cache import PageNeeds
from aengine.scheduler.sequence import SchedulerConfig

CONFIG = SchedulerConfig(
    max_num_seqs=4, max_num_batched_tokens=16, max_model_len=400, num_pages=400, page_size=4, windows=(None, 10, 10, 30)
)
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in-turn", "one-ahead"])


def config(**changes: object) -> SchedulerConfig:
    return dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]


def most_pages_used(simulation: Simulation) -> int:
    most = 0
    while simulation.step():
        most = max(most, simulation.scheduler.stats().pages_used)
    return most


@pytest.mark.quick_cases(1)
@OVERLAP
def test_a_long_prompt_holds_a_quarter_of_its_pages(overlap: bool) -> None:
    """32k tokens, five of six layers with a window of 1k, in chunks."""
    windows = (None, *[1024] * 5)
    long = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=512, max_model_len=33_000, num_pages=13_000, page_size=16, windows=windows
    )
    simulation = Simulation(long, overlap=overlap)
    simulation.submit(make_request(0, [i * i % 50 for i in range(32_768)], 40))
    everything = 6 * -(-(32_768 + 40) // 16)
    assert most_pages_used(simulation) <= everything / 4
    assert all(plan.lengths.tolist() == [512] for plan in simulation.plans[:64]), "windows do not slow it down"
    simulation.check_finished()


@OVERLAP
def test_what_a_sequence_needs_is_known_in_advance(overlap: bool) -> None:
    """A pool of exactly that many pages is enough, and a smaller one is used up."""
    needs = PageNeeds(CONFIG.windows, CONFIG.page_size, CONFIG.max_num_batched_tokens)
    num_pages = needs.pages(needs.columns(300))
    simulation = Simulation(config(num_pages=1 + num_pages, enable_prefix_cache=False), overlap=overlap)
    simulation.submit(make_request(0, list(range(260)), 40))
    assert most_pages_used(simulation) <= num_pages
    simulation.check_finished()
    assert simulation.scheduler.stats().preemptions == 0


def test_decodes_leave_pages_behind() -> None:
    simulation = Simulation(config(windows=(None, 8)))
    simulation.submit(make_request(0, [1, 2, 3], 300))
    for _ in range(120):
        simulation.step()
    # 123 tokens: 31 columns, of which a window of 8 tokens, and one token more, reaches over three
    assert simulation.scheduler.stats().pages_used in (31 + 2, 31 + 3)
    simulation.run()
    simulation.check_finished()


@OVERLAP
def test_several_that_exceed_the_pool_take_turns(overlap: bool) -> None:
    needs = PageNeeds(CONFIG.windows, CONFIG.page_size, CONFIG.max_num_batched_tokens)
    simulation = Simulation(config(num_pages=1 + needs.pages(needs.columns(300)) + 20, enable_prefix_cache=False), overlap=overlap)
    for key in range(6):
        simulation.submit(make_request(key, [key, *range(200)], 60))
    simulation.run()
    simulation.check_finished()


class TestPrefixes:
    def test_a_warm_prefix_of_any_length_behind_the_window(self) -> None:
        simulation = Simulation(CONFIG)
        prompt = list(range(50)) * 4
        simulation.submit(make_request(0, prompt, 2))
        simulation.run()
        for key, length in enumerate((200, 160, 40, 4), 1):
            simulation.submit(make_request(key, [*prompt[:length], 49], 2))
            simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 200, 2: 160, 3: 40, 4: 4}

    def test_without_its_window_a_prefix_is_of_no_use(self) -> None:
        """Pages of the window that were used for others end the prefix before them, although the other groups still have theirs."""
        simulation = Simulation(config(windows=(None, 10)))
        prompt = list(range(50)) * 2
        simulation.submit(make_request(0, prompt, 1))
        simulation.run()
        cache = simulation.scheduler._cache
        windowed = [page for page in cache._cached if len(cache.index._by_page[page]) > 16]
        for page in windowed[:-5]:  # all that were left behind, as in the order of their use
            cache._evict(page)
        simulation.submit(make_request(1, [*prompt[:60], 3], 1))
        simulation.submit(make_request(2, [*prompt[:98], 3], 1))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 0, 2: 96}

    @OVERLAP
    def test_two_cold_requests_compute_the_shared_part_once(self, overlap: bool) -> None:
        simulation = Simulation(CONFIG, overlap=overlap)
        prompt = list(range(40)) * 2
        simulation.submit(make_request(0, [*prompt, 1], 4))
        simulation.submit(make_request(1, [*prompt, 2], 4))
        simulation.run()
        simulation.check_finished()
        assert simulation.cached == {0: 0, 1: 80}

    @pytest.mark.parametrize("length", [9, 40, 41, 120])
    @pytest.mark.parametrize("prefix_cache", [False, True])
    @OVERLAP
    def test_forks_share_what_the_last_token_of_the_prompt_sees(self, length: int, prefix_cache: bool, overlap: bool) -> None:
        simulation = Simulation(config(enable_prefix_cache=prefix_cache), overlap=overlap)
        simulation.submit(make_request(0, list(range(length)), 30, num_forks=2))
        for key in (1, 2):
            simulation.submit(make_request(key, list(range(length)), 30, fork_of=0))
        simulation.run()
        simulation.check_finished()
        assert simulation.runner.num_computed == length + 2 + 3 * 29  # the prompt once; its last token for every fork
