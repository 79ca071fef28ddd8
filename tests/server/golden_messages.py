"""Messages of the schema as bytes and as JSON, kept for ever: what was written once must be read the same by every later version.

    python tests/server/golden_messages.py --write

writes files for the messages that have a field no file has yet, into a folder of their own; nothing is ever changed or deleted. Each
file is named after its message; it has every field set, and where fields exclude each other there is a file for each of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from v1_schema import messages

FOLDER = Path(__file__).parent / "golden" / "v1"


def stored() -> list[Path]:
    """The binary files, oldest first."""
    return sorted(FOLDER.glob("*/*.binpb"), key=lambda path: (int(path.parent.name), path.name))


def kind_of(path: Path) -> str:
    """Name of the message in a file."""
    return path.name.split(".")[0]


def full_messages(kind: Descriptor) -> Iterator[Message]:
    """`kind` with every field set, once for each way to choose among fields that exclude each other."""
    sizes = [len(oneof.fields) for oneof in kind.oneofs]
    for choice in range(max(sizes, default=1)):
        yield _full(kind, choice)


def missing_fields(kind: Descriptor) -> set[str]:
    """The fields of a message that no stored file sets."""
    names = {field.name for field in kind.fields}
    for path in stored():
        if kind_of(path) == kind.name:
            message = GetMessageClass(kind).FromString(path.read_bytes())
            names -= {field.name for field, _ in message.ListFields()}
    return names


def to_json(message: Message) -> str:
    return json.dumps(json_format.MessageToDict(message), indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def write() -> list[Path]:
    """The files that were missing."""
    folder = FOLDER / str(1 + max((int(path.parent.name) for path in stored()), default=0))
    written = []
    for kind in [kind for kind in messages() if missing_fields(kind) or not any(kind_of(path) == kind.name for path in stored())]:
        folder.mkdir(parents=True, exist_ok=True)
        for index, message in enumerate(full_messages(kind)):
            path = folder / f"{kind.name}.{index}.binpb"
            path.write_bytes(message.SerializeToString(deterministic=True))
            path.with_suffix(".json").write_text(to_json(message), encoding="utf-8")
            written.append(path)
    return written


def _full(kind: Descriptor, choice: int) -> Message:
    """`choice` counts the fields of each oneof, and begins again where one has fewer."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        oneof = field.containing_oneof
        if oneof is not None and oneof.fields[choice % len(oneof.fields)] is not field:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for index in range(2):
                getattr(message, field.name)[_value(key, index)] = _value(value, index)
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(field, index) for index in range(2))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(_value(field, 0))
        else:
            setattr(message, field.name, _value(field, 0))
    return message


def _value(field: FieldDescriptor, index: int) -> Any:
    """Not the default of its type, exact in its type, and another one for another field or index."""
    number = field.number + 100 * index
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            return _full(field.message_type, index)
        case FieldDescriptor.CPPTYPE_ENUM:
            return field.enum_type.values[-1 - index].number
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return bytes((0, 255, number % 256))
        case FieldDescriptor.CPPTYPE_STRING:
            return f"{field.name} {number} é漢😀"
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return -number - 0.5
        case FieldDescriptor.CPPTYPE_UINT32:
            return 2**32 - 1 - number
        case FieldDescriptor.CPPTYPE_UINT64:
            return 2**64 - 1 - number
        case FieldDescriptor.CPPTYPE_INT32:
            return number if field.containing_type.file.package == "google.protobuf" else -number
        case FieldDescriptor.CPPTYPE_INT64:
            return number
    raise TypeError(f"{field.full_name} is of a type that is not written yet")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", required=True, help="write the files that are missing")
    parser.parse_args()
    for path in write():
        print(path.relative_to(FOLDER))
    sys.exit()
