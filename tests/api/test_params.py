"""Every field of the request parameters: what is accepted, what it becomes, what is refused and how. Runs in a second."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pickle
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import shown
from aengine.api.params import Reasoning, SamplingParams, StructuredOutput

HUGE = 10**400  # an integer that no float holds
TINY = math.ulp(0.0)
INT32 = 2**31 - 1
JSON = StructuredOutput(json_object=True)

NUMBERS: dict[str, tuple[type, float, float, bool]] = {  # kind, lowest, highest, whether the lowest is outside
    "temperature": (float, 0.0, 100.0, False),
    "top_p": (float, 0.0, 1.0, True),
    "top_k": (int, 0, INT32, False),
    "min_p": (float, 0.0, 1.0, False),
    "seed": (int, 0, 2**64 - 1, False),
    "n": (int, 1, 128, False),
    "presence_penalty": (float, -2.0, 2.0, False),
    "frequency_penalty": (float, -2.0, 2.0, False),
    "repetition_penalty": (float, 0.0, 2.0, True),
    "max_tokens": (int, 1, INT32, False),
    "min_tokens": (int, 0, INT32, False),
    "logprobs": (int, 0, INT32, False),
    "prompt_logprobs": (int, 0, INT32, False),
    "prompt_logprobs_from": (int, 0, INT32, False),
    "max_drafts": (int, 0, 16, False),
}
FLAGS = {"clamp_max_tokens": False, "ignore_eos": False, "include_stop_str_in_output": False, "skip_special_tokens": True}
OPTIONAL_FLAGS = ("detokenize",)
ID_LISTS = {"stop_token_ids": 128, "banned_token_ids": 1024, "allowed_token_ids": 2**18}
STRING_LISTS = {"stop": 16, "bad_words": 64, "draft_context": 16}
OTHERS = {"logit_bias", "structured_output", "reasoning", "logits_processors", "stop_on_repetition"}


def refused(build: type, /, **given: Any) -> dict[str, str]:
    """The fields that are refused, with what is said of them."""
    with pytest.raises(InvalidRequestError) as caught:
        build(**given)
    violations = caught.value.violations
    assert len({violation.field for violation in violations}) == len(violations), "one violation per field"
    assert all(violation.description for violation in violations)
    return {violation.field: violation.description for violation in violations}


def accepted(name: str, value: Any) -> Any:
    """What the field becomes."""
    return getattr(SamplingParams(**{name: value}), name)


def test_every_field_is_tested_here() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names == {*NUMBERS, *FLAGS, *OPTIONAL_FLAGS, *ID_LISTS, *STRING_LISTS, *OTHERS}


def test_unset() -> None:
    params = SamplingParams()
    values = {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    assert {name: value for name, value in values.items() if value not in (None, ())} == {
        **FLAGS,
        "n": 1,
        "min_tokens": 0,
        "prompt_logprobs_from": 0,
        "logit_bias": {},
    }
    assert params == SamplingParams()


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_within_its_bounds(name: str) -> None:
    _, low, high, open_low = NUMBERS[name]
    lowest = low if not open_low else TINY
    for value in (lowest, high):
        assert accepted(name, value) == value
    if name not in ("n", "min_tokens", "prompt_logprobs_from"):
        assert accepted(name, None) is None


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_of_another_type_becomes_a_plain_one(name: str) -> None:
    kind, *_ = NUMBERS[name]
    given = [1, np.int64(1), np.int32(1), np.uint8(1)] + ([1.0, np.float32(1), np.float64(1)] if kind is float else [])
    for value in given:
        assert accepted(name, value) == 1
        assert type(accepted(name, value)) is kind


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_just_outside(name: str) -> None:
    kind, low, high, open_low = NUMBERS[name]
    below: float = low if open_low else low - 1 if kind is int else math.nextafter(low, -math.inf)
    below = -2 if name == "top_k" else below  # -1 is off
    above: float = high + 1 if kind is int else math.nextafter(high, math.inf)
    bracket = "(" if open_low else "["
    for value in (below, above):
        said = refused(SamplingParams, **{name: value})
        assert list(said) == [name]
        assert said[name].startswith(f"{kind(value)!r} is not in {bracket}{low:g}, "), "the value and the range"


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number(name: str) -> None:
    kind, *_ = NUMBERS[name]
    values: list[Any] = ["1", b"1", bytearray(b"1"), True, np.True_, [1], {}, 1j, math.nan, math.inf, -math.inf, HUGE, -HUGE]
    values += [1.0, 0.5, np.float32(1)] if kind is int else []
    values += [None] if name in ("n", "min_tokens", "prompt_logprobs_from") else []
    for value in values:
        assert list(refused(SamplingParams, **{name: value})) == [name], value


@pytest.mark.parametrize("name", FLAGS)
def test_flags(name: str) -> None:
    assert getattr(SamplingParams(), name) is FLAGS[name]
    assert accepted(name, True) is True
    assert accepted(name, False) is False
    for value in (None, 0, 1, "true", "", np.True_):
        assert refused(SamplingParams, **{name: value}) == {name: f"{value!r} is not true or false"}


@pytest.mark.parametrize("name", OPTIONAL_FLAGS)
def test_flags_that_can_be_left_open(name: str) -> None:
    assert getattr(SamplingParams(), name) is None
    for given in (True, False, None):
        assert accepted(name, given) is given
    for value in (0, 1, "true", "", np.True_):
        assert refused(SamplingParams, **{name: value}) == {name: f"{value!r} is not true or false"}


@pytest.mark.parametrize("name", ID_LISTS)
def test_token_ids(name: str) -> None:
    most = ID_LISTS[name]
    assert accepted(name, [3, 1, 3, 2, 1]) == (3, 1, 2), "a tuple, each once, in order"
    assert accepted(name, [0, INT32]) == (0, INT32)
    for value in (np.array([5, 4]), (np.int64(5), np.uint16(4)), iter([5, 4]), range(5, 3, -1)):
        ids = accepted(name, value)
        assert ids == (5, 4)
        assert all(type(token_id) is int for token_id in ids)
    assert accepted(name, range(most)) == tuple(range(most))
    for value in (range(most + 1), [1] * (most + 1), iter([1] * (most + 1))):
        assert refused(SamplingParams, **{name: value}) == {name: f"{most + 1} entries are more than {most}"}, "counted with repetitions"
    for token_id in (-1, INT32 + 1, HUGE):
        assert refused(SamplingParams, **{name: [1, token_id]})[name] == f"{shown(token_id)} is not a token id"
    wrong: list[Any] = ["12", b"12", bytearray(b"12"), 7, ["1"], [1.0], [True], [None], [[1]], {1: 2.0}, np.array([[1]]), np.array([1.0])]
    for value in wrong:
        assert list(refused(SamplingParams, **{name: value})) == [name], value


@pytest.mark.parametrize(("name", "empty"), [("stop_token_ids", ()), ("banned_token_ids", ()), ("allowed_token_ids", None)])
def test_no_token_ids(name: str, empty: object) -> None:
    assert getattr(SamplingParams(), name) == empty
    if name == "allowed_token_ids":
        assert accepted(name, None) is None
        assert refused(SamplingParams, allowed_token_ids=()) == {name: "must not be empty"}
    else:
        assert accepted(name, []) == ()
        assert accepted(name, None) == ()


@pytest.mark.parametrize("name", STRING_LISTS)
def test_strings(name: str) -> None:
    most = STRING_LISTS[name]
    assert getattr(SamplingParams(), name) == ()
    assert accepted(name, "ab") == ("ab",), "a single string"
    assert accepted(name, ["b", "a", "b"]) == ("b", "a"), "a tuple, each once, in order"
    assert accepted(name, ()) == ()
    size = 1 << 16 if name == "draft_context" else 256
    longest = ["x" * size, "漢" * (size // 3) + "x", "😀" * (size // 4), "\n", " "]
    assert accepted(name, longest) == tuple(longest)
    many = [str(number) for number in range(most)]
    assert accepted(name, many) == tuple(many)
    assert refused(SamplingParams, **{name: [*many, "x"]}) == {name: f"{most + 1} entries are more than {most}"}
    assert accepted(name, None) == ()
    for value in ("", [""], ["a", ""], "x" * (size + 1), ["漢" * (size // 3) + "xy"]):
        assert refused(SamplingParams, **{name: value}) == {name: f"each string must have 1 to {size} bytes"}
    for value in (5, b"ab", [b"ab"], ["a", None], {"a"}, {"a": 1}):
        assert "is not a list of strings" in refused(SamplingParams, **{name: value})[name], value


def test_logit_bias() -> None:
    assert SamplingParams().logit_bias == {}
    assert accepted("logit_bias", {0: -100, INT32: 100.0}) == {0: -100.0, INT32: 100.0}
    biases = accepted("logit_bias", types.MappingProxyType({np.int64(3): np.float32(0.5)}))
    assert biases == {3: 0.5}
    assert [(type(key), type(bias)) for key, bias in biases.items()] == [(int, float)]
    given = {1: 1.0}
    params = SamplingParams(logit_bias=given)
    given[2] = 2.0
    assert params.logit_bias == {1: 1.0}, "a copy"
    assert len(accepted("logit_bias", dict.fromkeys(range(1024), 0.0))) == 1024
    assert refused(SamplingParams, logit_bias=dict.fromkeys(range(1025), 0.0)) == {"logit_bias": "1025 entries are more than 1024"}
    outside = [{-1: 0.0}, {INT32 + 1: 0.0}, {1: math.nextafter(100, 101)}, {1: math.nextafter(-100, -101)}, {1: math.nan}, {1: -math.inf}]
    for value in outside:
        assert "is not a token id and a number in [-100, 100]" in refused(SamplingParams, logit_bias=value)["logit_bias"]
    assert accepted("logit_bias", None) == {}
    for value in ([(1, 1.0)], {"1": 1.0}, {1.0: 1.0}, {True: 1.0}, {1: "1"}, {1: b"1"}, {1: None}, {1: True}, {1: HUGE}, 5):
        assert "is not a mapping from token ids to numbers" in refused(SamplingParams, logit_bias=value)["logit_bias"], value


def test_logits_processors() -> None:
    def process(logits: object, token_ids: list[int]) -> None: ...

    assert SamplingParams().logits_processors == ()
    assert accepted("logits_processors", [process, process]) == (process, process)
    assert accepted("logits_processors", None) == ()
    for value in (process, 5, [process, None], "ab", {process}):
        assert "is not a list of callables" in refused(SamplingParams, logits_processors=value)["logits_processors"]


def test_structured_output_is_one() -> None:
    assert SamplingParams().structured_output is None
    assert accepted("structured_output", JSON) is JSON
    for value in ({"json_object": True}, "json", True):
        assert refused(SamplingParams, structured_output=value) == {
            "structured_output": f"a {type(value).__name__} is not StructuredOutput"
        }


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"stop": "a", "detokenize": False}, "stop"),
        ({"structured_output": JSON, "ignore_eos": True}, "ignore_eos"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 2, "temperature": 0.99e-5}, "n"),
        ({"allowed_token_ids": [1, 2], "banned_token_ids": [3, 2]}, "banned_token_ids"),
    ],
    ids=str,
)
def test_fields_that_do_not_go_together(given: dict[str, Any], field: str) -> None:
    assert list(refused(SamplingParams, **given)) == [field]
    for name in given:
        SamplingParams(**{other: value for other, value in given.items() if other != name})


@pytest.mark.parametrize(
    "given",
    [
        {"min_tokens": 5, "max_tokens": 5},
        {"min_tokens": 5},
        {"detokenize": False, "bad_words": "a", "stop_token_ids": [1]},
        {"n": 2, "temperature": 1e-5},
        {"n": 2},
        {"n": 1, "temperature": 0},
        {"structured_output": JSON, "stop_token_ids": [1]},
        {"allowed_token_ids": [1], "banned_token_ids": [2]},
    ],
    ids=str,
)
def test_fields_that_do(given: dict[str, Any]) -> None:
    SamplingParams(**given)


def test_all_violations_are_named_at_once() -> None:
    given: dict[str, Any] = {
        **{name: high + 1 for name, (_, _, high, _) in NUMBERS.items()},
        **dict.fromkeys((*FLAGS, *OPTIONAL_FLAGS), 5),
        **dict.fromkeys(ID_LISTS, (-1,)),
        **dict.fromkeys(STRING_LISTS, ""),
        **dict.fromkeys(OTHERS, 5),
    }
    assert set(refused(SamplingParams, **given)) == {field.name for field in dataclasses.fields(SamplingParams)}
    together = {"min_tokens": 2, "max_tokens": 1, "n": 2, "temperature": 0, "stop": "a", "detokenize": False, "allowed_token_ids": ()}
    assert set(refused(SamplingParams, **together)) == {"min_tokens", "n", "stop", "allowed_token_ids"}
    with pytest.raises(InvalidRequestError, match=r"^temperature: 101\.0 is not in \[0, 100\]; top_p: 2\.0 is not in \(0, 1\]$") as caught:
        SamplingParams(top_p=2, temperature=101)
    assert caught.value.field == "temperature"
    assert isinstance(caught.value, ValueError)


def test_greedy() -> None:
    assert not SamplingParams().greedy, "not known before the defaults"
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=0.99e-5).greedy
    assert not SamplingParams(temperature=1e-5).greedy


DEFAULTED = {
    "temperature": (1.0, 0.25, 0.5),  # the engine's default, the model's, the request's
    "top_p": (1.0, 0.25, 0.5),
    "top_k": (0, 3, 5),
    "min_p": (0.0, 0.25, 0.5),
    "presence_penalty": (0.0, 0.25, 0.5),
    "frequency_penalty": (0.0, 0.25, 0.5),
    "repetition_penalty": (1.0, 0.25, 0.5),
    "detokenize": (True, False, True),
}


def test_defaults_of_the_model_and_the_engine() -> None:
    engine, model, own = ({name: values[i] for name, values in DEFAULTED.items()} for i in range(3))
    assert SamplingParams().with_defaults_of(SamplingParams()) == SamplingParams(**engine)
    assert SamplingParams().with_defaults_of(SamplingParams(**model)) == SamplingParams(**model)
    assert SamplingParams(**own).with_defaults_of(SamplingParams(**model)) == SamplingParams(**own)
    for name in DEFAULTED:
        mixed = SamplingParams(**{name: own[name]}).with_defaults_of(SamplingParams(**model))
        assert mixed == SamplingParams(**{**model, name: own[name]})


def test_zero_is_not_unset() -> None:
    zeros: dict[str, Any] = {name: 0 for name in DEFAULTED if name not in ("top_p", "repetition_penalty", "detokenize")}
    model = SamplingParams(**{name: values[1] for name, values in DEFAULTED.items()})
    filled = SamplingParams(**zeros).with_defaults_of(model)
    assert all(getattr(filled, name) == 0 for name in zeros)
    assert filled.greedy
    assert SamplingParams().with_defaults_of(SamplingParams(**zeros)).greedy


def test_defaults_leave_everything_else() -> None:
    others: dict[str, Any] = {
        "seed": 5,
        "n": 2,
        "logit_bias": {1: 1.0},
        "allowed_token_ids": (1, 2),
        "banned_token_ids": (3,),
        "bad_words": ("b",),
        "draft_context": ("c",),
        "max_tokens": 7,
        "min_tokens": 2,
        "stop": ("s",),
        "stop_token_ids": (4,),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 1,
        "prompt_logprobs": 2,
        "max_drafts": 2,
        "logits_processors": (print,),
    }
    filled = SamplingParams(**others).with_defaults_of(SamplingParams(seed=9, max_tokens=3, logprobs=8, stop=("t",)))
    assert {name: getattr(filled, name) for name in others} == others
    bare = SamplingParams().with_defaults_of(SamplingParams(seed=9, max_tokens=3, logprobs=8, stop=("t",)))
    assert (bare.seed, bare.max_tokens, bare.logprobs, bare.stop) == (None, None, None, ())


def test_several_sequences_are_refused_where_the_model_decodes_greedily() -> None:
    params = SamplingParams(n=2)
    with pytest.raises(InvalidRequestError, match="n: 2 greedy sequences would be the same"):
        params.with_defaults_of(SamplingParams(temperature=0))
    assert SamplingParams(n=2, temperature=1).with_defaults_of(SamplingParams(temperature=0)).n == 2


def test_parameters_are_frozen_and_travel() -> None:
    params = SamplingParams(stop="a", logit_bias={1: 2.0}, structured_output=StructuredOutput(choice=("a", "b")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(0.5)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(unknown=1)  # type: ignore[call-arg]
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params) == params


# --- Reasoning


def test_reasoning() -> None:
    assert Reasoning(closing="</think>", opened=True) == Reasoning(opening="", closing="</think>", opened=True, max_tokens=None)
    assert Reasoning(opening=" <think>\n", closing="\n</think>\n", max_tokens=0).max_tokens == 0
    for given, names in (
        ({"closing": "", "opened": True}, ["closing"]),
        ({"closing": " \n", "opening": "x"}, ["closing"]),
        ({"closing": "x", "opening": "\n"}, ["opening"]),
        ({"closing": 5, "opening": "é" * 129, "max_tokens": -1}, ["opening", "closing", "max_tokens"]),
        ({"closing": "\ud800", "opened": True}, ["closing"]),
        ({"closing": "x", "opened": 2}, ["opened"]),
    ):
        assert list(refused(Reasoning, **given)) == [f"reasoning.{name}" for name in names], given  # type: ignore[arg-type]


# --- StructuredOutput

KINDS: dict[str, Any] = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "a+",
    "choice": ("a", "b"),
    "grammar": 'root ::= "a"',
}


def test_each_kind_of_structured_output() -> None:
    flags = {"strict_formats", "exact_one_of"}
    assert {field.name for field in dataclasses.fields(StructuredOutput)} == set(KINDS) | flags
    for flag in flags:
        assert refused(StructuredOutput, regex="a", **{flag: True}) == {f"structured_output.{flag}": "is for a json_schema only"}
    for kind, value in KINDS.items():
        output = StructuredOutput(**{kind: value})
        assert {name: getattr(output, name) for name in KINDS if name != kind} == {
            name: False if name == "json_object" else () if name == "choice" else None for name in KINDS if name != kind
        }
        assert getattr(output, kind) == value


def test_exactly_one_kind() -> None:
    for given in ({}, {"json_object": False}, {"choice": ()}, {"choice": []}, {"regex": None}):
        said = refused(StructuredOutput, **given)
        assert list(said) == ["structured_output"]
        assert said["structured_output"].endswith("must be set, not none")
    for first in KINDS:
        for second in KINDS:
            if first != second:
                said = refused(StructuredOutput, **{first: KINDS[first], second: KINDS[second]})["structured_output"]
                assert first in said.split("not")[1]
                assert second in said.split("not")[1]
    assert StructuredOutput(regex="a", choice=[]).choice == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["json_schema", "regex", "grammar"])
def test_text_of_structured_output(kind: str) -> None:
    most = {"json_schema": 2**20, "regex": 2**13, "grammar": 2**15}[kind]
    assert getattr(StructuredOutput(**{kind: "x" * most}), kind) == "x" * most
    for value in ("", "x" * (most + 1), "漢" * (most // 3 + 1), "\ud800", b"x", 5, True, ["x"]):
        assert refused(StructuredOutput, **{kind: value}) == {
            f"structured_output.{kind}": f"must be a string of 1 to {most} bytes of UTF-8"
        }


def test_a_schema_as_a_mapping() -> None:
    schema = {"type": "object", "properties": {"ключ": {"type": "string"}}, "required": ["ключ"]}
    for given in (schema, types.MappingProxyType(schema)):
        text = StructuredOutput(json_schema=given).json_schema
        assert isinstance(text, str)
        assert json.loads(text) == schema
    assert StructuredOutput(json_schema={}).json_schema == "{}", "any JSON"
    circular: dict[str, Any] = {}
    circular["items"] = circular
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    for value in ({"a": {1}}, {"a": math.nan}, circular, deep):
        assert refused(StructuredOutput, json_schema=value)["structured_output.json_schema"].startswith("is not JSON: ")


def test_json_object_is_a_flag() -> None:
    for value in (1, 0, None, "true"):
        assert refused(StructuredOutput, json_object=value) == {"structured_output.json_object": f"{value!r} is not true or false"}


def test_choice() -> None:
    assert StructuredOutput(choice=["a", "b"]).choice == ("a", "b")  # type: ignore[arg-type]
    most = tuple(str(number) for number in range(4096))
    assert StructuredOutput(choice=most).choice == most
    assert refused(StructuredOutput, choice=(*most, "x")) == {"structured_output.choice": "4097 choices are more than 4096"}
    for value in ("ab", ("a", ""), ("a", 5), (b"a",), {"a"}, 5, ("\ud800",)):
        assert "must be strings of at least 1 byte" in refused(StructuredOutput, choice=value)["structured_output.choice"], value
    large = ("x" * 2**17, "é" * 2**16)
    assert StructuredOutput(choice=large).choice == large
    said = refused(StructuredOutput, choice=(*large, "y"))
    assert said == {"structured_output.choice": "262145 bytes of UTF-8 together are more than 262144"}
    assert "are more than" in refused(StructuredOutput, choice=["x"] * 10**6)["structured_output.choice"]


def test_none_and_what_is_off_elsewhere() -> None:
    names = (
        "stop",
        "stop_token_ids",
        "bad_words",
        "draft_context",
        "banned_token_ids",
        "logit_bias",
        "logits_processors",
        "structured_output",
        "max_tokens",
    )
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)


def _unreadable(self: object) -> Any:
    raise AssertionError("counting must do")


class UnreadableList(list):  # type: ignore[type-arg]
    __len__ = lambda self: 10**9  # noqa: E731
    __iter__ = _unreadable


class UnreadableMapping(Mapping):  # type: ignore[type-arg]
    __len__ = UnreadableList.__len__
    __iter__ = __getitem__ = _unreadable  # type: ignore[assignment]


@pytest.mark.parametrize("name", [*ID_LISTS, *STRING_LISTS, "logit_bias"])
def test_a_list_that_holds_too_much_is_not_read(name: str) -> None:
    value = UnreadableMapping() if name == "logit_bias" else UnreadableList()
    assert refused(SamplingParams, **{name: value})[name].startswith("1000000000 entries are more than ")


@pytest.mark.parametrize("name", ID_LISTS)
def test_no_more_is_read_of_an_endless_list_than_it_may_hold(name: str) -> None:
    read = itertools.count()
    assert "entries are more than" in refused(SamplingParams, **{name: read})[name]
    assert next(read) == ID_LISTS[name] + 1


@pytest.mark.parametrize("name", ["temperature", "n", "stop", "stop_token_ids", "logit_bias", "structured_output", "ignore_eos"])
def test_what_is_said_of_a_large_value_is_short(name: str) -> None:
    for value in (
        "x" * 10**6,
        b"x" * 10**6,
        ["x"] * 10**6,
        [[0] * 10**6] * 10**6,
        dict.fromkeys(range(10**6)),
        10**6000,
        {"x": [1] * 10**6},
    ):
        if not (name == "stop_token_ids" and isinstance(value, list)):
            assert all(len(text) < 400 for text in refused(SamplingParams, **{name: value}).values()), type(value)
