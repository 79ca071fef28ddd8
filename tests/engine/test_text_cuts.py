"""Texts in pieces have the ids of the whole text, with every kind of tokenizer; where that is not certain, they are not cut."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

import aengine
from aengine import InvalidRequestError
from aengine.engine import tokenizer as tokenizer_module
from aengine.engine.regex_paths import RegexPaths, UnsupportedPatternError
from aengine.engine.text_cuts import TextCuts
from aengine.engine.tokenizer import Tokenizer

DEMO = Path(aengine.__file__).parent / "demo_model"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # Qwen's too
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = [
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
]
BLOOM = r" ?[^(\s|[.,!?…。\uff0c、।\u06d4،])]+"
POSSESSIVE = r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s*[\r\n]|\s+(?!\S)|\s"
PATTERNS = [GPT2, LLAMA3, O200K, *DEEPSEEK, BLOOM, POSSESSIVE]


def demo_with(*patterns: str, behavior: str = "Isolated", normalizer: str | None = None, **byte_level: Any) -> tokenizers.Tokenizer:
    """The bundled model's BPE over bytes behind other stages."""
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": behavior == "Removed"} for pattern in patterns
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not patterns, **byte_level}
    state = json.loads((DEMO / "tokenizer.json").read_text())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, last]}
    state["normalizer"] = normalizer and {"type": normalizer}
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def with_stages(core: tokenizers.Tokenizer, normalizer: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    core.normalizer, core.pre_tokenizer = normalizer, pre_tokenizer
    return core


def with_choosy_tokens() -> tokenizers.Tokenizer:
    core = demo_with(LLAMA3)
    core.add_special_tokens([AddedToken("<|x|>", lstrip=True, rstrip=True), AddedToken("<|y|>", rstrip=True)])
    core.add_tokens([AddedToken("word b", normalized=True), AddedToken("foo", single_word=True)])
    return core


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    **{f"tiny {name}": build for name, build in tiny_tokenizers.ALL.items()},
    "gpt2": demo_with,
    "gpt2 prefix space": lambda: demo_with(add_prefix_space=True),
    "llama3": lambda: demo_with(LLAMA3),
    "o200k": lambda: demo_with(O200K),
    "deepseek": lambda: demo_with(*DEEPSEEK),
    "bloom": lambda: demo_with(BLOOM),
    "possessive": lambda: demo_with(POSSESSIVE),
    "removed": lambda: demo_with(LLAMA3, behavior="Removed"),
    "merged": lambda: demo_with(LLAMA3, behavior="MergedWithNext"),
    **{f"qwen {form}": lambda form=form: demo_with(LLAMA3, normalizer=form) for form in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")},  # type: ignore[misc]
    "gemma": lambda: with_stages(
        tiny_tokenizers.bpe_byte_fallback(), normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")
    ),
    "mistral": lambda: with_stages(
        tiny_tokenizers.bpe_byte_fallback(), None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "unigram": lambda: with_stages(
        tiny_tokenizers.unigram_byte_fallback(), None, pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    ),
    "digits": lambda: with_stages(
        demo_with(), None, pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
    "choosy tokens": with_choosy_tokens,
}
UNKNOWN = {"tiny bpe_byte_fallback", "tiny wordpiece", "tiny word_end", "tiny no_decoder"}  # are encoded whole
WORDS = [
    *("the", "It", "truth", "a", "b", "don't", "I'm", "'s", "'S", "word", "word b", " b", "foo", "ABC", "aBc", "x" * 30),
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\x1c", "\x85", "\u2028", "\u200d"),
    *("123", "4567", "\uff11\uff12", "٣", "Ⅷ", "½", ".", "...", "!?", "(", ")", "/", "{", "_", "-", "=", "\\", "\uff0c", "。"),
    *("漢字", "是", "naïve", "e\u0301", "\u0301", "\u1100\u1161\u11a8", "가", "각", "क्", "ा", "\u017f", "ß", "ﬁ", "ﷺ", "İ", "Σς"),
    *("😀", "👨‍👩‍👧", "🏳️‍🌈", "<|x|>", "<|y|>", "<bos>", "<think>", "<s>", "<|im_start|>"),
]


def random_text(draw: random.Random, count: int) -> str:
    return "".join(draw.choice(WORDS) if draw.random() < 0.9 else chr(draw.randrange(0x20, 0x3100)) for _ in range(count))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_ids_of_the_whole(kind: str) -> None:
    core = KINDS[kind]()
    cuts = TextCuts.of(core)
    assert (cuts is None) == (kind in UNKNOWN)
    if cuts is None:
        return
    draw = random.Random(kind)
    num_cuts = 0
    for _ in range(150):
        text = random_text(draw, draw.randint(2, 30))
        places = [place for place in range(1, len(text)) if cuts.may_cut(text[place - 1], text[place])]
        num_cuts += len(places)
        borders = [0, *sorted(draw.sample(places, draw.randint(0, len(places)))), len(text)]
        pieces = [text[start:end] for start, end in itertools.pairwise(borders)]
        ids = [token_id for piece in pieces for token_id in core.encode(piece, add_special_tokens=False).ids]
        assert ids == core.encode(text, add_special_tokens=False).ids, pieces
    assert num_cuts > 0 or kind == "merged"


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_has_the_ids_that_the_library_gives_it(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = KINDS[kind]()
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 20)
    draw = random.Random(kind)
    num_pieces = 0
    for special in (True, False):
        text = " and the " + random_text(draw, 300)
        pieces = list(tokenizer.encode_in_pieces(text, add_special_tokens=special))
        num_pieces += len(pieces)
        assert [token_id for piece in pieces for token_id in piece.ids] == core.encode(text, add_special_tokens=special).ids
        assert tokenizer.encode(text, add_special_tokens=special) == core.encode(text, add_special_tokens=special).ids
        assert [piece.left for piece in pieces] == sorted((piece.left for piece in pieces), reverse=True)
        assert pieces[-1].left == 0
    assert num_pieces > 20 or kind in UNKNOWN or "merged" in kind


def test_ordinary_text_can_be_cut_often() -> None:
    text = "It is a truth universally acknowledged,\nthat a single man (in possession of 100 pounds) must be in want of a wife. "
    for kind in ("gpt2", "gpt2 prefix space", "llama3", "o200k", "deepseek", "qwen NFC", "gemma", "mistral", "unigram"):
        cuts = TextCuts.of(KINDS[kind]())
        assert cuts is not None
        words = [place for place in range(1, len(text)) if text[place] == " " and text[place - 1].isalpha()]
        assert all(cuts.may_cut(text[place - 1], " ") for place in words), kind
    cuts = TextCuts.of(KINDS["choosy tokens"]())
    assert cuts is not None
    assert cuts.may_cut("e", " ")
    assert not cuts.may_cut("o", " "), "which may be the end of one of them"
    cuts = TextCuts.of(KINDS["qwen NFC"]())
    assert cuts is not None
    assert cuts.may_cut("字", "\uff0c"), "and so can text without spaces"


class TestRegexPaths:
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_what_is_read_is_what_matches_hold(self, pattern: str) -> None:
        """Two characters that some match holds side by side are read; and if they are not, one is always the end of a match or of none."""
        paths = RegexPaths(pattern)
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        draw = random.Random(pattern)
        for _ in range(300):
            text = random_text(draw, 6)
            borders = {start for _, (start, _) in split.pre_tokenize_str(text)}
            for place in range(1, len(text)):
                left, right = text[place - 1], text[place]
                if not paths.reads(left, right) and (paths.always_takes(left) or paths.always_takes(right)):
                    assert place in borders, (text, place)

    def test_what_is_taken(self) -> None:
        paths = RegexPaths(LLAMA3)
        assert all(paths.always_takes(character) for character in "aé漢1. \n\u00a0")
        assert not paths.reads("a", " ")
        assert not paths.reads("a", "\n")
        assert paths.reads(".", "\n")
        assert paths.reads("\n", "a"), "by the lookahead"
        assert paths.reads("'", "S"), "in either case"
        assert paths.reads("ﬁ", "x"), "a character that is two letters in the other case"
        digits = RegexPaths(r"\p{N}{1,3}")
        assert (digits.takes("1"), digits.takes("a")) == (True, False)
        assert RegexPaths(r"a{2}").reads("a", "a")
        assert not RegexPaths(r"a{1}").reads("a", "a")
        assert not RegexPaths(r"ab").always_takes("a")
        assert not RegexPaths(r"a(?!b)").always_takes("a")
        assert RegexPaths(r"a(?:b|)").always_takes("a")
        assert not RegexPaths(r"b?+a").always_takes("a"), "what is possessive is not taken for optional"

    @pytest.mark.parametrize(
        "pattern",
        [r"^a", r"a$", r"\ba", r"(?<=a)b", r"(?<!a)b", r"(a)\1", r"\Ga", r"(?i)a", r"(?m:a)", r"(?>a)", r"a*", r"a|", r"a{", r"a{,}", "(a",
         "a)", r"[a", r"[]a]", r"[^]a]", r"\p{L", "*a", r"\X", r"a\k<x>", r"(?P<x>a)", r"(?#x)a", "\\"],
    )  # fmt: skip
    def test_what_is_not_known_is_not_guessed(self, pattern: str) -> None:
        with pytest.raises(UnsupportedPatternError):
            RegexPaths(pattern)


class TestLimits:
    @pytest.fixture
    def demo(self) -> Tokenizer:
        return Tokenizer.load(DEMO)

    def test_a_text_that_cannot_be_cut_is_bounded(self, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 100)
        monkeypatch.setattr(tokenizer_module, "MAX_UNCUT_CHARACTERS", 1000)
        for run in (" " * 1000, "a" * 1000, "the " + "-" * 990 + " the"):
            assert demo.encode(run) == demo._codec.encode(run, True)
        for run, start in ((" " * 1001, 0), ("the " * 10 + "a" * 1001 + " the" * 100, 39)):
            with pytest.raises(InvalidRequestError, match=rf"prompt: more than 1000 characters .* in one go, from character {start} on"):
                demo.encode(run)
        assert demo.encode("漢字、" * 1000) == demo._codec.encode("漢字、" * 1000, True)

    def test_without_a_known_cut_the_whole_text_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tiny_tokenizers.wordpiece().save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.load(tmp_path)
        monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 10)
        monkeypatch.setattr(tokenizer_module, "MAX_UNCUT_CHARACTERS", 40)
        assert len(list(tokenizer.encode_in_pieces("a " * 20))) == 1
        with pytest.raises(InvalidRequestError, match="prompt: 42 characters that are tokenized in one go are more than 40"):
            tokenizer.encode("a " * 21)

    def test_a_panic_of_the_library_refuses_the_text(self, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        core = tiny_tokenizers.byte_level()
        monkeypatch.setattr(demo._codec, "_core", core)
        core.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"(?:a|aa)+b"), "isolated")  # with too many ways to fail
        for field, fail in (("prompt", demo.encode), ("prompt", demo.encode_located), ("bad_words", demo.bad_word_ids)):
            with pytest.raises(InvalidRequestError, match="the model's tokenizer fails on this text") as caught:
                fail("a" * 40 + "cb")
            assert caught.value.field == field

    def test_the_least_number_of_tokens(self, demo: Tokenizer, tmp_path: Path) -> None:
        assert [demo.least_tokens(count) for count in (0, 1, 64, 65, 6400)] == [0, 1, 1, 2, 100]
        core = tiny_tokenizers.byte_level()
        core.add_tokens(["é" * 50])
        core.save(str(tmp_path / "tokenizer.json"))
        assert [Tokenizer.load(tmp_path).least_tokens(count) for count in (1, 100, 101)] == [1, 1, 2]

    def test_a_chat_that_holds_too_much_is_not_rendered(self, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tokenizer_module, "MAX_CHAT_CHARACTERS", 100)
        deep: Any = "a"
        for _ in range(200):
            deep = [deep]
        for message in (
            {"role": "user", "content": "a" * 100},
            {"role": "user", "content": [{"type": "text", "text": "a" * 100}]},
            {"role": "user", "content": "a", "more": [0] * 10**5},
            {"role": "user", "content": "a", "more": deep},
        ):
            with pytest.raises(InvalidRequestError, match="prompt: the messages hold more than 100 characters and other values"):
                demo.chat_text([message])
