"""Replicas that compute prompts, and others that go on behind these, with the KV that they have of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import anyio
import pytest
from hang_guard import HANG_SECONDS
from oracle_engine import until
from slow_cases import slow_but

from aengine import AsyncEngine, ConfigError, Router, SamplingParams
from aengine.api.outputs import ReplicaInfo

pytestmark = pytest.mark.anyio

LONG = 400  # tokens of an output
PARAMS = SamplingParams(seed=3, temperature=0.9, max_tokens=LONG, ignore_eos=True)
OPTIONS = {"kv_cache_memory": 64 << 20, "threads": 1, "page_size": 16}


def by_role(router: Router) -> dict[str, list[ReplicaInfo]]:
    found: dict[str, list[ReplicaInfo]] = {}
    for replica in router.replicas():
        found.setdefault(replica.report.stats.role, []).append(replica)
    return found


@pytest.mark.parametrize("shared", slow_but([False], [False, True]))
async def test_long_prompts_move_on_at_their_first_token(
    shared: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a directory that all replicas share, or with what one sends to the other. Outputs are so long that a router that is slow to
    notice a first token finds the rest of at least one of them to come."""
    monkeypatch.setattr("aengine.router.fleet.FEW_SECONDS", 0.0)
    caplog.set_level("INFO", "aengine")
    tiers: dict[str, Any] = {"kv_disk_path": str(tmp_path)} if shared else {"host_kv_memory": 64 << 20}
    rng = random.Random(1)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (700, 40, 900, 650, 10)]
    async with AsyncEngine("demo", **OPTIONS) as engine:
        expected = [(await engine.generate(prompt, PARAMS)).token_ids for prompt in prompts]
    with anyio.fail_after(HANG_SECONDS):
        async with Router("demo", replicas=3, prefill_replicas=1, **tiers, **OPTIONS) as router:
            found: dict[int, tuple[int, ...]] = {}

            async def run(number: int) -> None:
                found[number] = (await router.generate(prompts[number], PARAMS)).token_ids

            async with anyio.create_task_group() as group:
                for number in range(len(prompts)):
                    group.start_soon(run, number)
            assert [found[number] for number in range(len(prompts))] == expected

            def done(role: str, name: str) -> int:
                return sum(int(getattr(one.report.stats, name)) for one in by_role(router)[role])

            await until(lambda: done("decode", "completion_tokens") + done("prefill", "completion_tokens") >= 5 * LONG)
            assert {role: len(replicas) for role, replicas in by_role(router).items()} == {"prefill": 1, "decode": 2}
            assert done("prefill", "prompt_tokens") == 700 + 900 + 650
            assert 2 * LONG < done("decode", "completion_tokens") <= 5 * LONG
            assert (await router.generate(prompts[0], PARAMS)).token_ids == expected[0], "which is cached where it ended"
            assert router.stats().role == ""
            went = [record.message for record in caplog.records if record.message.startswith("KV of ")]
            assert went or shared


def test_how_many() -> None:
    for count in (2, 3):
        with pytest.raises(ConfigError, match=rf"prefill_replicas: {count} is not below replicas \(2\)"):
            Router("demo", replicas=2, prefill_replicas=count)
    with pytest.raises(ConfigError, match="prefill_replicas: 1 is not below replicas"):
        Router(backends=("127.0.0.1:1",), prefill_replicas=1)
