"""`BpeCodec`: byte-pair encoding with tables of the kernels, in a fraction of the time and memory that the `tokenizers` library takes to
read a large vocabulary, and without the GIL. Tables may be kept in a file, which later starts map (`KeptTables`).

Only vocabulary and merges are ours. The library still finds added tokens in a text, normalizes it, cuts it into words and decodes: it is
given the same tokenizer without a vocabulary, in which every word is one token whose place tells which characters it has. So ids and texts
are those of the library, whatever expressions cut the words. Tokenizers of other kinds are not read, and what is asked for seldom (pairs,
places of tokens) is left to the library, which then reads the file after all.

Knows nothing of folders, chats or requests.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tokenizers import AddedToken, models

from aengine.api.dataclass import dataclass
from aengine.api.outputs import TokenizedText
from aengine.kernels.cpu.library import CpuKernels, address, built_kernels
from aengine.kernels.warm_memory import map_file
from aengine.models.model_files import whole_file
from aengine.tokenizer.codecs import TokenizersCodec

_CUTTING = frozenset(
    ("Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation", "CharDelimiterSplit", "UnicodeScripts", "BertPreTokenizer")
)
"""Pre-tokenizers that cut a text and leave its characters as they are."""
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""By which ByteLevel cuts words, unless others have cut them before it."""
_COMPOSED = re.compile(
    r"[\0-\u02ff\u0400-\u0482\u048a-\u052f\u2010-\u2027\u3001-\u3029\u3041-\u3096\u30a1-\u30fe\u3400-\u4dbf\u4e00-\u9fff"
    r"\uac00-\ud7a3\uff01-\uff9d]*"
)
"""Texts that NFC leaves as they are: none of these characters changes by itself or beside another one."""
_WORD = "\ue000"
_WORD_ID = 0
_BLOCK = "tables"
Json = NDArray[np.uint8]
"""The bytes of a text in JSON."""


class BpeTables:
    """A vocabulary and its merges: a block of memory that the kernels made, or that was mapped from a file."""

    def __init__(self, kernels: CpuKernels, handle: int, mapped: NDArray[np.uint8] | None = None) -> None:
        self._kernels = kernels
        self._handle = handle
        self._mapped = mapped
        self.count: int = kernels.bpe_count(handle)  # of tokens; ids may have gaps
        if mapped is None:
            weakref.finalize(self, kernels.bpe_destroy, handle).atexit = False

    @classmethod
    def read(cls, kernels: CpuKernels, vocab: Json, merges: Json, *, by_bytes: bool, whole_words: bool) -> BpeTables | None:
        """Reads the values of "vocab" and "merges" in a tokenizer.json. `by_bytes`: spellings are of the letters that GPT-2 has for bytes;
        else of characters, and <0x41> is a byte of one that has no token. `whole_words`: a word that is a token is not merged from parts.
        None: they are not what can be read."""
        handle = kernels.bpe_create(vocab.ctypes.data, len(vocab), merges.ctypes.data, len(merges), by_bytes, whole_words)
        return None if handle is None else cls(kernels, handle)

    @classmethod
    def of(cls, kernels: CpuKernels, block: NDArray[np.uint8]) -> BpeTables | None:
        """Uses a `block`, which is mapped; None if it is something else."""
        place = block.ctypes.data
        return cls(kernels, place, block) if place % 8 == 0 and kernels.bpe_is(place, len(block)) else None

    @property
    def block(self) -> NDArray[np.uint8]:
        """The memory, which must not be changed."""
        size = self._kernels.bpe_size(self._handle)
        return np.ctypeslib.as_array(ctypes.cast(self._handle, ctypes.POINTER(ctypes.c_uint8)), (size,))

    def id_of(self, spelling: str) -> int | None:
        text = spelling.encode(errors="surrogatepass")
        found: int = self._kernels.bpe_id(self._handle, text, len(text))
        return None if found < 0 else found

    def spelling(self, token_id: int) -> str | None:
        size = ctypes.c_int64()
        place = self._kernels.bpe_spelling(self._handle, token_id, ctypes.byref(size))
        return None if place is None else ctypes.string_at(place, size.value).decode(errors="replace")

    def spellings(self) -> dict[str, int]:
        """All tokens. No id is more than twice their number."""
        found: dict[str, int] = {}
        for token_id in range(2 * self.count + 1):
            spelling = self.spelling(token_id)
            if spelling is not None:
                found[spelling] = token_id
                if len(found) == self.count:
                    break
        return found

    def encode(self, text: str, places: NDArray[np.int32], given: NDArray[np.int32]) -> list[int] | None:
        """The ids of words, [count, 2] places in the characters of `text`; a word whose `given` [count] is not -1 stands for that id. None:
        a character has no token."""
        points = text.encode("utf-32-le")
        ids = np.empty(len(points) + len(given), np.int32)
        count = self._kernels.bpe_encode(self._handle, points, address(places), address(given), len(given), address(ids))
        return None if count < 0 else ids[:count].tolist()


