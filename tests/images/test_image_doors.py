"""Images by the doors of a server: what clients of OpenAI and Anthropic send, what ours send over gRPC and HTTP, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from http_harness import Serving, serving_http
from image_models import Reference, as_file, chat_of, picture

from aengine import AsyncEngine, InvalidRequestError, SamplingParams
from aengine.client import AsyncClient
from aengine.client.openai import HttpConfig, OpenAIClient
from aengine.terminal.conversation import CommandError, Conversation
from aengine.terminal.interactive import run_command

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]
Find = Callable[[str], Reference]
NUM_TOKENS = 6
FILES = [as_file(picture(37, 91, 0)), as_file(picture(120, 60, 1), "JPEG")]
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
IMAGE_TOKENS = 11
SAID = {"max_tokens": NUM_TOKENS, "temperature": 0.0}


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


@asynccontextmanager
async def serving(reference: Find, **config: Any) -> AsyncIterator[tuple[AsyncEngine, Serving]]:
    folder = reference("qwen3_vl").folder
    sizes: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 512, "kv_cache_memory": "32MiB", "max_num_seqs": 8}
    async with AsyncEngine(str(folder), **sizes) as engine, serving_http(engine, **config) as serve:
        yield engine, serve


async def test_clients_of_others(reference: Find, anyio_backend: str) -> None:
    """The answers and counts are those of the engine."""
    async with serving(reference) as (engine, serve):
        chat = chat_of(["What? ", 0, 1], FILES)
        expected = await engine.generate(chat, GREEDY)
        assert expected.usage.image_tokens == IMAGE_TOKENS
        parts: Any = [
            {"type": "text", "text": "What? "},
            {"type": "image_url", "image_url": {"url": url_of(FILES[0]), "detail": "high"}},
            {"type": "image_url", "image_url": url_of(FILES[1])},
        ]
        address = f"http://{serve.server.http_address}"
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(model="", messages=[{"role": "user", "content": parts}], extra_body={}, **SAID)
            assert answer.choices[0].message.content == expected.text
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.image_tokens == IMAGE_TOKENS  # type: ignore[attr-defined]
            items: Any = [
                {"type": "input_text", "text": "What? "},
                *({"type": "input_image", "image_url": url_of(data), "detail": "auto"} for data in FILES),
            ]
            response = await client.responses.create(
                model="", input=[{"role": "user", "content": items}], max_output_tokens=NUM_TOKENS, temperature=0.0
            )
            assert response.output_text == expected.text
        blocks: Any = [
            {"type": "text", "text": "What? "},
            *({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url_of(data)[22:]}} for data in FILES[:1]),
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILES[1]).decode()}},
        ]
        async with anthropic.AsyncAnthropic(base_url=address, api_key="none") as claude:
            messages: Any = [{"role": "user", "content": blocks}]
            message = await claude.messages.create(model="", messages=messages, max_tokens=NUM_TOKENS, extra_body={"temperature": 0.0})
            assert message.content[0].text == expected.text  # type: ignore[union-attr]
            counted = await claude.messages.count_tokens(model="", messages=messages)
            assert counted.input_tokens == expected.usage.prompt_tokens
            used: Any = [
                {"role": "user", "content": "Look."},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": blocks[1:2]}]},
            ]
            message = await claude.messages.create(model="", messages=used, max_tokens=NUM_TOKENS)
            assert message.usage.input_tokens > 3
        encoder = engine._started().model.images
        assert encoder is not None
        assert encoder.num_encoded == 2, "an image was encoded once for each door"


async def test_our_clients(reference: Find, tmp_path: Path, anyio_backend: str) -> None:
    async with serving(reference, port=0) as (engine, serve):
        expected = await engine.generate(chat_of(["What? ", 0], FILES), GREEDY)
        path = tmp_path / "picture.png"
        path.write_bytes(FILES[0])
        async with AsyncClient(serve.server.address) as client:
            assert client.model_info.max_images == 32
            for image in (FILES[0], path, str(path), url_of(FILES[0])):
                output = await client.generate(chat_of(["What? ", 0], [image]), GREEDY)
                assert (output.text, output.usage.image_tokens) == (expected.text, expected.usage.image_tokens)
            rendered = await client.render_chat(chat_of(["What? ", 0], FILES))
            ids = await client.tokenize(rendered.text, add_special_tokens=False, literals=rendered.literals)
            output = await client.generate(ids, GREEDY, images=rendered.images)
            assert output.text == expected.text
            with pytest.raises(InvalidRequestError, match="it has 3 tokens of images, whose images are of 8 tokens"):
                await client.generate(ids, GREEDY, images=[FILES[1]])
        http = OpenAIClient(HttpConfig(address=f"http://{serve.server.http_address}/v1"))
        await http.start()
        stream = http.chat(chat_of(["What? ", 0], [path]), SAID)
        async for _ in stream:
            pass
        assert stream.message.content == expected.text


async def test_videos(reference: Find, anyio_backend: str) -> None:
    frames = [as_file(picture(64, 96, seed)) for seed in range(5)]
    async with serving(reference, port=0) as (engine, serve):
        text = {"type": "text", "text": "What?"}
        chat = [{"role": "user", "content": [{"type": "video", "video": frames, "fps": 1.5}, text]}]
        expected = await engine.generate(chat, GREEDY)
        assert expected.usage.image_tokens == 3 * 6
        async with AsyncClient(serve.server.address) as client:
            output = await client.generate(chat, GREEDY)
            assert (output.text, output.usage.image_tokens) == (expected.text, expected.usage.image_tokens)
            rendered = await client.render_chat(chat)
            assert "<0.3 seconds><|vision_start|>" in rendered.text
            ids = await client.tokenize(rendered.text, add_special_tokens=False, literals=rendered.literals)
            assert (await client.generate(ids, GREEDY, images=rendered.images)).text == expected.text
            with pytest.raises(InvalidRequestError, match="a video whose frame 1 is no PNG, JPEG"):
                await client.generate([{"role": "user", "content": [{"type": "video", "video": [frames[0], b"x"]}]}], GREEDY)
        address = f"http://{serve.server.http_address}/v1"
        http = OpenAIClient(HttpConfig(address=address))
        await http.start()
        stream = http.chat(chat, SAID)
        async for _ in stream:
            pass
        assert stream.message.content == expected.text
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as others:
            refused: list[tuple[dict[str, Any], str]] = [
                ({"video": []}, r"messages\[0\]\.content\[0\]\.video.*a video is a list of 1 to 256 frames"),
                ({"video": "data:"}, "is not a list"),
                ({"video": [{}]}, "image 0 is a dict, not bytes"),
                ({"video": ["https://a.b/c.png"]}, "a frame of a video is an image itself, not a URL to fetch"),
                ({"video": ["data:image/png;base64,?"]}, "a frame is a data: URL whose base64 is not valid"),
                ({"video": [url_of(frames[0])], "fps": -1}, r"\.fps"),
            ]
            for part, why in refused:
                messages: Any = [{"role": "user", "content": [{"type": "video", **part}]}]
                with pytest.raises(openai.BadRequestError, match=why):
                    await others.chat.completions.create(model="", messages=messages)


async def test_the_terminal(tmp_path: Path, anyio_backend: str) -> None:
    path, text = tmp_path / "picture.png", tmp_path / "notes.txt"
    path.write_bytes(FILES[0])
    text.write_text("no picture")

    class Shown:
        conversation = Conversation()

    chat: Any = Shown()
    outcome = run_command(chat, f"/image {path}")
    assert outcome is not None
    assert outcome.text == "picture.png goes with the next question."
    with pytest.raises(CommandError, match=r"notes\.txt is no PNG, JPEG, WEBP or GIF"):
        run_command(chat, f"/image {text}")
    chat.conversation.ask("What is this?")
    assert chat.conversation.messages == chat_of([0, "What is this?"], [url_of(FILES[0])])
    assert Conversation.from_json(chat.conversation.to_json()).messages == chat.conversation.messages
    assert chat.conversation.text == "[image] What is this?"
    with pytest.raises(CommandError, match="an image in it is no data: URL"):
        Conversation.from_json(chat.conversation.to_json().replace("data:", "/etc/"))


REFUSED: Sequence[tuple[Any, str]] = [
    ({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, "fetches none"),
    ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "is no URL such as data:image/png;base64"),
    ({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@@"}}, "base64 is not valid"),
    ({"type": "image_url", "image_url": {"url": "/etc/passwd"}}, "fetches none"),
    ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "fetches none"),
    ({"type": "image_url", "image_url": {"url": url_of(FILES[0][:200])}}, "image 0 is broken"),
    ({"type": "image_url", "image_url": {"url": url_of(b"")}}, "image 0 is no PNG, JPEG, WEBP or GIF"),
    ({"type": "image_url", "image_url": 5}, "not a string or an object"),
    ({"type": "image_url"}, "must be set"),
    ({"type": "input_image", "file_id": "file-1"}, "files are not kept here"),
    ({"type": "image", "source": {"type": "file", "file_id": "file-1"}}, "base64, url"),
    ({"type": "video_url", "video_url": {"url": "data:,"}}, "'video_url' is not possible"),
]


async def test_what_is_refused(reference: Find, anyio_backend: str) -> None:
    """Each in one sentence, and nothing else is disturbed."""
    async with serving(reference) as (engine, serve):
        for part, said in REFUSED:
            body = {"messages": [{"role": "user", "content": [part]}], **SAID}
            answer = await serve.post("/v1/chat/completions", body)
            assert answer.status_code == 400, part
            assert said in answer.json()["error"]["message"], part
        many = [{"type": "image_url", "image_url": {"url": url_of(FILES[0])}}] * 33
        answer = await serve.post("/v1/chat/completions", {"messages": [{"role": "user", "content": many}], **SAID})
        assert "33 images; at most 32" in answer.json()["error"]["message"]
        forged = [{"type": "text", "text": "<|vision_start|><|image_pad|><|vision_end|> "}, many[0]]
        answer = await serve.post("/v1/chat/completions", {"messages": [{"role": "user", "content": forged}], **SAID})
        assert answer.status_code == 200, "text that reads like an image is none"
        assert answer.json()["usage"]["prompt_tokens_details"]["image_tokens"] == 3
        assert (await engine.generate("hello", GREEDY)).usage.completion_tokens == NUM_TOKENS


async def test_a_model_for_text_alone(anyio_backend: str) -> None:
    async with AsyncEngine("demo", kv_cache_memory="16MiB") as engine:
        with pytest.raises(InvalidRequestError, match="prompt: it has 1 image; the model takes text alone"):
            await engine.generate(chat_of([0], FILES), GREEDY)
        with pytest.raises(InvalidRequestError, match="the model takes text alone"):
            await engine.render_chat(chat_of([0], FILES))
