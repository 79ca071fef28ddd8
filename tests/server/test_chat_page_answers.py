"""The chat page: how it shows answers in Markdown, what it keeps, and where its parts are; the engine says what the tests give it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_pages import ChatPage, PageServer, WrittenEngine, chromium, pages

Open = Callable[..., ChatPage]

ANSWER = r"""# Title

Some **bold** text, `code`, [a link](https://example.com/) and $5, not $10, but $x_1^2$.

1. one
2. two
   - [x] nested
3. three

```python
def area(r):
    return 3.14 * r ** 2  # <b>
```

| name | size |
|:-----|-----:|
| a    | 1    |

$$
\int_0^1 x\,dx
= \frac{1}{2}
$$

> quoted *text*
"""

HOSTILE = """<script>window.ran = 1</script>
<img src=x onerror="window.ran = 1"> <svg onload="window.ran = 1"></svg> <iframe srcdoc="<script>parent.ran = 1</script>"></iframe>

<style>body { display: none }</style><base href="https://evil.example/"><form action="https://evil.example/"><input name=a></form>

[a](javascript:window.ran=1) [b](JaVaScRiPt:window.ran=1) [c](data:text/html,<script>parent.ran=1</script>) [d](/v1/models) [e](vbscript:x)
![picture](https://evil.example/x.png) ![picture](data:image/svg+xml,x) <https://fine.example/?a=b&c=d> [f]: x

[ref]: javascript:window.ran=1
[ref]

$\\href{javascript:window.ran=1}{x}$ $\\includegraphics{https://evil.example/y.png}$ $\\htmlStyle{position:fixed}{x}$
$\\class{main}{x}$ $\\unicode{

```html" onmouseover="window.ran=1
<script>window.ran = 1</script>
```

""" + "".join(f"{mark * 100}x\n\n" for mark in ("> ", "- ", "1. ", "[", "*a ", "`$"))


@pytest.fixture(scope="module")
def engine() -> WrittenEngine:
    return WrittenEngine()


@pytest.fixture(scope="module")
def server(engine: WrittenEngine) -> Iterator[PageServer]:
    server = PageServer(engine=engine)
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


def ask(page: ChatPage, text: str = "Tell me.") -> None:
    page.send(text)
    page.wait_for_end()


def wait_until_kept(page: ChatPage, text: str) -> None:
    kept = "async (text) => JSON.stringify(await (await import('./static/store.js')).exported()).includes(text)"
    page.wait_until(kept, text)


def shown(page: ChatPage) -> str:
    """The last answer as it is drawn, without what follows the focus."""
    html: str = page.page.locator(".turn:last-child > .text").inner_html()
    return re.sub(r' tabindex="0" role="button" aria-haspopup="dialog"| data-label="Copy"|Copied', "", html).replace(">Copy<", "><")


@pytest.mark.slow
def test_every_part_has_its_place(open_page: Open) -> None:
    """Whichever panels are open, and at any width: the conversation is between them, or they take its place, and nothing is cut off."""
    page = open_page().page
    place = "name => { const {left, right} = document.getElementById(name).getBoundingClientRect(); return [left, right] }"
    for width in (320, 700, 900, 1280, 2560):
        page.set_viewport_size({"width": width, "height": 800})
        # Panels follow the width with the next frame.
        page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        for wanted in ((), ("chats",), ("settings",), ("chats", "settings")):
            for name in ("chats", "settings"):
                if page.locator(f"#{name}").is_visible() != (name in wanted):
                    page.locator(f"#show-{name}").click()
            opened = {name for name in ("chats", "settings", "engine") if page.locator(f"#{name}").is_visible()}
            assert opened == set(wanted) if width > 1150 or len(wanted) < 2 else len(opened) == 1
            assert page.evaluate("document.documentElement.scrollWidth") == width
            if width <= 780 and opened:
                assert page.evaluate(place, opened.pop()) == [0, width]
                assert not page.locator("#chat").is_visible()
                continue
            left, right = page.evaluate(place, "chat")
            assert left == (page.evaluate(place, "chats")[1] if "chats" in opened else 0)
            assert right == (page.evaluate(place, "settings")[0] if "settings" in opened else width)
            assert right - left >= min(width, 560)
            assert page.locator("#prompt").bounding_box()["width"] > 120
            assert page.locator("#send").bounding_box()["x"] + page.locator("#send").bounding_box()["width"] <= right
    settings = page.locator("#settings")
    assert settings.locator("input:visible, textarea:visible, select:visible").count() == 5, "the rest is folded"


@pytest.mark.slow
def test_an_answer_in_markdown(engine: WrittenEngine, open_page: Open) -> None:
    engine.say(ANSWER)
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    ask(page)
    answer = page.page.locator(".turn:last-child > .text")
    assert answer.locator("h3").inner_text() == "Title"
    assert answer.locator("strong").inner_text() == "bold"
    assert answer.locator("p").first.inner_text().startswith("Some bold text, code, a link and $5, not $10, but ")
    assert answer.locator("a").get_attribute("rel").split() == ["noopener", "noreferrer", "nofollow"]
    assert answer.locator("ol > li").count() == 3
    assert answer.locator("ol ul input").is_checked()
    assert answer.locator(".hljs-keyword").all_inner_texts() == ["def", "return"]
    assert answer.locator(".hljs-comment").inner_text() == "# <b>"
    assert answer.locator("th").all_inner_texts() == ["name", "size"]
    assert answer.locator("td.to-right").inner_text() == "1"
    assert answer.locator("math").count() == 2
    assert answer.locator(".display mfrac").count() == 1
    assert answer.locator("blockquote em").inner_text() == "text"
    button = answer.get_by_role("button", name="Copy")
    # What it says is shown for a moment only.
    note = "new MutationObserver(() => (window.said ??= []).push(button.textContent))"
    button.evaluate(f"(button) => {note}.observe(button, {{childList: true}})")
    button.click()
    page.page.wait_for_function("() => window.said?.includes('Copied')")
    assert page.page.evaluate("navigator.clipboard.readText()") == "def area(r):\n    return 3.14 * r ** 2  # <b>"

    # What is shown of a token is a part of it, and all that is shown are tokens.
    labels = page.last("tokens.map((token) => token.label)")
    assert "".join(labels) == page.text == ANSWER
    pieces = answer.evaluate("(box) => [...box.querySelectorAll('.token')].map((one) => [Number(one.dataset.index), one.textContent])")
    assert [index for index, _ in pieces] == sorted(index for index, _ in pieces)
    assert not [(index, text) for index, text in pieces if text not in labels[index]]
    loose = """(box) => {
        const texts = document.createTreeWalker(box, NodeFilter.SHOW_TEXT), found = [];
        const known = ".token, .block-head, math";
        while (texts.nextNode()) if (!texts.currentNode.parentElement.closest(known)) found.push(texts.currentNode.data);
        return found;
    }"""
    assert answer.evaluate(loose) == []

    # A formula is shown as its tokens, and so is the whole answer.
    answer.locator(".drawn").first.click()
    assert answer.locator("p .formula .token").all_text_contents() == ["$", "x_1", "^", "2", "$"]
    answer.get_by_role("button", name="Show the formula").click()
    assert answer.locator("math").count() == 2
    rendered = shown(page)
    page.button("Source").click()
    assert "".join(page.token.all_text_contents()) == ANSWER
    page.button("Source").click()
    assert shown(page) == rendered
    assert page.violations() == []

    # A branch within the code.
    token = answer.locator("code .token").filter(has_text="return").first
    index = int(token.get_attribute("data-index"))
    engine.say("if True:\n```\n")
    token.click()
    with page.page.expect_request("**/v1/completions") as sent:
        page.page.locator("#choices li button:not([aria-current])").click()
    page.wait_for_end()
    first = engine._texts[1]
    assert sent.value.post_data_json["branch"]["then"] == [1]
    assert page.text == "".join(labels[:index]) + first + "if True:\n```\n"
    assert page.page.evaluate("document.activeElement.dataset.index") == str(index)


@pytest.mark.slow
def test_hostile_answers_are_text(engine: WrittenEngine, server: PageServer, open_page: Open) -> None:
    page = open_page()
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    engine.say(HOSTILE)
    ask(page, HOSTILE)
    answer = page.page.locator(".turn:last-child > .text")
    names = set(answer.evaluate("(box) => [...box.querySelectorAll('*')].map((one) => one.localName)"))
    assert not names & {"script", "style", "img", "svg", "iframe", "base", "form", "object", "embed", "link", "meta", "foreignObject"}
    hrefs = page.page.evaluate(
        "[...document.querySelectorAll('[href]')].map((one) => one.getAttribute('href')).filter((one) => /:/.test(one))"
    )
    assert {href.split(":")[0] for href in hrefs} <= {"https", "data"}
    assert [href for href in hrefs if href.startswith("data")] == ["data:,"], "the page's own"
    assert "https://fine.example/?a=b&c=d" in hrefs
    handlers = (
        "(box) => [...box.querySelectorAll('*')].flatMap((one) => one.getAttributeNames()).filter((name) => /^on|^src|^style$/.test(name))"
    )
    assert not set(answer.evaluate(handlers)) - {"style"}, "those of mathematics have sizes"
    assert "<script>window.ran = 1</script>" in answer.inner_text()
    assert answer.locator(" ".join(["blockquote"] * 13)).count() == answer.locator(" ".join(["ul"] * 13)).count() == 0, "there is a most"
    assert page.page.evaluate("window.ran") is None
    assert page.page.locator("#send").is_visible()
    assert [url for url in asked if not url.startswith(server.url)] == []
    page.page.reload()
    page.wait_until_ready()
    page.page.locator(".answer > .text").wait_for()
    assert page.page.evaluate("window.ran") is None


@pytest.mark.slow
def test_what_is_drawn_as_it_grows_is_what_is_drawn_at_once(engine: WrittenEngine, server: PageServer, open_page: Open) -> None:
    page = open_page()
    text = (
        ANSWER + "\n1. again\n\n\n2. loose\n\n    ```js\n    let a = 1;\n    ```\n3. last\n\n- other\n* kind\n\nSetext\n======\n" + ANSWER
    )
    grown, once, work = page.page.evaluate(
        """async (text) => {
            const {TokenText, MarkdownView} = await import("./static/texts.js");
            const boxes = [0, 1].map(() => document.body.appendChild(document.createElement("div")));
            for (const box of boxes) box.className = "text";
            const grow = (box, text, step, work = {chars: 0}) => {
                const whole = new TokenText();
                const appendTo = whole.appendTo;
                whole.appendTo = function (element, value, places) {
                    work.chars += value.length;
                    appendTo.call(this, element, value, places);
                };
                const view = new MarkdownView(box, whole, (box, draw) => draw());
                for (let i = 0; i < text.length; i += step) {
                    whole.add({index: i / step}, text.slice(i, i + step));
                    view.draw(false);
                }
                view.end();
                return box.innerHTML;
            };
            const grown = grow(boxes[0], text, 3);
            boxes[1].replaceChildren();
            const whole = new TokenText();
            for (let i = 0; i < text.length; i += 3) whole.add({index: i / 3}, text.slice(i, i + 3));
            new MarkdownView(boxes[1], whole, (box, draw) => draw()).end();
            const once = boxes[1].innerHTML;
            const work = ["- item\\n", "word ", "code();\\n"].map((line, i) => {
                const [small, large] = [{chars: 0}, {chars: 0}];
                grow(boxes[0], (i === 2 ? "```js\\n" : "") + line.repeat(8000 / line.length), 200, small);
                grow(boxes[0], (i === 2 ? "```js\\n" : "") + line.repeat(32000 / line.length), 200, large);
                return large.chars / small.chars;
            });
            return [grown, once, work];
        }""",
        text,
    )
    assert grown == once
    assert all(ratio < 8 for ratio in work), "four times the text is about four times the work, in a list, a paragraph, and a block of code"


@pytest.mark.slow
def test_enter_leaves_a_running_answer_alone(engine: WrittenEngine, server: PageServer, open_page: Open) -> None:
    engine.say("It goes **on", ended=False)
    page = open_page()
    page.send("Begin.")
    page.wait_for_tokens(3)
    box = page.page.get_by_label("Message", exact=True)
    box.fill("And then?")
    box.press("Enter")
    assert page.page.get_by_text("An answer is still being written").first.is_visible()
    assert box.input_value() == "And then?"
    (stream,) = (stream for stream in engine.streams.values() if not stream.ended)
    page.button("Edit").click()
    page.page.get_by_label("Edited message").press("Enter")
    page.button("Cancel").click()

    async def go_on() -> None:
        stream.push(engine.words("** and ends."))

    server.run(go_on())
    page.wait_for_end()
    assert page.text == "It goes **on** and ends."
    page.wait_for_turns(2)
    assert page.page.locator(".answer strong").inner_text() == "on"
    engine.say("A second", ended=False)
    box.press("Enter")
    page.wait_for_tokens(2)
    page.page.keyboard.press("Escape")
    page.page.get_by_text("Stopped.").wait_for()
    page.wait_for_turns(4)


@pytest.mark.slow
def test_what_is_kept(engine: WrittenEngine, open_page: Open, tmp_path: Path) -> None:
    engine.say(ANSWER)
    page = open_page()
    page.page.evaluate("sessionStorage.setItem('token', 'open-sesame')")
    page.set(system="Be brief.", temperature=0.7, max_tokens=100, stop="a\\nb")
    ask(page, "What is a circle?")
    page.button("Retry").click()
    page.wait_for_end()
    page.button("Previous answer").click()
    before, ids, meta = shown(page), page.ids, page.page.locator(".meta").last.inner_text()
    page.page.get_by_label("Message", exact=True).fill("And a square?")
    page.page.locator("#file-input").set_input_files({"name": "notes.md", "mimeType": "text/markdown", "buffer": b"a note"})
    page.page.get_by_role("button", name="Remove notes.md").wait_for()
    wait_until_kept(page, "notes.md")

    def check(page: ChatPage) -> None:
        page.page.locator(".answer").wait_for()
        page.page.get_by_role("button", name="Remove notes.md").wait_for()  # what is not sent is shown last
        assert shown(page) == before
        assert page.ids == ids
        assert page.page.get_by_text("1 of 2").is_visible()
        assert page.page.locator(".user .text").inner_text() == "What is a circle?"
        assert page.page.get_by_label("Message", exact=True).input_value() == "And a square?"
        held = page.page.evaluate(
            "['system', 'temperature', 'max_tokens', 'stop'].map((name) => document.getElementById(`set-${name}`).value)"
        )
        assert held == ["Be brief.", "0.7", "100", "a\\nb"]

    page.page.reload()
    page.wait_until_ready()
    check(page)
    assert page.page.locator(".meta").nth(-1).inner_text() == meta

    # Another conversation, a name, a search, and back.
    page.button("New chat").click()
    page.wait_for_turns(0)
    page.page.wait_for_function("() => document.getElementById('prompt').value === ''")
    engine.say("Prose about Bath.")
    ask(page, "Tell me of a town.")
    chats = page.page.locator("#chat-list")
    chats.get_by_role("button", name="Tell me of a town.", exact=True).wait_for()
    page.button("Rename Tell me of a town.").click()
    page.page.get_by_label("Name of the conversation").fill("<b>Towns</b>")
    page.page.keyboard.press("Enter")
    chats.get_by_role("button", name="<b>Towns</b>", exact=True).wait_for()
    names = chats.locator(".chat-name")
    for words, found in (("circle", ["What is a circle?"]), ("BATH", ["<b>Towns</b>"]), ("towns", ["<b>Towns</b>"]), ("xyz", [])):
        page.page.get_by_label("Search the conversations").fill(words)
        page.page.wait_for_function("(most) => document.querySelectorAll('.chat-name').length === most", arg=len(found))
        assert names.all_inner_texts() == found
        page.page.get_by_label("Search the conversations").fill("")
        page.page.wait_for_function("() => document.querySelectorAll('.chat-name').length === 2")
    chats.get_by_role("button", name="What is a circle?", exact=True).click()
    page.page.locator(".user .text").get_by_text("What is a circle?").wait_for()
    check(page)

    with page.page.expect_download() as download:
        page.button("Export").click()
    file = tmp_path / "conversations.json"
    download.value.save_as(file)
    text = file.read_text(encoding="utf-8")
    assert "open-sesame" not in text, "the token of the server is no part of what is kept"
    page.button("Delete <b>Towns</b>").click()
    page.button("Delete").click()
    names.filter(has_text="Towns").wait_for(state="detached")
    page.page.reload()
    page.wait_until_ready()
    check(page)
    assert names.all_inner_texts() == ["What is a circle?"]

    other = open_page()
    data = json.loads(text)
    for wrong in (
        b"{",
        b"[]",
        json.dumps({**data, "version": 9}).encode(),
        json.dumps({**data, "turns": [{**data["turns"][0], "text": 3}]}).encode(),
    ):
        other.page.locator("#import-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": wrong})
        other.page.get_by_text("Not imported").wait_for()
        assert other.page.locator(".chat-name").count() == 0
        other.page.evaluate("document.getElementById('chats-status').textContent = ''")
    other.page.locator("#import-file").set_input_files(file)
    other.page.get_by_text("Imported: 2.").wait_for()
    assert other.page.locator(".chat-name").all_inner_texts() == ["<b>Towns</b>", "What is a circle?"]
    other.page.get_by_role("button", name="What is a circle?", exact=True).click()
    check(other)


@pytest.mark.slow
def test_files_go_along(engine: WrittenEngine, open_page: Open) -> None:
    engine.say("I have read it.")
    page = open_page()
    page.page.get_by_text("1 to 512; empty: all that fit").wait_for()
    choose = page.page.locator("#file-input")
    for name, content, wrong in (
        ("picture.png", b"\x89PNG\r\n\x1a\n", "is not a text in UTF-8"),
        ("zeros.txt", b"a\0b", "is not a text"),
        ("large.txt", b"a" * 600, "tokens; the context of the model has 512 tokens"),
        ("huge.txt", b"a" * 9000, "9,000 bytes; the context of the model has 512 tokens"),
        ("empty.txt", b"", "is empty"),
    ):
        choose.set_input_files({"name": name, "mimeType": "text/plain", "buffer": content})
        page.page.get_by_text(f"{name} ").filter(has_text=wrong).first.wait_for()
        assert page.page.locator("#files li").count() == 0
    choose.set_input_files({"name": "a.py", "mimeType": "text/x-python", "buffer": "print('é```')\n".encode()})
    page.page.get_by_role("button", name="Remove a.py").wait_for()
    page.page.evaluate(
        """() => {
            const data = new DataTransfer();
            data.items.add(new File(["b of the drop"], "b.txt", {type: "text/plain"}));
            document.getElementById("log").dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
        }"""
    )
    page.page.get_by_role("button", name="Remove b.txt").click()
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.send("Read this.")
    page.wait_for_end()
    (message,) = sent.value.post_data_json["messages"]
    assert message == {"role": "user", "content": "Read this.\n\na.py:\n````\nprint('é```')\n````"}
    assert page.page.locator(".user .text").inner_text() == "Read this."
    assert page.page.locator(".user summary").inner_text() == "a.py"
    assert page.page.locator("#files").is_hidden()


@pytest.mark.slow
def test_without_a_network_and_behind_a_prefix(engine: WrittenEngine, server: PageServer, open_page: Open, browser: Any) -> None:
    engine.say(ANSWER)
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    prefix = f"{server.url}a/prefix/"
    context.route(f"{prefix}**", lambda route: route.continue_(url=route.request.url.replace("/a/prefix/", "/")))
    page = ChatPage(context.new_page(), prefix)
    asked: list[str] = []
    page.page.on("request", lambda request: asked.append(request.url))
    ask(page)
    before = shown(page)
    page.button("New chat").click()
    context.set_offline(True)
    page.page.locator(".chat-name").click()
    page.page.locator(".answer .katex, .answer math").first.wait_for()
    assert shown(page) == before
    page.button("Retry").click()
    page.page.get_by_text("The server cannot be reached.").wait_for()
    assert page.page.locator("math").count() == 0
    page.button("Previous answer").click()
    assert shown(page) == before
    assert asked
    assert not [url for url in asked if not url.startswith(prefix)]
    assert not page.errors
    context.close()


@pytest.mark.slow
def test_max_tokens_up_to_the_context(engine: WrittenEngine, open_page: Open) -> None:
    engine.say("Yes.")
    page = open_page()
    page.page.get_by_text("1 to 512; empty: all that fit").wait_for()
    page.set(max_tokens=513)
    page.send("Well?")
    assert page.page.locator("#set-max_tokens-wrong").inner_text() == "The context of the model has 512 tokens."
    page.set(max_tokens="")
    with page.page.expect_request("**/v1/chat/completions") as sent:
        page.button("Send").click()
    page.wait_for_end()
    assert "max_tokens" not in sent.value.post_data_json


_READ = """async (event) => {
  const { Answer, root } = await import("./static/turns.js");
  const answer = new Answer(root, {});
  answer.read(event);
  return [answer.content, answer.tokens.map(({ pieces }) => pieces.map(([, text]) => text).join(""))];
}"""


def test_an_answer_that_ends_within_a_character(open_page: Open) -> None:
    """Its text is shown token by token, though all of it came at once."""
    tokens = [{"token": "a", "bytes": [97]}, {"token": "b", "bytes": [98]}, {"token": "�", "bytes": [0xE2, 0x82]}]
    choice = {"token_ids": [1, 2, 3], "logprobs": {"content": tokens}, "delta": {"content": "ab�"}, "finish_reason": "length"}
    assert open_page().page.evaluate(_READ, {"choices": [choice]}) == ["ab�", ["a", "b", "�"]]
