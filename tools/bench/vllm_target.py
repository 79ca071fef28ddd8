"""vLLM in this process as a target of `aengine.bench.load_run`, for comparisons in an environment that has both."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from aengine.bench.load_run import TokenChunk


class VllmTarget:
    """vLLM's `AsyncLLM` in process, as its own server uses it."""

    name = "vLLM (in process)"

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def send(self, prompt: Sequence[int], output_tokens: int) -> AsyncGenerator[TokenChunk, None]:
        from vllm import SamplingParams as VllmParams  # type: ignore[import-not-found]
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]

        params = VllmParams(
            temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        async for output in self._llm.generate({"prompt_token_ids": list(prompt)}, params, uuid.uuid4().hex):
            ids = tuple(output.outputs[0].token_ids)
            if ids:
                yield TokenChunk(len(ids), ids)
