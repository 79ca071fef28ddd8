"""Start a server and a client in one command: stream a continuation of a prompt over gRPC, then shut the server down.

    python examples/demo_grpc.py "The morning was so fine that Elizabeth" --max-tokens 100

The server is `aengine-grpc` in a process of its own on a free port; the client imports neither torch nor transformers.
"""

import argparse
import asyncio
import re
import sys
import time

from aengine import AEngineError, SamplingParams
from aengine.client import AsyncClient

PROMPT = '"My dear Mr. Bennet," said his lady to him one day, "'
LISTENING = re.compile(r"listening on (\S+)")


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--model", default="demo", help="a Hugging Face id, a local directory, or the bundled demo (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=77, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=12, help="(default: %(default)s)")
    options = parser.parse_args()

    start = time.monotonic()
    command = (sys.executable, "-m", "aengine.server.cli", "--model", options.model, "--port", "0")
    server = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        address = await listening(server)
        print(f"[server at {address} after {time.monotonic() - start:.2f} s]\n")
        params = SamplingParams(temperature=0.65, top_p=0.9, seed=options.seed, max_tokens=options.max_tokens)
        async with AsyncClient(address) as client:
            print(options.prompt, end="", flush=True)
            sent = time.monotonic()
            async with client.stream(options.prompt, params) as stream:
                first = None
                async for token in stream:
                    first = first or time.monotonic()
                    print(token.text, end="", flush=True)
        count, done = stream.usage.completion_tokens, time.monotonic()
        rate = f"{(count - 1) / (done - first):.0f} tok/s after the first, " if first is not None and count > 1 else ""
        print(f"\n\n[{count} tokens, {rate}first token {1e3 * ((first or done) - sent):.0f} ms after the request]")
    finally:
        if server.returncode is None:
            server.terminate()  # it drains, and exits with 0
        await server.communicate()
    print(f"[server ended with exit code {server.returncode}]")


async def listening(server: asyncio.subprocess.Process) -> str:
    """The address that the server's log tells once it serves."""
    assert server.stderr is not None
    log = []
    async for line in server.stderr:
        log.append(line.decode())
        match = LISTENING.search(log[-1])
        if match is not None:
            return match[1]
    raise AEngineError(f"the server did not start: {''.join(log).strip()}")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except AEngineError as error:
        sys.exit(f"demo: {error}")
