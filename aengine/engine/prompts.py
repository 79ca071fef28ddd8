"""What a user hands to `stream()`, checked and made into a `Request`. Every refusal names the field, the value and the range.

Pure functions over plain data; knows the model's limits and the tokenizer, nothing of streams or threads.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from aengine.checks import shown
from aengine.engine.tokenizer import PIECE_CHARACTERS, Tokenizer
from aengine.engine.workers import Steps
from aengine.errors import CapacityViolation, ContextLengthError, FieldViolation, InvalidRequestError, KVCapacityError, refusal
from aengine.outputs import ModelInfo
from aengine.params import SamplingParams
from aengine.prompt_forms import form_of, is_chat, read_token_ids
from aengine.requests import Prompt, RequestOptions
from aengine.scheduler.plan import RowParams
from aengine.scheduler.request import Request

INLINE_CHARACTERS = 1000
"""Longer texts are tokenized in a worker thread: up to here it takes well under a millisecond."""
INLINE_ENTRIES = 8192
"""Longer lists are read there too."""
QUICK_CHARACTERS = 65536
"""Longer texts are tokenized in a thread of their own."""
CHARACTERS_PER_TOKEN = 4
"""Of ordinary text, about. A text of more for each token that fits is counted before it is encoded."""

_ROW_FIELDS = (
    *("top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("banned_token_ids", "min_tokens", "logprobs", "prompt_logprobs"),
)
"""What the sampler is given as it is in the parameters."""
NEEDS_TOKENIZER = "needs a tokenizer, and this model has none"

IntArray = NDArray[np.int32]
Sequences = tuple[tuple[int, ...], ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must fit into."""

    model: ModelInfo
    kv_tokens: int  # tokens that the whole page pool holds
    max_logprobs: int

    @property
    def tokens(self) -> int:
        return min(self.model.max_model_len, self.kv_tokens)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request of which nothing is known to be wrong, but that is not tokenized."""

    params: SamplingParams  # with every default and a seed
    size: int  # of what is left to do in a worker thread, in characters; 0 where it takes well under a millisecond
    tokens: Steps[tuple[IntArray, Sequences]]  # makes the ids of the prompt, and the sequences that write the bad words


def read_request(
    prompt: Prompt, params: SamplingParams, tokenizer: Tokenizer | None, limits: Limits, violations: list[FieldViolation]
) -> ReadRequest:
    """What shows without work to be wrong with the prompt and the parameters is added to `violations`."""
    read, size, at_least = _read_prompt(prompt, limits, violations)
    if params.bad_words or len(params.allowed_token_ids or ()) > INLINE_ENTRIES:
        size = max(size, 1)
    model = limits.model
    found = _misfits(params, at_least, limits)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        ids = getattr(params, name) or ()
        if ids and max(ids) >= model.vocab_size:
            found.append(FieldViolation(name, f"{max(ids)} is not in [0, {model.vocab_size - 1}]"))
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs:
            found.append(FieldViolation(name, f"{wanted} is not in [0, {limits.max_logprobs}] (max_logprobs)"))
    if not model.tokenizer:
        wanted_text = [name for name in ("stop", "bad_words", "structured_output", "detokenize") if getattr(params, name)]
        found.extend(FieldViolation(name, f"it {NEEDS_TOKENIZER}") for name in wanted_text)
    try:
        params = params.with_defaults_of(model.generation_defaults)
    except InvalidRequestError as error:
        named = {violation.field for violation in found}
        found.extend(violation for violation in error.violations if violation.field not in named)
    violations.extend(found)
    if not violations:
        params = params.with_seed()
    return ReadRequest(params, size, _tokenize(read, params.bad_words, tokenizer, limits))


def _read_prompt(prompt: Prompt, limits: Limits, violations: list[FieldViolation]) -> tuple[Prompt | IntArray, int, int]:
    """The prompt, as an array if it is ids that are quickly read; how much is left to do, as in `ReadRequest.size`; and how many tokens the
    prompt has at least."""
    try:
        form = form_of(prompt)
        if form != "token_ids" and not limits.model.tokenizer:
            raise InvalidRequestError.of("prompt", f"a {form} {NEEDS_TOKENIZER}; give token ids")
        match form:
            case "text":
                return prompt, len(prompt) if len(prompt) > INLINE_CHARACTERS else 0, 1
            case "chat":  # never quick: the first one imports what renders it
                contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
                return prompt, QUICK_CHARACTERS + 1 + sum(len(content) for content in contents if isinstance(content, str)), 1
        num_tokens = len(prompt)
        check_fits(None, num_tokens, limits)
        if num_tokens > INLINE_ENTRIES and not isinstance(prompt, np.ndarray):
            return tuple(prompt), num_tokens, num_tokens  # type: ignore[return-value] # it is read later, and may have changed by then
        return _read_ids(prompt, limits.model), 0, num_tokens  # type: ignore[arg-type]
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return prompt, 0, 1


def _read_ids(ids: Sequence[int] | IntArray, model: ModelInfo) -> IntArray:
    array = read_token_ids(ids, model.vocab_size - 1)
    if not len(array):
        raise InvalidRequestError.of("prompt", "it is empty; at least one token is needed")
    return array.astype(np.int32)


def check_fits(params: SamplingParams | None, prompt_len: int, limits: Limits, qualified: str = "") -> None:
    """Raises `ContextLengthError` or `KVCapacityError` for a prompt that does not fit, or what `params` ask for beside it. `qualified`:
    said of the number of tokens."""
    if misfits := _misfits(params, prompt_len, limits, qualified):
        raise refusal(misfits)


def _misfits(params: SamplingParams | None, prompt_len: int, limits: Limits, qualified: str = "") -> list[FieldViolation]:
    asked = [("prompt", 1, f"{prompt_len} tokens{qualified} leave no room for a new one in")]
    if params is not None:
        text = f"beside a prompt of {prompt_len} tokens is more than what fits into"
        asked += [(name, count, f"{count} {text}") for name in ("max_tokens", "min_tokens") if (count := getattr(params, name))]
    kinds = ((ContextLengthError, "the context", limits.model.max_model_len), (KVCapacityError, "the KV cache", limits.kv_tokens))
    found: list[FieldViolation] = []
    for field, count, what in asked:
        got = prompt_len + count
        over = (
            CapacityViolation(field, f"{what} {unit} of {limit} tokens", kind, limit, got) for kind, unit, limit in kinds if got > limit
        )
        found.extend(islice(over, 1))
        if found and field == "prompt":
            break
    return found


def prepare(
    read: ReadRequest,
    keys: Sequence[int],
    options: RequestOptions,
    deadline: float | None,
    limits: Limits,
    grammar: object | None = None,
) -> Steps[list[Request]]:
    """One request for each sequence, as the scheduler takes them; all but the first are forks of it. Tokenizes whatever comes as text, and
    reads long lists.

    `deadline` is on time.monotonic. Raises `InvalidRequestError`, as soon as it shows that the prompt cannot fit.
    """
    params = read.params
    ids, bad_words = yield from read.tokens
    check_fits(params, len(ids), limits)
    model = limits.model
    eos_token_ids = frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
    stop_token_ids = frozenset(params.stop_token_ids)
    assert params.seed is not None
    assert params.temperature is not None
    assert params.top_k is not None
    row_params = RowParams(
        **{name: getattr(params, name) for name in _ROW_FIELDS},
        temperature=0.0 if params.greedy else params.temperature,
        top_k=min(params.top_k, model.vocab_size),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
        bad_words=bad_words,
        stop_ids=tuple(sorted(eos_token_ids | stop_token_ids)) if params.min_tokens else (),
        grammar=grammar,
        processors=params.logits_processors,
    )
    now = time.monotonic()
    return [
        Request(
            key=key,
            prompt=ids,
            params=row_params if not index else replace(row_params, seed=derive_seed(params.seed, index), prompt_logprobs=None),
            max_tokens=params.max_tokens or limits.tokens - len(ids),
            fills_context=params.max_tokens is None,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            priority=options.priority,
            tenant=options.tenant,
            arrival=now,
            deadline=deadline,
            cache_salt=options.cache_salt or "",
            num_forks=0 if index else len(keys) - 1,
            fork_of=keys[0] if index else None,
        )
        for index, key in enumerate(keys)
    ]


def at_once(steps: Steps[T]) -> T:
    """All steps, one after the other. Raises what they raise."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def _tokenize(
    prompt: Prompt | IntArray, bad_words: Sequence[str], tokenizer: Tokenizer | None, limits: Limits
) -> Steps[tuple[IntArray, Sequences]]:
    """What `ReadRequest.tokens` makes. Without a tokenizer there is no text in a request that was read."""
    sequences: dict[tuple[int, ...], None] = {}
    if tokenizer is not None:
        for word in bad_words:
            found = tokenizer.bad_word_ids(word)
            if not found:
                raise InvalidRequestError.of("bad_words", f"{shown(word)} has no tokens in this model's vocabulary")
            sequences.update(dict.fromkeys(found))
    if tokenizer is not None and isinstance(prompt, str):
        ids = yield from _encode(prompt, tokenizer, limits, add_special_tokens=True)
    elif tokenizer is not None and is_chat(prompt):
        text = tokenizer.chat_text(prompt)  # type: ignore[arg-type]
        yield len(text)
        ids = yield from _encode(text, tokenizer, limits, add_special_tokens=False)
    else:
        ids = prompt if isinstance(prompt, np.ndarray) else _read_ids(prompt, limits.model)  # type: ignore[arg-type]
    return ids, tuple(sequences)


def _encode(text: str, tokenizer: Tokenizer, limits: Limits, *, add_special_tokens: bool) -> Steps[IntArray]:
    """Raises `ContextLengthError` or `KVCapacityError` of a text that is much too long, before the whole is encoded."""
    if len(text) > QUICK_CHARACTERS:
        num_bytes = len(text.encode(errors="replace"))
        check_fits(None, tokenizer.least_tokens(num_bytes), limits, f" or more, for {num_bytes} bytes of text,")
    if len(text) > CHARACTERS_PER_TOKEN * limits.tokens:
        for num_pieces, at_least in enumerate(tokenizer.count_pieces(text), 1):
            check_fits(None, at_least, limits, " or more")
            yield 2 * len(text) - num_pieces * PIECE_CHARACTERS
    return _read_ids(tokenizer.encode(text, add_special_tokens=add_special_tokens), limits.model)


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` > 0 of a request: 64 bits of BLAKE2b over both. Users replay sequences by this formula, so it stays."""
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest(), "little")
