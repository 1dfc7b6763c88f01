"""How long a stage tries an endpoint that refuses its rows for now, and which rows it does not send again."""

import asyncio
import json
import os
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from openai.types.chat.chat_completion import ChatCompletion
from ray import serve

from mars_ray.batch.ray.endpoint_rows import PATIENCE_S, EndpointRows, _RefusedForNow
from mars_ray.batch.rows.stage_rows import with_requests
from mars_ray.batch.run.endpoint_config import EndpointProcessorConfig
from mars_ray.errors import EngineHungError

HUNG = "an engine hung"


def answered(prompts: list[str], **target: str) -> pa.Table:
    """Send prompts to an endpoint, each as a row, and return the rows with their answers."""
    rows = EndpointRows(EndpointProcessorConfig(**target, should_continue_on_error=True))  # type: ignore[arg-type]
    return asyncio.run(rows(with_requests(pa.table({"prompt": prompts}), None)))


def test_a_refusal_after_a_pause_of_the_pipeline_is_tried_again() -> None:
    rows = EndpointRows(EndpointProcessorConfig(url="http://127.0.0.1:8000/v1"))
    rows._answered_s = time.monotonic() - 2 * PATIENCE_S  # the last block was answered long ago
    answer = ChatCompletion(id="a", choices=[], created=0, model="m", object="chat.completion")
    refusals = [_RefusedForNow("busy", after_s=0)]

    async def complete(**_: Any) -> ChatCompletion:
        if refusals:
            raise refusals.pop()
        return answer

    assert asyncio.run(rows._answer(complete, {})) is answer


def test_a_row_that_hung_the_engines_of_an_endpoint_is_not_sent_again() -> None:
    requests: list[bytes] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, {"data": [{"id": "small"}]})

        def do_POST(self) -> None:
            requests.append(self.rfile.read(int(self.headers["content-length"])))
            self._answer(500, {"error": {"message": HUNG, "code": "engine_hung"}})

        def _answer(self, status: int, payload: object) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(payload).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            [error] = answered(["x"], url=f"http://127.0.0.1:{server.server_port}/v1")["error"].to_pylist()
        finally:
            server.shutdown()
    assert HUNG in error
    assert len(requests) == 1


@serve.deployment(
    ray_actor_options={"num_cpus": 0}, max_ongoing_requests=1, max_queued_requests=1, health_check_period_s=1
)
class Gateway:
    """A gateway that answers one request at a time, and whose first process dies in its first request."""

    def __init__(self, died: Path) -> None:
        self._died = died

    async def complete(self, messages: list[dict[str, str]], **_: Any) -> ChatCompletion:
        if not self._died.exists():
            self._died.touch()
            os._exit(1)
        text = messages[0]["content"]
        if text == "hang":
            raise EngineHungError(HUNG)
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        fields = {"id": "a", "choices": [choice], "created": 0, "model": "m", "object": "chat.completion"}
        return ChatCompletion.model_validate(fields)


@pytest.fixture
def app(cluster: None, tmp_path: Path) -> Iterator[str]:
    """A Serve application with a `Gateway`."""
    serve.start(proxy_location="Disabled")
    gateway = Gateway.bind(tmp_path / "died")  # type: ignore[attr-defined]  # what the decorator makes of it
    serve.run(gateway, name="small", route_prefix=None)
    yield "small"
    serve.shutdown()


@pytest.mark.ray
def test_an_application_without_room_or_whose_gateway_dies_gets_the_rows_again_and_a_hung_row_fails_alone(
    app: str,
) -> None:
    table = answered(["a", "b", "hang", "c"], app=app)
    assert table["text"].to_pylist() == ["a", "b", None, "c"]
    assert table["error"].to_pylist() == [None, None, HUNG, None]
