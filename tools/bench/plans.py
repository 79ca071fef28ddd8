"""What the plan of a step costs on its way from the driver to a rank: encode, send, receive, decode.

    python -m tools.bench.plans

Prints microseconds, medians. The round trip is to another process and back, with the wake-ups of both; a step waits for half of it.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from aengine.parallel.channel import Channel, ChannelClosedError
from aengine.parallel.messages import FRAME, Plan, decode, encode
from aengine.scheduler.plan import NO_INTS, StepPlan

TIMES = 2000


def decode_plan(num_rows: int) -> StepPlan:
    """Of a step that decodes, in which each 16th row gets a page."""
    rows = np.arange(num_rows, dtype=np.int32)
    ones = np.ones(num_rows, np.int32)
    pages = rows[::16]
    return StepPlan(7, rows, num_rows, ones * 100, ones, ones, NO_INTS, (), pages * 0, pages, pages, pages)


def microseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(TIMES):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def receive_plan(channel: Channel) -> StepPlan:
    message = channel.receive()
    assert isinstance(message, Plan)
    return message.step_plan()


def answer(stream: socket.socket) -> None:
    """Sends every plan back."""
    channel = Channel(stream, "the asking process")
    try:
        while True:
            channel.send(Plan.of(receive_plan(channel)))
    except ChannelClosedError:
        os._exit(0)


def measure(num_rows: int) -> tuple[float, ...]:
    """Bytes of the message, and microseconds of: encode, decode, all on one thread, to another process and back."""
    plan = decode_plan(num_rows)
    frame = encode(Plan.of(plan))
    kind, data = FRAME.unpack_from(frame)[1], bytearray(frame[FRAME.size :])
    streams = socket.socketpair()
    one, other = (Channel(stream, "this process") for stream in streams)

    def there() -> StepPlan:
        one.send(Plan.of(plan))
        return receive_plan(other)

    def encode_plan() -> bytes:
        return encode(Plan.of(plan))

    times = [microseconds(encode_plan), microseconds(lambda: decode(kind, data)), microseconds(there)]
    near, far = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        near.close()
        answer(far)
    far.close()
    channel = Channel(near, "the other process")

    def there_and_back() -> StepPlan:
        channel.send(Plan.of(plan))
        return receive_plan(channel)

    times.append(microseconds(there_and_back))
    channel.close()
    os.waitpid(pid, 0)
    return len(frame), *times


def main() -> None:
    print(f"{'rows':>5} {'bytes':>7} {'encode':>8} {'decode':>8} {'one thread':>11} {'round trip':>11}")
    for num_rows in (1, 8, 64, 256):
        size, *times = measure(num_rows)
        print(f"{num_rows:>5} {size:>7} {times[0]:>8.1f} {times[1]:>8.1f} {times[2]:>11.1f} {times[3]:>11.1f}")


if __name__ == "__main__":
    main()
