"""The checks of `stream()`: what shows without work to be wrong with a prompt and parameters. Every violation names field, value and range.

Pure functions over plain data; knows the model's limits, nothing of tokenizers, streams or threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aengine.engine.limits import Limits
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.params import SamplingParams
from aengine.requests import Form, Prompt, RequestOptions, form_of

INLINE_CHARACTERS = 1000
"""Longer texts are tokenized in a worker thread: up to here it takes well under a millisecond."""
INLINE_OUTPUT = 32
"""Tokens of known outputs: more are decoded there."""
INLINE_ENTRIES = 8192
"""Longer lists are read there too."""
QUICK_CHARACTERS = 65536
"""Longer texts are tokenized in a thread of their own."""
NEEDS_TOKENIZER = "needs a tokenizer, and this model has none"


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request of which nothing is known to be wrong, but that is not tokenized."""

    form: Form
    prompt: Prompt | NDArray[np.int32]  # an array if it is ids that are quickly read
    params: SamplingParams  # with every default and a seed
    size: int  # of what is left to do in a worker thread, in characters; 0 where it takes well under a millisecond
    known: Mapping[int, NDArray[np.int32]]  # output that sequences have already, by index, of those that have some
    pooling: str | None = None  # as of `RowParams`: then there is no output, and most parameters mean nothing


def check_request(
    prompt: Prompt, params: SamplingParams, options: RequestOptions | None, limits: Limits, violations: list[FieldViolation]
) -> CheckedRequest:
    """Adds to `violations`; only if there are none, the result is what it says. `options`: None if they are known to be wrong."""
    form, size, at_least, checked = _check_prompt(prompt, options, limits, violations)
    if params.bad_words or len(params.allowed_token_ids or ()) > INLINE_ENTRIES:
        size = max(size, 1)
    model = limits.model
    found = limits.misfits(params, at_least)
    for name in ("stop_token_ids", "allowed_token_ids", "banned_token_ids", "logit_bias"):
        ids = getattr(params, name) or ()
        if ids and max(ids) >= model.vocab_size:
            found.append(FieldViolation(name, f"{max(ids)} is not in [0, {model.vocab_size - 1}]"))
    for name in ("logprobs", "prompt_logprobs"):
        wanted = getattr(params, name)
        if wanted is not None and wanted > limits.max_logprobs:
            found.append(FieldViolation(name, f"{wanted} is not in [0, {limits.max_logprobs}] (max_logprobs)"))
    if not model.output_head and limits.least_output:
        found.append(FieldViolation("prompt", "the model only makes embeddings: its checkpoint has no output head"))
    if not model.tokenizer:
        wanted_text = [name for name in ("stop", "bad_words", "structured_output", "reasoning", "detokenize") if getattr(params, name)]
        found.extend(FieldViolation(name, f"it {NEEDS_TOKENIZER}") for name in wanted_text)
    try:
        params = params.with_defaults_of(model.generation_defaults)
    except InvalidRequestError as error:
        named = {violation.field for violation in found}
        found.extend(violation for violation in error.violations if violation.field not in named)
    known: Mapping[int, NDArray[np.int32]] = {}
    try:
        known = limits.read_known(None if options is None else options.known_outputs, params)
    except InvalidRequestError as error:
        found.extend(error.violations)
    violations.extend(found)
    if (num_known := sum(map(len, known.values()))) > INLINE_OUTPUT:
        size += num_known
    return CheckedRequest(form, checked, params if violations else params.with_seed(), size, known)


def _check_prompt(
    prompt: Prompt, options: RequestOptions | None, limits: Limits, violations: list[FieldViolation]
) -> tuple[Form, int, int, Prompt | NDArray[np.int32]]:
    """The form; what is left to do and the prompt as in `CheckedRequest`, and between these how many tokens there are at least."""
    form: Form = "text"
    try:
        form = form_of(prompt, options)
        if form != "token_ids" and not limits.model.tokenizer:
            raise InvalidRequestError.of("prompt", f"a {form} {NEEDS_TOKENIZER}; give token ids")
        if form == "text":
            return form, len(prompt) if len(prompt) > INLINE_CHARACTERS else 0, 1, prompt
        if form == "chat":  # never quick: the first one imports what renders it
            contents = (message.get("content") for message in prompt if isinstance(message, Mapping))
            return form, QUICK_CHARACTERS + 1 + sum(len(content) for content in contents if isinstance(content, str)), 1, tuple(prompt)  # type: ignore[return-value]
        num_tokens = len(prompt)
        limits.check(None, num_tokens)
        if num_tokens > INLINE_ENTRIES and not isinstance(prompt, np.ndarray):
            return form, num_tokens, num_tokens, tuple(prompt)  # type: ignore[return-value] # it is read later, and may have changed by then
        return form, 0, num_tokens, limits.read_ids(prompt)  # type: ignore[arg-type]
    except InvalidRequestError as error:
        violations.extend(error.violations)
        return form, 0, 1, prompt
