"""What routing by prefixes makes of conversations over real replicas with small caches."""

from __future__ import annotations

import pytest
from slow_cases import BY_HAND

from aengine.router.replica_load import RoutingPolicy
from tools.bench.routed import build_parser, measure

pytestmark = [pytest.mark.anyio, *BY_HAND]


async def test_more_is_found_in_caches_than_in_turns_and_no_replica_gets_more_than_its_share() -> None:
    options = build_parser().parse_args(["--conversations", "32"])
    prefix = await measure(RoutingPolicy.PREFIX, options)
    in_turns = await measure(RoutingPolicy.ROUND_ROBIN, options)
    assert prefix.requests == in_turns.requests == 32 * 8
    assert prefix.hit_rate >= 1.8 * in_turns.hit_rate
    assert prefix.token_imbalance <= 1.5  # of so few conversations, and beside other programs
