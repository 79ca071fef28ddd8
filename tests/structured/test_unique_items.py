"""Arrays whose items differ, written at random: none has an item twice, and none comes to where nothing can follow."""

from __future__ import annotations

import json
import random
from typing import Any

import grammar_decoding
import jsonschema
import numpy as np
import pytest

from aengine.api.params import StructuredOutput
from aengine.sampling.grammar import CompiledGrammar, GrammarError, GrammarMatcher
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.tokenizer import Tokenizer

pytest.importorskip("llguidance")

VOCAB_SIZE, EOS = 4096, 4095
MEMBERS = {"k": {"enum": ["x", "y"]}, "b": {"type": "boolean"}}
ITEMS: dict[str, dict[str, Any]] = {
    "values": {"items": {"enum": ["a", "ab", "abc", "b", 1, 12, None, True]}, "minItems": 8},
    "a pattern": {"items": {"type": "string", "pattern": "^[ab]c?$"}, "minItems": 4},
    "integers": {"items": {"type": "integer", "minimum": -3, "maximum": 10}, "minItems": 13},
    "objects": {"items": {"properties": MEMBERS, "required": ["k", "b"], "additionalProperties": False, "type": "object"}, "minItems": 4},
    "any order": {"items": {"propertyNames": {"pattern": "^[ab]$"}, "type": "object", "additionalProperties": {"const": 1}}, "maxItems": 4},
    "arrays": {"items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2, "uniqueItems": True}, "minItems": 5},
    "places": {"prefixItems": [{"type": "boolean"}] * 2, "items": {"type": "null"}},
    "a long value": {"items": {"enum": ["x" * 2000, 1]}},
    "text": {"items": {"type": "string", "maxLength": 1}, "maxItems": 9, "minItems": 3},
}


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return grammar_decoding.compiler_for(tokenizer, VOCAB_SIZE, (EOS,))


def compiled(compiler: GrammarCompiler, schema: dict[str, Any]) -> CompiledGrammar:
    return compiler.compile(StructuredOutput(json_schema=schema)).result()


def write(matcher: GrammarMatcher, texts: list[bytes], draw: random.Random, most: int) -> list[int]:
    """Random tokens, short ones for the most part, up to the end or `most`."""
    ids: list[int] = []
    while len(ids) < most:
        allowed = np.flatnonzero(matcher.allowed(VOCAB_SIZE)).tolist()
        assert allowed, f"nothing follows {b''.join(texts[one] for one in ids)!r}"
        short = [one for one in allowed if 0 < len(texts[one].strip()) <= 2]
        ids.append(draw.choice(short if short and draw.random() < 0.9 else allowed))
        if matcher.accept(ids[-1]):
            break
    return ids


@pytest.mark.parametrize("name", ITEMS)
def test_items_differ(compiler: GrammarCompiler, name: str) -> None:
    schema = {"type": "array", "uniqueItems": True, **ITEMS[name]}
    grammar = compiled(compiler, schema)
    ended = 0
    for seed in range(6):
        ids = write(grammar.start(), list(grammar.texts), random.Random(seed), 150)
        if ids[-1] == EOS:
            ended += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(b"".join(grammar.texts[one] for one in ids)))
    assert ended


def test_steps_back_leave_no_items(compiler: GrammarCompiler) -> None:
    schema = {
        "type": "object",
        "properties": {"t": {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "ab", 1, 12]}}},
        "required": ["t"],
    }
    grammar = compiled(compiler, schema)
    texts = list(grammar.texts)
    one_way = write(grammar.start(), texts, random.Random(3), 24)
    matcher = grammar.start()
    for index, token in enumerate(one_way):
        place = matcher.place()
        write(matcher, texts, random.Random(index), 8)
        matcher.go_back(place)
        fresh = grammar.start()
        for one in one_way[:index]:
            fresh.accept(one)
        assert (matcher.allowed(VOCAB_SIZE) == fresh.allowed(VOCAB_SIZE)).all(), b"".join(texts[one] for one in one_way[:index])
        matcher.accept(token)


def test_a_token_that_repeats_an_item_is_not_accepted(compiler: GrammarCompiler) -> None:
    """Whatever sampled it."""
    grammar = compiled(compiler, {"type": "array", "uniqueItems": True, "items": {"type": "string"}})
    by_text = {text: token for token, text in enumerate(grammar.texts)}
    matcher = grammar.start()
    for text in (b"[", b'"', b"a", b'"', b",", b'"', b"a"):
        assert not matcher.accept(by_text[text])
    with pytest.raises(GrammarError, match="does not match"):
        matcher.accept(by_text[b'"'])
    assert not matcher.accept(by_text[b"a"])
    assert not matcher.accept(by_text[b'"'])


def test_what_is_too_deep_to_compare_does_not_end(compiler: GrammarCompiler) -> None:
    """Only this output fails then, for want of a token."""
    grammar = compiled(compiler, {"type": "array", "uniqueItems": True})
    opening, closing = (grammar.texts.index(one) for one in (b"[", b"]"))
    depth = 1500
    matcher = grammar.start()
    for token in (*(opening,) * depth, *(closing,) * (depth - 2)):
        assert not matcher.accept(token)
    assert not matcher.allowed(VOCAB_SIZE)[closing]
