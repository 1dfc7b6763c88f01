"""pydantic-ai over chat completions, over responses and over Anthropic's API."""

import asyncio
from importlib.util import find_spec
from typing import Any, Literal

import pytest

if find_spec("pydantic_ai") is None:
    pytest.skip("pydantic-ai is missing: run make test-clients", allow_module_level=True)

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, PromptedOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.clients.dialogues import (
    BOTH,
    CALLS,
    CALLS_AT_ONCE,
    LONG_STOP,
    LONG_STOP_REFUSAL,
    PERSON,
    PERSON_ANSWER,
    QUESTION,
    REFUSAL,
    REPORT,
    TOO_FEW,
    Calls,
)

APIS = pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])


class Report(BaseModel):
    """What an agent found out."""

    degrees: int = Field(ge=-50, le=50)
    time: Literal["noon", "midnight"]


class WithoutBounds(BaseModel):
    """A report for Anthropic's client, which moves the bounds of native output into descriptions."""

    degrees: int
    time: Literal["noon", "midnight"]


def model(api: str, url: str, name: str) -> Model:
    if api == "anthropic":
        profile = ModelProfile(supports_json_schema_output=True)  # otherwise chosen by the names of Anthropic's models
        return AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="none"), profile=profile)
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))


@APIS
def test_an_answer_comes_whole_and_as_a_stream(bundled: str, api: str) -> None:
    async def ask() -> tuple[str, list[str]]:
        agent = Agent(model(api, bundled, "bundled"))
        whole = await agent.run(PERSON)
        async with agent.run_stream(PERSON) as stream:
            return whole.output, [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]

    whole, pieces = asyncio.run(ask())
    assert whole == "".join(pieces) == PERSON_ANSWER
    assert len(pieces) > 1


@APIS
@pytest.mark.parametrize(("question", "calls"), [(QUESTION, CALLS), (BOTH, CALLS_AT_ONCE)])
def test_an_agent_calls_two_tools_and_reports(
    scripted: str, api: str, question: str, calls: list[tuple[str, str]]
) -> None:
    record = Calls()
    agent = Agent(model(api, scripted, "scripted"), tools=[record.weather, record.clock], instructions="Short.")
    assert asyncio.run(agent.run(question)).output == REPORT
    assert sorted(record.seen) == sorted(calls)


@APIS
@pytest.mark.parametrize("output", [Report, NativeOutput(Report)], ids=["tool", "native"])
def test_an_agent_with_tools_ends_with_the_type_of_its_output(scripted: str, api: str, output: Any) -> None:
    record = Calls()
    tools = [record.weather, record.clock]
    agent: Agent = Agent(model(api, scripted, "scripted"), tools=tools, output_type=output)
    assert asyncio.run(agent.run(f"{QUESTION} Answer in JSON.")).output == Report(degrees=18, time="noon")
    assert record.seen == CALLS


@APIS
@pytest.mark.parametrize("native", [False, True])
def test_an_untrained_model_keeps_to_the_type_of_the_output(bundled: str, api: str, native: bool) -> None:
    kind = WithoutBounds if native and api == "anthropic" else Report
    agent: Agent = Agent(model(api, bundled, "bundled"), output_type=NativeOutput(kind) if native else kind)
    assert isinstance(asyncio.run(agent.run("Weather?")).output, kind)


@APIS
def test_a_prompted_output_is_read_from_the_text(scripted: str, api: str) -> None:
    record = Calls()
    tools = [record.weather, record.clock]
    agent: Agent = Agent(model(api, scripted, "scripted"), tools=tools, output_type=PromptedOutput(Report))
    assert asyncio.run(agent.run(f"{QUESTION} Answer in JSON.")).output == Report(degrees=18, time="noon")


@APIS
def test_a_streamed_run_calls_the_tools_and_yields_growing_output(scripted: str, api: str) -> None:
    record = Calls()

    async def run() -> list[Any]:
        agent: Agent = Agent(model(api, scripted, "scripted"), tools=[record.weather, record.clock], output_type=Report)
        async with agent.run_stream(QUESTION) as stream:
            return [output async for output in stream.stream_output(debounce_by=None)]

    outputs = asyncio.run(run())
    assert record.seen == CALLS
    assert outputs[-1] == Report(degrees=18, time="noon")


@pytest.mark.parametrize(
    ("api", "settings", "said"),
    [
        ("chat", {"max_tokens": TOO_FEW}, REFUSAL),
        ("responses", {"max_tokens": TOO_FEW}, REFUSAL),
        ("anthropic", {"stop_sequences": [LONG_STOP]}, LONG_STOP_REFUSAL),
    ],
)
def test_a_refusal_is_an_error_of_the_client(bundled: str, api: str, settings: Any, said: str) -> None:
    with pytest.raises(ModelHTTPError, match=said):
        asyncio.run(Agent(model(api, bundled, "bundled"), model_settings=settings).run(PERSON))
