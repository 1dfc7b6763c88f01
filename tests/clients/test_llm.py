"""Simon Willison's `llm` on the command line, with models from `extra-openai-models.yaml`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("llm") is None:
    pytest.skip("llm is missing: run make test-clients", allow_module_level=True)

from tests.clients.dialogues import BOTH, HELLO, PERSON, PERSON_ANSWER, QUESTION, REFUSAL, REPORT

MODELS = pytest.mark.parametrize("api", ["chat", "responses"])
FUNCTIONS = """
def weather(city: str) -> str:
    "Weather of a city."
    return f"18 degrees in {city}"

def clock(zone: str) -> str:
    "Time in a zone."
    return f"noon in {zone}"
"""


@pytest.fixture(scope="module")
def home(urls: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of settings that names each model for both APIs."""
    folder = tmp_path_factory.mktemp("llm")
    entries = [
        f"- model_id: {model}-{api}\n  model_name: {model}\n  api_base: {url}/v1\n  {api}: true\n"
        "  supports_tools: true\n  supports_schema: true\n"
        for model, url in urls.items()
        for api in ("chat", "responses")
    ]
    (folder / "extra-openai-models.yaml").write_text("".join(entries))
    return folder


def run(home: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"LLM_USER_PATH": str(home)}
    return subprocess.run([sys.executable, "-m", "llm", *words], env=environment, text=True, capture_output=True)


def said(home: Path, *words: str) -> str:
    ended = run(home, *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


@MODELS
@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["stream", "whole"])
def test_a_prompt_is_answered(home: Path, api: str, options: tuple[str, ...]) -> None:
    assert said(home, "-m", f"bundled-{api}", *options, PERSON) == PERSON_ANSWER


@MODELS
@pytest.mark.parametrize("options", [(), ("--no-stream",)], ids=["stream", "whole"])
@pytest.mark.parametrize(("question", "places"), [(QUESTION, ("Paris", "CET")), (BOTH, ("Rome", "UTC"))])
def test_two_tools_are_called_and_their_results_reported(
    home: Path, api: str, options: tuple[str, ...], question: str, places: tuple[str, str]
) -> None:
    ended = run(home, "-m", f"scripted-{api}", *options, "--functions", FUNCTIONS, "--tools-debug", question)
    assert ended.stdout.strip() == REPORT, ended.stderr
    assert f"18 degrees in {places[0]}" in ended.stderr
    assert f"noon in {places[1]}" in ended.stderr


@MODELS
def test_a_conversation_goes_on(home: Path, api: str) -> None:
    assert said(home, "-m", f"scripted-{api}", "Hello") == HELLO
    assert said(home, "-c", "And again?") == HELLO


@MODELS
def test_an_answer_conforms_to_a_schema(home: Path, api: str) -> None:
    answer = json.loads(said(home, "-m", f"scripted-{api}", "--schema", "degrees int, time", "Weather as JSON?"))
    assert answer.keys() == {"degrees", "time"}


@MODELS
def test_an_error_says_what_to_change(home: Path, api: str) -> None:
    ended = run(home, "-m", f"bundled-{api}", "-o", "temperature", "1.9", "-o", "max_tokens", "-1", PERSON)
    assert ended.returncode == 1
    assert REFUSAL in ended.stderr
