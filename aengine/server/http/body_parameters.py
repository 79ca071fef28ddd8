"""What a request of the APIs has beside its prompt: our parameters and options under their own names, and OpenAI's names for them.

The tables here are also those of the documentation.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from aengine.api.errors import FieldError, InvalidRequestError
from aengine.api.fields import Accepts, shown, text
from aengine.api.params import MOST_ENTRIES, Reasoning, SamplingParams, StructuredOutput
from aengine.api.request import ChatOptions, RequestOptions
from aengine.chat.preparation import check_choice
from aengine.server.core.core import Core
from aengine.server.core.errors import clip
from aengine.server.http.bodies import OBJECT, STRING, Fields
from aengine.server.http.http_exchange import HttpExchange

UNLIMITED = -1
"""A number of tokens, or a seed, that is as good as none, in the words of llama.cpp."""
PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name != "logits_processors")
"""Parameters of ours, under their own names."""
_OBJECTS: Mapping[str, type] = {"structured_output": StructuredOutput, "reasoning": Reasoning}
CHAT_OPTIONS = tuple(field.name for field in fields(ChatOptions))
OPTIONS = tuple(field.name for field in fields(RequestOptions) if field.name not in (*CHAT_OPTIONS, "known_outputs", "receipt"))
"""Options of ours that all APIs have: their answers are whole."""
EFFORT = text("a word of at most 64 characters", r"[^\s]{1,64}")
"""Of reasoning: what it means is said by the chat template."""
LIMIT = Accepts(lambda value: type(value) is int and (value == UNLIMITED or value >= 1), f"an integer >= 1, or {UNLIMITED} for no limit")
SERVICE_TIERS: Mapping[str, int] = {"auto": 0, "default": 0, "priority": -10, "flex": 10}
"""The priorities that they mean."""
IGNORED: Mapping[str, str] = {
    "client_metadata": "it is for those who store requests",
    "metadata": "it is for those who store requests",
    "prompt_cache_retention": "prefixes stay until their pages are needed",
    "safety_identifier": "there is nobody to report to",
    "store": "nothing is stored",
}
"""Fields of OpenAI's that change nothing here, and why."""
_GRAMMARS: Mapping[str, str] = {
    **{"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"},
    **{"json_schema": "json_schema", "grammar": "grammar", "regex": "regex", "ebnf": "grammar"},
}
_STRUCTURED_OUTPUTS: Mapping[str, str] = {"json": "json_schema", **{name: name for name in ("json_object", "regex", "choice", "grammar")}}
_REPETITION: Mapping[str, str] = {"max_pattern_size": "max_cycle", "min_pattern_size": "min_cycle", "min_count": "min_count"}
_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback", "whitespace_pattern", "backend")
_NEUTRAL: Mapping[str, object] = {
    **{"use_beam_search": False, "length_penalty": 1, "typical_p": 1, "dynatemp_range": 0},
    **{"mirostat": 0, "xtc_probability": 0, "dry_multiplier": 0},
}
OF_OTHERS: Mapping[str, str] = {
    **{name: f"structured_output.{ours}" for name, ours in _GRAMMARS.items()},
    "structured_outputs": f"structured_output; its fields are {', '.join(_STRUCTURED_OUTPUTS)}",
    "repetition_detection": f"stop_on_repetition; its fields are {', '.join(_REPETITION)}",
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    **{name: f"{str(value).lower()} alone, which changes nothing" for name, value in _NEUTRAL.items()},
}
"""Names that vLLM, SGLang and llama.cpp have for parameters, and ours."""
IGNORED_OF_OTHERS: Mapping[str, str] = {
    "cache_prompt": "prefixes are cached",
    "guided_decoding_backend": "there is one",
    "guided_whitespace_pattern": "white space is bounded",
    "id_slot": "there are none",
    "include_reasoning": "reasoning is always told apart",
    "parse_tool_calls": "they are parsed",
    "reasoning_format": "it is the model's",
    "return_progress": "the usage tells it",
    "spaces_between_special_tokens": "the tokenizer knows",
    "timings_per_token": "metrics have them",
}
"""Fields of theirs that change nothing here, and why."""


NO_TOOLS = "no tools are called here but those of the client, which are functions"
_MAX_USER = 128
_MAX_SHOWN = 100
_KIND = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
Built = TypeVar("Built", SamplingParams, RequestOptions)


