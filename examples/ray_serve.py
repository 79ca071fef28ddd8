"""Completions over HTTP by Ray Serve, text as it comes: each Serve replica has an engine, and Serve adds replicas as requests pile up.

Needs ray[serve]. Run by itself it starts Ray on this host, asks once and ends. In a cluster: `serve run examples.ray_serve:app`.
"""

import http.client
import json
from collections.abc import AsyncIterator

from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from aengine import AsyncEngine, InvalidRequestError, SamplingParams, TokenStream


@serve.deployment(
    ray_actor_options={"num_cpus": 1},  # with a GPU: {"num_gpus": 1}
    max_ongoing_requests=256,  # they share the steps of the engine
    autoscaling_config={"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 64},
)
class Completions:
    async def __init__(self, model: str) -> None:
        self._engine = AsyncEngine(model)
        await self._engine.start()

    async def __call__(self, request: Request) -> Response:
        body = await request.json()
        stream = self._engine.stream(body["prompt"], SamplingParams(max_tokens=body.get("max_tokens", 64)))
        try:
            await stream.started()
        except InvalidRequestError as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        return StreamingResponse(self._texts(stream), media_type="text/plain; charset=utf-8")

    async def _texts(self, stream: TokenStream) -> AsyncIterator[str]:
        async with stream:  # a client that goes away cancels its request
            async for token in stream:
                yield token.text

    def check_health(self) -> None:
        """Serve replaces a replica whose engine is dead."""
        if not self._engine.healthy:
            raise RuntimeError("the engine is dead")


app = Completions.bind("demo")


def main() -> None:
    serve.run(app)
    connection = http.client.HTTPConnection("127.0.0.1", 8000)
    connection.request("POST", "/", json.dumps({"prompt": "It is a truth universally", "max_tokens": 32}))
    response = connection.getresponse()
    while piece := response.read1():
        print(piece.decode(), end="", flush=True)
    serve.shutdown()


if __name__ == "__main__":
    main()
