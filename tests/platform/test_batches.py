"""Files and batches over HTTP, with OpenAI's client: from the upload to the results, and what is refused."""

import io
import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pytest
from openai import OpenAI
from openai.types.batch import Batch

from mars_ray.serve.middleware.api_keys import utc_now
from tests.serve.endpoint_clients import MODEL
from tests.serve.endpoint_samples import ANSWER, MESSAGES, Served, config_of, served
from tests.serve.key_samples import BY, add_key, key_file

CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": MODEL, "messages": MESSAGES, "max_tokens": 40},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "max_tokens": 2},
    "/v1/responses": {"model": MODEL, "input": MESSAGES[0]["content"], "max_output_tokens": 40},
}


def row(custom_id: str, url: str = CHAT, **fields: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": BODIES[url] | fields})


FORM = "multipart/form-data; boundary=x"
FILE_PART = b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n'


class Callers:
    """An endpoint with storage, the folder, and OpenAI's client for each of three keys. `ending` has keys of Ada that
    a test ends."""

    def __init__(self, running: Served, folder: Path, keys: list[str], ending: dict[str, str]) -> None:
        self.ending = ending
        self.served = running
        self.folder = folder
        self.keys = keys
        clients = [OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0) for key in keys]
        self.ada, self.bob, self.poor = clients

    def usage(self, key: str) -> dict[str, int]:
        """Return what a key of Ada's account has used."""
        headers = {"Authorization": f"Bearer {self.keys[0]}"}
        answer = httpx2.get(f"{self.served.url}/v1/usage", params={"group_by": "key"}, headers=headers)
        rows = {row["key"]: row for row in answer.raise_for_status().json()["data"]}
        return rows.get(key) or {"requests": 0, "answered_tokens": 0, "prompt_tokens": 0}

    def upload(self, *lines: str, **fields: Any) -> str:
        content = "\n".join(lines).encode()
        return self.ada.files.create(file=("rows.jsonl", io.BytesIO(content)), purpose="batch", **fields).id

    def begin(self, file: str, url: Any = CHAT, window: Any = "24h", **fields: Any) -> Batch:
        return self.ada.batches.create(input_file_id=file, endpoint=url, completion_window=window, **fields)

    def ended(self, batch: Batch) -> Batch:
        return until(lambda: self.ada.batches.retrieve(batch.id), lambda now: now.status not in UNFINISHED)

    def lines(self, file: str | None) -> dict[str, Any]:
        """Return the lines of a file of results by custom id; each id must be there once."""
        assert file is not None
        lines = [json.loads(line) for line in self.ada.files.content(file).text.splitlines()]
        found = {line["custom_id"]: line for line in lines}
        assert len(found) == len(lines)
        return found


UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")


def until(look: Callable[[], Batch], met: Callable[[Batch], bool]) -> Batch:
    ends_s = time.monotonic() + 60
    while not met(now := look()):
        assert time.monotonic() < ends_s, f"the batch stays {now.status}"
        time.sleep(0.02)
    return now


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    folder = tmp_path_factory.mktemp("batches")
    file = folder / "keys.yaml"
    keys = [add_key(file, "ada", "use"), add_key(file, "bob", "use")]
    slow = {"requests_per_minute": 1}
    keys.append(add_key(file, "poor", "use", limits=slow))
    ending = {how: add_key(file, f"gone-{how}", "use", account="ada", limits=slow) for how in ("removed", "expired")}
    limits = {"file_bytes": 200_000, "rows": 100, "files": 100}
    with served(config_of(keys=file, storage=str(folder / "store"), storage_limits=limits)) as running:
        yield Callers(running, folder, keys, ending)


