"""Small tokenizers of every kind that models use, built from scratch with the tokenizers library."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a wife.",
    "however little known the feelings or views of such a man may be on his first entering a neighbourhood,",
    "this truth is so well fixed in the minds of the surrounding families, don't you think? I'm sure we've seen it.",
    "你好、世界。 naïve café, Größe, привет",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _trained_once(build: Callable[[], Tokenizer]) -> Callable[[], Tokenizer]:
    """Every call gives a fresh copy of the same tokenizer: training breaks ties at random."""
    trained = functools.cache(lambda: build().to_str())
    return functools.wraps(build)(lambda: Tokenizer.from_str(trained()))


@_trained_once
def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: BPE over bytes, here with BOS and a word that was added without being special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return tokenizer


def _pieces() -> list[str]:
    words = sorted({f"▁{word}" for line in CORPUS for word in line.split()})
    letters = sorted({letter for line in CORPUS for letter in line if letter != " "})
    return ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁▁", "▁▁▁", *letters, *words]


def _with_bos(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@_trained_once
def unigram_byte_fallback() -> Tokenizer:
    """SentencePiece Unigram with byte fallback; the decoder strips the space that Metaspace puts before a text."""
    pieces = [(piece, -float(rank)) for rank, piece in enumerate(_pieces())]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=True)
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return _with_bos(tokenizer)


@_trained_once
def bpe_byte_fallback() -> Tokenizer:
    """Llama 2: BPE over characters with byte fallback, the prefix space written by the normalizer."""
    vocab = {piece: rank for rank, piece in enumerate(dict.fromkeys([*_pieces(), "▁t", "▁th", "▁a", "in", "er"]))}
    merges = [("▁", "t"), ("▁t", "h"), ("▁", "a"), ("i", "n"), ("e", "r")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return _with_bos(tokenizer)


@_trained_once
def metaspace() -> Tokenizer:
    """T5-like: the Metaspace decoder, after byte fallback."""
    tokenizer = unigram_byte_fallback()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    return tokenizer


@_trained_once
def wordpiece() -> Tokenizer:
    """BERT: continuation pieces with ##, and a decoder that takes spaces before punctuation away."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["n't", "'m"])
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return tokenizer


@_trained_once
def word_end() -> Tokenizer:
    """The first BPE models: a suffix marks the end of a word, and the last one of a text is no space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@_trained_once
def no_decoder() -> Tokenizer:
    """Whole words, joined with spaces for want of a decoder."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, **{f"word{i}": i for i in range(1, 50)}}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


ALL = {
    build.__name__: build for build in (byte_level, unigram_byte_fallback, bpe_byte_fallback, metaspace, wordpiece, word_end, no_decoder)
}
