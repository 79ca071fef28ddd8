"""The chat page in headless Chromium: a server with the demo model in a thread of its own, and pages that are driven by real clicks."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from cutting_proxy import CuttingProxy
from fake_engine import FakeEngine
from hang_guard import HANG_SECONDS

import aengine
from aengine.api.outputs import FinishReason, Token
from aengine.server.app import Server
from aengine.server.core.calls_in_flight import GenerationRecord

AXE = Path(__file__).resolve().parents[2] / "tools" / "node_modules" / "axe-core" / "axe.min.js"
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync", "--disable-component-update")
FLAGS += ("--disable-background-networking",)


class WrittenEngine(FakeEngine):
    """Answers every request with the text that `say` was given last, word by word; each token has another one as its alternative."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = [""]  # by token id
        self._ids: dict[str, int] = {}

    async def start(self) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def say(self, text: str, *, ended: bool = True) -> None:
        """`ended`: whether the answer ends with the text; else it waits for more to be pushed."""
        self.script = list(self.words(text, ended=ended))

    def words(self, text: str, *, ended: bool = True) -> Iterable[Token]:
        words = re.findall(r" ?\w{1,8}|\s|[^\w\s]{1,2}", text)
        for i, word in enumerate(words):
            token_id = self._ids.setdefault(word, len(self._texts))
            if token_id == len(self._texts):
                self._texts.append(word)
            reason = FinishReason.STOP_TOKEN if ended and i == len(words) - 1 else None
            yield Token(0, token_id, word, -0.1, 1, {token_id: -0.1, 1: -2.5}, finish_reason=reason, stop_reason=reason and token_id)

    async def token_bytes(self, token_ids: Iterable[int]) -> dict[int, bytes]:
        known = len(self._texts)
        return {token_id: self._texts[token_id].encode() if token_id < known else b"?" for token_id in token_ids}


class PageServer:
    """An engine, which is by default one with the demo model, and its HTTP server, in the loop of a thread."""

    def __init__(self, model: str = "demo", engine: Any = None) -> None:
        self.engine = engine or aengine.AsyncEngine(model, kv_cache_memory=64 << 20)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.ended: list[GenerationRecord] = []
        self.url = self.run(self._start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(HANG_SECONDS)

    async def _start(self) -> str:
        await self.engine.start()
        self.server = await self.open()
        self.server.core.observers.on_generation_end.append(self.ended.append)
        return f"http://{self.server.http_address}/"

    async def open(self, **config: Any) -> Server:
        """Another server of the same engine."""
        server = Server(self.engine, port=None, http_port=0, **config)
        await server.start()
        await server.set_serving()
        return server

    def close(self) -> None:
        self.run(self.server.stop())
        self.run(self.engine.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask(self, path: str, **body: Any) -> Any:
        """What the API answers without the page."""
        request = Request(self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=HANG_SECONDS) as response:
            return json.load(response)

    async def begin(self, tokens: int) -> None:
        """Compute at least so many tokens of requests that are sent meanwhile, and pause."""
        before = self.engine.stats().completion_tokens
        await self.engine.unpause()
        while self.engine.stats().completion_tokens < before + tokens:  # noqa: ASYNC110 - statistics tell nobody that they change
            await asyncio.sleep(0.002)
        await self.engine.pause()

    async def go_on(self) -> None:
        await self.engine.unpause()

    @contextmanager
    def proxy(self) -> Iterator[CuttingProxy]:
        """One before the server."""
        proxy = CuttingProxy(self.server.http_address)
        self.run(proxy.start())
        try:
            yield proxy
        finally:
            self._loop.call_soon_threadsafe(proxy.stop)

    def cut(self, proxy: CuttingProxy) -> None:
        self._loop.call_soon_threadsafe(proxy.cut)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def pages(browser: Any, url: str) -> Iterator[Callable[..., ChatPage]]:
    """What opens the page at `url`, or another one, in a browser that knows nothing yet."""
    opened: list[ChatPage] = []

    def open_page(url: str = url, width: int = 1280, **context: Any) -> ChatPage:
        opened.append(ChatPage(browser.new_context(viewport={"width": width, "height": 800}, **context).new_page(), url))
        return opened[-1]

    yield open_page
    for one in opened:
        one.page.context.close()
        assert not one.errors


class ChatPage:
    """One tab with the page, and what a user does there."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.errors: list[str] = []  # of the script
        page.set_default_timeout(1000 * HANG_SECONDS)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda message: self.errors.append(message.text) if "Security Policy" in message.text else None)
        page.goto(url)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Until what was kept is shown."""
        self.page.locator("html[data-ready]").wait_for()

    def set(self, **settings: object) -> None:
        """Fill boxes of the settings, which must be open."""
        self.page.evaluate("document.getElementById('more-settings').open = true")
        for name, value in settings.items():
            self.page.locator(f"#set-{name}").fill(str(value))

    def button(self, name: str) -> Any:
        """The last button of that name: of the last turn."""
        return self.page.get_by_role("button", name=name, exact=True).last

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.button("Send").click()

    def wait_for_end(self) -> None:
        self.button("Send").wait_for()

    def wait_for_tokens(self, count: int = 1) -> None:
        """Until the last answer shows so many."""
        self.page.locator(".turn:last-child .token").nth(count - 1).wait_for()

    def wait_for_turns(self, count: int) -> None:
        """Until the conversation shows so many."""
        self.page.wait_for_function("(count) => document.querySelectorAll('.turn').length === count", arg=count)

    def wait_until(self, holds: str, arg: Any = None) -> None:
        """Until `holds`, an asynchronous function in the page's own words, gives true. `wait_for_function` takes its promise for true."""
        soon = "new Promise((done) => setTimeout(done, 10))"
        self.page.evaluate(f"async (arg) => {{ const holds = {holds}; while (!(await holds(arg))) await {soon}; }}", arg)

    @property
    def token(self) -> Any:
        """The tokens of the last answer."""
        return self.page.locator(".turn:last-child .token")

    def last(self, what: str) -> Any:
        """What a part of the last turn is, in the page's own words."""
        return self.page.evaluate(f"async () => (await import('./static/turns.js')).shownPath().at(-1).{what}")

    @property
    def text(self) -> str:
        """Of the last answer."""
        return self.last("content")

    @property
    def ids(self) -> list[int]:
        return self.last("tokens.map((token) => token.id)")

    @property
    def prompt_ids(self) -> list[int]:
        return self.last("promptIds")

    def violations(self) -> list[str]:
        """What axe-core finds."""
        if not AXE.exists():
            pytest.skip("needs axe-core: npm ci --prefix tools")
        if not self.page.evaluate("'axe' in window"):
            self.page.evaluate(AXE.read_text(encoding="utf-8") + ";0")
        found = self.page.evaluate("axe.run(document, {rules: {'target-size': {enabled: true}}, resultTypes: ['violations']})")
        return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found["violations"] for node in one["nodes"]]
