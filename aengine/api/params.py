"""Per-request parameters and their validation. Knows the ranges; does not know how they are applied.

Unset (`None`) means: the model's `generation_config`, then the engine's default. Zero means zero.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sized
from copy import copy
from dataclasses import field, fields
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import (
    FLAG,
    MAX_INT32,
    MAX_UINT64,
    FieldChecks,
    Range,
    Refusal,
    check_fields,
    declared_fields,
    is_not,
    one_of,
    shown,
    to_float,
    to_int,
)

if TYPE_CHECKING:
    import torch

GREEDY_BELOW = 1e-5  # temperatures below this are greedy decoding
MAX_BIAS = 100.0
MAX_STRING_BYTES = 256
MAX_CONTEXT_BYTES = 1 << 16
_LEAST_NORM = 1e-12  # of a vector, as torch.nn.functional.normalize
MAX_CHOICES = 4096


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
    """What the output must look like. Exactly one field is set, beside the flags; a schema that does not compile is refused with the
    reason."""

    json_schema: Annotated[str | Mapping[str, Any] | None, partial(_json_schema, 1 << 20)] = None
    """A JSON Schema, as JSON text of up to 1 MiB or as a mapping. A keyword that cannot be enforced is refused by its name."""
    json_object: bool = False
    """Any JSON object."""
    regex: Annotated[str | None, partial(_source, 1 << 13)] = None
    """The whole output matches this regular expression of up to 8 KiB, without looking around or referring back."""
    choice: Annotated[tuple[str, ...], partial(_choices, 1 << 18)] = ()
    """The output is one of these strings: 1..4096, together at most 256 KiB of UTF-8."""
    grammar: Annotated[str | None, partial(_source, 1 << 15)] = None
    """An EBNF grammar in the notation of llama.cpp (GBNF) of up to 32 KiB; its start rule is `root`. The output matches it, and may be
    narrower: in rules that recur, literals and classes match as much as they can."""
    strict_formats: bool = False
    """Refuse a `json_schema` with a `format` that is not enforced. Otherwise one that is not known says nothing of the output."""
    exact_one_of: bool = False
    """Refuse a `json_schema` with a `oneOf` whose schemas overlap and cannot be told apart. Otherwise that is read as `anyOf`."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError, "structured_output.")
        flags = ("strict_formats", "exact_one_of")
        given = [one.name for one in fields(self) if one.name not in flags and getattr(self, one.name) not in (None, False, ())]
        if len(given) != 1:
            raise InvalidRequestError.of(
                "structured_output", f"exactly one of json_schema, json_object, regex, choice, grammar must be set, not {given or 'none'}"
            )
        if given != ["json_schema"] and (misplaced := [name for name in flags if getattr(self, name)]):
            raise InvalidRequestError.of(f"structured_output.{misplaced[0]}", "is for a json_schema only")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """Where the reasoning of an output begins and ends. What follows it is the answer: a `structured_output` speaks of that alone, and may
    have some white space before it. No token then has both the end of the reasoning and the start of the answer.

    White space around the markers is not looked for, only written. A marker is found however it is cut into tokens.
    """

    opening: Annotated[str, _marker] = ""
    """What the output begins with if it has reasoning, of at most 256 bytes; not needed if it is `opened`. With a `structured_output` an
    output has reasoning only if this is one token of the model."""
    closing: Annotated[str, _closing]
    """What ends the reasoning: 1..256 bytes, not all of them white space."""
    opened: bool = False
    """Whether the output begins within reasoning, since the prompt opened it."""
    answer: Annotated[str, _marker] = ""
    """What is written behind the closing before a `structured_output`: at most 256 bytes."""
    max_tokens: Annotated[int | None, Range(0, MAX_INT32)] = None
    """>= 0: reasoning of so many tokens, those of the opening included, is ended with the tokens of `closing`. Default: no limit."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError, "reasoning.")
        if not self.opened and not self.opening.strip():
            raise InvalidRequestError.of("reasoning.opening", "must not be white space alone, unless the reasoning is opened")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionStop:
    """When an output has repeated itself enough: its last tokens are `min_count` copies, one behind the other, of the same tokens, which
    are `min_cycle` to `max_cycle`. Raises `InvalidRequestError` naming every field that is out of range."""

    max_cycle: Annotated[int, Range(1, 1024)] = 64
    """1..1024: most tokens of a copy."""
    min_cycle: Annotated[int, Range(1, 1024)] = 1
    """1..max_cycle: fewest tokens of a copy."""
    min_count: Annotated[int, Range(2, 4096)] = 8
    """2..4096: how many copies end the sequence."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError, "stop_on_repetition.")
        if self.min_cycle > self.max_cycle:
            raise InvalidRequestError.of("stop_on_repetition.min_cycle", f"{self.min_cycle} is more than max_cycle, {self.max_cycle}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingParams:
    """How an embedding is made of the hidden states of a prompt, behind the model's last norm. Raises `InvalidRequestError` naming every
    field that is out of range."""

    pooling: Annotated[str | None, one_of("last", "mean", "cls", "label", "tokens")] = None
    """last: the hidden state of the last token. mean: the mean of those of all tokens. cls: that of the first. label: in place of hidden
    states the scores of the labels of a model that classifies. tokens: one of each token, of all `layers`. Default: what the checkpoint
    says, else last, or cls for an encoder."""
    normalize: bool = True
    """Whether its length is made 1."""
    dimensions: Annotated[int | None, Range(1, MAX_INT32)] = None
    """1..hidden_size: keep so many of its first numbers, before it is normalized. Default: all."""
    layers: Annotated[tuple[int, ...], partial(_layers, 1024)] = (-1,)
    """With pooling tokens, as in the `hidden_states` of Transformers: 0 is the embedding of a token, i what the first i layers make of it;
    that of all layers, also -1, is behind the model's last norm. 1 to 1024, each once."""
    first_token: Annotated[int, Range(0, MAX_INT32)] = 0
    """With pooling tokens: the position of the first one that is told of."""
    experts: bool = False
    """With pooling tokens: tell which experts each layer chose, too."""

    def __post_init__(self) -> None:
        check_fields(self, InvalidRequestError)

    def finish(self, values: Any) -> Any:
        """The first `dimensions` of vectors, an array [.., hidden_size], as unit vectors if they are to be; float32."""
        import numpy as np

        kept = values[..., : self.dimensions]
        return (kept / np.maximum(np.linalg.norm(kept, axis=-1, keepdims=True), _LEAST_NORM) if self.normalize else kept).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a sampling parameter is beside its range: `neutral` is the value with which it changes nothing, `default` what it is where
    neither a request nor the model sets it, `wire` its name in the schema, where that is another one."""

    neutral: float | bool | None = None  # None: it has none, and no default of a model's
    default: float | bool | None = None  # None: `neutral`
    wire: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request is decoded. Raises `InvalidRequestError` naming every field that is out of range.

    None leaves any field but `n`, `min_tokens`, `prompt_logprobs_from` and the flags as it is by default. Lists are counted, repeated
    entries too, before they are read.
    """

    temperature: Annotated[float | None, Range(0.0, 100.0), Setting(neutral=0.0, default=1.0)] = None
    """0..100; below 1e-5 decoding is greedy. Default: the model's, then 1.0."""
    top_p: Annotated[float | None, Range(0.0, 1.0, open_low=True), Setting(neutral=1.0)] = None
    """In (0, 1]: keep the smallest set of tokens whose probability reaches top_p. Default: the model's, then 1 (off)."""
    top_k: Annotated[int | None, Range(0, MAX_INT32), Setting(neutral=0)] = None
    """>= 0; keep the k most likely tokens, 0 (or -1) turns it off. Default: the model's, then 0."""
    min_p: Annotated[float | None, Range(0.0, 1.0), Setting(neutral=0.0)] = None
    """In [0, 1]: drop tokens less likely than min_p times the likeliest one. Default: the model's, then 0 (off)."""
    seed: Annotated[int | None, Range(0, MAX_UINT64)] = None
    """0..2^64-1. The same seeded request gives the same tokens whatever runs beside it, on CUDA and in plain torch up to the rounding of
    logits. Default: a fresh random one."""
    n: Annotated[int, Range(1, 128)] = 1
    """1..128 sequences; more than one is refused with greedy decoding. Sequence 0 has `seed`; the seed of sequence i > 0 is the 8-byte
    BLAKE2b of `seed` (8 bytes) and i (4 bytes), all little-endian: with it, a request with n=1 gets the same tokens."""
    presence_penalty: Annotated[float | None, Range(-2.0, 2.0), Setting(neutral=0.0)] = None
    """In [-2, 2]: subtracted from the logits of tokens that the output holds. Default: 0."""
    frequency_penalty: Annotated[float | None, Range(-2.0, 2.0), Setting(neutral=0.0)] = None
    """In [-2, 2]: subtracted once for every time that the output holds the token. Default: 0."""
    repetition_penalty: Annotated[float | None, Range(0.0, 2.0, open_low=True), Setting(neutral=1.0)] = None
    """In (0, 2]: divides positive and multiplies negative logits of tokens in prompt or output. Default: the model's, then 1 (off)."""
    logit_bias: Annotated[Mapping[int, float], partial(_biases, 1024)] = field(default_factory=dict)
    """Up to 1024 token ids, and the numbers in [-100, 100] to add to their logits."""
    allowed_token_ids: Annotated[tuple[int, ...] | None, partial(_token_ids, 1 << 18)] = None
    """1 to 262144 ids: only these can be sampled. Default: all."""
    banned_token_ids: Annotated[tuple[int, ...], partial(_token_ids, 1024)] = ()
    """Up to 1024 ids that are never sampled."""
    bad_words: Annotated[tuple[str, ...], partial(_strings, 64), Setting(wire="banned_strings")] = ()
    """Up to 64 strings of 1..256 bytes whose token sequences, with and without a leading space, are never completed."""
    max_tokens: Annotated[int | None, Range(1, MAX_INT32)] = None
    """Most tokens to generate, >= 1. Default: up to the end of the context."""
    clamp_max_tokens: bool = False
    """Whether max_tokens beyond what the prompt leaves of the context and of the KV cache means all of that. Else it is refused."""
    min_tokens: Annotated[int, Range(0, MAX_INT32)] = 0
    """0..max_tokens: before it has so many tokens, no end-of-sequence id, stop token, stop string or repetition ends the sequence."""
    stop: Annotated[tuple[str, ...], partial(_strings, 16), Setting(wire="stop_strings")] = ()
    """Up to 16 strings of 1..256 bytes that end the sequence where the earliest of them begins (a single string is taken too). The text
    of an end-of-sequence id or stop token that ends the sequence is not searched: such an end is EOS or STOP_TOKEN."""
    stop_token_ids: Annotated[tuple[int, ...], partial(_token_ids, 128)] = ()
    """Up to 128 ids that end the sequence; the id is kept in the token ids, not in the text."""
    ignore_eos: bool = False
    """Do not stop at the model's end-of-sequence ids. stop_token_ids still stop."""
    stop_on_repetition: Annotated[RepetitionStop | None, _repetition] = None
    """When the sequence is ended for repeating itself, with REPETITION; a mapping of its fields is taken, too. Default: never."""
    include_stop_str_in_output: Annotated[bool, FLAG, Setting(wire="include_stop_in_output")] = False
    """Whether the text keeps the stop string, or the text of the stop token, that ended it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    detokenize: Annotated[bool | None, FLAG, Setting(neutral=False, default=True)] = None
    """Whether to make text at all; stop strings need it. Default: where the model has a tokenizer."""
    logprobs: Annotated[int | None, Range(0, MAX_INT32)] = None
    """0..max_logprobs: report the logprob and rank of each token, and this many most likely alternatives. Default: nothing."""
    prompt_logprobs: Annotated[int | None, Range(0, MAX_INT32)] = None
    """The same for the tokens of the prompt, from the second on."""
    prompt_logprobs_from: Annotated[int, Range(0, MAX_INT32)] = 0
    """>= 0: the position in the prompt of the first token of which prompt_logprobs tell something. What is cached of those before it is
    not computed again. Default: 0, of all."""
    max_drafts: Annotated[int | None, Range(0, 16)] = None
    """0..16: most drafts in one step, 0 for none. Default: the engine's. They change when tokens come, and not which."""
    draft_context: Annotated[tuple[str, ...], partial(_strings, 16, most_bytes=MAX_CONTEXT_BYTES)] = ()
    """Up to 16 strings of 1..65536 bytes that the output may repeat, such as a file that it edits, the likeliest last: n-gram drafts are
    looked for there, too. A single string is taken too. They change when tokens come, and not which."""
    structured_output: Annotated[StructuredOutput | None, _structured_output] = None
    """A grammar that the output must match, or what follows its `reasoning`."""
    reasoning: Annotated[Reasoning | None, _reasoning] = None
    """Where the output's reasoning is, and how long it may be. It is counted in the usage."""
    logits_processors: Annotated[tuple[LogitsProcessor, ...], _callables] = ()
    """Callables that change the logits before each token, for requests in this process only."""

    def __post_init__(self) -> None:
        if self.top_k == -1:  # off, in the words of others
            object.__setattr__(self, "top_k", 0)
        check_fields(self, InvalidRequestError)
        self._check_together()

    def _check_together(self) -> None:
        """Raises `InvalidRequestError` for fields that do not go together."""
        check = FieldChecks()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            check.add_violation("min_tokens", f"{self.min_tokens} is more than max_tokens, {self.max_tokens}")
        if self.stop and self.detokenize is False:
            check.add_violation("stop", "stop strings need detokenize")
        if self.structured_output is not None and self.ignore_eos:
            check.add_violation("ignore_eos", "structured output ends with an end-of-sequence id")
        if self.n > 1 and self.greedy:
            check.add_violation("n", f"{self.n} greedy sequences would be the same")
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                check.add_violation("allowed_token_ids", "must not be empty")
            elif both := set(self.banned_token_ids).intersection(self.allowed_token_ids):
                check.add_violation("banned_token_ids", f"{min(both)} is also in allowed_token_ids")
        check.finish(InvalidRequestError)

    @property
    def greedy(self) -> bool:
        """Whether decoding is argmax; meaningful once the defaults are applied."""
        return self.temperature is not None and self.temperature < GREEDY_BELOW

    def with_defaults_of(self, model: SamplingParams) -> SamplingParams:
        """A copy in which what has a default of the model's is set: from here, else from `model`, else the engine's default.

        Raises `InvalidRequestError` for what does not go together with those.
        """
        unset: dict[str, Any] = {}
        for name, default in DEFAULTS.items():
            if getattr(self, name) is None:
                value = getattr(model, name)
                unset[name] = default if value is None else value
        return self._with(**unset)

    def with_seed(self) -> SamplingParams:
        """These, or where they have no seed a copy with a random one."""
        return self if self.seed is not None else self._with(seed=secrets.randbits(64))

    def of_sequence(self, index: int, told: SamplingParams | None = None) -> SamplingParams:
        """The parameters with which a request of one sequence brings what sequence `index` of these brings; they have a seed. What it tells
        of its tokens is as in `told`; None: the same but for logprobs of the prompt."""
        assert self.seed is not None
        seed = derive_seed(self.seed, index) if index else self.seed
        others = {"prompt_logprobs": None} if told is None else {name: getattr(told, name) for name in TOLD}
        return self._with(n=1, seed=seed, **others)

    def only_told(self) -> SamplingParams:
        """A copy of the parameters in `TOLD`, and nothing else that is set."""
        return SamplingParams(**{name: getattr(self, name) for name in TOLD})

    def _with(self, **valid: Any) -> SamplingParams:
        """A copy with fields that are `valid` each: lists are not checked once more. Raises `InvalidRequestError` if they do not go
        together with the others."""
        new = copy(self)
        for name, value in valid.items():
            object.__setattr__(new, name, value)
        new._check_together()
        return new


TOLD = ("logprobs", "prompt_logprobs", "prompt_logprobs_from", "detokenize", "skip_special_tokens")
"""The parameters that change what is told of tokens, and not the tokens."""


def derive_seed(seed: int, index: int) -> int:
    """The seed of sequence `index` > 0 of a request: 64 bits of BLAKE2b over both. Users replay sequences by this formula, so it stays."""
    return int.from_bytes(blake2b(seed.to_bytes(8, "little") + index.to_bytes(4, "little"), digest_size=8).digest(), "little")


# The rules of fields; `most` is how much a field may hold. None stands for nothing.


def _entries(most: int, value: Iterable[Any]) -> list[Any]:
    """What `value` holds, which is counted before it is read, repeated entries too. Raises TypeError if it holds nothing by its nature."""
    count = len(value) if isinstance(value, Sized) else None
    if count is None or count <= most:
        # numpy reads its arrays faster than anyone else
        entries: list[Any] = value.tolist() if hasattr(value, "tolist") else list(islice(value, most + 1))
        if len(entries) <= most:
            return entries
    raise Refusal(f"{most + 1 if count is None else count} entries are more than {most}")


def _token_ids(most: int, value: Any) -> tuple[int, ...]:
    try:
        if isinstance(value, str | bytes | bytearray | Mapping):
            raise TypeError
        entries = _entries(most, () if value is None else value)
        # Most often all are of this one type and none comes twice; and there may be many.
        ids = entries if set(map(type, entries)) <= {int} else [to_int(token_id) for token_id in entries]
    except TypeError:
        raise Refusal(is_not(value, "a list of token ids")) from None
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_INT32:
        raise Refusal(is_not(next(token_id for token_id in ids if not 0 <= token_id <= MAX_INT32), "a token id"))
    return tuple(ids) if len(set(ids)) == len(ids) else tuple(dict.fromkeys(ids))


def _layers(most: int, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
        raise Refusal(is_not(value, "a list of layers"))
    try:
        layers = [to_int(layer) for layer in _entries(most, value)]
    except TypeError:
        raise Refusal(is_not(value, "a list of layers")) from None
    if not layers or len({*layers}) < len(layers):
        raise Refusal(f"{layers} is not a list of one or more layers, each once")
    return tuple(layers)


def _strings(most: int, value: Any, most_bytes: int = MAX_STRING_BYTES) -> tuple[str, ...]:
    several = () if value is None else (value,) if isinstance(value, str) else value
    entries = _entries(most, several) if isinstance(several, tuple | list) else [several]
    if not all(isinstance(one, str) for one in entries):
        raise Refusal(is_not(value, "a list of strings"))
    if any(not 1 <= len(one) <= most_bytes or len(one.encode(errors="replace")) > most_bytes for one in entries):
        raise Refusal(f"each string must have 1 to {most_bytes} bytes")
    return tuple(dict.fromkeys(entries))


def _biases(most: int, value: Any) -> dict[int, float]:
    try:
        biases = {to_int(token_id): to_float(bias) for token_id, bias in _entries(most, {} if value is None else value.items())}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise Refusal(is_not(value, "a mapping from token ids to numbers")) from None
    for token_id, bias in biases.items():
        if not 0 <= token_id <= MAX_INT32 or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise Refusal(f"{shown(token_id)}: {bias!r} is not a token id and a number in [{-MAX_BIAS:g}, {MAX_BIAS:g}]")
    return biases


def _callables(value: Any) -> tuple[LogitsProcessor, ...]:
    value = () if value is None else value
    if isinstance(value, tuple | list) and all(map(callable, value)):
        return tuple(value)
    raise Refusal(is_not(value, "a list of callables"))


def _structured_output(value: object) -> StructuredOutput:
    if isinstance(value, StructuredOutput):
        return value
    raise Refusal(f"a {type(value).__name__} is not StructuredOutput")


def _reasoning(value: object) -> Reasoning:
    if isinstance(value, Reasoning):
        return value
    raise Refusal(f"a {type(value).__name__} is not Reasoning")


def _repetition(value: object) -> RepetitionStop:
    if isinstance(value, RepetitionStop):
        return value
    if not isinstance(value, Mapping):
        raise Refusal(f"a {type(value).__name__} is not RepetitionStop")
    known = [each.name for each in fields(RepetitionStop)]
    if unknown := [name for name in value if name not in known]:
        raise Refusal(f"has no field {shown(unknown[0])}; its fields are {', '.join(known)}")
    try:
        return RepetitionStop(**value)
    except InvalidRequestError as error:
        raise Refusal("; ".join(f"{each.field.partition('.')[2]}: {each.description}" for each in error.violations)) from None


def _marker(value: Any) -> str:
    if isinstance(value, str) and _text_bytes(value) <= MAX_STRING_BYTES and (not value or _text_bytes(value)):
        return value
    raise Refusal(f"must be a string of at most {MAX_STRING_BYTES} bytes of UTF-8")


def _closing(value: Any) -> str:
    marker = _marker(value)
    if not marker.strip():
        raise Refusal("must not be white space alone")
    return marker


def _source(most: int, value: Any) -> Any:
    if 1 <= _text_bytes(value) <= most:
        return value
    raise Refusal(f"must be a string of 1 to {most} bytes of UTF-8")


def _json_schema(most: int, value: Any) -> Any:
    try:
        return _source(most, json.dumps(dict(value), allow_nan=False) if isinstance(value, Mapping) else value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Refusal(f"is not JSON: {error}") from error


def _choices(most: int, value: Any) -> tuple[str, ...]:
    several = isinstance(value, tuple | list)
    if several and len(value) > MAX_CHOICES:
        raise Refusal(f"{len(value)} choices are more than {MAX_CHOICES}")
    sizes = [_text_bytes(one) for one in value] if several else [0]
    if not all(sizes):
        raise Refusal("must be strings of at least 1 byte of UTF-8")
    if sum(sizes) > most:
        raise Refusal(f"{sum(sizes)} bytes of UTF-8 together are more than {most}")
    return tuple(value)


def _text_bytes(value: object) -> int:
    """The length of a string in UTF-8, or where it has more than a million characters, their number; 0 for what is no text."""
    if not isinstance(value, str) or len(value) > 1 << 20:
        return len(value) if isinstance(value, str) else 0
    try:
        return len(value.encode())
    except UnicodeEncodeError:
        return 0


_SETTINGS: Mapping[str, Setting] = {
    one.name: note for one in declared_fields(SamplingParams) for note in one.notes if isinstance(note, Setting)
}
NEUTRAL: Mapping[str, Any] = {name: one.neutral for name, one in _SETTINGS.items() if one.neutral is not None}
"""By parameter that a model can have a default of, the value with which it changes nothing."""
DEFAULTS: Mapping[str, Any] = {
    name: neutral if _SETTINGS[name].default is None else _SETTINGS[name].default for name, neutral in NEUTRAL.items()
}
"""By parameter that a model can have a default of, what it is where neither a request nor the model sets it."""
WIRE_NAMES: Mapping[str, str] = {one.name: _SETTINGS.get(one.name, Setting()).wire or one.name for one in declared_fields(SamplingParams)}
"""By parameter, its name in the messages of the schema that have it."""
MOST_ENTRIES: Mapping[str, int] = {one.name: one.rule.args[0] for one in declared_fields(SamplingParams) if isinstance(one.rule, partial)}
"""Of the parameters that hold several."""
