"""Steps of vLLM for CPUs, in the environment that has it: python vllm_steps.py '{"model": .., "type": .., "threads": .., ..}'

Prints one line of JSON: the milliseconds of decode steps by number of rows, and of a prefill; or the perplexity of ids.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

from tools.peers import stepped

request = json.loads(sys.argv[1])
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="4", VLLM_CPU_OMP_THREADS_BIND="nobind")
os.environ["OMP_NUM_THREADS"] = str(request["threads"])

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: E402  # it reads the environment


class Model:
    def __init__(self, given: dict[str, Any], rows: int, tokens: int) -> None:
        sizes = {"max_num_seqs": max(rows, 2), "max_num_batched_tokens": tokens, "max_model_len": min(tokens, 32_768)}
        self.llm = LLM(given["model"], skip_tokenizer_init=True, dtype=given["type"], enable_prefix_caching=False, **sizes)
        self.numbers = itertools.count()

    def add(self, ids: list[int], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.llm.llm_engine.add_request(str(next(self.numbers)), {"prompt_token_ids": ids}, params)

    def step(self) -> float:
        begin = time.perf_counter()
        self.llm.llm_engine.step()
        return 1000 * (time.perf_counter() - begin)

    def is_busy(self) -> bool:
        return bool(self.llm.llm_engine.has_unfinished_requests())


def model_of(given: dict[str, Any]) -> Model:
    rows = max(given["rows"])
    return Model(given, rows, max(given["prefill"] + 8, rows * given["context"]))


def perplexity(given: dict[str, Any]) -> dict[str, float]:
    ids = given["ids"]
    model = Model(given, 1, len(ids) + 8)
    (answer,) = model.llm.generate([{"prompt_token_ids": ids}], SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False))
    told = [each[token].logprob for each, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
    return stepped.perplexity(told)


if __name__ == "__main__":
    print(json.dumps(perplexity(request) if "ids" in request else stepped.steps(model_of(request), request)))
