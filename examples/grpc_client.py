"""Stream a continuation from a running server (`aengine-grpc`), as `examples/stream.py` does without one.

python examples/grpc_client.py "It is a truth universally" --address 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio
import time

from aengine import SamplingParams
from aengine.client import AsyncClient


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="It is a truth universally")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    async with AsyncClient(options.address) as client:
        start = time.monotonic()
        print(options.prompt, end="", flush=True)
        # Leaving the stream early, or the end of this program, cancels the request on the server.
        async with client.stream(options.prompt, SamplingParams(max_tokens=options.max_tokens), timeout=60) as stream:
            async for token in stream:
                print(token.text, end="", flush=True)
        answer = stream.completion()
        milliseconds = (time.monotonic() - start) * 1000
        print(f"\n[{answer.finish_reason.name}, {answer.usage.completion_tokens} tokens in {milliseconds:.0f} ms]")


asyncio.run(main())
