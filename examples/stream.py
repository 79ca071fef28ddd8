import asyncio

from aengine import AsyncEngine, SamplingParams


async def main() -> None:
    async with AsyncEngine("demo") as engine:
        async for token in engine.stream("It is a truth universally", SamplingParams(max_tokens=64)):
            print(token.text, end="", flush=True)


asyncio.run(main())
