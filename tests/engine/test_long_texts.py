"""Long texts: how many tokens they have at least, with every kind of tokenizer, and what they may cost."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
import tokenizers
from slow_cases import slow_but
from tokenizers import AddedToken, normalizers, pre_tokenizers

import aengine
from aengine import InvalidRequestError
from aengine.api import request as chat_prompts
from aengine.tokenizer import tokenizer as tokenizer_module
from aengine.tokenizer.bpe_codec import BpeCodec
from aengine.tokenizer.tokenizer import Tokenizer

DEMO = Path(aengine.__file__).parent / "models" / "demo_model"
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
@pytest.mark.parametrize("piece", slow_but([20], [7, 20, 150]))
def test_pieces_count_for_no_more_tokens_than_the_whole_has(kind: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = KINDS[kind]()
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", piece)
    monkeypatch.setattr(tokenizer_module, "ASSUMED_TOKEN_BYTES", 1)  # a smaller margin than any that counts
    draw = random.Random(kind)
    for _ in range(20):
        text = random_text(draw, draw.randint(20, 300))
        counts = list(tokenizer.count_pieces(text))
        assert len(counts) == -(-len(text) // piece)
        assert counts == sorted(counts)
        assert counts[-1] <= len(core.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("text", ["it is a truth " * 4000, "a" * 50_000, "漢字、" * 20_000])
def test_pieces_count_for_nearly_all_tokens(text: str) -> None:
    demo = Tokenizer.load(DEMO)
    num_tokens = len(demo.encode(text))
    *_, count = demo.count_pieces(text)
    assert 0.9 * num_tokens < count <= num_tokens


class TestLimits:
    @pytest.fixture
    def demo(self) -> Tokenizer:
        return Tokenizer.load(DEMO)

    def test_what_a_tokenizer_in_python_is_given_is_bounded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
        tokenizer = Tokenizer.load(tmp_path)
        monkeypatch.setattr(tokenizer_module, "MAX_SLOW_CHARACTERS", 40)
        assert len(tokenizer.encode("a " * 20, add_special_tokens=False)) == 40
        with pytest.raises(InvalidRequestError, match="prompt: 42 characters are more than 40, as many as this model's tokenizer can take"):
            tokenizer.encode("a " * 21)

    def test_a_panic_of_the_library_refuses_the_text(self, demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        codec = demo._codec
        assert isinstance(codec, BpeCodec)
        for core in (codec._encode._words._core, codec.whole()._core):
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
        monkeypatch.setattr(chat_prompts, "MAX_CHAT_CHARACTERS", 100)
        for message in (
            {"role": "user", "content": "a" * 100},
            {"role": "user", "content": [{"type": "text", "text": "a" * 100}]},
            {"role": "user", "content": "a", "more": [0] * 10**5},
        ):
            with pytest.raises(InvalidRequestError, match="prompt: the messages hold more than 100 characters and other values"):
                demo.render_chat([message])
