"""Operators see what the controller decided and overrule it; classes of service have thresholds of their own."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, takewhile
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
from starlette.responses import Response

from mars_ray.control.control_settings import ControlPlan
from mars_ray.errors import QueueFullError
from mars_ray.openai_api.api_error import api_error
from mars_ray.serve.http.control_routes import VIEWERS, LiveFeed
from mars_ray.serve.http.models import ModelClients, OneModel
from tests.samples import Cli
from tests.serve.endpoint_clients import PATIENCE_S, http, until_running
from tests.serve.endpoint_samples import MESSAGES, LocalControl, Served, config_of, served
from tests.serve.key_samples import add_key
from tests.serve.load_samples import PROMPT_POOL

CLASSES = [{"name": "gold", "floor": 0.95, "share": 3}, {"name": "batch", "floor": 0.5}]
FIXED = {"policy": "fixed", "max_accuracy_loss": 0.02}
ASK = {"model": "bundled", "messages": MESSAGES, "temperature": 0}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.yaml"


@pytest.fixture(scope="module")
def keys(file: Path) -> dict[str, str]:
    return {
        "operator": add_key(file, "operator", "operate"),
        "gold": add_key(file, "gold", "use", "gold"),
        "batch": add_key(file, "batch", "use", "batch"),
    }


@pytest.fixture(scope="module")
def running(file: Path, keys: dict[str, str]) -> Iterator[Served]:
    with served(config_of(keys=str(file), classes=CLASSES, control=FIXED, threshold=0.99)) as endpoint:
        yield endpoint


@pytest.fixture
def operator(running: Served, keys: dict[str, str]) -> Iterator[httpx2.Client]:
    with http(running, keys["operator"]) as client:
        yield client
        client.delete("/control/threshold").raise_for_status()


def threshold_of(running: Served, key: str, **fields: Any) -> float:
    with http(running, key) as client:
        answer = client.post("/v1/chat/completions", json=ASK | fields)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["threshold_low"] == usage["threshold_high"]
    return float(usage["threshold_low"])


def follows(running: Served, operator: httpx2.Client, **thresholds: float) -> None:
    """Let the replica take the thresholds over."""
    running.beat()
    said = {each["name"]: each["threshold"] for each in operator.get("/control").json()["classes"]}
    assert said | thresholds == said


def test_the_state_names_replicas_thresholds_and_reasons(running: Served, operator: httpx2.Client) -> None:
    follows(running, operator)
    state = operator.get("/control").json()
    assert [(each["name"], each["threshold"], each["floor"]) for each in state["classes"]] == [
        ("gold", 0.99, 0.95),
        ("batch", 0.99, 0.85),  # calibration forbids what the config file would allow
    ]
    assert {each["reason"] for each in state["classes"]} == {"fixed"}
    assert [each["replica"] for each in state["replicas"]] == ["test"]


def test_a_threshold_set_by_hand_reaches_the_requests_of_its_class_alone(
    running: Served, operator: httpx2.Client, keys: dict[str, str]
) -> None:
    operator.put("/control/threshold", json={"threshold": 0.6, "service_class": "batch"}).raise_for_status()
    follows(running, operator, batch=0.6, gold=0.99)
    assert threshold_of(running, keys["batch"]) == 0.6
    assert threshold_of(running, keys["gold"]) == 0.99
    operator.delete("/control/threshold").raise_for_status()
    follows(running, operator, batch=0.99)
    assert threshold_of(running, keys["batch"]) == 0.99


def test_a_request_never_gets_less_quality_than_it_asks_for(
    running: Served, operator: httpx2.Client, keys: dict[str, str]
) -> None:
    operator.put("/control/threshold", json={"threshold": 0.6, "service_class": "batch"}).raise_for_status()
    follows(running, operator, batch=0.6)
    assert threshold_of(running, keys["batch"], threshold_floor=0.9) == 0.9
    assert threshold_of(running, keys["batch"], threshold=0.97) == 0.97
    assert threshold_of(running, keys["batch"], mode="ar") == 1.0


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"threshold": 0.8, "service_class": "gold"}, "threshold is 0.8; class gold allows 0.95 to 0.99."),
        ({"threshold": 1.0}, "threshold is 1.0; class gold allows 0.95 to 0.99."),
        ({"threshold": 1.7}, "less than or equal to 1"),
        ({"threshold": "high"}, "threshold must be a number"),
        ({"threshold": 0.97, "service_class": "silver"}, "there is no class 'silver'; there are gold, batch."),
        ({"threshold": 0.97, "seconds": 0}, "greater than 0"),
        ({"threshold": 0.97, "minutes": 5}, "unknown parameter 'minutes'"),
        ({}, "threshold is missing"),
    ],
)
def test_a_threshold_that_cannot_be_is_refused_and_nothing_changes(
    operator: httpx2.Client, body: dict[str, Any], said: str
) -> None:
    refused = operator.put("/control/threshold", json=body)
    assert refused.status_code == 400, refused.text
    assert said in refused.json()["error"]["message"]
    assert [each["override"] for each in operator.get("/control").json()["classes"]] == [None, None]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/control"), ("PUT", "/control/threshold"), ("DELETE", "/control/threshold")]
)
def test_only_operators_may(running: Served, keys: dict[str, str], method: str, path: str) -> None:
    with http(running, keys["gold"]) as client:
        assert client.request(method, path, json={"threshold": 0.97}).status_code == 403
    with http(running, None) as stranger:
        assert stranger.request(method, path, json={"threshold": 0.97}).status_code == 401


def test_a_live_view_has_a_place_from_its_request_until_its_response_ends() -> None:
    feed = LiveFeed(OneModel(ModelClients(cast(Any, None), LocalControl(ControlPlan()))))

    async def disconnect(response: Response) -> None:
        """Disconnect before the first event."""

        async def receive() -> Any:
            return {"type": "http.disconnect"}

        async def send(_message: Any) -> None:
            await asyncio.Event().wait()

        await response({"type": "http"}, receive, send)

    responses = [feed.stream(None, "", 0) for _ in range(VIEWERS)]
    with pytest.raises(QueueFullError, match="8 live views are open already") as refused:
        feed.stream(None, "", 0)
    answer = api_error(refused.value)
    assert (answer.status, answer.code, "retry-after" in answer.headers) == (429, "overloaded", True)
    asyncio.run(disconnect(responses[0]))
    feed.stream(None, "", 0)


def test_the_flood_of_one_tenant_lowers_no_threshold_of_another(file: Path, keys: dict[str, str]) -> None:
    """The attack: as many requests as one key may have, so that everybody else gets worse answers."""
    classes = [{"name": "gold", "floor": 0.5}, {"name": "batch", "floor": 0.5}]
    config = config_of(
        keys=str(file),
        classes=classes,
        threshold=0.99,
        engine={"max_num_seqs": 4, "max_waiting_seqs": 256},
        control={"slo": {"ttft_ms": 100}},
    )

    enough = threading.Event()

    def attack(number: int) -> set[int]:
        # What a lower threshold makes faster: where it wins nothing, the policy lowers none.
        bodies = ({"messages": list(each), "max_tokens": 64, "n": 4} for each in cycle(PROMPT_POOL[number::36]))
        return {
            attacker.post("/v1/chat/completions", json={"model": "bundled", "temperature": 0} | each).status_code
            for each in takewhile(lambda _: not enough.is_set(), bodies)
        }

    with (
        served(config) as running,
        http(running, keys["operator"]) as operator,
        http(running, keys["batch"]) as attacker,
        ThreadPoolExecutor(36) as attackers,
    ):
        sent = [attackers.submit(attack, number) for number in range(36)]
        try:
            until_running(running, 4)
            lowered, ends_s = 0, time.monotonic() + PATIENCE_S
            while lowered < 3:
                assert time.monotonic() < ends_s, operator.get("/control").json()
                assert threshold_of(running, keys["gold"]) == 0.99
                running.beat()
                said = {each["name"]: each["threshold"] for each in operator.get("/control").json()["classes"]}
                assert said["gold"] == 0.99
                lowered += said["batch"] < 0.99
        finally:
            enough.set()
        assert set().union(*(each.result() for each in sent)) <= {200, 429}


@pytest.fixture
def command(running: Served, mars_ray: Cli, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The command line with a key, or None, and this endpoint."""

    def run(key: str | None, *words: object) -> tuple[int, str, str]:
        monkeypatch.delenv("MARS_RAY_API_KEY", raising=False)
        if key is not None:
            monkeypatch.setenv("MARS_RAY_API_KEY", key)
        return mars_ray(*words, "--url", running.url)

    return run


