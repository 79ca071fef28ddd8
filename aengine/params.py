"""Per-request parameters and their validation. Knows the ranges; does not know how they are applied.

Unset (`None`) means: the model's `generation_config`, then the engine's default. Zero means zero.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sized
from copy import copy
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

from aengine.checks import MAX_UINT64, FieldChecks, shown, to_float, to_int
from aengine.errors import FieldViolation, InvalidRequestError

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # temperatures below this are greedy decoding
MAX_TEMPERATURE = 100.0
MAX_N = 128
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MOST_ENTRIES: Mapping[str, int] = {
    "stop": 16,
    "stop_token_ids": 128,
    "bad_words": 64,
    "banned_token_ids": 1024,
    "allowed_token_ids": 1 << 18,
    "logit_bias": 1024,
}
"""Of the fields that hold several, repeated ones counted: looked at before the entries are."""
MAX_STRING_BYTES = 256
MAX_CHOICES = 4096
MOST_GRAMMAR_BYTES: Mapping[str, int] = {"json_schema": 1 << 20, "regex": 1 << 13, "choice": 1 << 18, "grammar": 1 << 15}
"""Of UTF-8, all choices together: what takes some tenths of a second to compile at most."""
MAX_INT32 = 2**31 - 1


class LogitsProcessor(Protocol):
    """Custom code of an in-process user that may change the logits of a request before its next token is sampled.

    It runs in the step thread, once per step and sequence, after the built-in processors and before temperature. What it raises
    fails the request, and no other.
    """

    def __call__(self, logits: torch.Tensor, token_ids: list[int]) -> None:
        """`logits`: [vocab_size] float32, a view to be changed in place; minus infinity rules a token out, and more than 1e30 counts as
        1e30. `token_ids`: prompt and output so far."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What the output must look like. Exactly one field is set; a schema that does not compile is refused with the reason."""

    json_schema: str | Mapping[str, Any] | None = None
    """A JSON Schema, as JSON text of up to 1 MiB or as a mapping. A keyword that cannot be enforced is refused by its name."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """The whole output matches this regular expression of up to 8 KiB, without looking around or referring back."""
    choice: tuple[str, ...] = ()
    """The output is one of these strings: 1..4096, together at most 256 KiB of UTF-8."""
    grammar: str | None = None
    """An EBNF grammar in the notation of llama.cpp (GBNF) of up to 32 KiB; its start rule is `root`. The output matches it, and may be
    narrower: in rules that recur, literals and classes match as much as they can."""

    def __post_init__(self) -> None:
        name = "structured_output"
        if isinstance(self.choice, list) and len(self.choice) <= MAX_CHOICES:
            object.__setattr__(self, "choice", tuple(self.choice))
        if not isinstance(self.json_object, bool):
            raise InvalidRequestError.of(f"{name}.json_object", f"{shown(self.json_object)} is not true or false")
        given = [one.name for one in fields(self) if getattr(self, one.name) not in (None, False, ())]
        if len(given) != 1:
            raise InvalidRequestError.of(
                name, f"exactly one of json_schema, json_object, regex, choice, grammar must be set, not {given or 'none'}"
            )
        if isinstance(self.json_schema, Mapping):
            try:
                object.__setattr__(self, "json_schema", json.dumps(dict(self.json_schema), allow_nan=False))
            except (TypeError, ValueError, RecursionError) as error:
                raise InvalidRequestError.of(f"{name}.json_schema", f"is not JSON: {error}") from error
        for kind in ("json_schema", "regex", "grammar"):
            value = getattr(self, kind)
            if value is not None and not 1 <= _text_bytes(value) <= MOST_GRAMMAR_BYTES[kind]:
                raise InvalidRequestError.of(f"{name}.{kind}", f"must be a string of 1 to {MOST_GRAMMAR_BYTES[kind]} bytes of UTF-8")
        if self.choice:
            self._check_choices(f"{name}.choice")

    def _check_choices(self, name: str) -> None:
        if isinstance(self.choice, tuple | list) and len(self.choice) > MAX_CHOICES:
            raise InvalidRequestError.of(name, f"{len(self.choice)} choices are more than {MAX_CHOICES}")
        sizes = [_text_bytes(one) for one in self.choice] if isinstance(self.choice, tuple) else [0]
        if not all(sizes):
            raise InvalidRequestError.of(name, "must be strings of at least 1 byte of UTF-8")
        if sum(sizes) > MOST_GRAMMAR_BYTES["choice"]:
            raise InvalidRequestError.of(name, f"{sum(sizes)} bytes of UTF-8 together are more than {MOST_GRAMMAR_BYTES['choice']}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is decoded. Raises `InvalidRequestError` naming every field that is out of range.

    None leaves any field but `n`, `min_tokens` and the flags as it is by default. Lists are counted, repeated entries too, before they
    are read.
    """

    temperature: float | None = None
    """0..100; below 1e-5 decoding is greedy. Default: the model's, then 1.0."""
    top_p: float | None = None
    """In (0, 1]: keep the smallest set of tokens whose probability reaches top_p. Default: the model's, then 1 (off)."""
    top_k: int | None = None
    """>= 0; keep the k most likely tokens, 0 (or -1) turns it off. Default: the model's, then 0."""
    min_p: float | None = None
    """In [0, 1]: drop tokens less likely than min_p times the likeliest one. Default: the model's, then 0 (off)."""
    seed: int | None = None
    """0..2^64-1. The same seeded request gives the same tokens whatever runs beside it, on CUDA and in plain torch up to the rounding of
    logits. Default: a fresh random one."""
    n: int = 1
    """1..128 sequences; more than one is refused with greedy decoding. Sequence 0 has `seed`; the seed of sequence i > 0 is the 8-byte
    BLAKE2b of `seed` (8 bytes) and i (4 bytes), all little-endian: with it, a request with n=1 gets the same tokens."""
    presence_penalty: float | None = None
    """In [-2, 2]: subtracted from the logits of tokens that the output holds. Default: 0."""
    frequency_penalty: float | None = None
    """In [-2, 2]: subtracted once for every time that the output holds the token. Default: 0."""
    repetition_penalty: float | None = None
    """In (0, 2]: divides positive and multiplies negative logits of tokens in prompt or output. Default: the model's, then 1 (off)."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Up to 1024 token ids, and the numbers in [-100, 100] to add to their logits."""
    allowed_token_ids: tuple[int, ...] | None = None
    """1 to 262144 ids: only these can be sampled. Default: all."""
    banned_token_ids: tuple[int, ...] = ()
    """Up to 1024 ids that are never sampled."""
    bad_words: tuple[str, ...] = ()
    """Up to 64 strings of 1..256 bytes whose token sequences, with and without a leading space, are never completed."""
    max_tokens: int | None = None
    """Most tokens to generate, >= 1. Default: up to the end of the context."""
    min_tokens: int = 0
    """0..max_tokens: before it has so many tokens, no end-of-sequence id, stop token or stop string ends the sequence."""
    stop: tuple[str, ...] = ()
    """Up to 16 strings of 1..256 bytes that end the sequence where the earliest of them begins (a single string is taken too). The text
    of an end-of-sequence id or stop token that ends the sequence is not searched: such an end is EOS or STOP_TOKEN."""
    stop_token_ids: tuple[int, ...] = ()
    """Up to 128 ids that end the sequence; the id is kept in the token ids, not in the text."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids. stop_token_ids still stop."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: bool | None = None
    """Whether to make text at all; stop strings need it. Default: where the model has a tokenizer."""
    logprobs: int | None = None
    """0..max_logprobs: report the logprob and rank of each token, and this many most likely alternatives. Default: nothing."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on."""
    structured_output: StructuredOutput | None = None
    """A grammar that the output must match."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Callables that change the logits before each token, for requests in this process only."""

    def __post_init__(self) -> None:
        check = _ParamChecks(self)
        check.number("temperature", float, 0.0, MAX_TEMPERATURE)
        check.number("top_p", float, 0.0, 1.0, open_low=True)
        if self.top_k == -1:  # off, in the words of others
            object.__setattr__(self, "top_k", 0)
        check.number("top_k", int, 0, MAX_INT32)
        check.number("min_p", float, 0.0, 1.0)
        check.number("seed", int, 0, MAX_UINT64)
        check.number("n", int, 1, MAX_N, optional=False)
        check.number("presence_penalty", float, -MAX_PENALTY, MAX_PENALTY)
        check.number("frequency_penalty", float, -MAX_PENALTY, MAX_PENALTY)
        check.number("repetition_penalty", float, 0.0, MAX_PENALTY, open_low=True)
        check.number("max_tokens", int, 1, MAX_INT32)
        check.number("min_tokens", int, 0, MAX_INT32, optional=False)
        check.number("logprobs", int, 0, MAX_INT32)
        check.number("prompt_logprobs", int, 0, MAX_INT32)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check.flag(name)
        check.flag("detokenize", optional=True)
        check.token_ids("stop_token_ids")
        check.token_ids("banned_token_ids")
        if self.allowed_token_ids is not None:
            check.token_ids("allowed_token_ids")
        check.strings("stop")
        check.strings("bad_words")
        check.biases("logit_bias")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            check.add("structured_output", f"a {type(self.structured_output).__name__} is not StructuredOutput")
        check.callables("logits_processors")
        if not check.violations:
            self._check_together(check)
        check.finish(InvalidRequestError)

    def _check_together(self, check: _ParamChecks) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            check.add("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if self.stop and self.detokenize is False:
            check.add("stop", "stop strings need detokenize")
        if self.structured_output is not None and self.ignore_eos:
            check.add("ignore_eos", "structured output ends with an end-of-sequence id")
        if self.n > 1 and self.greedy:
            check.add("n", f"{self.n} greedy sequences would be the same")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                check.add("allowed_token_ids", "must not be empty")
            elif both := set(self.banned_token_ids).intersection(self.allowed_token_ids):
                check.add("banned_token_ids", f"{min(both)} is also in allowed_token_ids")

    @property
    def greedy(self) -> bool:
        """Whether decoding is argmax; meaningful once the defaults are applied."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def with_defaults_of(self, model: SamplingParams) -> SamplingParams:
        """A copy in which what has a default of the model's is set: from here, else from `model`, else the engine's default.

        Raises `InvalidRequestError` for what does not go together with those.
        """
        unset: dict[str, Any] = {}
        for name, default in _ENGINE_DEFAULTS.items():
            if getattr(self, name) is None:
                value = getattr(model, name)
                unset[name] = default if value is None else value
        return self._with(**unset)

    def with_seed(self, seed: int) -> SamplingParams:
        """A copy with `seed`, which is in its range."""
        return self._with(seed=seed)

    def _with(self, **valid: Any) -> SamplingParams:
        """A copy with fields that are `valid` each: lists are not checked once more. Raises `InvalidRequestError` if they do not go
        together with the others."""
        new = copy(self)
        for name, value in valid.items():
            object.__setattr__(new, name, value)
        check = _ParamChecks(new)
        new._check_together(check)
        check.finish(InvalidRequestError)
        return new


_ENGINE_DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "detokenize": True,
}


class _ParamChecks(FieldChecks):
    """The checks of fields that hold several; these become tuples and dicts of plain values."""

    def token_ids(self, name: str) -> None:
        value = getattr(self._owner, name)
        try:
            if isinstance(value, str | bytes | bytearray | Mapping):
                raise TypeError
            entries = self._entries(name, () if value is None else value)
            # Most often all are of this one type and none comes twice; and there may be many.
            ids = entries if set(map(type, entries)) <= {int} else [to_int(token_id) for token_id in entries]
        except TypeError:
            self.refuse(name, "a list of token ids")
            return
        if ids and not 0 <= min(ids) <= max(ids) <= MAX_INT32:
            bad = next(token_id for token_id in ids if not 0 <= token_id <= MAX_INT32)
            self.add(name, f"{shown(bad)} is not a token id")
        else:
            self.set(name, tuple(ids) if len(set(ids)) == len(ids) else tuple(dict.fromkeys(ids)))

    def strings(self, name: str) -> None:
        value = getattr(self._owner, name)
        if value is None or isinstance(value, str):
            value = () if value is None else (value,)
        if not isinstance(value, tuple | list):
            self.refuse(name, "a list of strings")
            return
        entries = self._entries(name, value)
        if not all(isinstance(one, str) for one in entries):
            self.refuse(name, "a list of strings")
        elif any(not 1 <= len(one) <= MAX_STRING_BYTES or len(one.encode(errors="replace")) > MAX_STRING_BYTES for one in entries):
            self.add(name, f"each string must have 1 to {MAX_STRING_BYTES} bytes")
        else:
            self.set(name, tuple(dict.fromkeys(entries)))

    def biases(self, name: str) -> None:
        value = getattr(self._owner, name)
        try:
            biases = {to_int(token_id): to_float(bias) for token_id, bias in self._entries(name, {} if value is None else value.items())}
        except (AttributeError, TypeError, ValueError, OverflowError):
            self.refuse(name, "a mapping from token ids to numbers")
            return
        bad = [(key, bias) for key, bias in biases.items() if not 0 <= key <= MAX_INT32 or not -MAX_BIAS <= bias <= MAX_BIAS]
        if bad:
            self.add(name, f"{shown(bad[0][0])}: {bad[0][1]!r} is not a token id and a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
        else:
            self.set(name, biases)

    def callables(self, name: str) -> None:
        value = getattr(self._owner, name)
        if value is None:
            value = ()
        if not isinstance(value, tuple | list) or not all(callable(one) for one in value):
            self.refuse(name, "a list of callables")
        else:
            self.set(name, tuple(value))

    def _entries(self, name: str, value: Iterable[Any]) -> list[Any]:
        """What `value` holds; nothing, and a violation, if that is too much. Raises TypeError if it holds nothing by its nature."""
        most = MOST_ENTRIES[name]
        count = len(value) if isinstance(value, Sized) else None
        if count is None or count <= most:
            # numpy reads its arrays faster than anyone else
            entries = value.tolist() if hasattr(value, "tolist") else list(islice(value, most + 1))
            if len(entries) <= most:
                return entries
        self.violations.append(too_many(name, most + 1 if count is None else count))
        return []


def too_many(name: str, count: int) -> FieldViolation:
    """Of a field with `count` entries, where MOST_ENTRIES allows fewer."""
    return FieldViolation(name, f"{count} entries are more than {MOST_ENTRIES[name]}")


def _text_bytes(value: object) -> int:
    """The length of a string in UTF-8, or where that is more than a grammar may have, a lower bound of it; 0 for what is no text."""
    if not isinstance(value, str) or len(value) > max(MOST_GRAMMAR_BYTES.values()):
        return len(value) if isinstance(value, str) else 0
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return 0
