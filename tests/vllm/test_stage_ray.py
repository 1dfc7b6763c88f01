"""A stage of a Ray Data pipeline, and a model bound into another Serve application, with engines of vLLM."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

from tests.vllm.cluster_engines import VLLM_ARGS, cluster  # noqa: E402, I001

import ray  # noqa: E402
from ray import serve  # noqa: E402

from mars_ray import LLM, SamplingParams  # noqa: E402
from mars_ray.data.prompt_file import read_prompts  # noqa: E402
from mars_ray.load.plan import bundled_prompts  # noqa: E402
from mars_ray.ray_data import ProcessorConfig, build_processor  # noqa: E402
from mars_ray.ray_serve import build_deployment  # noqa: E402

QUESTIONS = [list(messages) for messages in read_prompts(bundled_prompts())[::20]]
SAMPLING = SamplingParams(max_tokens=24)


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LLM("bundled", dtype="float32", engine="mars") as llm:
        return [output.text for output in llm.chat(QUESTIONS, SAMPLING, mode="ar")]


@pytest.fixture(scope="module")
def on_a_cluster() -> Iterator[None]:
    with cluster(2):
        yield


def test_a_stage_answers_rows_as_our_engine_does(on_a_cluster: None, expected: list[str]) -> None:
    stage = build_processor(
        ProcessorConfig(
            engine="vllm", dtype="float32", max_num_seqs=4, vllm_args=VLLM_ARGS, sampling=SAMPLING, mode="exact", cpus=1
        ),
        preprocess=lambda row: {"messages": row["messages"]},
    )
    rows = ray.data.from_items([{"number": n, "messages": messages} for n, messages in enumerate(QUESTIONS)])
    answered = {row["number"]: row for row in stage(rows).take_all()}
    assert [answered[number]["text"] for number in range(len(QUESTIONS))] == expected
    assert any(row["tokens_per_forward"] > 2 for row in answered.values())


def test_a_model_in_another_application_answers_as_our_engine_does(on_a_cluster: None, expected: list[str]) -> None:
    engine: dict[str, Any] = {"engine": "vllm", "dtype": "float32", "max_num_seqs": 4, "vllm_args": VLLM_ARGS}
    handle = serve.run(build_deployment({"engine": engine, "mode": "exact"}), name="own")
    calls = [handle.complete.remote(messages, max_tokens=24) for messages in QUESTIONS]
    answers = [call.result(timeout_s=120) for call in calls]
    assert [answer.choices[0].message.content for answer in answers] == expected
