"""Every message that was ever written is read the same today; every field of the schema has been written."""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_messages import FOLDER, full_messages, kind_of, missing_fields, stored, to_json
from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet
from v1_schema import messages

KINDS = {kind.name: kind for kind in messages()}


@pytest.mark.parametrize("path", stored(), ids=lambda path: str(path.relative_to(FOLDER).with_suffix("")))
def test_a_stored_message_is_read_and_written_as_ever(path: Path) -> None:
    assert kind_of(path) in KINDS, "messages of a published schema cannot go away"
    data, text = path.read_bytes(), path.with_suffix(".json").read_text(encoding="utf-8")
    message = GetMessageClass(KINDS[kind_of(path)]).FromString(data)
    assert to_json(message) == text
    assert message.SerializeToString(deterministic=True) == data
    assert json_format.Parse(text, type(message)()) == message
    assert unknown(message) == []


def test_there_are_no_other_files() -> None:
    assert {path for path in FOLDER.rglob("*") if path.is_file()} == {
        name for path in stored() for name in (path, path.with_suffix(".json"))
    }


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_is_stored(kind: Descriptor) -> None:
    assert any(kind_of(path) == kind.name for path in stored()), "run tests/server/golden_messages.py --write"
    assert missing_fields(kind) == set(), "run tests/server/golden_messages.py --write"


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_is_set_in_what_is_written(kind: Descriptor) -> None:
    fields = {field.name for message in full_messages(kind) for field, _ in message.ListFields()}
    assert fields == {field.name for field in kind.fields}


def unknown(message: Message) -> list[str]:
    """Messages within `message` that have fields which the schema does not."""
    found = [message.DESCRIPTOR.full_name] if len(UnknownFieldSet(message)) else []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for part in value if field.is_repeated else [value]:
            found += unknown(part)
    return found
