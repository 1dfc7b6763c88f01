"""Conversations with tools are rendered by the template of the model, and answers are parted as it writes them."""

import json
from random import Random
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.completion_usage import CompletionUsage

from mars_ray.chat.call_format import CALL_FORMATS, Marker, answer_format, ends_in_reasoning
from mars_ray.chat.conversation import plain_messages, template_text
from mars_ray.chat.generic_tools import written_calls
from mars_ray.engine.chunk import Chunk, Finished
from mars_ray.errors import RequestError
from mars_ray.openai_api.answer_plan import AnswerPlan, plan_answer
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.responses import ChatResponseBuilder, ResponseMetadata
from mars_ray.openai_api.tools import conversation, tools_of
from tests.openai_api.answer_samples import CALLS, NAMES, PROSE, cut
from tests.openai_api.grammar_walks import vocabulary, walk
from tests.serve.tool_samples import CALLED, QUESTION, RESULT, TOOLS, tool

QWEN = (
    "{% if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}{# </think> #}"
)
"""A template in the manner of Qwen's thinking models."""

TEMPLATES = {
    "hermes": QWEN,
    "llama3_json": '{% if tools %}Respond as {"name": name, "parameters": dict}. ipython {% endif %}"parameters": ',
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]",
    "pythonic": "{% if tools %}[func_name1(params_name1=value)]{% endif %}",
    None: "{% if tools %}<tool_call><function=name>{% endif %}",
}


