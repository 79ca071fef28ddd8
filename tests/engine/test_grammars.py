"""From a `StructuredOutput` to text that obeys it: every kind of grammar, every tokenizer. Runs in half a minute."""

from __future__ import annotations

import json
import re
import sys
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import grammar_decoding
import pytest
import tiny_tokenizers
from tokenizers import Tokenizer as CoreTokenizer

import aengine
from aengine.engine import grammars
from aengine.engine.grammars import GrammarCompiler
from aengine.engine.tokenizer import Tokenizer
from aengine.errors import InvalidRequestError
from aengine.params import StructuredOutput

pytest.importorskip("xgrammar")
jsonschema = pytest.importorskip("jsonschema")

VOCAB_SIZE = 4096 + 13  # a model may have more logits than there are tokens
EOS = 4095


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(aengine.__file__).parent / "demo_model")


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))


def load(core: CoreTokenizer, directory: Path) -> Tokenizer:
    core.save(str(directory / "tokenizer.json"))
    return Tokenizer.load(directory)


def refused(compiler: GrammarCompiler, wanted: StructuredOutput) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        compiler.compile(wanted).result()
    return caught.value


# ---- outputs -----------------------------------------------------------------------------------------------------------------


def test_300_schemas(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    schemas = [grammar_decoding.random_schema(seed) for seed in range(300)]
    wanted = [StructuredOutput(json_schema=schema) for schema in schemas]
    texts = grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=400)
    assert sum(text is None for text in texts) <= 6
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
    compiler = GrammarCompiler(tokenizer, vocab_size, (eos,))
    choices = tuple(one for one in SUPPORTED[name] if name != "no_decoder" or "word1" not in one)
    wanted = [StructuredOutput(choice=choices)] * 50 + [StructuredOutput(choice=(one,)) for one in choices]
    texts = grammar_decoding.decode(compiler, tokenizer, vocab_size, eos, wanted, max_tokens=100)
    assert set(texts) <= set(choices)
    assert tuple(texts[50:]) == choices


@pytest.mark.parametrize("name", ["unigram_byte_fallback", "bpe_byte_fallback", "metaspace", "byte_level"])
def test_regex_and_json_with_any_tokenizer(name: str, tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.ALL[name](), tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (1,))
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
    error = refused(GrammarCompiler(tokenizer, tokenizer.vocab_size, (0,)), StructuredOutput(choice=("a",)))
    assert error.field == "structured_output"
    assert "tokenizer" in str(error)


def test_what_the_vocabulary_cannot_write_is_refused(tmp_path: Path) -> None:
    tokenizer = load(tiny_tokenizers.no_decoder(), tmp_path)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (0,))
    assert "vocabulary" in str(refused(compiler, StructuredOutput(choice=("maybe",))))


# ---- refusals ----------------------------------------------------------------------------------------------------------------

INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("wanted", "field", "words"),
    [
        ({"json_schema": "{"}, "json_schema", "not JSON"),
        ({"json_schema": {"type": "zzz"}}, "json_schema", 'Unsupported type "zzz"'),
        ({"json_schema": {"type": "string", "pattern": "a("}}, "json_schema", "parenthesis"),
        ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "json_schema", "minimum greater than maximum"),
        ({"json_schema": '{"items":' * 200 + "{}" + "}" * 200}, "json_schema", "nested deeper"),
        ({"json_schema": "[" * 100_000}, "json_schema", "not JSON"),
        ({"json_schema": {"$ref": "#"}}, "json_schema", "vocabulary"),
        ({"json_schema": {"$ref": "#/$defs/gone"}}, "json_schema", "#/$defs/gone"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema", "not a reference into this schema"),
        ({"regex": "(a"}, "regex", "parenthesis is not closed"),
        ({"regex": r"(a)\1"}, "regex", "Backreference"),
        ({"regex": "a^b"}, "regex", "anchor"),
        ({"regex": r"\Aa\Z"}, "regex", r"\A"),
        ({"regex": "a" * 10_000}, "regex", "10000 characters"),
        ({"regex": r"\ud800"}, "regex", "not a character"),
        ({"choice": ("a\0b",)}, "choice", "U+0000"),
        ({"grammar": "root := a"}, "grammar", "EBNF"),
        ({"grammar": 'start ::= "a"'}, "grammar", "root"),
        ({"grammar": "root ::= other"}, "grammar", "other"),
    ],
    ids=lambda value: f"{value!s:.40}",
)
def test_bad_grammars(compiler: GrammarCompiler, wanted: dict[str, Any], field: str, words: str) -> None:
    error = refused(compiler, StructuredOutput(**wanted))
    assert error.field == f"structured_output.{field}"
    assert words in str(error)
    assert ".cc:" not in str(error)


