"""Steps of mistral.rs, in the environment that has it: python mistralrs_steps.py '{"model": .., "threads": .., ..}'

Its package takes one whole request of text at a time, so there are no steps of several rows, and times are those that it tells with an
answer; prompts are letters, a token each. Prints one line of JSON: the milliseconds of a decode step of one row, and of a prefill. It
scores no prompts.
"""

from __future__ import annotations

import json
import os
import pathlib
import random
import sys
from typing import Any

request = json.loads(sys.argv[1])
os.environ["RAYON_NUM_THREADS"] = str(request["threads"])

from mistralrs import CompletionRequest, Runner, Which  # type: ignore[import-not-found]  # noqa: E402  # it reads the environment


class Model:
    def __init__(self, given: dict[str, Any]) -> None:
        path = pathlib.Path(given["model"])
        which = Which.GGUF(quantized_model_id=str(path.parent), quantized_filename=path.name)
        self.runner = Runner(which=which, max_seqs=64, prefix_cache_n=0, no_paged_attn=True)
        self.random = random.Random(0)

    def times(self, context: int, tokens: int) -> tuple[float, float]:
        """The milliseconds of a prompt of so many tokens, and of a token of its answer."""
        prompt = "".join(self.random.choices("cdefghijklm", k=context))
        asked = CompletionRequest(model="default", prompt=prompt, max_tokens=tokens, temperature=0.0)
        usage = self.runner.send_completion_request(asked).usage
        if (usage.prompt_tokens, usage.completion_tokens) != (context, tokens):
            raise ValueError(f"it counts {usage.prompt_tokens} and {usage.completion_tokens} tokens, not {context} and {tokens}")
        return 1000 * usage.total_prompt_time_sec, 1000 * usage.total_completion_time_sec / tokens


def steps(given: dict[str, Any]) -> dict[str, float]:
    model, context, repeats = Model(given), given["context"], given["repeats"]
    model.times(context, 4)
    decode = min(model.times(context, repeats)[1] for _ in range(3))
    return {"1": decode, "prefill": min(model.times(given["prefill"], 1)[0] for _ in range(3))}


if __name__ == "__main__":
    print(json.dumps({} if "ids" in request else steps(request)))
