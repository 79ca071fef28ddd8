"""What a user hands to `stream()`, checked and made into a `Request`. Every refusal names the field, the value and the range.

Pure functions over plain data; knows the model's limits and the tokenizer, nothing of streams or threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from aengine.engine.tokenizer import Tokenizer
from aengine.errors import ContextLengthError, FieldViolation, InvalidRequestError, KVCapacityError
from aengine.outputs import ModelInfo
from aengine.params import SamplingParams
from aengine.requests import Prompt, check_options, is_chat
from aengine.scheduler import Request, RowParams

INLINE_CHARACTERS = 1000
"""Longer texts are tokenized in a worker thread: up to here it takes well under a millisecond."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into."""

    model: ModelInfo
    kv_tokens: int  # tokens that the whole page pool holds
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Options:
    """The keyword arguments of `stream()`, checked."""

    priority: int
    tenant: str
    deadline: float | None  # on time.monotonic
    cache_salt: str


def read_options(
    *, request_id: str | None, priority: int, tenant: str, timeout: float | None, cache_salt: str | None, now: float
) -> Options:
    """Raises `InvalidRequestError` naming every argument that is out of range."""
    check_options(request_id=request_id, priority=priority, tenant=tenant, timeout=timeout, cache_salt=cache_salt)
    return Options(priority, tenant, None if timeout is None else now + timeout, cache_salt or "")


def needs_worker(prompt: Prompt) -> bool:
    """Whether encoding the prompt takes long enough to keep it off the event loop."""
    if isinstance(prompt, str):
        return len(prompt) > INLINE_CHARACTERS
    return is_chat(prompt)


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer, model: ModelInfo) -> NDArray[np.int32]:
    """The prompt's token ids, at least one, each below the model's vocabulary size. Raises `InvalidRequestError`."""
    ids: Sequence[int]
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt)
    elif isinstance(prompt, bytes | Mapping) or not isinstance(prompt, Sequence | np.ndarray):
        raise _refused("prompt", f"a {type(prompt).__name__} is not a string, a list of token ids or a list of chat messages")
    elif is_chat(prompt):
        ids = tokenizer.render_chat(prompt)  # type: ignore[arg-type]
    else:
        ids = prompt  # type: ignore[assignment]
    if not len(ids):
        raise _refused("prompt", "it is empty; at least one token is needed")
    try:
        array = np.asarray(ids)
    except ValueError:
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _refused("prompt", "token ids must be integers")
    outside = array[(array < 0) | (array >= model.vocab_size)]
    if len(outside):
        raise _refused("prompt", f"token id {int(outside[0])} is not in [0, {model.vocab_size - 1}]")
    return array.astype(np.int32)


def effective_params(params: SamplingParams, prompt_len: int, limits: Limits) -> SamplingParams:
    """`params` with every default applied. Raises `InvalidRequestError` for what this model or this engine cannot do."""
    model = limits.model
    _check_fits("prompt", prompt_len + 1, limits, f"{prompt_len} tokens leave no room for a new one in")
    for name, wanted in (("max_tokens", params.max_tokens or 0), ("min_tokens", params.min_tokens)):
        _check_fits(name, prompt_len + wanted, limits, f"{wanted} beside a prompt of {prompt_len} tokens is more than what fits into")
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        outside = [token_id for token_id in getattr(params, name) or () if token_id >= model.vocab_size]
        if outside:
            raise _refused(name, f"{outside[0]} is not in [0, {model.vocab_size - 1}]")
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs:
            raise _refused(name, f"{wanted} is not in [0, {limits.max_logprobs}] (max_logprobs)")
    return params.with_defaults_of(model.generation_defaults)


def _check_fits(field: str, num_tokens: int, limits: Limits, what: str) -> None:
    """Raises `ContextLengthError` or `KVCapacityError` if so many tokens can never be computed."""
    for kind, unit, limit in (
        (ContextLengthError, "the context", limits.model.max_model_len),
        (KVCapacityError, "the KV cache", limits.kv_tokens),
    ):
        if num_tokens > limit:
            raise kind((FieldViolation(field, f"{what} {unit} of {limit} tokens"),), limit, num_tokens)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a worker thread made of a request."""

    prompt: NDArray[np.int32]
    bad_words: tuple[tuple[int, ...], ...]
    grammar: object | None


def prepare(prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer, model: ModelInfo, grammar: object | None = None) -> Prepared:
    """Tokenize whatever a request brings as text. Raises `InvalidRequestError`."""
    bad_words: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        sequences = tokenizer.bad_word_ids(word)
        if not sequences:
            raise _refused("bad_words", f"{word!r} has no tokens in this model's vocabulary")
        bad_words.update(dict.fromkeys(sequences))
    return Prepared(encode_prompt(prompt, tokenizer, model), tuple(bad_words), grammar)


def make_requests(
    keys: Sequence[int], prepared: Prepared, params: SamplingParams, options: Options, limits: Limits, now: float
) -> list[Request]:
    """One request for each sequence, as the scheduler takes them; all but the first are forks of it. `params` are effective."""
    model, prompt = limits.model, prepared.prompt
    eos_token_ids = frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
    stop_token_ids = frozenset(params.stop_token_ids)
    room = min(model.max_model_len, limits.kv_tokens) - len(prompt)
    assert params.seed is not None
    row_params = RowParams(
        temperature=0.0 if params.greedy else _set(params.temperature),
        top_k=min(int(_set(params.top_k)), model.vocab_size),
        top_p=_set(params.top_p),
        min_p=_set(params.min_p),
        seed=params.seed,
        presence_penalty=_set(params.presence_penalty),
        frequency_penalty=_set(params.frequency_penalty),
        repetition_penalty=_set(params.repetition_penalty),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
        bad_words=prepared.bad_words,
        min_tokens=params.min_tokens,
        stop_ids=tuple(sorted(eos_token_ids | stop_token_ids)) if params.min_tokens else (),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        grammar=prepared.grammar,
        processors=params.logits_processors,
    )
    return [
        Request(
            key=key,
            prompt=prompt,
            params=row_params if not index else replace(row_params, seed=derive_seed(params.seed, index), prompt_logprobs=None),
            max_tokens=params.max_tokens or room,
            fills_context=params.max_tokens is None,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            priority=options.priority,
            tenant=options.tenant,
            arrival=now,
            deadline=options.deadline,
            cache_salt=options.cache_salt,
            num_forks=0 if index else len(keys) - 1,
            fork_of=keys[0] if index else None,
        )
        for index, key in enumerate(keys)
    ]


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` > 0 of a request: 64 bits of BLAKE2b over both. Users replay sequences by this formula, so it stays."""
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest(), "little")


def _set(value: float | None) -> float:
    assert value is not None, "defaults are applied"
    return value


def _refused(field: str, description: str) -> InvalidRequestError:
    return InvalidRequestError((FieldViolation(field, description),))
