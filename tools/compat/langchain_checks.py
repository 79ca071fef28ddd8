"""LangChain's ChatOpenAI: python -m tools.compat.langchain_checks http://HOST:PORT"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import openai
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

from tools.compat.checks import run_checks

BASE = f"{sys.argv[1]}/v1"
QUESTION = "How do you do?"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bath", "York"] = Field(description="where")


def chat(**options: Any) -> Any:
    return ChatOpenAI(**{"model": "demo", "base_url": BASE, "api_key": "none", "max_tokens": 16, "seed": 1, "max_retries": 0, **options})


def invoke() -> object:
    "invoke"
    message = chat().invoke(QUESTION)
    assert message.content
    assert message.usage_metadata["output_tokens"] == 16, message.usage_metadata
    assert message.response_metadata["finish_reason"] == "length", message.response_metadata
    return repr(message.content)


def stream() -> object:
    "stream, the same text in chunks, and its usage"
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    text = "".join(chunk.content for chunk in chunks)
    assert text == chat().invoke(QUESTION).content
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 16
    return f"{len(chunks)} chunks"


def batch() -> object:
    "abatch of 16"
    found = asyncio.run(chat().abatch([f"{QUESTION} {i}" for i in range(16)]))
    assert all(message.content for message in found)
    return f"{len(found)} messages"


def structured() -> object:
    "with_structured_output, by json_schema and by a function"
    found = [
        chat(max_tokens=200).with_structured_output(Weather, method=method).invoke(QUESTION)
        for method in ("json_schema", "function_calling")
    ]
    assert all(isinstance(one, Weather) for one in found), found
    return found


def tools() -> object:
    "bind_tools with tool_choice, the result of the tool, and the next message"
    model = chat(max_tokens=200).bind_tools([Weather], tool_choice="Weather", parallel_tool_calls=False)
    called = model.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "Weather"
    Weather.model_validate(call["args"])
    streamed = list(model.stream(QUESTION))
    whole = streamed[0]
    for chunk in streamed[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == call["args"], whole.tool_calls
    answer = chat().invoke(
        [HumanMessage(QUESTION), called, ToolMessage("rain", tool_call_id=call["id"]), AIMessage("So"), HumanMessage("And?")]
    )
    assert answer.content
    return call["args"]


def logprobs() -> object:
    "logprobs"
    content = chat().bind(logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]["content"]
    assert len(content) == 16
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    return f"{content[0]['token']!r} {content[0]['logprob']:.3f}"


def responses() -> object:
    "the Responses API, whole and streamed"
    model = chat(use_responses_api=True, seed=None, temperature=0)
    whole = model.invoke(QUESTION)
    chunks = [chunk.text for chunk in model.stream(QUESTION)]
    assert "".join(chunks) == whole.text
    assert whole.text
    return repr(whole.text)


def embeddings() -> object:
    "OpenAIEmbeddings"
    found = OpenAIEmbeddings(model="demo", base_url=BASE, api_key="none", check_embedding_ctx_length=False).embed_documents(
        ["How", "do you do?"]
    )
    assert len(found) == 2
    return f"{len(found)} of {len(found[0])} numbers"


def errors() -> object:
    "errors are those of OpenAI's client"
    try:
        chat(temperature=300).invoke(QUESTION)
    except openai.BadRequestError as error:
        return type(error).__name__, error.param, error.code
    raise AssertionError("no error")


run_checks([invoke, stream, batch, structured, tools, logprobs, responses, embeddings, errors])
