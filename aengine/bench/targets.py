"""What can be measured: the engine in this process, an aengine server, any server with OpenAI's completions API.

Each turns a prompt into chunks; none knows what is measured. Libraries are imported where they are used, so that a peer's environment
needs nothing of ours but this package.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from aengine.api.engine import EngineBase
from aengine.api.params import SamplingParams
from aengine.bench.load import Chunk, Target


class EngineTarget:
    """`AsyncEngine` in this process, or `AsyncClient`, through `stream()`."""

    def __init__(self, engine: EngineBase, temperature: float = 0.0, name: str = "aengine (in process)") -> None:
        self.name = name
        self._engine = engine
        # Nothing else restricts what is sampled, whatever the model's own defaults are.
        self._params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True, detokenize=True)

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[Chunk, None]:
        async with self._engine.stream(list(prompt), replace(self._params, max_tokens=output_tokens)) as stream:
            async for token in stream:
                yield Chunk(1, (token.token_id,))
            if stream.usage.drafts:
                yield Chunk(0, drafts=stream.usage.drafts)


class OpenAITarget:
    """A server with OpenAI's `/v1/completions`, streaming; `client` is an `httpx2.AsyncClient` on its base URL."""

    name = "OpenAI API"

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[Chunk, None]:
        body = {
            "model": self._model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,  # vLLM, SGLang and llama.cpp know it
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        known = 0
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data:") or line[5:].strip() == "[DONE]":
                    continue
                event = json.loads(line[5:])
                if not event.get("choices"):
                    continue
                total = (event.get("usage") or {}).get("completion_tokens", known + 1)  # else one per event is the best guess
                if total > known:
                    yield Chunk(total - known)
                    known = total


@asynccontextmanager
async def open_url(url: str, model: str | None, token: str | None = None) -> AsyncIterator[tuple[Target, int | None]]:
    """The server at `grpc://host:port` (aengine) or `http(s)://host:port` (OpenAI's API), and its vocabulary size where it reports it."""
    if url.startswith("grpc://"):
        from aengine.client import AsyncClient

        async with AsyncClient(url.removeprefix("grpc://"), token=token) as client:
            yield EngineTarget(client, name="aengine (gRPC)"), client.model_info.vocab_size
        return
    import httpx2 as httpx

    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, headers=headers, limits=limits) as http:
        if model is None:
            try:
                model = (await http.get("/v1/models")).raise_for_status().json()["data"][0]["id"]
            except (httpx.HTTPError, KeyError, IndexError) as error:
                raise RuntimeError(f"{url} lists no model at /v1/models: {error!r}") from error
        yield OpenAITarget(http, model), None
