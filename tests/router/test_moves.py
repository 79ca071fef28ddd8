"""Requests whose replica is lost: they go on elsewhere with exactly what would have come, or end as they were told."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from cutting_proxy import cutting_proxy
from fleets import Member, TestFleet, fleet
from grpc_harness import serving
from hang_guard import HANG_SECONDS, let_others_run
from oracle_engine import StepGate, idle, until

from aengine import (
    AsyncEngine,
    EngineStateError,
    FinishReason,
    NoReplicaError,
    PoisonRequestError,
    QueueFullError,
    RequestEndedError,
    RequestIdInUseError,
    Router,
    SamplingParams,
    Token,
)
from aengine.api.outputs import ReplicaState
from aengine.engine.edges import Cancel

pytestmark = pytest.mark.anyio

LONG = SamplingParams(seed=1, max_tokens=150, ignore_eos=True)
MEMORY = 64 << 20


def slow_down(*members: Member, seconds: float = 0.005) -> None:
    for member in members:
        member.engine.runner.before_step = lambda plan: time.sleep(seconds)


async def tokens_of(stream: Any, most: int = 10_000) -> list[Token]:
    tokens: list[Token] = []
    with anyio.fail_after(HANG_SECONDS):
        while len(tokens) < most:
            try:
                tokens.append(await stream.__anext__())
            except StopAsyncIteration:
                break
    return tokens


def check_whole(many: TestFleet, tokens: list[Token], seed: int = 1) -> None:
    """They are those of an undisturbed run."""
    truth = next(member.engine.runner.truths[seed] for member in many.members if seed in member.engine.runner.truths)
    assert [token.token_id for token in tokens] == truth.output
    assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + [truth.reason]


class TestLoss:
    async def test_in_the_middle(self) -> None:
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1, 2], LONG, request_id="x")
            tokens = await tokens_of(stream, 10)
            first = await many.member_of("x")
            first.stop()
            tokens += await tokens_of(stream)
            check_whole(many, tokens)
            assert "".join(token.text for token in tokens) == first.engine.tokenizer.decode([token.token_id for token in tokens])
            completion = stream.completion()
            assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (2, 150)
            assert stream.timing.first_token is not None

    @pytest.mark.slow
    async def test_again_and_again(self) -> None:
        """While the one comes back the other is lost."""
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], SamplingParams(seed=1, ignore_eos=True), request_id="x")
            tokens: list[Token] = []
            for _ in range(3):
                tokens += await tokens_of(stream, 20)
                at = await many.member_of("x")
                at.stop()
                (other,) = many.others(at)
                await until(lambda at=at: many.state(at) is ReplicaState.LOST)
                await until(lambda at=at: idle(at.engine))
                await until(lambda other=other: many._has(other, "x") or stream.unread)
                await at.come_back()
                await many.all_serve()
            check_whole(many, tokens + await tokens_of(stream))

    async def test_unread_tokens_stay(self) -> None:
        async with fleet(2) as many:
            stream = many.router.stream([1], SamplingParams(seed=1, max_tokens=100, ignore_eos=True), request_id="x")
            slow_down(*many.members)
            await until(lambda: stream.unread >= 5)
            (await many.member_of("x")).stop()
            await until(lambda: stream.unread >= 20)
            check_whole(many, await tokens_of(stream))

    async def test_what_has_ended_needs_no_replica(self) -> None:
        async with fleet(1) as many:
            stream = many.router.stream([1], SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
            await until(lambda: stream.unread == 30)
            many.members[0].stop()
            await until(lambda: many.state(many.members[0]) is ReplicaState.LOST)
            check_whole(many, await tokens_of(stream))

    async def test_some_of_its_sequences_have_ended(self) -> None:
        params = SamplingParams(seed=3, n=4)  # each ends somewhere else
        async with fleet(2) as many:
            undisturbed = await many.router.generate([5], params)
            ends = sorted(len(one.token_ids) for one in (undisturbed, *undisturbed.others))
            assert ends[0] + 2 < ends[-1], "seeds of which one ends early"
            slow_down(*many.members)
            stream = many.router.stream([5], params, request_id="x")
            ended = False
            async for token in stream:
                if token.finish_reason is not None and not ended:
                    ended = True
                    (await many.member_of("x")).stop()
            completion = stream.completion()
            for one, known in zip((completion, *completion.others), (undisturbed, *undisturbed.others), strict=True):
                assert (one.token_ids, one.text, one.finish_reason) == (known.token_ids, known.text, known.finish_reason)

    async def test_before_the_first_token(self) -> None:
        async with fleet(2) as many:
            gates = [StepGate(member.engine) for member in many.members]
            streams = [
                many.router.stream([1], SamplingParams(seed=seed, max_tokens=9, ignore_eos=True), request_id=f"{seed}") for seed in range(6)
            ]
            for stream in streams:
                await stream.started()
            many.members[0].stop()
            for gate in gates:
                gate.open()
            for seed, stream in enumerate(streams):
                check_whole(many, await tokens_of(stream), seed)

    @pytest.mark.slow
    async def test_a_replica_that_hangs_is_left_and_not_heard_later(self) -> None:
        async with fleet(2, hang_seconds=2.0) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 10)
            first = await many.member_of("x")
            first.proxy.flows.clear()
            await until(lambda: many.state(first) is ReplicaState.LOST)
            tokens += await tokens_of(stream, 10)
            first.proxy.flows.set()  # what it has sent meanwhile comes now
            check_whole(many, tokens + await tokens_of(stream))
            await until(lambda: idle(first.engine))
            await many.all_serve()

    @pytest.mark.slow
    async def test_none_is_left_for_a_while(self) -> None:
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG)
            tokens = await tokens_of(stream, 5)
            for member in many.members:
                member.stop()
            await until(lambda: not many.router.healthy)
            later = many.router.stream([1], SamplingParams(seed=8, max_tokens=5, ignore_eos=True))
            await many.members[1].come_back()
            check_whole(many, tokens + await tokens_of(stream))
            check_whole(many, await tokens_of(later), 8)

    async def test_none_comes_back(self) -> None:
        async with fleet(1, wait_seconds=0.3) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG)
            await tokens_of(stream, 5)
            many.members[0].stop()
            with pytest.raises(NoReplicaError, match=r"within 0\.3 s: .* is lost"):
                await tokens_of(stream)
            assert stream.completion().finish_reason is FinishReason.ERROR
            with pytest.raises(NoReplicaError):
                await many.router.tokenize("x")


class TestWeights:
    async def test_a_stream_goes_on_where_the_weights_are_the_same(self) -> None:
        async with fleet(3) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            new, old = many.others(first)
            await new.engine.update_weights("new")
            await until(lambda: many.versions() == {first.name: 0, new.name: 1, old.name: 0})
            first.stop()
            tokens += await tokens_of(stream)
            check_whole(many, tokens)
            assert {token.weights_version for token in tokens} == {0}
            assert not new.engine.stats().completion_tokens

    @pytest.mark.slow
    async def test_it_waits_for_its_weights(self) -> None:
        """Where another replica has other ones, and got them without the router; that one takes what is new."""
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            (new,) = many.others(first)
            await new.engine.update_weights("new")
            await until(lambda: many.versions()[new.name] == 1)
            first.stop()
            await until(lambda: many.state(first) is ReplicaState.LOST)
            check_whole(many, await tokens_of(many.router.stream([1], SamplingParams(seed=2, max_tokens=9, ignore_eos=True))), 2)
            assert new.engine.stats().completion_tokens == 9
            await first.come_back()
            check_whole(many, tokens + await tokens_of(stream))
            assert new.engine.stats().completion_tokens == 9

    async def test_a_replica_that_got_others_before_the_router_knew(self) -> None:
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            (new,) = many.others(first)
            replica = many.router._parts.fleet.replicas[new.name]  # type: ignore[union-attr]
            take, replica._take = replica._take, lambda report: None  # type: ignore[method-assign]
            await new.engine.update_weights("new")
            first.stop()
            await until(lambda: new.engine.stats().completion_tokens)
            await until(lambda: idle(new.engine))
            assert many.versions()[new.name] == 0, "the router does not know"
            replica._take = take  # type: ignore[method-assign]
            await until(lambda: many.versions()[new.name] == 1)
            await first.come_back()
            tokens += await tokens_of(stream)
            check_whole(many, tokens)
            assert {token.weights_version for token in tokens} == {0}

    @pytest.mark.slow
    async def test_with_new_ones_where_the_router_has_replaced_them(self, tmp_path: Path) -> None:
        async with fleet(2, admin=tmp_path) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            (new,) = many.others(first)
            may_prepare = threading.Event()
            first.engine.runner.before_prepare = lambda change: may_prepare.wait(HANG_SECONDS)
            updating = asyncio.ensure_future(many.router.update_weights("/new"))
            await until(lambda: many.versions()[new.name] == 1)
            first.stop()
            assert await updating == 1
            tokens += await tokens_of(stream)
            may_prepare.set()
            check_whole(many, tokens)  # which the oracle's weights do not change
            assert (tokens[0].weights_version, tokens[-1].weights_version) == (0, 1)


class TestEndsWithoutReplica:
    """What ends a request that has no replica at the moment."""

    async def lost(self, many: TestFleet, **options: Any) -> Any:
        slow_down(*many.members)
        stream = many.router.stream([1], LONG, request_id="x", **options)
        await tokens_of(stream, 5)
        many.members[0].stop()
        await until(lambda: not many.router.healthy)
        return stream

    @pytest.mark.slow
    async def test_its_deadline(self) -> None:
        async with fleet(1) as many:
            stream = await self.lost(many, timeout=2.0)
            tokens = await tokens_of(stream)
            assert (tokens[-1].token_id, tokens[-1].finish_reason) == (-1, FinishReason.DEADLINE)

    async def test_cancel(self) -> None:
        async with fleet(1) as many:
            stream = await self.lost(many)
            assert await many.router.cancel("x") is True
            assert await many.router.cancel("x") is False
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED

    async def test_aclose(self) -> None:
        async with fleet(1) as many:
            stream = await self.lost(many)
            with anyio.fail_after(HANG_SECONDS):
                await stream.aclose()
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED
            assert many.router.request_info("x") is None

    async def test_the_router_closes(self) -> None:
        async with fleet(1) as many:
            stream = await self.lost(many)
            with anyio.fail_after(HANG_SECONDS):
                await many.router.aclose()
            assert (await tokens_of(stream))[-1].finish_reason is FinishReason.CANCELLED
            with pytest.raises(EngineStateError):
                many.router.stream([1])


class TestRefusals:
    async def test_a_full_queue_is_tried_elsewhere(self) -> None:
        async with fleet(2, engine={"max_queued_requests": 1}) as many:
            gates = [StepGate(member.engine) for member in many.members]
            streams = [many.router.stream([1], LONG, request_id=name) for name in "ab"]
            for gate in gates:
                await anyio.to_thread.run_sync(gate.held.wait)
            assert await many.member_of("a") is not await many.member_of("b")
            with pytest.raises(QueueFullError):
                await tokens_of(many.router.stream([1], LONG))
            for gate in gates:
                gate.open()
            for stream in streams:
                await stream.aclose()

    @pytest.mark.slow
    async def test_a_replica_that_shuts_down(self) -> None:
        """It says so, and gets nothing new; what it still has goes on elsewhere when its time is over."""
        async with fleet(2) as many:
            slow_down(*many.members, seconds=0.01)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            (other,) = many.others(first)
            async with anyio.create_task_group() as group:
                group.start_soon(self.shut_down, first)
                await until(lambda: many.state(first) is not ReplicaState.SERVING)
                for seed in range(2, 6):
                    check_whole(
                        many, await tokens_of(many.router.stream([1], SamplingParams(seed=seed, max_tokens=3, ignore_eos=True))), seed
                    )
                    assert seed in other.engine.runner.truths
                    assert seed not in first.engine.runner.truths
                check_whole(many, tokens + await tokens_of(stream))

    async def shut_down(self, member: Member) -> None:
        await member.serving.server.drain(0.3)
        await member.serving.server.stop()

    @pytest.mark.slow
    async def test_a_replica_that_is_drained_by_the_router(self) -> None:
        async with fleet(2) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            tokens = await tokens_of(stream, 5)
            first = await many.member_of("x")
            assert await many.router.drain_replica(first.name) == 1
            assert many.state(first) is ReplicaState.DRAINING
            await until(lambda: idle(first.engine))
            check_whole(many, tokens + await tokens_of(stream))


class TestBlame:
    async def test_a_request_that_replicas_die_of(self) -> None:
        """Others, that have brought something, are not taken for it."""
        async with fleet(3) as many:
            slow_down(*many.members)
            innocent = [
                many.router.stream([1], SamplingParams(seed=seed, max_tokens=150, ignore_eos=True), request_id=f"{seed}")
                for seed in range(4)
            ]
            tokens = [await tokens_of(stream, 3) for stream in innocent]
            gates = {member.name: StepGate(member.engine) for member in many.members}
            poison = many.router.stream([2], SamplingParams(seed=99, ignore_eos=True), request_id="poison")
            deaths = 0
            while many.router.request_info("poison") is not None:
                stay = many.router._running().requests._streams["poison"]._stay
                if stay is None or not stay.attempt.acknowledged:
                    await let_others_run()
                    continue
                next(member for member in many.members if member.name == stay.attempt.replica.name).stop()
                deaths += 1
                await until(lambda stay=stay: stay.attempt.ended)
            for gate in gates.values():
                gate.open()
            with pytest.raises(PoisonRequestError, match="when they died"):
                await tokens_of(poison)
            assert deaths == 2
            for member in many.members:
                if many.state(member) is ReplicaState.LOST:
                    await member.come_back()
            for seed, (stream, had) in enumerate(zip(innocent, tokens, strict=True)):
                check_whole(many, had + await tokens_of(stream), seed)

    async def test_suspects_are_placed_apart(self) -> None:
        async with fleet(3) as many:
            first, *others = many.members
            for member in others:
                member.stop()
            await until(lambda: all(many.state(member) is ReplicaState.LOST for member in others))
            gates = [StepGate(first.engine)]
            params = [SamplingParams(seed=seed, max_tokens=5, ignore_eos=True) for seed in range(3)]
            streams = [many.router.stream([1], params[seed], request_id=name) for seed, name in enumerate("abc")]
            for stream in streams:
                await stream.started()
            for member in others:
                await member.come_back()
            await many.all_serve()
            gates += [StepGate(member.engine) for member in others]
            first.stop()
            await until(lambda: all(any(many._has(member, name) for name in "abc") for member in others))
            waiting = [name for name in "abc" if many.router._running().requests._streams[name]._stay is None]
            assert len(waiting) == 1  # until one of the others has brought something
            for gate in gates:
                gate.open()
            for seed, stream in enumerate(streams):
                check_whole(many, await tokens_of(stream), seed)

    async def test_moves_are_bounded(self) -> None:
        async with fleet(2, max_moves=0) as many:
            slow_down(*many.members)
            stream = many.router.stream([1], LONG, request_id="x")
            await tokens_of(stream, 5)
            (await many.member_of("x")).stop()
            with pytest.raises(NoReplicaError, match="0 times in vain"):
                await tokens_of(stream)


class TestHedging:
    async def test_the_first_token_wins(self) -> None:
        async with fleet(2, hedge_seconds=0.1) as many:
            gates = [StepGate(member.engine) for member in many.members]
            stream = many.router.stream([1], SamplingParams(seed=4, max_tokens=20, ignore_eos=True), request_id="x")
            first = await many.member_of("x")
            (other,) = many.others(first)
            await until(lambda: many._has(other, "x"))
            gates[many.members.index(other)].open()
            check_whole(many, await tokens_of(stream), 4)
            await until(lambda: any(isinstance(command, Cancel) for command in [*first.engine._core.steps._mailbox._commands]))
            gates[many.members.index(first)].open()
            await until(lambda: idle(first.engine))
            assert first.engine.stats().completion_tokens < 20
            assert stream.completion().usage.completion_tokens == 20

    async def test_either_is_lost(self) -> None:
        for lost in (0, 1):
            async with fleet(2, hedge_seconds=0.05) as many:
                gates = [StepGate(member.engine) for member in many.members]
                stream = many.router.stream([1], SamplingParams(seed=4, max_tokens=20, ignore_eos=True), request_id="x")
                await until(lambda many=many: all(many._has(member, "x") for member in many.members))
                many.members[lost].stop()
                await until(lambda many=many, lost=lost: many.state(many.members[lost]) is ReplicaState.LOST)
                for gate in gates:
                    gate.open()
                check_whole(many, await tokens_of(stream), 4)


class TestEmbeddings:
    async def test_another_replica_makes_it(self) -> None:
        async with (
            AsyncEngine("demo", kv_cache_memory=MEMORY) as one,
            AsyncEngine("demo", kv_cache_memory=MEMORY) as two,
            serving(one) as first,
            serving(two) as second,
            cutting_proxy(first.server.address) as proxy,
            cutting_proxy(second.server.address) as other,
            Router(backends=(proxy.address, other.address)) as router,
        ):
            known = await router.embed("It is a truth")
            await one.pause()
            await two.pause()
            making = asyncio.ensure_future(router.embed("It is a truth", request_id="x"))
            await until(lambda: not (idle(one) and idle(two)))
            with pytest.raises(RequestIdInUseError):
                await router.embed("It is a truth", request_id="x")
            (proxy if idle(two) else other).stop()
            await one.unpause()
            await two.unpause()
            with anyio.fail_after(HANG_SECONDS):
                np.testing.assert_allclose((await making).values, known.values, atol=1e-6)

            await one.pause()
            await two.pause()
            making = asyncio.ensure_future(router.embed([1, 2, 3], request_id="x"))
            await until(lambda: router.request_info("x") is not None)
            assert await router.cancel("x") is True
            with pytest.raises(RequestEndedError, match="cancelled"):
                await making
            with pytest.raises(RequestEndedError, match="timeout"):
                await router.embed([1, 2, 3], timeout=0.1)
            await one.unpause()
            await two.unpause()
            await until(lambda: idle(one) and idle(two))
