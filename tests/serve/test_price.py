"""Operators see the price of a million tokens once a replica has a price."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from mars_ray.errors import ConfigError, UnavailableError
from mars_ray.installed import settings_class
from mars_ray.serve.deploy.deploy_file import read_deploy_file
from tests.samples import Cli
from tests.serve.endpoint_clients import http
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served

ASK = {"model": "bundled", "messages": MESSAGES, "temperature": 0}
PER_HOUR = 1234.5


@pytest.fixture(scope="module")
def priced() -> Iterator[Served]:
    with served(config_of(engine={"price_per_hour": PER_HOUR})) as endpoint:
        yield endpoint


@pytest.fixture
def client(priced: Served) -> Iterator[httpx2.Client]:
    with http(priced) as client:
        yield client


def prices_of(text: str) -> dict[str, float]:
    """Return the samples of prices in a text, by their labels other than the model; "" is the price now."""
    return {
        sample.labels.get("threshold", ""): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.endswith("price_per_million_tokens")
    }


def loaded(priced: Served, client: httpx2.Client) -> dict[str, Any]:
    """Return the status after eight seconds with a request each."""
    priced.beat()
    for _ in range(8):
        client.post("/v1/chat/completions", json=ASK).raise_for_status()
        priced.beat()
    status: dict[str, Any] = client.get("/control").json()
    return status


def test_status_and_metrics_have_the_same_prices(priced: Served, client: httpx2.Client) -> None:
    tokens = client.post("/v1/chat/completions", json=ASK).json()["usage"]["completion_tokens"]
    status = loaded(priced, client)
    assert status["price_per_hour"] == PER_HOUR
    assert status["price_per_million_tokens"] == pytest.approx(PER_HOUR / (tokens * 3600 / 1e6))
    expected = {f"{point['threshold']:g}": point["price_per_million_tokens"] for point in status["curve"]}
    assert len(expected) > 2
    assert prices_of(client.get("/metrics").text) == {"": status["price_per_million_tokens"]} | expected


def test_the_command_shows_the_price_now_and_at_each_threshold(
    priced: Served, client: httpx2.Client, mars_ray: Cli
) -> None:
    status = loaded(priced, client)
    code, shown, said = mars_ray("status", "--url", priced.url)
    assert code == 0, said
    assert f"price {PER_HOUR:,g} an hour" in shown
    rows = {f"{point['threshold']:g}": point["price_per_million_tokens"] for point in status["curve"]}
    for name, price in {"now": status["price_per_million_tokens"], **rows}.items():
        assert re.search(rf"│ {name} +│ {price:,.3f} +│", shown), name


def test_metrics_go_on_without_prices_while_no_controller_answers(
    priced: Served, client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise UnavailableError("no controller answers")

    loaded(priced, client)
    monkeypatch.setattr(priced.control, "status", fails)
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert prices_of(answer.text) == {}


def test_without_a_price_nothing_is_said_of_prices(endpoint: Served, mars_ray: Cli) -> None:
    endpoint.beat()
    with http(endpoint) as plain:
        assert prices_of(plain.get("/metrics").text) == {}
    _, shown, _ = mars_ray("status", "--url", endpoint.url)
    assert "1 replica" in shown and "price" not in shown


# Settings


@pytest.mark.parametrize("price", [-1, -0.01, float("nan"), float("inf"), 1e13, "dear", [3.0]])
def test_an_impossible_price_is_refused_in_one_line_with_its_place_and_value(price: Any, tmp_path: Path) -> None:
    path = tmp_path / "deploy.yaml"
    path.write_text(yaml.safe_dump({"applications": [{"args": {"engine": {"price_per_hour": price}}}]}))
    with pytest.raises(ConfigError) as refused:
        read_deploy_file(settings_class(), path)
    message = str(refused.value)
    assert message.startswith(f"{path}: applications[0].args.engine.price_per_hour")
    assert message.endswith(f"; it is {price!r}.") and "\n" not in message


@pytest.mark.parametrize(
    ("engine", "price"),
    [
        ({}, None),
        ({"price_per_hour": 2}, 2.0),
        ({"rehearse": "l4/qwen2.5-0.5b"}, 0.6),
        ({"rehearse": "l4/qwen2.5-0.5b", "price_per_hour": 0}, 0.0),
    ],
)
def test_the_price_of_a_replica_is_the_one_set_or_that_of_the_rehearsed_gpu(
    engine: dict[str, Any], price: float | None
) -> None:
    assert config_of(engine=engine).engine.replica_price == price
