"""Requests drawn at random give the same in this process, over gRPC and over HTTP: texts, ids, logprobs, ends, or the same refusal."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from grpc import aio
from grpc_harness import failure_of, text_spec
from http_harness import Serving, serving_http
from slow_cases import slow_but

from aengine import AEngineError, AsyncEngine, Completion, EngineBase, Reasoning, RequestOptions, SamplingParams, StructuredOutput
from aengine.client import AsyncClient
from aengine.server.core.errors import describe
from aengine.server.http.chat_output import FINISH_REASONS, stop_reason_of
from aengine.v1.embedding_service_pb2 import EmbedRequest
from aengine.v1.embedding_service_pb2_grpc import EmbeddingServiceStub
from aengine.v1.generation_pb2 import Prompt
from aengine.v1.generation_service_pb2 import GenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub

pytestmark = pytest.mark.anyio

AT_ONCE = 20
TEXT = "It is a truth universally acknowledged that 漢字 and naïve 👩\u200d👩\u200d👧 readers (of 12.5 pages) must want {more}\n"
WORDS = TEXT.split(" ")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["b"],
    "additionalProperties": False,
}
STRUCTURED: list[dict[str, Any]] = [
    {"choice": ["yes", "no", "it is"]},
    {"regex": "[a-c]{3,9} é?"},
    {"json_schema": SCHEMA},
    {"json_object": True},
    {"grammar": 'root ::= ("a" | "bc")+ "."'},
]
PARAMS: dict[str, Any] = {
    "temperature": lambda rng: rng.choice([0.3, 0.7, 1.0, 1.8]),
    "top_p": lambda rng: rng.choice([0.5, 0.9, 1.0]),
    "top_k": lambda rng: rng.choice([0, 1, 5, 50]),
    "min_p": lambda rng: rng.choice([0.0, 0.02, 0.2]),
    "presence_penalty": lambda rng: rng.choice([-0.5, 0.4, 1.5]),
    "frequency_penalty": lambda rng: rng.choice([-0.2, 0.3]),
    "repetition_penalty": lambda rng: rng.choice([0.9, 1.2]),
    "logit_bias": lambda rng: {str(rng.randrange(4096)): rng.choice([-100.0, 2.5, 6.0]) for _ in range(3)},
    "banned_token_ids": lambda rng: [rng.randrange(4096) for _ in range(5)],
    "bad_words": lambda rng: rng.sample(["the", "and", " of", "e"], 2),
    "min_tokens": lambda rng: rng.randrange(5),
    "stop": lambda rng: rng.sample(["e ", ",", "the", "\n", "zzz"], 2),
    "include_stop_str_in_output": lambda rng: True,
    "stop_token_ids": lambda rng: [rng.randrange(300) for _ in range(20)],
    "skip_special_tokens": lambda rng: False,
    "ignore_eos": lambda rng: True,
    "n": lambda rng: rng.randint(2, 3),
    "logprobs": lambda rng: rng.randrange(4),
    "prompt_logprobs": lambda rng: rng.randrange(3),
    "max_drafts": lambda rng: 0,
    "structured_output": lambda rng: rng.choice(STRUCTURED),
    "reasoning": lambda rng: {"closing": rng.choice(["e", ". "]), "opened": True, "max_tokens": rng.randrange(6)},
}
OPTIONS: dict[str, Any] = {
    "adapter": lambda rng: "lora",
    "priority": lambda rng: rng.randint(-5, 5),
    "tenant": lambda rng: rng.choice("ab"),
    "cache_salt": lambda rng: rng.choice("xy"),
}


@dataclass
class Request:
    """One request in the words of HTTP, which are ours."""

    chat: bool
    prompt: Any
    params: dict[str, Any]
    options: dict[str, Any]
    stream: bool

    @classmethod
    def drawn(cls, number: int) -> Request:
        rng = random.Random(number)
        chat = rng.random() < 0.5
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        prompt = [{"role": "user", "content": text}] if chat else text if rng.random() < 0.7 else [rng.randrange(300) for _ in range(9)]
        params = {name: draw(rng) for name, draw in PARAMS.items() if rng.random() < 0.2}
        options = {name: draw(rng) for name, draw in OPTIONS.items() if rng.random() < 0.3}
        return cls(chat, prompt, {**params, "seed": number, "max_tokens": rng.randint(4, 24)}, options, rng.random() < 0.5)

    async def ask(self, engine: EngineBase) -> Any:
        """By the interface of the engine."""
        kinds: Any = {"structured_output": StructuredOutput, "reasoning": Reasoning}
        given = {name: kinds[name](**value) if name in kinds else value for name, value in self.params.items()}
        if "logit_bias" in given:
            given["logit_bias"] = {int(token_id): bias for token_id, bias in given["logit_bias"].items()}
        try:
            found = await engine.generate(self.prompt, SamplingParams(**given), RequestOptions(**self.options))
        except AEngineError as error:
            return describe(error).reason
        return [Choice.of(one) for one in (found, *found.others)]

    async def post(self, serve: Serving) -> Any:
        """By HTTP."""
        path, prompt = ("/v1/chat/completions", "messages") if self.chat else ("/v1/completions", "prompt")
        body = {prompt: self.prompt, **self.params, **self.options, "return_token_ids": True, "stream": self.stream}
        response = await serve.post(path, body)
        if response.status_code != 200:
            return response.json()["error"]["code"].upper()
        if not self.stream:
            parts = response.json()["choices"]
        else:
            data = [json.loads(line.removeprefix("data: ")) for line in response.text.split("\n\n")[:-2]]
            if "error" in data[-1]:
                return data[-1]["error"]["code"].upper()
            parts = [part for chunk in data for part in chunk["choices"]]
        choices: dict[int, Choice] = {}
        for part in parts:
            choices.setdefault(part["index"], Choice()).add(part)
        return [choices[index] for index in sorted(choices)]


@dataclass
class Choice:
    """One output, in the words of HTTP."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: Any = None

    @classmethod
    def of(cls, found: Completion) -> Choice:
        assert found.finish_reason is not None
        logprobs = [(one.token_id, one.logprob, list(one.top_logprobs.items())) for one in found.logprobs or ()]
        stop = stop_reason_of(found.finish_reason, found.stop_reason)
        return cls(found.text, list(found.token_ids), logprobs, FINISH_REASONS[found.finish_reason], stop)

    def add(self, part: dict[str, Any]) -> None:
        """A choice of a response, or of a chunk."""
        message = part.get("message", part.get("delta", part))
        self.text += message.get("content", message.get("text")) or ""
        self.token_ids += part["token_ids"]
        self.finish_reason = part["finish_reason"]
        self.stop_reason = part.get("stop_reason")
        for one in (part.get("logprobs") or {}).get("content", ()):
            self.logprobs.append((one["token_id"], one["logprob"], [(top["token_id"], top["logprob"]) for top in one["top_logprobs"]]))


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine("demo", kv_cache_memory=64 * 1024 * 1024, adapters={"lora": "demo-lora"}) as running:
        yield running


