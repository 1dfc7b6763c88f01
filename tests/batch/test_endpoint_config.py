"""What a row asks of an endpoint, and what it cannot ask."""

import json
from dataclasses import replace
from typing import Any

import pytest

from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig, body_of
from mars_ray.errors import ConfigError, RequestError

CONFIG = EndpointProcessorConfig(url="http://127.0.0.1:8000/v1", api_key="mars-secret", sampling={"max_tokens": 8})


def test_sampling_of_a_row_passes_over_that_of_the_stage() -> None:
    body = body_of(json.dumps({"prompt": "Hello", "sampling": {"max_tokens": 4, "top_p": 0.5}}).encode(), CONFIG)
    assert (body["max_tokens"], body["top_p"]) == (4, 0.5)


@pytest.mark.parametrize(
    "sampling",
    [{"messages": []}, {"model": "other"}, {"service_tier": "default"}, {"stream": True}, "text", [1]],
    ids=str,
)
def test_sampling_of_a_row_passes_parameters_of_sampling_alone(sampling: Any) -> None:
    with pytest.raises(RequestError, match="sampling"):
        body_of(json.dumps({"prompt": "Hello", "sampling": sampling}).encode(), CONFIG)


def test_a_schema_of_a_row_that_is_not_json_is_refused() -> None:
    with pytest.raises(RequestError, match="schema in sampling is not JSON"):
        body_of(json.dumps({"prompt": "Hello", "sampling": {"schema": "{oops"}}).encode(), CONFIG)


def test_a_row_with_null_takes_the_settings_of_the_stage() -> None:
    config = replace(CONFIG, threshold=0.95, mode="exact")
    body = body_of(json.dumps({"prompt": "Hello", "threshold": None, "mode": None}).encode(), config)
    assert (body["threshold"], body["mode"]) == (0.95, "exact")


def test_a_key_for_an_app_which_asks_for_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="api_key is set, but an app asks for no key"):
        EndpointProcessorConfig(app="chat", api_key="mars-secret").check()


def test_the_key_is_not_shown_with_the_settings() -> None:
    assert "mars-secret" not in repr(CONFIG)
