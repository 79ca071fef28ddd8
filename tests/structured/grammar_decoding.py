"""Decoding under a grammar without a model: random logits in place of one, and the schemas to decode."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from tensor_sampler import TENSORS

from aengine.api.params import StructuredOutput
from aengine.sampling.grammar import CompiledGrammar, Grammars
from aengine.sampling.processors import StepRows
from aengine.scheduler.plan import NewRow, RowParams
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import ids_within, read_vocabulary, text_of_tokens


def compiler_for(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
    read = partial(read_vocabulary, tokenizer, vocab_size)
    return GrammarCompiler(read, eos_token_ids, text_of_tokens(tokenizer), partial(ids_within, tokenizer))


def decode(
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    vocab_size: int,
    eos: int,
    wanted: list[StructuredOutput],
    max_tokens: int,
    seed: int = 0,
) -> list[str | None]:
    """One text for each grammar, decoded all at once; None where it has not ended after `max_tokens`."""
    rows = Grammars(vocab_size, TENSORS)
    for row, future in enumerate([compiler.compile(one) for one in wanted]):
        params = RowParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, grammar=future.result())
        rows.update([NewRow(row, params)])
    generator = torch.Generator().manual_seed(seed)
    blank = torch.tensor([not tokenizer.decode([token_id]).strip() for token_id in range(vocab_size)])
    blank[eos] = False
    outputs: list[list[int]] = [[] for _ in wanted]
    open_rows = np.arange(len(wanted), dtype=np.int32)
    for _ in range(max_tokens):
        # Space between the elements of JSON would take most of the tokens otherwise.
        logits = torch.rand(len(open_rows), vocab_size, generator=generator) - 0.9 * blank
        step = StepRows(open_rows, np.zeros_like(open_rows))
        rows.apply(logits, step, np.arange(len(open_rows)))
        assert step.failures == {}
        tokens = logits.argmax(-1).numpy().astype(np.int32)
        chosen = ~np.isin(np.arange(len(open_rows)), list(step.postponed))
        assert rows.observe(open_rows[chosen], tokens[chosen]) == {}
        for row, token in zip(open_rows[chosen], tokens[chosen], strict=True):
            outputs[row].append(int(token))
        open_rows = open_rows[~chosen | (tokens != eos)]
        if not len(open_rows):
            break
    return [None if row in open_rows else tokenizer.decode(ids[:-1]) for row, ids in enumerate(outputs)]


def accepts(compiled: CompiledGrammar, tokenizer: Tokenizer, text: str) -> bool:
    """Whether `text` is an output of the grammar: in the tokens that the tokenizer cuts it into, or the longest that are allowed."""
    matcher = compiled.start()
    if compiled.unique is None:
        state = compiled.matcher.deep_copy()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(state.try_consume_tokens(ids) == len(ids) and state.is_accepting())
    left = text.encode()
    while left:
        allowed = np.flatnonzero(matcher.allowed(len(compiled.texts))).tolist()
        token = max(
            (one for one in allowed if left.startswith(compiled.texts[one])), key=lambda one: len(compiled.texts[one]), default=None
        )
        if token is None or not compiled.texts[token]:
            return False
        matcher.accept(token)
        left = left[len(compiled.texts[token]) :]
    allowed = matcher.allowed(len(compiled.texts))
    return any(allowed[one] for one in compiled.eos_token_ids)


def random_schema(seed: int) -> dict[str, Any]:
    """A JSON Schema whose values are short: every kind of type, enums, nesting, ranges, patterns, references, alternatives."""
    draw = random.Random(seed)
    schema: dict[str, Any] = _object(draw, 2, (node := draw.random() < 0.3))
    if node:
        schema["$defs"] = {"node": _object(draw, 1, False), "name": _leaf(draw)}
    if draw.random() < 0.5:
        schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Schema {seed}"}
    return schema


def _object(draw: random.Random, depth: int, defs: bool) -> dict[str, Any]:
    names = draw.sample(["name", "id", "a b", "naïve", "x_1", "list", "größe", 'quote"d'], draw.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(draw, depth - 1, defs) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
    }
    if draw.random() < 0.98:  # in others a random text goes on for long
        schema["additionalProperties"] = False
    if draw.random() < 0.2:
        schema["minProperties"] = draw.randint(0, len(names))
    return schema


def _any(draw: random.Random, depth: int, defs: bool) -> dict[str, Any]:
    kind = draw.random()
    if depth > 0 and kind < 0.25:
        return _object(draw, depth, defs)
    if depth > 0 and kind < 0.45:
        low = draw.randint(0, 2)
        return {"type": "array", "items": _any(draw, depth - 1, defs), "minItems": low, "maxItems": low + draw.randint(0, 2)}
    if kind < 0.55:
        return {"anyOf": [_leaf(draw), {"type": "null"}, _leaf(draw)]}
    if kind < 0.6:
        return {"type": "array", "prefixItems": [_leaf(draw), _leaf(draw)], "items": False, "minItems": 2}
    if kind < 0.7 and defs:
        return {"$ref": f"#/$defs/{draw.choice(('node', 'name'))}"}
    return _leaf(draw)


def _leaf(draw: random.Random) -> dict[str, Any]:
    low = draw.randint(-20, 20)
    length = draw.randint(0, 3)
    return draw.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 300)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 5, "description": "one of four"},
            {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 100},
            {"type": "number", "minimum": low / 4, "maximum": low / 4 + draw.random()},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
            {"type": "string", "minLength": length, "maxLength": length + 4},
            {"type": ["string", "null"], "maxLength": 5},
            {"type": "string", "pattern": draw.choice(PATTERNS)},
            {"type": "string", "format": draw.choice(("date", "uuid", "ipv4", "time"))},
            {"enum": ["red", "blå", 'a "b"\\\n', 3, 1.5, None, True, {"k": [1, "é"]}]},
            {"type": "string", "enum": ["one", "two", "three", 4]},
            {"const": draw.choice(("fixed", 17, ["a", {"b": None}]))},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["boolean", "integer"], "minimum": 0, "maximum": 9},
            {"maxLength": 3},
            {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
            {"allOf": [{"type": "integer", "minimum": 1, "maximum": 9}]},
        ]
    )  # fmt: skip


PATTERNS = (
    r"^[A-Z][a-z]{1,6}$",
    r"^\d{3}-\d{4}$",
    r"^(foo|ba[rz]){1,2}$",
    r"^.{1,5}$",
    r"^[^aeiou]{2,4}$",
    r"^\"[ -~]{0,3}\\$",
    r"^\S\W\D?$",
    r"^[é-ü]+x?$|^\t$",
    r"^a.c\.$",
)
