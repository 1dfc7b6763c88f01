"""Three turns with each client, whose own objects of earlier answers are sent back as the client holds them."""

import asyncio
import json
from importlib.util import find_spec
from typing import Any, Literal

import pytest

if find_spec("litellm") is None:
    pytest.skip("the clients are missing: run make test-clients", allow_module_level=True)

import litellm
import openai
from agents import Agent as OpenAIAgent
from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from anthropic import Anthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.dialogues import QUESTION, REPORT, Calls

TURNS = 3
QUESTIONS = [{"role": "user", "content": "Weather?"}] * TURNS
FORMS = pytest.mark.parametrize("dumped", [False, True], ids=["object", "dump"])


class Forecast(BaseModel):
    """Weather of some days."""

    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=9)


class weather(BaseModel):
    """Weather of a city."""

    city: str


class clock(BaseModel):
    """Time in a zone."""

    zone: str


KINDS: list[type[BaseModel]] = [weather, clock]


def opened(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def sent(message: Any, dumped: bool) -> Any:
    return message.model_dump() if dumped else message


@FORMS
def test_a_parsed_answer_is_sent_back(bundled: str, dumped: bool) -> None:
    messages: list[Any] = []
    with opened(bundled) as client:
        for question in QUESTIONS:
            messages.append(question)
            answer = client.chat.completions.parse(model="bundled", messages=messages, response_format=Forecast)
            message = answer.choices[0].message
            assert isinstance(message.parsed, Forecast)
            messages.append(sent(message, dumped))


@FORMS
@pytest.mark.parametrize("stream", [False, True], ids=["parse", "stream"])
def test_parsed_calls_are_sent_back(scripted: str, stream: bool, dumped: bool) -> None:
    fields: dict[str, Any] = {"model": "scripted", "tools": [openai.pydantic_function_tool(kind) for kind in KINDS]}
    messages: list[Any] = []
    with opened(scripted) as client:
        for _ in range(TURNS):
            messages.append({"role": "user", "content": QUESTION})
            for _call in range(3):
                if stream:
                    with client.chat.completions.stream(messages=messages, **fields) as events:
                        message: Any = events.get_final_completion().choices[0].message
                else:
                    message = client.chat.completions.parse(messages=messages, **fields).choices[0].message
                messages.append(sent(message, dumped))
                for call in message.tool_calls or ():
                    assert isinstance(call.function.parsed_arguments, weather | clock)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": "18"})
            assert message.content == REPORT


@FORMS
def test_items_of_parsed_responses_are_sent_back(scripted: str, dumped: bool) -> None:
    items: list[Any] = []
    tools = [
        {
            "type": "function",
            "name": kind.__name__,
            "strict": True,
            "parameters": openai.lib._pydantic.to_strict_json_schema(kind),
        }
        for kind in KINDS
    ]
    with opened(scripted) as client:
        for _ in range(TURNS):
            items.append({"role": "user", "content": QUESTION})
            for _call in range(3):
                response = client.responses.parse(model="scripted", input=items, tools=tools, store=False)  # type: ignore[arg-type]
                items += [sent(item, dumped) for item in response.output]
                items += [
                    {"type": "function_call_output", "call_id": item.call_id, "output": "18"}
                    for item in response.output
                    if item.type == "function_call"
                ]
            assert response.output_text == REPORT


@FORMS
def test_a_parsed_response_is_sent_back(bundled: str, dumped: bool) -> None:
    items: list[Any] = []
    with opened(bundled) as client:
        for question in QUESTIONS:
            items.append(question)
            response = client.responses.parse(model="bundled", input=items, text_format=Forecast)
            assert isinstance(response.output_parsed, Forecast)
            items += [sent(item, dumped) for item in response.output]


@pytest.mark.parametrize("form", ["blocks", "dump", "message"])
def test_messages_of_anthropics_client_are_sent_back(scripted: str, form: str) -> None:
    tools: list[Any] = [
        {"name": kind.__name__, "input_schema": kind.model_json_schema(), "cache_control": {"type": "ephemeral"}}
        for kind in KINDS
    ]
    messages: list[Any] = []
    with Anthropic(base_url=scripted, api_key="none", max_retries=0) as client:
        for _ in range(TURNS):
            messages.append({"role": "user", "content": QUESTION})
            for _call in range(3):
                answer = client.messages.create(model="scripted", max_tokens=500, messages=messages, tools=tools)
                whole = answer.model_dump() if form == "dump" else {"role": "assistant", "content": answer.content}
                messages.append(answer if form == "message" else whole)
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": "18"}
                    for block in answer.content
                    if block.type == "tool_use"
                ]
                messages += [{"role": "user", "content": results}] if results else []
            assert answer.content[0].text == REPORT  # type: ignore[union-attr]


