"""`/v1/files` and `/v1/batches`: files that clients store, and batches of the requests in them, in OpenAI's shape.

The answers of a batch become files when it ends. Knows nothing of how its requests are served: they are those of other paths.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from aengine.api.errors import InvalidRequestError
from aengine.api.fields import Accepts, FieldChecks
from aengine.server.core.batches import BATCH_URLS, PRIORITY, Answered, Batch, BatchError, Batches, read_lines
from aengine.server.core.calls_in_flight import current_caller
from aengine.server.core.core import Core
from aengine.server.core.errors import ServiceError, clip
from aengine.server.core.journal import StoredAnswer
from aengine.server.http.bodies import STRING, read_body
from aengine.server.http.http_errors import HttpError, to_json
from aengine.server.http.http_exchange import HttpExchange

MAX_FILE_BYTES = 200 * 1024 * 1024
MAX_REQUESTS = 50_000
MAX_LISTED = 100
MAX_PAIRS = 16
WINDOW_SECONDS = 24 * 3600
_UNKNOWN_FIELDS = 20
_METADATA = Accepts(
    lambda value: isinstance(value, dict) and len(value) <= MAX_PAIRS and all(isinstance(one, str) for one in value.values()),
    f"an object of at most {MAX_PAIRS} strings",
)
_STEPS = ("failed", "finalizing", "completed", "expired", "cancelling", "cancelled")

AnswerWithin = Callable[[str, bytes], Awaitable[tuple[int, bytes, float | None]]]


class FilesAndBatches:
    """Serves both paths of `core`, whose journal has them. `answer_within` serves a request of a batch."""

    def __init__(self, core: Core, answer_within: AnswerWithin) -> None:
        self._journal, self._answer_within = core.journal, answer_within
        self.batches = Batches(core.journal, core.backend, self, "batch_")
        self._uploading = asyncio.Lock()  # one is in memory at a time

    # ---- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, exchange: HttpExchange) -> None:
        """`POST /v1/files`: a form with `purpose` and `file`."""
        kind = next(iter(exchange.headers.get("content-type", ())), "")
        if not kind.lower().startswith("multipart/form-data"):
            raise HttpError("INVALID_FIELD", "the body must be multipart/form-data, with purpose and file", 415)
        parser = MultiPartParser(Headers({"content-type": kind}), exchange.parts(MAX_FILE_BYTES), max_files=1, max_fields=_UNKNOWN_FIELDS)
        try:
            form = await parser.parse()
        except MultiPartException as error:
            raise InvalidRequestError.of("body", f"it is not a form: {error.message}") from None
        try:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise InvalidRequestError.of("file", "is required, as a file")
            if not isinstance(purpose, str) or not purpose:
                raise InvalidRequestError.of("purpose", 'is required, such as "batch"')
            async with self._uploading:
                content = await file.read()
                described = await self._put_file(
                    f"file-{uuid.uuid4().hex}", file.filename or "file", purpose, content, current_caller().name
                )
        finally:
            await form.close()
        await exchange.respond_json(described)

    async def _put_file(self, name: str, filename: str, purpose: str, content: bytes, owner: str | None) -> dict[str, Any]:
        created = time.time()
        described = {
            "id": name,
            "object": "file",
            "bytes": len(content),
            "created_at": int(created),
            "expires_at": int(created + self._journal.max_seconds),
            "filename": filename,
            "purpose": purpose,
            "status": "processed",
            "status_details": None,
        }
        try:
            await self._journal.put_answer(StoredAnswer(name, owner, created, True, to_json(described), content))
        except OSError as error:
            raise ServiceError("NOT_READY", f"the file cannot be stored: {error}") from error
        return described

    async def list_files(self, exchange: HttpExchange) -> None:
        """`GET /v1/files`, with `limit`, `after` and `purpose`."""
        query = exchange.query_fields()
        await self._list(exchange, "file-", query, query.get("purpose"))

    async def get_file(self, exchange: HttpExchange) -> None:
        """`GET /v1/files/{id}`, and `/content`."""
        name, _, part = exchange.rest.partition("/")
        stored = await self._find(name, "file", part in ("", "content"), part)
        if part:
            await exchange.respond(stored.answer, content_type=b"application/octet-stream")
        else:
            await exchange.respond(stored.asked)

    async def delete_file(self, exchange: HttpExchange) -> None:
        """`DELETE /v1/files/{id}`; a batch that was made of it goes on."""
        name, _, part = exchange.rest.partition("/")
        await self._find(name, "file", not part, part)
        await self._journal.delete_answer(name)
        await exchange.respond_json({"id": name, "object": "file", "deleted": True})

    async def _find(self, name: str, kind: str, is_path: bool, part: str) -> StoredAnswer:
        if not is_path:
            raise ServiceError("METHOD_NOT_FOUND", f"there is no /{clip(part)} of a {kind} for this method")
        start = {"file": "file-", "batch": "batch_"}[kind]
        stored = await self._journal.get_answer(name, current_caller()) if name.startswith(start) else None
        if stored is None:
            raise ServiceError("REQUEST_NOT_FOUND", f"no {kind} {clip(name)!r} is stored", resource=(kind, name))
        return stored

    async def _list(self, exchange: HttpExchange, start: str, query: Mapping[str, str], purpose: str | None = None) -> None:
        limit = query.get("limit", "20" if start == "batch_" else "10000")
        if not (limit.isdecimal() and 1 <= int(limit[:6]) <= 10_000):
            raise InvalidRequestError.of("limit", f"{clip(limit)!r} is not 1 to 10000")
        found = await self._journal.list_answers(start, current_caller(), after=query.get("after", ""))
        wanted = [one for one in (self._described(stored) for stored in found) if purpose in (None, one.get("purpose"))]
        page = wanted[: int(limit)]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        await exchange.respond_json({"object": "list", "data": page, **ends, "has_more": len(wanted) > len(page)})

    # ---- batches -------------------------------------------------------------------------------------------------------

    async def create(self, exchange: HttpExchange) -> None:
        """`POST /v1/batches`."""
        check = FieldChecks()
        given = await read_body(exchange, check)
        name = given.need("input_file_id", STRING, "")
        url = given.need("endpoint", Accepts(lambda value: value in BATCH_URLS, f"one of {', '.join(BATCH_URLS)}"), "")
        window = given.need("completion_window", Accepts(lambda value: value == "24h", "'24h'"), "24h")
        metadata = given.take_field("metadata", _METADATA)
        given.drop(("output_expires_after",))
        given.refuse_rest(("input_file_id", "endpoint", "completion_window", "metadata"))
        check.finish(InvalidRequestError)
        file = await self._find(name, "file", True, "")
        created, caller = time.time(), current_caller()
        described: dict[str, Any] = {
            "id": f"batch_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": url,
            "errors": None,
            "input_file_id": name,
            "completion_window": window,
            "status": "in_progress",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(created),
            "in_progress_at": int(created),
            "expires_at": int(created + WINDOW_SECONDS),
            **{f"{step}_at": None for step in _STEPS},
            "metadata": metadata,
        }
        try:
            requests = await asyncio.to_thread(_requests, file, url)
        except BatchError as error:
            wrong = {"code": "invalid_request", "message": str(error), "param": None, "line": error.line}
            described |= {"status": "failed", "failed_at": int(created), "errors": {"object": "list", "data": [wrong]}}
            requests = []
        described["request_counts"] = {"total": len(requests), "completed": 0, "failed": 0}
        entry = StoredAnswer(described["id"], caller.name, created, not requests, to_json(described), b"")
        try:
            if requests:
                await self.batches.begin(entry, caller, requests)
            else:
                await self._journal.put_answer(entry)
        except OSError as error:
            raise ServiceError("NOT_READY", f"the batch cannot be stored: {error}") from error
        await exchange.respond_json(described)

    async def list_batches(self, exchange: HttpExchange) -> None:
        """`GET /v1/batches`, with `limit` and `after`."""
        await self._list(exchange, "batch_", exchange.query_fields())

    async def get_batch(self, exchange: HttpExchange) -> None:
        """`GET /v1/batches/{id}`."""
        await exchange.respond_json(self._described(await self._find(exchange.rest, "batch", "/" not in exchange.rest, exchange.rest)))

    async def cancel(self, exchange: HttpExchange) -> None:
        """`POST /v1/batches/{id}/cancel`: end one that runs; what was answered is in its files. One that has ended stays as it is."""
        name, _, part = exchange.rest.partition("/")
        await exchange.read()
        stored = await self._find(name, "batch", part == "cancel", part)
        if (batch := await self.batches.find(name)) is not None:
            batch.entry = _with(batch.entry, status="cancelling", cancelling_at=int(time.time()))
            await self.batches.stop_batch(batch, "cancelled")
            stored = batch.entry
        await exchange.respond_json(self._described(stored))

    def _described(self, stored: StoredAnswer) -> dict[str, Any]:
        """The object that a client gets of a file or of a batch."""
        batch = self.batches.running.get(stored.name)
        described: dict[str, Any] = json.loads((batch.entry if batch is not None else stored).asked)
        if batch is not None:
            described["request_counts"] = _counts(batch)
        return described

    # ---- what runs -----------------------------------------------------------------------------------------------------

    async def answer(self, batch: Batch, index: int) -> Answered:
        """Serve a request of a batch."""
        line = json.loads(batch.requests[index])
        body = line["body"]
        if line["url"] != "/v1/embeddings" and "service_tier" not in body:
            body.setdefault("priority", PRIORITY)
        status, told, delay = await self._answer_within(line["url"], to_json(body))
        if delay is not None:
            return Answered(False, b"", delay)
        response = {"status_code": status, "request_id": batch.decided(index).request_id, "body": json.loads(told)}
        return Answered(status == 200, _answer_line(batch, index, line["custom_id"], response, None))

    async def finish(self, batch: Batch, answers: Sequence[bytes | None]) -> StoredAnswer:
        """Store the files of a batch that has ended."""
        name, now, why = batch.entry.name, int(time.time()), batch.stopped or "completed"
        served = [line for index, line in enumerate(answers) if line is not None and batch.answered[index]]
        left = [(index, line) for index, line in enumerate(answers) if not batch.answered.get(index)]
        others = [_unanswered(batch, index, why) if line is None else line for index, line in left]
        changes: dict[str, Any] = {"status": why, f"{why}_at": now, "finalizing_at": now, "request_counts": _counts(batch)}
        for field, lines, suffix in (("output_file_id", served, "output"), ("error_file_id", others, "error")):
            if lines:
                content = b"".join([line + b"\n" for line in lines])
                file = f"file-{name.removeprefix('batch_')}-{suffix}"
                changes[field] = (await self._put_file(file, f"{name}_{suffix}.jsonl", "batch_output", content, batch.entry.owner))["id"]
        return _with(batch.entry, **changes)

    def expiry(self, batch: Batch) -> float:
        """When it ends."""
        return batch.entry.created + WINDOW_SECONDS


def _requests(file: StoredAnswer, url: str) -> list[bytes]:
    """The lines of a file, checked."""
    lines = [line for line in file.answer.split(b"\n") if line.strip()]
    if not 1 <= len(lines) <= MAX_REQUESTS:
        raise BatchError(f"{file.name}: {len(lines)} requests are not 1 to {MAX_REQUESTS}")
    for _ in read_lines(file.answer.split(b"\n"), file.name, (url,)):
        pass
    return lines


def _answer_line(batch: Batch, index: int, custom_id: str, response: Any, error: Any) -> bytes:
    line = {"id": f"batch_req_{batch.decided(index).request_id}", "custom_id": custom_id, "response": response, "error": error}
    return to_json(line)


def _unanswered(batch: Batch, index: int, why: str) -> bytes:
    error = {"code": f"batch_{why}", "message": f"the batch was {why} before this request had an answer"}
    return _answer_line(batch, index, json.loads(batch.requests[index])["custom_id"], None, error)


def _counts(batch: Batch) -> dict[str, int]:
    served = sum(batch.answered.values())
    return {"total": len(batch.requests), "completed": served, "failed": len(batch.answered) - served}


def _with(entry: StoredAnswer, **changes: Any) -> StoredAnswer:
    return replace(entry, asked=to_json({**json.loads(entry.asked), **changes}))