@pytest.mark.parametrize(
    "schema",
    [
        {"not": INTEGER},
        {"if": INTEGER, "then": {"minimum": 3}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": INTEGER},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"type": "number", "multipleOf": 0.5},
        {"type": "string", "pattern": "a*", "maxLength": 3},
        {"type": "string", "format": "date", "maxLength": 3},
        {"allOf": [INTEGER, {"minimum": 3}]},
        {"anyOf": [{"minimum": 3}], "type": "integer"},
        {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "number"}]},
        {"$ref": "#/$defs/a", "maximum": 1, "$defs": {"a": INTEGER}},
        {"minimum": 3, "maxLength": 2},
        {"type": "object", "required": ["a"], "additionalProperties": False},
        {"type": "integer", "const": "x"},
    ],
    ids=str,
)
def test_what_cannot_be_enforced_is_refused(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    assert refused(compiler, StructuredOutput(json_schema={"type": "array", "items": schema})).field == "structured_output.json_schema"


def test_one_of_that_cannot_overlap(tokenizer: Tokenizer, compiler: GrammarCompiler) -> None:
    def tagged(kind: str) -> dict[str, Any]:
        return {"type": "object", "properties": {"kind": {"const": kind}, "v": {"type": "boolean"}}, "required": ["kind", "v"]}

    schema = {"oneOf": [tagged("a"), {"$ref": "#/$defs/b"}], "$defs": {"b": tagged("b")}}
    wanted = [StructuredOutput(json_schema=schema)] * 20
    for text in grammar_decoding.decode(compiler, tokenizer, VOCAB_SIZE, EOS, wanted, max_tokens=300):
        assert text is not None
        jsonschema.validate(json.loads(text), schema)


def test_no_end_of_sequence_id(tokenizer: Tokenizer) -> None:
    assert "end-of-sequence" in str(refused(GrammarCompiler(tokenizer, VOCAB_SIZE, ()), StructuredOutput(regex="a")))


def test_without_xgrammar(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    error = refused(GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,)), StructuredOutput(regex="a"))
    assert error.field == "structured_output"
    assert "pip install aengine[structured]" in str(error)


# ---- threads and cache -------------------------------------------------------------------------------------------------------


class _Gate:
    """Stands before the real compiler: counts, and holds those back whose expression says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[str | None] = []
        self.open = threading.Event()
        real = grammars.build_grammar

        def build(wanted: StructuredOutput) -> Any:
            self.compiled.append(wanted.regex)
            if "slow" in (wanted.regex or ""):
                assert self.open.wait(60)
            return real(wanted)

        monkeypatch.setattr(grammars, "build_grammar", build)


def test_the_same_grammar_is_compiled_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    futures = [compiler.compile(StructuredOutput(regex="slow")) for _ in range(10)]
    assert futures[3].cancel()
    gate.open.set()
    done = [future.result(60) for index, future in enumerate(futures) if index != 3]
    assert len(set(map(id, done))) == 1
    again = compiler.compile(StructuredOutput(regex="slow"))
    assert again.done()
    assert again.result() is done[0]
    assert gate.compiled == ["slow"]


def test_a_failure_is_not_kept(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    for _ in range(2):
        refused(compiler, StructuredOutput(regex="(a"))
    assert gate.compiled == ["(a", "(a"]


def test_the_cache_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch)
    monkeypatch.setattr(grammars, "MAX_CACHED", 3)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,))
    for regex in ("a", "b", "c", "a", "d", "a", "b"):  # b is the one not used for longest when d comes
        compiler.compile(StructuredOutput(regex=regex)).result(60)
    assert gate.compiled == ["a", "b", "c", "d", "b"]
    small = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), max_cached_bytes=1)
    for _ in range(2):
        small.compile(StructuredOutput(regex="e")).result(60)
    assert gate.compiled[5:] == ["e", "e"]


def test_compiles_that_take_for_ever_leave_room_for_others(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate(monkeypatch)
    compiler = GrammarCompiler(tokenizer, VOCAB_SIZE, (EOS,), timeout=0.3)
    stuck = [compiler.compile(StructuredOutput(regex=f"slow{index}")) for index in range(grammars.MAX_ABANDONED + grammars.MAX_THREADS)]
    others = [compiler.compile(StructuredOutput(regex=f"fine{index}")) for index in range(3)]
    wait([*stuck, *others], 60)
    assert all("did not compile within 0.3 seconds" in str(future.exception()) for future in stuck)
    assert all("all compiling threads are stuck" in str(future.exception()) for future in others)
    again = compiler.compile(StructuredOutput(regex="slow0"))
    assert "did not compile" in str(again.exception(60))  # known to be stuck: refused at once, and not started again
    assert gate.compiled.count("slow0") == 1
    gate.open.set()
    for thread in threading.enumerate():
        if thread.name == "aengine-grammar":
            thread.join(60)
    assert compiler.compile(StructuredOutput(regex="slow0")).result(60) is not None  # it came through after all
    assert compiler.compile(StructuredOutput(regex="fine9")).result(60) is not None
