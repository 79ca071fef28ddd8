"""What a server tells of itself -> what an engine tells. Pure functions."""

from __future__ import annotations

from aengine.outputs import EngineStats, ModelInfo
from aengine.params import SamplingParams
from aengine.v1.engine_service_pb2 import Load
from aengine.v1.model_service_pb2 import Model
from aengine.wire import DEFAULTS, read_params


def read_model(message: Model) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        architecture=message.architecture,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        dtype=message.dtype,
        num_parameters=message.num_parameters,
        chat_template=message.has_chat_template,
        tokenizer=not message.without_tokenizer,
        generation_defaults=SamplingParams(**read_params(message.generation_defaults, DEFAULTS, [])),
    )


def read_load(message: Load) -> EngineStats:
    return EngineStats(
        running=message.running,
        waiting=message.waiting,
        parked=message.parked,
        pages_used=message.pages_used,
        pages_total=message.pages_total,
        cached_tokens=message.cached_tokens,
        steps=message.steps,
        preemptions=message.preemptions,
        prompt_tokens=message.prompt_tokens,
        cached_prompt_tokens=message.cached_prompt_tokens,
        completion_tokens=message.completion_tokens,
        paused=message.paused,
    )
