"""How many prompts a measurement of speed takes."""

from collections.abc import Sequence

import pytest

from mars_ray.engine.request import SamplingParams
from mars_ray.evaluation.speed import TimedPrompt, as_many_as_fit
from mars_ray.measure import Sample


@pytest.mark.parametrize(
    ("seconds_per_prompt", "count"),
    [(0.01, 64), (1.0, 8), (5.0, 2), (100.0, 2)],
)
def test_a_slow_model_answers_fewer_prompts(seconds_per_prompt: float, count: int) -> None:
    def sample(prompts: Sequence[TimedPrompt]) -> Sample:
        return Sample(tokens=10, seconds=len(prompts) * seconds_per_prompt, forwards=10)

    prompts: list[TimedPrompt] = [((number,), SamplingParams()) for number in range(64)]
    assert as_many_as_fit(prompts, sample, 10.0) == prompts[:count]


def test_a_few_prompts_are_all_taken() -> None:
    prompts: list[TimedPrompt] = [((1,), SamplingParams())]
    assert as_many_as_fit(prompts, lambda _: Sample(tokens=0, seconds=0.0, forwards=0), 10.0) == prompts
