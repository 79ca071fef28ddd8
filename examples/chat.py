"""A chat whose output is told apart: `python examples/chat.py`. The tool must be called, which a grammar enforces."""

import asyncio

from aengine import AsyncEngine, SamplingParams
from aengine.chat import ArgumentsDelta, CallStarted, ContentDelta, ReasoningDelta, stream_chat

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a town",
            "parameters": {
                "type": "object",
                "properties": {"town": {"enum": ["Bath", "London", "Meryton"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["town", "days"],
                "additionalProperties": False,
            },
        },
    }
]


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        messages = [{"role": "user", "content": "Will it rain on the ball?"}]
        params = SamplingParams(max_tokens=64, seed=1)
        async with stream_chat(engine, messages, params, tools=TOOLS, tool_choice="weather") as chat:
            async for event in chat:
                match event:
                    case ContentDelta(text=text) | ReasoningDelta(text=text) | ArgumentsDelta(text=text):
                        print(text, end="", flush=True)
                    case CallStarted(name=name):
                        print(f"{name} ", end="")
        print(f"\n{chat.message.as_dict()}")


asyncio.run(main())
