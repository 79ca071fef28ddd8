"""Our tables of byte-pair encoding against the `tokenizers` library: random tokenizers of every shape that is read, and random texts."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from aengine import ModelLoadError
from aengine.kernels.cpu.library import load_kernels
from aengine.tokenizer import bpe_codec, tokenizer
from aengine.tokenizer.bpe_codec import _COMPOSED, BpeCodec, KeptTables, read_bpe, read_bpe_codec
from aengine.tokenizer.codecs import TokenizersCodec
from aengine.tokenizer.tokenizer import Tokenizer

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SCRIPTS = [
    *((0, 0x20), (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00), (0xE00, 0x1200)),
    *((0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFF00, 0xFFF0), (0x10000, 0x10400), (0x1F300, 0x1FA00)),
]
ADDED = [
    AddedToken("<|end|>", special=True, normalized=False),
    AddedToken("<|end|><|end|>", special=True, normalized=False),
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=True),
    AddedToken("word", single_word=True, normalized=True),
    AddedToken("cafe\u0301", normalized=True),
    AddedToken("\n\n", normalized=False),
]
LETTER = r"\p{L}\p{M}"


def byte_level(*cuts: Any, ignore_merges: bool = False, normalizer: Any = None, post: Any = None, use_regex: bool = False) -> Any:
    core = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    core.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)])
    core.decoder = decoders.ByteLevel()
    if normalizer is not None:
        core.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(texts(0, 300), trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False))
    core.add_tokens(ADDED)
    if post is not None:
        core.post_processor = post
    return core


def sentence_piece(normalizer: Any, pre_tokenizer: Any = None) -> Any:
    core = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    core.normalizer = normalizer
    if pre_tokenizer is not None:
        core.pre_tokenizer = pre_tokenizer
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    special = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=special, limit_alphabet=120, max_token_length=8, show_progress=False
    )  # so that most characters have no token
    core.train_from_iterator((piece for text in texts(1, 300) for piece in text.split("\n")), trainer)
    document = json.loads(core.to_str())
    document["added_tokens"] = document["added_tokens"][:2]
    core = tokenizers.Tokenizer.from_str(json.dumps(document))
    core.add_tokens(ADDED)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return core


def texts(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)

    def part() -> str:
        kind = draw.random()
        if kind < 0.4:
            return draw.choice(tiny_tokenizers.CORPUS)[: draw.randrange(1, 40)]
        if kind < 0.75:
            first, end = draw.choice(SCRIPTS)
            return "".join(chr(draw.randrange(first, end)) for _ in range(draw.randrange(1, 10)))
        if kind < 0.85:
            return draw.choice(ADDED).content + draw.choice(["", " ", "  ", "x"])
        if kind < 0.9:
            return bytes(draw.randrange(256) for _ in range(draw.randrange(1, 12))).decode(errors="replace")
        return draw.choice([" ", "\n", "a", "ab", "漢字", "0", "▁", "é"]) * draw.randrange(1, 50)

    return ["".join(part() for _ in range(draw.randrange(8))) for _ in range(count)]


SHAPES: dict[str, Callable[[], Any]] = {
    "words": lambda: byte_level(pre_tokenizers.Split(Regex(WORDS), "isolated")),
    "whole words": lambda: byte_level(pre_tokenizers.Split(Regex(WORDS), "isolated"), ignore_merges=True),
    "composed": lambda: byte_level(pre_tokenizers.Split(Regex(WORDS), "isolated"), normalizer=normalizers.NFC()),
    "compatible": lambda: byte_level(use_regex=True, normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "gpt2": lambda: byte_level(use_regex=True, post=processors.ByteLevel(trim_offsets=True)),
    "cuts": lambda: byte_level(
        *(pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Split(Regex("[\u4e00-\u9fff]+"), "merged_with_next")),
        pre_tokenizers.Split(Regex(f"[{LETTER}]+|[^{LETTER}]"), "removed", invert=True),
        normalizer=normalizers.Sequence([]),
    ),
    "nothing cuts": lambda: byte_level(),
    "spaces": lambda: sentence_piece(normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", "merged_with_previous")),
    "spaces are left out": lambda: sentence_piece(normalizers.Replace("_", "▁"), pre_tokenizers.Split("▁", "removed", invert=True)),
    "space before": lambda: sentence_piece(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "strips": lambda: sentence_piece(normalizers.Sequence([normalizers.Strip(), normalizers.Replace(" ", "▁")])),
}


def saved(core: Any, folder: Path, **config: Any) -> Path:
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def codecs(folder: Path) -> tuple[BpeCodec, TokenizersCodec]:
    load_kernels()
    own = Tokenizer.load(folder)._codec
    assert isinstance(own, BpeCodec)
    return own, own._read_library()


def apart(codec: TokenizersCodec, text: str, literals: list[tuple[int, int]]) -> list[int] | str:
    try:
        return codec.encode_apart(text, literals, frozenset({"<|end|>", "<left>"}))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("shape", SHAPES)
def test_ids_and_texts_are_those_of_the_library(shape: str, tmp_path: Path) -> None:
    own, library = codecs(saved(SHAPES[shape](), tmp_path))
    draw = random.Random(2)
    assert (own.vocabulary(), own.vocab_size(), own.added().keys()) == (library.vocabulary(), library.vocab_size(), library.added().keys())
    assert (own.byte_ids(), own.longest_token()) == (library.byte_ids(), library.longest_token())

    def told(codec: TokenizersCodec, ids: list[int]) -> list[Any]:
        spelled = [(codec.piece(token_id), codec.omits(token_id, True)) for token_id in ids]
        return [codec.decode(ids, False), codec.decode(ids, True), *spelled]

    for text in ["", *texts(3, 300)]:
        ids = own.encode(text, add_special_tokens=True)
        assert ids == library.encode(text, add_special_tokens=True), text
        assert own.encode(text, False) == library.encode(text, False), text
        drawn = [draw.randrange(own.vocab_size() + 3) for _ in range(draw.randrange(12))]
        assert all(told(own, each) == told(library, each) for each in (ids, drawn)), (text, drawn)
    for text in texts(4, 60):
        first, last = sorted(draw.choices(range(len(text) + 1), k=2))
        assert apart(own, text, [(first, last)]) == apart(library, text, [(first, last)]), text
    assert own.encode_pair("a", "b") == library.encode_pair("a", "b")
    assert own.located("a b", True) == library.located("a b", True)


@pytest.mark.parametrize("shape", ["composed", "spaces"])
def test_what_a_config_says_of_tokens(shape: str, tmp_path: Path) -> None:
    core = SHAPES[shape]()
    size = core.get_vocab_size()
    described = {
        str(size): {"content": "<new>", "special": True, "normalized": False},
        str(size + 7): {"content": "<far>"},
        str(core.token_to_id("<left>")): {"content": "<left>", "rstrip": True, "normalized": False},
        str(size + 1): {"content": "<newer>", "single_word": True},
    }
    saved(
        core, tmp_path, added_tokens_decoder=described, eos_token="<right>", pad_token="<unknown>", split_special_tokens=shape == "spaces"
    )
    own, library = codecs(tmp_path)
    assert own.token_id("<new>") == library.token_id("<new>") == size
    assert own.token_id("<newer>") == size + 1
    assert (own._special, own.vocab_size(), own.vocabulary()) == (library._special, library.vocab_size(), library.vocabulary())
    for text in ["<new> <newer> <newer>a<left> <right> a <|end|>  <far>", *texts(5, 100)]:
        assert own.encode(text, True) == library.encode(text, True), text


def test_characters_that_composing_leaves_alone() -> None:
    inert = [chr(point) for point in range(0x10000) if not 0xD800 <= point < 0xE000 and _COMPOSED.fullmatch(chr(point))]
    assert not any(unicodedata.combining(each) or unicodedata.normalize("NFC", each) != each for each in inert)
    text = "".join(inert)
    for each in (text, text[::-1], "".join(random.Random(0).sample(inert, len(inert)))):
        assert normalizers.NFC().normalize_str(each) == each


def model_of(core: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    document = json.loads(core.to_str())
    return document, document["model"]


@pytest.mark.parametrize("pairs", [True, False])
@pytest.mark.parametrize("form", [{"ensure_ascii": True}, {"ensure_ascii": False, "indent": 1}], ids=["escaped", "as it is"])
def test_ids_with_gaps_and_merges_in_both_forms(pairs: bool, form: dict[str, Any], tmp_path: Path) -> None:
    document = json.loads(SHAPES["words"]().to_str())
    model = document["model"]
    last = max(model["vocab"], key=model["vocab"].get)
    gap = model["vocab"].pop(last)
    model["vocab"]['\U0001f600\t"\\/\b'] = gap + 100
    merges = [merge for merge in model["merges"] if "".join(merge) != last and last not in merge]
    model["merges"] = merges if pairs else [" ".join(merge) for merge in merges]
    document["added_tokens"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(document, **form), encoding="utf-8")
    own, library = codecs(tmp_path)
    assert (own.vocabulary(), own.vocab_size()) == (library.vocabulary(), library.vocab_size())
    assert (own.piece(gap), own.piece(gap + 100), own.piece(gap + 101)) == (None, '\U0001f600\t"\\/\b', None)
    assert all(own.encode(text, True) == library.encode(text, True) for text in texts(6, 50))


def changed(change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> Callable[[str], str]:
    def apply(text: str) -> str:
        document = json.loads(text)
        change(document, document["model"])
        return json.dumps(document)

    return apply


OTHERS: dict[str, Callable[[str], str]] = {
    "dropout": changed(lambda _, model: model.update(dropout=0.5)),
    "suffix": changed(lambda _, model: model.update(end_of_word_suffix="</w>")),
    "prefix space": changed(lambda document, _: document["pre_tokenizer"]["pretokenizers"][-1].update(add_prefix_space=True)),
    "characters without bytes": changed(lambda document, _: document.update(pre_tokenizer=None)),
    "metaspace": changed(
        lambda document, _: document.update(
            pre_tokenizer={"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
        )
    ),
    "a byte without a token": changed(lambda _, model: model["vocab"].pop("Ā") and model.update(merges=[])),
    "added tokens with other ids": changed(lambda document, _: document["added_tokens"][0].update(id=9000)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_kinds_are_left_to_the_library(kind: str, tmp_path: Path) -> None:
    saved(SHAPES["words"](), tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(OTHERS[kind](path.read_text()))
    assert type(Tokenizer.load(tmp_path)._codec) is TokenizersCodec


def test_damaged_files_are_what_the_library_says(tmp_path: Path) -> None:
    path = saved(SHAPES["words"](), tmp_path) / "tokenizer.json"
    whole = path.read_bytes()
    draw = random.Random(7)
    for trial in range(150):
        place = draw.randrange(len(whole))
        data = whole[:place] if trial % 3 == 0 else whole[:place] + bytes([draw.randrange(256)]) + whole[place + (trial % 3 == 1) :]
        path.write_bytes(data)
        made = read_bpe(path, load_kernels())
        found = (
            None if made is None else read_bpe_codec(None, lambda _, made=made: (made, {}), lambda: pytest.fail("nothing is asked of it"))
        )
        if found is None:
            continue
        own, _ = found
        library = TokenizersCodec(tokenizers.Tokenizer.from_file(str(path)))  # raises where it is no tokenizer
        assert own.vocabulary() == library.vocabulary(), data[place - 20 : place + 20]
        assert all(own.encode(text, True) == library.encode(text, True) for text in texts(8, 3))
    path.write_bytes(whole[:-100])
    with pytest.raises(ModelLoadError, match="is not a tokenizer that can be read"):
        Tokenizer.load(tmp_path)


def test_without_kernels_the_library_does_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(SHAPES["words"](), tmp_path)
    monkeypatch.setattr(bpe_codec, "built_kernels", lambda: None)
    assert type(Tokenizer.load(folder)._codec) is TokenizersCodec


def kept_in(folder: Path, *, refusal: str | None = None) -> tuple[KeptTables, list[Path]]:
    made: list[Path] = []
    return KeptTables(folder / "kept.tokens", lambda size: refusal, made.append), made


@pytest.mark.parametrize("shape", ["composed", "spaces"])
def test_tables_that_are_kept_give_the_same(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(SHAPES[shape](), tmp_path, eos_token="<right>")
    kept, made = kept_in(tmp_path)
    first = Tokenizer.load(tmp_path, kept=kept)._codec
    assert made == [kept.path]
    assert [path.name for path in tmp_path.iterdir() if ".tokens" in path.name] == ["kept.tokens"]
    monkeypatch.setattr(tokenizer, "read_bpe", lambda *given: pytest.fail("the file is read again"))
    mapped = Tokenizer.load(tmp_path, kept=kept)._codec
    assert isinstance(first, BpeCodec)
    assert isinstance(mapped, BpeCodec)
    assert made == [kept.path]
    assert np.array_equal(mapped._tables.block, first._tables.block)
    assert (mapped.vocabulary(), mapped._special) == (first.vocabulary(), first._special)
    for text in texts(9, 60):
        assert mapped.encode(text, True) == first.encode(text, True)
    assert mapped.encode_pair("a", "b") == first.encode_pair("a", "b")


def test_a_kept_file_that_is_damaged_is_written_again(tmp_path: Path) -> None:
    saved(SHAPES["words"](), tmp_path)
    kept, made = kept_in(tmp_path)
    expected = Tokenizer.load(tmp_path, kept=kept).encode("Hello world")
    whole = kept.path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:size])
    moved = json.dumps({**header, "tables": {**header["tables"], "data_offsets": [8, 1 << 40]}}).encode()
    for data in (
        *(b"", whole[:4], whole[:size], whole[:-1], whole[:size] + bytes(len(whole) - size)),  # cut, or without what was written
        whole[:size] + whole[size:].replace(whole[size + 8 : size + 32], b"\xff" * 24),  # places that are not in it
        *(len(moved).to_bytes(8, "little") + moved + whole[size:], b"\xff" * 8 + whole[8:]),
    ):
        kept.path.write_bytes(data)
        before = len(made)
        assert Tokenizer.load(tmp_path, kept=kept).encode("Hello world") == expected
        assert len(made) == before + 1
        assert kept.path.read_bytes() == whole


def test_what_cannot_be_kept_is_not(tmp_path: Path) -> None:
    saved(SHAPES["words"](), tmp_path)
    for kept, made in (kept_in(tmp_path, refusal="no room"), kept_in(tmp_path / "nowhere")):
        assert type(Tokenizer.load(tmp_path, kept=kept)._codec) is BpeCodec
        assert (made, kept.path.exists()) == ([], False)
    saved(SHAPES["words"](), tmp_path)
    (tmp_path / "tokenizer.json").write_text(OTHERS["dropout"]((tmp_path / "tokenizer.json").read_text()))
    kept, made = kept_in(tmp_path)
    assert type(Tokenizer.load(tmp_path, kept=kept)._codec) is TokenizersCodec
    assert made == []
