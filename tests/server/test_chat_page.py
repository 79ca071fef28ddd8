"""The chat page, by what its users do with it, in a browser and against the real server."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from chat_pages import ChatPage, PageServer, chromium, pages
from slow_cases import slow_but

from aengine.api.outputs import FinishReason
from aengine.models.loading.hub import resolve_model
from aengine.server.http.models import FOLDER

Open = Callable[..., ChatPage]
TOOLS = Path(__file__).resolve().parents[2] / "tools" / "chat_page"


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    server = PageServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def open_page(browser: Any, server: PageServer) -> Iterator[Open]:
    with pages(browser, server.url) as open_page:
        yield open_page


def test_what_is_sent_is_answered_as_by_the_api(server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.set(system="Be brief.", seed=3, max_tokens=24, temperature=0.8)
    page.send("Who is Mr. Darcy?")
    page.wait_for_end()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who is Mr. Darcy?"}]
    same = server.ask("v1/chat/completions", messages=messages, seed=3, max_tokens=24, temperature=0.8, return_token_ids=True)
    assert page.text == same["choices"][0]["message"]["content"] == "".join(page.token.all_text_contents())
    assert page.ids == same["choices"][0]["token_ids"]
    assert f"{len(page.ids)} tokens" in page.page.locator(".answer .meta").inner_text()
    # What was drawn has its probability among those of the alternatives.
    page.token.first.hover()
    choices = page.page.locator("#choices")
    assert re.search(r"rank \d+, id \d+|id \d+", choices.locator("p").inner_text())
    assert choices.locator("li").count() in (8, 9)
    assert choices.locator("[aria-current]").count() == 1

    page.set(seed=4)
    page.button("Retry").click()
    page.wait_for_end()
    assert page.page.get_by_text("2 of 2").is_visible()
    page.button("Edit").click()
    page.page.get_by_label("Edited message").fill("And Mr. Bingley?")
    page.page.keyboard.press("Enter")
    page.wait_for_end()
    assert page.page.locator(".user .text").all_inner_texts() == ["And Mr. Bingley?"]
    page.page.locator(".user").get_by_role("button", name="Previous").click()
    assert page.page.locator(".user .text").all_inner_texts() == ["Who is Mr. Darcy?"]


@pytest.mark.slow
def test_an_answer_that_is_stopped_is_cancelled(server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.set(min_tokens=1800, max_tokens=1800)
    server.ended.clear()
    page.send("Tell me all.")
    server.run(server.begin(3))
    page.wait_for_tokens(3)
    page.button("Stop").click()
    page.wait_for_end()
    server.run(server.go_on())
    assert page.page.get_by_text("Stopped.").last.is_visible()
    kept = page.text
    page.wait_until("async () => (await (await fetch('/load')).json()).running === 0")
    (record,) = server.ended
    assert record.finish_reason is FinishReason.CANCELLED
    assert record.usage.completion_tokens < 1800
    assert page.text == kept != ""


@pytest.mark.slow
def test_branches_from_an_alternative_and_from_a_token(server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.set(temperature=0, min_tokens=12, max_tokens=20)
    page.send("Who is Mr. Darcy?")
    page.wait_for_end()
    before, ids = page.token.all_text_contents(), page.ids
    page.token.nth(5).click()
    with page.page.expect_request("**/v1/completions") as sent:
        page.page.locator("#choices li button:not([aria-current])").first.click()
    page.wait_for_end()
    assert "prompt" not in sent.value.post_data_json
    assert server.ended[-1].usage.completion_tokens == 20, "its first tokens are those of the answer that it is a branch of"
    assert page.page.get_by_text("2 of 2").is_visible()
    assert page.token.all_text_contents()[:5] == before[:5]
    assert page.ids[:5] == ids[:5]
    assert page.ids[5] != ids[5]
    prompt = page.prompt_ids + page.ids[:6]
    same = server.ask("v1/completions", prompt=prompt, temperature=0, min_tokens=6, max_tokens=14, return_token_ids=True)
    assert page.ids[6:] == same["choices"][0]["token_ids"]

    page.set(temperature=1, seed=5)
    page.token.nth(8).click()
    page.button("Keep it, draw the rest again").click()
    page.wait_for_end()
    assert page.page.get_by_text("3 of 3").is_visible()
    page.page.locator(".answer").get_by_role("button", name="Previous").click()
    page.page.locator(".answer").get_by_role("button", name="Previous").click()
    assert page.token.all_text_contents() == before


@pytest.mark.slow
def test_the_keyboard_alone(server: PageServer, open_page: Open) -> None:
    page = open_page()
    page.set(min_tokens=1800, max_tokens=1800, seed=1)
    keyboard = page.page.keyboard
    page.page.get_by_label("Message", exact=True).focus()
    keyboard.type("Who is Mr. Darcy?")
    keyboard.press("Enter")
    server.run(server.begin(8))
    page.wait_for_tokens(8)
    keyboard.press("Escape")
    page.wait_for_end()
    server.run(server.go_on())
    assert page.page.get_by_text("Stopped.").last.is_visible()
    before = page.token.all_text_contents()
    page.set(max_tokens=12, min_tokens=0)
    page.page.get_by_label("Message", exact=True).focus()
    for _ in range(20):
        keyboard.press("Shift+Tab")
        if page.page.evaluate("document.activeElement.matches('.token')"):
            break
    for key in ("End", "Home", "ArrowRight", "ArrowRight"):
        keyboard.press(key)
    assert page.page.evaluate("document.activeElement.dataset.index") == "2"
    assert page.page.locator("#choices").is_visible()
    keyboard.press("Enter")
    assert page.page.evaluate("document.activeElement.getAttribute('aria-current')") == "true"
    keyboard.press("Escape")
    assert page.page.evaluate("document.activeElement.dataset.index") == "2"
    keyboard.press("Enter")
    keyboard.press("Tab")
    chosen = page.page.evaluate("document.activeElement.querySelector('span').textContent")
    keyboard.press("Enter")
    page.wait_for_end()
    assert page.token.all_text_contents()[:2] == before[:2]
    assert page.token.nth(2).inner_text() == chosen.replace("␣", " ")
    assert page.page.evaluate("document.activeElement.dataset.index") == "2"


@pytest.mark.slow
def test_a_lost_connection(server: PageServer, open_page: Open) -> None:
    with server.proxy() as proxy:
        page = open_page(f"http://{proxy.address}/")
        page.set(temperature=0, min_tokens=1800, max_tokens=1800)
        page.button("Engine").click()
        page.send("Who is Mr. Darcy?")
        server.run(server.begin(5))
        page.wait_for_tokens(5)
        server.cut(proxy)
        page.page.get_by_text("The connection was lost.").wait_for()
        server.run(server.go_on())
        kept, ids = page.text, page.ids
        assert ids
        length = len(ids) + 10
        page.last(f"settings.min_tokens = {length}")
        page.last(f"settings.max_tokens = {length}")
        page.page.context.set_offline(True)
        page.button("Continue").click()
        page.page.get_by_text("The server cannot be reached.").wait_for()
        page.page.get_by_text("No connection; the next try is in").wait_for()
        page.page.context.set_offline(False)
        page.button("Continue").click()
        page.wait_for_end()
        assert page.text.startswith(kept)
        same = server.ask(
            "v1/completions", prompt=page.prompt_ids + ids, temperature=0, min_tokens=10, max_tokens=10, return_token_ids=True
        )
        assert page.ids == ids + same["choices"][0]["token_ids"]
        assert page.text == kept + same["choices"][0]["text"]
        page.page.get_by_text("Connected.").wait_for()


@pytest.mark.slow
def test_errors_are_shown_at_their_boxes(open_page: Open) -> None:
    page = open_page()
    page.set(schema='{"type": ', max_tokens=60)
    page.send("An answer in JSON, please.")
    wrong = page.page.locator("#set-schema-wrong")
    assert wrong.inner_text().startswith("This is not JSON")
    assert page.page.evaluate("document.activeElement.id") == "set-schema"
    page.wait_for_turns(0)

    page.set(schema='{"type": "object", "properties": {"name": {"type": "strin"}}}', top_p=7)
    page.button("Send").click()
    page.page.get_by_text("Show in the settings").wait_for()
    assert "top_p" in page.page.locator("#set-top_p-wrong").inner_text()
    page.set(top_p="")
    page.button("Retry").click()
    wrong.get_by_text("response_format.json_schema.schema").wait_for()
    assert page.page.locator("#set-schema").get_attribute("aria-invalid") == "true"

    page.set(schema='{"type": "object", "properties": {"rank": {"enum": [1, 2]}}, "required": ["rank"], "additionalProperties": false}')
    assert wrong.inner_text() == ""
    page.button("Retry").click()
    page.wait_for_end()
    assert json.loads(page.text)["rank"] in (1, 2)


TEMPLATE = """{%- if tools %}<tool_call>{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""


@pytest.mark.slow
def test_reasoning_and_calls_of_tools(open_page: Open, tmp_path: Path) -> None:
    model = tmp_path / "thinks"
    shutil.copytree(resolve_model("demo"), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    server = PageServer(str(model))
    try:
        page = open_page(server.url)
        page.set(seed=2, max_reasoning_tokens=12, min_tokens=30, max_tokens=40)
        page.send("Where is Mr. Darcy?")
        page.wait_for_end()
        reasoning, text = page.page.locator(".reasoning .text"), page.text
        assert not reasoning.is_visible()
        page.page.get_by_text("Reasoning", exact=True).click()
        thoughts = reasoning.locator(".token")
        before = thoughts.all_text_contents()
        assert 6 <= len(before) <= 12
        assert text
        assert text == "".join(page.page.locator(".answer > .text .token").all_text_contents())
        assert "think>" not in text + "".join(before)
        ids = page.ids

        # A branch in the reasoning keeps the budget, and its answer is apart from it.
        thoughts.nth(3).click()
        page.page.locator("#choices li button:not([aria-current])").first.click()
        page.wait_for_end()
        assert thoughts.all_text_contents()[:3] == before[:3]
        assert 6 <= thoughts.count() <= 12
        assert page.ids[:3] == ids[:3]
        assert page.text.lstrip() == page.text not in ("", text)
        assert "think>" not in page.text

        days = {"type": "object", "properties": {"day": {"enum": [1, 2]}}, "required": ["day"], "additionalProperties": False}
        page.set(
            tools=json.dumps([{"type": "function", "function": {"name": "weather", "parameters": days}}]), min_tokens="", max_tokens=400
        )

        def must_call(route: Any) -> None:
            route.continue_(post_data=json.dumps({**route.request.post_data_json, "tool_choice": "required", "parallel_tool_calls": False}))

        page.page.route("**/v1/chat/completions", must_call)
        page.button("Retry").click()
        page.wait_for_end()
        call = page.page.locator(".call")
        assert call.locator("strong").inner_text() == "weather"
        assert re.fullmatch(r'\{\n  "day": [12]\n\}', call.locator("pre").inner_text())
        assert page.violations() == []
        page.page.set_viewport_size({"width": 360, "height": 700})
        assert page.page.evaluate("document.documentElement.scrollWidth") == 360, "the name of the model is long"
        page.page.unroute("**/v1/chat/completions")
        call.get_by_label("Result").fill("It rains.")
        with page.page.expect_request("**/v1/chat/completions") as sent:
            page.button("Send results").click()
        *_, asked, result = sent.value.post_data_json["messages"]
        assert asked["tool_calls"][0]["function"]["name"] == "weather"
        assert result == {"role": "tool", "tool_call_id": asked["tool_calls"][0]["id"], "content": "It rains."}
        page.wait_for_end()
    finally:
        server.close()


@pytest.mark.slow
def test_a_model_that_does_not_chat(open_page: Open, tmp_path: Path) -> None:
    """It goes on with the text."""
    model = tmp_path / "writes"
    shutil.copytree(resolve_model("demo"), model)
    (model / "chat_template.jinja").unlink()
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    server = PageServer(str(model))
    try:
        page = open_page(server.url)
        page.page.get_by_label("Model").get_by_text("writes").wait_for(state="attached")
        page.set(temperature=0, max_tokens=12)
        page.send("It is a truth universally")
        page.wait_for_end()
        first = page.text
        same = server.ask("v1/completions", prompt="It is a truth universally", temperature=0, max_tokens=12)
        assert first == same["choices"][0]["text"]
        page.send(" And so")
        page.wait_for_end()
        same = server.ask("v1/completions", prompt=f"It is a truth universally{first} And so", temperature=0, max_tokens=12)
        assert page.text == same["choices"][0]["text"]
        page.token.nth(3).click()
        page.button("Keep it, draw the rest again").click()
        page.wait_for_end()
        assert page.text == same["choices"][0]["text"]
    finally:
        server.close()


@pytest.mark.slow
def test_the_token_of_a_server(server: PageServer, open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text("anne open-sesame\n")
    guarded = server.run(server.open(token_file=str(tmp_path / "tokens")))
    try:
        page = open_page(f"http://{guarded.http_address}/")
        dialog = page.page.get_by_role("dialog", name="This server asks for a token")
        dialog.wait_for()
        assert page.violations() == []
        dialog.get_by_label("Token").fill("open-barley")
        page.page.keyboard.press("Enter")
        page.page.get_by_text("The server refuses that token.").wait_for()
        dialog.get_by_label("Token").fill("open-sesame")
        page.button("Use it").click()
        page.page.get_by_label("Model").get_by_text("demo").wait_for(state="attached")
        page.set(max_tokens=3)
        page.send("Hello")
        page.wait_for_tokens()
        page.wait_for_end()
        assert page.page.evaluate("sessionStorage.token") == "open-sesame"
    finally:
        server.run(guarded.stop())


@pytest.mark.slow
@pytest.mark.parametrize("scheme", slow_but(["dark"], ["light", "dark"]))
def test_it_can_be_read_by_everyone(open_page: Open, scheme: str) -> None:
    """axe-core finds nothing: on a desktop and on a phone, with messages, settings, plots and the choices of a token."""
    page = open_page(color_scheme=scheme)
    back = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", back))) > 384) is (scheme == "light")
    page.set(max_tokens=24, min_tokens=24)
    page.page.get_by_label("Colour tokens").check()
    page.send("Who is Mr. Darcy?")
    page.wait_for_end()
    page.token.nth(10).click()
    assert page.violations() == []

    page.page.set_viewport_size({"width": 360, "height": 700})
    page.token.nth(4).click()
    for view in ("choices", "Settings", "Engine"):
        if view != "choices":
            page.button(view).click()
        assert page.page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.violations() == []
    page.button("Engine").click()
    assert page.page.get_by_label("Message", exact=True).is_visible()


@pytest.mark.slow
def test_the_theme_can_be_chosen(open_page: Open) -> None:
    page = open_page(color_scheme="light")
    for theme in ("light", "dark"):
        page.page.get_by_text("More settings").click()
        page.page.get_by_label("Theme").select_option(theme)
        assert page.page.evaluate("document.documentElement.dataset.theme") == theme
        page.page.get_by_text("More settings").click()
    page.page.reload()
    assert page.page.evaluate("getComputedStyle(document.documentElement).colorScheme") == "dark"


@pytest.mark.slow
def test_plots_of_the_engine(open_page: Open) -> None:
    page = open_page()
    page.set(max_tokens=600, min_tokens=600)
    page.button("Engine").click()
    page.send("Who is Mr. Darcy?")
    page.wait_for_end()
    page.page.wait_for_function(
        "() => { const {scrollTop, scrollHeight, clientHeight} = document.querySelector('#log');"
        " return scrollTop > 0 && scrollHeight - scrollTop - clientHeight < 2 }"
    )
    for plot in ("Tokens per second: generated .*, most [1-9]", "TTFT: p50 [1-9]", "ITL: p50 [.0-9]+ ms", r"KV pages: used \d+ of \d+"):
        page.page.get_by_role("img", name=re.compile(plot)).wait_for()


def test_the_files(server: PageServer) -> None:
    own = [path for path in FOLDER.iterdir() if path.is_file()]
    wrong = re.compile(
        r"""(?:src|href)=["']?(?:https?:)?//|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|\son\w+=|\sstyle=|<style|<script>"""
    )
    assert not [path.name for path in own if wrong.search(path.read_text(encoding="utf-8"))], (
        "nothing from outside, nothing that the policy forbids"
    )
    asked = Request(server.url + "static/vendor/libraries.js", headers={"Accept-Encoding": "gzip"})
    with urlopen(server.url) as index, urlopen(asked) as script:
        assert index.read() == (FOLDER / "index.html").read_bytes()
        assert gzip.decompress(script.read()) == (FOLDER / "vendor" / "libraries.js").read_bytes()
    for headers in (index.headers, script.headers):
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        )
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    assert script.headers.get_content_type() == "text/javascript"
    with pytest.raises(HTTPError, match="304"):
        urlopen(Request(asked.full_url, headers={"Accept-Encoding": "gzip", "If-None-Match": script.headers["etag"]}))
    with urlopen(Request(asked.full_url, headers={"If-None-Match": script.headers["etag"]})) as plain:
        assert plain.headers["etag"] != script.headers["etag"], "another encoding is another representation"
    for path in ("static/none.js", "static/../page.py", "static//etc/passwd"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(server.url + path)
    without = server.run(server.open(chat_page=False))
    for path in ("", "static/main.js"):
        with pytest.raises(HTTPError, match="404"):
            urlopen(f"http://{without.http_address}/{path}")
    server.run(without.stop())


def test_the_licences_of_libraries_are_there() -> None:
    wanted = json.loads((TOOLS / "package.json").read_text(encoding="utf-8"))["devDependencies"]
    listed = (FOLDER / "vendor" / "LICENSES.txt").read_text(encoding="utf-8")
    assert {name for name in wanted if f"{name} {wanted[name]} (" not in listed} == {"esbuild"}, (
        "and the versions are those that are bundled"
    )
