"""Batches on an endpoint whose storage is an S3 store, large uploads, and the commands of the guide."""

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI
from openai.types.batch import Batch
from upath import UPath

from mars_ray.storage import driver_lease
from tests.platform.test_batches import CHAT, UNFINISHED, row, until
from tests.serve.endpoint_samples import Served, config_of, served

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[2] / "docs" / "batches.md"
MIB = 2**20


def curl(*arguments: str) -> str:
    command = ["curl", "--silent", "--show-error", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


@contextmanager
def client_of(running: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ended(client: OpenAI, id: str, met: Callable[[Batch], bool] | None = None) -> Batch:
    return until(lambda: client.batches.retrieve(id), met or (lambda batch: batch.status not in UNFINISHED))


def test_a_batch_in_an_s3_store_goes_on_after_each_restart_and_answers_each_row_once(
    bucket: UPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_lease, "LEASE_S", 2.0)
    config = config_of(storage=f"s3://{bucket.path}chat", engine={"max_num_seqs": 2})
    rows = 60
    with served(config) as running, client_of(running) as client:
        lines = "\n".join(row(f"row-{number}") for number in range(rows)).encode()
        file = client.files.create(file=("rows.jsonl", lines), purpose="batch")
        id = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
        ended(client, id, lambda batch: bool(batch.request_counts and batch.request_counts.completed >= 10))
    with served(config) as running, client_of(running) as client:
        ended(client, id, lambda batch: bool(batch.request_counts and batch.request_counts.completed >= 30))
    with served(config) as running, client_of(running) as client:
        batch = ended(client, id)
        assert batch.status == "completed" and batch.output_file_id and batch.usage
        answers = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        assert sorted(answer["custom_id"] for answer in answers) == sorted(f"row-{number}" for number in range(rows))
        usages = [answer["response"]["body"]["usage"] for answer in answers]
        assert batch.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)
        assert client.files.content(file.id).content == lines


@contextmanager
def peak_mib() -> Iterator[list[float]]:
    """Measure by how many MiB this process, in which the gateway runs, grows at most within the block."""
    process = psutil.Process()
    before = most = process.memory_info().rss
    stopped = threading.Event()
    grown: list[float] = []

    def watch() -> None:
        nonlocal most
        while not stopped.wait(0.01):
            most = max(most, process.memory_info().rss)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield grown
    finally:
        stopped.set()
        watching.join()
        grown.append((most - before) / MIB)


@pytest.mark.parametrize("store", ["folder", "s3"])
def test_an_upload_of_200_mb_stays_out_of_memory(store: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place = str(tmp_path / "store") if store == "folder" else f"s3://{request.getfixturevalue('bucket').path}large"
    path = tmp_path / "rows.jsonl"
    line = row("a", user="x" * 2000).encode() + b"\n"
    path.write_bytes(line * (199 * MIB // len(line)))
    with served(config_of(storage=place)) as running:
        url = f"{running.url}/v1/files"
        small = tmp_path / "small.jsonl"
        small.write_bytes(line)
        curl(url, "-F", "purpose=batch", "-F", f"file=@{small}")  # so that clients of the store are loaded
        with peak_mib() as grown:
            file = json.loads(curl(url, "-F", "purpose=batch", "-F", f"file=@{path}"))
            copy = tmp_path / "copy"
            curl(f"{url}/{file['id']}/content", "--output", str(copy))
    print(f"{store}: the gateway grew by {grown[0]:.0f} MiB")
    assert file["bytes"] == path.stat().st_size == copy.stat().st_size
    assert grown[0] < 100


def test_a_file_that_is_200_mb_too_large_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.truncate(400 * MIB)
    with served(config_of(storage=str(tmp_path / "store"))) as running:
        text = curl(
            f"{running.url}/v1/files",
            "-F",
            "purpose=batch",
            "-F",
            f"file=@{path}",
            "-w",
            "\n%{http_code} %{size_upload}",
        )
    *body, figures = text.splitlines()
    status, sent = map(int, figures.split())
    error = json.loads("\n".join(body))["error"]
    assert (status, error["code"]) == (413, "body_too_large")
    assert "exceeds the limit" in error["message"] and "\n" not in error["message"]
    assert sent < 32 * MIB
    assert not list((tmp_path / "store").rglob("content"))


def test_the_commands_of_the_guide_run_as_written(tmp_path: Path) -> None:
    [block] = [block for block in re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL) if "curl" in block]
    commands = block.replace("\\\n", " ").splitlines()
    (tmp_path / "rows.jsonl").write_text("\n".join(row(f"row-{number}", max_tokens=5) for number in range(3)))
    ids = dict[str, str]()
    answers: list[Any] = []
    with served(config_of(storage=str(tmp_path / "store"))) as running:
        for command in commands:
            for short, id in ids.items():
                command = command.replace(short, id)
            command = command.replace("http://127.0.0.1:8000", running.url).replace("curl ", "curl -sS ", 1)
            text = subprocess.run(command, shell=True, check=True, cwd=tmp_path, capture_output=True, text=True).stdout
            if "/content" in command:
                answers.append(text)
                continue
            answers.append(json.loads(text))
            assert "error" not in answers[-1] or "cancel" in command, text
            if answers[-1].get("object") == "file":
                ids["file-…"] = answers[-1]["id"]
            if answers[-1].get("object") == "batch":
                ids["batch_…"] = answers[-1]["id"]
                deadline_s = time.monotonic() + 60
                while "output_file_id" not in ids and time.monotonic() < deadline_s:
                    state = json.loads(curl(f"{running.url}/v1/batches/{ids['batch_…']}"))
                    if state["status"] not in UNFINISHED:
                        ids["output_file_id"] = ids["file-…"] = state["output_file_id"]
    kinds = [answer if isinstance(answer, str) else answer.get("object", "error") for answer in answers]
    assert [kinds[0], kinds[1], kinds[2], kinds[4]] == ["file", "batch", "batch", "error"], (
        "an ended batch is not cancelled"
    )
    assert len(kinds[3].splitlines()) == 3
