"""The grammar of a whole answer: reasoning, then text or tool calls, in Lark as llguidance reads it.

In:    the tools of a request, the formats of the model, the schema of the answer's text.
Out:   the text of a grammar.
Never: holds free text: a call is held from the text that opens it on, so drafts and masks are verified as ever.

Markers that are one token of the vocabulary are named by their ids, because the library matches such tokens with no
text. A comment before the rule of a schema names it in error messages.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mars_ray.chat.call_format import AnswerFormat, CallFormat, ReasoningFormat
from mars_ray.chat.tools import FunctionDefinition
from mars_ray.chat.validation_errors import NAME_CHARS
from mars_ray.engine.grammar.library import LAYOUT
from mars_ray.errors import RequestError
from mars_ray.openai_api.strict_schema import closed_schema
from mars_ray.openai_api.tools import OfferedTools

ANSWER_CALLS_MAX = 64
"""Maximum number of calls of one answer, so that a model cannot repeat a call until the tokens run out."""

_ANYTHING = "(?s:.*)"
_NAME = re.compile(r"[\w.-]+")
_PLAIN_KEYS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "title",
        "description",
        "$defs",
        "definitions",
        "$schema",
    )
)
"""Keywords of an object schema from which the arguments of a pythonic call can be written one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningPlan:
    """Grammar rules for the reasoning of one answer."""

    form: ReasoningFormat
    begun: bool
    """Whether the prompt ends inside the reasoning."""
    budget: int | None
    """Maximum number of tokens of the reasoning."""


def answer_grammar(
    model: AnswerFormat, offered: OfferedTools | None, reasoning: ReasoningPlan | None, schema: Mapping[str, Any] | None
) -> str:
    """Return the grammar of an answer. `schema` is that of the text, None for any text. Raises `RequestError`."""
    return _Grammar(model).build(offered, reasoning, schema)


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(self, model: AnswerFormat) -> None:
        self._model = model
        self._rules: list[str] = []

    @property
    def _form(self) -> CallFormat:
        assert self._model.calls is not None, "only a model with a format of calls is offered tools"
        return self._model.calls

    def build(
        self, offered: OfferedTools | None, reasoning: ReasoningPlan | None, schema: Mapping[str, Any] | None
    ) -> str:
        """Return the text of the grammar."""
        before = self._reasoning(reasoning) if reasoning else ""
        if offered is None:
            answer = self._plain(schema, ())
        elif offered.required:
            answer = self._required(offered)
        else:
            answer = self._auto(offered, schema)
        held = schema is not None or (offered is not None and offered.required)
        gap = "GAP? " if before and held else ""
        rules = [f"start: {before}{gap}answer", f"answer: {answer}", "GAP: /[ \\n]{1,4}/", *self._rules]
        return "\n".join(rules)

    def _plain(self, schema: Mapping[str, Any] | None, excluded: Sequence[str]) -> str:
        """Return the symbol of an answer without calls: text that matches none of the regular expressions."""
        if schema is not None:
            self._json("body", "the json_schema", schema)
            return "body"
        self._rules.append("TEXT: " + _text_without(excluded))
        return "TEXT"

    def _reasoning(self, plan: ReasoningPlan) -> str:
        begin = self._symbols(plan.form.begin)
        if plan.form.end in self._model.markers:
            limit = "" if plan.budget is None else f"[max_tokens={plan.budget}]"
            self._rules.append(f"think{limit}: THINK")
            self._rules.append("THINK: " + _text_without([f"{_ANYTHING}{_escaped(plan.form.end)}{_ANYTHING}"]))
            inside = f"{'' if plan.budget == 0 else 'think '}{self._symbols(plan.form.end)}"
        elif plan.budget is not None:
            raise RequestError(
                f"thinking_token_budget needs a model with {plan.form.end} as one token; leave it out for this model.",
                param="thinking_token_budget",
            )
        else:
            self._rules.append(f"think[lazy]: /{_ANYTHING}{_escaped(plan.form.end)}/")
            inside = "think"
        return f"{inside} " if plan.begun else f"({begin} {inside})? "

    def _required(self, offered: OfferedTools) -> str:
        self._items(offered)
        return self._calls(offered, self._symbols(self._form.begin), "item")

    def _auto(self, offered: OfferedTools, schema: Mapping[str, Any] | None) -> str:
        form = self._form
        self._items(offered)
        if not form.marker:
            return self._auto_without_marker(offered, schema)
        marker = _escaped(form.marker)
        plain = self._plain(schema, [f"{_ANYTHING}{marker}{_ANYTHING}"])
        if form.marker in self._model.markers:
            opened = self._symbols(form.marker) if schema is not None else f"TEXT {self._symbols(form.marker)}"
        else:
            self._rules.append(f"open[lazy]: /{_ANYTHING if schema is None else ''}{marker}/")
            opened = "open"
        rest = form.begin.removeprefix(form.marker)
        begin = f'{opened} " "? {json.dumps(rest)}' if rest else opened
        return f"{plain} | {self._calls(offered, begin, 'item')}"

    def _auto_without_marker(self, offered: OfferedTools, schema: Mapping[str, Any] | None) -> str:
        """Return an answer whose beginning shows whether it is a call."""
        form = self._form
        if schema is not None:
            raise RequestError(
                "tools and response_format of the type json_schema cannot be told apart in the answers of this model; "
                "set tool_choice to required or none."
            )
        openings = [_opening(form, function.name) for function in offered.callable]
        plain = self._plain(None, [f"{opening}{_ANYTHING}" for opening in openings])
        first = []
        for number, opening in enumerate(openings):
            self._rules.append(f"open_{number}[lazy]: /{opening}/")
            space = "" if form.name == "pythonic" else '" "? '
            first.append(f"open_{number} {space}args_{number} {self._symbols(form.tail)}")
        self._rules.append(f"first: {' | '.join(first)}")
        answer = f"{plain} | {self._calls(offered, '', 'first')}"
        if form.optional_marker in self._model.markers:
            answer += f" | {self._symbols(form.optional_marker)} {self._calls(offered, '', 'item')}"
        return answer

    def _calls(self, offered: OfferedTools, begin: str, first: str) -> str:
        form = self._form
        more = f" ({self._symbols(form.separator)} item){{0,{ANSWER_CALLS_MAX - 1}}}" if offered.parallel else ""
        if more and form.separator[0].isspace():
            more += " GAP?"  # otherwise white space after a call would force a model that wanted to end into another
        return " ".join(filter(None, (begin, first + more, self._symbols(form.end))))

    def _items(self, offered: OfferedTools) -> None:
        """Add the rule of a call, one alternative per function."""
        form = self._form
        numbers = range(len(offered.callable))
        self._rules.append(f"item: {' | '.join(f'item_{number}' for number in numbers)}")
        for number, function in enumerate(offered.callable):
            head = self._symbols(form.head + function.name + form.middle)
            self._rules.append(f"item_{number}: {head} args_{number} {self._symbols(form.tail)}")
            exact = offered.required or bool(function.strict)
            if form.name == "pythonic":
                self._keywords(number, function, exact)
            else:
                subject = f"the parameters of {function.name}"
                self._json(f"args_{number}", subject, _arguments(function), lenient=not exact)

    def _keywords(self, number: int, function: FunctionDefinition, exact: bool) -> None:
        """Add the rules of keyword arguments, in the order of the properties.

        `rest_N_K` continues after an argument, and `args_N_K` before the first.
        """
        schema = _arguments(function)
        properties = _keyword_schemas(function.name, schema)
        last = len(properties)
        self._rules.append(f"args_{number}: args_{number}_0")
        self._rules.append(f'args_{number}_{last}: ""')
        self._rules.append(f'rest_{number}_{last}: ""')
        for index, (name, value) in enumerate(properties.items()):
            rule = f"value_{number}_{index}"
            self._json(rule, f"the parameters of {function.name}", value, lenient=not exact)
            pair = f"{json.dumps(name + '=')} {rule} rest_{number}_{index + 1}"
            needed = name in (schema.get("required") or ())
            self._rules.append(f"args_{number}_{index}: {pair}" + ("" if needed else f" | args_{number}_{index + 1}"))
            self._rules.append(
                f'rest_{number}_{index}: ", " {pair}' + ("" if needed else f" | rest_{number}_{index + 1}")
            )

    def _json(self, rule: str, subject: str, schema: Mapping[str, Any], *, lenient: bool = False) -> None:
        guided = {**schema, "x-guidance": {**LAYOUT, "lenient": lenient}}
        try:
            self._rules.append(f"// {subject}\n{rule}: %json {json.dumps(guided)}")
        except RecursionError:
            raise RequestError(f"{subject} cannot be used: the schema is nested too deeply.") from None

    def _symbols(self, text: str) -> str:
        """Return a text as symbols of the grammar, with markers that are one token by their ids."""
        markers = [marker for marker in self._model.markers if marker in text]
        if not markers:
            return json.dumps(text) if text else ""
        before, marker, after = text.partition(markers[0])
        symbol = f"<[{self._model.markers[marker].id}]>"
        return " ".join(filter(None, (self._symbols(before), symbol, self._symbols(after))))


