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
from tokenizers import AddedToken

from aengine.api.errors import InvalidRequestError, ModelLoadError, one_line
from aengine.api.outputs import RenderedChat, TokenizedText
from aengine.api.request import ChatFields, ChatOptions, read_messages
from aengine.api.runtime import imports_of
from aengine.chat.formats import REASONING, ChatFormat
from aengine.models.gguf.gguf_file import is_gguf
from aengine.models.model_files import require_regular
from aengine.tokenizer.bpe_codec import BpeDocument, KeptTables, read_bpe, read_bpe_codec
from aengine.tokenizer.caller_text import MAX_SECONDS, ControlTokens, TemplateTimeError
from aengine.tokenizer.codecs import ByteDetokenizer, ByteTexts, Codec, Detokenizer, TokenizersCodec, TransformersCodec

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from aengine.kernels.cpu.library import CpuKernels
    from aengine.tokenizer.chat_template import ChatTemplate

PIECE_CHARACTERS = 16384
"""Characters of a piece in `Tokenizer.count_pieces`, which takes some 10 ms."""
MAX_SLOW_CHARACTERS = 1 << 19  # of a text for a tokenizer that runs in Python
ASSUMED_TOKEN_BYTES = 64
"""A text has a token for at least so many bytes, or as many as the vocabulary's longest token has. That is more than a token can stand for,
except where tokenizers drop or merge parts of a text: runs of unknown characters, or of spaces."""


TOKENIZER_FILES = (
    *("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json"),
    *("special_tokens_map.json", "added_tokens.json", "chat_template*", "additional_chat_templates/*"),
)
_TOKEN_NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_CONTROL = re.compile(r"<[|｜].*|.*[|｜]>", re.DOTALL)
_MARKUP = re.compile(r"</?([a-z]+:)?(think|thinking|tool_calls?)>")
"""What an assistant writes: thoughts, and calls of tools."""
MAX_REASON = 300
"""Most characters of a library's error that are shown."""


