"""Models that come and go on a real cluster while callers send requests, and what dies meanwhile."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serve.adapter_samples import saved_adapter
from tests.serve.cluster_samples import GATEWAY, STEP_SECONDS, Cluster, cluster, deploy_file
from tests.serve.load_samples import until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
MODELS = "ray::ServeReplica:mars:Models"
SMALL: dict[str, Any] = {"model": "bundled"}


def send(running: Cluster, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(running.url + path, data, {"content-type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=STEP_SECONDS) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def states(running: Cluster) -> dict[str, tuple[str, int | None]]:
    status, listed = send(running, "GET", "/admin/models")
    return {model["name"]: (model["state"], model["version"]) for model in listed["data"]} if status == 200 else {}


def answers(running: Cluster, name: str) -> bool:
    """Return whether a model answers. The death of the only gateway cuts the connections of its callers."""
    try:
        return running.ask(model=name)[0] == 200
    except ConnectionError:
        return False


def add(running: Cluster, name: str, **fields: Any) -> int:
    """Add a model or a version, wait until it answers, and return its number."""
    status, listed = send(running, "POST", "/admin/models", {"name": name, "settings": SMALL | fields})
    assert status == 200, listed
    [model] = [each for each in listed["data"] if each["name"] == name]
    number = int(model["new_version"] or model["version"])
    until(lambda: states(running).get(name) == ("ready", number))
    return number


@contextmanager
def callers(running: Cluster, *names: str) -> Iterator[Counter[tuple[str, int]]]:
    """One caller for each model, and the statuses of their answers."""
    statuses: Counter[tuple[str, int]] = Counter()
    ended = threading.Event()

    def call(name: str) -> None:
        while not ended.is_set():
            status, _ = running.ask(model=name, max_tokens=8)
            statuses[name, status] += 1

    threads = [threading.Thread(target=call, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.slow
def test_a_model_of_the_config_and_one_added_at_run_time_answer_until_they_are_removed(tmp_path: Path) -> None:
    config = deploy_file(tmp_path / "serve.yaml", {"models": {"first": SMALL}})
    with cluster("--config", str(config)) as running:
        assert running.ask(model="first")[0] == 200
        add(running, "second")
        assert running.ask(model="second")[0] == 200
        assert set(states(running)) == {"bundled", "first", "second"}
        assert send(running, "GET", "/control?model=second")[1]["policy"] == "capacity"
        for number, model in enumerate(("bundled", "second")):
            body = {"name": f"style{number}", "model": model, "folder": saved_adapter(tmp_path / model, 3 + number)}
            assert send(running, "POST", "/admin/adapters", body)[0] == 200
            assert running.ask(model=f"style{number}")[1]["model"] == f"style{number}"
        status, refused = send(running, "POST", "/admin/adapters", {"name": "other", "folder": "smollm2"})
        assert (status, "other" in send(running, "GET", "/v1/models")[1]) == (400, False), refused
        assert send(running, "DELETE", "/admin/models/second")[0] == 204
        assert running.ask(model="second")[0] == 404
        until(lambda: not running.processes("mars-model-2:Engine"))


@pytest.mark.slow
def test_no_request_fails_while_versions_change_and_the_manager_dies(tmp_path: Path) -> None:
    config = deploy_file(tmp_path / "serve.yaml", {"storage": str(tmp_path / "storage")}, gateways=2)
    with cluster("--config", str(config)) as running:
        add(running, "small")
        with callers(running, "small", "small", "bundled") as statuses:
            add(running, "small", threshold=0.98)
            running.kill(MODELS)
            until(lambda: states(running).get("small", ("", 0))[0] == "ready")
            last = add(running, "small", threshold=0.97)
        assert {status for _, status in statuses} == {200}, statuses
        assert states(running)["small"] == ("ready", last)
    # The registry outlives the endpoint.
    with cluster("--config", str(config)) as running:
        until(lambda: states(running).get("small") == ("ready", last))
        assert running.ask(model="small")[0] == 200


@pytest.mark.slow
def test_a_model_without_replicas_starts_one_for_a_request_and_survives_its_engine_and_its_gateway(
    tmp_path: Path,
) -> None:
    small = SMALL | {"min_replicas": 0, "downscale_to_zero_delay_s": 5}
    config = deploy_file(tmp_path / "serve.yaml", {"models": {"small": small}})
    with cluster("--config", str(config)) as running:
        assert running.ask(model="small")[0] == 200
        until(lambda: not running.processes("mars-model-1:Engine"))
        assert states(running)["small"][0] == "ready"
        began_s = time.monotonic()
        assert running.ask(model="small")[0] == 200, f"after {time.monotonic() - began_s:.1f} s"
        with callers(running, "small", "bundled") as statuses:
            running.kill("ray::ServeReplica:mars-model-1:Engine")
            until(lambda: statuses["bundled", 200] > 20 and statuses["small", 200] > 20)
            before = statuses["small", 200]
            until(lambda: statuses["small", 200] > before + 20)
        assert set(statuses) - {("small", 503)} == {("small", 200), ("bundled", 200)}
        running.kill(GATEWAY)
        until(lambda: answers(running, "small"))
