"""One model under several names."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from mars_ray.errors import ConfigError
from tests.serve.endpoint_samples import MESSAGES, config_of, served

CHAT: Any = MESSAGES
NAMES = ["bundled", "gpt-4o", "our/model"]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        served(config_of(served_model_names=NAMES[1:])) as running,
        OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_every_name_is_listed_and_answers_under_itself(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == NAMES
    answers = [client.chat.completions.create(model=name, messages=CHAT, temperature=0) for name in NAMES]
    assert [answer.model for answer in answers] == NAMES
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    assert client.models.retrieve("our/model").id == "our/model"


def test_another_name_is_a_404_that_lists_the_names(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'bundled', 'gpt-4o', 'our/model'"):
        client.chat.completions.create(model="gpt-5", messages=CHAT)


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="'bundled' names two models or adapters"):
        config_of(served_model_names=["bundled"])
