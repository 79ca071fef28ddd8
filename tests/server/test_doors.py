"""What the core promises, through either door of one server: who may call, limits, drain, whose requests are whose, and records."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from certificates import replace
from doors import GRPC, HTTP, METHODS, OK, Doors, both_doors
from fake_engine import FakeEngine, tokens
from hang_guard import HANG_SECONDS
from oracle_engine import until
from records_seen import Seen, watch

from aengine.api.errors import (
    AdapterNotFoundError,
    AEngineError,
    ContextLengthError,
    EngineDeadError,
    EngineStateError,
    FieldViolation,
    InvalidRequestError,
    KVCapacityError,
    NoTokenizerError,
    QueueFullError,
)
from aengine.api.outputs import EngineStats
from aengine.server.core import auth
from aengine.server.telemetry.metrics import FIELDS
from aengine.v1.generation_service_pb2 import CancelRequestsRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.anyio

OTHER = {GRPC: HTTP, HTTP: GRPC}


@pytest.fixture(params=[GRPC, HTTP])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


async def test_tokens_decide_and_change_with_their_file(
    door: str, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auth, "RELOAD_SECONDS", 0.02)
    engine.script = tokens("a")
    file, admins = tmp_path / "tokens", tmp_path / "admins"
    file.write_text("alice of-alice\n")
    admins.write_text("root of-root\n")
    seen = Seen()
    async with both_doors(engine, token_file=str(file), admin_token_file=str(admins)) as doors:
        watch(doors.server.core.observers, seen)
        tried = {token: await doors.client(door, token).model() for token in (None, "x", "of-alic", "OF-ALICE", "of-alice", "of-root")}
        assert tried == {
            None: "NO_CREDENTIALS",
            **dict.fromkeys(("x", "of-alic", "OF-ALICE"), "BAD_CREDENTIALS"),
            "of-alice": OK,
            "of-root": OK,
        }
        assert (await doors.client(door, "guess").generate()).reason == "BAD_CREDENTIALS"
        assert not engine.streams
        replace(file, b"bob of-bob\n")
        while await doors.client(door, "of-bob").model() != OK:
            pass
        assert await doors.client(door, "of-alice").model() == "BAD_CREDENTIALS"
        replace(file, b"far too many words\n")
        for _ in range(5):
            assert await doors.client(door, "of-bob").model() == OK, "a file that is none changes nothing"
    assert [record.caller.name for record in seen.calls][4:6] == ["alice", "root"]


async def test_a_flood_meets_the_limit_of_calls_and_nothing_else(door: str, engine: FakeEngine) -> None:
    seen = Seen()
    async with both_doors(engine, max_calls=20) as doors:
        watch(doors.server.core.observers, seen)
        first = asyncio.ensure_future(doors.client(door).generate(request_id="first"))
        stream = await engine.submitted.get()
        flood = [asyncio.ensure_future(doors.client(door).generate()) for _ in range(60)]
        await until(lambda: sum(one.done() for one in flood) == 60 - 19)
        assert {one.result().reason for one in flood if one.done()} == {"TOO_MANY_CALLS"}
        assert await doors.client(OTHER[door]).model() == "TOO_MANY_CALLS", "one limit for both doors"
        assert (await doors.http.get("/health")).status_code == 200
        for one in flood:
            one.cancel()
        await asyncio.wait(flood)
        stream.push(tokens("a", "b"))
        assert (await first).text == "ab"
        await until(lambda: not engine.streams and not len(doors.server.core.calls))
        assert await doors.client(OTHER[door]).model() == OK
    refused = Counter(record.reason for record in seen.calls)
    assert refused["TOO_MANY_CALLS"] == 60 - 19 + 1


REFUSALS: dict[str, Exception] = {
    "QUEUE_FULL": QueueFullError("the queue is full"),
    "ADAPTER_NOT_FOUND": AdapterNotFoundError.of("adapter", "there is none"),
    "CONTEXT_LENGTH_EXCEEDED": ContextLengthError((FieldViolation("prompt", "too long"),), 5, 9),
    "KV_CAPACITY": KVCapacityError((FieldViolation("prompt", "too long"),), 5, 9),
    "INVALID_FIELD": InvalidRequestError.of("temperature", "too hot"),
    "NO_TOKENIZER": NoTokenizerError("there is none"),
    "NOT_READY": EngineStateError("asleep"),
    "ENGINE_DEAD": EngineDeadError("dead"),
    "BUG": KeyError("a secret"),
}


async def test_what_the_engine_refuses_has_one_reason_everywhere(door: str, engine: FakeEngine) -> None:
    async with both_doors(engine) as doors:
        for reason, error in REFUSALS.items():
            engine.refusal = error
            answer = await doors.client(door).generate()
            assert answer.reason == reason
            assert isinstance(error, AEngineError) or "secret" not in answer.text
            assert doors.server.in_flight == 0


async def test_a_drain_lets_run_what_runs_and_refuses_what_comes(door: str, engine: FakeEngine) -> None:
    async with both_doors(engine) as doors:
        running = asyncio.ensure_future(doors.client(door).generate())
        stream = await engine.submitted.get()
        draining = asyncio.ensure_future(doors.server.drain(HANG_SECONDS))
        await until(lambda: doors.server.core.admission.closed)
        for other in (GRPC, HTTP):
            assert (await doors.client(other).generate()).reason == "DRAINING"
        assert not draining.done()
        stream.push(tokens("a"))
        assert (await running).text == "a"
        assert await draining is True


@pytest.mark.parametrize(("error", "reason"), [(None, "DRAINING"), (EngineDeadError("the step thread died"), "ENGINE_DEAD")])
async def test_a_stop_tells_why(door: str, engine: FakeEngine, error: Exception | None, reason: str) -> None:
    async with both_doors(engine) as doors:
        running = asyncio.ensure_future(doors.client(door).generate())
        stream = await engine.submitted.get()
        await doors.server.stop(error)
        assert (await running).reason == reason
        await stream.closed.wait()


async def tenants(doors: Doors, door: str, tenant: str, request_id: str, engine: FakeEngine) -> tuple[Any, Any]:
    """A request of `tenant`'s under way, and its stream."""
    running = asyncio.ensure_future(doors.client(door, f"of-{tenant}").generate(request_id=request_id))
    return running, await engine.submitted.get()


