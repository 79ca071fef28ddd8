from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aengine.parallel import messages
from aengine.parallel.channel import Channel, ChannelClosedError, ChannelTimeoutError
from aengine.parallel.messages import FRAME, Hello, LastTokens, Log, Message, MessageError, Plan, check_header, decode, encode
from aengine.scheduler.plan import NewRow, RowParams, StepPlan

INTS = st.binary(max_size=160).map(lambda data: np.frombuffer(data[: len(data) // 4 * 4], np.int32))
BYTES = st.binary(max_size=80).map(lambda data: np.frombuffer(data, np.uint8))
VALUES = {"int": st.integers(-(2**63), 2**63 - 1), "bool": st.booleans(), "str": st.text(), "IntArray": INTS, "ByteArray": BYTES}
MESSAGES = st.one_of(
    [st.builds(kind, **{field.name: VALUES[str(field.type)] for field in dataclasses.fields(kind)}) for kind in messages._KINDS]
)


def same(one: Any, other: Any) -> bool:
    """Whether two dataclasses have equal fields."""
    assert type(one) is type(other)
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        and type(getattr(one, field.name)) is type(getattr(other, field.name))
        for field in dataclasses.fields(one)
    )


def decoded(frame: bytes) -> Message:
    size, kind = check_header(frame[: FRAME.size])
    assert len(frame) == FRAME.size + size
    return decode(kind, bytearray(frame[FRAME.size :]))


@given(MESSAGES)
def test_messages_are_decoded_as_they_were(message: Message) -> None:
    assert same(decoded(encode(message)), message)


@given(st.builds(StepPlan, step=st.integers(0, 1 << 40), rows=INTS, num_decodes=st.integers(0, 9), starts=INTS, lengths=INTS,
                 num_sampled=INTS, token_ids=INTS, new_rows=st.just(()), page_groups=INTS, page_rows=INTS, page_cols=INTS, page_ids=INTS,
                 copy_from=INTS, copy_to=INTS, scores_prompts=st.booleans()))  # fmt: skip
def test_a_plan_arrives_without_what_is_for_rank_0_alone(plan: StepPlan) -> None:
    sent = dataclasses.replace(plan, new_rows=(NewRow(0, RowParams(0.0, 0, 1.0, 0.0, 0)),), wants_forced=True)
    message = decoded(encode(Plan.of(sent)))
    assert isinstance(message, Plan)
    arrived = message.step_plan()
    assert same(arrived, plan)
    assert arrived.rows.flags.writeable
    assert arrived.rows.flags.aligned


@given(st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_bytes_that_are_no_message_are_refused(kind: int, data: bytes) -> None:
    header = FRAME.pack(len(data), kind % (len(messages._KINDS) + 1))
    try:
        message = decode(check_header(header)[1], bytearray(data))
    except MessageError:
        return
    assert same(decoded(encode(message)), message)


@given(MESSAGES, st.data())
def test_messages_with_changed_bytes_are_other_messages_or_refused(message: Message, data: st.DataObject) -> None:
    frame = bytearray(encode(message))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        _, kind = check_header(frame[: FRAME.size])
        decode(kind, frame[FRAME.size :])
    except MessageError:
        pass


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_MESSAGE", 1 << 10)
    with pytest.raises(MessageError, match="a LastTokens of 4008 bytes is longer than a message may be: 1024 bytes"):
        encode(LastTokens(np.zeros(1000, np.int32)))
    with pytest.raises(MessageError, match="a message of 1025 bytes is longer than 1024 bytes"):
        check_header(FRAME.pack(1025, 1))


def channels() -> tuple[Channel, Channel]:
    one, other = socket.socketpair()
    return Channel(one, "one"), Channel(other, "the other")


def test_a_message_larger_than_all_buffers_arrives() -> None:
    one, other = channels()
    tokens = np.arange(1 << 20, dtype=np.int32)
    thread = threading.Thread(target=one.send, args=(LastTokens(tokens),))
    thread.start()
    message = other.receive()
    thread.join()
    assert isinstance(message, LastTokens)
    assert np.array_equal(message.tokens, tokens)


def test_a_peer_that_does_not_answer_or_read() -> None:
    one, _other = channels()
    with pytest.raises(ChannelTimeoutError, match="one does not answer"):
        one.receive(0.01)
    with pytest.raises(ChannelTimeoutError, match="one does not answer"):
        one.send(LastTokens(np.zeros(1 << 20, np.int32)), 0.01)


def test_a_peer_that_is_gone() -> None:
    one, other = channels()
    other.send(Log(20, "the end"))
    other.close()
    assert one.receive() == Log(20, "the end")
    with pytest.raises(ChannelClosedError, match="one closed the connection"):
        one.receive()
    with pytest.raises(ChannelClosedError, match="one is gone: Broken pipe"):
        one.send(Log(20, "more"))


@pytest.mark.parametrize("data", [b"\xff" * 8, FRAME.pack(8, 5) + b"\xff" * 8, b"GET / HTTP/1.1\r\n\r\n", encode(Hello(1, "", "", 1))[:-3]])
def test_a_peer_that_sends_no_message(data: bytes) -> None:
    near, far = socket.socketpair()
    channel = Channel(near, "the peer")
    far.sendall(data)
    far.close()
    with pytest.raises(ChannelClosedError, match=r"the peer (sent what is no message: .+|closed the connection)"):
        channel.receive()


def test_closing_ends_the_waiting() -> None:
    one, _other = channels()
    closing = threading.Timer(0.05, one.close)
    closing.start()
    with pytest.raises(ChannelClosedError):
        one.receive()
    closing.join()
