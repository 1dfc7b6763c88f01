"""A sampling parameter that is a number is declared once: the engine, the HTTP API and rows of jobs have its limits."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from mars_ray.batch.rows.row_options import sampling_of
from mars_ray.engine.request import NUMBERS, SamplingParams
from mars_ray.errors import RequestError
from mars_ray.openai_api.protocol import ChatCompletionRequest

GUIDE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()


def in_a_body(name: str, value: float) -> float:
    body = {"messages": [{"role": "user", "content": "a"}], name: value}
    taken: float = getattr(ChatCompletionRequest.model_validate(body), name)
    return taken


def in_a_row(name: str, value: float) -> float:
    taken: float = getattr(sampling_of("1", {"sampling": {name: value}}, SamplingParams()), name)
    return taken


@pytest.mark.parametrize("name", NUMBERS)
def test_bodies_and_rows_take_a_number_within_its_limits(name: str) -> None:
    limits = NUMBERS[name]
    for value in (limits.high, (limits.low + limits.high) / 2):
        assert in_a_body(name, value) == in_a_row(name, value) == value


@pytest.mark.parametrize("name", NUMBERS)
def test_bodies_and_rows_refuse_a_number_out_of_its_limits(name: str) -> None:
    limits = NUMBERS[name]
    for value in (limits.high + 0.5, limits.low - 0.5, *([limits.low] if limits.above else [])):
        with pytest.raises(ValidationError, match=name):
            in_a_body(name, value)
        with pytest.raises(RequestError, match=name):
            in_a_row(name, value)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_guide_to_rows_names_every_number(name: str) -> None:
    assert f"`{name}`" in GUIDE
