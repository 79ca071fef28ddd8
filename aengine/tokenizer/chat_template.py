"""`ChatTemplate`: a chat template of a model, rendered with jinja2. Owns what templates may call, and how much they may compute.

Renders what `apply_chat_template` of transformers renders, without importing it. Templates are programs of strangers: they run in a
sandbox, and one that loops, or writes, beyond a limit ends in an error. Knows nothing of tokenizers, nor of what callers may ask for.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import ext, nodes, parser, runtime, visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from aengine.api.errors import one_line
from aengine.tokenizer.caller_text import MAX_SECONDS, CallerText, TemplateLimitError, TemplateTimeError

MAX_LOOPS = 2_000_000
"""Most turns of all loops of a rendering."""
MAX_CHARACTERS = 1 << 24
"""Most characters, or items, of whatever a template makes."""
_OPEN = "\udffe\udfff "
"""Written behind the message that is to be continued. The space says whether the template keeps those at its end."""
_LIMITS = " limits"  # no variable of a template is spelled so
_WIDTH = re.compile(r"%[^a-zA-Z%]*(\*|\d{6,})")


@dataclass(slots=True)
class _Limits:
    """What one rendering may still take of its limits."""

    seconds: float
    end: float  # on time.thread_time
    left: int

    def turn(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise TemplateLimitError(f"its loops have more than {MAX_LOOPS} turns")
        if time.thread_time() > self.end:
            raise TemplateTimeError(f"it takes more than {self.seconds} seconds")


class _Loop:
    """What a loop of a template goes through."""

    def __init__(self, items: Any, limits: _Limits) -> None:
        self._items, self._limits = items, limits

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        turn = self._limits.turn
        for item in self._items:
            turn()
            yield item


@jinja2.pass_context
def _bounded(context: runtime.Context, items: Any) -> _Loop:
    limits: Any = context.resolve(_LIMITS)
    return _Loop(items, limits)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimitError(f"it makes more than {MAX_CHARACTERS} characters or items of one value")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models read it: nothing is escaped for HTML. Stand-ins stay as they are."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    if ensure_ascii and not text.isascii():
        text = re.sub(r"[^\x00-\x7f\ud800-\udfff]+", lambda match: json.dumps(match[0])[1:-1], text)
    return text


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """Takes no names that Python has for its own."""

    def __init__(*args: Any, **named: Any) -> None:  # so that a variable may be called self
        self, *values = args
        variables = dict(*values, **named)
        for name in variables:
            _check_name(name)
        Namespace.__init__(self, variables)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace of a chat template has no attributes that begin with an underscore, as {name!r}"
        )


class _Generation(ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote, for training."""

    tags = frozenset(("generation",))  # type: ignore[assignment]

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_written"), [], [], body).set_lineno(line)

    def _written(self, caller: Any) -> str:
        return str(caller())


class _Bounding(visitor.NodeTransformer):
    """Has loops and joined texts go through filters of ours."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "bounded loop", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes, lineno=node.lineno), "joined text", [], [], None, None, lineno=node.lineno)


class _Environment(ImmutableSandboxedEnvironment):
    """That of transformers, with limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols])
        self.filters |= {"tojson": _to_json, "bounded loop": _bounded, "joined text": lambda parts: _joined(map(str, parts))}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now, "dict": _Dict(), "namespace": _Namespace}
        del self.globals["lipsum"]
        self.concat = _joined  # type: ignore[method-assign]

    def bounded(self, source: str) -> jinja2.Template:
        tree = _Bounding().visit(self.parse(source))
        tree.set_environment(self)
        return self.template_class.from_code(self, self.compile(tree), self.make_globals(None))

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if hasattr(value, "__len__") and isinstance(count, int):
                    _check_size(len(value) * count)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * abs(right))
        elif operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            _check_size(MAX_CHARACTERS + 1)
        return super().call_binop(context, operator, left, right)

    def call(self, context: runtime.Context, called: Any, *args: Any, **named: Any) -> Any:
        if getattr(called, "__name__", "") in ("center", "ljust", "rjust", "zfill", "expandtabs"):
            _check_size(max((value for value in args if isinstance(value, int)), default=0))
        return super().call(context, called, *args, **named)


