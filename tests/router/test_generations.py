"""Replicas that give other tokens than others: which get requests, which keep their streams, and who is told why."""

from __future__ import annotations

import logging
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from changed_models import changed_model
from fleets import Member, TestFleet, fleet
from grpc_harness import Serving, serving
from hang_guard import HANG_SECONDS
from oracle_engine import StepGate, until
from safetensors.torch import load_file

from aengine import AsyncEngine, Completion, ModelLoadError, NoReplicaError, Router, SamplingParams
from aengine.api.outputs import ReplicaInfo, ReplicaState
from aengine.client import AsyncClient
from aengine.models.loading.hub import resolve_model
from aengine.runner.contract import NewWeights
from aengine.server.app import Server

pytestmark = pytest.mark.anyio

MEMORY = 64 << 20
NEVER = 1000.0  # seconds, longer than a test may take


def params_of(seed: int, max_tokens: int = 5) -> SamplingParams:
    return SamplingParams(seed=seed, max_tokens=max_tokens, ignore_eos=True)


def info_of(router: Router, name: str) -> ReplicaInfo:
    return {one.name: one for one in router.replicas()}[name]


async def has_weights(many: TestFleet, *members: Member) -> None:
    """The router knows that these have other weights than those of the start."""
    for member in members:
        await member.engine.update_weights("new")
    await until(lambda: all(many.versions()[member.name] == 1 for member in members))


class TestNewRequests:
    async def test_they_go_to_the_newest(self, caplog: pytest.LogCaptureFixture) -> None:
        """Others get them only where it takes none, and at once when it is gone."""
        async with fleet(3) as many:
            *old, new = many.members
            with caplog.at_level(logging.WARNING, "aengine"):
                await has_weights(many, new)
            assert f"replica {new.name} serves a newer generation than {', '.join(sorted(one.name for one in old))}" in caplog.text
            for seed in range(6):
                await many.router.generate([seed], params_of(seed))
            assert [member.engine.stats().completion_tokens for member in many.members] == [0, 0, 30]
            assert many.state(new) is ReplicaState.SERVING
            for member in old:
                info = info_of(many.router, member.name)
                assert info.state is ReplicaState.SUPERSEDED
                assert info.reason == f"{new.name} serves a newer generation; the difference: weights ( instead of new)"
            assert many.router.engine_info.fingerprint == many.router.stats().fingerprint == new.engine.stats().fingerprint
            new.stop()
            await many.router.generate([1], params_of(9))
            assert sum(member.engine.stats().completion_tokens for member in old) == 5
            assert {many.state(member) for member in old} == {ReplicaState.SERVING}

    async def test_where_its_queue_is_full_they_go_elsewhere(self) -> None:
        async with fleet(2, engine={"max_queued_requests": 1}) as many:
            old, new = many.members
            await has_weights(many, new)
            gate = StepGate(new.engine)
            stream = many.router.stream([1], params_of(1), request_id="x")
            await anyio.to_thread.run_sync(gate.held.wait)
            others = [await many.router.generate([1], params_of(seed)) for seed in (2, 3)]
            assert [len(one.token_ids) for one in others] == [5, 5]
            assert old.engine.stats().completion_tokens == 10
            gate.open()
            assert len([token async for token in stream]) == 5

    async def test_where_its_rows_are_taken_they_go_elsewhere(self) -> None:
        """They need not wait for the first new replica while old ones have room."""
        async with fleet(3, engine={"max_num_seqs": 2}) as many:
            *old, new = many.members
            await has_weights(many, new)
            gate = StepGate(new.engine)
            streams = [many.router.stream([seed], params_of(seed), request_id=f"{seed}") for seed in (1, 2)]
            assert [await many.member_of(f"{seed}") for seed in (1, 2)] == [new, new]
            others = [await many.router.generate([1], params_of(seed)) for seed in (3, 4)]
            assert [len(one.token_ids) for one in others] == [5, 5]
            assert sum(member.engine.stats().completion_tokens for member in old) == 10
            gate.open()
            for stream in streams:
                assert len([token async for token in stream]) == 5

    async def test_a_replica_that_was_restarted_is_none_newer(self) -> None:
        async with fleet(3) as many:
            (restarted, _), new = many.members[:2], many.members[2]
            await has_weights(many, new)
            await has_weights(many, restarted)
            await restarted.engine.update_weights("")
            await until(lambda: many.versions()[restarted.name] == 2)
            assert many.state(restarted) is ReplicaState.SUPERSEDED
            assert many.state(new) is ReplicaState.SERVING


