"""The special tokens of prompts, for tokenizers as model families publish them, with transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny_tokenizers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aengine import ModelLoadError
from aengine.tokenizer import tokenizer as ours

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEXTS = [
    "It is a truth universally acknowledged",
    "two spaces,  \n\nlines and a tab\t.",
    "emoji 😀 漢字 don't 12345",
    "<s>a </s> <|endoftext|>  b <|user|>  c <think>d",
]
LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "legacy": False}
GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def byte_level(special: str, prefix: str = "", words: bool = True) -> Tokenizer:
    """BPE over bytes with the tokens `special`; the post-processor puts those of `prefix` before a text."""
    tokenizer = Tokenizer(models.BPE())
    by_words = [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(by_words) if words else pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=380, special_tokens=special.split(), initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(tiny_tokenizers.CORPUS, trainer)
    stages: list[Any] = [processors.ByteLevel(trim_offsets=False)]
    if prefix:
        ids = [(token, tokenizer.token_to_id(token)) for token in prefix.split()]
        stages.append(processors.TemplateProcessing(single=f"{prefix} $A", special_tokens=ids))
    tokenizer.post_processor = processors.Sequence(stages)
    return tokenizer


def sentencepiece(template: str = "<s> $A", **parts: Any) -> Tokenizer:
    tokenizer = tiny_tokenizers.bpe_byte_fallback()
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1)] if "<s>" in template else [])
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def gemma() -> Tokenizer:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    splits = pre_tokenizers.Split(" ", "merged_with_previous")
    return sentencepiece(normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=splits, decoder=decoders.Sequence(stages))


def phi3() -> Tokenizer:
    tokenizer = sentencepiece("$A")
    tokenizer.add_special_tokens([AddedToken("<|user|>", rstrip=True, special=True, normalized=False)])
    return tokenizer


Maker = Callable[[], Tokenizer]
FAMILIES: dict[str, tuple[Maker, str, dict[str, Any], list[str]]] = {  # tokenizer, model_type, tokenizer_config, what is put before a text
    "llama2": (sentencepiece, "llama", {**LLAMA2, "add_bos_token": True, "add_eos_token": False}, ["<s>"]),
    "llama3": (
        lambda: byte_level("<|begin_of_text|> <|eot_id|>", "<|begin_of_text|>"),
        "llama",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        ["<|begin_of_text|>"],
    ),
    "mistral": (
        lambda: sentencepiece(normalizer=None, pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        "mistral",
        {**LLAMA2, "add_bos_token": True},
        ["<s>"],
    ),
    "qwen3": (
        lambda: byte_level("<|endoftext|> <|im_start|> <|im_end|>"),
        "qwen3",
        {"tokenizer_class": "Qwen2Tokenizer", "bos_token": None, "add_bos_token": False, "eos_token": "<|im_end|>"},
        [],
    ),
    "gemma3": (gemma, "gemma3_text", {**LLAMA2, "tokenizer_class": "GemmaTokenizer", "add_bos_token": True}, ["<s>"]),
    "phi3": (phi3, "phi3", {**LLAMA2, "add_bos_token": False}, []),
    "glm4": (
        lambda: byte_level("[gMASK] <sop> <|endoftext|>", "[gMASK] <sop>"),
        "glm4",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"},
        ["[gMASK]", "<sop>"],
    ),
    "cohere2": (
        lambda: byte_level("<BOS_TOKEN> <|END|>", "<BOS_TOKEN>", words=False),
        "cohere2",
        {"tokenizer_class": "CohereTokenizerFast", "add_bos_token": True, "bos_token": "<BOS_TOKEN>", "eos_token": "<|END|>"},
        ["<BOS_TOKEN>"],
    ),
    "deepseek": (
        lambda: byte_level("<BOS> <EOS>", "<BOS>"),
        "deepseek_v3",
        {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "bos_token": "<BOS>", "eos_token": "<EOS>"},
        ["<BOS>"],
    ),
    "gpt_oss": (
        lambda: byte_level("<|startoftext|> <|return|>"),
        "gpt_oss",
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
        [],
    ),
    "olmo2": (lambda: byte_level("<|endoftext|> <|pad|>"), "olmo2", GPT2, []),
    "granite": (lambda: byte_level("<|endoftext|>"), "granite", {**GPT2, "add_bos_token": False}, []),
    "gpt2": (lambda: byte_level("<|endoftext|>", words=False), "gpt2", {**GPT2, "add_bos_token": True}, []),
    "gpt_neox": (lambda: byte_level("<|endoftext|>", words=False), "gpt_neox", {**GPT2, "tokenizer_class": "GPTNeoXTokenizerFast"}, []),
}


def load_both(folder: Path, settings: dict[str, Any], core: Tokenizer | None = None, /, **files: object) -> tuple[ours.Tokenizer, Any]:
    """Our tokenizer of a folder, and that of transformers."""
    from transformers import AutoTokenizer

    if core is not None:
        core.save(str(folder / "tokenizer.json"))
    for name, content in {"tokenizer_config": settings, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ours.Tokenizer.load(folder), AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def assert_same(tokenizer: ours.Tokenizer, theirs: Any, texts: Sequence[str] = TEXTS) -> None:
    for text in texts:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    build, model_type, config, prefix = FAMILIES[family]
    core = build()
    tokenizer, theirs = load_both(tmp_path, config, core, config={"model_type": model_type})
    # The normalizer of the file writes a space behind a special token. LlamaTokenizer of transformers 5 does not take it from the file.
    assert_same(tokenizer, theirs, TEXTS[:-1] if family == "llama2" else TEXTS)
    before = [core.token_to_id(token) for token in prefix]
    assert tokenizer.encode("truth") == before + tokenizer.encode("truth", add_special_tokens=False)
    assert not set(before) & set(tokenizer.encode("truth", add_special_tokens=False))


@pytest.mark.parametrize("model_type", ["opt", "gpt2"])
def test_without_tokenizer_json_the_config_says_whether_bos_is_added(model_type: str, tmp_path: Path) -> None:
    model = json.loads(byte_level("<s> <pad> </s> <unk>", words=False).to_str())["model"]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
    config = {**GPT2, "bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    config |= {"add_bos_token": model_type == "opt"}
    tokenizer, theirs = load_both(tmp_path, config, config={"model_type": model_type}, vocab=model["vocab"])
    assert_same(tokenizer, theirs)
    assert (tokenizer.encode("truth")[0] == model["vocab"]["</s>"]) is (model_type == "opt")


def described(content: str, **more: bool) -> dict[str, object]:
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True, **more}


class TestTokensOfTheConfig:
    """`tiny_tokenizers.byte_level` has <bos> and <eos> as ids 0 and 1, and <think> as its last."""

    def core(self) -> Tokenizer:
        tokenizer = tiny_tokenizers.byte_level()
        tokenizer.add_special_tokens([AddedToken("<|user|>", special=True, normalized=False)])
        return tokenizer

    def test_they_take_spaces_as_described(self, tmp_path: Path) -> None:
        core = self.core()
        added = {str(core.token_to_id("<|user|>")): described("<|user|>", rstrip=True), "1": described("<eos>")}
        tokenizer, theirs = load_both(tmp_path, {"added_tokens_decoder": added}, core)
        assert_same(tokenizer, theirs)
        assert tokenizer.encode("<|user|>  a") == tokenizer.encode("<|user|>a") != [*core.encode("<|user|>  a").ids]

    def test_those_that_follow_the_vocabulary_are_added(self, tmp_path: Path) -> None:
        core = self.core()
        size = core.get_vocab_size()
        more = {str(size): described("<|endoftext|>"), str(size + 1): described("</s>", special=False), str(size + 9): described("<s>")}
        tokenizer = load_both(tmp_path, {"added_tokens_decoder": more}, core)[0]
        assert tokenizer.vocab_size == size + 2
        assert tokenizer.encode("<|endoftext|></s>", add_special_tokens=False) == [size, size + 1]
        assert tokenizer.decode([size, size + 1]) == "</s>"

    @pytest.mark.parametrize("described", [["<eos>"], {"a": {"content": "<eos>"}}, {"1": "<eos>"}, {"1": {}}])
    def test_what_cannot_be_read(self, described: object, tmp_path: Path) -> None:
        self.core().save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": described}))
        with pytest.raises(ModelLoadError, match=r"tokenizer_config.json: added_tokens_decoder cannot be read: \w+Error\("):
            ours.Tokenizer.load(tmp_path)

    def test_special_tokens_map_names_them_if_nothing_describes_them(self, tmp_path: Path) -> None:
        names = {"eos_token": described("<think>"), "additional_special_tokens": ["<absent>"]}
        tokenizer, theirs = load_both(tmp_path, {}, self.core(), special_tokens_map=names)
        ids = tokenizer.encode("a<think>b")
        assert tokenizer.decode(ids) == "ab" == theirs.decode(ids, skip_special_tokens=True)
        tokenizer, theirs = load_both(tmp_path, {"added_tokens_decoder": {"1": described("<eos>")}}, self.core(), special_tokens_map=names)
        assert tokenizer.decode(ids) == "a<think>b" == theirs.decode(ids, skip_special_tokens=True)

    def test_special_tokens_in_a_text_may_be_text(self, tmp_path: Path) -> None:
        tokenizer, theirs = load_both(tmp_path, {"split_special_tokens": True}, self.core())
        assert_same(tokenizer, theirs)
        assert tokenizer.encode("<eos>a").count(1) == 0
