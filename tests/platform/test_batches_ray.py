"""A batch on a real endpoint: every row once, whoever is killed when."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI, OpenAIError
from openai.types.batch import Batch

from tests.serve.cluster_samples import ENGINE, GATEWAY, SOON, Cluster, cluster, deploy_file

RUNNER, CONTROL = "ray::ServeReplica:mars:Batches", "ray::ControllerActor"
SECONDS = 900
CALLERS = 4
PAUSE_S = 0.25
"""Between the answer to a caller and its next request."""
PATIENT = {"RAY_raylet_start_wait_time_s": "150"}


def config(folder: Path) -> Path:
    args = {
        "storage": str(folder / "store"),
        "control": SOON,
        "engine": {"max_num_seqs": 8, "threads": 1},
    }
    return deploy_file(folder / "serve.yaml", args)


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=10)


def begun(client: OpenAI, rows: int) -> Batch:
    lines = [
        json.dumps(
            {
                "custom_id": f"row-{number}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": {"model": "bundled", "messages": [{"role": "user", "content": f"Sort: {number}, 7, 3."}]},
            }
        )
        for number in range(rows)
    ]
    file = client.files.create(file=("rows.jsonl", "\n".join(lines).encode()), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def until(client: OpenAI, id: str, met: Callable[[Batch], Any]) -> Batch:
    ends_s = time.monotonic() + SECONDS
    now = None
    while time.monotonic() < ends_s:
        try:
            now = client.batches.retrieve(id)
            if met(now):
                return now
        except OpenAIError:  # a gateway was killed
            pass
        time.sleep(0.1)
    raise AssertionError(f"the batch stays {now}")


def done(batch: Batch) -> int:
    return batch.request_counts.completed + batch.request_counts.failed if batch.request_counts else 0


def reached(rows: int, batch: Batch) -> bool:
    return done(batch) >= rows


def ids_of(client: OpenAI, batch: Batch) -> Counter[str]:
    assert (batch.status, batch.error_file_id) == ("completed", None), batch
    assert batch.output_file_id
    return Counter(
        json.loads(line)["custom_id"] for line in client.files.content(batch.output_file_id).text.splitlines()
    )


def kill(running: Cluster, name: str) -> None:
    """kill -9 all processes of that name, and wait until they are gone."""
    victims = running.processes(name)
    assert victims, name
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    psutil.wait_procs(victims, timeout=SECONDS)


class Callers:
    """Callers at about half of what the endpoint can serve, who try again when a connection is cut."""

    def __init__(self, client: OpenAI) -> None:
        self.answered = 0
        self._client = client
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(CALLERS)]
        for thread in self._threads:
            thread.start()

    def answered_since(self, before: int, _batch: Batch) -> bool:
        """Whether each of them may have had an answer since there were `before`."""
        return self.answered > before + CALLERS

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _call(self) -> None:
        while not self._ended.wait(PAUSE_S):
            with suppress(OpenAIError):  # every part of the endpoint is killed once
                self._client.chat.completions.create(
                    model="bundled", messages=[{"role": "user", "content": "Sort: 9, 7, 3, 5."}], max_tokens=64
                )
                self.answered += 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_five_kills_under_callers_lose_no_row_and_answer_none_twice(tmp_path: Path) -> None:
    rows = 10_000
    path = str(config(tmp_path))
    with cluster("--config", path, environment=PATIENT) as running:
        client = client_of(running.url)
        callers = Callers(client)
        try:
            batch = begun(client, rows)
            for number, name in enumerate((RUNNER, GATEWAY, CONTROL, ENGINE)):
                until(client, batch.id, partial(reached, rows * (number + 1) // 6))
                kill(running, name)
                until(client, batch.id, partial(callers.answered_since, callers.answered))
            assert done(until(client, batch.id, partial(reached, rows * 5 // 6))) < rows
            family = psutil.Process(running.process.pid).children(recursive=True)
            for process in (*family, psutil.Process(running.process.pid)):
                process.kill()
            psutil.wait_procs(family, timeout=SECONDS)
        finally:
            callers.end()
    with cluster("--config", path, environment=PATIENT) as running:
        client = client_of(running.url)
        ended = until(client, batch.id, lambda now: now.status == "completed")
        assert ids_of(client, ended) == Counter(f"row-{number}" for number in range(rows))
