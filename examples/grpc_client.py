"""Stream a continuation from a running server (`aengine-grpc`) with the generated stubs.

python examples/grpc_client.py "It is a truth universally" --address 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import asyncio

from grpc import aio

from aengine.v1.generation_pb2 import FinishReason, GenerationSpec, Prompt
from aengine.v1.generation_service_pb2 import StreamGenerateRequest
from aengine.v1.generation_service_pb2_grpc import GenerationServiceStub
from aengine.v1.sampling_pb2 import StoppingCriteria


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default="It is a truth universally")
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    spec = GenerationSpec(prompt=Prompt(text=options.prompt), stopping=StoppingCriteria(max_tokens=options.max_tokens))
    print(options.prompt, end="", flush=True)
    async with aio.insecure_channel(options.address) as channel:
        # The deadline travels with the call: when it passes, or when this program ends, the server stops generating.
        async for response in GenerationServiceStub(channel).StreamGenerate(StreamGenerateRequest(spec=spec), timeout=60):
            event = response.event
            if event.HasField("delta"):
                print(event.delta.text, end="", flush=True)
            elif event.HasField("sequence_finished"):
                print(f"\n[{FinishReason.Name(event.sequence_finished.finish.reason)}", end="")
            elif event.HasField("finished"):
                usage, timing = event.finished.usage, event.finished.timing
                print(f", {usage.completion_tokens} tokens in {timing.total.ToMilliseconds()} ms]")


asyncio.run(main())
