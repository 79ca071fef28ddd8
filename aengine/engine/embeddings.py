"""An embedding, from the request that it asks for to its values. Pure functions; knows nothing of streams."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from aengine.engine.stream_state import StreamState
from aengine.errors import FieldViolation, InvalidRequestError, RequestEndedError
from aengine.outputs import Embedding, FinishReason, ModelInfo
from aengine.params import EmbeddingParams, SamplingParams

NO_OUTPUT = SamplingParams(
    temperature=0.0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    presence_penalty=0.0,
    frequency_penalty=0.0,
    repetition_penalty=1.0,
    detokenize=False,
)
"""Of a request without output: nothing is left to the model's defaults."""
_LEAST_NORM = 1e-12  # as torch.nn.functional.normalize


def read_embedding(model: ModelInfo, violations: list[FieldViolation], **fields: Any) -> EmbeddingParams:
    """`EmbeddingParams` of these fields, with the pooling in use. Adds what is wrong with them, or not possible with the model, to
    `violations`."""
    try:
        params = EmbeddingParams(**fields)
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return EmbeddingParams(pooling="last")
    pooling = params.pooling or model.pooling
    if pooling not in ("last", "mean"):
        violations.append(FieldViolation("pooling", f"that of the checkpoint is {pooling}, which is not supported; choose last or mean"))
    if params.dimensions is not None and params.dimensions > model.hidden_size:
        violations.append(FieldViolation("dimensions", f"{params.dimensions} is not in [1, {model.hidden_size}]"))
    return replace(params, pooling="last" if violations else pooling)


def embedding_of(state: StreamState, params: EmbeddingParams, reason: FinishReason | None) -> Embedding:
    """Of a request that has ended for `reason`. Raises `RequestEndedError` if it has not come to its end."""
    values = state.pooled
    if reason is not FinishReason.MAX_TOKENS or values is None:
        why = "its timeout passed" if reason is FinishReason.DEADLINE else "it was cancelled"
        raise RequestEndedError(f"request {state.request_id!r} has no embedding: {why}")
    values = (values / np.float32(state.prompt_tokens) if params.pooling == "mean" else values)[: params.dimensions]
    if params.normalize:
        values = values / max(np.linalg.norm(values), np.float32(_LEAST_NORM))
    return Embedding(values, state.prompt_tokens, state.cached_prompt_tokens)
