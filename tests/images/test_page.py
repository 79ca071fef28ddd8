"""The chat page: pictures that are pasted, dropped or chosen go to a model that takes images, and stay with the conversation."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from chat_pages import ChatPage, PageServer, chromium, pages
from image_models import Reference, as_file, picture

import aengine

Find = Callable[[str], Reference]
_PASTE = """async ([data, kind]) => {
  const held = new DataTransfer();
  const bytes = Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
  held.items.add(new File([bytes], "image.png", { type: "image/png" }));
  const target = kind === "paste" ? document.getElementById("prompt") : document.getElementById("chat");
  const options = { bubbles: true, cancelable: true };
  target.dispatchEvent(kind === "paste"
    ? new ClipboardEvent("paste", { ...options, clipboardData: held })
    : new DragEvent("drop", { ...options, dataTransfer: held }));
}"""


@pytest.fixture(scope="module")
def server(reference: Find) -> Iterator[PageServer]:
    engine = aengine.AsyncEngine(str(reference("qwen3_vl").folder), kv_cache_memory=64 << 20, max_model_len=1024)
    server = PageServer(engine=engine)
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Any, server: PageServer) -> Iterator[ChatPage]:
    with pages(browser, server.url) as open_page:
        page = open_page()
        page.set(max_tokens=8)
        yield page


def give(page: ChatPage, kind: str, width: int, height: int) -> None:
    page.page.evaluate(_PASTE, [base64.b64encode(as_file(picture(width, height))).decode(), kind])
    page.page.locator("#files img").last.wait_for()


@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_a_picture_goes_with_the_message(page: ChatPage, server: PageServer, kind: str) -> None:
    ended = len(server.ended)
    give(page, kind, 120, 60)
    page.send("What is this?")
    page.wait_for_end()
    assert server.ended[ended].usage.image_tokens == 8
    assert page.page.locator(".user img.picture").evaluate("image => [image.naturalWidth, image.naturalHeight]") == [120, 60]
    page.send("And again?")
    page.wait_for_end()
    usage = server.ended[ended + 1].usage
    assert usage.image_tokens == 8
    assert usage.cached_prompt_tokens > 8
    page.page.reload()
    page.wait_until_ready()
    page.page.locator(".user img.picture").wait_for()


def test_an_answer_to_a_picture_has_branches(page: ChatPage, server: PageServer) -> None:
    page.set(temperature=0, min_tokens=8)  # the first token is always the same, and is seen
    give(page, "paste", 120, 60)
    page.send("What is this?")
    page.wait_for_end()
    before = page.ids
    page.token.first.click()
    page.button("Keep it, draw the rest again").click()
    page.wait_for_end()
    assert (page.ids[0], len(page.ids)) == (before[0], 8)
    assert server.ended[-1].usage.image_tokens == 8


def test_a_large_one_is_made_smaller_and_other_files_are_refused(page: ChatPage) -> None:
    assert page.page.get_by_role("button", name="Take a photo").is_visible()
    give(page, "paste", 4096, 64)
    size = "image => [image.naturalWidth, image.naturalHeight]"
    assert page.page.locator("#files img").evaluate(size) == [2048, 32]
    page.page.locator("#file-input").set_input_files({"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"})
    page.page.get_by_text("broken.png is no image that can be read.").wait_for()
