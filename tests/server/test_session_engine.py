"""Session on the real engine: the tokens of every tag, back-pressure, and nothing left behind."""

from __future__ import annotations

import pytest
from grpc import aio
from grpc_harness import serving
from oracle_engine import Ahead, OracleEngine, StepGate, step_with_the_loop, until
from oracle_requests import check_whole, ids_of, nothing_left, num_generated, oracle_request
from raw_h2 import GENERATION, framed, raw_connection
from session_client import SessionClient, cancellation, hold, more_credit, opening, submission
from slow_cases import slow_but
from speculating import also_with_drafts

from aengine.scheduler.plan import RowsFailed, StepPlan
from aengine.server.core.generation import READ_TOKENS
from aengine.v1.generation_pb2 import FINISH_REASON_CANCELLED

pytestmark = pytest.mark.anyio

MAX_UNREAD = 8


def fail_every_row(plan: StepPlan) -> None:
    raise RowsFailed({row: ValueError("this row cannot be built") for row in plan.rows.tolist()})


@pytest.mark.quick_cases(1)
@also_with_drafts
@pytest.mark.parametrize("ahead", list(Ahead))
async def test_every_tag_has_the_tokens_of_its_solo_run(ahead: Ahead) -> None:
    async with OracleEngine(ahead=ahead, max_num_seqs=64, num_pages=4000) as engine, serving(engine) as serve:
        client = SessionClient(serve)
        await client.say(opening(), *(submission(1000 + seed, oracle_request(seed, max_tokens=5 + seed)) for seed in range(64)))
        events = await client.finish()
        assert sorted(events) == [1000 + seed for seed in range(64)]
        for tag, told in events.items():
            check_whole(engine, tag - 1000, told)
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


async def test_a_step_is_a_message() -> None:
    async with OracleEngine(max_num_seqs=64, max_num_batched_tokens=256) as engine, serving(engine) as serve:
        await engine.pause()
        client = SessionClient(serve)
        await client.say(opening(), *(submission(seed, oracle_request(seed, max_tokens=20)) for seed in range(64)))
        while len(client.events) < 64:
            await client.read()
        await engine.unpause()
        await client.call.done_writing()
        while (response := await client.read()) is not None:
            assert len({entry.tag for entry in response.events}) == 64
        assert engine.stats().steps == 20


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_cancelling_one_leaves_the_others() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        gate = StepGate(engine, at=10)
        client = SessionClient(serve)
        await engine.pause()
        await client.say(opening(), *(submission(seed, oracle_request(seed)) for seed in range(8)))
        await until(lambda: serve.server.in_flight == 8)
        await engine.unpause()
        for seed in range(8):
            await client.read_until(seed, "delta")
        await client.say(cancellation(3))
        gate.open()
        events = await client.finish()
        assert events[3][-2].sequence_finished.finish.reason == FINISH_REASON_CANCELLED
        for seed in (0, 1, 2, 4, 5, 6, 7):
            check_whole(engine, seed, events[seed])
        await until(lambda: nothing_left(engine))


@pytest.mark.quick_cases(1)
@also_with_drafts
@pytest.mark.parametrize("ahead", slow_but([Ahead.HOST], Ahead))
@pytest.mark.parametrize("whole_channel", [False, True])
async def test_a_client_that_leaves_leaves_nothing(ahead: Ahead, whole_channel: bool) -> None:
    async with OracleEngine(ahead=ahead) as engine, serving(engine) as serve:
        async with aio.insecure_channel(serve.server.address) as channel:
            client = SessionClient(type(serve)(serve.server, channel))
            # Some run, some wait for a place.
            await client.say(opening(), *(submission(seed, oracle_request(seed)) for seed in range(40)))
            await client.read_until(0, "delta")
            if not whole_channel:
                client.call.cancel()
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


