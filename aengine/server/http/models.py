"""What is not an API of generation: what is served and how it does (`/v1/models`, `/health`, `/load`, `/metrics`, `/version`); the chat
page, its files, how browsers keep them, and the policy under which its own scripts and styles run and nothing else does; texts and ids
(`/tokenize`, `/detokenize` and `/tokenizer_info`), with the fields that vLLM gives them; embeddings of texts (`/v1/embeddings`), and
what is made of models that classify or compare texts (`/classify`, `/v1/score`, `/v1/rerank`).
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from aengine.api import VERSION
from aengine.api.dataclass import dataclass
from aengine.api.engine import Classification, EmbeddingFields
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import FLAG, Accepts, FieldChecks, integer, is_not, one_of
from aengine.api.outputs import Embedding
from aengine.api.request import ChatFields, Prompt, RequestOptions
from aengine.server.core.calls_in_flight import current_time
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, clip, draining
from aengine.server.core.generation import MAX_INPUTS, embed_all
from aengine.server.http.bodies import IDS, STRING, Fields, read_body
from aengine.server.http.body_parameters import CHAT_OPTIONS, OPTIONS, BodyParameters
from aengine.server.http.chat_input import read_messages, read_tools
from aengine.server.http.http_errors import to_json
from aengine.server.http.http_exchange import HttpExchange

_STARTED = int(time.time())


async def health(core: Core, exchange: HttpExchange) -> None:
    """`/health`: respond with 200 while requests are served. Raises `ServiceError` (DRAINING, NOT_READY) otherwise."""
    if core.admission.closed:
        raise draining()
    if not core.serving or not core.engine.healthy:
        raise ServiceError("NOT_READY", "the engine does not take requests")
    await exchange.respond_json({"status": "ok"})


async def models(core: Core, exchange: HttpExchange) -> None:
    """`/v1/models`: respond with the model under each of its names, and its adapters: what OpenAI's clients read, and what Anthropic's
    do."""
    names = core.backend.listed_names
    data = [_model(core, name) for name in names]
    await exchange.respond_json({"object": "list", "data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})


async def model(core: Core, exchange: HttpExchange) -> None:
    if exchange.rest not in core.backend.listed_names:
        core.backend.require_model(exchange.rest)
    await exchange.respond_json(_model(core, exchange.rest))


def _model(core: Core, name: str) -> dict[str, Any]:
    names, info = core.backend.model_names, core.backend.info_of(name)
    is_adapter = name in [adapter.name for adapter in core.engine.adapters]
    length = None if info is None else info.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "aengine",
        "root": names[0] if is_adapter or name in names else name,
        "parent": names[0] if is_adapter and name not in names else None,
        # Ours.
        "max_model_len": length,
        "chat_template": None if info is None else info.chat_template,
        "max_images": None if info is None else info.max_images,
        # Anthropic's.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(_STARTED, timezone.utc).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": length,
        "max_tokens": length,
    }


async def version(core: Core, exchange: HttpExchange) -> None:
    """`/version`: respond with the version of this package."""
    await exchange.respond_json({"version": VERSION})


async def load(core: Core, exchange: HttpExchange) -> None:
    """`/load`: respond with the engine's statistics, and whether the server drains."""
    await exchange.respond_json({"draining": core.admission.closed, **asdict(core.engine.stats())})


async def metrics(core: Core, exchange: HttpExchange) -> None:
    """`/metrics`: respond with all metrics, in Prometheus' text format."""
    assert core.metrics is not None
    text = await asyncio.to_thread(generate_latest, core.metrics)
    await exchange.respond(text, content_type=CONTENT_TYPE_LATEST.encode())


