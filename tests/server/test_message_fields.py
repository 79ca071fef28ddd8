"""Messages with too many fields are refused before they are decoded; all others, and what is no message, are left to the decoder."""

from __future__ import annotations

import random

import grpc
import pytest
from fake_engine import FakeEngine
from google.protobuf.message import DecodeError, Message
from grpc import aio
from grpc_harness import failure_of, serving
from wire_bytes import field, unpacked

from aengine.api.errors import InvalidRequestError
from aengine.server.grpc import status
from aengine.server.grpc.status import MAX_FIELDS, UNCOUNTED_BYTES, check_fields
from aengine.v1.generation_pb2 import GenerationSpec
from aengine.v1.generation_service_pb2 import BatchGenerateRequest, SessionRequest, StreamGenerateRequest


def refused(raw: bytes, kind: type[Message] = StreamGenerateRequest) -> bool:
    try:
        check_fields(raw, kind.DESCRIPTOR)
    except InvalidRequestError as error:
        return str(error).startswith(f"request: {len(raw)} bytes with more than {status.MAX_FIELDS} fields")
    return False


def num_fields(message: Message) -> int:
    """Counted in the decoded message."""
    count = 0
    for descriptor, value in message.ListFields():
        is_map = descriptor.message_type is not None and descriptor.message_type.GetOptions().map_entry
        several = descriptor.is_repeated and not descriptor.is_packed
        values = list(value) if several else [value]
        count += len(values)
        if descriptor.is_packed:
            count += sum(1 if number < 128 else 2 for number in value) // 64
        if descriptor.message_type is not None and not is_map:
            count += sum(num_fields(one) for one in values)
    return count


def a_spec(draw: random.Random) -> GenerationSpec:
    spec = GenerationSpec(model="m" * draw.randrange(300), priority=draw.randrange(-3, 3))
    if draw.random() < 0.5:
        for _ in range(draw.randrange(4)):
            spec.prompt.chat.messages.add(role="user", content="é" * draw.randrange(200))
    else:
        spec.prompt.token_ids.ids.extend(range(draw.randrange(300)))
    spec.sampling.temperature = draw.random()
    spec.sampling.seed = draw.getrandbits(64)
    for token_id in range(draw.randrange(4)):
        spec.sampling.logit_bias[token_id] = 1
    spec.stopping.stop_strings.extend(["x"] * draw.randrange(3))
    spec.stopping.time_limit.seconds = draw.randrange(3)
    return spec


def test_fields_are_counted_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "UNCOUNTED_BYTES", 0)
    draw = random.Random(0)
    for _ in range(50):
        request = BatchGenerateRequest()
        for _ in range(draw.randrange(1, 4)):
            request.requests.add(request_id="name").spec.CopyFrom(a_spec(draw))
        raw, count = request.SerializeToString(), num_fields(request)
        monkeypatch.setattr(status, "MAX_FIELDS", count)
        assert not refused(raw, BatchGenerateRequest)
        monkeypatch.setattr(status, "MAX_FIELDS", count - 1)
        assert refused(raw, BatchGenerateRequest)


@pytest.mark.parametrize("unit", [b"\x0a\x00", b"\x78\x05", b"\x7b\x7c", b"\x79" + bytes(8), b"\x7d" + bytes(4)], ids=repr)
def test_fields_of_every_kind_count(unit: bytes) -> None:
    """An empty message, and unknown fields of all types."""
    few = unit * (UNCOUNTED_BYTES // len(unit))
    assert not refused(few, BatchGenerateRequest)
    many = unit * max(MAX_FIELDS + 1, UNCOUNTED_BYTES // len(unit) + 1)
    assert refused(many, BatchGenerateRequest)


def test_large_texts_and_packed_lists_are_few_fields() -> None:
    request = StreamGenerateRequest()
    request.spec.prompt.token_ids.ids.extend([7] * (2 << 20))
    request.spec.stopping.stop_strings.append("a" * (8 << 20))
    assert not refused(request.SerializeToString())
    request.spec.sampling.allowed_token_ids.extend([7] * (2 << 20))
    assert refused(request.SerializeToString()), "the bytes of all lists count"
    assert refused(field(1, field(3, unpacked(14, 7) * (MAX_FIELDS * 3))))


def test_what_is_no_message_is_left_to_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "UNCOUNTED_BYTES", 0)
    for raw in (b"\x80" * 100, b"\x0a\x05", b"\x0a", b"\x08", b"\x79\x00", b"\x0a\xff\xff\xff\xff\x0f", b"\x0e"):
        assert not refused(raw)
        with pytest.raises(DecodeError):
            StreamGenerateRequest.FromString(raw)
    draw = random.Random(0)
    for _ in range(500):
        refused(draw.randbytes(draw.randrange(40)))


@pytest.mark.anyio
async def test_a_call_is_refused_before_its_message_is_decoded(engine: FakeEngine) -> None:
    chat = field(1, field(2, field(3, b"\x0a\x00" * (UNCOUNTED_BYTES // 2))))
    session = field(2, field(2, chat))  # a submission
    assert len(SessionRequest.FromString(session).submit.request.spec.prompt.chat.messages) == UNCOUNTED_BYTES // 2
    async with serving(engine) as serve:
        for method, raw in (("StreamGenerate", chat), ("Session", session)):
            path = f"/aengine.v1.GenerationService/{method}"
            with pytest.raises(aio.AioRpcError) as caught:
                await serve.channel.stream_stream(path)(iter((raw,))).read()
            failure = failure_of(caught.value)
            assert (failure.code, failure.reason, failure.fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", ["request"])
    assert engine.submitted.empty()
