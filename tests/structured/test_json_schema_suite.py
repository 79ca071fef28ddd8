"""The JSON-Schema-Test-Suite through the grammar: what a schema that is not refused lets a model write satisfies the schema.

json_schema_test_suite/ holds the required tests of draft 2020-12 as published, and those of the formats that are enforced. A schema may
be refused, and its grammar may be narrower; what the grammar accepts, jsonschema must accept.
"""

from __future__ import annotations

import decimal
import itertools
import json
import re
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import grammar_decoding
import pytest

from aengine.api.errors import InvalidRequestError
from aengine.api.params import StructuredOutput
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.tokenizer import Tokenizer

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

SUITE = Path(__file__).parent / "json_schema_test_suite"
VOCAB_SIZE, EOS = 4096, 4095
ATTEMPTS = 3  # random outputs of each schema


def cases(*folders: str) -> list[dict[str, Any]]:
    files = itertools.chain.from_iterable(sorted((SUITE / folder).glob("*.json")) for folder in folders)
    return [case | {"file": file.name} for file in files for case in json.loads(file.read_text("utf-8"))]


def wanted_of(case: dict[str, Any]) -> StructuredOutput:
    return StructuredOutput(json_schema=json.dumps(case["schema"]), exact_one_of=True)


def spellings(value: object) -> Iterator[str]:
    yield json.dumps(value)
    yield json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield json.dumps(value, indent=2)
    if isinstance(value, float) and value.is_integer():
        yield str(int(value))
    yield "".join(f"\\u{ord(one):04x}" if one == "o" else one for one in json.dumps(value))  # with an escape where none is needed


def is_valid(validator: Any, value: object) -> bool:
    try:
        return bool(validator.is_valid(value))
    except re.error:
        return True  # an expression of ECMAScript that Python's has no words for


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return grammar_decoding.compiler_for(tokenizer, VOCAB_SIZE, (EOS,))


@pytest.fixture(scope="module")
def compiled(compiler: GrammarCompiler) -> list[tuple[dict[str, Any], Any]]:
    """The cases whose schema is not refused, with their grammars."""
    found = []
    refusals = []
    for case in cases(".", "optional", "optional/format"):
        try:
            found.append((case, compiler.compile(wanted_of(case)).result()))
        except InvalidRequestError as error:
            refusals.append(error)
    assert all(error.field == "structured_output.json_schema" and 20 < len(str(error)) < 500 for error in refusals), "they say why"
    return found


def test_nothing_is_accepted_that_the_schema_rejects(
    tokenizer: Tokenizer, compiled: list[tuple[dict[str, Any], Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    num_accepted = num_valid = 0
    for case, grammar in compiled:
        validator = jsonschema.Draft202012Validator(case["schema"])
        for test in case["tests"]:
            valid = test["valid"] and is_valid(validator, test["data"])
            accepted = [text for text in spellings(test["data"]) if grammar_decoding.accepts(grammar, tokenizer, text)]
            assert valid or not accepted, f"{case['file']}: {case['description']}: {test['description']}: {accepted}"
            num_valid += valid
            num_accepted += bool(accepted)
    total = len(cases(".", "optional", "optional/format"))
    with capsys.disabled():
        refused = f"{total - len(compiled)} of {total} schemas are refused ({1 - len(compiled) / total:.0%})"
        written = f"{num_accepted} of {num_valid} valid instances can be written ({num_accepted / num_valid:.0%})"
        print(f"\nJSON-Schema-Test-Suite: {refused}; of the others {written}")
    assert len(compiled) > 0.8 * total
    assert num_accepted > 0.9 * num_valid


@pytest.mark.slow
def test_random_outputs_satisfy_their_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, compiled: list[tuple[dict[str, Any], Any]]
) -> None:
    accepted = [case for case, _ in compiled] * ATTEMPTS
    wanted = [wanted_of(case) for case in accepted]
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=60, seed=1)
    num_ended = 0
    for case, text in zip(accepted, texts, strict=True):
        if text is not None:
            num_ended += 1
            schema = json.loads(json.dumps(case["schema"]), parse_float=Decimal)  # so that multiples are exact
            checks = jsonschema.Draft202012Validator.FORMAT_CHECKER
            validator = jsonschema.Draft202012Validator(schema, format_checker=checks)
            with decimal.localcontext() as context:
                context.prec = 10_000  # digits of a quotient: at 28 a long integer cannot be taken modulo 1e-8
                assert is_valid(validator, json.loads(text, parse_float=Decimal)), f"{case['schema']}: {text}"
    assert num_ended > len(accepted) / 3