class TestStreams:
    async def test_that_have_no_replica_left_are_told_at_once(self, tmp_path: Path) -> None:
        async with fleet(2) as many:
            old, new = many.members
            path = tmp_path / "backends"
            path.write_text(old.name)
            async with Router(backends=(f"file:{path}",), wait_seconds=NEVER) as router:
                gate = StepGate(old.engine, at=4)
                stream = router.stream([1], params_of(1, 100), request_id="x")
                tokens = [await stream.__anext__() for _ in range(3)]
                await new.engine.update_weights("new")
                path.write_text(new.name)
                await until(lambda: [one.name for one in router.replicas()] == [new.name] and router.healthy)
                old.stop()
                gate.open()
                with pytest.raises(NoReplicaError, match=f"came from another generation: {new.name} is serving"):
                    tokens.extend([token async for token in stream])
                assert new.engine.stats().completion_tokens == 0

    async def test_that_have_begun_stay_at_a_replica_that_is_drained(self) -> None:
        """Where no other could go on with them; one that has not begun goes."""
        async with fleet(2) as many:
            old, new = many.members
            await has_weights(many, new)
            new.stop()
            await until(lambda: many.state(new) is ReplicaState.LOST)
            gate = StepGate(old.engine, at=4)
            begun = many.router.stream([1], params_of(1, 50), request_id="begun")
            tokens = [await begun.__anext__() for _ in range(3)]
            await anyio.to_thread.run_sync(gate.held.wait)
            other = many.router.stream([1], params_of(2), request_id="other")
            await many.member_of("other")
            await new.come_back()
            await until(lambda: many.state(new) is ReplicaState.SERVING)
            assert await many.router.drain_replica(old.name) == 1
            gate.open()
            assert [token.token_id async for token in other] == new.engine.runner.truths[2].output
            tokens += [token async for token in begun]
            assert [token.token_id for token in tokens] == old.engine.runner.truths[1].output
            assert 1 not in new.engine.runner.truths


class TestRefusals:
    async def test_it_is_told_why_and_ends_when_there_is_no_other(self, tmp_path: Path) -> None:
        async with fleet(2, admin=tmp_path) as many:
            good, bad = many.members

            def fail(change: object) -> None:
                raise ModelLoadError("the disk is full")

            bad.engine.runner.before_prepare = fail
            assert await many.router.update_weights("/new") == 1
            await until(lambda: many.state(bad) is ReplicaState.REFUSED)
            assert info_of(many.router, bad.name).reason == "the disk is full"
            await many.router.generate([1], params_of(1))
            good.stop()
            await many.router.generate([1], params_of(2))
            assert (1 in good.engine.runner.truths, 1 in bad.engine.runner.truths, 2 in bad.engine.runner.truths) == (True, False, True)
            await good.come_back()
            await until(lambda: many.state(good) is ReplicaState.SERVING)
            assert many.state(bad) is ReplicaState.SUPERSEDED

    async def test_one_that_comes_later_gets_all_that_was_replaced(self, tmp_path: Path) -> None:
        async with fleet(2, admin=tmp_path) as many:
            _, late = many.members
            late.stop()
            await until(lambda: many.state(late) is not ReplicaState.SERVING)
            changes = [("/old", False), ("/new", False), ("/some", True), ("/others", True)]
            for source, partial in changes:
                await many.router.update_weights(source, partial=partial)
            seen: list[NewWeights] = []
            late.engine.runner.before_prepare = seen.append
            await late.come_back()
            await until(lambda: many.state(late) is ReplicaState.SERVING)
            assert seen == [NewWeights(source, partial) for source, partial in changes[1:]]

    @pytest.mark.slow
    async def test_callers_are_told_at_once_where_all_are_refused(self, tmp_path: Path) -> None:
        """As by servers that have got another token."""
        tokens = tmp_path / "tokens"
        tokens.write_text("me secret")
        async with AsyncExitStack() as stack:
            engine = await stack.enter_async_context(AsyncEngine("demo", kv_cache_memory=MEMORY))
            server = await stack.enter_async_context(serving(engine, token_file=str(tokens)))
            address = server.server.address
            router = Router(backends=(address,), token="secret", wait_seconds=NEVER)
            await stack.enter_async_context(router)
            await router.generate([1], params_of(1))
            tokens.write_text("me other")

            def is_refused() -> bool:
                if router.healthy:  # until the server has read its new token
                    router._running().fleet.replicas[address].lose(NoReplicaError("the test says so"))
                return info_of(router, address).state is ReplicaState.REFUSED

            await until(is_refused)
            with pytest.raises(NoReplicaError, match=f"no replica can serve the request: {address} is refused"):
                await router.generate([1], params_of(1))


@asynccontextmanager
async def running(model: str | Path, **options: Any) -> AsyncIterator[tuple[AsyncEngine, Serving]]:
    async with AsyncEngine(str(model), kv_cache_memory=MEMORY, **options) as engine, serving(engine) as server:
        yield engine, server