async def test_ids_are_their_owners_through_every_door(door: str, engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("alice of-alice\nbob of-bob\n")
    async with both_doors(engine, token_file=str(file)) as doors:
        hers, _ = await tenants(doors, door, "alice", "mine", engine)
        for other in (GRPC, HTTP):
            assert (await doors.client(other, "of-alice").generate(request_id="mine")).reason == "REQUEST_ID_IN_USE"
        his, stream = await tenants(doors, OTHER[door], "bob", "mine", engine)
        cancel, request = GenerationServiceStub(doors.channel).CancelRequests, CancelRequestsRequest(request_ids=["mine"])
        assert list((await cancel(request, metadata=(("authorization", "Bearer of-alice"),))).cancelled_request_ids) == ["mine"]
        assert (await hers).reason == OK
        assert list((await cancel(request, metadata=(("authorization", "Bearer of-alice"),))).cancelled_request_ids) == []
        stream.push(tokens("his"))
        assert (await his).text == "his"


async def test_a_client_that_leaves_takes_its_request_along(door: str, engine: FakeEngine) -> None:
    seen = Seen()
    async with both_doors(engine) as doors:
        watch(doors.server.core.observers, seen)
        running = asyncio.ensure_future(doors.client(door).generate())
        stream = await engine.submitted.get()
        running.cancel()
        await stream.closed.wait()
        await until(lambda: seen.calls and doors.server.in_flight == 0)
    assert [call.code for call in seen.calls] == [{GRPC: "CANCELLED", HTTP: "499"}[door]]


async def test_calls_are_logged_and_counted_and_nobody_reads_what_was_said(
    door: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    engine.script = tokens("an", "swer")
    engine.stats = EngineStats  # type: ignore[attr-defined]
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    headers = {"x-request-id": "mine", "traceparent": f"00-{trace}-00f067aa0ba902b7-01", "authorization": "Bearer hush"}
    async with both_doors(engine) as doors:
        answer = await doors.client(door).generate("a secret prompt", headers=headers)
        assert (answer.text, answer.call_id) == ("answer", "mine")
        drawn = await doors.client(door).generate(headers={"x-request-id": "not usable"})
        assert drawn.call_id not in ("", "not usable")
        lines = [getattr(record, FIELDS) for record in caplog.records if record.name == "aengine.access"]
        metrics = (await doors.http.get("/metrics")).text
        polled = [record for record in caplog.records if getattr(record, FIELDS, {}).get("method") == "GET /metrics"]
        assert [record.levelno for record in polled] == [logging.DEBUG]
    code = {GRPC: "OK", HTTP: "200"}[door]
    (counted,) = [line for line in metrics.splitlines() if line.startswith("aengine_calls_total") and line.endswith(" 2.0")]
    assert (f'code="{code}"' in counted, METHODS[door].rpartition("/")[2] in counted) == (True, True)
    told = {"method": METHODS[door], "code": code, "request_id": "mine", "trace_id": trace, "messages": 1}
    assert {name: lines[0][name] for name in told} == told
    assert (lines[0]["prompt_tokens"], lines[0]["completion_tokens"], lines[1]["request_id"]) == (3, 2, drawn.call_id)
    everything = caplog.text + repr([vars(record) for record in caplog.records])
    assert not [secret for secret in ("secret prompt", "swer", "hush") if secret in everything]


async def test_an_observer_that_fails_disturbs_nothing(door: str, engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    engine.script = tokens("a")
    async with both_doors(engine) as doors:

        def fail(record: object) -> None:
            raise RuntimeError("an observer")

        doors.server.core.observers.on_call_end.insert(0, fail)
        doors.server.core.observers.on_generation_end.insert(0, fail)
        assert [(await doors.client(door).generate()).text for _ in range(2)] == ["a", "a"]
        assert doors.server.in_flight == 0
    assert "an observer" in caplog.text
