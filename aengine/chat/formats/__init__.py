"""The formats in which models write calls of tools and reasoning, by name, and which of them a chat template speaks of."""

from __future__ import annotations

from typing import Annotated

from aengine.api.dataclass import dataclass
from aengine.api.errors import InvalidRequestError
from aengine.api.fields import check_fields, one_of
from aengine.chat.formats.json_formats import DEEPSEEK, HERMES, JSON, KIMI, LLAMA, MISTRAL
from aengine.chat.formats.own_notations import FUNCTION_GEMMA, GEMMA3, GEMMA4, HARMONY
from aengine.chat.text_source import CallFormat, ReasoningFormat

CALLS: dict[str, CallFormat] = {
    "": CallFormat(),
    "hermes": HERMES,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "harmony": HARMONY,
    "deepseek": DEEPSEEK,
    "kimi": KIMI,
    "gemma3": GEMMA3,
    "function_gemma": FUNCTION_GEMMA,
    "gemma4": GEMMA4,
    "json": JSON,
}
REASONING: dict[str, ReasoningFormat | None] = {
    "": None,
    "think": ReasoningFormat("<think>", "</think>", space=("\n", "\n\n")),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", special_tokens=True),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", special_tokens=True, space=("\n", "")),
    "seed": ReasoningFormat("<seed:think>", "</seed:think>"),
    "harmony": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", special_tokens=True, answer=f"<|start|>assistant{HARMONY.answer}"
    ),
}

# What only the templates of one format write, the first that is found.
_CALLS_BY_TEXT = {
    "<|channel|>": "harmony",
    "<|tool_call>": "gemma4",
    "<start_function_call>": "function_gemma",
    "<｜tool▁call▁begin｜>": "deepseek",
    "｜DSML｜": "deepseek",
    "<|tool_call_begin|>": "kimi",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<function=": "hermes",
    "<|python_tag|>": "llama",
    "<|start_header_id|>": "llama",
    "<|header_start|>": "llama",
    "<start_of_turn>": "gemma3",
    "<｜Assistant｜>": "deepseek",
    "[INST]": "mistral",
}
_REASONING_BY_TEXT = {"<|channel>": "gemma4", "[THINK]": "mistral", "seed:think": "seed", "<think>": "think", "</think>": "think"}


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How a model writes. The names are those of `CALLS` and `REASONING`; empty for no calls, and for no reasoning."""

    calls: Annotated[str, one_of(*CALLS, words=f"empty or one of {', '.join(filter(None, CALLS))}")] = ""
    reasoning: Annotated[str, one_of(*REASONING, words=f"empty or one of {', '.join(filter(None, REASONING))}")] = ""

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError` for other names."""
        check_fields(self, InvalidRequestError, "format.")

    @classmethod
    def of_template(cls, template: str) -> ChatFormat:
        """That of a model with this chat template. Calls are plain JSON where the template speaks of tools and of no known format."""
        calls = next((name for text, name in _CALLS_BY_TEXT.items() if text in template), "json" if "tools" in template else "")
        if calls == "harmony":
            return cls(calls, calls)
        return cls(calls, next((name for text, name in _REASONING_BY_TEXT.items() if text in template), ""))

    @property
    def special_tokens(self) -> bool:
        """Whether it is written with special tokens, so that a request needs `skip_special_tokens=False`."""
        reasoning = REASONING[self.reasoning]
        return CALLS[self.calls].special_tokens or (reasoning is not None and reasoning.special_tokens)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether a rendered prompt ends within reasoning, so that the output begins there."""
        reasoning = REASONING[self.reasoning]
        return reasoning is not None and prompt.rstrip().endswith(reasoning.opening)
