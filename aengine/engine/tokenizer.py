"""`Tokenizer`: text and chat messages to ids, ids to text. Owns the tokenizer files of a model directory.

Knows nothing of models, requests or the event loop. All methods may be called from several threads at once.

Which rules are honoured. A `tokenizer.json` is the whole truth about text and ids, read by the `tokenizers` library without
transformers. In particular special tokens are added as its post-processor says: `add_bos_token` and `add_eos_token` of
`tokenizer_config.json` are ignored, just as transformers 5 ignores them when there is a tokenizer.json, so a file whose
post-processor lacks BOS yields no BOS. `legacy` is ignored too; transformers passes it to a few classes (LlamaTokenizer) that
rebuild their pre-tokenizer rather than take the file's. Truncation and padding stored in the file are switched off.
From `tokenizer_config.json` (or `special_tokens_map.json`) come the names of special tokens: those are left out of decoded text even
when the file does not mark them. `added_tokens_decoder` says how its tokens take the spaces beside them, and `split_special_tokens` that
special tokens in a text are text. `clean_up_tokenization_spaces` is not applied (transformers applies it to no BPE tokenizer either).
A directory without tokenizer.json is read by transformers' AutoTokenizer, which applies all of these by its own rules.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from aengine.chat_prompts import ChatFields, ChatOptions, read_messages
from aengine.engine.detokenizer import Detokenizer
from aengine.engine.gguf_tokenizer import read_tokenizer
from aengine.engine.token_codecs import Codec, TokenizersCodec, TransformersCodec
from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.models.gguf.file import is_gguf
from aengine.outputs import TokenizedText

if TYPE_CHECKING:
    from typing_extensions import Unpack

PIECE_CHARACTERS = 16384
"""Characters of a piece in `Tokenizer.count_pieces`, which takes some 10 ms."""
MAX_SLOW_CHARACTERS = 1 << 19
"""Most characters of a text for a tokenizer that runs in Python."""
ASSUMED_TOKEN_BYTES = 64
"""A text has a token for at least so many bytes, or as many as the vocabulary's longest token has. That is more than a token can stand for,
except where tokenizers drop or merge parts of a text: runs of unknown characters, or of spaces."""


TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*"),
)
MAX_REASON = 300
"""Most characters of a library's error that are shown."""


