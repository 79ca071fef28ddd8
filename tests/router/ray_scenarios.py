"""What is done in a Ray cluster by a program of its own: Ray has one connection for a process, and habits with signals and output.

Run with the name of a scenario and the socket of a `RayCluster`. Says what is wrong by an AssertionError, and `done` at the end.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
from ray_cluster import RayCluster

from aengine import AsyncEngine, Completion, EngineConfig, Router, SamplingParams
from aengine.api.outputs import ReplicaState
from aengine.client import AsyncClient
from aengine.router.ray_replicas import ray_replicas
from aengine.router.router_config import RayConfig

TOKEN = "a-token-for-tests"
PROMPT = "It is a truth universally"
PARAMS = SamplingParams(max_tokens=24, seed=7)


@asynccontextmanager
async def replicas(cluster: RayCluster, engine: EngineConfig, **fields: object) -> AsyncIterator[AsyncIterator[frozenset[str]]]:
    found = ray_replicas(engine, RayConfig.of(None, ray_address=cluster.address, **fields), TOKEN)
    try:
        yield found
    finally:
        await found.aclose()


async def until(found: AsyncIterator[frozenset[str]], count: int) -> frozenset[str]:
    """The addresses as soon as there are `count`."""
    async for addresses in found:
        if len(addresses) == count:
            return addresses
    raise AssertionError("it ended")


async def becomes(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not become so"
        await asyncio.sleep(0.05)


async def text_at(address: str) -> str:
    async with AsyncClient(address, token=TOKEN) as client:
        return (await client.generate(PROMPT, PARAMS)).text


async def text_of_one_process() -> str:
    async with AsyncEngine("demo", device="cpu", threads=1) as engine:
        return (await engine.generate(PROMPT, PARAMS)).text


async def one(cluster: RayCluster) -> None:
    async with replicas(cluster, EngineConfig(model="demo", device="cpu")) as found:
        (address,) = await until(found, 1)
        assert await text_at(address)
        assert len(cluster.actors()) == 1
    await becomes(lambda: not cluster.actors())


async def ranks_over_nodes(cluster: RayCluster) -> None:
    """Two ranks on two nodes; when one of the nodes is lost, both start again."""
    engine = EngineConfig(model="demo", device="cpu", tensor_parallel_size=2)
    expected = await text_of_one_process()
    async with replicas(cluster, engine, ranks_per_node=1) as found:
        (address,) = await until(found, 1)
        places = {node: actors for node, actors in cluster.nodes().items() if actors}
        assert sorted(places.values()) == [["FollowerActor"], ["ReplicaActor"]], places
        assert await text_at(address) == expected
        cluster.remove_node(next(node for node in list(cluster.nodes())[1:] if node in places))
        assert await until(found, 0) == frozenset()
        (other,) = await until(found, 1)
        assert other != address
        assert await text_at(other) == expected
    await becomes(lambda: not cluster.actors())
    cluster.add_node()


async def lost_node(cluster: RayCluster) -> None:
    """Streams that were on it go on elsewhere with the tokens that would have come, and so does the replica."""
    fields = {"ray_address": cluster.address, "min_replicas": 2, "routing_policy": "round_robin"}
    async with Router.on_ray("demo", device="cpu", **fields) as router:
        await becomes(lambda: serving(router) == 2)
        requests = [SamplingParams(max_tokens=1900, ignore_eos=True, seed=seed, temperature=seed / 4) for seed in range(4)]
        expected = await asyncio.gather(*(router.generate(PROMPT, params) for params in requests))
        lost = asyncio.Event()
        longest = 0.0

        async def read(params: SamplingParams) -> Completion:
            nonlocal longest
            stream = router.stream(PROMPT, params)
            reached, then = 0, time.monotonic()
            async for _ in stream:
                now, reached = time.monotonic(), reached + 1
                longest, then = max(longest, now - then), now
                if reached == 200:
                    halfway.release()
                    await lost.wait()  # more is left than a replica and its client may be ahead
                    then = time.monotonic()
            return stream.completion()

        halfway = asyncio.Semaphore(0)
        reading = [asyncio.create_task(read(params)) for params in requests]
        for _ in requests:
            await halfway.acquire()
        loads = [replica.report.stats for replica in router.replicas()]
        assert all(load.running + load.parked for load in loads), loads
        actors = cluster.actors().keys()
        cluster.remove_node(next(node for node, actors in list(cluster.nodes().items())[1:] if actors))
        lost.set()
        assert [each.text for each in await asyncio.gather(*reading)] == [each.text for each in expected]
        assert [each.token_ids for each in await asyncio.gather(*reading)] == [each.token_ids for each in expected]
        print(f"longest pause {longest:.2f} s")
        await becomes(lambda: serving(router) == 2)
        assert len(cluster.actors().keys() - actors) == 1, "one of two is placed again"
    await becomes(lambda: not cluster.actors())
    cluster.add_node()


def serving(router: Router) -> int:
    return sum(replica.state is ReplicaState.SERVING for replica in router.replicas())


async def scaling(cluster: RayCluster) -> None:
    engine = EngineConfig(model="demo", device="cpu", max_num_seqs=2)
    fields = {"max_replicas": 2, "queue_depth": 2, "up_seconds": 1.0, "down_seconds": 2.0}
    async with replicas(cluster, engine, **fields) as found:
        (first,) = await until(found, 1)
        async with AsyncClient(first, token=TOKEN) as client:

            async def keep_asking() -> None:
                while True:
                    await client.generate(PROMPT, SamplingParams(max_tokens=500, ignore_eos=True))

            asking = [asyncio.create_task(keep_asking()) for _ in range(6)]
            both = await until(found, 2)
            assert first in both
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        await until(found, 1)
        await becomes(lambda: len(cluster.actors()) == 1)


async def forever(cluster: RayCluster) -> None:
    """Until it is killed."""
    async with replicas(cluster, EngineConfig(model="demo", device="cpu", tensor_parallel_size=2), ranks_per_node=1) as found:
        with anyio.fail_after(600):
            addresses = await until(found, 1)
        print("serves at", *addresses, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    name, socket = sys.argv[1:]
    asyncio.run({each.__name__: each for each in (one, lost_node, ranks_over_nodes, scaling, forever)}[name](RayCluster(socket)))
    print("done")
