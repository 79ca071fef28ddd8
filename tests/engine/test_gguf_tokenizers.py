"""Vocabularies of SentencePiece's BPE in GGUF files, against what their scores say, and against transformers' conversion."""

from __future__ import annotations

import itertools
import pathlib

import pytest
import torch
from gguf_files import gguf_bytes, stored

from aengine.api.errors import ModelLoadError
from aengine.tokenizer.bpe_codec import KeptTables
from aengine.tokenizer.codecs import byte_level_alphabet
from aengine.tokenizer.gguf import read_tokenizer
from aengine.tokenizer.tokenizer import Tokenizer

SPACE = "\u2581"
BYTES = [f"<0x{number:02X}>" for number in range(256)]
PIECES = [
    "t",
    "h",
    "e",
    SPACE,
    "c",
    "a",
    "o",
    "n",
    "th",
    f"{SPACE}the",
    f"{SPACE}c",
    "at",
    f"{SPACE}cat",
    "he",
    f"{SPACE}t",
    "on",
    "the",
    "\n",
]
TOKENS = ["<unk>", "<s>", "</s>", *BYTES, *PIECES, "<turn>", "<tool>"]
SCORES = [0.0, 0.0, 0.0, *[0.0] * 256, *[-float(number) for number in range(len(PIECES))], 0.0, 0.0]
KINDS = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 3, 4]


def tokenizer(path: pathlib.Path, **changes: object) -> Tokenizer:
    metadata = {
        **{"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": SCORES},
        **{"tokenizer.ggml.token_type": KINDS, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2},
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }
    path.write_bytes(gguf_bytes(metadata, {"token_embd.weight": stored(torch.ones(len(TOKENS), 4))}))
    found = Tokenizer.find(path)
    assert found is not None
    return found


