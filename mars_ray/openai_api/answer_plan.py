"""The plan of one chat answer: the grammar that holds it, and the parser that parts it.

In:    a chat request, the formats of the model, and whether the prompt ends inside reasoning.
Out:   a grammar for the engine, and a parser per choice.
Never: differs between streamed and complete answers.

One grammar covers the whole answer from its first token, calls included, so drafts and masks are verified in it as in
any grammar.
"""

from dataclasses import dataclass

from mars_ray.chat.call_format import NO_TOOLS, AnswerFormat, known_format
from mars_ray.engine.grammar.spec import GrammarSpec
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_grammar import ReasoningPlan, answer_grammar
from mars_ray.openai_api.answer_parts import PartedAnswer, PartParser, PlainParser, parted_answer
from mars_ray.openai_api.call_parser import CallParser
from mars_ray.openai_api.protocol import JsonObjectFormat, JsonSchemaFormat, ResponseFormat, TextFormat
from mars_ray.openai_api.reasoning_parser import ReasoningParser
from mars_ray.openai_api.tools import OfferedTools


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerPlan:
    """Grammar and parsers for the answers to one request."""

    model: AnswerFormat = NO_TOOLS
    offered: OfferedTools | None = None
    reasoning: ReasoningPlan | None = None
    grammar: GrammarSpec | None = None
    """Grammar of the whole answer; None if the response format alone decides."""

    @property
    def skip_special_tokens(self) -> bool:
        """Whether the text may leave out special tokens, because none of them is a marker to part by."""
        texts: list[str] = []
        if self.offered and self.model.calls:
            texts += (self.model.calls.marker, self.model.calls.optional_marker)
        if self.reasoning:
            texts += (self.reasoning.form.begin, self.reasoning.form.end)
        return not any(self.model.markers[text].special for text in texts if text in self.model.markers)

    @property
    def param(self) -> str:
        """Name of the request's field that the grammar comes from."""
        return self.offered.param if self.offered else "response_format"

    def parser(self) -> PartParser:
        """Return a new parser for one choice."""
        answer: PartParser = PlainParser()
        if self.offered and self.model.calls:
            answer = CallParser(self.model.calls, {function.name for function in self.offered.callable})
        if self.reasoning:
            return ReasoningParser(self.reasoning.form, begun=self.reasoning.begun, answer=answer)
        return answer

    def parted(self, text: str) -> PartedAnswer:
        """Return the parts of the whole text of an answer."""
        parser = self.parser()
        return parted_answer([*parser.push(text), *parser.finish()])


def plan_answer(
    offered: OfferedTools | None,
    model: AnswerFormat,
    *,
    in_reasoning: bool,
    response_format: ResponseFormat | None = None,
    budget: int | None = None,
) -> AnswerPlan:
    """Return the plan for a checked request. Raises `RequestError`.

    `in_reasoning` means that the prompt ends inside the reasoning. `budget` is the maximum tokens of the reasoning.
    """
    if offered:
        known_format(model, offered.param)
    if budget is not None and model.reasoning is None:
        raise RequestError(
            "thinking_token_budget needs a model that reasons; leave it out for this model.",
            param="thinking_token_budget",
        )
    reasoning = ReasoningPlan(form=model.reasoning, begun=in_reasoning, budget=budget) if model.reasoning else None
    plain = response_format is None or isinstance(response_format, TextFormat)
    if offered is None and budget is None and (plain or reasoning is None):
        return AnswerPlan(model=model, reasoning=reasoning)
    schema = None
    try:
        match response_format:
            case JsonObjectFormat():
                schema = {"type": "object"}
            case JsonSchemaFormat(json_schema=json_schema):
                schema = json_schema.enforced
        grammar = GrammarSpec(kind="lark", text=answer_grammar(model, offered, reasoning, schema))
    except RequestError as error:
        raise RequestError(
            str(error), param=error.param or (offered.param if offered else "response_format")
        ) from error
    return AnswerPlan(model=model, offered=offered, reasoning=reasoning, grammar=grammar)
