"""Every field that a request can have goes over the wire and comes back: writer against reader, for each field that is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from typing import Any

import pytest
from google.protobuf.message import Message

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.params import Reasoning, RepetitionStop, SamplingParams, StructuredOutput
from aengine.api.request import RequestOptions
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.wire.request import read_options, read_sampling_params, write_request

NOT_SENT = {"logits_processors"}
APART = {"request_id"}  # a field of the call, not of what is asked for
OF_CHATS = {"tools", "add_generation_prompt", "continue_final_message", "template_kwargs", "keep_history"}
CANDIDATES = (
    *(0.5, 3, True, False, "a-word", (b"image",), ("a", "b"), (1, 2), {7: 0.5}, [[1, 2]]),
    *(StructuredOutput(regex="a+"), Reasoning(opening="<t>", closing="</t>", opened=True, answer="a", max_tokens=5)),
    RepetitionStop(max_cycle=9, min_cycle=2, min_count=3),
)


def default_of(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def other_value(kind: type, field: Field[Any]) -> Any:
    """An object of `kind` in which `field` is not what it is by default."""
    for value in CANDIDATES:
        try:
            made = kind(**{field.name: value})
        except (InvalidRequestError, TypeError):
            continue
        if getattr(made, field.name) != default_of(field):
            return made
    raise AssertionError(f"no candidate is a {field.name}")


def sent(params: SamplingParams, options: RequestOptions) -> StreamGenerateRequest:
    return StreamGenerateRequest.FromString(write_request([1, 2], params, options).SerializeToString())


PARAMS = [field for field in fields(SamplingParams) if field.name not in NOT_SENT]
OPTIONS = [field for field in fields(RequestOptions) if field.name not in APART | OF_CHATS]


@pytest.mark.parametrize("field", PARAMS, ids=lambda field: field.name)
def test_a_parameter(field: Field[Any]) -> None:
    params = other_value(SamplingParams, field)
    check = FieldChecks()
    assert read_sampling_params(sent(params, RequestOptions()).spec, check) == params
    assert not check.violations


@pytest.mark.parametrize("field", OPTIONS, ids=lambda field: field.name)
def test_an_option(field: Field[Any]) -> None:
    options = other_value(RequestOptions, field)
    check = FieldChecks()
    read = read_options(sent(SamplingParams(), options), check)
    assert not check.violations
    assert getattr(read, field.name) == getattr(options, field.name)


def fields_set(message: Message, path: str = "") -> Iterator[str]:
    for descriptor, value in message.ListFields():
        yield path + descriptor.name
        if descriptor.message_type is not None and isinstance(value, Message):
            yield from fields_set(value, f"{path}{descriptor.name}.")


def test_no_field_of_the_schema_is_left_out() -> None:
    """A field that no parameter or option sets is one that clients of other languages can send and ours cannot."""
    seen: set[str] = set()
    for field in PARAMS:
        seen.update(fields_set(sent(other_value(SamplingParams, field), RequestOptions()).spec))
    for field in OPTIONS:
        seen.update(fields_set(sent(SamplingParams(), other_value(RequestOptions, field)).spec))
    empty = StreamGenerateRequest().spec
    for part in (empty.sampling, empty.stopping, empty.reasoning):
        (name,) = (one.name for one in empty.DESCRIPTOR.fields if one.message_type is part.DESCRIPTOR)
        missing = [one.name for one in part.DESCRIPTOR.fields if f"{name}.{one.name}" not in seen]
        assert not missing, f"{name}: {missing}"