@pytest.fixture(scope="module")
async def serve(engine: AsyncEngine) -> AsyncIterator[Serving]:
    async with serving_http(engine, port=0, limit=None) as serve:
        yield serve


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("first", slow_but(lambda first: first < 60, range(0, 300, AT_ONCE)))
async def test_the_same_through_every_door(engine: AsyncEngine, serve: Serving, first: int) -> None:
    requests = [Request.drawn(number) for number in range(first, first + AT_ONCE)]
    async with AsyncClient(serve.server.address) as client:
        local, remote, http = [
            await asyncio.gather(*asks)
            for asks in (
                [request.ask(engine) for request in requests],
                [request.ask(client) for request in requests],
                [request.post(serve) for request in requests],
            )
        ]
    for request, expected, grpc_answer, http_answer in zip(requests, local, remote, http, strict=True):
        assert grpc_answer == expected, request
        assert http_answer == expected, request


async def test_a_model_and_another_adapter_are_refused(serve: Serving) -> None:
    named = {"model": "lora", "adapter": "other"}
    for path, body in (("/v1/completions", {"prompt": "so"}), ("/v1/embeddings", {"input": "so"})):
        answer = await serve.post(path, {**body, **named})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "adapter")
    async with aio.insecure_channel(serve.server.address) as channel:
        calls = (
            (GenerationServiceStub(channel).Generate, GenerateRequest(spec=text_spec("so", **named)), "spec.adapter"),
            (EmbeddingServiceStub(channel).Embed, EmbedRequest(inputs=[Prompt(text="so")], **named), "adapter"),
        )
        for method, request, field_path in calls:
            with pytest.raises(aio.AioRpcError) as refused:
                await method(request)
            assert failure_of(refused.value).fields == [field_path]