class Tokenizer:
    """The tokenizer of one model. Made by `Tokenizer.load`."""

    def __init__(self, codec: Codec, load_template: Callable[[], Any] | None, template: str = "") -> None:
        """`load_template`: gives the transformers tokenizer that renders chats; None for a model without a chat template.
        `template`: its source, or those of all, one after the other."""
        self._codec = codec
        self._load_template = load_template
        self.template = template
        self._template: Any = None
        self._template_lock = threading.Lock()

    @classmethod
    def find(cls, model_dir: Path) -> Tokenizer | None:
        """That of a local model; None if it has none. Raises `ModelLoadError` when it cannot be read."""
        if is_gguf(model_dir):
            return cls._of_gguf(model_dir)
        return cls.load(model_dir) if any(any(model_dir.glob(pattern)) for pattern in TOKENIZER_FILES) else None

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Reads the tokenizer of a local model directory. Raises `ModelLoadError` when there is none that can be read."""
        config = _read_config(model_dir)
        path = model_dir / "tokenizer.json"
        if path.is_file():
            try:
                core = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises bare Exception
                raise ModelLoadError(f"{path} is not a tokenizer that can be read: {error}") from error
            core.encode_special_tokens = bool(config.get("split_special_tokens"))
            try:
                _add_described(core, config.get("added_tokens_decoder") or {})
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ModelLoadError(f"{model_dir / 'tokenizer_config.json'}: added_tokens_decoder cannot be read: {error!r}") from error
            _mark_special(core, config)
            files = [*model_dir.glob("chat_template.jinja"), *model_dir.glob("additional_chat_templates/*.jinja")]
            template = "".join(_read_text(file) for file in files) or str(config.get("chat_template") or "")
            return cls(TokenizersCodec(core), (lambda: _chat_renderer(model_dir)) if files or template else None, template)
        auto = _auto_tokenizer(model_dir)
        if len(auto) <= len(auto.all_special_ids):  # what transformers makes of files that are not those of the model's class
            raise ModelLoadError(f"{model_dir} has no tokenizer that can be read: its files give no tokens to {type(auto).__name__}")
        codec = TokenizersCodec(auto.backend_tokenizer) if auto.is_fast else TransformersCodec(auto)
        return cls(codec, (lambda: auto) if auto.chat_template else None, str(auto.chat_template or ""))

    @classmethod
    def _of_gguf(cls, path: Path) -> Tokenizer | None:
        found = read_tokenizer(path)
        if found is None:
            return None
        core, named = found
        return cls(
            TokenizersCodec(core), (lambda: _renderer(core, named)) if "chat_template" in named else None, named.get("chat_template", "")
        )

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_text` can work."""
        return self._load_template is not None

    @property
    def vocab_size(self) -> int:
        """How many tokens there are, added ones included. A model's embedding may have more rows."""
        return self._codec.vocab_size()

    def difference(self, other: Tokenizer) -> str | None:
        """The first id that stands for another token in `other`, in words; None if there is none. Rows that a GGUF file pads its vocabulary
        with (named [PAD7] and the like) are no tokens."""
        own, others = ({token_id: piece for piece, token_id in each._codec.vocabulary().items()} for each in (self, other))
        for token_id in sorted(own.keys() | others.keys()):
            first, second = own.get(token_id), others.get(token_id)
            if first != second and not {first, second} <= {None, f"[PAD{token_id}]"}:
                return f"id {token_id} is {first!r} and {second!r}, of {len(own)} and {len(others)} tokens"
        return None

    def least_tokens(self, num_bytes: int) -> int:
        """How many tokens a text of `num_bytes` in UTF-8 has at least; see ASSUMED_TOKEN_BYTES. The first call takes long."""
        return -(-num_bytes // self._longest_token)

    @cached_property
    def _longest_token(self) -> int:
        """In bytes."""
        return max(self._codec.longest_token(), ASSUMED_TOKEN_BYTES)

    def count_pieces(self, text: str) -> Iterator[int]:
        """How many tokens `text` has at least, as far as it was read: grows with each piece. A piece takes some 10 ms without the GIL.

        A piece is encoded by itself, and a cut may go through a token, whose bytes are then tokens of their own at most, and change how the
        characters beside it are merged. So a piece counts for as many tokens less as the longest token of the vocabulary has bytes, and
        64 at least. Raises what `encode` raises.
        """
        _check_unicode(text, "prompt")
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = self.encode(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
            count += max(0, len(piece) - self._longest_token)
            yield count

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The ids of `text`, with the special tokens that the post-processor adds. Takes up to a second per million characters, without
        the GIL if the tokenizers library does it.

        Special tokens written out in `text` become their ids. Raises `InvalidRequestError` (prompt) for text that is not Unicode, on which
        the tokenizer fails, or with more than MAX_SLOW_CHARACTERS for a tokenizer that runs in Python.
        """
        _check_unicode(text, "prompt")
        if self._codec.is_slow and len(text) > MAX_SLOW_CHARACTERS:
            raise InvalidRequestError.of(
                "prompt", f"{len(text)} characters are more than {MAX_SLOW_CHARACTERS}, as many as this model's tokenizer can take"
            )
        with _refusing_failures("prompt"):
            return self._codec.encode(text, add_special_tokens)

    def encode_located(self, text: str, *, add_special_tokens: bool = True) -> TokenizedText:
        """The ids that `encode` gives, and where in `text` they come from.

        A token that is only a part of a character has the whole character's place; an added special token is empty, where the token
        before it ends. Raises `InvalidRequestError` (prompt) for text that is not Unicode, and (offsets) when the model's tokenizer
        cannot tell places.
        """
        _check_unicode(text, "prompt")
        with _refusing_failures("prompt"):
            tokens = self._codec.located(text, add_special_tokens)
        if tokens is None:
            raise InvalidRequestError.of("offsets", "this model's tokenizer does not tell where its tokens are in the text")
        return tokens

    def chat_text(self, messages: Sequence[Mapping[str, Any]], options: ChatOptions | None = None, **fields: Unpack[ChatFields]) -> str:
        """A conversation as the model's chat template writes it. `options`, or `fields` of it: what the template is given beside it.

        A message has a string `role` and a `content` that is a string or a list of parts `{"type": "text", "text": ...}`. Parts go to a
        template that reads them; another one is given their text, joined. What else a message has, such as `tool_calls`, is for the
        template to read. Of several templates it is the one named "tool_use" if there are `tools`, else the one named "default". The first
        call imports transformers.
        Raises `InvalidRequestError` (prompt) for messages the template cannot render, or a model without a template.
        """
        if self._load_template is None:
            raise InvalidRequestError.of("prompt", "chat messages need a chat template and this model has none; give text or token ids")
        options = ChatOptions(**fields) if options is None else options
        plain = read_messages(messages)
        with self._template_lock:  # not at the import and the files by every thread at once
            if self._template is None:
                self._template = self._load_template()
        if any(isinstance(message.get("content"), list) for message in plain) and not self._reads_parts(options):
            plain = [{**message, "content": _text_of(message.get("content"))} for message in plain]
        try:
            return self._render(plain, options)
        except Exception as error:  # a template is a program: it may raise anything
            raise InvalidRequestError.of("prompt", f"the model's chat template refuses these messages: {error}"[:MAX_REASON]) from error

    def _render(self, messages: list[dict[str, Any]], options: ChatOptions) -> str:
        text = self._template.apply_chat_template(
            messages,
            tools=options.tools,
            add_generation_prompt=options.opens_turn,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **(options.template_kwargs or {}),
        )
        return str(text)

    def _reads_parts(self, options: ChatOptions) -> bool:
        """Whether the template writes the text of content parts. Others fail on a list, leave it out, or write it as a list."""
        try:
            text = self._render([{"role": "user", "content": [{"type": "text", "text": "PART"}]}], options)
        except Exception:
            return False
        return "PART" in text and not re.search(r"""["']text["']: *["']PART""", text)

    def bad_word_ids(self, word: str) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write `word`, each once and none empty: as a text begins with it, behind a space (which belongs
        to the sequence) and behind a line break (which does not). A space that `word` itself begins with is that space.

        No special tokens are added; one written out in `word` becomes its id. The line break matters to tokenizers that put a
        space before every text: elsewhere it gives what the start of a text gives. Other ways to cut the same characters into
        tokens are not listed. Empty if the tokenizer drops the word. Raises `InvalidRequestError` (bad_words) for text that is
        not Unicode.
        """
        _check_unicode(word, "bad_words")
        bare = word.removeprefix(" ")
        with _refusing_failures("bad_words"):
            start, behind_space, line, behind_line = (self._codec.encode(text, False) for text in (bare, f" {bare}", "\n", f"\n{bare}"))
        sequences = [start, behind_space]
        if behind_line[: len(line)] == line:  # else the two merge into tokens of both
            sequences.append(behind_line[len(line) :])
        return tuple(dict.fromkeys(tuple(ids) for ids in sequences if ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids` (each >= 0). Ids without a token are left out, and special tokens if they are to be skipped; bytes that
        are not UTF-8 become U+FFFD."""
        return self._codec.decode(ids, skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Fresh incremental decoding of one sequence; its pieces add up to `decode` of the sequence."""
        codec = self._codec
        return Detokenizer(
            lambda ids: codec.decode(ids, skip_special_tokens),
            lambda token_id: codec.omits(token_id, skip_special_tokens),
            self.byte_ids,
        )

    def piece(self, token_id: int) -> str | None:
        """A token (id >= 0) as the vocabulary spells it, which is not its text; None for ids that `decode` leaves out."""
        return None if self._codec.omits(token_id, True) else self._codec.piece(token_id)

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """The ids that stand for one raw byte, spelled `<0x41>`."""
        return self._codec.byte_ids()


def _read_config(model_dir: Path) -> dict[str, Any]:
    config = _read_object(model_dir / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else {**config, **_read_object(model_dir / "special_tokens_map.json")}


def _read_text(path: Path) -> str:
    """Of a template. Raises `ModelLoadError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Of a JSON file; empty if there is none."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return config


def _add_described(core: tokenizers.Tokenizer, described: Mapping[str, Any]) -> None:
    """Add tokens by id, as `added_tokens_decoder` describes them; those with another id in the vocabulary, or beyond it, stay out."""
    for token_id, token in sorted(described.items(), key=lambda item: int(item[0])):
        known = core.token_to_id(token["content"])
        if int(token_id) == (core.get_vocab_size(with_added_tokens=True) if known is None else known):
            core.add_tokens([tokenizers.AddedToken(**token)])


def _mark_special(core: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Marks the tokens that the config names as special. Names without an id stay out: the model has no embedding for them."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or ()
        named.extend(extra.values() if isinstance(extra, dict) else extra)
    contents = {value.get("content") if isinstance(value, dict) else value for value in named}
    marked = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    for content in sorted(content for content in contents if isinstance(content, str) and content not in marked):
        if core.token_to_id(content) is not None:
            core.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])


def _chat_renderer(model_dir: Path) -> Any:
    """The tokenizer of transformers for a directory with a tokenizer.json, also where its class is custom code."""
    try:
        return _auto_tokenizer(model_dir)
    except ModelLoadError:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(model_dir), local_files_only=True)


def _renderer(core: tokenizers.Tokenizer, named: Mapping[str, str]) -> Any:
    """The tokenizer of transformers around a tokenizer, with the names of its special tokens and its template."""
    from transformers import PreTrainedTokenizerFast

    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=core, **named)


def _auto_tokenizer(model_dir: Path) -> Any:
    # Imported here: it takes seconds, and most models never need it.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # depends on the tokenizer's class what is raised
        raise ModelLoadError(f"{model_dir} has no tokenizer that can be read: {error}") from error


@contextmanager
def _refusing_failures(field: str) -> Iterator[None]:
    """Any exception of a library on a text refuses the text. Panics of libraries in Rust are no Exceptions."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise InvalidRequestError.of(field, f"the model's tokenizer fails on this text: {error}"[:MAX_REASON]) from error


def _check_unicode(text: str, field: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError.of(field, f"not valid Unicode: {error.reason} at character {error.start}") from None


def _text_of(content: Any) -> Any:
    """The text of content parts, joined; other content as it is."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content
