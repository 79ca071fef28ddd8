"""Steps of llama.cpp, in the environment that has its Python package: python llama_steps.py '{"model": .., "threads": .., ..}'

Prints one line of JSON: the milliseconds of decode steps by number of rows, and of a prefill; or the perplexity of ids.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time
from typing import Any

import llama_cpp  # type: ignore[import-not-found]
import numpy as np


class Model:
    def __init__(self, path: str, threads: int, rows: int, tokens: int) -> None:
        llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, 2048, 512, rows
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, "llama.cpp has no context for the model"
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def step(self, tokens: list[tuple[int, int, int, bool]]) -> float:
        """Ids with their positions and rows, and whether logits are wanted; returns the milliseconds."""
        self.batch.n_tokens = len(tokens)
        for at, (token, position, row, wanted) in enumerate(tokens):
            self.batch.token[at], self.batch.pos[at], self.batch.n_seq_id[at] = token, position, 1
            self.batch.seq_id[at][0], self.batch.logits[at] = row, wanted
        begin = time.perf_counter()
        status = llama_cpp.llama_decode(self.context, self.batch)
        llama_cpp.llama_synchronize(self.context)
        assert status == 0, f"llama_decode returned {status}"
        return 1000 * (time.perf_counter() - begin)

    def prefill(self, length: int, row: int) -> float:
        return self.step([(10 + at % 4000, at, row, at == length - 1) for at in range(length)])


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _SILENT(level: int, text: bytes, data: object) -> None:
    pass


def steps(given: dict[str, Any]) -> dict[str, float]:
    rows, context, length, repeats = given["rows"], given["context"], given["prefill"], given["repeats"]
    model = Model(given["model"], given["threads"], max(rows), max(rows) * (context + repeats + 8) + length)
    found = {}
    for count in rows:
        model.clear()
        for row in range(count):
            model.prefill(context, row)
        taken = [model.step([(17 + row, context + at, row, True) for row in range(count)]) for at in range(repeats)]
        found[str(count)] = statistics.median(taken[2:])
    taken = []
    for _ in range(3):
        model.clear()
        taken.append(model.prefill(length, 0))
    return {**found, "prefill": min(taken)}


def perplexity(given: dict[str, Any]) -> dict[str, float]:
    ids = given["ids"]
    model = Model(given["model"], given["threads"], 1, len(ids) + 8)
    model.step([(token, at, 0, True) for at, token in enumerate(ids)])
    losses = []
    for at, token in enumerate(ids[1:]):
        pointer = llama_cpp.llama_get_logits_ith(model.context, at)
        logits = np.ctypeslib.as_array(pointer, (model.vocab_size,)).astype(np.float64)
        losses.append(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token])
    return {"perplexity": float(np.exp(np.mean(losses)))}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(perplexity(asked) if "ids" in asked else steps(asked)))
