"""Schemas that cost too much, through an endpoint: each ends in an answer or a 400, and nobody else waits.

`served` watches the event loop that gateway and engine client share; the engine is another process.
"""

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.grammar_samples import SCHEMAS
from tests.engine.hostile_grammars import hostile_schemas
from tests.engine.test_grammar_limits import COSTLY
from tests.samples import memory_mib
from tests.serve.endpoint_clients import MODEL, check_error, http
from tests.serve.endpoint_samples import MESSAGES, Served

GROWTH_MIB = 300


def ask(endpoint: Served, schema: Any) -> Any:
    body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
    if schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    with http(endpoint) as client:
        return client.post("/v1/chat/completions", json=body)


def answered_or_refused(endpoint: Served, schema: Any) -> None:
    response = ask(endpoint, schema)
    if response.status_code != 200:
        assert check_error(response, 400, param="response_format")


def engine_mib(endpoint: Served) -> float:
    assert endpoint.engine.process is not None
    return memory_mib(endpoint.engine.process.pid)


@pytest.fixture(scope="module")
def memory(endpoint: Served) -> Iterator[None]:
    """The engine's memory grows by little over all tests."""
    ask(endpoint, {"type": "integer"})
    before = engine_mib(endpoint)
    yield
    assert engine_mib(endpoint) - before < GROWTH_MIB


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("name", COSTLY)
def test_a_schema_that_costs_too_much_is_a_400_that_says_so(endpoint: Served, name: str) -> None:
    assert "simplify it" in check_error(ask(endpoint, COSTLY[name]), 400, param="response_format")


@pytest.mark.usefixtures("memory")
@given(schema=SCHEMAS)
def test_any_schema_ends_in_an_answer_or_a_400(endpoint: Served, schema: Any) -> None:
    answered_or_refused(endpoint, schema)


@pytest.mark.usefixtures("memory")
def test_forty_hostile_schemas_end_in_an_answer_or_a_400(endpoint: Served) -> None:
    for text in hostile_schemas(40, seed=1):
        answered_or_refused(endpoint, json.loads(text))


@pytest.mark.slow
@pytest.mark.usefixtures("memory")
@settings(max_examples=2000, suppress_health_check=list(HealthCheck))
@given(schema=SCHEMAS | st.integers(0, 10**9).map(lambda seed: json.loads(next(hostile_schemas(1, seed)))))
def test_two_thousand_random_schemas_end_in_an_answer_or_a_400(endpoint: Served, schema: Any) -> None:
    answered_or_refused(endpoint, schema)


@pytest.mark.slow
@pytest.mark.usefixtures("memory")
def test_two_hundred_hostile_schemas_four_at_a_time_hold_no_other_caller_up(endpoint: Served) -> None:
    """What another caller waits is printed (-s); that no callback holds the loop up is asserted by `served`."""
    ended, waits = threading.Event(), list[float]()

    def other() -> None:
        while not ended.is_set():
            began = time.perf_counter()
            assert ask(endpoint, random.choice((None, {"type": "boolean"}))).status_code == 200
            waits.append(time.perf_counter() - began)

    caller = threading.Thread(target=other)
    caller.start()
    try:
        with ThreadPoolExecutor(4) as callers:
            list(callers.map(lambda text: answered_or_refused(endpoint, json.loads(text)), hostile_schemas(200)))
    finally:
        ended.set()
        caller.join()
    waits.sort()
    print(f"{len(waits)} calls of another caller: median {waits[len(waits) // 2]:.3f} s, longest {waits[-1]:.3f} s")
