"""OpenAI's Agents SDK, over chat completions and over responses."""

import asyncio
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("agents") is None:
    pytest.skip("OpenAI's Agents SDK is missing: run make test-clients", allow_module_level=True)

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    handoff,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.clients.dialogues import (
    BOTH,
    CALLS,
    CALLS_AT_ONCE,
    HELLO,
    QUESTION,
    REFUSAL,
    REPORT,
    TOO_FEW,
    Calls,
)

Model = type[OpenAIChatCompletionsModel] | type[OpenAIResponsesModel]
MODELS = pytest.mark.parametrize("kind", [OpenAIChatCompletionsModel, OpenAIResponsesModel], ids=["chat", "responses"])


class Report(BaseModel):
    """What an agent found out."""

    degrees: int
    time: str


def agent(kind: Model, url: str, record: Calls | None = None, **fields: Any) -> Agent:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    tools = [function_tool(record.weather), function_tool(record.clock)] if record else []
    return Agent(name="Reporter", model=kind(model="scripted", openai_client=client), tools=tools, **fields)


@MODELS
@pytest.mark.parametrize(("question", "calls"), [(QUESTION, CALLS), (BOTH, CALLS_AT_ONCE)])
def test_an_agent_calls_two_tools_and_reports(
    scripted: str, kind: Model, question: str, calls: list[tuple[str, str]]
) -> None:
    record = Calls()
    result = asyncio.run(Runner.run(agent(kind, scripted, record, instructions="Be brief."), question))
    assert sorted(record.seen) == sorted(calls)
    assert result.final_output == REPORT


@MODELS
def test_a_streamed_run_calls_the_same_tools(scripted: str, kind: Model) -> None:
    record = Calls()

    async def run() -> tuple[list[str], Any]:
        result = Runner.run_streamed(agent(kind, scripted, record), QUESTION)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        return deltas, result.final_output

    deltas, output = asyncio.run(run())
    assert record.seen == CALLS
    assert "".join(deltas) == output == REPORT
    assert len(deltas) > 1


@MODELS
def test_a_run_ends_with_the_type_of_its_output(scripted: str, kind: Model) -> None:
    record = Calls()
    reporter = agent(kind, scripted, record, output_type=Report)
    result = asyncio.run(Runner.run(reporter, f"{QUESTION} Answer in JSON."))
    assert record.seen == CALLS
    assert result.final_output == Report(degrees=18, time="noon")


@MODELS
def test_a_second_run_goes_on_with_the_items_of_the_first(scripted: str, kind: Model) -> None:
    record = Calls()

    async def run() -> Any:
        reporter = agent(kind, scripted, record)
        first = await Runner.run(reporter, QUESTION)
        return await Runner.run(reporter, [*first.to_input_list(), {"role": "user", "content": BOTH}])

    assert asyncio.run(run()).final_output == REPORT
    assert sorted(record.seen) == sorted(CALLS + CALLS_AT_ONCE)


@MODELS
def test_an_agent_hands_over_to_another(scripted: str, kind: Model) -> None:
    greeter = agent(kind, scripted)
    clerk = agent(kind, scripted, handoffs=[handoff(greeter, tool_name_override="weather")])
    assert asyncio.run(Runner.run(clerk, QUESTION)).final_output == HELLO


@MODELS
def test_a_refusal_is_an_error_of_the_client(scripted: str, kind: Model) -> None:
    with pytest.raises(openai.BadRequestError, match=REFUSAL):
        asyncio.run(Runner.run(agent(kind, scripted, model_settings=ModelSettings(max_tokens=TOO_FEW)), QUESTION))
