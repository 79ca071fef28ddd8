"""The schema as the generated code has it: its files, services and messages."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FileDescriptor, ServiceDescriptor

ROOT = Path(__file__).resolve().parents[2]
PROTOS = ROOT / "protos"


def files() -> list[FileDescriptor]:
    """One for each .proto file, so that none is forgotten."""
    names = sorted(path.relative_to(PROTOS).with_suffix("") for path in PROTOS.rglob("*.proto"))
    return [importlib.import_module(".".join((*name.parts[:-1], f"{name.name}_pb2"))).DESCRIPTOR for name in names]


def services() -> list[ServiceDescriptor]:
    return [service for file in files() for service in file.services_by_name.values()]


def methods() -> set[str]:
    """As gRPC clients write them: package.Service/Method."""
    return {f"{service.full_name}/{method.name}" for service in services() for method in service.methods}


def messages() -> Iterator[Descriptor]:
    """Every message that is declared at the top of a file."""
    for file in files():
        yield from file.message_types_by_name.values()