def by_scores(text: str) -> list[str]:
    """SentencePiece's BPE: the neighbours whose merge has the highest score are merged first, the first of equals."""
    scores = {piece: score for piece, score, kind in zip(TOKENS, SCORES, KINDS, strict=True) if kind == 1}
    symbols = list(text.replace(" ", SPACE))
    while True:
        merged = [left + right for left, right in itertools.pairwise(symbols)]
        pairs = [(scores[piece], -at) for at, piece in enumerate(merged) if piece in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [merged[at]]
    return [piece for symbol in symbols for piece in ([symbol] if symbol in scores else [f"<0x{byte:02X}>" for byte in symbol.encode()])]


@pytest.mark.parametrize("text", ["the cat on the cat", "  the  oneath", "hat\ncat\n", "é 日 cat", "t", "thethethe"])
@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_are_merged_by_their_scores(tmp_path: pathlib.Path, text: str, prefix: bool) -> None:
    found = tokenizer(tmp_path / "model.gguf", add_space_prefix=prefix)
    ids = found.encode(text, add_special_tokens=False)
    assert [TOKENS[token] for token in ids] == by_scores(" " + text if prefix else text)
    assert found.decode(ids) == text


def test_pieces_with_merges_of_their_own(tmp_path: pathlib.Path) -> None:
    """Gemma 4's, which SentencePiece's scores do not order: `th` comes before `he`, and no scores are read."""
    merges = ["t h", "th e", f"{SPACE} the", "h e", "a t"]
    kind = {"model": "gemma4", "merges": merges, "scores": [0.0] * len(TOKENS), "add_space_prefix": False}
    found = tokenizer(tmp_path / "model.gguf", **kind)
    ids = found.encode("the the\nhe \u65e5", add_special_tokens=False)
    spelled = ["the", f"{SPACE}the", "\n", "he", SPACE, "<0xE6>", "<0x97>", "<0xA5>"]
    assert [TOKENS[token] for token in ids] == spelled
    assert found.decode(ids) == "the the\nhe \u65e5"
    with pytest.raises(ModelLoadError, match=r"merges has 'a zz', which does not merge"):
        tokenizer(tmp_path / "model.gguf", **{**kind, "merges": ["a zz"]})


def test_special_tokens(tmp_path: pathlib.Path) -> None:
    found = tokenizer(tmp_path / "model.gguf", add_space_prefix=False)
    turn, tool = TOKENS.index("<turn>"), TOKENS.index("<tool>")
    assert found.encode("<turn>a<tool>") == [1, turn, TOKENS.index("a"), tool]  # BOS unless the file says something else
    assert found.decode([1, turn, TOKENS.index("a"), tool]) == "a<tool>"  # what a user defined is text
    assert tokenizer(tmp_path / "model.gguf", add_bos_token=False, add_eos_token=True).encode("a")[-1] == 2
    assert not found.has_chat_template


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["it", "'s", " 12345", " IT", "'", "S", " HelloWorld", " ...", "\n", "\n", "x"]),
        ("llama-bpe", ["it", "'s", " ", "123", "45", " IT", "'S", " HelloWorld", " ...\n\n", "x"]),
        ("lfm2", ["it", "'s", " ", "123", "45", " IT", "'S", " HelloWorld", " ...\n\n", "x"]),
        ("qwen35", ["it", "'s", " ", "1", "2", " IT", "'S", " cafe\u0301s", " ...\n\n", "x"]),
        ("qwen2", ["it", "'s", " ", "1", "2", "3", "4", "5", " IT", "'S", " HelloWorld", " ...\n\n", "x"]),
        ("smollm", ["it", "'s", " ", "1", "2", "3", "4", "5", " IT", "'", "S", " HelloWorld", " ...", "\n", "\n", "x"]),
        ("tekken", ["it", "'s", " ", "1", "2", "3", "4", "5", " IT", "'S", " Hello", "World", " ...\n\n", "x"]),
        ("deepseek-llm", ["it", "'", "s", " ", "12345", " IT", "'", "S", " HelloWorld", " ...", "\n", "\n", "x"]),
        ("deepseek-coder", ["it", "'", "s", " ", "1", "2", "3", "4", "5", " IT", "'", "S", " HelloWorld", " ...", "\n", "\n", "x"]),
        ("deepseek-v3", ["it", "'s", " ", "123", "45", " IT", "'S", " HelloWorld", " ...\n\n", "x"]),
        ("gpt-4o", ["it's", " ", "123", "45", " IT'S", " Hello", "World", " ...\n\n", "x"]),
    ],
)
def test_texts_are_cut_as_the_kind_says(tmp_path: pathlib.Path, pre: str, pieces: list[str]) -> None:
    """What each model's own regular expression makes of it."""
    metadata = {
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": ["a", "b", "ab"]},
        "tokenizer.ggml.merges": ["a b"],
    }
    (tmp_path / "model.gguf").write_bytes(gguf_bytes(metadata, {"token_embd.weight": stored(torch.ones(4, 4))}))
    found = read_tokenizer(tmp_path / "model.gguf")
    assert found is not None
    cut = found[0].whole().pre_tokenizer.pre_tokenize_str("".join(pieces))
    assert ["".join(pieces)[slice(*place)] for _, place in cut] == pieces


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_tables_are_kept_for_later_starts(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "llama":
        tokenizer(path)
    else:
        letters = list(byte_level_alphabet())
        words = ["tokens", [*letters, "th", "the", "<end>"]], ["merges", ["t h", "th e"]], ["token_type", [1] * 258 + [3]]
        metadata = {f"tokenizer.ggml.{name}": value for name, value in (*words, ("model", "gpt2"), ("pre", "qwen2"), ("eos_token_id", 258))}
        rows = torch.ones(259, 4)
        template = {"tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}"}
        path.write_bytes(gguf_bytes({**metadata, **template}, {"token_embd.weight": stored(rows)}))
    kept = KeptTables(tmp_path / "kept.tokens", lambda size: None, lambda path: None)
    first = Tokenizer.find(path, kept=kept)
    monkeypatch.setattr("aengine.tokenizer.gguf.read_tokenizer", lambda path: pytest.fail("the file is read again"))
    mapped = Tokenizer.find(path, kept=kept)
    assert first is not None
    assert mapped is not None
    assert kept.path.is_file()
    for text in ("the cat<end>", "  h\u00e9 the", ""):
        assert mapped.encode(text) == first.encode(text)
    assert (mapped.vocab_size, mapped.template, mapped.has_chat_template) == (first.vocab_size, first.template, kind == "gpt2")
    if kind == "gpt2":
        assert mapped.render_chat([{"role": "user", "content": "the"}]).text == "the<end>"