FOLDER = Path(__file__).parent / "static"
INDEX = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".txt": b"text/plain; charset=utf-8",
}
POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No script and no style within HTML, none from elsewhere, and no text that a script makes HTML or a script of."""
HEADERS = (
    (b"content-security-policy", POLICY),
    (b"cache-control", b"no-cache"),  # a browser may keep it, and asks each time whether it is still the same
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"vary", b"accept-encoding"),
)


@dataclass(frozen=True, slots=True)
class _File:
    content_type: bytes
    bodies: dict[str, bytes]  # by content encoding; "" is without one
    digest: str  # of what it holds


class ChatPage:
    """Answers requests with the files of the page: "/" with the index, and any other path with the file that its end names. They hold
    nothing of the server, so they are for everyone; the page asks its user for a token when the API does."""

    def __init__(self) -> None:
        self._files = {path.relative_to(FOLDER).as_posix(): _read(path) for path in FOLDER.rglob("*") if path.suffix in TYPES}

    async def __call__(self, exchange: HttpExchange) -> None:
        file = self._files.get(exchange.rest or INDEX)
        if file is None:
            raise ServiceError("METHOD_NOT_FOUND", f"the page has no file {clip(exchange.rest)}")
        accepted = ", ".join(exchange.headers.get("accept-encoding", ()))
        encoding = "gzip" if "gzip" in accepted and "gzip;q=0" not in accepted.replace(" ", "") else ""
        etag = f'"{file.digest}{"-" * bool(encoding)}{encoding}"'
        known = etag in ", ".join(exchange.headers.get("if-none-match", ()))
        headers = (*HEADERS, (b"etag", etag.encode()), *([(b"content-encoding", b"gzip")] if encoding and not known else []))
        body, status = (b"", 304) if known else (file.bodies[encoding], 200)
        await exchange.respond(body, status=status, content_type=file.content_type, headers=headers)


@cache
def _read(path: Path) -> _File:
    body = path.read_bytes()
    bodies = {"": body, "gzip": gzip.compress(body, mtime=0)}
    return _File(TYPES[path.suffix], bodies, sha256(body).hexdigest()[:32])


_TEXT = ("model", "prompt", "add_special_tokens", "with_pieces")
_CHAT = ("model", "messages", "add_special_tokens", *CHAT_OPTIONS)


async def tokenize(core: Core, exchange: HttpExchange) -> None:
    """`{"prompt": text}` or `{"messages": [...]}` -> `{"tokens": [ids], "count", "max_model_len"}`; with_pieces, of a text, adds `pieces`,
    `start_offsets` and `end_offsets`, in bytes of UTF-8."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    info, _ = core.backend.require_model(given.take_field("model", STRING, ""))
    found = await (_tokenize_chat if "messages" in given else _tokenize_text)(core, given)
    await exchange.respond_json({**found, "count": len(found["tokens"]), "max_model_len": info.max_model_len})


async def _tokenize_text(core: Core, given: Fields) -> dict[str, Any]:
    text = given.need("prompt", STRING, "")
    with_special, with_pieces = given.take_field("add_special_tokens", FLAG, True), given.take_field("with_pieces", FLAG, False)
    _finish(given, _TEXT)
    try:
        if not with_pieces:
            return {"tokens": await core.texts.tokenize(text, add_special_tokens=with_special)}
        located = await core.texts.locate(text, add_special_tokens=with_special)
    except InvalidRequestError as error:
        raise error.moved(lambda field: "prompt" if field == "text" else field) from error
    return {"tokens": located.ids, "pieces": located.pieces, "start_offsets": located.starts, "end_offsets": located.ends}


async def _tokenize_chat(core: Core, given: Fields) -> dict[str, Any]:
    parameters = BodyParameters(given)
    parameters.names["prompt"] = "messages"
    messages = read_messages(given)
    parameters.put_field("tools", read_tools(given, parameters) or None, "tools")
    parameters.take_options(CHAT_OPTIONS)
    given.drop(("add_special_tokens",))  # the template writes those that there are
    options = parameters.options()
    _finish(given, _CHAT)
    with parameters.located():
        rendered = await core.texts.render(messages, cast(ChatFields, {name: getattr(options, name) for name in CHAT_OPTIONS}))
    return {"tokens": rendered.token_ids}


async def detokenize(core: Core, exchange: HttpExchange) -> None:
    """`/detokenize`: respond to `{"tokens": [ids]}` with `{"prompt": text}`."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    core.backend.require_model(given.take_field("model", STRING, ""))
    ids, skips = given.need("tokens", IDS, ()), given.take_field("skip_special_tokens", FLAG, False)
    _finish(given, ("model", "tokens", "skip_special_tokens"))
    try:
        text = await core.texts.detokenize(ids, skip_special_tokens=skips)
    except InvalidRequestError as error:
        raise error.moved(lambda field: field.replace("token_ids", "tokens")) from error
    await exchange.respond_json({"prompt": text})


async def tokenizer_info(core: Core, exchange: HttpExchange) -> None:
    """What evaluations ask before they leave tokenizing to the server: the text of the token that ends an output."""
    ids = core.engine.model_info.eos_token_ids[:1]
    await exchange.respond_json({"eos_token": await core.texts.detokenize(ids, skip_special_tokens=False) if ids else None})


def _finish(given: Fields, known: tuple[str, ...]) -> None:
    given.refuse_rest(known)
    given.check.finish(InvalidRequestError)


EMBEDDINGS_TAKEN: Mapping[str, str] = {
    "model": "the served model or an adapter; empty: the served model",
    "input": "a text, token ids, or a list of texts or of token ids",
    "encoding_format": "float, or base64 of float32, little-endian",
    "dimensions": "so many of the first, made a unit vector again",
    "user": "tenant",
    "prompt_cache_key": "session",
    "pooling": "ours: last, mean, cls, label, or tokens for one of each token",
    "normalize": "ours: false for vectors as they are",
}
"""The fields beside those of ours, and what becomes of them."""
_INPUT = Accepts(lambda value: isinstance(value, str | list), "a text, token ids, or a list of them")
_PROMPT = Accepts(lambda value: isinstance(value, str) or (value and IDS.test(value)), "a text or a list of token ids")


@dataclass(frozen=True, slots=True)
class EmbeddingsAsked:
    """A request to `/v1/embeddings`, as its body was read."""

    model: str
    inputs: list[tuple[Prompt, RequestOptions]]
    is_list: bool  # whether the inputs have numbers
    fields: EmbeddingFields
    in_base64: bool
    parameters: BodyParameters  # has the client's names for fields

    def name_of(self, field: str) -> str:
        """The client's name for a field of `embed_all`."""
        if field.startswith("inputs"):
            return field.replace("inputs", "input") if self.is_list else "input"
        return self.parameters.name_of(field)


