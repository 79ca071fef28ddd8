"""What a request of the APIs has beside its prompt: our parameters and options under their own names, and OpenAI's names for them.

The tables here are also those of the documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from aengine.chat.tool_choice import check_choice
from aengine.chat_prompts import ChatOptions
from aengine.checks import one_of
from aengine.errors import FieldError, InvalidRequestError
from aengine.params import MOST_ENTRIES, Reasoning, SamplingParams, StructuredOutput
from aengine.requests import RequestOptions
from aengine.server.http.bodies import OBJECT, STRING, Fields

PARAMS = tuple(field.name for field in fields(SamplingParams) if field.name != "logits_processors")
"""Parameters of ours, under their own names."""
_OBJECTS: Mapping[str, type] = {"structured_output": StructuredOutput, "reasoning": Reasoning}
CHAT_OPTIONS = tuple(field.name for field in fields(ChatOptions))
OPTIONS = tuple(field.name for field in fields(RequestOptions) if field.name not in (*CHAT_OPTIONS, "known_outputs"))
"""Options of ours that all APIs have: their answers are whole."""
EFFORT = one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Of reasoning."""
SERVICE_TIERS: Mapping[str, int] = {"auto": 0, "default": 0, "priority": -10, "flex": 10}
"""The priorities that they mean."""
IGNORED: Mapping[str, str] = {
    "metadata": "it is for those who store requests",
    "prompt_cache_key": "the prefix cache finds what is equal; cache_salt keeps requests apart",
    "prompt_cache_retention": "prefixes stay until their pages are needed",
    "safety_identifier": "there is nobody to report to",
    "store": "nothing is stored",
}
"""Fields of OpenAI's that change nothing here, and why."""


_TOKEN_ID = re.compile(r"[0-9]{1,10}")
Built = TypeVar("Built", SamplingParams, RequestOptions)


class Parameters:
    """The parameters and options of a generation, gathered from the fields of a body: each by its name in the engine, with the name that
    the client gave it."""

    def __init__(self, given: Fields) -> None:
        self._given = given
        self._params: dict[str, Any] = {}
        self._options: dict[str, Any] = {}
        self.names: dict[str, str] = {}  # the client's, by the engine's; where they differ

    def take_ours(self, options: tuple[str, ...]) -> None:
        """Those under our own names; `options` are the names of options that are possible."""
        for name, value in self._given.take_all(PARAMS).items():
            self.put(name, value, name)
        self.take_options(options)

    def take_options(self, options: tuple[str, ...]) -> None:
        """The same without parameters."""
        if "chat_template_kwargs" in self._given and "template_kwargs" in options:  # vLLM's name
            self.put_variables(self._given.take("chat_template_kwargs", OBJECT, {}), "chat_template_kwargs")
        for name, value in self._given.take_all(options).items():
            self.put(name, value, name)

    def take_openai(self) -> str:
        """Those of OpenAI's names that all its APIs have. Returns the service tier in use."""
        given = self._given
        given.drop(IGNORED)
        if "user" in given:
            self.put("tenant", given.take("user", STRING, ""), "user")
        tier: str = given.take("service_tier", one_of(*SERVICE_TIERS), "auto")
        if SERVICE_TIERS[tier]:
            self.put("priority", SERVICE_TIERS[tier], "service_tier")
        return "default" if tier == "auto" else tier

    def put(self, name: str, value: Any, given_as: str) -> None:
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
        given = self._given.take("template_kwargs", OBJECT, {})
        before = self._options.pop("template_kwargs", {})
        self.put("template_kwargs", {**before, **variables, **given}, "template_kwargs" if given else given_as)

    def checked_choice(self, choice: str) -> str:
        """A choice of tools, as `ChatOutputOptions` have it, among the tools that were put here."""
        try:
            check_choice(choice, self._options.get("tools"))
        except InvalidRequestError as error:
            self._refuse(error)
        return choice

    def params(self) -> SamplingParams:
        """The parameters, without those in which something is wrong, which are violations."""
        params = dict(self._params)
        for name, kind in _OBJECTS.items():
            if isinstance(given := params.get(name), Mapping):
                params[name] = self._object(kind, name, given)
        if isinstance(biases := params.get("logit_bias"), Mapping) and len(biases) <= MOST_ENTRIES["logit_bias"]:
            params["logit_bias"] = {int(key) if _TOKEN_ID.fullmatch(key) else key: bias for key, bias in biases.items()}
        return self._build(SamplingParams, params)

    def options(self) -> RequestOptions:
        """The same for the options."""
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
