"""A checked request becomes the `Request`s that the scheduler takes: its text is tokenized, its ids are read, its parameters put into the
form of the sampler.

Pure functions over plain data, in steps for a worker thread; knows nothing of streams.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np

from aengine.chat_prompts import ChatOptions
from aengine.checks import shown
from aengine.engine.limits import Limits
from aengine.engine.prompts import QUICK_CHARACTERS, CheckedRequest
from aengine.engine.tokenizer import PIECE_CHARACTERS, Tokenizer
from aengine.engine.workers import Steps
from aengine.errors import InvalidRequestError
from aengine.requests import RequestOptions
from aengine.scheduler.plan import NO_INTS, RowParams
from aengine.scheduler.request import Request

CHARACTERS_PER_TOKEN = 4
"""Of ordinary text, about. A text of more for each token that fits is counted before it is encoded."""

_ROW_FIELDS = (
    *("top_p", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("banned_token_ids", "min_tokens", "logprobs", "prompt_logprobs"),
)
"""What the sampler is given as it is in the parameters."""


def prepare(
    request: CheckedRequest,
    tokenizer: Tokenizer | None,
    limits: Limits,
    sequences: Sequence[tuple[int, int]],
    options: RequestOptions,
    deadline: float | None,
    grammar: object | None = None,
    adapter: int = 0,
) -> Steps[list[Request]]:
    """One request for each sequence, as the scheduler takes them; all but the first are forks of it.

    `sequences`: the index and the key of each that gets tokens. `adapter` is its key. `deadline` is on time.monotonic. Raises
    `InvalidRequestError`, as soon as it shows that the prompt cannot fit.
    """
    params, prompt = request.params, request.prompt
    bad_words: dict[tuple[int, ...], None] = {}
    if tokenizer is not None:
        for word in params.bad_words:
            spellings = tokenizer.bad_word_ids(word)
            if not spellings:
                raise InvalidRequestError.of("bad_words", f"{shown(word)} has no tokens in this model's vocabulary")
            bad_words.update(dict.fromkeys(spellings))
        if request.form == "chat":
            prompt = tokenizer.chat_text(prompt, options)  # type: ignore[arg-type]
            yield len(prompt)
        if isinstance(prompt, str):
            prompt = yield from encode_text(prompt, tokenizer, limits, add_special_tokens=request.form == "text")
    ids = prompt if isinstance(prompt, np.ndarray) else limits.read_ids(prompt)  # type: ignore[arg-type] # no text by now
    limits.check(params, len(ids), num_known=max(map(len, request.known.values()), default=0))
    model = limits.model
    eos_token_ids = frozenset() if params.ignore_eos else frozenset(model.eos_token_ids)
    stop_token_ids = frozenset(params.stop_token_ids)
    assert params.seed is not None
    assert params.temperature is not None
    assert params.top_k is not None
    budget = params.reasoning.max_tokens if params.reasoning is not None and params.structured_output is None else None
    row_params = RowParams(
        **{name: getattr(params, name) for name in _ROW_FIELDS},
        temperature=0.0 if params.greedy else params.temperature,
        top_k=min(params.top_k, model.vocab_size),
        logit_bias=tuple(params.logit_bias.items()),
        allowed_token_ids=None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64),
        bad_words=tuple(bad_words),
        stop_ids=tuple(sorted(eos_token_ids | stop_token_ids)) if params.min_tokens else (),
        grammar=grammar,
        grammar_from=min(budget or 0, limits.tokens),
        processors=params.logits_processors,
        pooling=request.pooling,
    )
    most_tokens = 0 if request.pooling is not None else params.max_tokens or limits.tokens - len(ids)
    now, (_, first) = time.monotonic(), sequences[0]
    return [
        Request(
            key=key,
            prompt=ids,
            output=request.known.get(index, NO_INTS),
            params=replace(
                row_params,
                seed=derive_seed(params.seed, index) if index else params.seed,
                prompt_logprobs=params.prompt_logprobs if key == first else None,
            ),
            max_tokens=most_tokens,
            fills_context=params.max_tokens is None,
            stop_token_ids=stop_token_ids,
            eos_token_ids=eos_token_ids,
            priority=options.priority,
            tenant=options.tenant,
            arrival=now,
            deadline=deadline,
            cache_salt=options.cache_salt or "",
            adapter=adapter,
            max_drafts=params.max_drafts,
            num_forks=len(sequences) - 1 if key == first else 0,
            fork_of=None if key == first else first,
        )
        for index, key in sequences
    ]


def encode_text(text: str, tokenizer: Tokenizer, limits: Limits | None, *, add_special_tokens: bool) -> Steps[list[int]]:
    """With `limits` it is a prompt. Raises `ContextLengthError` or `KVCapacityError` of one that is much too long, before the whole is
    encoded."""
    if limits is not None and len(text) > QUICK_CHARACTERS:
        num_bytes = len(text.encode(errors="replace"))
        limits.check(None, tokenizer.least_tokens(num_bytes), f" or more, for {num_bytes} bytes of text,")
    if limits is not None and len(text) > CHARACTERS_PER_TOKEN * limits.tokens:
        for num_pieces, at_least in enumerate(tokenizer.count_pieces(text), 1):
            limits.check(None, at_least, " or more")
            yield 2 * len(text) - num_pieces * PIECE_CHARACTERS
    return tokenizer.encode(text, add_special_tokens=add_special_tokens)


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, options: ChatOptions) -> Steps[str]:
    return tokenizer.chat_text(messages, options)
    yield


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` > 0 of a request: 64 bits of BLAKE2b over both. Users replay sequences by this formula, so it stays."""
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest(), "little")
