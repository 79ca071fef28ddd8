"""JSON bodies within bounds."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hostile_http import any_json, spoiled

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks, integer
from aengine.server.http import bodies
from aengine.server.http.bodies import MAX_CONTAINERS, MAX_DIGITS, MAX_NAMES, MAX_STRINGS, MAX_UNKNOWN, MAX_VALUES, STRING, Fields, parse

REFUSED = {
    "nothing": (b"", "not JSON"),
    "a list": (b"[1]", "not a JSON object"),
    "a name twice": (b'{"a":1,"a":2}', "'a' twice"),
    "NaN": (b'{"a":NaN}', "NaN is no JSON"),
    "a huge integer": (b'{"a":' + b"9" * (MAX_DIGITS + 1) + b"}", "an integer has more than"),
    "latin-1": (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
    "utf-16": ('{"a":1}'.encode("utf-16"), "not UTF-8"),
    "half a character": (b'{"a":"\\ud800"}', "half a surrogate pair"),
    "depth": (b'{"a":' + b"[" * 15000, "too deep"),
    "values": (b'{"a":[' + b"0," * (MAX_VALUES + 1) + b"0]}", "commas"),
    "strings": (b'{"a":[' + b'"",' * (MAX_STRINGS + 1) + b'""]}', "strings"),
    "names": (b'{"a":{' + b'"":0,' * (MAX_NAMES + 1) + b'"":0}}', "colons"),
    "containers behind a string": (b'{"a":"\\\\\\"","b":[' + b"{}," * MAX_CONTAINERS + b"0]}", "opening brackets"),
    "containers": (b'{"a":[' + b"{}," * MAX_CONTAINERS + b"0]}", "opening brackets"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_body(name: str) -> None:
    raw, words = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse(raw)
    assert caught.value.field == "body"


def test_what_is_in_strings_is_not_counted() -> None:
    text = '[{"a": "\\\\", 1:[]},' * MAX_VALUES
    assert parse(json.dumps({"a": text, "b": "9" * 5000}).encode()) == {"a": text, "b": "9" * 5000}


def test_fields_are_taken_once_and_the_rest_is_unknown() -> None:
    check = FieldChecks()
    fields = Fields(
        parse(json.dumps({"a": 1, "b": None, "c": "x", "d": {"e": 2}, "f": [{"g": 1}, 5], "temprature": 0}).encode()), "", check
    )
    taken = fields.take_field("a", integer(0)), fields.take_field("b", STRING, "none"), fields.take_field("c", integer(0), 7)
    assert taken == (1, "none", 7)
    inner = fields.sub("d")
    assert inner is not None
    inner.take_field("e", STRING)
    assert [one.take_field("g", integer(0)) for one in fields.objects("f")] == [1]
    fields.need("h", STRING)
    fields.refuse_rest(("temperature",))
    found = {violation.field: violation.description for violation in check.violations}
    assert list(found) == ["c", "d.e", "f[1]", "h", "temprature"]
    assert "did you mean temperature?" in found["temprature"]


def test_few_unknown_fields_are_looked_at() -> None:
    check = FieldChecks()
    Fields({"x" * 100_000: 1, **{f"name{index}": 1 for index in range(100_000)}}, "", check).refuse_rest(["name"])
    assert len(check.violations) == MAX_UNKNOWN
    assert all(len(violation.field) < 500 for violation in check.violations)


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return rng.choice([0, -1, 12345678901234567890, 1.5, -2e-7, True, False, None])
    if kind < 6:
        return "".join(rng.choices(['"', "\\", "\n", "u", "d", "8", "a", "é", "\U0001f600", "\x7f", ",", "]"], k=rng.randrange(60)))
    if kind == 6:
        return [random_value(rng, depth + 1) for _ in range(rng.randrange(12))]
    return {f"{index}{random_value(rng, 3)}": random_value(rng, depth + 1) for index in range(rng.randrange(4))}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body is large, and has many pieces."""
    monkeypatch.setattr(bodies, "UNCOUNTED_BYTES", -1)
    monkeypatch.setattr(bodies, "PIECE_BYTES", 7)
    monkeypatch.setattr(bodies, "PIECE", 17)
    monkeypatch.setattr(bodies, "DECODED_AT_ONCE", 5)


@pytest.mark.usefixtures("small_pieces")
def test_a_body_in_pieces_is_what_it_is_as_a_whole() -> None:
    rng = random.Random(5)
    for _ in range(120):
        value = {"a": random_value(rng), "b": [random_value(rng) for _ in range(9)]}
        raw = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1])).encode()
        assert parse(raw) == value
    for _ in range(120):
        raw = spoiled(rng, json.dumps(any_json(rng)[1], ensure_ascii=rng.random() < 0.5).encode())
        outcomes = []
        for most in (len(raw), -1):
            bodies.UNCOUNTED_BYTES = most
            try:
                outcomes.append(repr(parse(raw)))
            except InvalidRequestError:
                outcomes.append("refused")
        assert outcomes[0] == outcomes[1], raw


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_body_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PIECE_BYTES", 1 << 14)
    raw, words = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=words) as caught:
        parse(raw)
    assert caught.value.field == "body"
