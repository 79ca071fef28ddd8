"""Requests become exactly what the engine takes, and every refusal names the path of its field."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest
from google.protobuf.duration_pb2 import Duration

from aengine.errors import FieldViolation, InvalidRequestError, RequestIdInUseError
from aengine.outputs import FinishReason
from aengine.params import SamplingParams
from aengine.server.convert import FINISH_REASONS, located, read_request
from aengine.v1 import generation_pb2
from aengine.v1.generation_pb2 import ChatMessage, ChatPrompt, GenerationSpec, Prompt, TokenIds
from aengine.v1.generation_service_pb2 import GenerateRequest


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
        elif isinstance(value, Duration):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return request


def test_unset_stays_unset() -> None:
    wanted = read_request(a_request())
    assert wanted.params == SamplingParams()
    assert (wanted.prompt, wanted.request_id, wanted.priority, wanted.tenant) == ("Once", None, 0, "")
    assert (wanted.timeout, wanted.cache_salt, wanted.text, wanted.token_ids) == (None, None, True, False)


def test_zero_means_zero() -> None:
    params = read_request(a_request(spec__sampling__temperature=0, spec__sampling__top_k=0, spec__sampling__seed=0)).params
    assert (params.temperature, params.top_k, params.seed) == (0.0, 0, 0)
    assert params.top_p is None


def test_every_field_arrives() -> None:
    wanted = read_request(
        a_request(
            request_id="a.B:1-_",
            spec__sampling__temperature=0.7,
            spec__sampling__top_p=0.9,
            spec__sampling__top_k=40,
            spec__sampling__min_p=0.05,
            spec__sampling__seed=2**64 - 1,
            spec__stopping__max_tokens=9,
            spec__stopping__stop_token_ids=[5, 6],
            spec__stopping__ignore_eos=True,
            spec__stopping__time_limit=Duration(seconds=1, nanos=500_000_000),
            spec__output__text=False,
            spec__output__token_ids=True,
            spec__cache__salt="pepper",
            spec__priority=-100,
            spec__tenant="a",
        )
    )
    assert wanted.params == SamplingParams(  # the decimals that the client wrote, not their float32 neighbours
        temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=2**64 - 1, max_tokens=9, stop_token_ids=(5, 6), ignore_eos=True
    )
    assert (wanted.request_id, wanted.timeout, wanted.cache_salt, wanted.priority, wanted.tenant) == ("a.B:1-_", 1.5, "pepper", -100, "a")
    assert (wanted.text, wanted.token_ids) == (False, True)


def test_the_three_forms_of_a_prompt() -> None:
    def prompt(**content: object) -> object:
        return read_request(GenerateRequest(spec=GenerationSpec(prompt=Prompt(**content)))).prompt  # type: ignore[arg-type]

    assert prompt(text="x") == "x"
    assert prompt(token_ids=TokenIds(ids=[3, 1])) == [3, 1]
    messages = [ChatMessage(role="system", content=""), ChatMessage(role="user", content="Hi")]
    assert prompt(chat=ChatPrompt(messages=messages)) == [{"role": "system", "content": ""}, {"role": "user", "content": "Hi"}]


NAN, INF = math.nan, math.inf
LONG = "x" * 129


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("request_id", ["", "a b", "é", LONG]),
        ("spec__sampling__temperature", [-0.1, 100.1, NAN, INF]),
        ("spec__sampling__top_p", [0.0, 1.01, -1, NAN]),
        ("spec__sampling__top_k", [2**31]),
        ("spec__sampling__min_p", [-0.01, 1.01, NAN]),
        ("spec__stopping__max_tokens", [0, 2**31]),
        ("spec__stopping__stop_token_ids", [list(range(129)), [2**32 - 1]]),
        ("spec__stopping__time_limit", [Duration(), Duration(seconds=-1), Duration(nanos=-1)]),
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
    with pytest.raises(InvalidRequestError) as caught:
        read_request(request)
    assert {violation.field for violation in caught.value.violations} == {
        "request_id", "spec.prompt.text", "spec.sampling.top_p", "spec.sampling.min_p", "spec.stopping.max_tokens", "spec.priority",
    }  # fmt: skip


def test_what_the_engine_refuses_is_located_in_the_schema() -> None:
    spec = GenerationSpec(prompt=Prompt(token_ids=TokenIds(ids=[1])))
    error = located(InvalidRequestError([FieldViolation("prompt", "too long"), FieldViolation("timeout", "past")]), spec)
    assert [violation.field for violation in error.violations] == ["spec.prompt.token_ids", "spec.stopping.time_limit"]
    assert isinstance(located(RequestIdInUseError([FieldViolation("request_id", "in use")]), spec), RequestIdInUseError)


def test_every_parameter_of_the_engine_has_a_path() -> None:
    """A parameter that the schema does not carry would be refused under a name that no client knows."""
    for name in (field.name for field in fields(SamplingParams)):
        error = located(InvalidRequestError([FieldViolation(name, "bad")]), GenerationSpec())
        parent, leaf = error.field.split(".")[1:]
        assert leaf in getattr(GenerationSpec(), parent).DESCRIPTOR.fields_by_name


def test_finish_reasons_are_the_engines() -> None:
    names = {reason: generation_pb2.FinishReason.Name(value) for reason, value in FINISH_REASONS.items()}
    assert names == {reason: f"FINISH_REASON_{reason.name}" for reason in FinishReason if reason is not FinishReason.ERROR}
    assert len(names) == len(generation_pb2.FinishReason.values()) - 1
