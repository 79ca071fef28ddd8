"""Steps of CTranslate2, in the environment that has it: python ctranslate2_steps.py '{"model": .., "type": .., "threads": .., ..}'

The checkpoint is converted first, to a directory that is removed at the end. Prints one line of JSON: the milliseconds of decode steps by
number of rows, and of a prefill; or the perplexity of ids.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
from ctranslate2.converters import TransformersConverter  # type: ignore[import-not-found]

from tools.peers import stepped


class Model:
    def __init__(self, given: dict[str, Any], folder: str) -> None:
        TransformersConverter(given["model"]).convert(folder, quantization=given["type"], force=True)
        self.generator = ctranslate2.Generator(folder, device="cpu", intra_threads=given["threads"])
        self.words = json.loads((pathlib.Path(folder) / "vocabulary.json").read_text())

    def tokens(self, ids: list[int]) -> list[str]:
        return [self.words[each] for each in ids]

    def decode(self, prompts: list[list[str]], tokens: int) -> list[float]:
        """The milliseconds between the tokens of the first prompt."""
        times: list[float] = []

        def note(result: Any) -> bool:
            if result.batch_id == 0:
                times.append(time.perf_counter())
            return False

        options = {"max_length": tokens, "min_length": tokens, "sampling_topk": 1, "include_prompt_in_result": False}
        self.generator.generate_batch(prompts, callback=note, end_token=[], **options)
        return [1000 * (after - before) for before, after in itertools.pairwise(times)]


def steps(given: dict[str, Any], folder: str) -> dict[str, float]:
    model = Model(given, folder)
    found = {}
    for count in given["rows"]:
        prompts = [model.tokens(stepped.prompt(given["context"], row)) for row in range(count)]
        found[str(count)] = statistics.median(model.decode(prompts, given["repeats"])[2:])
    prompt = model.tokens(stepped.prompt(given["prefill"]))
    taken = []
    for _ in range(3):
        begin = time.perf_counter()
        model.generator.generate_batch([prompt], max_length=1, sampling_topk=1, include_prompt_in_result=False)
        taken.append(1000 * (time.perf_counter() - begin))
    return {**found, "prefill": min(taken)}


def perplexity(given: dict[str, Any], folder: str) -> dict[str, float]:
    model = Model(given, folder)
    return stepped.perplexity(model.generator.score_batch([model.tokens(given["ids"])])[0].log_probs)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as place:
        print(json.dumps((perplexity if "ids" in request else steps)(request, place)))
