"""The tokenizer in the metadata of a GGUF file, as a tokenizer.json has it, and the chat template.

Owns llama.cpp's kinds of tokenizers and of pre-tokenizers. A vocabulary of SentencePiece's BPE becomes merges in the order of its scores,
as transformers converts it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from aengine.api.dataclass import dataclass
from aengine.api.errors import ModelLoadError
from aengine.kernels.cpu.library import CpuKernels
from aengine.models.gguf.gguf_file import GgufFile, LazyStrings, open_gguf
from aengine.tokenizer.bpe_codec import BpeDocument, KeptTables, make_bpe, read_bpe_codec
from aengine.tokenizer.codecs import TokenizersCodec

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WITH_MARKS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASES = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DIGITS = r"\p{N}"  # each by itself, before the words
_NEWER = r"\x{0560}-\x{0588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c88}\x{2d00}-\x{2d2d}\x{a790}-\x{ab68}\x{10570}-\x{105bc}\x{16e40}-\x{1df1e}"
_CASED = rf"(?:(?![{_NEWER}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])"  # the letters that DeepSeek lists
_ASIAN = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_AS_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "pixtral", "falcon3", "falcon-h1", "lfm2", "midm-2.0")
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "phi-2", "mpt", "gigachat", "granite-docling"), (_GPT2,)),
    **dict.fromkeys((*_AS_LLAMA3, "dbrx", "smaug-bpe"), (_WORDS % "{1,3}",)),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_WORDS % "{1,3}",)),
    **dict.fromkeys(("qwen2", "stablelm2", "hunyuan", "deepseek-r1-qwen", "megrez"), (_WORDS % "",)),
    "qwen35": (_WITH_MARKS,),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGITS, _GPT2)),
    "tekken": (_CASES % ("", "", ""),),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), (_CASES % (_ENDINGS, _ENDINGS, "{1,3}"),)),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?{_CASED}+",
        r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
        r"\s+$",
        _ASIAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}"),
    "deepseek-v3": (r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+", _DEEPSEEK3),
}
"""By `tokenizer.ggml.pre`: regular expressions that cut a text one after another; those of llama.cpp (llama-vocab.cpp)."""
_BEGIN = frozenset((*_AS_LLAMA3, "tekken"))
"""Where a text begins with BOS unless the file says something else."""
_WHOLE_WORDS = _BEGIN | {"glm4"}
"""Where a word that is a token is not merged from its parts."""
_MOST_CHARACTERS = 512  # of a piece of SentencePiece, which is cut in all places
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"
_PREFIX = "tokenizer.ggml."


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    document: dict[str, Any]  # of a tokenizer.json, with neither vocabulary nor merges
    vocabulary: dict[str, int]
    merges: list[str] | list[tuple[str, str]]  # two tokens with a space between them, or as a pair; those that are merged first in front

    def whole(self) -> tokenizers.Tokenizer:
        """That of the library. Raises ModelLoadError for merges that are none of two tokens into one."""
        for merge in self.merges:
            left, right = merge if isinstance(merge, tuple) else (*merge.split(" ", 1), "")[:2]
            if not left or not right or left + right not in self.vocabulary:
                raise ModelLoadError(f"{_PREFIX}merges has {merge!r}, which does not merge two tokens into one")
            missing = left if left not in self.vocabulary else right if right not in self.vocabulary else None
            if missing is not None:
                raise ModelLoadError(f"{_PREFIX}merges merges {missing!r}, which is no token")
        model = {**self.document["model"], "vocab": self.vocabulary, "merges": self.merges}
        return tokenizers.Tokenizer.from_str(json.dumps({**self.document, "model": model}))


def read_gguf_codec(path: Path, kept: KeptTables | None) -> tuple[TokenizersCodec, dict[str, str]] | None:
    """A codec, and what `read_tokenizer` tells beside the tokenizer. Returns and raises what that does otherwise."""

    def library() -> TokenizersCodec:  # reads the file again: until then a large vocabulary would take 100 MB
        read = read_tokenizer(path)
        assert read is not None
        return TokenizersCodec(read[0].whole())

    def make(kernels: CpuKernels) -> tuple[BpeDocument, dict[str, Any]] | None:
        read = read_tokenizer(path)
        if read is None:
            return None
        tokenizer, named = read
        vocab, merges = (np.frombuffer(json.dumps(part).encode(), np.uint8) for part in (tokenizer.vocabulary, tokenizer.merges))
        made = make_bpe(tokenizer.document, vocab, merges, kernels)
        return None if made is None else (made, named)

    own = read_bpe_codec(kept, make, library)
    if own is not None:
        return own
    read = read_tokenizer(path)
    return None if read is None else (TokenizersCodec(read[0].whole()), read[1])


def read_tokenizer(path: Path) -> tuple[GgufTokenizer, dict[str, str]] | None:
    """The tokenizer, and what transformers needs beside it to render chats: bos_token, eos_token, and chat_template if there is one.

    None if the file has no tokenizer. Raises ModelLoadError for one that is not supported or that lies.
    """
    file = open_gguf(path)
    if file.get(f"{_PREFIX}model", str, "none") in ("none", "no_vocab"):
        return None
    tokens = _strings(file, "tokens")
    kinds = file.get(f"{_PREFIX}token_type", np.ndarray, np.full(len(tokens), _NORMAL)).tolist()
    if len(kinds) != len(tokens):
        raise ModelLoadError(f"{path} has {len(kinds)} {_PREFIX}token_type for {len(tokens)} tokens")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ModelLoadError(f"{path} has {len(tokens)} {_PREFIX}tokens, and token_embd.weight has {embedding.shape[0]} rows")
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    kind = file.get(f"{_PREFIX}model", str)
    merges: list[str] | list[tuple[str, str]]
    if kind == "gpt2":
        core, default_bos = _byte_level(file)
        merges = _strings(file, "merges")
    elif kind in ("llama", "gemma4"):
        merges = _strings(file, "merges") if kind == "gemma4" else _merges_by_scores(file, vocabulary, tokens, kinds)
        core, default_bos = _sentence_piece(file, tokens, kinds), True
    else:
        raise ModelLoadError(f"{_PREFIX}model {kind!r} is not supported; supported are gpt2, llama and gemma4")
    added = {vocabulary[token]: (token, of == _CONTROL) for token, of in zip(tokens, kinds, strict=True) if of in (_CONTROL, _USER_DEFINED)}
    bos, eos = (_named(file, name, tokens) for name in ("bos", "eos"))
    starts, ends = file.get(f"{_PREFIX}add_bos_token", bool, default_bos), file.get(f"{_PREFIX}add_eos_token", bool, False)
    first, last = bos if starts else None, eos if ends else None
    if first or last:
        around = [(token, vocabulary[token]) for token in (first, last) if token]
        template = [token for token in (first, "$A", last) if token]
        core.post_processor = processors.Sequence(
            [*([core.post_processor] if core.post_processor else []), processors.TemplateProcessing(single=template, special_tokens=around)]
        )
    template_text = file.get("tokenizer.chat_template", str)
    named = {"bos_token": bos, "eos_token": eos, "chat_template": template_text}
    document = json.loads(core.to_str())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    document["added_tokens"] = [
        {"id": number, "content": token, "special": special, **plain} for number, (token, special) in sorted(added.items())
    ]
    return GgufTokenizer(document, vocabulary, merges), {name: value for name, value in named.items() if value is not None}


def _strings(file: GgufFile, name: str) -> list[str]:
    values = file.get(_PREFIX + name, LazyStrings)
    if values is None:
        raise ModelLoadError(f"{file.path} has no list of strings {_PREFIX}{name}")
    return list(values)


def _named(file: GgufFile, name: str, tokens: Sequence[str]) -> str | None:
    """The token of an id in the metadata."""
    number = file.get(f"{_PREFIX}{name}_token_id", int)
    if number is None:
        return None
    if not 0 <= number < len(tokens):
        raise ModelLoadError(f"{_PREFIX}{name}_token_id {number} is not the id of one of {len(tokens)} tokens")
    return str(tokens[number])


def _byte_level(file: GgufFile) -> tuple[tokenizers.Tokenizer, bool]:
    """Without vocabulary; and whether a text begins with BOS if the file does not say so."""
    pre = file.get(f"{_PREFIX}pre", str, "gpt-2")
    if pre not in _PATTERNS:
        raise ModelLoadError(f"{_PREFIX}pre {pre!r} is not supported; supported are {', '.join(_PATTERNS)}")
    core = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in _WHOLE_WORDS))
    splits = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in _PATTERNS[pre]]
    core.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    core.decoder = decoders.ByteLevel()
    return core, pre in _BEGIN


def _merges_by_scores(file: GgufFile, vocabulary: dict[str, int], tokens: Sequence[str], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """The pairs that SentencePiece's BPE merges, which has scores of pieces alone."""
    scores = file.get(f"{_PREFIX}scores", np.ndarray)
    if scores is None or len(scores) != len(tokens) or not np.isfinite(scores).all():
        raise ModelLoadError(f"{file.path} does not have a number in {_PREFIX}scores for each of {len(tokens)} tokens")
    pieces = {token: number for token, number in vocabulary.items() if kinds[number] in (_NORMAL, _USER_DEFINED)}
    longest = max(pieces, key=len, default="")
    if len(longest) > _MOST_CHARACTERS:
        raise ModelLoadError(
            f"{file.path} has a token of {len(longest)} characters; supported are {_MOST_CHARACTERS} in {_PREFIX}model llama"
        )
    merges = []
    for piece, number in pieces.items():
        cuts = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in pieces and right in pieces]
        known.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        merges += [(float(scores[number]), pair) for pair in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1][0]), len(merge[1][1])), reverse=True)
    return [pair for _, pair in merges]


def _sentence_piece(file: GgufFile, tokens: Sequence[str], kinds: Sequence[int]) -> tokenizers.Tokenizer:
    """Without vocabulary. Spaces are characters, and what is no token becomes its bytes."""
    unknown = _named(file, "unknown", tokens) or next((token for token, of in zip(tokens, kinds, strict=True) if of == _UNKNOWN), None)
    model = models.BPE(unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds)
    core = tokenizers.Tokenizer(model)
    spaces = normalizers.Replace(" ", _SPACE)
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get(f"{_PREFIX}add_space_prefix", bool, True):
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        core.normalizer = spaces
    core.decoder = decoders.Sequence(steps)
    return core