class WithoutToken(Exception):
    """A character has no token."""


class _Cutter:
    """The library's tokenizer without a vocabulary: finds the added tokens it was given, and words."""

    def __init__(self, added: Mapping[int, AddedToken], pre_tokenizer: Any, split_special: bool) -> None:
        """`added` by the ids that they stand for."""
        self._core = tokenizers.Tokenizer(models.WordLevel({_WORD: _WORD_ID}, unk_token=_WORD))
        if pre_tokenizer is not None:
            self._core.pre_tokenizer = pre_tokenizer
        self._core.encode_special_tokens = split_special
        self._core.add_tokens(list(added.values()))
        own = {self._core.token_to_id(token.content): token_id for token_id, token in added.items()}
        self._given = np.full(max((each for each in own if each is not None), default=0) + 1, -1, np.int32)
        for each, token_id in own.items():
            if each is not None:
                self._given[each] = token_id

    def cut(self, texts: Sequence[str]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yields for each text the places [count, 2] of words and of added tokens, and for which id these stand: [count], -1 for words."""
        for encoding in self._core.encode_batch(texts, add_special_tokens=False):
            ids = encoding.ids
            places = np.fromiter(itertools.chain.from_iterable(encoding.offsets), np.int32, 2 * len(ids)).reshape(-1, 2)
            yield places, self._given[np.fromiter(ids, np.int32, len(ids))]


class _Encoder:
    """Text to ids, with some added tokens and no special ones around."""

    def __init__(self, tables: BpeTables, shape: tokenizers.Tokenizer, added: Mapping[int, AddedToken]) -> None:
        """`added`: by the id; -1 is none. `shape` has the normalizer and the pre-tokenizer."""
        self._tables = tables
        self._normalize = _normalizing(shape)
        within = dict(added)
        self._raw: _Cutter | None = None
        if self._normalize is not None:  # what is not normalized is found before it
            raw = {key: token for key, token in added.items() if not token.normalized}
            self._raw = _Cutter(raw, None, shape.encode_special_tokens) if raw else None
            spelled = {key: self._normalize(token.content) for key, token in added.items() if token.normalized}
            within = {key: _respelled(added[key], content) for key, content in spelled.items() if content}
            self._raw_token = re.compile("|".join(re.escape(token.content) for token in raw.values()))
        self._words = _Cutter(within, shape.pre_tokenizer, shape.encode_special_tokens)
        self._is_one_word = None if within else _one_word(shape)

    def places(self, text: str) -> list[tuple[int, int, int]]:
        """Where added tokens that are not normalized begin and end, and their ids."""
        ((places, given),) = (self._raw or self._words).cut([text])
        return [(start, end, key) for (start, end), key in zip(places.tolist(), given.tolist(), strict=True) if key != -1]

    def __call__(self, text: str) -> list[int]:
        """Raises `WithoutToken`."""
        if self._normalize is None or self._raw is None or self._raw_token.search(text) is None:
            text = text if self._normalize is None else self._normalize(text)
            ((places, given),) = self._cut([text])
            return self._merged(text, places, given)
        ((raw_places, raw_given),) = self._raw.cut([text])
        keys = raw_given.tolist()
        texts = [self._normalize(text[start:end]) for (start, end), key in zip(raw_places.tolist(), keys, strict=True) if key == -1]
        cuts = self._cut(texts)
        begins = itertools.accumulate(map(len, texts), initial=0)
        all_places: list[NDArray[np.int32]] = []
        all_given: list[NDArray[np.int32]] = []
        for key in keys:
            if key != -1:
                all_places.append(np.zeros((1, 2), np.int32))
                all_given.append(np.full(1, key, np.int32))
            else:
                places, given = next(cuts)
                all_places.append(places + np.int32(next(begins)))
                all_given.append(given)
        return self._merged("".join(texts), np.concatenate(all_places), np.concatenate(all_given)) if keys else []

    def _cut(self, texts: Sequence[str]) -> Iterator[tuple[NDArray[np.int32], NDArray[np.int32]]]:
        """Yields for each text what `_Cutter.cut` does."""
        if self._is_one_word is None or not all(map(self._is_one_word, texts)):
            return self._words.cut(texts)
        return ((np.array([[0, len(text)]], np.int32), np.full(1, -1, np.int32)) for text in texts)

    def _merged(self, text: str, places: NDArray[np.int32], given: NDArray[np.int32]) -> list[int]:
        found = self._tables.encode(text, places, given)
        if found is None:
            raise WithoutToken
        return found


class BpeCodec(TokenizersCodec):
    """Gives what `TokenizersCodec` gives."""

    def __init__(
        self,
        tables: BpeTables,
        shape: tokenizers.Tokenizer,
        added: Mapping[int, AddedToken],
        around: tuple[Sequence[int], Sequence[int]],
        library: Callable[[], TokenizersCodec],
    ) -> None:
        """`shape`: the tokenizer without vocabulary, added tokens and post-processor. `around`: the ids that are before and behind a text.
        `library` reads the whole tokenizer."""
        self._tables = tables
        self._shape = shape
        self._added = dict(added)
        self._first, self._last = around
        self._read_library = library
        self._library: TokenizersCodec | None = None
        self._reading = threading.Lock()
        self._pieces = _Pieces(tables)
        super().__init__(shape)

    def _prepare(self) -> None:
        self._pieces.clear()
        # As the library has it, a token that is found in a normalized text is what it becomes there.
        self._pieces.update(
            {key: self.normalize(token.content) if token.normalized else token.content for key, token in self._added.items()}
        )
        self._encode = _Encoder(self._tables, self._shape, self._added)
        super()._prepare()

    def whole(self) -> TokenizersCodec:
        """The tokenizer in the library, which takes long the first time."""
        with self._reading:
            if self._library is None:
                self._library = self._read_library()
            return self._library

    def add_tokens(self, tokens: Sequence[AddedToken]) -> None:
        for token in tokens:
            known = self.token_id(token.content)
            self._added[self.vocab_size() if known is None else known] = token
        if tokens:
            self._prepare()

    def added(self) -> dict[int, AddedToken]:
        return dict(self._added)

    def token_id(self, spelling: str) -> int | None:
        found = next((token_id for token_id, token in self._added.items() if token.content == spelling), None)
        return self._tables.id_of(spelling) if found is None else found

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            ids = self._encode(text)
        except WithoutToken:
            return self.whole().encode(text, add_special_tokens)
        return [*self._first, *ids, *self._last] if add_special_tokens else ids

    def encode_pair(self, first: str, second: str) -> list[int]:
        return self.whole().encode_pair(first, second)

    def encode_apart(self, text: str, literals: Sequence[tuple[int, int]], controls: Collection[str]) -> list[int]:
        try:
            if not any(token.normalized and token.content in controls for token in self._added.values()):
                return super().encode_apart(text, literals, controls)
        except WithoutToken:
            pass
        return self.whole().encode_apart(text, literals, controls)

    def _places(self, text: str) -> list[tuple[int, int, int]]:
        return self._encode.places(text)

    def _encoder(self, added: Mapping[int, AddedToken]) -> Callable[[str], list[int]]:
        return _Encoder(self._tables, self._shape, added)

    def located(self, text: str, add_special_tokens: bool) -> TokenizedText:
        return self.whole().located(text, add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        omitted = self._special if skip_special_tokens else ()
        pieces = [piece for token_id in ids if token_id not in omitted and (piece := self._pieces[token_id]) is not None]
        decoder = self._shape.decoder
        return " ".join(pieces) if decoder is None else str(decoder.decode(pieces))

    def omits(self, token_id: int, skip_special_tokens: bool) -> bool:
        return (skip_special_tokens and token_id in self._special) or self._pieces[token_id] is None

    def piece(self, token_id: int) -> str | None:
        return self._pieces[token_id]

    def vocab_size(self) -> int:
        return self._tables.count + sum(self._tables.spelling(token_id) is None for token_id in self._added)

    def vocabulary(self) -> dict[str, int]:
        return {**self._tables.spellings(), **{token.content: token_id for token_id, token in self._added.items()}}


class _Pieces(dict[int, str | None]):
    """Spellings by id, as far as they were asked for."""

    def __init__(self, tables: BpeTables) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, token_id: int) -> str | None:
        piece = self._tables.spelling(token_id)
        if piece is not None:  # else there are as many as callers ask for
            self[token_id] = piece
        return piece


@dataclass(frozen=True, slots=True)
class BpeDocument:
    """A tokenizer.json without its vocabulary and merges, which are in tables."""

    document: dict[str, Any]
    tables: BpeTables

    def codec(self, library: Callable[[], TokenizersCodec]) -> BpeCodec | None:
        """None where it is a tokenizer of another kind. Raises anything for a document that is not one."""
        document, tables = self.document, self.tables
        added: dict[int, AddedToken] = {}
        for token in document.get("added_tokens") or []:
            content = token["content"]
            known = tables.id_of(content)
            given = max([tables.count - 1, *added]) + 1 if known is None else known
            if token["id"] != given or not content or content == _WORD:
                return None
            flags = {name: bool(token[name]) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
            added[given] = AddedToken(content, **flags)
        common = {**document, "truncation": None, "padding": None, "added_tokens": [], "post_processor": None, "pre_tokenizer": None}
        words = {"type": "WordLevel", "vocab": {_WORD: _WORD_ID}, "unk_token": _WORD}
        framed = {**common, "normalizer": None, "decoder": None, "post_processor": document.get("post_processor"), "model": words}
        encoding = tokenizers.Tokenizer.from_str(json.dumps(framed)).encode("a")
        place = encoding.special_tokens_mask.index(0)
        normalizer = document.get("normalizer") if _steps(document.get("normalizer"), "normalizers") else None
        _, pre_tokenizer = _cutting(document.get("pre_tokenizer")) or (False, None)
        shape = {**common, "normalizer": normalizer, "pre_tokenizer": pre_tokenizer, "model": words}
        core = tokenizers.Tokenizer.from_str(json.dumps(shape))
        return BpeCodec(tables, core, added, (encoding.ids[:place], encoding.ids[place + 1 :]), library)


def read_bpe(path: Path, kernels: CpuKernels) -> BpeDocument | None:
    """Reads a tokenizer.json; None where it is another kind of tokenizer, or none at all. Raises OSError."""
    text = map_file(path.resolve())
    places = (ctypes.c_int64 * 4)()
    if not kernels.bpe_find(text.ctypes.data, len(text), places):
        return None
    (begin, begun), (ended, end) = sorted(((places[0], places[1]), (places[2], places[3])))
    try:
        document = json.loads(b"null".join((text[:begin].tobytes(), text[begun:ended].tobytes(), text[end:].tobytes())))
        return make_bpe(document, text[places[0] : places[1]], text[places[2] : places[3]], kernels)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None


def make_bpe(document: dict[str, Any], vocab: Json, merges: Json, kernels: CpuKernels) -> BpeDocument | None:
    """Makes the tables for the `document` of a tokenizer.json. None where it is another kind of tokenizer. Raises anything for a document
    that is not one."""
    model = document["model"]
    cutting = _cutting(document.get("pre_tokenizer"))
    if (
        model.get("type") != "BPE"
        or model.get("dropout")
        or model.get("continuing_subword_prefix")
        or model.get("end_of_word_suffix")
        or cutting is None
        or not (cutting[0] or model.get("byte_fallback"))
        or "ByteLevel" in json.dumps(document.get("normalizer"))
    ):
        return None
    tables = BpeTables.read(kernels, vocab, merges, by_bytes=cutting[0], whole_words=bool(model.get("ignore_merges")))
    return None if tables is None else BpeDocument(document, tables)


@dataclass(frozen=True, slots=True)
class KeptTables:
    """The file of a tokenizer's tables for later starts, which map it."""

    path: Path
    check_room: Callable[[int], str | None]  # why a file of so many bytes cannot be written
    make_room: Callable[[Path], object]  # called after it was written

    def open(self, kernels: CpuKernels) -> tuple[BpeDocument, dict[str, Any]] | None:
        """And what was written beside it. None: there is no such file, or it cannot be used."""
        try:
            if self.path.stat(follow_symlinks=False).st_uid != os.geteuid():
                return None
            content = map_file(self.path)
            size = int.from_bytes(content[:8].tobytes(), "little")  # of the header; the form is that of safetensors
            header = json.loads(content[8 : 8 + size].tobytes())
            first, end = header[_BLOCK]["data_offsets"]
            tables = BpeTables.of(kernels, content[8 + size + first : 8 + size + end])
            said = json.loads(header["__metadata__"]["said"])
            os.utime(self.path)  # the latest use
            return None if tables is None else (BpeDocument(said["document"], tables), said["beside"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, made: BpeDocument, beside: dict[str, Any]) -> None:
        """Writes it unless there is no room, or a folder that others cannot write to."""
        block = made.tables.block
        if self.check_room(len(block)) is None:
            with suppress(OSError, SafetensorError):
                with whole_file(self.path) as writing:
                    save_file({_BLOCK: block}, writing, {"said": json.dumps({"document": made.document, "beside": beside})})
                self.make_room(self.path)


def read_bpe_codec(
    kept: KeptTables | None,
    make: Callable[[CpuKernels], tuple[BpeDocument, dict[str, Any]] | None],
    library: Callable[[], TokenizersCodec],
) -> tuple[BpeCodec, dict[str, Any]] | None:
    """A codec with the tables that are kept, or with what is made, which is then kept; and what is told beside it. None where no kernels
    are compiled, and for a tokenizer of another kind. `library`: as of `BpeCodec`. Raises what `make` raises."""
    kernels = built_kernels()
    if kernels is None:
        return None
    found = None if kept is None else kept.open(kernels)
    made = make(kernels) if found is None else found
    try:
        codec = None if made is None else made[0].codec(library)
    except Exception:  # of a document that is none; the library raises bare Exception
        codec = None
    if made is None or codec is None:
        return None
    if kept is not None and found is None:
        kept.write(*made)
    return codec, made[1]


def _cutting(pre_tokenizer: dict[str, Any] | None) -> tuple[bool, dict[str, Any] | None] | None:
    """Whether words are bytes, and what cuts the text into words. None: it does something else to texts, too."""
    steps = _steps(pre_tokenizer, "pretokenizers")
    by_bytes = bool(steps) and steps[-1]["type"] == "ByteLevel"
    if by_bytes:
        last = steps.pop()
        if last.get("add_prefix_space", True):
            return None
        if last.get("use_regex", True):
            steps.append({"type": "Split", "pattern": {"Regex": _GPT2}, "behavior": "Isolated", "invert": False})
    if not all(step["type"] in _CUTTING for step in steps):
        return None
    return by_bytes, {"type": "Sequence", "pretokenizers": steps} if steps else None


def _steps(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A normalizer, or pre-tokenizer, or what it is a sequence of; `name` is that of the list."""
    if part is None:
        return []
    if part["type"] != "Sequence":
        return [part]
    return [step for each in part[name] for step in _steps(each, name)]


def _normalizing(shape: tokenizers.Tokenizer) -> Callable[[str], str] | None:
    """What normalizes a text: Python where that is simple, which is faster. None: nothing does."""
    if shape.normalizer is None:
        return None
    steps = _steps(json.loads(shape.to_str())["normalizer"], "normalizers")

    def in_python(text: str) -> str:
        for step in steps:
            if step["type"] == "Replace":
                text = text.replace(step["pattern"]["String"], step["content"])
            else:
                text = text and step["prepend"] + text
        return text

    def composed(text: str) -> str:
        return text if _COMPOSED.fullmatch(text) else str(shape.normalizer.normalize_str(text))

    if all(step["type"] == "Prepend" or (step["type"] == "Replace" and step["pattern"].get("String")) for step in steps):
        return in_python
    if [step["type"] for step in steps] == ["NFC"]:
        return composed
    return lambda text: str(shape.normalizer.normalize_str(text))


def _one_word(shape: tokenizers.Tokenizer) -> Callable[[str], bool] | None:
    """Whether nothing cuts a text. None: that is hard to tell."""
    steps = _steps(json.loads(shape.to_str())["pre_tokenizer"], "pretokenizers")
    patterns: list[str] = [step.get("pattern", {}).get("String") or "" for step in steps]
    if not all(patterns) or any(step.get("invert") for step in steps):
        return None
    return lambda text: text != "" and not any(map(text.__contains__, patterns))


def _respelled(token: AddedToken, content: str) -> AddedToken:
    return AddedToken(
        content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip, normalized=False, special=token.special
    )
