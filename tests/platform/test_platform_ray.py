"""An endpoint with two models, three adapters and a batch, under callers, an overload and the death of every part."""

import json
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import APIConnectionError, APIStatusError, OpenAI

from tests.serve.adapter_samples import saved_adapter
from tests.serve.cluster_samples import CONTROLLER, ENGINE, GATEWAY, STEP_SECONDS, Cluster, cluster, deploy_file

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
CUT = 0
"""Stands for the status of a request whose connection was cut."""
NAMES = ("bundled", "small", "style", "terse", "formal")
ROWS = 600
VICTIMS = (
    ENGINE,
    "ray::ServeReplica:mars-model-1:Engine",
    "ray::ServeReplica:mars:Models",
    "ray::ServeReplica:mars:Batches",
    GATEWAY,
    CONTROLLER,
)
MESSAGES: Any = [{"role": "user", "content": "Ann, Bob: put them in a numbered list."}]


class Callers:
    """One caller for each name, until `end`, and many at once for an overload."""

    def __init__(self, url: str) -> None:
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=STEP_SECONDS)
        self.statuses: Counter[tuple[str, int]] = Counter()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._call, args=(name,)) for name in NAMES]
        for thread in self._threads:
            thread.start()

    def ask(self, name: str) -> int:
        try:
            self.client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=8)
        except APIStatusError as error:
            return error.status_code
        except APIConnectionError:
            return CUT
        return 200

    def overload(self, count: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        threads = [threading.Thread(target=lambda: statuses.update([self.ask("bundled")])) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return statuses

    def until_all_answer(self) -> None:
        ends_s = time.monotonic() + STEP_SECONDS
        while any(self.ask(name) != 200 for name in NAMES):
            assert time.monotonic() < ends_s, self.statuses

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _call(self, name: str) -> None:
        while not self._ended.is_set():
            self.statuses[name, self.ask(name)] += 1


def begin_batch(client: OpenAI) -> str:
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": NAMES[number % len(NAMES)], "messages": MESSAGES, "max_tokens": 8},
        }
        for number in range(ROWS)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("rows.jsonl", content), purpose="batch")
    made = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    return made.id


def rows_of(client: OpenAI, id: str) -> Counter[str]:
    """Wait for a batch, and return how often each of its rows was answered."""
    ends_s = time.monotonic() + 300
    while True:
        try:
            if (batch := client.batches.retrieve(id)).status in ("completed", "failed", "expired"):
                break
        except (APIStatusError, APIConnectionError):
            pass
        assert time.monotonic() < ends_s
        time.sleep(0.5)
    assert (batch.status, batch.error_file_id) == ("completed", None), batch
    answered = client.files.content(str(batch.output_file_id)).text.splitlines()
    return Counter(json.loads(line)["custom_id"] for line in answered)


def kill(running: Cluster, victim: str) -> None:
    ends_s = time.monotonic() + STEP_SECONDS
    while not running.processes(victim):
        assert time.monotonic() < ends_s, victim
    running.kill(victim)


def test_no_row_is_lost_and_every_model_answers_again_whatever_dies(tmp_path: Path) -> None:
    adapters = {name: saved_adapter(tmp_path / name, 3 + index) for index, name in enumerate(NAMES[2:])}
    small = {"model": "bundled", "adapters": {"formal": adapters["formal"]}}
    args = {
        "storage": str(tmp_path / "storage"),
        "adapters": {name: adapters[name] for name in ("style", "terse")},
        "models": {"small": small},
    }
    with cluster("--config", str(deploy_file(tmp_path / "serve.yaml", args, gateways=2))) as running:
        callers = Callers(running.url)
        try:
            callers.until_all_answer()
            batch = begin_batch(callers.client)
            for victim in VICTIMS:
                kill(running, victim)
                callers.until_all_answer()
            assert set(callers.overload(200)) <= {200, 429, 503}
            assert rows_of(callers.client, batch) == {str(number): 1 for number in range(ROWS)}
        finally:
            callers.end()
        for name in NAMES:
            assert callers.statuses[name, 200] > 0
        assert {status for _, status in callers.statuses} <= {200, 429, 503, CUT}, callers.statuses