def _text_without(excluded: Sequence[str]) -> str:
    return f"/{_ANYTHING}/" + "".join(f" & ~/{expression}/" for expression in excluded)


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", r"\/")


def _opening(form: CallFormat, name: str) -> str:
    """Return a regular expression for the beginning of a call to a function, with white space as models write it."""
    if form.name == "pythonic":
        return rf"\s*\[{re.escape(name)}\("
    return rf'\s*\{{\s*"name"\s*:\s*"{re.escape(name)}"\s*,\s*"parameters"\s*:'


def _arguments(function: FunctionDefinition) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object. A plain list of properties allows no others.

    Raises `RequestError` if the function is strict and its schema cannot be closed.
    """
    schema = {**({"properties": {}} if function.parameters is None else function.parameters), "type": "object"}
    if function.strict:
        try:
            return closed_schema(schema)
        except RequestError as error:
            raise RequestError(f"the parameters of {function.name} cannot be used: {error}") from None
    return {"additionalProperties": False, **schema} if schema.keys() <= _PLAIN_KEYS else schema


def _keyword_schemas(function: str, schema: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schema of each keyword argument. Raises `RequestError` for a schema that has no such arguments."""
    if odd := sorted(schema.keys() - _PLAIN_KEYS):
        raise RequestError(
            f"the parameters of {function} have {odd[0]!r}, which pythonic calls cannot hold; leave it out."
        )
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    names = isinstance(required, list) and all(isinstance(name, str) for name in required)
    if not isinstance(properties, dict) or not names:
        raise RequestError(f"the parameters of {function} need `properties` by name and a list of names `required`.")
    properties = properties | {name: {} for name in required if name not in properties}
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    for name, value in properties.items():
        if not _NAME.fullmatch(name) or not isinstance(value, dict):
            raise RequestError(
                f"the parameters of {function} cannot hold {name[:NAME_CHARS]!r}: arguments are words with a schema."
            )
    return {name: {**value, **definitions} for name, value in properties.items()}
