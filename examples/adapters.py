"""One model, with an adapter and without, in the same batch."""

from __future__ import annotations

import asyncio

from aengine import AsyncEngine, SamplingParams

PROMPT = "A lawyer is"


async def main() -> None:
    async with AsyncEngine("demo", adapters={"dictionary": "demo-lora"}) as engine:
        params = SamplingParams(max_tokens=24, temperature=0.0)
        plain, adapted = await asyncio.gather(
            engine.generate(PROMPT, params),
            engine.generate(PROMPT, params, adapter="dictionary"),
        )
        print("without:", PROMPT + plain.text)
        print("with:   ", PROMPT + adapted.text)


if __name__ == "__main__":
    asyncio.run(main())
