"""A small Hugging Face hub on a local port: one repository, with files by revision. Remembers what was downloaded."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

REPO = "some/model"


class HubServer:
    """`revisions`: branch or tag -> file -> content."""

    def __init__(self, revisions: Mapping[str, Mapping[str, bytes]]) -> None:
        self.commits = {name: hashlib.sha1(name.encode()).hexdigest() for name in revisions}
        self.files = {self.commits[name]: files for name, files in revisions.items()}
        self.downloaded: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self, body=True)

            def do_HEAD(self) -> None:
                hub.answer(self, body=False)

            def log_message(self, *_: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"

    def answer(self, call: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(call.path).path)
        error = ""
        headers: dict[str, str] = {}
        content = b""
        api, api_tree, resolve = f"/api/models/{REPO}/revision/", f"/api/models/{REPO}/tree/", f"/{REPO}/resolve/"
        prefix = next((prefix for prefix in (api, api_tree, resolve) if path.startswith(prefix)), None)
        if prefix is None:
            error = "RepoNotFound"
        else:
            revision, _, name = path.removeprefix(prefix).partition("/")
            commit = self.commits.get(revision, revision)
            if commit not in self.files:
                error = "RevisionNotFound"
            elif prefix == api:
                content = json.dumps({"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in self.files[commit]]}).encode()
            elif prefix == api_tree:
                files = self.files[commit].items()
                content = json.dumps(
                    [{"type": "file", "path": name, "size": len(data), "oid": etag(data)} for name, data in files]
                ).encode()
            elif name not in self.files[commit]:
                error = "EntryNotFound"
            else:
                content = self.files[commit][name]
                headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": commit}
                if body:
                    self.downloaded.append(name)
        call.send_response(404 if error else 200)
        if error:
            headers["X-Error-Code"] = error
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            call.send_header(key, value)
        call.end_headers()
        if body:
            call.wfile.write(content)


def etag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def serve_hub(revisions: Mapping[str, Mapping[str, bytes]]) -> Iterator[HubServer]:
    hub = HubServer(revisions)
    thread = threading.Thread(target=hub.http.serve_forever, kwargs={"poll_interval": 0.01})  # `shutdown` waits for the next
    thread.start()
    try:
        yield hub
    finally:
        hub.http.shutdown()
        thread.join()
        hub.http.server_close()
