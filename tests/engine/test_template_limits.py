"""Chat templates that compute without end, or write too much, end in one error; small chats of others go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hang_guard import HANG_SECONDS
from test_chat import USER, save, transformers_text

from aengine import InvalidRequestError
from aengine.api.request import ChatOptions
from aengine.engine.requests import QUICK_CHARACTERS, render_chat
from aengine.engine.workers import Workers
from aengine.tokenizer import chat_template
from aengine.tokenizer.tokenizer import Tokenizer

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}"


def refusal(folder: Path, template: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        Tokenizer.load(save(folder, chat_template=template)).render_chat([USER])
    sentence = str(caught.value)
    assert sentence.startswith("prompt: the model's chat template refuses these messages: ")
    return sentence


@pytest.mark.parametrize(
    "template",
    [
        "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{{ 'ab' * 99999999999 }}",
        "{{ [1] * 99999999999 }}",
        "{{ (7 ** 99999999) | length }}",
        "{{ 'a'.center(99999999999) }}",
        "{{ '%99999999999d' % 1 }}",
        "{% for a in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    ],
)
def test_too_much(template: str, tmp_path: Path) -> None:
    assert "it makes more than 16777216 characters or items of one value" in refusal(tmp_path, template)


def test_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_LOOPS", 1000)
    assert refusal(tmp_path, LOOP).endswith("its loops have more than 1000 turns")


def test_what_takes_long_leaves_the_thread_of_small_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt ends early, and the rest is for the other thread."""
    tokenizer = Tokenizer.load(save(tmp_path, chat_template=f"{{% if tools %}}{LOOP}{{% endif %}}ok"))
    tokenizer.compile_template()
    steps = render_chat([USER], tokenizer, ChatOptions(tools=[{"name": "f"}]))
    assert next(steps) > QUICK_CHARACTERS
    monkeypatch.setattr("aengine.tokenizer.tokenizer.MAX_SECONDS", 0.01)
    monkeypatch.setattr(tokenizer.render_chat.__func__, "__defaults__", (None, 0.01))  # type: ignore[attr-defined]
    with pytest.raises(InvalidRequestError, match=r"it takes more than 0\.01 seconds$"):
        next(steps)


def test_the_first_chat_leaves_it_too(tmp_path: Path) -> None:
    """A template is compiled when it is needed, or a while after the start."""
    tokenizer = Tokenizer.load(save(tmp_path, chat_template="{{ messages[0].content }}"))
    for first in (True, False):
        assert tokenizer.is_ready_for_chats is not first
        steps = render_chat([USER], tokenizer, ChatOptions())
        if first:
            assert next(steps) > QUICK_CHARACTERS
        with pytest.raises(StopIteration) as ended:
            next(steps)
        assert ended.value.value.text == USER["content"]


def test_work_that_turns_out_to_be_large_moves() -> None:
    workers = Workers("test", quick=10)
    try:

        def names() -> Any:
            first = threading.current_thread().name
            yield 11
            return first.rsplit("_", 1)[0], threading.current_thread().name.rsplit("_", 1)[0]

        assert workers.submit(names(), 1).result(HANG_SECONDS) == ("test-quick", "test")
    finally:
        workers.close()


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}",
        "{% for a in [1, 2, 3, 4] if a % 2 %}{{ a }}{% else %}none{% endfor %}{% for a in nothing %}{{ a }}{% else %}none{% endfor %}",
        "{% for k, v in {'a': 1}.items() recursive %}{{ k }}{{ v }}{{ loop({'b': 2}.items()) if v == 1 }}{% endfor %}",
        "{% for a in [1, 2, 3] %}{% if a == 2 %}{% continue %}{% endif %}{{ a }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% for a in 'ab' %}{{ loop.previtem }}{{ a }}{{ loop.nextitem }} {% endfor %}",
        "{% set a %}b{{ messages[0].content }}{% endset %}{{ a ~ none ~ 1 | trim }}",
        "{% macro f(a, b='c') %}{{ a }}{{ b }}{{ varargs }}{% endmacro %}{{ f('<', 'd', 3) ~ f(1) }}",
        "{% generation %}{{ messages[0].role }}{% endgeneration %}\n  {% if true %}\n  x\n  {% endif %}\n",
        "{{ {'a': '<é\"'} | tojson(ensure_ascii=true, indent=1) }}",
        "{{ [{'b': 1, 'a': '<'}] | tojson(sort_keys=true, separators=(',', ':')) }}",
        "{{ dict(a=1).a }}{{ namespace(b=2).b }}{{ dict.fromkeys(['c'], 3).c }}",
        "{{ messages[0] | items | list | length }}{{ messages | map(attribute='role') | join('-') }}",
        "{{ ''.join(['a', 'b']) }}{{ 'a b'.split() | last }}{{ '%s-%s' | format(1, 2) }}{{ 'x{}'.format(3) }}{{ '%d' % 3 }}",
        "{{ documents is none }}{{ tools is none }}{{ bos_token is defined }}{{ strftime_now('%Y') | length }}{{ 2 ** 3 + 1 }}",
    ],
)
def test_what_templates_use(template: str, tmp_path: Path) -> None:
    folder = save(tmp_path, chat_template=template)
    assert Tokenizer.load(folder).render_chat([USER]).text == transformers_text(folder, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ namespace(_a=1) }}",
        "{% include 'a' %}",
        "{{ lipsum(9) }}",
        "{{ 1 + }}",
        "{{" + "-" * 20_000 + "1 }}",
        "{% if a %}" * 200 + "{% endif %}" * 200,
    ],
)
def test_what_templates_may_not(template: str, tmp_path: Path) -> None:
    refusal(tmp_path, template)
