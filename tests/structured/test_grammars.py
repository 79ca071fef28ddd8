"""From a `StructuredOutput` to text that obeys it: every kind of grammar, every tokenizer. Runs in half a minute."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import grammar_decoding
import pytest
import tiny_tokenizers
from enforced_schemas import ENFORCED
from hang_guard import HANG_SECONDS
from tokenizers import Tokenizer as CoreTokenizer

from aengine.api.errors import InvalidRequestError
from aengine.api.params import StructuredOutput
from aengine.structured import grammars
from aengine.structured.grammars import GrammarCompiler
from aengine.tokenizer.tokenizer import Tokenizer
from aengine.tokenizer.vocabulary import read_vocabulary

pytest.importorskip("llguidance")
jsonschema = pytest.importorskip("jsonschema")

VOCAB_SIZE = 4096 + 13  # a model may have more logits than there are tokens
EOS = 4095


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return grammar_decoding.compiler_for(tokenizer, VOCAB_SIZE, (EOS,))


def load(core: CoreTokenizer, directory: Path) -> Tokenizer:
    core.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def refused(compiler: GrammarCompiler, wanted: StructuredOutput) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(wanted).result()
    return caught.value


# ---- outputs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_300_schemas(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schemas = [grammar_decoding.random_schema(seed) for seed in range(300)]
    wanted = [StructuredOutput(json_schema=schema) for schema in schemas]
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=400)
    assert sum(text is None for text in texts) <= 15
    for schema, text in zip(schemas, texts, strict=True):
        if text is not None:
            jsonschema.Draft202012Validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("regex", [*grammar_decoding.PATTERNS, r"[^\d]{2}\s", r"(\w\W){3}", r"a|b|", r"日本|語", r"\.\*\$\\ \_"])
def test_regex(tokenizer: Tokenizer, compiler: GrammarCompiler, regex: str) -> None:
    wanted = [StructuredOutput(regex=regex)] * 20
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=200)
    assert [text for text in texts if text is None or not re.fullmatch(regex, text)] == []


CHOICES = ("yes", "no", "y", 'a "quoted" \\ one', "two\nlines\t", "日本", "🙂👩‍👩‍👧", " leading", "trailing ", "ＡBC", "[a-z]*", "\x7f\x01")  # noqa: RUF001


def test_choice(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    wanted = [StructuredOutput(choice=CHOICES)] * 100 + [StructuredOutput(choice=(one,)) for one in CHOICES]
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=60)
    assert set(texts) == set(CHOICES)
    assert tuple(texts[100:]) == CHOICES


def test_json_object(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    wanted = [StructuredOutput(json_object=True)] * 40
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=400)
    ended = [json.loads(text) for text in texts if text is not None]
    assert ended
    assert all(isinstance(one, dict) for one in ended)


def test_ebnf(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    wanted = [StructuredOutput(grammar='root ::= "(" root ")" | [0-9]{2}')] * 20
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=100)
    for text in texts:
        if text is not None:
            depth = text.count("(")
            assert re.fullmatch(rf"\({{{depth}}}[0-9]{{2}}\){{{depth}}}", text)
    assert None not in texts


def test_a_backslash_in_a_class_of_ebnf(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    wanted = [StructuredOutput(grammar=r"root ::= [\\\\U00000041]")] * 50
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=3)
    assert set(texts) == set("\\U041")


# ---- tokenizers --------------------------------------------------------------------------------------------------------------

# Text that each of the tokenizers can write.
PLAIN = ("a truth", "this truth is so", "man")
SUPPORTED = dict.fromkeys(("unigram_byte_fallback", "bpe_byte_fallback", "metaspace", "byte_level"), PLAIN)
SUPPORTED = dict.fromkeys(SUPPORTED, (*PLAIN, *CHOICES)) | {"wordpiece": PLAIN, "no_decoder": ("word1 word2", "word3")}


@pytest.mark.parametrize("name", SUPPORTED)
def test_choice_with_any_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.ALL[name](), tmp_path)
    vocab_size = tokenizer.vocab_size + 40
    eos = 1  # a special token in most, a word in the others: the id that ends a sequence is never text
    compiler = grammar_decoding.compiler_for(tokenizer, vocab_size, (eos,))
    choices = tuple(one for one in SUPPORTED[name] if name != "no_decoder" or "word1" not in one)
    wanted = [StructuredOutput(choice=choices)] * 50 + [StructuredOutput(choice=(one,)) for one in choices]
    texts = grammar_decoding.decode(compiler, tokenizer, vocab_size, eos, wanted, max_tokens=100)
    assert set(texts) <= set(choices)
    assert tuple(texts[50:]) == choices


@pytest.mark.parametrize("name", ["unigram_byte_fallback", "bpe_byte_fallback", "metaspace", "byte_level"])
def test_regex_and_json_with_any_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.ALL[name](), tmp_path)
    compiler = grammar_decoding.compiler_for(tokenizer, tokenizer.vocab_size, (1,))
    schema = {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 1, "maxItems": 3}
    regex = r" ?.{2,8} [^a]x"
    wanted = [StructuredOutput(regex=regex), StructuredOutput(json_schema=schema)] * 30
    texts = grammar_decoding.decode(compiler, tokenizer, tokenizer.vocab_size, 1, wanted, max_tokens=400)
    for text in texts[::2]:
        assert text is not None
        assert re.fullmatch(regex, text)
    for text in texts[1::2]:
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


def test_tokenizers_whose_texts_do_not_add_up_are_refused(tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.word_end(), tmp_path)
    error = refused(grammar_decoding.compiler_for(tokenizer, tokenizer.vocab_size, (0,)), StructuredOutput(choice=("a",)))
    assert error.field == "structured_output"
    assert "tokenizer" in str(error)


def test_what_the_vocabulary_cannot_write_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.no_decoder(), tmp_path)
    compiler = grammar_decoding.compiler_for(tokenizer, tokenizer.vocab_size, (0,))
    assert "vocabulary" in str(refused(compiler, StructuredOutput(choice=("maybe",))))


# ---- refusals ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "field", "words"),
    [
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"json_schema": {"type": "zzz"}}, "json_schema", "Invalid type: zzz"),
        ({"json_schema": {"type": "string", "pattern": "a("}}, "json_schema", "unclosed group"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema", "nothing satisfies it"),
        ({"json_schema": '{"not":' * 200 + "{}" + "}" * 200}, "json_schema", "nested deeper"),
        ({"json_schema": "[" * 100_000}, "json_schema", "not JSON"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "refers to itself"),
        ({"json_schema": {"$ref": "#/$defs/gone"}}, "json_schema", "#/$defs/gone"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema", "not a schema in here; nothing is fetched"),
        ({"regex": "(a"}, "regex", "not a regular expression: unclosed group"),
        ({"regex": r"(a)\1"}, "regex", "backreferences"),
        ({"regex": "a^b"}, "regex", "anchor"),
        ({"regex": r"\Aa\Z"}, "regex", r"\A"),
        ({"regex": r"\ud800"}, "regex", "not a character"),
        ({"regex": r"\bfoo"}, "regex", "word boundaries"),
        ({"regex": "(?=a)a"}, "regex", "(?="),
        ({"regex": "(?i)a"}, "regex", "(?i"),
        ({"regex": "a*+"}, "regex", "possessive"),
        ({"regex": "a{,3}"}, "regex", "belongs to no count"),
        ({"json_schema": {"minimum": 10**1001}}, "json_schema", "not a number that can be enforced"),
        ({"json_schema": '{"maximum": 1e1001}'}, "json_schema", "not a number that can be enforced"),
        ({"json_schema": '{"maximum": NaN}'}, "json_schema", "not a number that can be enforced"),
        ({"json_schema": {"format": "colour"}, "strict_formats": True}, "json_schema", "'colour' cannot be enforced"),
        (
            {"json_schema": {"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "exact_one_of": True},
            "json_schema",
            "#/oneOf: schemas that overlap cannot be told apart: #/oneOf/0: what does not satisfy 'pattern'",
        ),
        ({"json_schema": {"oneOf": [{"type": "string"}] * 2}, "exact_one_of": True}, "json_schema", "nothing satisfies it"),
        ({"grammar": "root := a"}, "grammar", "not understood"),
        ({"grammar": "root ::= a\na ::= b |"}, "grammar", "no rule 'b'"),
        ({"grammar": 'root ::= "\\q"'}, "grammar", "escape"),
        ({"grammar": 'root ::= ("a"'}, "grammar", "not closed"),
        ({"grammar": 'start ::= "a"'}, "grammar", "root"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_bad_grammars(compiler: GrammarCompiler, wanted: dict[str, Any], field: str, words: str) -> None:
    error = refused(compiler, StructuredOutput(**wanted))
    assert error.field == f"structured_output.{field}"
    assert words in str(error)
    assert not re.search(r"\.cc:|start:|at \d+\(|Lark", str(error)), "it speaks of what the compiler is given"


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"pattern": "a"}},
        {"not": {"properties": {"a": {"format": "date"}}}},
        {"if": {"multipleOf": 3}, "then": {"minimum": 3}},
        {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "array", "items": {"const": 1}, "minItems": 2}]},
        {"type": "string", "pattern": "^(?!0)[0-9]{2}$"},
        {"type": "object", "minProperties": 2},
        {"type": "object", "minProperties": 2, "propertyNames": {"pattern": "^a"}},
        {"propertyNames": {"format": "uri"}},
        {"patternProperties": {"^a.b": {"const": 2**53 + 1}}},
        {"type": "integer", "multipleOf": 7, "maximum": 10**30},
        {"divisibleBy": 2},
        {"$dynamicRef": "#a"},
        {"$defs": {"a": {"$dynamicAnchor": "a"}, "b": {"$dynamicAnchor": "a"}}, "$dynamicRef": "#a"},
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert refused(compiler, StructuredOutput(json_schema={"type": "array", "items": schema})).field == "structured_output.json_schema"


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=lambda value: f"{value!s:.60}")
def test_what_is_enforced(
    tokenizer: Tokenizer, compiler: GrammarCompiler, schema: dict[str, Any], good: tuple[str, ...], bad: tuple[str, ...]
) -> None:
    compiled = compiler.compile(StructuredOutput(json_schema=schema)).result()
    for text in good:
        assert grammar_decoding.accepts(compiled, tokenizer, text), f"{text} is left out"
    for text in bad:
        assert not grammar_decoding.accepts(compiled, tokenizer, text), f"{text} is accepted"


def test_one_of_that_cannot_overlap(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    def tagged(kind: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "v": {"type": "boolean"}},
            "required": ["kind", "v"],
            "additionalProperties": False,
        }

    schema = {"oneOf": [tagged("a"), {"$ref": "#/$defs/b"}], "$defs": {"b": tagged("b")}}
    wanted = [StructuredOutput(json_schema=schema)] * 20
    for text in grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=300):
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


def test_no_end_of_sequence_id(tokenizer: Tokenizer) -> None:
    assert "end-of-sequence" in str(refused(grammar_decoding.compiler_for(tokenizer, VOCAB_SIZE, ()), StructuredOutput(regex="a")))


# ---- bounds ------------------------------------------------------------------------------------------------------------------

SCHEMAS_THAT_TAKE_TOO_MUCH: dict[str, Any] = {
    "properties": {"properties": {f"p{i}": {"type": "integer"} for i in range(3000)}},
    "patterns": {"patternProperties": {f"^a{i}x*$": {"type": "integer"} for i in range(800)}},
    "overlapping patterns": {"patternProperties": {f"^(a|b)*a(a|b){{{i}}}$": {"minimum": i} for i in range(30)}},
    "products": {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(14)]},
    "multiples": {"prefixItems": [{"type": "integer", "multipleOf": 997}] * 20},
    "a multiple": {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]},
    "a decimal": {"type": "number", "multipleOf": 1.00001},
    "values": {"enum": list(range(20_000))},
    "an intersection": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(12)]},
    "a long pattern": {"type": "string", "pattern": "(a|b)*a(a|b){200}", "maxLength": 500, "minLength": 100},
}


@pytest.mark.parametrize("name", SCHEMAS_THAT_TAKE_TOO_MUCH)
def test_schemas_that_take_too_much_are_refused(compiler: GrammarCompiler, name: str) -> None:
    error = refused(compiler, StructuredOutput(json_schema=SCHEMAS_THAT_TAKE_TOO_MUCH[name]))
    assert error.field == "structured_output.json_schema"
    assert re.search("more than|too much|cannot|not disjoint", str(error))
    assert len(str(error)) < 400


@pytest.mark.parametrize("regex", ["(.*)*" * 400, r"(\w{1,1000}){1,1000}", "(" * 3000 + "a" + ")*" * 2000], ids="{:.20}".format)
def test_expressions_that_take_too_much_are_refused(compiler: GrammarCompiler, regex: str) -> None:
    error = refused(compiler, StructuredOutput(regex=regex))
    assert error.field == "structured_output.regex"
    assert len(str(error)) < 400


@pytest.mark.parametrize("source", ["root ::= root root | root", 'root ::= "a" root | ' + "(" * 70 + '"b"' + ")" * 70])
def test_grammars_that_lead_nowhere_are_refused(compiler: GrammarCompiler, source: str) -> None:
    assert refused(compiler, StructuredOutput(grammar=source)).field == "structured_output.grammar"


def test_what_waits_can_be_taken_back(compiler: GrammarCompiler) -> None:
    """So the queue holds nothing for requests that are gone."""
    slow = StructuredOutput(json_schema={"enum": [f"{i:x}" * 20 for i in range(10_000)]})
    busy = [compiler.compile(slow) for _ in range(2 * grammars.MAX_THREADS)]
    waiting = [compiler.compile(StructuredOutput(regex="a")) for _ in range(1000)]
    assert all(future.cancel() for future in waiting)
    last = compiler.compile(StructuredOutput(regex="b"))
    assert compiler._threads._work_queue.qsize() <= len(busy) + len(waiting) + 1
    assert last.result(HANG_SECONDS) is not None
    assert all(future.result(HANG_SECONDS) is not None for future in busy)


def test_every_request_has_a_grammar_of_its_own(compiler: GrammarCompiler) -> None:
    """It grows as it is used, up to a limit, which must not be reached by others."""
    one, other = (compiler.compile(StructuredOutput(regex="a+")).result() for _ in range(2))
    assert one.matcher is not other.matcher


def test_a_closed_compiler_takes_nothing_back(tokenizer: Tokenizer) -> None:
    closed = grammar_decoding.compiler_for(tokenizer, VOCAB_SIZE, (EOS,))
    waiting = [closed.compile(StructuredOutput(regex="a")) for _ in range(100)]
    closed.close()
    assert all(future.cancelled() or future.result() is not None for future in waiting)
    assert waiting[-1].cancelled()


def test_ids_behind_a_token_are_those_of_both_together(tokenizer: Tokenizer) -> None:
    vocabulary = read_vocabulary(tokenizer, VOCAB_SIZE)
    for text in ('{"first_name": "Anna"}', "It is a truth universally acknowledged, that", "naïve größe"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for at in range(1, len(ids)):
            behind = b"".join(vocabulary.texts[one] for one in ids[at:])
            found = vocabulary.ids_behind(ids[at - 1], behind)
            assert b"".join(vocabulary.texts[one] for one in found) == (behind if found else b"")
            assert at > 1 or list(found) == ids[1:]
    cut = " of theï".encode()[:-1]  # within a character
    assert list(vocabulary.ids_behind(ids[0], cut)) == tokenizer.encode(" of the", add_special_tokens=False)