async def test_what_decides_tokens_is_in_the_fingerprint(tmp_path: Path) -> None:
    """And nothing else; servers tell it."""
    model = Path(resolve_model("demo"))
    changed, renamed, templated = (tmp_path / name for name in ("changed", "renamed", "templated"))
    changed_model(changed)
    shutil.copytree(model, renamed)
    shutil.copytree(model, templated)
    (templated / "chat_template.jinja").write_text("{{ messages[0].content }}")

    async def fingerprint(model: str | Path, **options: Any) -> str:
        async with running(model, **options) as (engine, server), AsyncClient(server.server.address) as client:
            info = await client.engine_info()
            assert info.fingerprint == engine.engine_info.fingerprint == (await client.load()).fingerprint
            assert info.fingerprint_parts == engine.engine_info.fingerprint_parts
            return info.fingerprint

    plain = await fingerprint("demo")
    assert await fingerprint(renamed, max_num_seqs=7, speculative="ngram") == plain
    others = [
        await fingerprint(changed),
        await fingerprint(templated),
        await fingerprint("demo", quantization="int8"),
        await fingerprint("demo", dtype="float32"),
        await fingerprint("demo", kv_cache_dtype="int8"),
    ]
    assert len({plain, *others}) == 6
    async with AsyncEngine("demo", kv_cache_memory=MEMORY) as engine:
        assert engine.stats().fingerprint == plain
        await engine.update_weights(str(changed))
        other = engine.stats().fingerprint
        assert other not in (plain, others[0])  # its chat template is that of the start
        await engine.update_weights(load_file(changed / "model.safetensors"))
        assert engine.stats().fingerprint == other
        await engine.update_weights(str(renamed))
        assert engine.stats().fingerprint == plain


@pytest.mark.slow
async def test_a_rolling_update(tmp_path: Path) -> None:
    """From one model to another: no call fails, and each gets what one of them gives alone, text and tokens."""
    models = ["demo", changed_model(tmp_path / "changed")]
    chat = [{"role": "user", "content": "Call me"}]
    prompts: list[Any] = [[5, 6, 7], "It is a truth", chat]
    known: list[list[Completion]] = []
    for model in models:
        async with AsyncEngine(str(model), kv_cache_memory=MEMORY) as engine:
            known.append([await engine.generate(prompt, params_of(1, 12)) for prompt in prompts])
    assert all(one.token_ids != other.token_ids for one, other in zip(*known, strict=True))
    path = tmp_path / "backends"
    counts = [0, 0]

    async with AsyncExitStack() as stack:
        running: list[tuple[AsyncEngine, Server]] = []
        addresses: list[str] = []

        async def begin(model: str | Path) -> None:
            engine = AsyncEngine(str(model), kv_cache_memory=MEMORY)
            await engine.start()
            stack.push_async_callback(engine.aclose)
            server = Server(engine, port=0)
            await server.start()
            stack.push_async_callback(server.stop)
            await server.set_serving()
            running.append((engine, server))
            addresses.append(server.address)
            path.write_text("\n".join(addresses))

        async def finish(index: int) -> None:
            engine, server = running[index]
            await server.drain(NEVER)  # which tells the router
            addresses.remove(server.address)
            path.write_text("\n".join(addresses))
            await server.stop()
            await engine.aclose()

        def serve(count: int) -> bool:
            return sum(one.state is ReplicaState.SERVING for one in router.replicas()) == count

        await begin(models[0])
        await begin(models[0])
        router = await stack.enter_async_context(Router(backends=(f"file:{path}",), wait_seconds=1.0))
        updated = False

        async def eventually(condition: Callable[[], bool]) -> None:
            while not condition():
                await router._running().fleet.wait_changed(0.05)

        async def call(kind: int) -> None:
            while not updated:
                found = await router.generate(prompts[kind], params_of(1, 12))
                facts = [(one[kind].token_ids, one[kind].text) for one in known]
                counts[facts.index((found.token_ids, found.text))] += 1
                await anyio.sleep(0.02)  # else nothing else gets a turn

        with anyio.fail_after(HANG_SECONDS):
            async with anyio.create_task_group() as group:
                for kind in range(len(prompts)):
                    group.start_soon(call, kind)
                await eventually(lambda: counts[0] >= 6)
                await begin(models[1])
                await eventually(lambda: any(one.state is ReplicaState.SUPERSEDED for one in router.replicas()))
                await finish(0)
                await begin(models[1])
                await eventually(lambda: serve(2))
                await finish(1)
                before = counts[1]
                await eventually(lambda: counts[1] > before)
                updated = True
        assert router.model_info.name == Path(models[1]).name
