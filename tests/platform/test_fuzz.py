"""No request, however wrong, is the server's failure or leaves anything behind; what is documented is what comes."""

import json
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation, BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.serve.endpoint_clients import MODEL, connected, head_of, http, settled
from tests.serve.endpoint_samples import MESSAGES, Served, config_of, served

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]

VALID, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
OPERATIONS = {
    "POST /v1/chat/completions": (40, 20),
    "POST /v1/completions": (60, 20),
    "POST /v1/responses": (30, 20),
    "GET /v1/responses/{response_id}": (20, 0),
    "GET /v1/responses/{response_id}/input_items": (20, 0),
    "DELETE /v1/responses/{response_id}": (10, 0),
    "POST /v1/files": (0, 0),
    "GET /v1/files": (20, 0),
    "GET /v1/files/{file_id}": (10, 0),
    "GET /v1/files/{file_id}/content": (10, 0),
    "DELETE /v1/files/{file_id}": (10, 0),
    "POST /v1/batches": (0, 0),
    "GET /v1/batches": (20, 0),
    "GET /v1/batches/{batch_id}": (10, 0),
    "POST /v1/batches/{batch_id}/cancel": (0, 0),
    "POST /v1/messages": (30, 20),
    "POST /v1/messages/count_tokens": (60, 20),
    "POST /tokenize": (60, 20),
    "POST /detokenize": (60, 20),
    "GET /v1/models/{model}": (20, 0),
    "GET /v1/models": (2, 0),
    "GET /healthz": (2, 0),
    "GET /readyz": (2, 0),
    "GET /health": (2, 0),
    "GET /ping": (2, 0),
    "GET /version": (2, 0),
    "GET /metrics": (2, 0),
    "GET /control": (2, 0),
    "PUT /control/threshold": (20, 20),
    "DELETE /control/threshold": (10, 0),
    "GET /v1/usage": (20, 0),
    "GET /admin/usage": (20, 0),
    "GET /admin/audit": (10, 0),
    "GET /admin/keys": (2, 0),
    "POST /admin/keys": (0, 0),
    "PATCH /admin/keys/{name}": (0, 0),
    "DELETE /admin/keys/{name}": (0, 0),
    "POST /admin/keys/{name}/rotate": (0, 0),
    "GET /admin/accounts": (2, 0),
    "PUT /admin/accounts/{name}": (0, 0),
    "DELETE /admin/accounts/{name}": (0, 0),
    "GET /admin/models": (2, 0),
    "POST /admin/models": (0, 20),
    "DELETE /admin/models/{name}": (10, 0),
    "POST /admin/adapters": (0, 20),
}
"""As the document names them, and how many valid and wrong examples each is worth. Those without a body take all.

Those that need a stored file are in `test_batches`, and those that change keys in `test_admin_routes`."""

