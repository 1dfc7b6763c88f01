"""Anthropic's client with its runner of tools."""

from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("anthropic") is None:
    pytest.skip("Anthropic's client is missing: run make test-clients", allow_module_level=True)

from anthropic import Anthropic, beta_tool

from tests.clients.dialogues import BOTH, CALLS, CALLS_AT_ONCE, QUESTION, REPORT, Calls


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("question", "calls"), [(QUESTION, CALLS), (BOTH, CALLS_AT_ONCE)])
def test_the_runner_calls_two_tools_and_ends_with_the_report(
    scripted: str, stream: bool, question: str, calls: list[tuple[str, str]]
) -> None:
    record = Calls()
    tools: list[Any] = [beta_tool(record.weather), beta_tool(record.clock)]
    messages: list[Any] = [{"role": "user", "content": question}]
    with Anthropic(base_url=scripted, api_key="none", max_retries=0) as client:
        runner = client.beta.messages.tool_runner(
            model="scripted", max_tokens=1000, messages=messages, tools=tools, stream=stream
        )
        [block] = runner.until_done().content
    assert block.type == "text"
    assert block.text == REPORT
    assert record.seen == calls