def test_the_command_line_shows_and_sets_what_the_routes_do(
    running: Served, operator: httpx2.Client, keys: dict[str, str], command: Cli
) -> None:
    code, _, said = command(keys["operator"], "threshold", "set", "0.6", "--class", "batch", "--for", "2h")
    assert (code, said) == (0, "mars-ray: threshold 0.6 for batch, for 2h.\n")
    follows(running, operator, batch=0.6)
    code, shown, said = command(keys["operator"], "status")
    assert code == 0, said
    for part in ("policy fixed", "0.95 to 0.99", "set by an operator until", "test", "0.99, 0.6", "0/"):
        assert part in shown
    assert "1 replica" in shown and "1 replicas" not in shown
    code, _, said = command(keys["operator"], "threshold", "clear", "--class", "batch")
    assert (code, said) == (0, "mars-ray: the policy decides for batch.\n")
    follows(running, operator, batch=0.99)


@pytest.mark.parametrize(
    ("key", "arguments", "code", "said"),
    [
        ("operator", ("threshold", "set", "0.97", "--for", "5x"), 2, "--for is '5x'; give a time such as 90s"),
        ("operator", ("threshold", "set", "1.7"), 2, "threshold is 1.7, must be from 0 to 1"),
        ("operator", ("threshold", "set", "nan"), 2, "threshold is nan, must be from 0 to 1"),
        ("operator", ("threshold", "clear", "--class", "silver"), 2, "there is no class 'silver'"),
        ("gold", ("status",), 2, "needs a key with the role operate"),
        (None, ("status",), 2, "Send a valid API key"),
    ],
)
def test_what_cannot_be_ends_a_command_with_one_line(
    keys: dict[str, str], command: Cli, key: str | None, arguments: tuple[str, ...], code: int, said: str
) -> None:
    ended, out, err = command(None if key is None else keys[key], *arguments)
    assert (ended, out) == (code, "")
    assert said in err and err.count("\n") == 1


def test_an_endpoint_that_is_not_there_is_said_in_one_line(mars_ray: Cli) -> None:
    code, _, said = mars_ray("status", "--url", "http://127.0.0.1:1")
    assert code == 1
    assert "cannot be reached" in said and said.count("\n") == 1
