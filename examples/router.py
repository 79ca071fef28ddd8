"""Two engines as one, in processes of this host: the stream goes on if one of them dies."""

import asyncio

from aengine import Router, SamplingParams


async def main() -> None:
    async with Router("demo", replicas=2) as router:
        async for token in router.stream("It is a truth universally", SamplingParams(max_tokens=64)):
            print(token.text, end="", flush=True)


asyncio.run(main())
