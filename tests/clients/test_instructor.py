"""instructor: answers as pydantic classes, in the modes that OpenAI's API serves."""

import asyncio
from importlib.util import find_spec
from typing import Any, Literal

import pytest

if find_spec("instructor") is None:
    pytest.skip("instructor is missing: run make test-clients", allow_module_level=True)

import instructor
from instructor import Mode
from instructor.core import InstructorRetryException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field

from tests.clients.dialogues import REFUSAL, TOO_FEW

MODES = [Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS]
ASKED: dict[str, Any] = {"model": "bundled", "messages": [{"role": "user", "content": "Weather?"}], "max_retries": 0}


class Forecast(BaseModel):
    """Weather of some days."""

    unit: Literal["C", "F"]
    days: int = Field(ge=1, le=9)


def client(url: str, mode: Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_is_the_model_of_the_response(bundled: str, mode: Mode) -> None:
    assert isinstance(client(bundled, mode).create(response_model=Forecast, **ASKED), Forecast)


@pytest.mark.parametrize("mode", [Mode.JSON, Mode.MD_JSON, Mode.JSON_SCHEMA])
def test_a_schema_in_the_prompt_is_followed(scripted: str, mode: Mode) -> None:
    class Report(BaseModel):
        degrees: int
        time: str

    asked = ASKED | {"model": "scripted", "messages": [{"role": "user", "content": "Weather as JSON?"}]}
    report = client(scripted, mode).create(response_model=Report, **asked)
    assert report.model_dump() == {"degrees": 18, "time": "noon"}


@pytest.mark.parametrize("mode", [Mode.TOOLS, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS])
def test_a_partial_answer_grows(bundled: str, mode: Mode) -> None:
    parts = list(client(bundled, mode).create_partial(response_model=Forecast, **ASKED))
    assert len(parts) > 1
    assert Forecast(**parts[-1].model_dump()).unit in ("C", "F")


def test_the_async_client_parses_the_same(bundled: str) -> None:
    async def ask() -> Forecast:
        asynchronous = AsyncOpenAI(base_url=f"{bundled}/v1", api_key="none", max_retries=0)
        return await instructor.from_openai(asynchronous).create(response_model=Forecast, **ASKED)

    forecast = client(bundled, Mode.TOOLS).create(response_model=Forecast, **ASKED)
    assert asyncio.run(ask()).model_dump() == forecast.model_dump()


@pytest.mark.parametrize("mode", MODES)
def test_a_refusal_is_an_error_of_the_client(bundled: str, mode: Mode) -> None:
    with pytest.raises(InstructorRetryException, match=REFUSAL):
        client(bundled, mode).create(response_model=Forecast, **ASKED | {"max_tokens": TOO_FEW})
