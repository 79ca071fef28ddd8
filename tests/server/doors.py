"""One server with both doors, and the same few calls through either: what is about the core must be seen through each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import httpx2
from grpc import aio
from grpc_harness import failure_of, text_spec
from hang_guard import HANG_SECONDS

from aengine.server.app import Server
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.model_service_pb2 import GetModelRequest
from aengine.v1.model_service_pb2_grpc import ModelServiceStub

GRPC, HTTP = "grpc", "http"
METHODS = {GRPC: "/aengine.v1.GenerationService/Generate", HTTP: "POST /v1/completions"}
OK = ""


@dataclass
class Answer:
    """What a call comes to: the reason of its failure, or `OK` and the text; and its request id."""

    reason: str
    text: str
    call_id: str


class Client:
    """Calls through one door, with `token`."""

    def __init__(self, doors: Doors, door: str, token: str | None = None) -> None:
        self._doors = doors
        self._door = door
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    async def generate(self, text: str = "Once", *, request_id: str | None = None, headers: Mapping[str, str] = {}) -> Answer:
        """One output, as a whole."""
        if self._door == GRPC:
            request = GenerateRequest(spec=text_spec(text), request_id=request_id)
            call = GenerationServiceStub(self._doors.channel).Generate
            return await self._call(call, request, headers, lambda response: response.sequences[0].text)
        body = {"prompt": text, **({} if request_id is None else {"request_id": request_id})}
        response = await self._doors.http.post("/v1/completions", json=body, headers={**self._headers, **headers})
        return self._answer(response, lambda value: value["choices"][0]["text"])

    async def model(self) -> str:
        """The reason of its failure."""
        if self._door == GRPC:
            call = ModelServiceStub(self._doors.channel).GetModel
            return (await self._call(call, GetModelRequest(), {}, lambda response: response.model.name)).reason
        return self._answer(await self._doors.http.get("/v1/models", headers=self._headers), lambda value: "").reason

    async def _call(self, method: Any, request: Any, headers: Mapping[str, str], text: Any) -> Answer:
        call = method(request, metadata=tuple({**self._headers, **headers}.items()))
        try:
            response = await call
        except aio.AioRpcError as error:
            failure = failure_of(error)
            return Answer(failure.reason, failure.message, failure.metadata.get("x-request-id", ""))
        found = {**dict(await call.initial_metadata() or ()), **dict(await call.trailing_metadata() or ())}
        return Answer(OK, text(response), found["x-request-id"])

    def _answer(self, response: httpx2.Response, text: Any) -> Answer:
        call_id = response.headers["x-request-id"]
        if response.status_code == 200:
            return Answer(OK, text(response.json()), call_id)
        error = response.json()["error"]
        return Answer(error["code"].upper(), error["message"], call_id)


@dataclass
class Doors:
    server: Server
    channel: aio.Channel
    http: httpx2.AsyncClient

    def client(self, door: str, token: str | None = None) -> Client:
        return Client(self, door, token)


@asynccontextmanager
async def both_doors(engine: Any, *, limit: float | None = HANG_SECONDS, **config: Any) -> AsyncIterator[Doors]:
    """A test that takes longer than `limit` seconds with it hangs, and fails."""
    server = Server(engine, port=0, http_port=0, **config)
    await server.start()
    try:
        if engine.healthy:
            await server.set_serving()
        limits = httpx2.Limits(max_connections=None)
        async with (
            aio.insecure_channel(server.address) as channel,
            httpx2.AsyncClient(base_url=f"http://{server.http_address}", timeout=None, limits=limits) as http,
        ):
            with anyio.fail_after(limit):
                yield Doors(server, channel, http)
    finally:
        await server.stop()
