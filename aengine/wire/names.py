"""The one place that ties the engine's names to those of the schema, for the server and for the client.

Tables and pure functions over messages: parameters, paths of fields, finish reasons, the reasons of errors; images of prompts. Knows
neither an engine nor gRPC.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FieldChecks
from aengine.api.outputs import FinishReason
from aengine.api.params import MOST_ENTRIES, WIRE_NAMES, SamplingParams
from aengine.api.request import DEFAULT_FPS, NamedImage, RemoteImage, Video, image_file, image_of_url
from aengine.v1 import embedding_service_pb2, generation_pb2, sampling_pb2

# Parameters of the engine by the message that carries them, with their names there.
SAMPLING: Mapping[str, str] = {
    name: wire for name, wire in WIRE_NAMES.items() if wire in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
}
STOPPING: Mapping[str, str] = {
    name: wire for name, wire in WIRE_NAMES.items() if wire in sampling_pb2.StoppingCriteria.DESCRIPTOR.fields_by_name
}
CONSTRAINTS: Mapping[str, str] = {
    **{name: name for name in ("json_schema", "json_object", "regex", "grammar")},
    "choice": "choices",
}

MAX_SESSION_REQUESTS = 4096
"""Requests of one session that have not ended."""

# What a chat has beside its messages.
CHAT: Mapping[str, str] = {
    **{name: name for name in ("tools", "add_generation_prompt", "continue_final_message", "template_kwargs")},
    "keep_history": "keep_history_ids",
}

# The parameters of which a model has defaults.
DEFAULTS: Mapping[str, str] = {name: ours for name, ours in SAMPLING.items() if name not in ("n", "max_drafts")}

# The fields of a model with the same name and meaning on both sides.
MODEL = (
    *("name", "architecture", "family", "implementation", "executor", "dtype", "max_model_len", "vocab_size"),
    *("num_parameters", "num_active_parameters", "kv_bytes_per_token", "state_bytes", "quantization"),
    *("call_format", "reasoning_format", "num_layers", "hidden_size", "pooling", "max_images", "encoder"),
)

# What limits the requests of an engine, with the same name and meaning on both sides.
LIMITS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_queued_tokens", "max_logprobs", "page_size", "num_pages"),
)

_LEAST = float(np.finfo(np.float32).smallest_subnormal)
_PROMPT = "spec.prompt"
# Where the engine's names are found in the schema. The prompt's path depends on its form.
_PATHS: Mapping[str, str] = {
    **{name: f"spec.sampling.{ours}" for name, ours in SAMPLING.items()},
    **{name: f"spec.stopping.{ours}" for name, ours in STOPPING.items()},
    **{f"structured_output.{name}": f"spec.structured_output.{ours}" for name, ours in CONSTRAINTS.items()},
    **{f"structured_output.{name}": f"spec.structured_output.{name}" for name in ("strict_formats", "exact_one_of")},
    "structured_output": "spec.structured_output",
    **{f"reasoning.{name}": f"spec.reasoning.{name}" for name in ("opening", "closing", "opened", "answer", "max_tokens")},
    "reasoning": "spec.reasoning",
    "detokenize": "spec.output.text",
    "skip_special_tokens": "spec.output.skip_special_tokens",
    "logprobs": "spec.output.logprobs.top_k",
    "prompt_logprobs": "spec.output.prompt_logprobs.top_k",
    "prompt_logprobs_from": "spec.output.prompt_logprobs_from",
    "receipt": "spec.output.receipt",
    "timeout": "spec.stopping.time_limit",
    "cache_salt": "spec.cache.salt",
    "session": "spec.cache.session",
    "adapter": "spec.adapter",
    "known_outputs": "spec.known_outputs",
    "at": f"{_PROMPT}.fork.at",
    "index": f"{_PROMPT}.fork.sequence_index",
    "priority": "spec.priority",
    "tenant": "spec.tenant",
    **{name: f"{_PROMPT}.chat.{theirs}" for name, theirs in CHAT.items()},
    **{name: f"spec.output.chat.{name}" for name in ("tool_choice", "max_reasoning_tokens", "format.calls", "format.reasoning")},
}
_FIELDS: Mapping[str, str] = {path.removeprefix("spec."): name for name, path in _PATHS.items()}
_INPUT = re.compile(r"inputs\[\d+\]")  # a prompt of several

POOLINGS: Mapping[int, str] = {
    embedding_service_pb2.Pooling.Value(f"POOLING_{name.upper()}"): name for name in ("last", "mean", "cls", "label")
}

# ERROR has no counterpart: a request that fails ends its call with a status.
FINISH_REASONS: Mapping[FinishReason, generation_pb2.FinishReason.ValueType] = {
    reason: generation_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason if reason is not FinishReason.ERROR
}

DOMAIN = "aengine"
"""Of ErrorInfo."""
PUSHBACK_KEY = "grpc-retry-pushback-ms"
"""Metadata in which a server tells when to try again; part of gRPC's retry protocol."""


