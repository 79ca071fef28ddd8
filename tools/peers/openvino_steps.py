"""Steps of OpenVINO GenAI, in the environment that has it: python openvino_steps.py '{"model": .., "threads": .., ..}'

Prints one line of JSON: the milliseconds of decode steps by number of rows, and of a prefill; or the perplexity of ids. KV is float16, as
in the others; the default of this engine is 8 bits.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai  # type: ignore[import-not-found]

from tools.peers import stepped


class Model:
    def __init__(self, path: str, threads: int, rows: int, tokens: int) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size, scheduling.enable_prefix_caching = 4, False  # GiB
        scheduling.max_num_batched_tokens, scheduling.max_num_seqs = tokens, max(rows, 2)
        properties = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": "f16"}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduling, "CPU", properties)
        self.numbers = itertools.count()
        self.asked: list[Any] = []  # a request without a handle is dropped

    def add(self, ids: list[int], tokens: int, **options: object) -> Any:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        for name, value in options.items():
            setattr(config, name, value)
        self.asked.append(self.pipeline.add_request(next(self.numbers), openvino.Tensor(np.array([ids], np.int64)), config))
        return self.asked[-1]

    def step(self) -> float:
        begin = time.perf_counter()
        self.pipeline.step()
        return 1000 * (time.perf_counter() - begin)

    def is_busy(self) -> bool:
        return bool(self.pipeline.has_non_finished_requests())


def model_of(given: dict[str, Any]) -> Model:
    rows = max(given["rows"])
    return Model(given["model"], given["threads"], rows, max(given["prefill"], rows * given["context"]))


def perplexity(given: dict[str, Any]) -> dict[str, float]:
    ids = given["ids"]
    model = Model(given["model"], given["threads"], 1, len(ids))
    asked = model.add(ids, 1, echo=True, logprobs=1)
    while model.is_busy():
        model.step()
    told = asked.read_all()[0].generated_log_probs[1 : len(ids)]
    return stepped.perplexity(told)


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    print(json.dumps(perplexity(request) if "ids" in request else stepped.steps(model_of(request), request)))