USUAL = (("model", MODEL), ("prompt", "Hello"), ("messages", MESSAGES), ("max_tokens", 4))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An endpoint whose answers are short, whatever is asked, and counted."""
    storage = str(tmp_path_factory.mktemp("storage"))
    with served(config_of(limits={"output_tokens": 8}, storage=storage)) as running:
        yield running


@pytest.fixture(scope="module")
def document(short: Served) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{short.url}/openapi.json")


def serves(endpoint: Served) -> None:
    """Assert that the endpoint is as good as new."""
    settled(endpoint)
    with http(endpoint) as plain:
        reply = plain.post("/v1/chat/completions", json={"model": MODEL, "messages": MESSAGES, "max_tokens": 1})
        assert reply.status_code == 200, reply.text
    settled(endpoint)


def operations_of(document: BaseSchema) -> Iterator[APIOperation[Any, Any, Any, Any]]:
    for each in document.get_all_operations():
        assert isinstance(each, Ok), each
        yield each.ok()


def test_the_document_names_every_operation(document: BaseSchema) -> None:
    assert {each.label for each in operations_of(document)} == OPERATIONS.keys()


def as_documented(document: Any, operation: Any, body: Any) -> bool:
    """Whether a body is one that the document allows: not all that is made to be wrong is."""
    if not isinstance(body, dict):
        return False
    told = document["paths"][operation.path][operation.method]["requestBody"]["content"]["application/json"]["schema"]
    return bool(jsonschema_rs.is_valid(told | {"components": document["components"]}, body))


@pytest.mark.parametrize(
    ("label", "mode", "examples"),
    [
        (label, mode, count)
        for label, counts in OPERATIONS.items()
        for mode, count in zip((VALID, WRONG), counts, strict=True)
        if count
    ],
)
def test_what_the_document_says_is_what_comes(
    short: Served, document: BaseSchema, label: str, mode: schemathesis.GenerationMode, examples: int
) -> None:
    operation = next(each for each in operations_of(document) if each.label == label)
    statuses: set[int] = set()

    @seed(0)
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, len(USUAL)))
    def check(case: Any, named: int) -> None:
        # Else hardly one would get past the 404, or name tokens that there are.
        for name, value in USUAL[:named]:
            if mode == VALID and isinstance(case.body, dict) and name in case.body:
                case.body[name] = value
        status = case.call_and_validate(checks=CHECKS).status_code
        if mode == VALID or not as_documented(document.raw_schema, operation, case.body):
            statuses.add(status)

    check()
    settled(short)
    if label.startswith("POST"):
        assert (200 in statuses) == (mode == VALID), "some that are valid are served, none that is wrong"


def spelled(value: object) -> bytes:
    """JSON as Python writes it: with NaN, Infinity and lone surrogates."""
    return json.dumps(value).encode()


def any_value(dice: random.Random) -> Any:
    """What should not stand where it stands."""
    return dice.choice(
        [None, True, 0, -1, 10**30, 1e308, float("nan"), float("inf"), "", "\ud800", "x" * 5000, "\x00", [], {}, [[]],
         [None], {"\ud800": 1}, {"x" * 5000: {}}, [[[[[[[[]]]]]]]], "漢", {"type": "text"}, [{"type": []}]]
    )  # fmt: skip


PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temperature": 0, "stop": []},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "max_tokens": 1, "logit_bias": {"5": 1}, "n": 1},
    "/tokenize": {"model": MODEL, "messages": MESSAGES},
    "/detokenize": {"model": MODEL, "tokens": [5]},
}


def with_a_wrong_value(dice: random.Random, path: str) -> bytes:
    return spelled(LEAST[path] | {dice.choice([*LEAST[path]]): any_value(dice)})


def with_a_wrong_name(dice: random.Random, path: str) -> bytes:
    return spelled(LEAST[path] | {dice.choice(["\ud800", "x" * 10_000, "", "\x00", "__proto__"]): any_value(dice)})


def with_a_wrong_message(dice: random.Random, path: str) -> bytes:
    message = {dice.choice(["role", "content", "name", "x"]): any_value(dice)}
    return spelled(LEAST[path] | {"messages": [MESSAGES[0] | message]})


def broken_off(dice: random.Random, path: str) -> bytes:
    whole = spelled(LEAST[path])
    return whole[: dice.randrange(len(whole))]


def one_byte_changed(dice: random.Random, path: str) -> bytes:
    whole = bytearray(spelled(LEAST[path]))
    whole[dice.randrange(len(whole))] = dice.randrange(256)
    return bytes(whole)


def noise(dice: random.Random, path: str) -> bytes:
    return dice.randbytes(dice.randrange(2000))


def nested(dice: random.Random, path: str) -> bytes:
    depth, closed = dice.choice([10, 1000, 100_000]), dice.random() < 0.5
    opening, closing = dice.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inside = opening * depth + (b"1" + closing * depth if closed else b"")
    return dice.choice([inside, b'{"model": "bundled", "messages": ' + inside + b"}"])


def huge_number(dice: random.Random, path: str) -> bytes:
    digits = b"9" * dice.choice([20, 400, 5000, 50_000])
    return spelled(LEAST[path])[:-1] + b', "max_tokens": ' + dice.choice([b"", b"-", b"1e", b"1."]) + digits + b"}"


def no_object(dice: random.Random, path: str) -> bytes:
    return spelled(any_value(dice))


KINDS: tuple[Callable[[random.Random, str], bytes], ...] = (
    with_a_wrong_value, with_a_wrong_name, with_a_wrong_message, broken_off, one_byte_changed, noise, nested,
    huge_number, no_object,
)  # fmt: skip
TYPES = (
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "",
    "\xff",
    "a/b;",
)


def test_a_thousand_malformed_bodies_are_all_the_callers_fault(short: Served) -> None:
    dice = random.Random(0)
    with http(short) as plain:
        for number in range(1000):
            kind, path = dice.choice(KINDS), dice.choice(PATHS)
            types = TYPES if dice.random() < 0.2 else TYPES[:1]
            head = [(b"content-type", dice.choice(types).encode("latin-1"))]
            response = plain.post(path, content=kind(dice, path), headers=head)
            where = f"number {number}, {kind.__name__} to {path}: {response.status_code} {response.text[:300]}"
            assert response.status_code == 200 or 400 <= response.status_code < 500, where
            if response.status_code != 200:  # a changed byte may leave a request as good as before
                assert response.json()["error"]["message"], where
                assert len(response.content) < 3000, where
    serves(short)


def wrong_requests(dice: random.Random, endpoint: Served) -> bytes:
    """A request that is wrong below JSON, and ends."""
    path, body = "/v1/completions", spelled(LEAST["/v1/completions"])
    right = head_of(endpoint, path, len(body), "Connection: close\r\n") + body
    return dice.choice(
        [
            dice.randbytes(dice.randrange(1, 500)) + b"\r\n\r\n",
            head_of(endpoint, path, 10**30) + body,
            right.replace(b"Content-Length: ", b"Content-Length: -"),
            right.replace(b"Content-Length: ", b"Content-Length: 0x"),
            right.replace(b"Host: localhost", b"Host: evil.example"),
            right.replace(b"Host: localhost\r\n", b""),
            right.replace(b"HTTP/1.1", dice.choice([b"HTTP/9.9", b"HTTP/1.1 x", b"\x00"])),
            right.replace(b"POST", dice.choice([b"GET", b"PATCH", b"TRACE", b"P\xffST", b""])),
            right.replace(path.encode(), dice.choice([b"/v1/completions/", b"//", b"/%00", b"/\xff", b"*", b"/../v1"])),
            right.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n", 1),
            right.replace(b"Content-Length", b"Content-Length: 5\r\nContent-Length"),
            right.replace(b"\r\n\r\n", b"\r\nX: " + b"y" * dice.choice([20_000, 200_000]) + b"\r\n\r\n", 1),
        ]
    )


def cut_requests(dice: random.Random, endpoint: Served) -> bytes:
    """A request of which the end does not come."""
    path, body = "/v1/completions", spelled(LEAST["/v1/completions"])
    right = head_of(endpoint, path, len(body)) + body
    upgrade = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    return dice.choice(
        [
            right[: dice.randrange(1, len(right))],
            head_of(endpoint, path, len(body) + 50) + body,
            upgrade,
            noise(dice, path),
        ]
    )


def answer_to(endpoint: Served, request: bytes, *, cut: bool) -> bytes:
    """Everything the server says until it closes the connection; `cut` closes our side first."""
    answer = b""
    with connected(endpoint) as raw, suppress(ConnectionError):
        raw.sendall(request)
        if cut:
            raw.shutdown(socket.SHUT_WR)
        while part := raw.recv(65536):
            answer += part
    return answer


def test_what_is_hardly_http_is_refused_and_the_connection_closed(short: Served) -> None:
    dice, answered = random.Random(1), 0
    for number in range(300):
        request = wrong_requests(dice, short)
        answer = answer_to(short, request, cut=False)
        answered += answer.startswith(b"HTTP/1.1 4")
        where = f"number {number}: {request[:300]!r} got {answer[:300]!r}"
        assert not answer or answer.startswith(b"HTTP/1.1 4"), where
    assert answered > 200
    serves(short)


def test_requests_that_do_not_end_leave_nothing_behind(short: Served) -> None:
    dice = random.Random(2)
    for number in range(200):
        request = cut_requests(dice, short)
        answer = answer_to(short, request, cut=True)
        where = f"number {number}: {request[:300]!r} got {answer[:300]!r}"
        assert not answer.startswith((b"HTTP/1.1 5", b"HTTP/1.1 2")), where
    serves(short)


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_another_method_or_path_is_an_error_of_openais_form(short: Served, method: str) -> None:
    with http(short) as plain:
        for path, status in (("/v1/completions", 405), ("/v1/nothing", 404), ("/tokenize/", 404)):
            response = plain.request(method, path)
            assert response.status_code == status, (path, response.text)
            if method != "HEAD":
                assert response.json()["error"]["type"] == "invalid_request_error"
            assert status != 405 or response.headers["allow"] == "POST"
