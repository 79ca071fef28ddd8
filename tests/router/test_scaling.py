from __future__ import annotations

from collections.abc import Sequence

import pytest

from aengine.api.errors import ConfigError
from aengine.api.outputs import EngineStats
from aengine.router.router_config import RayConfig, Scale, next_scale

ROWS = 8
CONFIG = RayConfig(min_replicas=1, max_replicas=6, queue_depth=4, up_seconds=5.0, down_seconds=60.0)


def load(waiting: int = 0, running: int = 0, pages_used: int = 0, parked: int = 0) -> EngineStats:
    return EngineStats(waiting=waiting, running=running, parked=parked, pages_used=pages_used, pages_total=100)


def run(scale: Scale, loads: Sequence[EngineStats], seconds: float, config: RayConfig = CONFIG, start: float = 0.0) -> list[int]:
    """The numbers of replicas, a second apart, as long as nothing but the number of those that serve changes."""
    numbers = []
    for second in range(round(seconds)):
        scale = next_scale(scale, loads, ROWS, config, start + second)
        numbers.append(scale.replicas)
    return numbers


def test_a_queue_that_lasts_brings_another_replica() -> None:
    assert run(Scale(1), [load(waiting=4, running=8)], 7) == [1, 1, 1, 1, 1, 2, 2]


def test_a_queue_that_is_short_or_does_not_last_brings_none() -> None:
    assert set(run(Scale(1), [load(waiting=3, running=8)], 30)) == {1}
    scale = Scale(1)
    for second in range(60):
        scale = next_scale(scale, [load(waiting=20 if second % 4 else 0, running=8)], ROWS, CONFIG, second)
    assert scale.replicas == 1


def test_the_depth_counts_for_each_replica() -> None:
    assert set(run(Scale(3), [load(waiting=11), load(running=8), load(running=8)], 20)) == {3}
    assert run(Scale(3), [load(waiting=12), load(running=8), load(running=8)], 6)[-1] == 5


def test_a_long_queue_brings_as_many_as_it_fills_but_doubles_at_most() -> None:
    assert run(Scale(2), [load(waiting=9), load(waiting=0)], 6)[-1] == 4
    assert run(Scale(2), [load(waiting=999), load(waiting=999)], 6)[-1] == 4
    assert run(Scale(5), [load(waiting=99)] * 5, 6)[-1] == 6, "at most max_replicas"


def test_no_more_are_wanted_before_those_that_are_wanted_serve() -> None:
    assert set(run(Scale(2), [load(waiting=99)], 60)) == {2}


def test_a_replica_too_many_goes_after_a_time_one_by_one() -> None:
    scale = Scale(3)
    numbers = []
    for second in range(200):
        scale = next_scale(scale, [load(running=1)] * scale.replicas, ROWS, CONFIG, second)
        numbers.append(scale.replicas)
    assert [numbers.index(number) for number in (2, 1)] == [60, 121]
    assert numbers[-1] == 1


@pytest.mark.parametrize(
    "busy",
    [load(running=5), load(running=2, parked=3), load(pages_used=51), load(waiting=1)],
    ids=["rows", "parked", "pages", "queue"],
)
def test_no_replica_goes_while_the_rest_would_be_more_than_half_full(busy: EngineStats) -> None:
    assert set(run(Scale(2), [busy, load()], 300)) == {2}


def test_a_load_that_comes_back_starts_the_time_again() -> None:
    scale = Scale(2)
    for second in range(300):
        scale = next_scale(scale, [load(running=8 if second % 50 == 0 else 0), load()], ROWS, CONFIG, second)
    assert scale.replicas == 2


def test_replicas_that_say_nothing_change_nothing() -> None:
    assert set(run(Scale(3), [], 300)) == {3}


def test_steady_load_does_not_swing() -> None:
    """What one replica too few cannot do is far from what makes one too many."""
    for total in range(60):
        scale, seen = Scale(1), []
        for second in range(1000):
            running = min(total, ROWS * scale.replicas)
            loads = [load(running=running // scale.replicas, waiting=(total - running) // scale.replicas)] * scale.replicas
            scale = next_scale(scale, loads, ROWS, CONFIG, second)
            seen.append(scale.replicas)
        assert len(set(seen[500:])) == 1, total


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_replicas": 0}, "min_replicas: 0 is not an integer in [1, 4096]"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas: 2 is less than min_replicas (3)"),
        ({"queue_depth": 0}, "queue_depth: 0 is not an integer >= 1"),
        ({"up_seconds": -1.0}, "up_seconds: -1.0 is not a finite number >= 0"),
        ({"ray_address": ""}, "ray_address: '' is not auto, or an address host:port"),
        ({"ranks_per_node": 0}, "ranks_per_node: 0 is not an integer in [1, 64]"),
    ],
)
def test_what_is_wrong_with_a_configuration_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RayConfig.of(None, **fields)
    assert str(caught.value) == message


def test_there_are_as_many_as_asked_for_by_default() -> None:
    assert RayConfig(min_replicas=3).most_replicas == 3
    assert RayConfig().most_replicas == 1
