"""`StructuredOutput` as a grammar of xgrammar. Owns the options and the notation; knows no vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aengine.engine.json_schema import SchemaError, fit_schema
from aengine.engine.regex_dialect import RegexError, whole_text
from aengine.errors import FieldViolation, InvalidRequestError
from aengine.params import StructuredOutput

if TYPE_CHECKING:
    import xgrammar

MAX_REGEX_CHARACTERS = 8192
"""The time to compile an expression grows with the square of its length: to this one some seconds."""
MAX_WHITESPACE = 20
"""Between two elements of JSON: room for indentation, and an end to a model that would write spaces for ever."""
_PLAIN = frozenset(map(chr, range(0x20, 0x7F))) - {'"', "\\"}


def build_grammar(wanted: StructuredOutput) -> xgrammar.Grammar:
    """Raises `InvalidRequestError`, or `RuntimeError` with the compiler's message."""
    import xgrammar

    grammar = xgrammar.Grammar
    try:
        if wanted.json_schema is not None:
            return grammar.from_json_schema(fit_schema(str(wanted.json_schema)), max_whitespace_cnt=MAX_WHITESPACE)
        if wanted.json_object:
            return grammar.from_json_schema('{"type": "object"}', max_whitespace_cnt=MAX_WHITESPACE)
        if wanted.regex is not None:
            if len(wanted.regex) > MAX_REGEX_CHARACTERS:
                raise RegexError(f"{len(wanted.regex)} characters are more than {MAX_REGEX_CHARACTERS}")
            return grammar.from_regex(whole_text(wanted.regex))
        if wanted.choice:
            return grammar.from_ebnf("root ::= " + " | ".join(_literal(choice) for choice in wanted.choice))
        assert wanted.grammar is not None
        return grammar.from_ebnf(wanted.grammar)
    except (SchemaError, RegexError) as error:
        raise refusal(wanted, str(error)) from error


def refusal(wanted: StructuredOutput, description: str) -> InvalidRequestError:
    """Names the field that is set."""
    names = ("json_schema", "regex", "grammar", "choice", "json_object")
    name = next(name for name in names if getattr(wanted, name))
    return InvalidRequestError((FieldViolation(f"structured_output.{name}", description),))


def _literal(text: str) -> str:
    """A string of the grammar's notation that matches just `text`."""
    if "\0" in text:
        raise RegexError("a choice with the character U+0000 is not supported")  # the compiler would end the string there
    return '"' + "".join(character if character in _PLAIN else f"\\U{ord(character):08x}" for character in text) + '"'
