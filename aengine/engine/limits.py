"""`Limits`: what a request must fit into, and the refusal of one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from aengine.errors import CapacityViolation, ContextLengthError, FieldViolation, InvalidRequestError, KVCapacityError, refusal
from aengine.outputs import ModelInfo
from aengine.params import SamplingParams
from aengine.token_ids import read_token_ids


@dataclass(frozen=True, slots=True)
class Limits:
    """Those of one engine."""

    model: ModelInfo
    kv_tokens: int  # of the longest sequence that the page pool holds
    max_logprobs: int
    least_output: int = 1  # tokens, that a prompt leaves room for

    @property
    def tokens(self) -> int:
        return min(self.model.max_model_len, self.kv_tokens)

    def without_output(self) -> Limits:
        """For a request that gets no token."""
        return replace(self, least_output=0)

    def read_ids(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """A prompt's ids. Raises `InvalidRequestError` (prompt) if there are none, or one that the model does not have."""
        array = read_token_ids(ids, self.model.vocab_size - 1)
        if not len(array):
            raise InvalidRequestError.of("prompt", "it is empty; at least one token is needed")
        return array.astype(np.int32)

    def check(self, params: SamplingParams | None, prompt_len: int, qualified: str = "") -> None:
        """Raises `ContextLengthError` or `KVCapacityError` for a prompt that does not fit, or what `params` ask for beside it.
        `qualified`: said of the number of tokens."""
        if misfits := self.misfits(params, prompt_len, qualified):
            raise refusal(misfits)

    def misfits(self, params: SamplingParams | None, prompt_len: int, qualified: str = "") -> list[FieldViolation]:
        """What `check` refuses."""
        leaves = "leave no room for a new one in" if self.least_output else "are more than what fits into"
        asked = [("prompt", self.least_output, f"{prompt_len} tokens{qualified} {leaves}")]
        if params is not None:
            text = f"beside a prompt of {prompt_len} tokens is more than what fits into"
            asked += [(name, count, f"{count} {text}") for name in ("max_tokens", "min_tokens") if (count := getattr(params, name))]
        kinds = ((ContextLengthError, "the context", self.model.max_model_len), (KVCapacityError, "the KV cache", self.kv_tokens))
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
