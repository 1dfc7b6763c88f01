"""Models are sampled as their own files say, and greedily where those say nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mars_ray import LLM
from mars_ray.engine.generation_defaults import generation_defaults
from mars_ray.engine.mode import Mode
from mars_ray.engine.process.messages import EngineFacts
from mars_ray.engine.request import SamplingParams
from mars_ray.errors import ModelError
from mars_ray.model.resolve import resolve_model
from mars_ray.openai_api.model_info import ModelInfo
from mars_ray.openai_api.protocol import ChatCompletionRequest
from mars_ray.openai_api.request_limits import RequestLimits
from mars_ray.openai_api.translate import engine_requests

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {"temperature": 0.0}),
        ({"eos_token_id": 2}, {"temperature": 0.0}),
        ({"do_sample": True}, {"temperature": 1.0}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        (QWEN, {name: QWEN[name] for name in ("temperature", "top_p", "top_k", "repetition_penalty")}),
    ],
)
def test_a_model_is_sampled_as_its_generation_config_says(
    tmp_path: Path, config: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert generation_defaults(tmp_path) == expected


@pytest.mark.parametrize("text", ['{"top_p": 7}', '{"do_sample": true, "temperature": "hot"}', "[]", "{"])
def test_a_generation_config_of_no_use_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


def test_the_bundled_model_takes_the_most_likely_token() -> None:
    folder = resolve_model("bundled")
    assert json.loads((folder / "generation_config.json").read_text())["do_sample"] is False
    assert generation_defaults(folder) == {"temperature": 0.0}


def sampling_of(limits: RequestLimits | None = None, **fields: Any) -> SamplingParams:
    """How a chat request is sampled that says so much, of a model of Qwen's settings."""
    facts = EngineFacts(max_model_len=8192, vocab_size=10, block=1, token_bytes=(b"a",) * 10)
    [request] = engine_requests(
        ChatCompletionRequest.model_validate({"model": "m", "messages": MESSAGES} | fields),
        [[1, 2]],
        request_id="a",
        tenant="",
        service_class="standard",
        model=ModelInfo(name="m", created=0, engine=facts),
        limits=limits or RequestLimits(),
        default_mode=Mode.EXACT,
        default_sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    )
    return request.sampling


def test_a_request_is_sampled_as_the_model_is_but_for_what_it_says() -> None:
    plain = sampling_of()
    assert (plain.temperature, plain.top_p, plain.top_k, plain.repetition_penalty) == (0.7, 0.8, 20, 1.05)
    asked = sampling_of(temperature=0, top_p=1, top_k=-1, repetition_penalty=1)
    assert (asked.temperature, asked.top_p, asked.top_k, asked.repetition_penalty) == (0, 1, 0, 1)


def test_an_answer_that_names_no_length_is_bounded_and_one_that_does_is_not() -> None:
    limits = RequestLimits(default_output_tokens=100)
    assert sampling_of(limits).max_tokens == 100
    assert sampling_of(limits, min_tokens=200).max_tokens == 200
    assert sampling_of(limits, max_tokens=3000).max_tokens == 3000
    assert sampling_of(RequestLimits(output_tokens=50)).max_tokens == 50


def test_a_program_that_gives_no_parameters_samples_as_the_model_does(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("bundled"), tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(QWEN | {"eos_token_id": 4}))
    with LLM(str(tmp_path / "model")) as llm:
        assert (llm.default_sampling_params.temperature, llm.default_sampling_params.top_k) == (0.7, 20)
        answers = {llm.chat("Hello, who are you?")[0].text for _ in range(8)}
    assert len(answers) > 1, "draws differ"