def _joined(parts: Iterable[str]) -> str:
    """One text, in which stand-ins are known if they are in a part."""
    taken: list[str] = []
    size, shown = 0, None
    for part in parts:
        size += len(part)
        if size > MAX_CHARACTERS:
            _check_size(size)
        if type(part) is CallerText:
            shown = part.shown
        taken.append(part)
    text = "".join(taken)
    return text if shown is None else CallerText(text, shown)


class ChatTemplate:
    """The template of a model, or several by name, and the names of its special tokens."""

    def __init__(self, sources: Mapping[str, str], tokens: Mapping[str, str]) -> None:
        """`tokens`: variables such as `bos_token`. Templates are compiled; one that is none raises when it is to be rendered."""
        self.text = "".join(sources.values())
        self._sources = sources
        self._tokens = tokens
        self._compiled: dict[str, jinja2.Template | jinja2.TemplateError] = {}
        environment = _Environment()
        for name, source in sources.items():
            try:
                self._compiled[name] = environment.bounded(source)
            except jinja2.TemplateError as error:
                self._compiled[name] = error
            except Exception as error:  # of Python's compiler: it is nested too deeply
                self._compiled[name] = jinja2.TemplateError(f"it cannot be compiled: {one_line(error)}")

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: Any,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        seconds: float = MAX_SECONDS,
    ) -> str:
        """The chat as text. Of several templates it is the one named "tool_use" if there are `tools`, else the one named "default".

        Fields of messages that are None are left out, and reasoning is there by each of the names that templates give it. Raises
        `TemplateLimitError`, and whatever else a program may raise.
        """
        name = "tool_use" if tools is not None and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name)
        if template is None:
            raise ValueError(f"there are multiple chat templates with no default, and the request names none of {sorted(self._compiled)}")
        if isinstance(template, jinja2.TemplateError):
            raise template
        chat = [_with_reasoning({key: value for key, value in message.items() if value is not None}) for message in messages]
        final = _opened(chat, self._sources[name]) if continue_final_message else None
        given = {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        documents = variables.get("documents")
        if documents is not None and not all(isinstance(document, dict) for document in documents):
            raise TypeError("documents is not a list of dicts with title and text")
        limits = _Limits(seconds, time.thread_time() + seconds, MAX_LOOPS)
        text = str.__str__(template.render({**given, **self._tokens, **variables, _LIMITS: limits}))
        return text if final is None else _cut(text, final)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    found = next((message[key] for key in ("reasoning_content", "thinking", "reasoning") if key in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def _opened(chat: list[dict[str, Any]], source: str) -> str:
    """Mark the end of the last message; returns its text."""
    content = chat[-1].get("content")
    if content is None:
        raise ValueError('continue_final_message is set but the final message has no "content" to continue!')
    if "content" not in source:
        raise ValueError('continue_final_message is set to "content" but this is not an accepted field in the chat_template')
    if isinstance(content, str):
        chat[-1]["content"] = content + _OPEN
        return content
    texts = [index for index, part in enumerate(content) if "text" in part]
    if not texts:
        raise ValueError("continue_final_message is set but we could not find any text to continue in the final message!")
    text: str = content[texts[-1]]["text"]
    chat[-1]["content"] = [{**part, "text": text + _OPEN} if index == texts[-1] else part for index, part in enumerate(content)]
    return text


def _cut(text: str, final: str) -> str:
    mark = _OPEN.strip()
    if mark not in text or str.__str__(final.strip()) not in text:
        raise ValueError(
            "continue_final_message is set but the final message does not appear in the chat after applying the chat template! "
            "This can happen if the chat template deletes portions of the final message."
        )
    place = text.rindex(mark)
    return text[:place] if text.startswith(_OPEN, place) else text[:place].rstrip()