@pytest.mark.parametrize("url", sorted(BODIES))
def test_each_row_is_answered_once_under_its_custom_id(callers: Callers, url: str) -> None:
    file = callers.upload(*(row(f"row-{number}", url) for number in range(5)))
    batch = callers.ended(callers.begin(file, url, metadata={"night": "1"}))
    assert (batch.status, batch.error_file_id, batch.metadata, batch.model) == (
        "completed",
        None,
        {"night": "1"},
        MODEL,
    )
    assert batch.request_counts and batch.request_counts.model_dump() == {"completed": 5, "failed": 0, "total": 5}
    lines = callers.lines(batch.output_file_id)
    assert sorted(lines) == [f"row-{number}" for number in range(5)]
    for line in lines.values():
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        if url == CHAT:
            assert line["response"]["body"]["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize("url", sorted(BODIES))
def test_a_row_that_names_no_model_is_answered_by_the_main_one(callers: Callers, url: str) -> None:
    nameless = json.loads(row("nameless", url))
    del nameless["body"]["model"]
    file = callers.upload(json.dumps(nameless), row("null", url, model=None), row("empty", url, model=""))
    batch = callers.ended(callers.begin(file, url))
    lines = callers.lines(batch.output_file_id)
    assert {name: line["response"]["body"]["model"] for name, line in lines.items()} == dict.fromkeys(
        ("nameless", "null", "empty"), MODEL
    )


def test_rows_count_once_as_usage_of_the_key_that_created_the_batch(callers: Callers) -> None:
    before = callers.usage("ada")
    batch = callers.ended(callers.begin(callers.upload(row("a"), row("b"), row("wrong", temperature="hot"))))
    lines = callers.lines(batch.output_file_id).values()
    usages = [line["response"]["body"]["usage"] for line in lines]
    used = batch.usage
    assert used and used.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert used.output_tokens == sum(usage["completion_tokens"] for usage in usages) > 0
    assert used.total_tokens == used.input_tokens + used.output_tokens
    after = callers.usage("ada")
    assert after["requests"] - before["requests"] == 2
    assert after["answered_tokens"] - before["answered_tokens"] == sum(usage["completion_tokens"] for usage in usages)
    assert after["prompt_tokens"] - before["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in usages)


def test_rows_beyond_a_limit_of_their_key_wait_until_the_batch_ends(callers: Callers) -> None:
    file = callers.poor.files.create(file=("rows.jsonl", "\n".join(map(row, "abc")).encode()), purpose="batch")
    batch = callers.poor.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until(
        lambda: callers.poor.batches.retrieve(batch.id),
        lambda now: bool(now.request_counts and now.request_counts.completed),
    )
    callers.poor.batches.cancel(batch.id)
    ended = until(lambda: callers.poor.batches.retrieve(batch.id), lambda now: now.status == "cancelled")
    assert ended.request_counts and ended.request_counts.model_dump() == {"completed": 1, "failed": 0, "total": 3}


@pytest.mark.parametrize("how", ["removed", "expired"])
def test_a_batch_whose_key_is_gone_stops_and_keeps_what_was_answered(callers: Callers, how: str) -> None:
    with OpenAI(base_url=f"{callers.served.url}/v1", api_key=callers.ending[how], max_retries=0) as client:
        file = client.files.create(file=("rows.jsonl", "\n".join(map(row, "abc")).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    until(
        lambda: callers.ada.batches.retrieve(batch.id),
        lambda now: bool(now.request_counts and now.request_counts.completed),
    )
    keys = key_file(callers.folder / "keys.yaml")
    if how == "removed":
        keys.remove(BY, f"gone-{how}")
    else:
        keys.update(BY, f"gone-{how}", expires=utc_now() + timedelta(seconds=1))
    ended = callers.ended(batch)
    assert ended.status == "cancelled" and ended.errors and ended.errors.data
    assert ended.errors.data[0].code == "key_not_valid"
    assert list(callers.lines(ended.output_file_id)) == ["a"]


def test_a_row_that_the_endpoint_refuses_is_in_the_errors_file_and_stops_no_other(callers: Callers) -> None:
    bad = [row("unknown", model="nobody"), row("wrong", temperature="hot"), row("streamed", stream=True)]
    batch = callers.ended(callers.begin(callers.upload(row("good"), *bad)))
    assert batch.status == "completed"
    assert batch.request_counts and batch.request_counts.model_dump() == {"completed": 1, "failed": 3, "total": 4}
    assert list(callers.lines(batch.output_file_id)) == ["good"]
    errors = callers.lines(batch.error_file_id)
    assert errors["unknown"]["response"]["status_code"] == 404
    assert errors["unknown"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert errors["wrong"]["response"]["status_code"] == 400
    assert errors["streamed"]["error"]["code"] == "stream_not_supported"


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        ([row("a"), "{", row("b")], "invalid_json_line", 2),
        ([row("a"), "", row("a")], "duplicate_custom_id", 3),
        ([row("a"), row("b", "/v1/completions")], "mismatched_url", 2),
        (['{"custom_id": "a", "method": "GET", "url": "/v1/chat/completions", "body": {}}'], "invalid_method", 1),
        (['{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}'], "missing_required_parameter", 1),
        (['{"custom_id": "\\ud800", "method": "POST", "url": "x", "body": {}}'], "invalid_custom_id", 1),
        ([row(str(number), messages=[]) for number in range(101)], "too_many_rows", 101),
        (["", " "], "empty_file", None),
    ],
)
def test_a_bad_line_fails_the_batch_with_its_number(
    callers: Callers, lines: list[str], code: str, number: int | None
) -> None:
    batch = callers.ended(callers.begin(callers.upload(*lines)))
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
    assert batch.errors and batch.errors.data
    assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)


def test_files_are_listed_read_and_deleted(callers: Callers) -> None:
    files = [callers.upload(row("a")) for _ in range(3)]
    assert callers.ada.files.retrieve(files[0]).filename == "rows.jsonl"
    assert callers.ada.files.content(files[0]).text == row("a")
    assert [file.id for file in callers.ada.files.list(limit=2, purpose="batch").data] == files[:0:-1]
    after = callers.ada.files.list(limit=1, order="asc", after=files[0], purpose="batch")
    assert ([file.id for file in after.data], after.has_more) == (files[1:2], True)
    assert callers.ada.files.delete(files[0]).deleted
    with pytest.raises(openai.NotFoundError):
        callers.ada.files.content(files[0])
    assert not list(callers.folder.rglob(files[0]))


def test_batches_are_listed_newest_first(callers: Callers) -> None:
    file = callers.upload(row("a"))
    batches = [callers.begin(file).id for _ in range(3)]
    assert [batch.id for batch in callers.ada.batches.list(limit=2).data] == batches[:0:-1]
    assert callers.ada.batches.list(limit=1, after=batches[1]).data[0].id == batches[0]
    for batch in batches:
        until(partial(callers.ada.batches.retrieve, batch), lambda now: now.status == "completed")


def test_a_file_and_a_batch_of_another_key_are_not_found(callers: Callers) -> None:
    file = callers.upload(row("a"))
    batch = callers.begin(file)
    for refused in (
        lambda: callers.bob.files.retrieve(file),
        lambda: callers.bob.files.content(file),
        lambda: callers.bob.files.delete(file),
        lambda: callers.bob.batches.retrieve(batch.id),
        lambda: callers.bob.batches.cancel(batch.id),
        lambda: callers.bob.batches.create(input_file_id=file, endpoint=CHAT, completion_window="24h"),
        lambda: callers.ada.files.retrieve("file-" + "z" * 32),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            refused()
        assert error.value.code == "not_found"
    assert (callers.bob.files.list().data, callers.bob.batches.list().data) == ([], [])
    assert callers.ended(batch).status == "completed"


def test_a_cancelled_batch_keeps_what_was_answered(callers: Callers) -> None:
    file = callers.upload(*(row(str(number), max_tokens=40) for number in range(100)))
    batch = callers.begin(file)
    with pytest.raises(openai.ConflictError, match="has not ended"):
        callers.ada.files.delete(file)
    until(
        lambda: callers.ada.batches.retrieve(batch.id),
        lambda now: bool(now.request_counts and now.request_counts.completed),
    )
    assert callers.ada.batches.cancel(batch.id).status == "cancelling"
    ended = callers.ended(batch)
    assert ended.status == "cancelled" and ended.request_counts
    assert 0 < ended.request_counts.completed < 100
    assert len(callers.lines(ended.output_file_id)) == ended.request_counts.completed
    with pytest.raises(openai.ConflictError, match="is cancelled"):
        callers.ada.batches.cancel(batch.id)
    assert callers.ada.files.delete(file).deleted


@pytest.mark.parametrize("window", ["24", "0h", "30s", "1.5h", "-1h", "169h", "99999999h", "1d", "\uff12h"])
def test_a_window_that_is_no_time_is_refused(callers: Callers, window: str) -> None:
    with pytest.raises(openai.BadRequestError, match="completion_window"):
        callers.begin(callers.upload(row("a")), window=window)


def test_an_upload_beyond_the_limit_is_refused_and_leaves_nothing(callers: Callers) -> None:
    before = sorted(callers.folder.rglob("content"))
    with pytest.raises(openai.APIStatusError) as declared:
        callers.upload("x" * 300_000)
    with pytest.raises(openai.APIStatusError) as counted:
        callers.upload("x" * 200_001)
    assert (declared.value.status_code, counted.value.status_code) == (413, 413)
    assert sorted(callers.folder.rglob("content")) == before


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 415),
        (FORM, b"", 400),
        (FORM, b"--x\r\n" + FILE_PART + b"half", 400),
        (FORM, b"--x\r\n" + FILE_PART + b"all\r\n--x--\r\n", 400),
        (FORM, b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x--\r\n', 400),
        (FORM, b"--x\r\n\r\n\r\n--x--\r\n", 400),
        (FORM, b"--x\r\n" + FILE_PART + b"all\r\n--x\r\nContent-Disposition: form-data\r\n\r\nmore\r\n--x--\r\n", 400),
        (FORM, b'--x\r\nContent-Disposition: form-data; name=""\r\n\r\n' + b"x" * 263_000 + b"\r\n--x--\r\n", 400),
    ],
)
def test_a_form_that_is_wrong_is_refused_and_leaves_nothing(
    callers: Callers, content_type: str, body: bytes, status: int
) -> None:
    before = sorted(callers.folder.rglob("content"))
    heads = {"authorization": f"Bearer {callers.keys[0]}", "content-type": content_type}
    answer = httpx2.post(f"{callers.served.url}/v1/files", headers=heads, content=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")
    assert sorted(callers.folder.rglob("content")) == before


def test_a_file_may_expire_sooner(callers: Callers) -> None:
    id = callers.upload(row("a"), expires_after={"anchor": "created_at", "seconds": 3600})
    file = callers.ada.files.retrieve(id)
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="seconds"):
        callers.upload(row("a"), expires_after={"anchor": "created_at", "seconds": 5})


def test_without_storage_the_routes_name_the_setting(endpoint: Served) -> None:
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="storage"):
            client.files.create(file=b"{}", purpose="batch")
        with pytest.raises(openai.NotFoundError, match="storage"):
            client.batches.list()
