"""Stream a continuation of a prompt to the terminal, token by token, then say how fast it went.

    python examples/demo.py "The morning was so fine that Elizabeth" --max-tokens 100

The start-up time is counted from the creation of this process as the kernel recorded it, so it holds the start of the
interpreter, the imports, loading the model and the prefill of the prompt. Where the kernel does not tell (other than
Linux) it is counted from the first line of this file.
"""

import time

FIRST_LINE = time.monotonic()

import argparse  # noqa: E402  (the clock starts first)
import asyncio  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402

from aengine import AEngineError, AsyncEngine, SamplingParams  # noqa: E402

PROMPT = '"My dear Mr. Bennet," said his lady to him one day, "'
SEED = 12  # one whose text reads well; the same seed gives the same text


def process_age() -> tuple[float, str]:
    """Seconds since this process began, and since when exactly that is."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # field 22: start, in clock ticks after boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), "process start"
    except (OSError, AttributeError):
        return time.monotonic() - FIRST_LINE, "the first line of the script"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompt", nargs="?", default=PROMPT)
    parser.add_argument("--model", default="demo", help="a Hugging Face id, a local directory, or the bundled demo (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=77, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED, help="(default: %(default)s)")
    options = parser.parse_args()

    params = SamplingParams(temperature=0.65, top_p=0.9, seed=options.seed, max_tokens=options.max_tokens)
    arrivals: list[float] = []
    async with AsyncEngine(options.model) as engine:
        print(options.prompt, end="", flush=True)
        async for token in engine.stream(options.prompt, params):
            if not arrivals:
                start_up, since = process_age()
            arrivals.append(time.monotonic())
            print(token.text, end="", flush=True)
    rate = f"{(len(arrivals) - 1) / (arrivals[-1] - arrivals[0]):.0f} tok/s after the first, " if len(arrivals) > 1 else ""
    print(f"\n\n[{len(arrivals)} tokens, {rate}first token {start_up:.2f} s after {since}]")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except AEngineError as error:
        sys.exit(f"demo: {error}")