class Tokenizer:
    """The tokenizer of one model. Made by `Tokenizer.load`."""

    def __init__(
        self,
        codec: Codec,
        templates: Mapping[str, str] | None = None,
        named_tokens: Mapping[str, str] | None = None,
        content_special_tokens: bool = False,
    ) -> None:
        """`templates`: sources of chat templates by name; of none the model takes no chats. `named_tokens`: variables of these such as
        `bos_token`. `content_special_tokens`: those in the contents of chats are tokens, as those of the template are."""
        self._codec = codec
        self._byte_texts = (ByteTexts(codec, False), ByteTexts(codec, True)) if codec.is_byte_level() else None  # by skip_special_tokens
        self._templates = templates or {}
        self._named_tokens = named_tokens or {}
        self._compiled: ChatTemplate | None = None
        self._compiling = threading.Lock()
        self._content_special_tokens = content_special_tokens
        self._controls = self._find_controls(self.template) if templates else ControlTokens(())

    @classmethod
    def find(cls, model_dir: Path, *, content_special_tokens: bool = False, kept: KeptTables | None = None) -> Tokenizer | None:
        """That of a local model; None if it has none. `kept`: as of `load`. Raises `ModelLoadError` when it cannot be read."""
        if is_gguf(model_dir):
            from aengine.tokenizer.gguf import read_gguf_codec

            found = read_gguf_codec(model_dir, kept)
            if found is None:
                return None
            codec, named = found
            return cls(codec, _by_name(named.get("chat_template")), named, content_special_tokens)
        if not any(any(model_dir.glob(pattern)) for pattern in TOKENIZER_FILES):
            return None
        return cls.load(model_dir, content_special_tokens=content_special_tokens, kept=kept)

    @classmethod
    def load(cls, model_dir: Path, *, content_special_tokens: bool = False, kept: KeptTables | None = None) -> Tokenizer:
        """Reads the tokenizer of a local model directory. `kept`: where its tables are, or are to be, for later starts. Raises
        `ModelLoadError` when there is none that can be read."""
        for file in (file for pattern in TOKENIZER_FILES for file in model_dir.glob(pattern)):
            if not file.is_dir():
                require_regular(file)
        config = _read_config(model_dir)
        path = model_dir / "tokenizer.json"
        if path.is_file():
            codec = _read_codec(model_dir, config, kept)
            sources = _read_templates(model_dir, config.get("chat_template"))
            return cls(codec, sources, _named_tokens(model_dir, config, sources), content_special_tokens)
        auto = _auto_tokenizer(model_dir)
        if len(auto) <= len(auto.all_special_ids):  # what transformers makes of files that are not those of the model's class
            raise ModelLoadError(f"{model_dir} has no tokenizer that can be read: its files give no tokens to {type(auto).__name__}")
        fast: Codec = TokenizersCodec(auto.backend_tokenizer) if auto.is_fast else TransformersCodec(auto)
        return cls(fast, _by_name(auto.chat_template), auto.special_tokens_map, content_special_tokens)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template, which `render_chat` needs."""
        return bool(self._templates)

    @property
    def template(self) -> str:
        """The source of the chat template, or those of all, one after the other."""
        return "".join(self._templates.values())

    @property
    def is_ready_for_chats(self) -> bool:
        """Whether a chat need not wait for `compile_template`."""
        return not self._templates or self._compiled is not None

    def compile_template(self) -> ChatTemplate:
        """What renders chats. The first call imports jinja2 and compiles: 0.1 s on a slow machine, mostly with the GIL."""
        with self._compiling:
            if self._compiled is None:
                from aengine.tokenizer.chat_template import ChatTemplate

                self._compiled = ChatTemplate(self._templates, self._named_tokens)
            return self._compiled

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

    def encode(self, text: str, *, add_special_tokens: bool = True, literals: Sequence[tuple[int, int]] = ()) -> list[int]:
        """The ids of `text`, with the special tokens that the post-processor adds. Takes up to a second per million characters, without
        the GIL if the tokenizers library does it.

        Special tokens written out in `text` become their ids, but for what is in `literals`, as of `RenderedChat`. Raises
        `InvalidRequestError` (prompt) for text that is not Unicode, on which the tokenizer fails, or with more than MAX_SLOW_CHARACTERS
        for a tokenizer that runs in Python.
        """
        _check_unicode(text, "prompt")
        if self._codec.is_slow and len(text) > MAX_SLOW_CHARACTERS:
            raise InvalidRequestError.of(
                "prompt", f"{len(text)} characters are more than {MAX_SLOW_CHARACTERS}, as many as this model's tokenizer can take"
            )
        with _refusing_failures("prompt"):
            if not literals:
                return self._codec.encode(text, add_special_tokens)
            return self._codec.encode_apart(text, literals, self._controls.tokens)

    def encode_pair(self, first: str, second: str) -> list[int]:
        """The ids of two texts as one input of a model that compares them, with the special tokens around them. Raises what `encode`
        raises."""
        for text in (first, second):
            _check_unicode(text, "prompt")
        if self._codec.is_slow and len(first) + len(second) > MAX_SLOW_CHARACTERS:
            reason = (
                f"{len(first) + len(second)} characters are more than {MAX_SLOW_CHARACTERS}, as many as this model's tokenizer can take"
            )
            raise InvalidRequestError.of("prompt", reason)
        with _refusing_failures("prompt"):
            return self._codec.encode_pair(first, second)

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

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: ChatOptions | None = None,
        seconds: float = MAX_SECONDS,
        **fields: Unpack[ChatFields],
    ) -> RenderedChat:
        """A conversation as the model's chat template writes it. `options`, or `fields` of it: what the template is given beside it.

        A message has a string `role` and a `content` that is a string or a list of parts `{"type": "text", "text": ...}`. Parts go to a
        template that reads them; another one is given their text, joined. What else a message has, such as `tool_calls`, is for the
        template to read. Of several templates it is the one named "tool_use" if there are `tools`, else the one named "default".
        Raises `InvalidRequestError` (prompt) for messages the template cannot render, or a model without a template; `TemplateTimeError`
        where `seconds` of processor time, fewer than by default, are not enough.
        """
        if not self._templates:
            raise InvalidRequestError.of("prompt", "chat messages need a chat template and this model has none; give text or token ids")
        options = ChatOptions(**fields) if options is None else options
        chat, tools, variables = read_messages(messages), options.tools, options.template_kwargs or {}
        controls = self._controls
        if not self._content_special_tokens:
            chat = [controls.guarded_message(message) for message in chat]
            tools, variables = controls.guarded(tools), controls.guarded(variables)

        template = self.compile_template()

        def render(chat: list[dict[str, Any]]) -> str:
            return template.render(
                chat,
                tools,
                variables,
                add_generation_prompt=options.opens_turn,
                continue_final_message=options.continue_final_message,
                seconds=seconds,
            )

        try:
            if any(isinstance(message.get("content"), list) for message in chat) and not _reads_parts(render):
                chat = [{**message, "content": _text_of(message.get("content"))} for message in chat]
            return controls.revealed(render(chat))
        except Exception as error:  # a template is a program: it may raise anything
            if isinstance(error, TemplateTimeError) and seconds < MAX_SECONDS:
                raise
            reason = controls.revealed(str(error)).text
            raise InvalidRequestError.of("prompt", f"the model's chat template refuses these messages: {reason}"[:MAX_REASON]) from error

    @property
    def chat_format(self) -> ChatFormat:
        """How the model writes calls and reasoning, as far as its chat template tells."""
        return ChatFormat.of_template(self.template)

    def _find_controls(self, template: str) -> ControlTokens:
        """Special tokens, and others that the template writes or that are spelled as control tokens are."""
        added = [token for token in self._codec.added_tokens() if token.content and not token.content.isspace()]
        controls = [token for token in added if token.special or token.content in template or _CONTROL.fullmatch(token.content)]
        marks = REASONING[ChatFormat.of_template(template).reasoning]
        own = {token.content for token in controls if not token.special and _MARKUP.fullmatch(token.content)}
        return ControlTokens(
            (token.content for token in controls),
            own if marks is None else {*own, marks.opening, marks.closing},
            self._codec.normalize if self._codec.normalizes else None,
            [self._codec.normalize(token.content) for token in controls if token.normalized],
        )

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

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer | ByteDetokenizer:
        """Fresh incremental decoding of one sequence; its pieces add up to `decode` of the sequence."""
        if self._byte_texts is not None:
            return ByteDetokenizer(self._byte_texts[skip_special_tokens])
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
    """Read the text of a chat template. Raises `ModelLoadError`."""
    require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object; empty if there is no such file. Raises `ModelLoadError`."""
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return config


