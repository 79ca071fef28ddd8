"""What can be measured: the engine in this process, an aengine server, any server with OpenAI's completions API.

Each turns a prompt into chunks; none knows what is measured. Libraries are imported where they are used, so that a peer's environment
needs nothing of ours but this package.

What becomes of a load at a router's replicas: how it was shared among them, and how much of its prompts they had cached."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from aengine.api.engine import EngineBase
from aengine.api.outputs import EngineStats
from aengine.api.params import SamplingParams
from aengine.bench.load_run import Target, TokenChunk
from aengine.router.router import Router


class EngineTarget:
    """`AsyncEngine` in this process, or `AsyncClient`, through `stream()`."""

    def __init__(self, engine: EngineBase, temperature: float = 0.0, name: str = "aengine (in process)") -> None:
        self.name = name
        self._engine = engine
        # Nothing else restricts what is sampled, whatever the model's own defaults are.
        self._params = SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0, ignore_eos=True, detokenize=True)

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        async with self._engine.stream(list(prompt), replace(self._params, max_tokens=output_tokens)) as stream:
            async for token in stream:
                yield TokenChunk(1, (token.token_id,))
            if stream.usage.drafts:
                yield TokenChunk(0, drafts=stream.usage.drafts)


class OpenAITarget:
    """A server with OpenAI's `/v1/completions`, streaming; `client` is an `httpx2.AsyncClient` on its base URL."""

    name = "OpenAI API"

    def __init__(self, client: Any, model: str) -> None:
        self._client = client
        self._model = model

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
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
                    yield TokenChunk(total - known)
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


REPORT_SECONDS = 1.1
"""Servers tell their load at least once a second."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica did, in tokens."""

    name: str
    prompt: int
    cached: int  # of the prompt tokens
    completion: int


async def counted(router: Router) -> Mapping[str, EngineStats]:
    """What the replicas have done by now, by name."""
    await asyncio.sleep(REPORT_SECONDS)
    return {replica.name: replica.report.stats for replica in router.replicas() if replica.report is not None}


def shares(before: Mapping[str, EngineStats], after: Mapping[str, EngineStats]) -> list[Share]:
    """What was done between. A replica that was restarted meanwhile counts from its restart."""
    found = []
    for name, now in after.items():
        then = before.get(name)
        if then is None or now.steps < then.steps:
            then = EngineStats()
        prompt, cached = now.prompt_tokens - then.prompt_tokens, now.cached_prompt_tokens - then.cached_prompt_tokens
        found.append(Share(name, prompt, cached, now.completion_tokens - then.completion_tokens))
    return found


def show(found: list[Share]) -> list[str]:
    """Describes the shares in lines for people: one for each replica, and one about prefix hits and balance."""
    prompt, cached = sum(one.prompt for one in found), sum(one.cached for one in found)
    computed = [one.prompt - one.cached + one.completion for one in found]
    mean = sum(computed) / len(computed)
    lines = [f"{one.name}: {one.prompt} prompt tokens, {one.cached} of them cached, {one.completion} generated" for one in found]
    if prompt and mean:
        lines.append(f"prefix hits: {cached / prompt:.1%} of prompt tokens; the busiest computed {max(computed) / mean:.2f} of the mean")
    return lines
