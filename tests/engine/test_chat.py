"""Chats: what the templates of model families make of them, with transformers as the reference."""

from __future__ import annotations

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import tiny_tokenizers

from aengine import InvalidRequestError, RequestOptions
from aengine.api import request as chat_prompts
from aengine.api.request import RESERVED, ChatOptions, read_messages
from aengine.tokenizer.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "How it is outside, <now> & später",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    },
}
CALL = {"id": "abc123def", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bath", "days": 2}}}
USER = {"role": "user", "content": "How is it in Bath? "}
TURNS = [USER, {"role": "assistant", "content": " Rainy."}, {"role": "user", "content": "And now?"}]
SYSTEM = {"role": "system", "content": "Be brief."}
CALLS = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abc123def", "name": "weather", "content": '{"sky": "grey", "now": 1.50}'},
]
THOUGHT = [USER, {"role": "assistant", "content": "Rainy.", "reasoning_content": "Bath is in England."}]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "turns": (TURNS, {}),
    "system": ([SYSTEM, *TURNS], {}),
    "closed": (TURNS, {"add_generation_prompt": False}),
    "tools": (TURNS, {"tools": [WEATHER, {**WEATHER, "more": [1, 2.5, None, True]}]}),
    "tools_and_system": ([SYSTEM, USER], {"tools": (WEATHER,)}),
    "calls": (CALLS, {"tools": [WEATHER]}),
    "written_arguments": ([USER, {**CALLS[1], "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}], {}),
    "two_calls": ([USER, {**CALLS[1], "tool_calls": [CALL, CALL]}], {}),
    "thinking": (TURNS, {"template_kwargs": {"enable_thinking": True}}),
    "no_thinking": (TURNS, {"template_kwargs": {"enable_thinking": False}}),
    "thought": (THOUGHT, {}),
    "continued": ([*TURNS, {"role": "assistant", "content": "It is"}], {"continue_final_message": True}),
    "continued_spaces": (
        [USER, {"role": "assistant", "content": "It is "}],
        {"continue_final_message": True, "add_generation_prompt": None},
    ),
    "overridden": (TURNS, {"template_kwargs": {"bos_token": "[B]"}}),
    "no_alternation": ([USER, USER], {}),
    "documents": (TURNS, {"template_kwargs": {"documents": [{"title": "a", "text": "b"}], "year": 1813}}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save(tmp_path_factory.mktemp(name), chat_template=template) for name, template in chat_templates.ALL.items()}


def save(folder: Path, **config: object) -> Path:
    tiny_tokenizers.byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@functools.cache
def auto(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)


def transformers_text(folder: Path, messages: list[dict[str, Any]], tokenize: bool = False, **fields: Any) -> Any:
    """As `render_chat` should have it; what the template raises, if it does."""
    fields = {**fields, **fields.pop("template_kwargs", {})}
    if fields.get("add_generation_prompt") is None:
        fields["add_generation_prompt"] = not fields.get("continue_final_message")
    fields["tools"] = list(fields["tools"]) if fields.get("tools") else None
    try:
        return auto(folder).apply_chat_template(messages, tokenize=tokenize, return_dict=False, **fields)
    except Exception as error:
        return error


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", chat_templates.ALL)
def test_chats_are_rendered_as_in_transformers(family: str, case: str, folders: dict[str, Path]) -> None:
    messages, fields = CASES[case]
    expected = transformers_text(folders[family], messages, **fields)
    tokenizer = Tokenizer.load(folders[family])
    if isinstance(expected, Exception):
        with pytest.raises(InvalidRequestError) as caught:
            tokenizer.render_chat(messages, **fields)  # type: ignore[arg-type]
        assert str(caught.value) == f"prompt: the model's chat template refuses these messages: {expected}"[: len(str(caught.value))]
        return
    text = tokenizer.render_chat(messages, **fields).text  # type: ignore[arg-type]
    assert text == expected
    ids = transformers_text(folders[family], messages, tokenize=True, **fields)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


def test_the_cases_show_what_they_are_about(folders: dict[str, Path]) -> None:
    texts = {name: Tokenizer.load(folders["qwen3"]).render_chat(messages, **fields).text for name, (messages, fields) in CASES.items()}  # type: ignore[arg-type]
    assert texts["turns"].endswith("And now?<|im_end|>\n<|im_start|>assistant\n")
    assert texts["turns"] == texts["thinking"] == texts["closed"] + "<|im_start|>assistant\n"
    assert texts["no_thinking"] == texts["turns"] + "<think>\n\n</think>\n\n"
    assert texts["continued"].endswith("<|im_start|>assistant\nIt is")
    assert '"description": "How it is outside, <now> & später"' in texts["tools"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Bath", "days": 2}}' in texts["calls"]
    assert '<tool_response>\n{"sky": "grey", "now": 1.50}\n</tool_response>' in texts["calls"]
    assert "<think>\nBath is in England.\n</think>" in texts["thought"]


@pytest.mark.parametrize("family", chat_templates.ALL)
def test_parts_are_for_the_template_to_read_and_text_for_others(family: str, folders: dict[str, Path]) -> None:
    parts = [{"type": "text", "text": "How is it "}, {"type": "text", "text": "in Bath? "}]
    given = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Rainy."}, USER]
    reads_parts = family == "gemma"
    same = given if reads_parts else [USER, *given[1:]]
    text = Tokenizer.load(folders[family]).render_chat(given).text
    assert text == transformers_text(folders[family], same)
    assert ("How is itin Bath?" if reads_parts else "How is it in Bath?") in text
    assert given[0]["content"] is parts


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "a"}}],
            "message 1 has a content part of type 'image_url'; only 'text', 'image' and 'video' are",
        ),
        (
            [{"type": "text", "text": "a"}, {"type": "audio"}],
            "message 1 has a content part of type 'audio'; only 'text', 'image' and 'video' are",
        ),
        ([{"text": "a"}], "message 1 has a content part of type None; only 'text', 'image' and 'video' are possible"),
        ([{"type": "text", "text": 1}], "message 1 has a content part {'text': 1, 'type': 'text'}, which is not"),
        ([{"type": "text", "text": "a", "more": 1}], "message 1 has a content part {'more': 1, 'text': 'a', 'type': 'text'}, which is not"),
        ([], "message 1 has content of type list, not a string or a list of parts"),
        ([b"a"], "message 1 has content of type list, not a string or a list of parts"),
    ],
)
def test_parts_that_are_no_text(content: list[Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_messages([USER, {"role": "user", "content": content}])
    assert str(caught.value).startswith(f"prompt: {sentence}")


DEEP: Any = "a"
for _ in range(70):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({1}, "{1}, which is no JSON value"),
        (float("nan"), "nan, which is no JSON value"),
        (1 << 70, f"{1 << 70}, which is no JSON value"),
        ({1: 2}, "{1: 2}, which is no JSON value"),
        (DEEP, "lists and dicts in more than 64 levels"),
        ([0] * chat_prompts.MAX_OPTION_CHARACTERS, "more than 262144 characters and other values"),
        ("a" * chat_prompts.MAX_OPTION_CHARACTERS, "more than 262144 characters and other values"),
    ],
    ids=["set", "nan", "wide", "key", "deep", "list", "text"],
)
def test_what_is_no_json_or_too_much(value: object, sentence: str) -> None:
    for fields in ({"tools": [{"a": value}]}, {"template_kwargs": {"a": value}}):
        (name,) = fields
        with pytest.raises(InvalidRequestError) as caught:
            RequestOptions(**fields)  # type: ignore[arg-type]
        assert str(caught.value) == f"{name}: it holds {sentence}"
    if "more than 2" not in sentence:
        with pytest.raises(InvalidRequestError) as caught:
            read_messages([{**USER, "more": value}])
        assert str(caught.value) == f"prompt: the messages hold {sentence}"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tools": "weather"}, "tools: 'weather' is not a list of dicts, each describing a tool"),
        ({"tools": [print]}, f"tools: [{print!r}] is not a list of dicts, each describing a tool"),
        ({"add_generation_prompt": 1}, "add_generation_prompt: 1 is not true or false"),
        ({"continue_final_message": "content"}, "continue_final_message: 'content' is not true or false"),
        ({"template_kwargs": [1]}, "template_kwargs: [1] is not a dict of names and values"),
        ({"template_kwargs": {1: 2}}, "template_kwargs: {1: 2} is not a dict of names and values"),
        ({"template_kwargs": {"tokenize": True, "chat_template": "a"}}, "template_kwargs: chat_template, tokenize cannot be set here"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message: true cannot be combined with add_generation_prompt",
        ),
    ],
)
def test_options_out_of_range(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        ChatOptions(**fields)
    assert str(caught.value) == sentence


def test_options_are_copies_and_empty_ones_are_none() -> None:
    tool = {"function": {"name": "a"}}
    options = ChatOptions(tools=(tool,), template_kwargs={"a": [1]})
    tool["function"]["name"] = "b"
    assert options.tools == [{"function": {"name": "a"}}]
    assert (ChatOptions(tools=[], template_kwargs={}).tools, ChatOptions(tools=[]).template_kwargs) == (None, None)


def test_what_transformers_takes_is_reserved() -> None:
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    functions = PreTrainedTokenizerBase.apply_chat_template, render_jinja_template
    names = {name for function in functions for name in inspect.signature(function).parameters}
    assert names - {"kwargs", "documents"} | {"messages", "sanitize_control_tokens"} == RESERVED  # 5.17 has no such tokens


def test_a_message_that_cannot_be_continued(folders: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(folders["qwen3"])
    with pytest.raises(InvalidRequestError, match="refuses these messages: continue_final_message is set but"):
        tokenizer.render_chat(CALLS[:2], continue_final_message=True)


def test_a_tokenizer_of_custom_code_renders_chats_without_it(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}"
    folder = save(tmp_path, tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]}, chat_template=template)
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}))
    (folder / "own.py").write_text("raise AssertionError('this code is not to be run')")
    assert Tokenizer.load(folder).render_chat([USER]).text == "<bos>How is it in Bath? "