def _read_codec(model_dir: Path, config: Mapping[str, Any], kept: KeptTables | None) -> TokenizersCodec:
    """That of the tokenizer.json, with tables of our own where the kernels are there and it is of their kind. Raises `ModelLoadError`."""
    path = model_dir / "tokenizer.json"

    def finished(codec: TokenizersCodec) -> TokenizersCodec:
        codec.split_special_tokens(bool(config.get("split_special_tokens")))
        try:
            _add_described(codec, config.get("added_tokens_decoder") or {})
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(f"{model_dir / 'tokenizer_config.json'}: added_tokens_decoder cannot be read: {error!r}") from error
        _mark_special(codec, config, model_dir)
        return codec

    def read_whole() -> TokenizersCodec:
        try:
            return finished(TokenizersCodec(tokenizers.Tokenizer.from_file(str(path))))
        except ModelLoadError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path} is not a tokenizer that can be read: {one_line(error)}") from error

    def make(kernels: CpuKernels) -> tuple[BpeDocument, dict[str, Any]] | None:
        made = read_bpe(path, kernels)
        return None if made is None else (made, {})

    own = read_bpe_codec(kept, make, read_whole)
    return read_whole() if own is None else finished(own[0])


def _add_described(codec: TokenizersCodec, described: Mapping[str, Any]) -> None:
    """Add tokens by id, as `added_tokens_decoder` describes them; those with another id in the vocabulary, or beyond it, stay out."""
    tokens = []
    size = codec.vocab_size()
    for token_id, token in sorted(described.items(), key=lambda item: int(item[0])):
        known = codec.token_id(token["content"])
        if int(token_id) == (size if known is None else known):
            tokens.append(AddedToken(**token))
            size += known is None
    codec.add_tokens(tokens)