def path_of(field: str, spec: generation_pb2.GenerationSpec) -> str:
    """Where the engine's `field` is found in a request with `spec`; a name that is not in the schema stays as it is."""
    if field == "prompt":
        return f"{_PROMPT}.{spec.prompt.WhichOneof('content')}"
    # What a request has of these without a field of its own was made from the options of its chat.
    if field.startswith("structured_output") and not spec.HasField("structured_output"):
        return f"{_PROMPT}.chat.tools"
    if field.startswith("reasoning") and not spec.HasField("reasoning"):
        return "spec.output.chat"
    return _PATHS.get(field, field)


def field_of(path: str) -> str:
    """The engine's name for what is found at `path`; a path that the engine has no name for stays as it is."""
    found = _INPUT.sub("prompt", path.removeprefix("spec."), 1)
    return _FIELDS.get(found, "prompt" if found == "prompt" or found.startswith("prompt.") else path)


def read_params(message: Message, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the engine's parameters that are set in `message`; `names` maps their names to those of the message. Lists that hold too
    much stay as they are: `SamplingParams` refuses them by their length."""
    values = {field.name: (field, value) for field, value in message.ListFields()}
    given: dict[str, Any] = {}
    for name, ours in names.items():
        if ours not in values:
            continue
        field, value = values[ours]
        too_many = name in MOST_ENTRIES and len(value) > MOST_ENTRIES[name]
        given[name] = value if too_many else _plain(field, value)
    return given


def write_params(params: SamplingParams, names: Mapping[str, str], message: Message) -> None:
    """Set those of the parameters `names` in `message` that are known, in place of what is there."""
    for name, ours in names.items():
        value = getattr(params, name)
        if value is None:
            continue
        if isinstance(value, int | float):
            setattr(message, ours, value)
            if value > 0 and getattr(message, ours) == 0:  # in float32, where zero may be refused or mean something else
                setattr(message, ours, _LEAST)
            continue
        message.ClearField(ours)
        target = getattr(message, ours)
        if isinstance(target, Message):
            target.MergeFrom(type(target)(**asdict(value)))
        else:
            (target.update if isinstance(value, Mapping) else target.extend)(value)


def seconds_of(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def _plain(field: FieldDescriptor, value: Any) -> Any:
    match value:
        case float():
            return _shortest(value)
        case Message():
            return {each.name: number for each, number in value.ListFields()}
        case Mapping():
            return {key: _shortest(number) for key, number in value.items()}
        case bool() | int():
            return value
    return np.asarray(value) if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else tuple(value)


def _shortest(value: float) -> float:
    """The shortest decimal that rounds to the same float32, so that 0.7 on the wire is the 0.7 of a caller in process."""
    return float(str(np.float32(value)))


def images_in(chat: generation_pb2.ChatPrompt) -> list[generation_pb2.Image]:
    """The images of a chat, in their order."""
    return [part.image for message in chat.messages for part in message.parts if part.HasField("image")]


def write_image(image: Any) -> generation_pb2.Image:
    if isinstance(image, NamedImage):
        image = image.image
    if isinstance(image, RemoteImage):
        return generation_pb2.Image(url=image.url)
    if isinstance(image, Video):
        return generation_pb2.Image(frames=generation_pb2.Frames(images=map(write_image, image.frames), per_second=image.fps))
    return generation_pb2.Image(data=image_file(image))


def read_image(image: generation_pb2.Image, path: str, check: FieldChecks) -> bytes | RemoteImage | Video:
    match image.WhichOneof("source"):
        case "data":
            return image.data
        case "url":
            try:
                return image_of_url(image.url)
            except ValueError as error:
                check.add_violation(f"{path}.url", str(error))
        case "frames":
            return _read_frames(image.frames, f"{path}.frames", check)
        case None:
            check.add_violation(path, "exactly one of data, url, frames must be set")
    return b""


def _read_frames(frames: generation_pb2.Frames, path: str, check: FieldChecks) -> bytes | Video:
    of_frames = enumerate(frames.images)
    found = [b"" if image.HasField("frames") else read_image(image, f"{path}.images[{index}]", check) for index, image in of_frames]
    if any(image.HasField("frames") for image in frames.images):
        check.add_violation(f"{path}.images", "a frame is no video")
    try:
        return Video(found, frames.per_second if frames.HasField("per_second") else DEFAULT_FPS)
    except InvalidRequestError as error:
        check.add_violation(path, error.violations[0].description)
    return b""
