"""Chats with images over a router: they go where the image's pages are, and on at another replica where one is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest
from http_harness import serving_http
from image_models import Reference, as_file, chat_of, picture
from test_image_doors import url_of
from test_image_families import run_all

from aengine import AsyncEngine, Router, SamplingParams
from aengine.api.request import page_names
from aengine.client import AsyncClient
from aengine.server.app import Server

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
Find = Callable[[str], Reference]
GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
FILES = [as_file(picture(160, 128, number)) for number in range(4)]


async def test_two_replicas(reference: Find, monkeypatch: pytest.MonkeyPatch, anyio_backend: str) -> None:
    """By the beginning of the prompt alone: what else decides depends on how busy the machine is."""
    monkeypatch.setattr("aengine.router.replica_load.MOST_LOAD", 1e9)
    sizes: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory": "32MiB", "max_num_seqs": 8, "page_size": 4}
    async with AsyncExitStack() as stack:
        engines, servers = [], []
        for _ in range(2):
            engines.append(await stack.enter_async_context(AsyncEngine(str(reference("qwen3_vl").folder), **sizes)))
            server = Server(engines[-1], port=0)
            await server.start()
            stack.push_async_callback(server.stop)
            await server.set_serving()
            servers.append(server)
        router = await stack.enter_async_context(Router(backends=tuple(server.address for server in servers), routing_policy="hash"))
        encoders = [engine._started().model.images for engine in engines]
        expected = [await engines[0].generate(chat_of([0, "What?"], [file]), GREEDY) for file in FILES]
        await engines[0].flush_cache()
        chats = [chat_of([0, "What?"], [file]) for file in FILES]
        outputs = await run_all(router, chats, GREEDY)
        for output, wanted in zip(outputs, expected, strict=True):
            assert (output.text, output.usage.image_tokens) == (wanted.text, 20)
        client = await stack.enter_async_context(AsyncClient(servers[0].address))
        named = [page_names(*await client.named_prompt(chat)) for chat in (*chats, chats[0])]
        assert len({tuple(names) for names in named}) == 4, "different images are different prompts"
        encoded = sum(encoder.num_encoded for encoder in encoders if encoder is not None)
        cached = [(await router.generate(chat, GREEDY)).usage.cached_prompt_tokens for chat in chats]
        assert all(count > 20 for count in cached), "each went where its image was computed"
        assert sum(encoder.num_encoded for encoder in encoders if encoder is not None) == encoded

        serve = await stack.enter_async_context(serving_http(router))  # its doors render and stream in two calls
        part = {"type": "image_url", "image_url": {"url": url_of(FILES[2])}}
        body = {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}], "max_tokens": 6, "temperature": 0}
        answer = (await serve.post("/v1/chat/completions", body)).json()
        assert answer["choices"][0]["message"]["content"] == expected[2].text
        details = answer["usage"]["prompt_tokens_details"]
        assert (details["cached_tokens"], details["image_tokens"]) == (cached[2], 20)
