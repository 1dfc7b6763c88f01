"""LangChain's `ChatOpenAI`, over chat completions and over responses, and its agent."""

from importlib.util import find_spec
from typing import Any, Literal

import pytest

if find_spec("langchain_openai") is None:
    pytest.skip("LangChain is missing: run make test-clients", allow_module_level=True)

import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.clients.dialogues import (
    BOTH,
    CALLS,
    CALLS_AT_ONCE,
    PERSON,
    PERSON_ANSWER,
    QUESTION,
    REFUSAL,
    REPORT,
    TOO_FEW,
    Calls,
)

APIS = pytest.mark.parametrize("responses", [False, True], ids=["chat", "responses"])


class Forecast(BaseModel):
    """Weather of some days."""

    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=9)


def model(url: str, name: str, responses: bool = False, **fields: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model=name, max_retries=0, use_responses_api=responses, **fields
    )


@APIS
def test_an_answer_comes_whole_and_as_a_stream(bundled: str, responses: bool) -> None:
    chat = model(bundled, "bundled", responses)
    assert chat.invoke(PERSON).text == PERSON_ANSWER
    pieces = [chunk.text for chunk in chat.stream(PERSON)]
    assert "".join(pieces) == PERSON_ANSWER
    assert len(list(filter(None, pieces))) > 1


@APIS
def test_tools_are_bound_and_required(bundled: str, responses: bool) -> None:
    chosen = model(bundled, "bundled", responses).bind_tools([Forecast], tool_choice="Forecast")
    [call] = chosen.invoke("Weather?").tool_calls
    Forecast(**call["args"])
    chunks = list(chosen.stream("Weather?"))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert [each["args"] for each in whole.tool_calls] == [call["args"]]


@APIS
@pytest.mark.parametrize(("question", "calls"), [(QUESTION, CALLS), (BOTH, CALLS_AT_ONCE)])
def test_an_agent_calls_two_tools_and_reports(
    scripted: str, responses: bool, question: str, calls: list[tuple[str, str]]
) -> None:
    record = Calls()
    agent = create_agent(model(scripted, "scripted", responses), [tool(record.weather), tool(record.clock)])
    messages = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
    assert sorted(record.seen) == sorted(calls)
    assert messages[-1].text == REPORT


@APIS
@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_an_answer_has_the_structure_of_a_class(bundled: str, responses: bool, method: Any) -> None:
    if method == "json_mode":
        parsed = model(bundled, "bundled", responses).with_structured_output(None, method=method).invoke(PERSON)
        assert parsed == {"name": "Oscar", "age": 34, "city": "Dallas"}
    else:
        chat = model(bundled, "bundled", responses).with_structured_output(Forecast, method=method)
        assert isinstance(chat.invoke("Weather?"), Forecast)


@APIS
def test_a_refusal_is_an_error_of_the_client(bundled: str, responses: bool) -> None:
    with pytest.raises(openai.BadRequestError, match=REFUSAL):
        model(bundled, "bundled", responses, max_tokens=TOO_FEW).invoke(PERSON)