class BodyParameters:
    """The parameters and options of a generation, gathered from the fields of a body: each by its name in the engine, with the name that
    the client gave it."""

    def __init__(self, given: Fields) -> None:
        self._given = given
        self._params: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # the client's, by the engine's; where they differ
        self.ignored: dict[str, str] = {}  # what was asked for and changes nothing, and why
        self._left_out: dict[str, None] = {}  # types of tools

    def take_ours(self, options: tuple[str, ...]) -> None:
        """Take the parameters under our own names and under those of vLLM, SGLang and llama.cpp, and the options that are possible, which
        `options` names."""
        for name, value in self._given.take_all(PARAMS).items():
            if name not in ("max_tokens", "seed") or value != UNLIMITED:
                self.put_field(name, value, name)
        self._take_others()
        self.take_options(options)

    def _take_others(self) -> None:
        given = self._given
        self.ignore(IGNORED_OF_OTHERS)
        for name, value in given.take_all(_GRAMMARS).items():
            self.put_field("structured_output", {_GRAMMARS[name]: value}, name)
            self.names[f"structured_output.{_GRAMMARS[name]}"] = name
        if (fields := given.sub("structured_outputs")) is not None:
            fields.drop(_WITHOUT_EFFECT)
            found = {_STRUCTURED_OUTPUTS[name]: value for name, value in fields.take_all(_STRUCTURED_OUTPUTS).items()}
            self.names["structured_output.json_schema"] = "structured_outputs.json"
            if found:
                self.put_field("structured_output", found, "structured_outputs")
            fields.refuse_rest(_STRUCTURED_OUTPUTS)
        if (fields := given.sub("repetition_detection")) is not None:
            found = {_REPETITION[name]: value for name, value in fields.take_all(_REPETITION).items() if value != 0}
            if "max_cycle" in found:
                self.put_field("stop_on_repetition", found, "repetition_detection")
            fields.refuse_rest(_REPETITION)
        if "repeat_penalty" in given:
            self.put_field("repetition_penalty", given.take_all(("repeat_penalty",))["repeat_penalty"], "repeat_penalty")
        self.take_limit("n_predict")
        for name, value in given.take_all(_NEUTRAL).items():
            if value != _NEUTRAL[name]:
                given.refuse(name, f"{shown(value)} is not possible, only {str(_NEUTRAL[name]).lower()}: there is no such sampling")

    def take_limit(self, name: str) -> int | None:
        """Take a limit of output tokens, which is max_tokens under another name. Returns the limit, if there is one."""
        most: int | None = self._given.take_field(name, LIMIT)
        if most is None or most == UNLIMITED:
            return None
        self.put_field("max_tokens", most, name)
        return most

    def ignore(self, table: Mapping[str, str], fields: Fields | None = None) -> None:
        """Drop fields of the body, or of an object in it, that change nothing; `table` has the reasons."""
        fields = fields or self._given
        for name in fields.take_all(table):
            self.note_ignored(fields.path + name, table[name])

    def note_ignored(self, what: str, why: str) -> None:
        """Note that `what` was asked for and changes nothing, and why."""
        self.ignored[clip(what, _MAX_SHOWN)] = why

    def leave_out_tool(self, kind: str) -> None:
        """Note that a tool of this type is left out."""
        self.note_ignored(f"tools of type {kind}", NO_TOOLS)
        self._left_out[kind if _KIND.fullmatch(kind) else "another"] = None

    def tell_ignored(self, core: Core, exchange: HttpExchange) -> None:
        """Log what changes nothing, and tell the client which tools are left out. Raises `InvalidRequestError` (tools) if the server is to
        refuse these."""
        core.log_ignored(self.ignored)
        if self._left_out:
            kinds = ", ".join(self._left_out)
            if core.config.unsupported_tools == "refuse":
                raise InvalidRequestError.of("tools", f"type {kinds} is not possible: {NO_TOOLS}")
            exchange.warning = f"left out: tools of type {kinds}"

    def take_options(self, options: tuple[str, ...]) -> None:
        """Take the options that `options` names, under our own names; also `template_kwargs` under vLLM's."""
        if "chat_template_kwargs" in self._given and "template_kwargs" in options:  # vLLM's name
            self.put_variables(self._given.take_field("chat_template_kwargs", OBJECT, {}), "chat_template_kwargs")
        for name, value in self._given.take_all(options).items():
            self.put_field(name, value, name)

    def take_openai(self) -> str:
        """Take the fields that all of OpenAI's APIs have. Returns the service tier in use."""
        given = self._given
        self.ignore(IGNORED)
        if "user" in given:
            self.put_field("tenant", tenant_of(given.take_field("user", STRING, "")), "user")
        self.put_session(given.take_field("prompt_cache_key", STRING, ""))
        tier: str = given.take_field("service_tier", STRING, "auto")
        if tier not in SERVICE_TIERS:
            self.note_ignored("service_tier", f"there are {', '.join(SERVICE_TIERS)}")
            tier = "auto"
        if SERVICE_TIERS[tier]:
            self.put_field("priority", SERVICE_TIERS[tier], "service_tier")
        return "default" if tier == "auto" else tier

    def put_session(self, cache_key: str | None) -> None:
        """Have OpenAI's `prompt_cache_key` name the session, unless the body does."""
        if cache_key and "session" not in self._given:
            self.put_field("session", tenant_of(cache_key), "prompt_cache_key")

    def put_field(self, name: str, value: Any, given_as: str) -> None:
        """Set a field of the engine's that the client calls `given_as`."""
        if name in self._params or name in self._options:
            self._given.refuse(given_as, f"cannot be combined with {self.names.get(name, name)}")
            return
        (self._params if name in PARAMS else self._options)[name] = value
        if given_as != name:
            self.names[name] = given_as

    def put_effort(self, effort: str | None, given_as: str) -> None:
        """Set what chat templates know of the effort of reasoning, if one is given."""
        if effort is not None:
            self.put_variables({"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}, given_as)

    def put_variables(self, variables: Mapping[str, Any], given_as: str) -> None:
        """Set variables of the chat template. Those that the client sets itself stay."""
        given = self._given.take_field("template_kwargs", OBJECT, {})
        before = self._options.pop("template_kwargs", {})
        self.put_field("template_kwargs", {**before, **variables, **given}, "template_kwargs" if given else given_as)

    def checked_choice(self, choice: str) -> str:
        """A choice of tools, as `ChatOutputOptions` have it, among the tools that were put here."""
        try:
            check_choice(choice, self._options.get("tools"))
        except InvalidRequestError as error:
            self._refuse(error)
        return choice

    def params(self) -> SamplingParams:
        """The parameters, without those in which something is wrong, which are violations."""
        params = {"clamp_max_tokens": True, **self._params}
        for name, kind in _OBJECTS.items():
            if isinstance(given := params.get(name), Mapping):
                params[name] = self._object(kind, name, given)
        if isinstance(biases := params.get("logit_bias"), Mapping) and len(biases) <= MOST_ENTRIES["logit_bias"]:
            params["logit_bias"] = {int(key) if _TOKEN_ID.fullmatch(key) else key: bias for key, bias in biases.items()}
        return self._build(SamplingParams, params)

    def options(self) -> RequestOptions:
        """The options, without those in which something is wrong, which are violations."""
        return self._build(RequestOptions, dict(self._options))

    def _object(self, kind: Any, name: str, given: Mapping[str, Any]) -> Any:
        """A parameter that has fields of its own; None for one that is refused."""
        known = [field.name for field in fields(kind)]
        if unknown := [one for one in given if one not in known]:
            self._given.refuse(f"{name}.{unknown[0]}", f"there is no such field; there are {', '.join(known)}")
            return None
        try:
            return kind(**{one: value for one, value in given.items() if value is not None})
        except InvalidRequestError as error:
            self._refuse(error)
        except TypeError as error:  # one that must be there is not
            self._given.refuse(name, str(error).partition(" ")[2])
        return None

    def _build(self, kind: type[Built], given: dict[str, Any]) -> Built:
        while True:
            try:
                return kind(**given)
            except InvalidRequestError as error:
                self._refuse(error)
                for violation in error.violations:
                    given.pop(violation.field, None)

    def _refuse(self, error: InvalidRequestError) -> None:
        self._given.check.violations.extend(error.moved(self.name_of).violations)

    def name_of(self, field: str) -> str:
        """The client's name for a field of the engine's."""
        if field.startswith("structured_output") and "structured_output" not in self._params:
            return "tools"  # of which it was made
        found = self.names.get(field)
        if found is None and "." in field:
            head, _, rest = field.partition(".")
            found = f"{self.names[head]}.{rest}" if head in self.names else None
        return found or field

    @contextmanager
    def located(self, **names: str) -> Iterator[None]:
        """Fields in the errors that the engine raises have the client's names; those of `names` come first."""
        try:
            yield
        except FieldError as error:
            raise error.moved(lambda field: names.get(field) or self.name_of(field)) from error


def tenant_of(user: str) -> str:
    """The tenant that stands for a user of a client's: a hash, where the name is longer than that of a tenant can be."""
    return user if len(user) <= _MAX_USER else hashlib.blake2b(user.encode(), digest_size=16).hexdigest()