async def embeddings(core: Core, exchange: HttpExchange) -> None:
    check = FieldChecks()
    asked = read_embeddings(await read_body(exchange, check), check)
    try:
        model, found = await embed_all(core.backend, asked.model, asked.inputs, asked.fields)
    except InvalidRequestError as error:
        raise error.moved(asked.name_of) from error
    num_tokens = sum(one.num_tokens for one in found)
    head = {"object": "list", "model": model, "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens}}
    data = []
    for index, one in enumerate(found):
        data.append(b'{"object":"embedding","index":%d,"embedding":%s}' % (index, _written_embedding(one, asked.in_base64)))
        await asyncio.sleep(0)  # thousands of numbers take a while to write
    await exchange.respond(to_json(head)[:-1] + b',"data":[' + b",".join(data) + b"]}")


def _written_embedding(embedding: Embedding, in_base64: bool) -> bytes:
    values = embedding.values if embedding.values.ndim == 1 else embedding.values[0]  # of each token
    return b'"%s"' % base64.b64encode(values.astype("<f4").tobytes()) if in_base64 else to_json(values.tolist())


def read_embeddings(given: Fields, check: FieldChecks) -> EmbeddingsAsked:
    """Read the body of a request to `/v1/embeddings`. Raises `InvalidRequestError` with all violations."""
    parameters = BodyParameters(given)
    model = given.take_field("model", STRING, "")
    value = given.need("input", _INPUT, " ")
    is_list = isinstance(value, list) and not IDS.test(value)
    prompts: list[Prompt] = value if is_list else [value]
    for index, prompt in enumerate(prompts):
        if not _PROMPT.test(prompt):
            given.refuse(f"input[{index}]" if is_list else "input", is_not(prompt, _PROMPT.words))
    in_base64 = given.take_field("encoding_format", one_of("float", "base64"), "float") == "base64"
    fields = EmbeddingFields(
        pooling=given.take_field("pooling", STRING),
        normalize=given.take_field("normalize", FLAG, True),
        dimensions=given.take_field("dimensions", integer(1)),
    )
    parameters.take_openai()
    parameters.take_options(OPTIONS)
    given.refuse_rest((*EMBEDDINGS_TAKEN, *OPTIONS))
    options = parameters.options()
    if options.request_id is not None and is_list:
        given.refuse("request_id", "is only possible with one input")
    check.finish(InvalidRequestError)
    return EmbeddingsAsked(model, [(prompt, options) for prompt in prompts], is_list, fields, in_base64, parameters)


# ---- models that classify, and texts that are compared -----------------------------------------------------------------------

TEXTS = Accepts(lambda value: isinstance(value, str) or (isinstance(value, list) and bool(value)), "a text, or a list of texts")
_TEXT_OR_OBJECT = Accepts(
    lambda value: isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("text"), str)),
    "a text, or an object with one",
)


