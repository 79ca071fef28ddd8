"""Requests become exactly what the engine takes, and every refusal names the path of its field."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any, cast

import pytest
from fake_engine import INFO, FakeEngine
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from aengine import AsyncEngine
from aengine.api.errors import FieldViolation, InvalidRequestError, RequestIdInUseError
from aengine.api.outputs import FinishReason
from aengine.api.params import Reasoning, SamplingParams, StructuredOutput
from aengine.api.request import RequestOptions
from aengine.chat.preparation import GenerationRequest
from aengine.v1 import generation_pb2
from aengine.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerationSpec, LogprobOptions, Prompt, TokenIds
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.model_service_pb2 import Model
from aengine.v1.sampling_pb2 import Choices, Grammar, JsonObject
from aengine.wire import request as server_request
from aengine.wire.names import FINISH_REASONS
from aengine.wire.request import located, write_request
from aengine.wire.response import wants_text, write_effective_spec, write_model


def read_request(request: GenerateRequest, *others: FieldViolation) -> GenerationRequest:
    """`others`: what the engine finds."""

    class Engine(FakeEngine):
        async def violations(self, prompt: object, params: SamplingParams) -> list[FieldViolation]:
            return list(others)

    return read_with(request, Engine())


def read_with(request: GenerateRequest, engine: FakeEngine) -> GenerationRequest:
    """Nothing in it waits."""
    reading = server_request.read_request(request, cast(AsyncEngine, engine))
    try:
        reading.send(None)
    except StopIteration as end:
        return end.value[0]  # type: ignore[no-any-return]
    raise AssertionError("it waits")


def a_request(**fields: object) -> GenerateRequest:
    """A valid request with `fields` set by their paths, dots as double underscores."""
    request = GenerateRequest()
    request.spec.prompt.text = "Once"
    for path, value in fields.items():
        *parents, name = path.split("__")
        message = request
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, list):
            getattr(message, name).extend(value)
        elif isinstance(value, dict):
            getattr(message, name).update(value)
        elif isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return request


def test_unset_stays_unset() -> None:
    wanted = read_request(a_request())
    assert wanted.params == SamplingParams()
    assert (wanted.prompt, wanted.options) == ("Once", RequestOptions())
    assert wants_text(a_request().spec.output)


ZERO = {  # what the engine takes when a field is set to zero, or to an empty message
    "spec__sampling__temperature": ("temperature", 0.0),
    "spec__sampling__top_k": ("top_k", 0),
    "spec__sampling__min_p": ("min_p", 0.0),
    "spec__sampling__seed": ("seed", 0),
    "spec__sampling__presence_penalty": ("presence_penalty", 0.0),
    "spec__sampling__frequency_penalty": ("frequency_penalty", 0.0),
    "spec__sampling__max_drafts": ("max_drafts", 0),
    "spec__stopping__min_tokens": ("min_tokens", 0),
    "spec__stopping__ignore_eos": ("ignore_eos", False),
    "spec__stopping__clamp_max_tokens": ("clamp_max_tokens", False),
    "spec__stopping__include_stop_in_output": ("include_stop_str_in_output", False),
    "spec__output__text": ("detokenize", False),
    "spec__output__skip_special_tokens": ("skip_special_tokens", False),
    "spec__output__logprobs": ("logprobs", 0),
    "spec__output__prompt_logprobs": ("prompt_logprobs", 0),
}


@pytest.mark.parametrize("path", ZERO)
def test_zero_means_zero(path: str) -> None:
    name, expected = ZERO[path]
    value = LogprobOptions() if path.endswith("logprobs") else 0
    params = read_request(a_request(**{path: value})).params
    assert params == SamplingParams(**{name: expected})  # type: ignore[arg-type]


def test_every_field_arrives() -> None:
    wanted = read_request(
        a_request(
            request_id="a.B:1-_",
            spec__sampling__temperature=0.7,
            spec__sampling__top_p=0.9,
            spec__sampling__top_k=40,
            spec__sampling__min_p=0.05,
            spec__sampling__seed=2**64 - 1,
            spec__sampling__n=3,
            spec__sampling__presence_penalty=-1.1,
            spec__sampling__frequency_penalty=0.3,
            spec__sampling__repetition_penalty=1.3,
            spec__sampling__max_drafts=3,
            spec__sampling__logit_bias={7: 0.1, 0: -100.0},
            spec__sampling__allowed_token_ids=[5, 6, 7, 0],
            spec__sampling__banned_token_ids=[8, 9],
            spec__sampling__banned_strings=["bad", "é"],
            spec__stopping__max_tokens=9,
            spec__stopping__min_tokens=2,
            spec__stopping__stop_strings=["\n\n", "end"],
            spec__stopping__stop_token_ids=[5, 6],
            spec__stopping__ignore_eos=True,
            spec__stopping__clamp_max_tokens=True,
            spec__stopping__include_stop_in_output=True,
            spec__stopping__time_limit=Duration(seconds=1, nanos=500_000_000),
            spec__output__text=False,
            spec__output__token_ids=True,
            spec__output__logprobs=LogprobOptions(top_k=4),
            spec__output__prompt_logprobs=LogprobOptions(top_k=5),
            spec__output__skip_special_tokens=False,
            spec__output__effective_params=True,
            spec__cache__salt="pepper",
            spec__priority=-100,
            spec__tenant="a",
        )
    )
    assert wanted.params == SamplingParams(  # the decimals that the client wrote, not their float32 neighbours
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=2**64 - 1,
        n=3,
        presence_penalty=-1.1,
        frequency_penalty=0.3,
        repetition_penalty=1.3,
        max_drafts=3,
        logit_bias={7: 0.1, 0: -100.0},
        allowed_token_ids=(5, 6, 7, 0),
        banned_token_ids=(8, 9),
        bad_words=("bad", "é"),
        max_tokens=9,
        min_tokens=2,
        stop=("\n\n", "end"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
        clamp_max_tokens=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=True,
        logprobs=4,
        prompt_logprobs=5,
    )
    assert wanted.options == RequestOptions(request_id="a.B:1-_", timeout=1.5, cache_salt="pepper", priority=-100, tenant="a")


@pytest.mark.parametrize("max_drafts", [None, 0, 16])
def test_a_client_sends_most_drafts(max_drafts: int | None) -> None:
    sent = write_request("x", SamplingParams(max_drafts=max_drafts), RequestOptions())
    assert read_request(sent).params.max_drafts == max_drafts


def test_text_is_made_where_it_is_wanted_or_stop_strings_need_it() -> None:
    assert read_request(a_request()).params.detokenize is None
    assert read_request(a_request(spec__output__text=True)).params.detokenize
    assert read_request(a_request(spec__output__text=False)).params.detokenize is False
    assert read_request(a_request(spec__stopping__stop_strings=["x"])).params.detokenize is None
    request = a_request(spec__output__text=False, spec__stopping__stop_strings=["x"])
    assert (read_request(request).params.detokenize, wants_text(request.spec.output)) == (True, False)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("json_schema", '{"type": "object"}', StructuredOutput(json_schema='{"type": "object"}')),
        ("json_object", JsonObject(), StructuredOutput(json_object=True)),
        ("regex", "a+", StructuredOutput(regex="a+")),
        ("choices", Choices(values=["yes", "no"]), StructuredOutput(choice=("yes", "no"))),
        ("grammar", Grammar(source='root ::= "a"'), StructuredOutput(grammar='root ::= "a"')),
    ],
)
def test_the_kinds_of_structured_output(kind: str, value: object, expected: StructuredOutput) -> None:
    assert read_request(a_request(**{f"spec__structured_output__{kind}": value})).params == SamplingParams(structured_output=expected)


def test_the_flags_of_a_schema() -> None:
    flags = {"strict_formats": True, "exact_one_of": True}
    request = a_request(
        spec__structured_output__json_schema="{}", **{f"spec__structured_output__{name}": value for name, value in flags.items()}
    )
    assert read_request(request).params.structured_output == StructuredOutput(json_schema="{}", **flags)


def test_the_three_forms_of_a_prompt() -> None:
    def prompt(**content: object) -> object:
        return read_request(GenerateRequest(spec=GenerationSpec(prompt=Prompt(**content)))).prompt  # type: ignore[arg-type]

    assert prompt(text="x") == "x"
    assert list(prompt(token_ids=TokenIds(ids=[3, 1]))) == [3, 1]  # type: ignore[call-overload]
    messages = [ChatMessage(role="system", content=""), ChatMessage(role="user", content="Hi")]
    assert prompt(chat=ChatPrompt(messages=messages)) == [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]


NAN, INF = math.nan, math.inf
NO_DURATIONS = [
    Duration(seconds=1, nanos=-5),
    Duration(seconds=-1, nanos=5),
    Duration(nanos=2_000_000_000),
    Duration(nanos=-2_000_000_000),
    Duration(nanos=1_000_000_000),
    Duration(seconds=315_576_000_001),
    Duration(seconds=-(2**63)),
]
LONG = "x" * 129


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("request_id", ["", "a b", "é", LONG]),
        ("spec__sampling__temperature", [-0.1, 100.1, NAN, INF]),
        ("spec__sampling__top_p", [0.0, 1.01, -1, NAN]),
        ("spec__sampling__top_k", [2**31]),
        ("spec__sampling__min_p", [-0.01, 1.01, NAN]),
        ("spec__sampling__n", [0, 129]),
        ("spec__sampling__presence_penalty", [-2.01, 2.01, NAN]),
        ("spec__sampling__frequency_penalty", [-2.01, 2.01, INF]),
        ("spec__sampling__repetition_penalty", [0.0, -1, 2.01, NAN]),
        ("spec__sampling__max_drafts", [17, 2**32 - 1]),
        ("spec__sampling__logit_bias", [{1: 100.1}, {1: -100.1}, {1: NAN}, {2**31: 0.0}, dict.fromkeys(range(1025), 1.0)]),
        ("spec__sampling__allowed_token_ids", [[2**31], [7] * (2**18 + 1)]),
        ("spec__sampling__banned_token_ids", [list(range(1025)), [2**31]]),
        ("spec__sampling__banned_strings", [[""], ["x" * 257], ["é" * 129], ["x"] * 65]),
        ("spec__stopping__max_tokens", [0, 2**31]),
        ("spec__stopping__min_tokens", [2**31]),
        ("spec__stopping__stop_token_ids", [list(range(129)), [7] * 129, [2**32 - 1]]),
        ("spec__stopping__stop_strings", [[""], ["x" * 257], ["é" * 129], ["x"] * 17]),
        ("spec__output__logprobs__top_k", [2**31]),
        ("spec__output__prompt_logprobs__top_k", [2**31]),
        ("spec__structured_output__json_schema", ["", "x" * (2**20 + 1)]),
        ("spec__structured_output__regex", ["", "x" * (2**13 + 1)]),
        (
            "spec__structured_output__choices",
            [Choices(), Choices(values=[""]), Choices(values=map(str, range(4097))), Choices(values=["x" * 2**19, "y" * 2**19, "z"])],
        ),
        ("spec__structured_output__grammar", [Grammar(), Grammar(source="x" * (2**20 + 1))]),
        ("spec__stopping__time_limit", [Duration(), Duration(seconds=-1), Duration(nanos=-1), *NO_DURATIONS]),
        ("spec__stream__max_delay", [Duration(seconds=-1), Duration(seconds=1, nanos=1), *NO_DURATIONS]),
        ("spec__stream__retain", [Duration(), Duration(seconds=-1), Duration(seconds=600, nanos=1), *NO_DURATIONS]),
        ("spec__cache__salt", [LONG]),
        ("spec__priority", [-101, 101]),
        ("spec__tenant", [LONG]),
    ],
)
def test_a_violation_names_its_path(path: str, values: list[object]) -> None:
    for value in values:
        with pytest.raises(InvalidRequestError) as caught:
            read_request(a_request(**{path: value}))
        assert [violation.field for violation in caught.value.violations] == [path.replace("__", ".")], value


@pytest.mark.parametrize(
    "fields",
    [
        {"spec__sampling__n": 128, "spec__sampling__presence_penalty": 2, "spec__sampling__frequency_penalty": -2},
        {"spec__sampling__repetition_penalty": 2, "spec__sampling__logit_bias": dict.fromkeys(range(1024), -100.0)},
        {"spec__sampling__repetition_penalty": 1e-6, "spec__sampling__logit_bias": {2**31 - 1: 100.0}},
        {"spec__sampling__banned_token_ids": list(range(1024)), "spec__sampling__banned_strings": ["x" * 256, *map(str, range(63))]},
        {
            "spec__stopping__min_tokens": 7,
            "spec__stopping__max_tokens": 7,
            "spec__stopping__stop_strings": ["x" * 256, *map(str, range(15))],
        },
        {"spec__structured_output__choices": Choices(values=map(str, range(4096)))},
        {"spec__structured_output__regex": "x" * 2**13},
    ],
)
def test_the_bounds_are_taken(fields: dict[str, object]) -> None:
    read_request(a_request(**fields))


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"spec__sampling__n": 2, "spec__sampling__temperature": 0}, "spec.sampling.n"),
        ({"spec__stopping__min_tokens": 3, "spec__stopping__max_tokens": 2}, "spec.stopping.min_tokens"),
        ({"spec__sampling__allowed_token_ids": [1, 2], "spec__sampling__banned_token_ids": [2]}, "spec.sampling.banned_token_ids"),
        ({"spec__structured_output__json_object": JsonObject(), "spec__stopping__ignore_eos": True}, "spec.stopping.ignore_eos"),
    ],
)
def test_what_does_not_go_together_names_a_path(fields: dict[str, object], path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(a_request(**fields))
    assert caught.value.field == path


def test_reasoning() -> None:
    request = a_request(spec__reasoning__closing="</think>", spec__reasoning__opened=True, spec__reasoning__max_tokens=0)
    assert read_request(request).params == SamplingParams(reasoning=Reasoning(closing="</think>", opened=True, max_tokens=0))
    request.spec.reasoning.max_tokens, request.spec.reasoning.closing = 2**31, ""
    with pytest.raises(InvalidRequestError) as caught:
        read_request(request)
    assert [violation.field for violation in caught.value.violations] == ["spec.reasoning.closing", "spec.reasoning.max_tokens"]


def test_structured_output_without_a_kind_is_refused() -> None:
    request = a_request()
    request.spec.structured_output.SetInParent()
    with pytest.raises(InvalidRequestError) as caught:
        read_request(request)
    assert caught.value.field == "spec.structured_output"


@pytest.mark.parametrize(
    ("prompt", "path"),
    [
        (Prompt(), "spec.prompt"),
        (Prompt(text=""), "spec.prompt.text"),
        (Prompt(token_ids=TokenIds()), "spec.prompt.token_ids"),
        (Prompt(chat=ChatPrompt()), "spec.prompt.chat"),
        (Prompt(chat=ChatPrompt(messages=[ChatMessage(role="user"), ChatMessage(content="x")])), "spec.prompt.chat.messages[1].role"),
    ],
)
def test_an_empty_prompt_names_its_form(prompt: Prompt, path: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(GenerateRequest(spec=GenerationSpec(prompt=prompt)))
    assert caught.value.field == path


def test_all_violations_come_together() -> None:
    request = a_request(request_id="?", spec__sampling__top_p=2, spec__sampling__min_p=2, spec__stopping__max_tokens=0, spec__priority=1000)
    request.spec.prompt.text = ""
    request.spec.sampling.banned_strings.append("")
    request.spec.stopping.stop_strings.append("")
    request.spec.structured_output.regex = ""
    request.spec.output.logprobs.top_k = 2**31
    with pytest.raises(InvalidRequestError) as caught:
        read_request(request)
    assert {violation.field for violation in caught.value.violations} == {
        "request_id", "spec.prompt.text", "spec.sampling.top_p", "spec.sampling.min_p", "spec.stopping.max_tokens", "spec.priority",
        "spec.sampling.banned_strings", "spec.stopping.stop_strings", "spec.structured_output.regex", "spec.output.logprobs.top_k",
    }  # fmt: skip


def test_what_the_engine_finds_is_named_beside_what_the_message_shows() -> None:
    """Fields in which something is wrong are left out of what the engine looks at, and so is what shows only without them."""
    request = a_request(spec__sampling__temperature=-1, spec__sampling__n=2, spec__output__logprobs__top_k=30, spec__stopping__min_tokens=3)
    request.spec.stopping.max_tokens = 2
    seen: list[SamplingParams] = []

    class Engine(FakeEngine):
        async def violations(self, prompt: object, params: SamplingParams) -> list[FieldViolation]:
            seen.append(params)
            named = {"logprobs": "too many", "min_tokens": "said already", "prompt": "too long"}
            return [FieldViolation(name, description) for name, description in named.items()]

    with pytest.raises(InvalidRequestError) as caught:
        read_with(request, Engine())
    fields = [violation.field for violation in caught.value.violations]
    assert fields == ["spec.sampling.temperature", "spec.stopping.min_tokens", "spec.output.logprobs.top_k", "spec.prompt.text"]
    assert seen == [SamplingParams(n=2, logprobs=30, max_tokens=2)]
    assert read_with(a_request(), Engine()).params == SamplingParams(), "the engine is asked only to refuse"
    assert len(seen) == 1


def test_what_the_engine_refuses_is_located_in_the_schema() -> None:
    spec = GenerationSpec(prompt=Prompt(token_ids=TokenIds(ids=[1])))
    error = located(InvalidRequestError([FieldViolation("prompt", "too long"), FieldViolation("timeout", "past")]), spec)
    assert [violation.field for violation in error.violations] == ["spec.prompt.token_ids", "spec.stopping.time_limit"]
    assert isinstance(located(RequestIdInUseError([FieldViolation("request_id", "in use")]), spec), RequestIdInUseError)


def test_every_parameter_of_the_engine_has_a_path() -> None:
    """A parameter that the schema does not carry would be refused under a name that no client knows."""
    ours = {field.name for field in fields(SamplingParams)} - {"logits_processors"}  # code of callers in process
    parts = [(StructuredOutput, "structured_output"), (Reasoning, "reasoning")]
    for name in ours | {f"{part}.{field.name}" for kind, part in parts for field in fields(kind)}:
        error = located(InvalidRequestError([FieldViolation(name, "bad")]), GenerationSpec())
        root, *parents, leaf = error.field.split(".")
        message: Any = GenerationSpec()
        for parent in parents:
            message = getattr(message, parent)
        assert root == "spec"
        assert leaf in message.DESCRIPTOR.fields_by_name


def test_the_effective_spec_is_the_given_one_with_the_defaults() -> None:
    request = a_request(spec__sampling__top_k=5, spec__sampling__logit_bias={3: 1.5}, spec__stopping__stop_strings=["x"], spec__tenant="a")
    params = read_request(request).params.with_defaults_of(SamplingParams(temperature=0.5, top_k=9, repetition_penalty=1.25, seed=3))
    effective = GenerationSpec()
    write_effective_spec(request.spec, params, effective)
    expected = GenerationSpec(tenant="a", stopping={"stop_strings": ["x"], "min_tokens": 0, "ignore_eos": False})
    expected.stopping.include_stop_in_output = False
    expected.stopping.clamp_max_tokens = False
    sampling = expected.sampling
    sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.n = 0.5, 1, 5, 0, 1
    sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty = 0, 0, 1.25
    sampling.logit_bias[3] = 1.5
    assert effective == expected
    assert request.spec.HasField("prompt")


def test_a_model_tells_the_defaults_it_has_and_no_others() -> None:
    message = Model()
    write_model(replace(INFO, generation_defaults=SamplingParams(temperature=0.5, repetition_penalty=1.25)), (), message)
    assert {field.name: value for field, value in message.generation_defaults.ListFields()} == {
        "temperature": 0.5, "repetition_penalty": 1.25,
    }  # fmt: skip


def test_finish_reasons_are_the_engines() -> None:
    names = {reason: generation_pb2.FinishReason.Name(value) for reason, value in FINISH_REASONS.items()}
    assert names == {reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason if reason is not FinishReason.ERROR}
    assert len(names) == len(generation_pb2.FinishReason.values()) - 1