@also_with_drafts
async def test_all_leave_within_a_few_steps() -> None:
    async with OracleEngine() as engine, serving(engine) as serve:
        gate = StepGate(engine, at=5)
        client = SessionClient(serve)
        await engine.pause()
        await client.say(opening(), *(submission(seed, oracle_request(seed)) for seed in range(24)))
        await until(lambda: serve.server.in_flight == 24)
        await engine.unpause()
        await until(gate.held.is_set)
        client.call.cancel()
        await until(lambda: len(engine._core.steps._mailbox._commands) == 24)  # all of them cancelled, and none gone
        assert serve.server.in_flight == 24
        gate.open()
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_without_credit_requests_park_and_go_on_with_it() -> None:
    async with OracleEngine(max_unread_tokens=MAX_UNREAD, num_pages=4000) as engine, serving(engine) as serve:
        step_with_the_loop(engine)
        client = SessionClient(serve)
        await client.say(opening(1), *(submission(seed, oracle_request(seed, request_id=f"r{seed}")) for seed in range(4)))
        await client.read()
        await until(lambda: engine.stats().parked == 4)
        for seed in range(4):
            assert MAX_UNREAD < num_generated(engine, f"r{seed}") <= MAX_UNREAD + READ_TOKENS
        await client.say(more_credit(100_000))
        events = await client.finish()
        for seed in range(4):
            check_whole(engine, seed, events[seed])
        await until(lambda: nothing_left(engine))


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_what_is_held_parks_alone_and_goes_on_later() -> None:
    async with OracleEngine(max_unread_tokens=MAX_UNREAD, num_pages=4000) as engine, serving(engine) as serve:
        step_with_the_loop(engine)
        gate = StepGate(engine, at=2)
        client = SessionClient(serve)
        await client.say(opening(), *(submission(seed, oracle_request(seed, request_id=f"r{seed}")) for seed in range(4)))
        for seed in range(4):
            await client.read_until(seed, "started")
        await client.say(hold(2), cancellation(99), submission(9, oracle_request(9)))
        await client.read_until(9, "started")  # so that it is held
        gate.open()
        for seed in (0, 1, 3, 9):
            await client.read_until(seed, "finished")
            check_whole(engine, seed, client.events[seed])
        await until(lambda: engine.stats().parked == 1)
        assert MAX_UNREAD < num_generated(engine, "r2") <= MAX_UNREAD + READ_TOKENS
        await client.say(hold(2, False))
        check_whole(engine, 2, (await client.finish())[2])
        await until(lambda: nothing_left(engine))


@pytest.mark.quick_cases(1)
@also_with_drafts
async def test_a_client_that_does_not_read_parks_its_requests() -> None:
    async with OracleEngine(max_unread_tokens=MAX_UNREAD, num_pages=4000) as engine, serving(engine) as serve:
        step_with_the_loop(engine)
        async with raw_connection(serve.server.address, window=100) as connection:
            said = [opening(), *(submission(seed, oracle_request(seed)) for seed in range(4))]
            await connection.call(GENERATION + "Session", b"".join(map(framed, said)), greedy=False)
            await until(lambda: engine.stats().parked == 4)
            other = SessionClient(serve)
            await other.say(opening(), submission(9, oracle_request(9)))
            check_whole(engine, 9, (await other.finish())[9])
            assert engine.stats().parked == 4
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("ahead", list(Ahead))
@pytest.mark.parametrize("end", ["stop token", "cancelled", "failed"])
async def test_the_last_event_of_a_tag_comes_when_its_pages_are_free(ahead: Ahead, end: str) -> None:
    """Also where a step of it runs ahead."""
    async with OracleEngine(ahead=ahead) as engine, serving(engine) as serve:
        client = SessionClient(serve)
        await client.say(opening())
        for tag in range(20):
            request = oracle_request(5, max_tokens=None if tag else 20)
            if end == "stop token" and tag:
                request.spec.stopping.stop_token_ids.append(engine.solo(5)[0][7])
            await client.say(submission(tag, request))
            await client.read_until(tag, "delta")
            if end == "cancelled":
                await client.say(cancellation(tag))
            elif end == "failed":
                engine.runner.before_launch = fail_every_row
            while tag not in client.errors and not client.events[tag][-1].HasField("finished"):
                await client.read()
            engine.runner.before_launch = lambda plan: None
            assert engine.stats().pages_used == 0
            assert not engine._core.serving.registry._by_id


async def test_tags_come_and_go() -> None:
    """A router's day: many requests, one after the other under few tags."""
    async with OracleEngine() as engine, serving(engine) as serve:
        client = SessionClient(serve)
        await client.say(opening())
        seeds = iter(range(100))
        current = {}
        num_done = 0
        while num_done < 100:
            for tag in range(8):
                if tag not in current and (seed := next(seeds, None)) is not None:
                    current[tag] = seed
                    await client.say(submission(tag, oracle_request(seed, max_tokens=1 + seed % 7)))
            await client.read()
            for tag, seed in list(current.items()):
                events = client.events[tag]
                if events and events[-1].HasField("finished"):
                    check_whole(engine, seed, events)
                    assert len(ids_of(events)) == 1 + seed % 7
                    del current[tag], client.events[tag]
                    num_done += 1
        assert await client.finish() == {}
        await until(lambda: nothing_left(engine) and serve.server.in_flight == 0)