@FORMS
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_messages_of_litellm_are_sent_back(scripted: str, provider: str, stream: bool, dumped: bool) -> None:
    base = scripted if provider == "anthropic" else f"{scripted}/v1"
    tools = [openai.pydantic_function_tool(kind) for kind in KINDS]
    messages: list[Any] = []
    for _ in range(TURNS):
        part = {"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}
        messages.append({"role": "user", "content": [part]})
        for _call in range(3):
            answer: Any = litellm.completion(
                model=f"{provider}/scripted",
                api_base=base,
                api_key="none",
                messages=messages,
                tools=tools,
                stream=stream,
            )
            message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
            messages.append(sent(message, dumped))
            for call in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "18"})
        assert message.content == REPORT


@pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])
def test_messages_of_langchain_are_sent_back(scripted: str, responses: bool) -> None:
    record = Calls()
    chat = ChatOpenAI(
        base_url=f"{scripted}/v1", api_key="none", model="scripted", max_retries=0, use_responses_api=responses
    ).bind_tools([tool(record.weather), tool(record.clock)])
    messages: list[Any] = []
    for _ in range(TURNS):
        messages.append(HumanMessage(QUESTION))
        for _call in range(3):
            answer = chat.invoke(messages)
            messages.append(answer)
            messages += [ToolMessage("18", tool_call_id=call["id"]) for call in answer.tool_calls]
        assert answer.text == REPORT


@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_messages_of_pydantic_ai_are_sent_back(scripted: str, api: str) -> None:
    if api == "anthropic":
        model: Any = AnthropicModel("scripted", provider=AnthropicProvider(base_url=scripted, api_key="none"))
    else:
        kind = OpenAIChatModel if api == "chat" else PydanticResponsesModel
        model = kind("scripted", provider=OpenAIProvider(base_url=f"{scripted}/v1", api_key="none"))

    async def talk() -> list[str]:
        record = Calls()
        agent: Agent[None, str] = Agent(model, tools=[record.weather, record.clock])
        history: Any = None
        outputs = []
        for _ in range(TURNS):
            result = await agent.run(QUESTION, message_history=history)
            history = result.all_messages()
            outputs.append(result.output)
        return outputs

    assert asyncio.run(talk()) == [REPORT] * TURNS


@pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])
def test_items_of_openais_agents_are_sent_back(scripted: str, kind: Any) -> None:
    async def talk() -> list[str]:
        record = Calls()
        client = AsyncOpenAI(base_url=f"{scripted}/v1", api_key="none", max_retries=0)
        agent = OpenAIAgent(
            name="Reporter",
            model=kind(model="scripted", openai_client=client),
            tools=[function_tool(record.weather), function_tool(record.clock)],
        )
        items: list[Any] = []
        outputs = []
        for _ in range(TURNS):
            result = await Runner.run(agent, [*items, {"role": "user", "content": QUESTION}])
            items = result.to_input_list()
            outputs.append(result.final_output)
        return outputs

    assert asyncio.run(talk()) == [REPORT] * TURNS


def test_notes_of_an_agent_are_sent_back(scripted: str) -> None:
    """What frameworks note in messages: ids, times, prices, signatures and marks for caches."""
    notes = {
        "id": "msg_1",
        "status": "completed",
        "timestamp": 1.5,
        "reasoning": "hm",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        "provider_specific_fields": {"refusal": None},
        "finish_reason": "stop",
        "usage": {"total_tokens": 5},
        "cache_control": {"type": "ephemeral"},
    }
    messages: list[Any] = []
    with opened(scripted) as client:
        for _ in range(TURNS):
            messages.append({"role": "user", "content": "Hello", "cache_control": {"type": "ephemeral"}})
            message = client.chat.completions.create(model="scripted", messages=messages).choices[0].message
            messages.append(json.loads(message.model_dump_json()) | notes)
        assert message.content