async def classify(core: Core, exchange: HttpExchange) -> None:
    """`/classify`: respond with the probabilities of the labels of each text. Raises `InvalidRequestError`."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    model = given.take_field("model", STRING, "")
    value = given.need("input", _INPUT, " ")
    prompts: list[Prompt] = value if isinstance(value, list) and not IDS.test(value) else [value]
    for index, prompt in enumerate(prompts):
        if not _PROMPT.test(prompt):
            given.refuse(f"input[{index}]", is_not(prompt, _PROMPT.words))
    given.refuse_rest(("model", "input"))
    check.finish(InvalidRequestError)
    name, found = await _labelled(core, model, prompts, lambda field: field.replace("inputs", "input"))
    data = [
        {"index": index, "label": one.label, "probs": one.probabilities, "num_classes": len(one.labels)} for index, one in enumerate(found)
    ]
    await exchange.respond_json(_scored("classify", name, found, data))


async def score(core: Core, exchange: HttpExchange) -> None:
    """`/v1/score`: respond with how well pairs of texts fit: `text_1`, one or as many as of `text_2`."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    model = given.take_field("model", STRING, "")
    first, second = (_texts(given, name) for name in ("text_1", "text_2"))
    if len(first) not in (1, len(second)):
        given.refuse("text_1", f"{len(first)} texts are neither one nor as many as text_2 has, {len(second)}")
    given.refuse_rest(("model", "text_1", "text_2"))
    check.finish(InvalidRequestError)
    name, scores, found = await _compare(core, model, first * (len(second) if len(first) == 1 else 1), second)
    data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
    await exchange.respond_json(_scored("score", name, found, data))


async def rerank(core: Core, exchange: HttpExchange) -> None:
    """`/v1/rerank`: respond with documents in the order of how well they fit a query."""
    check = FieldChecks()
    given = await read_body(exchange, check)
    model, query = given.take_field("model", STRING, ""), given.need("query", STRING, "")
    documents = _texts(given, "documents")
    most = given.take_field("top_n", integer(1))
    with_texts = given.take_field("return_documents", FLAG, True)
    given.refuse_rest(("model", "query", "documents", "top_n", "return_documents"))
    check.finish(InvalidRequestError)
    name, scores, found = await _compare(core, model, [query] * len(documents), documents)
    best = sorted(range(len(documents)), key=lambda index: -scores[index])[:most]
    results = [
        {"index": index, "relevance_score": scores[index], **({"document": {"text": documents[index]}} if with_texts else {})}
        for index in best
    ]
    told = _scored("rerank", name, found, [])
    await exchange.respond_json({"id": told["id"], "model": name, "usage": told["usage"], "results": results})


def _texts(given: Fields, name: str) -> list[str]:
    value = given.need(name, TEXTS, " ")
    texts = value if isinstance(value, list) else [value]
    for index, text in enumerate(texts):
        if not _TEXT_OR_OBJECT.test(text):
            given.refuse(f"{name}[{index}]", is_not(text, _TEXT_OR_OBJECT.words))
    return [text if isinstance(text, str) else text["text"] for text in texts if _TEXT_OR_OBJECT.test(text)]


async def _labelled(core: Core, model: str, prompts: Sequence[Prompt], name_of: Callable[[str], str]) -> tuple[str, list[Classification]]:
    fields = EmbeddingFields(pooling="label", normalize=False)
    try:
        name, found = await embed_all(core.backend, model, [(prompt, RequestOptions()) for prompt in prompts], fields)
    except InvalidRequestError as error:
        raise error.moved(lambda field: "model" if field == "pooling" else name_of(field)) from error
    labels = core.engine.model_info.labels
    return name, [Classification(labels, one.values, one.num_tokens) for one in found]


async def _compare(
    core: Core, model: str, first: Sequence[str], second: Sequence[str]
) -> tuple[str, list[float], list[Classification] | list[Embedding]]:
    """How well each of the first texts fits the second: by the one label of a model that classifies, else by the cosine of embeddings."""
    if len(first) > MAX_INPUTS:
        raise InvalidRequestError.of("documents", f"{len(first)} texts are not 1 to {MAX_INPUTS}")
    if len(labels := core.engine.model_info.labels) > 1:
        raise InvalidRequestError.of("model", f"it tells {len(labels)} labels apart, and does not say how well two texts fit")
    if labels:
        ids = await asyncio.gather(*[core.texts.tokenize_pair(one, other) for one, other in zip(first, second, strict=True)])
        name, scored = await _labelled(core, model, ids, lambda field: field.replace("inputs", "documents"))
        return name, [one.probabilities[0] for one in scored], scored
    unique = list(dict.fromkeys((*first, *second)))
    try:
        name, found = await embed_all(core.backend, model, [(text, RequestOptions()) for text in unique], EmbeddingFields())
    except InvalidRequestError as error:
        raise error.moved(lambda field: "documents" if field.startswith("inputs") else field) from error
    vectors = dict(zip(unique, found, strict=True))
    return name, [float(vectors[one].values @ vectors[other].values) for one, other in zip(first, second, strict=True)], found


def _scored(kind: str, model: str, found: Sequence[Classification | Embedding], data: list[dict[str, Any]]) -> dict[str, Any]:
    num_tokens = sum(one.num_tokens for one in found)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "list", "created": current_time(), "model": model}
    return {**head, "data": data, "usage": usage}
