"""Requests that a hostile client might make, by seed: sizes, counts, nesting, grammars, expressions, characters, and numbers at the limits
of their types. What a seed gives is the same for ever, so that a fault can be looked at again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from raw_h2 import GENERATION

from aengine.v1 import generation_service_pb2 as generation
from aengine.v1 import tokenizer_service_pb2 as tokenizer

TOKENIZER = "/aengine.v1.TokenizerService/"
MOST = 1 << 22  # of what there can be many of: characters, ids, entries
FLOATS = (0.0, -0.0, 1e-45, -1e-45, 1e-38, 1e-6, 0.5, 1.0, 2.0, 100.0, 3.4e38, -3.4e38, float("inf"), float("-inf"), float("nan"))
COUNTS = (0, 1, 2, 127, 128, 129, 255, 1024, 4096, 65536, 2**31 - 1, 2**31, 2**32 - 1)
SIGNED = (-(2**31), -101, -100, -1, 0, 1, 100, 101, 2**31 - 1)
CHARACTERS = (" ", "a", "\n", "\0", "é", "日", "\U0001f600", "\u200d", "\ufeff", "\u202e", "\u0301", "￿", "ﷺ", "<|endoftext|>", "\ufffd")


@dataclass(frozen=True)
class Hostile:
    """One call: its method, whether it answers with a stream, and the bytes of its request."""

    method: str
    streams: bool
    body: bytes


def hostile_request(seed: int) -> Hostile:
    rng = random.Random(seed)
    if rng.random() < 0.12:
        return _to_the_tokenizer(rng)
    request = generation.StreamGenerateRequest()
    spec = request.spec
    spec.prompt.text = "It is a truth"
    spec.stopping.max_tokens = rng.choice((1, 5, 50, 500))
    for spoil in rng.sample(SPOILS, rng.choice((1, 1, 1, 2, 3))):
        spoil(rng, spec)
    if rng.random() < 0.1:
        request.request_id = rng.choice(("", "x" * 129, "x" * 100_000, "a b", "é", "hostile"))
    body = request.SerializeToString()
    if rng.random() < 0.05:  # not what the schema says
        body = bytes(rng.choice((byte, byte, byte, rng.randrange(256))) for byte in body[:2000])
    if rng.random() < 0.9:
        return Hostile(GENERATION + "StreamGenerate", True, body)
    many = generation.BatchGenerateRequest()
    for _ in range(rng.choice((0, 1, 20, 3000))):
        many.requests.add().spec.prompt.text = "a"
    return Hostile(GENERATION + "BatchGenerate", True, many.SerializeToString())


# ---- sizes, counts and numbers -----------------------------------------------------------------------------------------------


def _many(rng: random.Random) -> int:
    """Mostly few: the logarithm is drawn."""
    return int(MOST ** rng.random())


def _text(rng: random.Random) -> str:
    length = _many(rng)
    unit = "".join(rng.choices(CHARACTERS, k=rng.choice((1, 1, 3, 20))))
    return (unit * (length // len(unit) + 1))[:length]


def _ids(rng: random.Random) -> list[int]:
    kinds = ([rng.choice(COUNTS)], list(range(4096)), rng.choices(COUNTS, k=10), [rng.randrange(4096) for _ in range(100)])
    unit = rng.choice(kinds)
    return (unit * (_many(rng) // len(unit) + 1))[: _many(rng)]


def _prompt(rng: random.Random, spec: Any) -> None:
    match rng.randrange(4):
        case 0 | 1:
            spec.prompt.text = _text(rng)
        case 2:
            spec.prompt.token_ids.ids.extend(_ids(rng))
        case _:
            for _ in range(min(5000, _many(rng))):
                spec.prompt.chat.messages.add(role=rng.choice(("user", "system", "", "x" * 1000)), content=rng.choice(CHARACTERS) * 100)


def _sampling(rng: random.Random, spec: Any) -> None:
    sampling = spec.sampling
    for name in rng.sample(("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), 3):
        setattr(sampling, name, rng.choice(FLOATS))
    sampling.n = rng.choice((*COUNTS, 128, 128))
    sampling.seed = rng.choice((0, 2**64 - 1))
    fields = {field.name: field for field in sampling.DESCRIPTOR.fields}
    sampling.top_k = rng.choice(SIGNED if fields["top_k"].cpp_type == fields["top_k"].CPPTYPE_INT32 else COUNTS)


def _lists(rng: random.Random, spec: Any) -> None:
    match rng.randrange(5):
        case 0:
            spec.stopping.stop_token_ids.extend(_ids(rng))
        case 1:
            spec.sampling.allowed_token_ids.extend(_ids(rng))
        case 2:
            spec.sampling.banned_token_ids.extend(_ids(rng))
        case 3:
            start = rng.choice(COUNTS[:8])
            for token_id in range(start, start + min(200_000, _many(rng))):
                spec.sampling.logit_bias[token_id] = rng.choice(FLOATS)
        case _:
            texts = spec.stopping.stop_strings if rng.random() < 0.5 else spec.sampling.banned_strings
            text = _text(rng)[: rng.choice((0, 10, 256, 257, 100_000))]
            texts.extend([text] * min(10_000, _many(rng), MOST // (len(text) + 1) + 1))


def _limits(rng: random.Random, spec: Any) -> None:
    spec.stopping.max_tokens = rng.choice(COUNTS)
    spec.stopping.min_tokens = rng.choice(COUNTS)
    spec.output.logprobs.top_k = rng.choice(COUNTS)
    if rng.random() < 0.5:
        spec.output.prompt_logprobs.top_k = rng.choice(COUNTS)
    spec.priority = rng.choice(SIGNED)
    spec.tenant = rng.choice(("", "x" * 257, _text(rng)[:10_000]))
    spec.cache.salt = rng.choice(("", "x" * 257))
    duration = rng.choice((spec.stopping.time_limit, spec.stream.max_delay, spec.stream.retain))
    duration.seconds = rng.choice((0, 1, -1, 2**62, -(2**62), 315_576_000_001))
    duration.nanos = rng.choice((0, 1, -5, 999_999_999, 2_000_000_000, -(2**31)))
    spec.stream.max_tokens_per_delta = rng.choice(COUNTS)
    spec.stream.resumable = rng.random() < 0.3


# ---- grammars ----------------------------------------------------------------------------------------------------------------

_ATOMS = (
    "a",
    ".",
    r"\w",
    r"\S",
    "[^a]",
    r"[\s\S]",
    "(a|b)",
    "é",
    r"\p{L}",
    "(?=a)",
    r"\1",
    r"\b",
    "[",
    "(",
    ")",
    "{",
    "$",
    "^",
    "\\",
    "(?i)",
    "日",
)
_COUNTS = ("*", "+", "?", "{2,}", "{1,1000}", "{1000}", "{0,100000}", "{999999999}", "*+", "{,3}", "")


def _regex_text(rng: random.Random) -> str:
    num_pieces = 0

    def piece(depth: int) -> str:
        nonlocal num_pieces
        num_pieces += 1
        if depth == 0 or num_pieces > 300 or rng.random() < 0.3:
            return rng.choice(_ATOMS) + rng.choice(_COUNTS)
        inside = "|".join(piece(depth - 1) for _ in range(rng.choice((1, 1, 2, 5))))
        return f"({inside}){rng.choice(_COUNTS)}"

    text = "".join(piece(rng.choice((0, 1, 3, 8))) for _ in range(rng.choice((1, 1, 3))))[:4000]
    return text * rng.choice((1, 1, 1, 60, 400))


def _grammar_text(rng: random.Random) -> str:
    names = ["root", *(f"r{i}" for i in range(rng.choice((0, 2, 10, 1000))))]
    lines = []
    for name in names:
        parts = [
            rng.choice([*names[:20], '"a"', '"b"', "[a-z]*", '"\\u0000"', '("a" | )', "(" * 50 + '"x"' + ")" * 50, ".", "undefined"])
            for _ in range(3)
        ]
        lines.append(f"{name} ::= {' '.join(parts)} | {rng.choice(parts)}{rng.choice(('', '*', '{1,999999}'))}")
    return "\n".join(lines)


def _schema_of(rng: random.Random, depth: int) -> Any:
    if depth == 0 or rng.random() < 0.2:
        leaves: tuple[Callable[[], Any], ...] = (
            lambda: {"type": "string", "pattern": _regex_text(rng)[:300]},
            lambda: {"type": "integer", "minimum": rng.choice((-(10**20), -5, 10**400)), "maximum": rng.choice((0, 10**18))},
            lambda: {"type": "number", "multipleOf": rng.choice((0, -1, 1e-9, 0.1, 9973, 10**9, 1e300))},
            lambda: {"enum": [rng.choice((None, 1, 1.5, "x", "\0", 10**30))] * rng.choice((0, 3, 3, 20_000))},
            lambda: {
                "type": "string",
                "minLength": rng.choice(COUNTS),
                "maxLength": rng.choice(COUNTS),
                "format": rng.choice(("date", "uri", "x")),
            },
            lambda: {"$ref": rng.choice(("#", "#/$defs/a", "#/properties/p0", "http://x/y", "#/" + "a/" * 1000))},
            lambda: rng.choice((True, False, 5, None, [], "x", {"type": "zzz"}, {"not": {}}, {"const": "\ud800"})),
        )
        return rng.choice(leaves)()
    few = rng.choice((1, 2, 3, 12))
    inner = [_schema_of(rng, depth - 1) for _ in range(few)]
    nodes: tuple[Callable[[], Any], ...] = (
        lambda: {"properties": {f"p{i}": one for i, one in enumerate(inner)}, "required": ["p0"], "minProperties": rng.choice(COUNTS)},
        lambda: {"type": "array", "items": inner[0], "minItems": rng.choice(COUNTS), "uniqueItems": rng.random() < 0.5},
        lambda: {rng.choice(("allOf", "anyOf", "oneOf", "prefixItems")): inner},
        lambda: {"patternProperties": {_regex_text(rng)[:50]: one for one in inner}},
        lambda: {"properties": {f"p{i}": inner[0] for i in range(rng.choice((10, 1000, 5000)) if depth == 1 else 3)}},
        lambda: {"$defs": {"a": inner[0]}, "allOf": [{"$ref": "#/$defs/a"}] * few},
    )
    return rng.choice(nodes)()


def _structure(rng: random.Random, spec: Any) -> None:
    wanted = spec.structured_output
    match rng.randrange(6):
        case 0 | 1:
            wanted.regex = _regex_text(rng)
        case 2:
            wanted.grammar.source = _grammar_text(rng)
        case 3:
            wanted.choices.values.extend([_text(rng)[:20_000] for _ in range(rng.choice((0, 1, 50)))] * rng.choice((1, 3)))
        case 4:
            wanted.json_schema = json.dumps(_schema_of(rng, rng.choice((0, 1, 2, 3)))) if rng.random() < 0.9 else '{"items":' * 10**5
        case _:
            wanted.json_object.SetInParent()
    spec.stopping.max_tokens = rng.choice((20, 200))


def _reasoning(rng: random.Random, spec: Any) -> None:
    marks = ("</think>", "e", ".", "<|im_end|>", "", " \n", "\0", "é" * 128, "ab" * 128, "\U0001f600")
    message = spec.reasoning
    message.opening, message.closing, message.answer = rng.choices(marks, k=3)
    message.opened = rng.random() < 0.6
    if rng.random() < 0.6:
        message.max_tokens = rng.choice((0, 1, 5, 2**31 - 1, 2**32 - 1))
    if rng.random() < 0.5:
        _structure(rng, spec)


SPOILS: tuple[Callable[[random.Random, Any], None], ...] = (_prompt, _sampling, _lists, _limits, _structure, _structure, _reasoning)


def _to_the_tokenizer(rng: random.Random) -> Hostile:
    request: Message
    match rng.randrange(3):
        case 0:
            name, request = "Tokenize", tokenizer.TokenizeRequest(text=_text(rng), with_pieces=rng.random() < 0.5)
        case 1:
            name, request = "Detokenize", tokenizer.DetokenizeRequest(token_ids=_ids(rng))
        case _:
            name, request = "RenderChat", tokenizer.RenderChatRequest()
            for _ in range(min(5000, _many(rng))):
                request.chat.messages.add(role="user", content="{{ x }}{% for i in range(10**9) %}a{% endfor %}")
    return Hostile(TOKENIZER + name, False, request.SerializeToString())