def body_of(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": QUESTION} | fields)


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_format_of_calls_is_found_in_the_template(name: str | None, template: str) -> None:
    found = answer_format(template, {})
    assert found.template_takes_tools
    assert (found.calls and found.calls.name) == name
    assert answer_format(template, {}, "pythonic").calls == CALL_FORMATS["pythonic"]
    assert answer_format("{{ messages }}", {}).calls is None


def test_an_unknown_format_of_calls_is_refused_with_the_setting_that_names_it() -> None:
    model = answer_format(TEMPLATES[None], {})
    body = body_of(tools=TOOLS)
    with pytest.raises(RequestError, match=r"an unknown format.*set tool_call_parser"):
        conversation(plain_messages(body.messages), tools_of(body, RequestLimits()), model)


def test_the_template_sees_tools_calls_and_results() -> None:
    body = body_of(tools=TOOLS, messages=[*QUESTION, CALLED, RESULT])
    talk = conversation(plain_messages(body.messages), tools_of(body, RequestLimits()), answer_format(QWEN, {}))
    text = (
        jinja2.Environment()
        .from_string(QWEN)
        .render(messages=talk.messages, tools=talk.tools, add_generation_prompt=True)
    )
    assert '"name": "get_weather"' in text.partition("</tools>")[0]
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>' in text
    assert "<|tool|>18 degrees" in text
    assert ends_in_reasoning(text)
    assert '{"city": "Paris"}' in template_text(talk)


def test_a_template_without_tools_gets_them_as_text() -> None:
    body = body_of(tools=TOOLS, messages=[{"role": "system", "content": "Be brief."}, *QUESTION, CALLED, RESULT])
    talk = conversation(plain_messages(body.messages), tools_of(body, RequestLimits()), answer_format("", {}, "hermes"))
    assert talk.tools == []
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user"]
    system, _, call, result = (message["content"] for message in talk.messages)
    assert system.startswith("Be brief.\n\nYou may call") and '"name": "now"' in system
    assert call == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert "18 degrees" in result


def test_results_as_text_and_the_question_after_them_are_one_message_of_the_user() -> None:
    calls = CALLED | {"tool_calls": [CALLED["tool_calls"][0] | {"id": id} for id in ("one", "two")]}
    results = [RESULT | {"tool_call_id": id} for id in ("one", "two")]
    body = body_of(tools=TOOLS, messages=[*QUESTION, calls, *results, *QUESTION])
    talk = conversation(plain_messages(body.messages), tools_of(body, RequestLimits()), answer_format("", {}, "hermes"))
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant", "user"]
    last = talk.messages[-1]["content"]
    assert last.count("18 degrees") == 2 and last.endswith(QUESTION[0]["content"])


def test_mistrals_templates_get_ids_of_nine_characters_that_still_match() -> None:
    body = body_of(messages=[*QUESTION, CALLED, RESULT])
    _, call, result = conversation(
        plain_messages(body.messages), None, answer_format(TEMPLATES["mistral"], {})
    ).messages
    assert call["tool_calls"][0]["id"] == result["tool_call_id"]
    assert len(result["tool_call_id"]) == 9 and result["tool_call_id"].isalnum()


METADATA = ResponseMetadata(id="id", created=0, model="m", token_bytes=())
USAGE = CompletionUsage(prompt_tokens=0, completion_tokens=0, total_tokens=0)


def chunk_of(text: str, *, last: bool) -> Chunk:
    finished = Finished("stop", prompt_tokens=1, cached_tokens=0, tokens=1, forwards=1, queued_s=0)
    return Chunk("r", 0, (), (text,), finished=finished if last else None)


def whole(plan: AnswerPlan, text: str) -> dict[str, Any]:
    choice = ChatResponseBuilder(METADATA, plan).full([chunk_of(text, last=True)], USAGE).choices[0]
    return {"finish_reason": choice.finish_reason} | choice.message.model_dump(exclude_unset=True)


def collected(plan: AnswerPlan, pieces: list[str]) -> dict[str, Any]:
    """What a client puts together from a stream."""
    builder = ChatResponseBuilder(METADATA, plan)
    answer: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        for chunk in builder.chunks(chunk_of(piece, last=last)):
            event = chunk.model_dump(exclude_unset=True)["choices"][0]
            delta = event["delta"]
            for name in ("content", "reasoning_content"):
                answer[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(answer["tool_calls"]):
                    answer["tool_calls"].append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    answer["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            answer["finish_reason"] = event["finish_reason"]
    return answer


def plan_of(template: str, *, in_reasoning: bool = False, markers: Any = None, **fields: Any) -> AnswerPlan:
    body = body_of(**{"tools": [tool(name) for name in NAMES]} | fields)
    return plan_answer(
        tools_of(body, RequestLimits()),
        answer_format(template, markers or {}),
        in_reasoning=in_reasoning,
        response_format=body.response_format,
        budget=body.thinking_token_budget,
    )


@given(thoughts=PROSE, before=PROSE, calls=CALLS | st.just([]), places=st.lists(st.integers(0)))
def test_a_stream_cut_anywhere_says_what_the_whole_answer_says(
    thoughts: str, before: str, calls: list[tuple[str, Any]], places: list[int]
) -> None:
    plan = plan_of(QWEN, in_reasoning=True)
    written = written_calls(CALL_FORMATS["hermes"], calls) if calls else ""
    text = f"{thoughts}</think>\n\n{before}{written}"
    message = whole(plan, text)
    answer = collected(plan, cut(text, places))
    assert answer["content"] == (message["content"] or "")
    assert answer["reasoning_content"] == (message["reasoning_content"] or "") == thoughts.strip()
    assert answer["tool_calls"] == message.get("tool_calls", [])
    assert [json.loads(call["function"]["arguments"]) for call in answer["tool_calls"]] == [each for _, each in calls]
    assert answer["finish_reason"] == message["finish_reason"] == ("tool_calls" if calls else "stop")


@given(seed=st.integers(0, 2**32), budget=st.integers(0, 6), places=st.lists(st.integers(0)))
def test_a_scripted_model_reasons_within_its_budget_and_then_calls(seed: int, budget: int, places: list[int]) -> None:
    fields = {"tool_choice": "required", "thinking_token_budget": budget, "parallel_tool_calls": False}
    plan = plan_of(QWEN, in_reasoning=True, markers=vocabulary()[2], **fields)
    assert plan.grammar
    text, ended = walk(plan.grammar.text, Random(seed))
    message = whole(plan, text)
    reasoning = vocabulary()[0].encode(text.partition("</think>")[0], add_special_tokens=False).ids
    # A token may be one byte of a character, which becomes U+FFFD: three bytes, and as many tokens when encoded again.
    assert "</think>" in text and len(reasoning) <= 3 * budget
    assert ended
    [call] = message["tool_calls"]
    assert call["function"]["name"] in NAMES
    assert collected(plan, cut(text, places))["tool_calls"] == message["tool_calls"]


def test_special_tokens_stay_in_the_text_only_if_they_mark_calls() -> None:
    special = {"[TOOL_CALLS]": Marker(5, True), "<tool_call>": Marker(6, False)}
    assert not plan_of(TEMPLATES["mistral"], markers=special).skip_special_tokens
    assert plan_of(QWEN, markers=special).skip_special_tokens
    assert plan_of(TEMPLATES["mistral"], markers=special, tool_choice="none").skip_special_tokens