def _mark_special(codec: TokenizersCodec, config: Mapping[str, Any], model_dir: Path) -> None:
    """Marks the tokens that the config names as special. Names without an id stay out: the model has no embedding for them. Raises
    `ModelLoadError`."""
    named = [value for key, value in config.items() if key.endswith("_token")]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        extra = config.get(key) or []
        if not isinstance(extra, list | dict):
            raise ModelLoadError(f"{key} of the tokenizer in {model_dir} is a {type(extra).__name__}, not a list of tokens, or an object")
        named.extend(extra.values() if isinstance(extra, dict) else extra)
    found = [value.get("content") if isinstance(value, dict) else value for value in named]
    contents = {content for content in found if isinstance(content, str)}
    marked = {token.content for token in codec.added_tokens() if token.special}
    new = [content for content in sorted(contents - marked) if codec.token_id(content) is not None]
    codec.add_tokens([AddedToken(content, special=True, normalized=False) for content in new])


def _read_templates(model_dir: Path, configured: Any) -> dict[str, str]:
    """Chat templates by their names; files are before what is `configured`. Raises `ModelLoadError`."""
    files = [*model_dir.glob("chat_template.jinja"), *model_dir.glob("additional_chat_templates/*.jinja")]
    return {"default" if file.parent == model_dir else file.stem: _read_text(file) for file in files} or _by_name(configured)


def _by_name(templates: Any) -> dict[str, str]:
    """Return chat templates by their names, where a config has none, one, or several in a list or a dict. Raises `ModelLoadError`."""
    try:
        if isinstance(templates, list):
            templates = {template["name"]: template["template"] for template in templates}
        found = dict(templates) if isinstance(templates, dict) else {"default": templates} if templates else {}
    except (KeyError, TypeError):
        found = {"default": None}
    if not all(isinstance(text, str) for named in found.items() for text in named):
        raise ModelLoadError("chat_template in tokenizer_config.json is neither a text nor texts by their names")
    return found


def _named_tokens(model_dir: Path, config: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, str]:
    """Special tokens by the names that templates have for them. Where a template reads one that the config does not speak of, the
    defaults of the tokenizer's class decide, which transformers knows."""
    read = {name for name in _TOKEN_NAMES for source in sources.values() if name in source}
    if not read <= config.keys():
        try:
            return dict(_auto_tokenizer(model_dir).special_tokens_map)
        except ModelLoadError:  # code of its own
            pass
    values = {name: value.get("content") if isinstance(value, dict) else value for name, value in config.items() if name in _TOKEN_NAMES}
    return {name: value for name, value in values.items() if isinstance(value, str)}


def _auto_tokenizer(model_dir: Path) -> Any:
    # Imported here: it takes seconds, and most models never need it.
    with imports_of("a tokenizer without tokenizer.json"):
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # depends on the tokenizer's class what is raised
        raise ModelLoadError(f"{model_dir} has no tokenizer that can be read: {one_line(error)}") from error


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


def _reads_parts(render: Callable[[list[dict[str, Any]]], str]) -> bool:
    """Whether the template writes the text of content parts. Others fail on a list, leave it out, or write it as a list."""
    try:
        text = render([{"role": "user", "content": [{"type": "text", "text": "PART"}]}])
    except Exception:
        return False
    return "PART" in text and not re.search(r"""["']text["']: *["']PART""", text)


def _text_of(content: Any) -> Any:
    """The text of content parts, joined; other content as it is."""
    return "".join(part.get("text", "") for part in content) if isinstance(content, list) else content
