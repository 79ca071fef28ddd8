"""`grpc.reflection`: the schema for clients that do not have it, as v1 and as v1alpha, which are the same but for their name.

grpcio-reflection has v1alpha alone. Descriptors are copied into a pool of their own, so that nothing is added to what the process shares.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc.aio import Server
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

OLD, NEW = "v1alpha", "v1"


def add_reflection_to_server(schema: Iterable[ModuleType], server: Server) -> None:
    """Describe the services in the generated modules `schema`, and of reflection itself."""
    pool = DescriptorPool()
    names: list[str] = []
    for module in (*schema, reflection_pb2):
        _add_file(module.DESCRIPTOR, pool)
        names += service_names(module)
    (old,) = service_names(reflection_pb2)
    new = old.replace(OLD, NEW)
    described = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    pool.Add(text_format.Parse(described.replace(OLD, NEW), FileDescriptorProto()))
    servicer = aio.ReflectionServicer((*names, new), pool)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    for name in (old, new):
        server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})


def service_names(module: ModuleType) -> list[str]:
    """The full names of the services that a generated module defines."""
    return [service.full_name for service in module.DESCRIPTOR.services_by_name.values()]


def _add_file(file: Any, pool: DescriptorPool) -> None:
    """Add a file and all that it depends on. Adding one twice does nothing."""
    for dependency in file.dependencies:
        _add_file(dependency, pool)
    pool.AddSerializedFile(file.serialized_pb)
