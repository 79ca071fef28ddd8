"""What a server says of itself through reflection is the schema."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest
import v1_schema
from fake_engine import FakeEngine
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_harness import serving
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

pytestmark = pytest.mark.anyio

Reflect = Callable[..., Awaitable[list[ServerReflectionResponse]]]
STANDARD = {"grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}


@pytest.fixture(params=["v1", "v1alpha"])
async def reflect(request: pytest.FixtureRequest, engine: FakeEngine) -> AsyncIterator[Reflect]:
    """The messages of both versions are the same on the wire."""
    async with serving(engine) as serve:
        ask_server = serve.channel.stream_stream(
            f"/grpc.reflection.{request.param}.ServerReflection/ServerReflectionInfo",
            request_serializer=ServerReflectionRequest.SerializeToString,
            response_deserializer=ServerReflectionResponse.FromString,
        )

        async def ask(*requests: ServerReflectionRequest) -> list[ServerReflectionResponse]:
            return [response async for response in ask_server(iter(requests))]

        yield ask


def declared() -> Iterator[str]:
    """The methods that the .proto files declare, as they stand there."""
    for path in v1_schema.PROTOS.rglob("*.proto"):
        service = ""
        for words in map(str.split, path.read_text(encoding="utf-8").splitlines()):
            if words[:1] == ["service"]:
                service = words[1]
            elif words[:1] == ["rpc"]:
                yield f"aengine.v1.{service}/{words[1].partition('(')[0]}"


def test_the_generated_code_has_the_methods_that_are_declared() -> None:
    assert sorted(declared()) == sorted(v1_schema.methods())


async def test_reflection_lists_the_services_of_the_schema(reflect: Reflect) -> None:
    (response,) = await reflect(ServerReflectionRequest(list_services=""))
    assert {service.name for service in response.list_services_response.service} == STANDARD | {
        service.full_name for service in v1_schema.services()
    }


async def test_reflection_tells_their_methods_and_messages(reflect: Reflect) -> None:
    services = v1_schema.services()
    responses = await reflect(*(ServerReflectionRequest(file_containing_symbol=service.full_name) for service in services))
    for service, response in zip(services, responses, strict=True):
        told = {file.name: file for file in map(FileDescriptorProto.FromString, response.file_descriptor_response.file_descriptor_proto)}
        assert told[service.file.name].SerializeToString() == service.file.serialized_pb


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_of_itself(reflect: Reflect, version: str) -> None:
    (response,) = await reflect(ServerReflectionRequest(file_containing_symbol=f"grpc.reflection.{version}.ServerReflection"))
    (file,) = map(FileDescriptorProto.FromString, response.file_descriptor_response.file_descriptor_proto)
    assert file.package == f"grpc.reflection.{version}"
    assert [method.input_type for method in file.service[0].method] == [f".grpc.reflection.{version}.ServerReflectionRequest"]
