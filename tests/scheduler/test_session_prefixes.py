"""Sessions: whose prefixes stay, for how long, and how many."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from kv_oracle import make_request
from simulation import Simulation
from test_scheduler import config

from aengine.scheduler import sessions
from aengine.scheduler.sequence import Request


def request(key: int, session: str | None, first: int, tenant: str = "", **fields: Any) -> Request:
    """Of 40 tokens, and 4 of output, which fill 11 pages of 4."""
    prompt = [first, *range(10, 49)]
    return dataclasses.replace(make_request(key, prompt, 4, **fields), session=session, tenant=tenant)


def run(simulation: Simulation, *requests: Request) -> None:
    for one in requests:
        simulation.submit(one)
        simulation.run()
        simulation.clock.now += 1


def cached(simulation: Simulation, key: int, first: int) -> int:
    """How much of that prompt a request finds."""
    run(simulation, request(key, None, first))
    return simulation.cached[key]


def make(num_pages: int = 45, **fields: Any) -> Simulation:
    return Simulation(dataclasses.replace(config(num_pages=num_pages, page_size=4, max_model_len=64), **fields))


def test_a_prefix_of_a_session_outlives_others() -> None:
    for session in (None, "a"):
        simulation = make()
        run(simulation, request(0, session, 1), *(request(key, None, key + 1) for key in range(1, 9)))
        assert (cached(simulation, 9, 1) > 30) == (session is not None)
    stats = simulation.scheduler.stats()
    assert (stats.sessions, stats.session_tokens) == (1, 40)


def test_until_its_time_has_passed() -> None:
    simulation = make(session_seconds=5.0)
    run(simulation, request(0, "a", 1), *(request(key, None, key + 1) for key in range(1, 20)))
    assert simulation.scheduler.stats().sessions == 0
    assert cached(simulation, 20, 1) == 0
    run(simulation, request(21, "b", 2))
    for _ in range(10):
        simulation.clock.now += 3
        assert simulation.scheduler.touch(("", "b")) == 44
        run(simulation, request(int(simulation.clock.now) + 100, None, 3 + int(simulation.clock.now)))
    assert cached(simulation, 22, 2) > 30
    assert simulation.scheduler.touch(("", "a")) == 0


def test_the_latest_request_counts() -> None:
    simulation = make()
    run(simulation, request(0, "a", 1), request(1, "a", 2), *(request(key, None, key + 1) for key in range(2, 9)))
    assert cached(simulation, 9, 2) > 30
    assert cached(simulation, 10, 1) == 0


def test_the_tenant_that_has_most_loses_first() -> None:
    simulation = make(num_pages=61, session_share=0.6)  # 36 pages, of three sessions
    run(simulation, request(0, "x", 1, "small"), *(request(key, str(key), key + 1, "large") for key in range(1, 4)))
    run(simulation, *(request(key, None, key + 1) for key in range(4, 12)))
    assert cached(simulation, 12, 1) > 30, "of the other tenant, though it was used longest ago"
    assert cached(simulation, 13, 2) == 0
    assert cached(simulation, 14, 4) > 30


def test_only_so_many_tokens_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST_TOKENS", 100)
    simulation = make(num_pages=100)
    run(simulation, *(request(key, str(key), key + 1) for key in range(4)))
    assert [simulation.scheduler.touch(("", str(key))) for key in range(4)] == [0, 0, 44, 44]


def test_nobody_waits_for_pages_of_sessions() -> None:
    simulation = make(num_pages=24, session_share=1.0)
    run(simulation, request(0, "a", 1), request(1, "b", 2))
    simulation.submit(dataclasses.replace(request(2, None, 3), max_tokens=24))  # 64 tokens: 16 of the 23 pages
    simulation.run()
    assert len(simulation.received[2]) > 0


def test_other_weights_and_flushing() -> None:
    simulation = make()
    run(simulation, request(0, "a", 1))
    simulation.scheduler.flush_cache()
    assert simulation.scheduler.stats().session_tokens == 0
    assert simulation.scheduler.touch(("", "a")) == 44
    simulation.changing = "keep"
    simulation.step()
    assert simulation.scheduler.touch(("", "a")) == 0
