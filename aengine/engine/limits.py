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
from aengine.requests import NO_OUTPUT
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

    def read_known(self, outputs: Sequence[Sequence[int] | None] | None, params: SamplingParams) -> dict[int, NDArray[np.int32]]:
        """The output that sequences of a request have already, by index, of those that have some.

        Raises `InvalidRequestError` (known_outputs) for what no request with `params` can have.
        """
        if outputs is None:
            return {}
        if not self.least_output:
            raise InvalidRequestError.of("known_outputs", NO_OUTPUT)
        if len(outputs) != params.n:
            raise InvalidRequestError.of("known_outputs", f"{len(outputs)} entries are not one for each of {params.n} sequences (n)")
        most = self.model.vocab_size - 1
        known = {index: read_token_ids(ids, most, "known_outputs").astype(np.int32) for index, ids in enumerate(outputs) if ids}
        longest = max(map(len, known.values()), default=0)
        if params.max_tokens is not None and longest >= params.max_tokens:
            reason = f"an entry of {longest} tokens is not below max_tokens ({params.max_tokens}); give None for a sequence that has ended"
            raise InvalidRequestError.of("known_outputs", reason)
        return known

    def read_ids(self, ids: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """A prompt's ids. Raises `InvalidRequestError` (prompt) if there are none, or one that the model does not have."""
        array = read_token_ids(ids, self.model.vocab_size - 1)
        if not len(array):
            raise InvalidRequestError.of("prompt", "it is empty; at least one token is needed")
        return array.astype(np.int32)

    def check(self, params: SamplingParams | None, prompt_len: int, qualified: str = "", num_known: int = 0) -> None:
        """Raises `ContextLengthError` or `KVCapacityError` for a prompt that does not fit, or what `params` ask for beside it.
        `qualified`: said of the number of tokens. `num_known`: most that a sequence has of its output already."""
        if misfits := self.misfits(params, prompt_len, qualified, num_known):
            raise refusal(misfits)

    def misfits(self, params: SamplingParams | None, prompt_len: int, qualified: str = "", num_known: int = 0) -> list[FieldViolation]:
        """What `check` refuses."""
        leaves = "leave no room for a new one in" if self.least_output else "are more than what fits into"
        asked = [("prompt", self.least_output, f"{prompt_len} tokens{qualified} {leaves}")]
        if params is not None:
            text = f"beside a prompt of {prompt_len} tokens is more than what fits into"
            asked += [(name, count, f"{count} {text}") for name in ("max_tokens", "min_tokens") if (count := getattr(params, name))]
        if num_known:
            text = f"beside a prompt of {prompt_len} leave no room for a new one in"
            asked.append(("known_outputs", num_known + self.least_output, f"{num_known} tokens {text}"))
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
