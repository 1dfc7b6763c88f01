"""The formats in which models write tool calls and reasoning, by the names of vLLM's parsers.

In:    a chat template, and the parsers that an operator has set.
Out:   the format of tool calls and the format of reasoning that the model uses.
Never: guesses: a template that matches no format has none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mars_ray.errors import RequestError

ToolParserName = Literal["hermes", "llama3_json", "mistral", "pythonic"]
ReasoningParserName = Literal["deepseek_r1", "mistral", "seed_oss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """Notation of a model's tool calls: `begin`, calls joined by `separator`, `end`. A call is `head`, the name,
    `middle`, the arguments, `tail`."""

    name: ToolParserName
    marker: str = ""
    """Text that announces calls, at the beginning of `begin`. Empty if calls begin the answer without one."""
    optional_marker: str = ""
    """Text that may come before calls without a marker."""
    begin: str = ""
    head: str
    middle: str
    tail: str
    separator: str
    end: str = ""


CALL_FORMATS: dict[ToolParserName, CallFormat] = {
    call_format.name: call_format
    for call_format in (
        CallFormat(
            name="hermes",
            marker="<tool_call>",
            begin="<tool_call>",
            head='\n{"name": "',
            middle='", "arguments": ',
            tail="}\n</tool_call>",
            separator="\n<tool_call>",
        ),
        CallFormat(
            name="llama3_json",
            optional_marker="<|python_tag|>",
            head='{"name": "',
            middle='", "parameters": ',
            tail="}",
            separator="; ",
        ),
        CallFormat(
            name="mistral",
            marker="[TOOL_CALLS]",
            begin="[TOOL_CALLS][",
            head='{"name": "',
            middle='", "arguments": ',
            tail="}",
            separator=", ",
            end="]",
        ),
        CallFormat(name="pythonic", begin="[", head="", middle="(", tail=")", separator=", ", end="]"),
    )
}


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The texts that begin and end the reasoning before an answer."""

    begin: str
    end: str


REASONING_FORMATS: dict[ReasoningParserName, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
}

MARKERS = frozenset(
    text for call_format in CALL_FORMATS.values() for text in (call_format.marker, call_format.optional_marker) if text
) | {"</tool_call>", *(text for form in REASONING_FORMATS.values() for text in (form.begin, form.end))}
"""Texts that a vocabulary may hold as one token."""


@dataclass(frozen=True, slots=True)
class Marker:
    """A marker that the vocabulary holds as one token."""

    id: int
    special: bool
    """True if decoders leave the token out of the text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormat:
    """Notation of tool calls and reasoning in a model's template and vocabulary."""

    calls: CallFormat | None = None
    """None for a model that knows no tools, or writes calls in an unknown format."""
    template_takes_tools: bool = False
    """Whether the chat template renders tools and calls itself."""
    reasoning: ReasoningFormat | None = None
    markers: Mapping[str, Marker] = field(default_factory=dict)
    """The markers that are one token each, by their text."""

    @property
    def generic(self) -> bool:
        """Whether tools are described in a system message, because the chat template does not render them."""
        return self.calls is not None and not self.template_takes_tools


def ends_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the text that begins reasoning."""
    return prompt.rstrip().endswith(tuple(form.begin for form in REASONING_FORMATS.values()))


def markers_of(tokenizer: Any) -> dict[str, Marker]:
    """Return the markers that are one token of a Hugging Face tokenizer, by their text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token.content: Marker(token_id, token.special) for token_id, token in added if token.content in MARKERS}


def known_format(model: AnswerFormat, param: str) -> CallFormat:
    """Return the format of the model's calls. Raises `RequestError` that says why a model has none."""
    if model.calls is not None:
        return model.calls
    reason = "writes tool calls in an unknown format" if model.template_takes_tools else "knows no tools"
    raise RequestError(
        f"the chat template of this model {reason}. Leave {param} out, use a model whose template renders tools, or, "
        "at an endpoint, set tool_call_parser.",
        param=param,
        code="unsupported_parameter",
    )


NO_TOOLS = AnswerFormat()
"""The format of a model that knows neither tools nor reasoning."""


def answer_format(
    template: str,
    markers: Mapping[str, Marker],
    tool_parser: ToolParserName | None = None,
    reasoning_parser: ReasoningParserName | None = None,
) -> AnswerFormat:
    """Return the formats of a model from its chat template; the parsers override what the template shows."""
    takes_tools = re.search(r"\btools\b", template) is not None
    calls = tool_parser or (_calls_of(template) if takes_tools else None)
    reasoning = reasoning_parser or next(
        (name for name, form in REASONING_FORMATS.items() if form.end in template), None
    )
    return AnswerFormat(
        calls=CALL_FORMATS[calls] if calls else None,
        template_takes_tools=takes_tools,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
        markers=markers,
    )


def _calls_of(template: str) -> ToolParserName | None:
    """Return the format of the calls that a template renders."""
    if "<tool_call>" in template:
        # Qwen3-Coder and its kin write XML between the same markers.
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else "mistral"
    if "<|python_start|>" in template:  # Llama 4 begins and ends its calls with tokens of its own
        return None
    if "<|python_tag|>" in template or ('"parameters": ' in template and "ipython" in template):
        return "llama3_json"
    if re.search(r"\[func_name1?\(", template):
        return "pythonic"
    return None
