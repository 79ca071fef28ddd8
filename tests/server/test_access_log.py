"""The access log and the formats of the log: what is in a line, and what never is."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from fake_engine import FakeEngine, tokens
from grpc import aio
from grpc_harness import events_of, serving, stream_request
from raw_h2 import framed, raw_connection

from aengine.api.outputs import DraftUsage
from aengine.server.core.calls_in_flight import Caller, CallRecord
from aengine.server.telemetry.metrics import FIELDS, JsonFormatter, TextFormatter, is_fit, log_call
from aengine.v1.model_service_pb2 import GetModelRequest

pytestmark = pytest.mark.anyio

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def record_of(**fields: object) -> logging.LogRecord:
    record = logging.LogRecord("aengine.access", logging.INFO, __file__, 1, "call", (), None)
    setattr(record, FIELDS, fields)
    return record


def fields_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, object]]:
    return [getattr(record, FIELDS) for record in caplog.records if record.name == "aengine.access"]


async def test_a_line_for_each_call(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    engine.script = tokens("an", "swer")
    async with serving(engine) as serve:
        metadata = (("x-request-id", "mine"), ("traceparent", f"00-{TRACE}-00f067aa0ba902b7-01"))
        await events_of(serve.generation.StreamGenerate(stream_request("a secret prompt"), metadata=metadata))
        with pytest.raises(aio.AioRpcError):
            await serve.model.GetModel(GetModelRequest(model="unknown"), metadata=(("authorization", "Bearer hush"),))
    first, second = fields_of(caplog)
    assert float(str(first.pop("ms"))) > 0
    assert str(first.pop("peer")).startswith("ipv4:127.0.0.1:")
    assert first == {
        "method": "/aengine.v1.GenerationService/StreamGenerate",
        "code": "OK",
        "request_id": "mine",
        "trace_id": TRACE,
        "messages": 5,
        "prompt_tokens": 3,
        "completion_tokens": 2,
    }
    assert (second["method"], second["code"], second["reason"]) == ("/aengine.v1.ModelService/GetModel", "NOT_FOUND", "MODEL_NOT_FOUND")
    assert second["messages"] == 0
    assert not {"prompt_tokens", "completion_tokens", "trace_id", "principal"} & second.keys()
    everything = caplog.text + repr([vars(record) for record in caplog.records])
    for secret in ("secret prompt", "answer", "swer", "hush"):
        assert secret not in everything


async def test_drafts_of_a_call(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine.script = tokens("answer")
    engine.drafts = DraftUsage("grammar", 1, 4, 4), DraftUsage("mtp", 2, 5, 1)
    async with serving(engine) as serve:
        await events_of(serve.generation.StreamGenerate(stream_request()))
    (line,) = fields_of(caplog)
    assert (line["draft_tokens"], line["accepted_draft_tokens"]) == (9, 5)


async def test_it_can_be_off(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(engine, access_log=False) as serve:
        await serve.model.GetModel(GetModelRequest())
    assert fields_of(caplog) == []


def test_who_called_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log_call(CallRecord("/m", "ipv4:1.2.3.4:5", "r", caller=Caller("alice"), code="CANCELLED", seconds=0.00123))
    (fields,) = fields_of(caplog)
    assert fields == {
        "method": "/m",
        "code": "CANCELLED",
        "ms": 1.2,
        "request_id": "r",
        "principal": "alice",
        "peer": "ipv4:1.2.3.4:5",
        "messages": 0,
    }


def test_text_has_the_fields_behind_the_message() -> None:
    line = TextFormatter().format(record_of(code="OK", peer="ipv6:[::1]:5", ms=1.5, name="a b\nINFO forged", quoted='"'))
    assert line.endswith(r' INFO call code=OK peer=ipv6:[::1]:5 ms=1.5 name="a b\nINFO forged" quoted="\""')
    assert "\n" not in line


async def test_bytes_of_metadata_are_not_shown(engine: FakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC logs those that are not UTF-8 with a traceback."""
    async with serving(engine) as serve, raw_connection(serve.server.address) as connection:
        headers = [("authorization", b"Bearer hush\xff"), ("x-request-id", b"\xfe")]
        call = await connection.call("/aengine.v1.ModelService/GetModel", framed(b""), headers=headers)  # type: ignore[arg-type]
        await call.wait_end()
        assert call.status == 0
    assert "hush" in caplog.text
    shown = [record for record in caplog.records if is_fit(record)]
    assert not any("hush" in record.getMessage() or record.exc_info for record in shown)


def test_json_is_an_object_a_line() -> None:
    line = JsonFormatter().format(record_of(code="OK", ms=1.5, name="a b\nforged"))
    assert "\n" not in line
    told = json.loads(line)
    assert told.pop("time").endswith("Z")
    assert told == {"level": "INFO", "logger": "aengine.access", "message": "call", "code": "OK", "ms": 1.5, "name": "a b\nforged"}


def test_json_holds_tracebacks_in_the_same_line() -> None:
    try:
        raise RuntimeError("boom")
    except RuntimeError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "failed: %s", ("why",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert told["message"] == "failed: why"
    assert "RuntimeError: boom" in told["exception"]


def test_the_format_is_that_of_the_whole_log() -> None:
    code = """
import logging, warnings
from aengine.server.telemetry.metrics import configure_logging
from aengine.server.config.options import ServerConfig
configure_logging(ServerConfig(log_format="json", log_level="warning"))
logging.getLogger("someone.else").warning("here")
logging.getLogger("aengine.server").info("not here")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["logger"] == "someone.else"
