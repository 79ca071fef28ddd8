"""Writes a `StructuredOutput` in the notation of the grammar compiler, with its options. Knows no vocabulary."""

from __future__ import annotations

import json

from aengine.errors import InvalidRequestError
from aengine.params import StructuredOutput
from aengine.structured.gbnf import GbnfError, rules_of
from aengine.structured.json_schema import SchemaError, fit_schema
from aengine.structured.regex_dialect import RegexError, quoted, whole_text

_OPTIONS = '%llguidance {"no_forcing": true}\n'  # bytes that can only follow are found with the mask, not all of them in advance
_JSON_OPTIONS = {
    "whitespace_pattern": r"[ \t\n\r]{0,20}",  # room for indentation, and an end to a model that would write spaces for ever
    "json_allowed_escapes": r"nrbtf\"",  # with \u a name could be written in ways that get round the schema of the property
    "lenient": False,
    "coerce_one_of": False,
}


def grammar_source(wanted: StructuredOutput, *, space: bool) -> str:
    """`space`: a space comes before the output. Raises `InvalidRequestError`."""
    try:
        return f"{_OPTIONS}start: {'/ / ' if space else ''}root\n{_root(wanted)}\n"
    except (SchemaError, RegexError, GbnfError) as error:
        raise refusal(wanted, str(error)) from error


def refusal(wanted: StructuredOutput, description: str) -> InvalidRequestError:
    """Names the field that is set."""
    names = ("json_schema", "regex", "grammar", "choice", "json_object")
    name = next(name for name in names if getattr(wanted, name))
    return InvalidRequestError.of(f"structured_output.{name}", description)


def _root(wanted: StructuredOutput) -> str:
    if wanted.json_schema is not None:
        return _json(fit_schema(str(wanted.json_schema)))
    if wanted.json_object:
        return _json({"type": "object"})
    if wanted.regex is not None:
        return f"root: /{whole_text(wanted.regex)}/"
    if wanted.choice:
        return f"root: /{'|'.join(map(quoted, wanted.choice))}/"
    assert wanted.grammar is not None
    return rules_of(wanted.grammar)


def _json(schema: dict[str, object]) -> str:
    return f"root: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
