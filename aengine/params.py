"""Per-request parameters and their validation. Knows the ranges; does not know how they are applied.

Unset (`None`) means: the model's `generation_config`, then the engine's default. Zero means zero.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import Any

from aengine.errors import FieldViolation, InvalidRequestError

GREEDY_BELOW = 1e-5  # temperatures below this are greedy decoding
MAX_TEMPERATURE = 100.0
MAX_STOP_TOKEN_IDS = 128
MAX_UINT64 = 2**64 - 1
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is decoded. Raises `InvalidRequestError` naming every field that is out of range."""

    temperature: float | None = None
    """Finite, 0..100; below 1e-5 decoding is greedy. Default: the model's, then 1.0."""
    top_p: float | None = None
    """In (0, 1]: keep the smallest set of tokens whose probability reaches top_p. Default: the model's, then 1 (off)."""
    top_k: int | None = None
    """>= 0; keep the k most likely tokens, 0 turns it off. Default: the model's, then 0."""
    min_p: float | None = None
    """In [0, 1]: drop tokens less likely than min_p times the likeliest one. Default: the model's, then 0 (off)."""
    seed: int | None = None
    """0..2^64-1. The same seeded request gives the same tokens whatever runs beside it. Default: a fresh random one."""
    max_tokens: int | None = None
    """>= 1. Default: up to the end of the context."""
    stop_token_ids: tuple[int, ...] = ()
    """Up to 128 ids that end the sequence; the id is kept in the token ids."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids. stop_token_ids still stop."""

    def __post_init__(self) -> None:
        violations: list[FieldViolation] = []

        def convert(name: str, kind: type, low: float, high: float, *, open_low: bool = False) -> None:
            value = getattr(self, name)
            if value is None:
                return
            accepted = f"{'(' if open_low else '['}{_show(low)}, {_show(high)}]"
            try:
                if isinstance(value, bool | str):
                    raise TypeError
                number = float(value) if kind is float else operator.index(value)
            except (TypeError, ValueError):
                noun = "a number" if kind is float else "an integer"
                violations.append(FieldViolation(name, f"{value!r} is not {noun} in {accepted}"))
                return
            if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
                violations.append(FieldViolation(name, f"{number!r} is not in {accepted}"))
                return
            object.__setattr__(self, name, number)

        convert("temperature", float, 0.0, MAX_TEMPERATURE)
        convert("top_p", float, 0.0, 1.0, open_low=True)
        convert("top_k", int, 0, MAX_INT32)
        convert("min_p", float, 0.0, 1.0)
        convert("seed", int, 0, MAX_UINT64)
        convert("max_tokens", int, 1, MAX_INT32)
        if not isinstance(self.ignore_eos, bool):
            violations.append(FieldViolation("ignore_eos", f"{self.ignore_eos!r} is not true or false"))
        violations.extend(self._convert_stop_token_ids())
        if violations:
            raise InvalidRequestError(violations)

    def _convert_stop_token_ids(self) -> list[FieldViolation]:
        name = "stop_token_ids"
        try:
            ids = tuple(dict.fromkeys(operator.index(token_id) for token_id in self.stop_token_ids))
        except TypeError:
            return [FieldViolation(name, f"{self.stop_token_ids!r} is not a list of token ids")]
        if len(ids) > MAX_STOP_TOKEN_IDS:
            return [FieldViolation(name, f"{len(ids)} ids are more than {MAX_STOP_TOKEN_IDS}")]
        bad = [token_id for token_id in ids if not 0 <= token_id <= MAX_INT32]
        if bad:
            return [FieldViolation(name, f"{bad[0]} is not a token id")]
        object.__setattr__(self, name, ids)
        return []

    @property
    def greedy(self) -> bool:
        """Whether decoding is argmax; meaningful once the defaults are applied."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def with_defaults_of(self, model: SamplingParams) -> SamplingParams:
        """A copy in which temperature, top_p, top_k and min_p are set: from here, else from `model`, else the engine's default."""
        unset: dict[str, Any] = {}
        for name, default in _ENGINE_DEFAULTS.items():
            if getattr(self, name) is None:
                value = getattr(model, name)
                unset[name] = default if value is None else value
        return replace(self, **unset)


_ENGINE_DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def _show(bound: float) -> str:
    return "2^64-1" if bound == MAX_UINT64 else f"{bound:g}" if isinstance(bound, float) else str(bound)
