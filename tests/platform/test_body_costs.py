"""A body of a megabyte, wrong or not, is refused or read within a tenth of a second of the event loop and 50 MB."""

import asyncio
import gc
import json
import subprocess
import sys
from itertools import islice

import httpx2
import pytest

from tests.platform.hostile_bodies import BYTES, hostile_bodies, large_valid_bodies, models
from tests.serve.endpoint_clients import settled
from tests.serve.endpoint_samples import Served
from tests.serve.stalls.stalls import longest_s, watched

MEGABYTES = 50
some_and_all = pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
"""The fast suite tries each 23rd hostile body, which gives neighbouring fields different values."""


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Keep the collector of garbage away from what earlier tests left, as a gateway does with what it starts with."""
    gc.collect()
    gc.freeze()


def test_every_route_and_field_is_tried(plain: httpx2.Client) -> None:
    taking = {
        (method.upper(), path)
        for path, methods in plain.get("/openapi.json").json()["paths"].items()
        for method, told in methods.items()
        if "application/json" in told.get("requestBody", {}).get("content", {})
    }
    assert models().keys() == taking
    tried = {name.partition(":")[0] for _, _, name, _ in hostile_bodies()}
    assert {name for model in models().values() for name in model.model_fields} <= tried
    assert "messages.0(AssistantMessage).content.0(TextPart).text" in tried


def send_unhurried(
    endpoint: Served, plain: httpx2.Client, method: str, path: str, body: str, stalled: list[float]
) -> httpx2.Response:
    """Send a body until it holds the loop up for no longer than allowed, three times at most: caches may be cold.

    What is allowed is judged by what this machine does at this moment: beside other work its processors are slower.
    """
    for _ in range(3):
        stalled.clear()
        answer = plain.request(method, path, content=body, headers={"content-type": "application/json"})
        endpoint.run(asyncio.sleep(0))  # the callback that answered has ended
        if not stalled or max(stalled) <= longest_s():
            stalled.clear()
            break
    return answer


@some_and_all
@pytest.mark.timeout(600)
def test_a_megabyte_of_what_is_wrong_holds_the_loop_up_for_less_than_a_tenth_of_a_second(
    endpoint: Served, plain: httpx2.Client, every: int
) -> None:
    stalled: list[float] = []
    with watched(lambda seconds, _callback: stalled.append(seconds)):
        for method, path, name, make in islice(hostile_bodies(), 0, None, every):
            body = make()
            assert BYTES * 0.9 < len(body) <= BYTES
            answer = send_unhurried(endpoint, plain, method, path, body, stalled)
            assert answer.status_code in (200, 400, 404), answer.text
            assert not stalled, f"{path} {name}: {stalled}"


def test_a_valid_request_of_a_megabyte_holds_the_loop_up_for_less_than_a_tenth_of_a_second(
    endpoint: Served, plain: httpx2.Client
) -> None:
    stalled: list[float] = []
    with watched(lambda seconds, _callback: stalled.append(seconds)):
        for method, path, name, body in large_valid_bodies():
            assert len(body.encode()) <= BYTES, name
            answer = send_unhurried(endpoint, plain, method, path, body, stalled)
            assert answer.status_code in (200, 400), f"{path} {name}: {answer.text[:500]}"
            assert not stalled, f"{path} {name}: {stalled}"
    settled(endpoint)


@some_and_all
@pytest.mark.timeout(600)
def test_a_megabyte_of_what_is_wrong_takes_no_more_than_50_megabytes(every: int) -> None:
    command = [sys.executable, "-m", "tests.platform.body_costs", str(every)]
    told = subprocess.run(command, capture_output=True, check=True, text=True)
    dearest = json.loads(told.stdout.splitlines()[-1])
    assert dearest["megabytes"] < MEGABYTES, dearest
