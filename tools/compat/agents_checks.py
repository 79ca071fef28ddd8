"""Instructor, Pydantic AI and OpenAI's Agents SDK: python -m tools.compat.agents_checks http://HOST:PORT"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Literal

import agents
import instructor
import openai
import pydantic_ai
from pydantic import BaseModel, ConfigDict
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tools.compat.checks import run_checks

BASE = f"{sys.argv[1]}/v1"
QUESTION = "How do you do?"


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bath", "York"]


def weather(city: Literal["Bath", "York"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def instructor_models() -> object:
    "Instructor, by tools and by json_schema"
    found = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(openai.OpenAI(base_url=BASE, api_key="none"), mode=mode)
        messages = [{"role": "user", "content": QUESTION}]
        found.append(client.chat.completions.create(model="demo", response_model=Weather, messages=messages, max_tokens=200))
    return found


def pydantic_outputs() -> object:
    "Pydantic AI, by chat completions and by responses, texts and outputs by json_schema and by tools"
    found: list[Any] = []
    provider = OpenAIProvider(base_url=BASE, api_key="none")
    settings = {"max_tokens": 200, "parallel_tool_calls": False}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("demo", provider=provider)
        assert pydantic_ai.Agent(model, model_settings={"max_tokens": 12}).run_sync(QUESTION).output
        for output in (pydantic_ai.NativeOutput(Weather), pydantic_ai.ToolOutput(Weather)):
            found.append(pydantic_ai.Agent(model, output_type=output, model_settings=settings).run_sync(QUESTION).output)
    return found


def agents_turns() -> object:
    "OpenAI Agents, by chat completions and by responses, whole and streamed: the tool is called and its result goes into the answer's turn"
    agents.set_tracing_disabled(True)
    return [asyncio.run(_turn(kind)) for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel)]


async def _turn(kind: Any) -> list[str]:
    settings = agents.ModelSettings(tool_choice="weather", max_tokens=60, parallel_tool_calls=False)
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as client:
        model = kind("demo", openai_client=client)
        agent = agents.Agent(
            name="a", instructions="Be brief.", tools=[agents.function_tool(weather)], model=model, model_settings=settings
        )
        whole = await agents.Runner.run(agent, QUESTION, max_turns=3)
        streamed = agents.Runner.run_streamed(agent, QUESTION, max_turns=3)
        async for _ in streamed.stream_events():
            pass
    kinds = [type(item).__name__ for item in whole.new_items]
    assert kinds == [type(item).__name__ for item in streamed.new_items] == ["ToolCallItem", "ToolCallOutputItem", "MessageOutputItem"], (
        kinds
    )
    return kinds


run_checks([instructor_models, pydantic_outputs, agents_turns])
