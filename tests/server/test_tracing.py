"""`traceparent`, as W3C Trace Context has it."""

from __future__ import annotations

import pytest

from aengine.server.core.calls_in_flight import trace_id_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize("flags", ["00", "01", "ff", "02"])
def test_version_00(flags: str) -> None:
    assert trace_id_of([f"00-{TRACE}-{PARENT}-{flags}"]) == TRACE


@pytest.mark.parametrize("rest", ["", "-", "-what-comes-later"])
def test_later_versions_may_have_more(rest: str) -> None:
    assert trace_id_of([f"cc-{TRACE}-{PARENT}-01{rest}"]) == TRACE


@pytest.mark.parametrize(
    "value",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"00-{TRACE}-{PARENT}-01-",
        f"cc-{TRACE}-{PARENT}-01.more",
        f"00-{TRACE}-{PARENT}",
        f"0-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT.upper()}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}g-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE}-{PARENT}-0x",
        f" 00-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\n",
        f"00_{TRACE}_{PARENT}_01",
        f"00-{TRACE[:-1]}\u0661-{PARENT}-01",
    ],
)
def test_what_is_not_valid_counts_as_absent(value: str) -> None:
    assert trace_id_of([value]) is None
