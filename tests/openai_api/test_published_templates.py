"""Chat templates as Qwen, Meta and Mistral publish them, from the wheels of programs that fine-tune their models."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mars_ray.chat.call_format import answer_format
from mars_ray.openai_api.answer_plan import AnswerPlan
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.tools import tools_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WHEELS = {"trl": "trl==1.16.0", "axolotl": "axolotl==0.19.0"}
TEMPLATES = {
    "trl/chat_templates/qwen2_5": ("hermes", None),
    "trl/chat_templates/qwen3": ("hermes", "<think>"),
    "trl/chat_templates/qwen3_instruct_2507": ("hermes", None),
    "trl/chat_templates/qwen3_vl": ("hermes", None),
    "trl/chat_templates/llama3_1": ("llama3_json", None),
    "trl/chat_templates/llama3_2": ("llama3_json", None),
    "axolotl/utils/chat_templates/templates/mistral_v2v3": ("mistral", None),
    "axolotl/utils/chat_templates/templates/mistral_v3_tekken": ("mistral", None),
    "axolotl/utils/chat_templates/templates/exaone4": ("hermes", "<think>"),
}
"""Formats of tool calls and of reasoning by template."""
UNKNOWN = {
    "trl/chat_templates/qwen3_6",
    "trl/chat_templates/glm4moe",
    "trl/chat_templates/gptoss",
    "axolotl/utils/chat_templates/templates/llama4",
    "axolotl/utils/chat_templates/templates/gemma4",
}
"""Templates that render tools and write calls in forms of their own."""
ARGUMENTS = {"city": 'Köln "am" Rhein', "days": 3, "hourly": True}
PROPERTIES = {
    name: {"type": kind, "description": name}
    for name, kind in {"city": "string", "days": "integer", "hourly": "boolean"}.items()
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
    },
}
QUESTION: dict[str, Any] = {"role": "user", "content": "How is the weather?"}
CALL: dict[str, Any] = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}


@pytest.fixture(scope="module")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, *WHEELS.values()], check=True)
    found: dict[str, str] = {}
    for wheel in Path(folder).glob("*.whl"):
        with ZipFile(wheel) as files:
            names = [name for name in files.namelist() if name.endswith(".jinja")]
            found |= {name.removesuffix(".jinja"): files.read(name).decode() for name in names}
    return found


def render(template: str, messages: list[dict[str, Any]], *, answering: bool) -> str:
    [text], _ = render_jinja_template(
        conversations=[messages],
        tools=[TOOL],
        chat_template=template,
        add_generation_prompt=answering,
        bos_token="<s>",
        eos_token="</s>",
    )
    return str(text)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_a_published_template_renders_is_read(templates: dict[str, str], name: str) -> None:
    template = templates[name]
    calls, reasoning = TEMPLATES[name]
    found = answer_format(template, {})
    assert found.calls is not None and found.calls.name == calls
    assert (found.reasoning and found.reasoning.begin) == reasoning
    called: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    prompt = render(template, [QUESTION], answering=True)
    whole = render(template, [QUESTION, called], answering=False)
    assert whole.startswith(prompt)
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": [QUESTION], "tools": [TOOL]})
    plan = AnswerPlan(model=found, offered=tools_of(body, RequestLimits()))
    [call] = plan.parted(whole[len(prompt) :]).tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", ARGUMENTS)


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_a_template_with_a_form_of_its_own_has_no_format(templates: dict[str, str], name: str) -> None:
    found = answer_format(templates[name], {})
    assert found.template_takes_tools and found.calls is None