class TestSeveralTemplates:
    @pytest.mark.parametrize("as_files", [False, True], ids=["config", "files"])
    def test_tools_choose_theirs_and_all_else_the_default(self, as_files: bool, tmp_path: Path) -> None:
        named = {"default": "plain {{ messages[0].content }}", "tool_use": "tools {{ tools | length }}", "rag": "rag"}
        if as_files:
            folder = save(tmp_path, chat_template="of the config")
            (folder / "chat_template.jinja").write_text(named["default"])
            (folder / "additional_chat_templates").mkdir()
            for name in ("tool_use", "rag"):
                (folder / "additional_chat_templates" / f"{name}.jinja").write_text(named[name])
        else:
            folder = save(tmp_path, chat_template=[{"name": name, "template": template} for name, template in named.items()])
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.render_chat([USER]).text == "plain How is it in Bath? " == transformers_text(folder, [USER])
        assert tokenizer.render_chat([USER], tools=[WEATHER]).text == "tools 1" == transformers_text(folder, [USER], tools=[WEATHER])

    def test_a_file_is_before_the_config(self, tmp_path: Path) -> None:
        folder = save(tmp_path, chat_template="of the config")
        (folder / "chat_template.jinja").write_text("of the file")
        assert Tokenizer.load(folder).render_chat([USER]).text == "of the file"

    def test_none_is_the_default(self, tmp_path: Path) -> None:
        folder = save(tmp_path)
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
        tokenizer = Tokenizer.load(folder)
        assert tokenizer.render_chat([USER], tools=[WEATHER]).text == "tools"
        with pytest.raises(InvalidRequestError, match=r"prompt: .* multiple chat templates with no default"):
            tokenizer.render_chat([USER])
