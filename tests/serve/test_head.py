"""HEAD is answered as GET without the body, and a method that a path does not have names those that it has."""

import httpx2
import pytest

from mars_ray.web.pages import open_paths
from tests.serve.endpoint_clients import check_error, http
from tests.serve.endpoint_samples import Keyed

PAGES = sorted(open_paths())
HEALTH = ["/health", "/healthz", "/ping", "/readyz", "/version"]
MODELS = ["/v1/models", "/v1/models/bundled", "/v1/models/never"]
OTHERS = ["/openapi.json", "/v1/responses/never", "/v1/files", "/v1/usage", "/control", "/admin/keys", "/nothing"]


def shown(response: httpx2.Response) -> dict[str, str]:
    """The headers that are the same for the same request."""
    own = {"date", "x-request-id"}
    if response.is_error:
        own.add("content-length")  # the body names the request
    return {name: value for name, value in response.headers.items() if name not in own}


@pytest.mark.parametrize("path", [*PAGES, *HEALTH, *MODELS, *OTHERS])
def test_head_has_the_status_and_headers_of_get_and_no_body(plain: httpx2.Client, path: str) -> None:
    whole = plain.get(path)
    head = plain.head(path)
    assert (head.status_code, head.content, shown(head)) == (whole.status_code, b"", shown(whole))
    assert path not in PAGES + HEALTH or head.status_code == 200


def test_metrics_answer_head(plain: httpx2.Client) -> None:
    head = plain.head("/metrics")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) > 0


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/bundled", "/metrics", "/admin/keys", "/health", "/"])
def test_head_needs_the_key_that_get_needs(keyed: Keyed, path: str) -> None:
    for key in (None, *keyed.keys):
        with http(keyed.served, key) as client:
            assert client.head(path).status_code == client.get(path).status_code


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST"),
        ("/v1/models", "GET, HEAD"),
        ("/health", "GET, HEAD"),
        ("/", "GET, HEAD"),
        pytest.param("/v1/files", "GET, HEAD, POST", marks=pytest.mark.platform),
        pytest.param("/v1/responses/resp_1", "GET, HEAD, DELETE", marks=pytest.mark.platform),
        ("/control/threshold", "PUT, DELETE"),
    ],
)
def test_a_method_that_a_path_does_not_have_is_refused_with_those_it_has(
    plain: httpx2.Client, path: str, allowed: str
) -> None:
    methods = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"} - set(allowed.split(", "))
    for method in methods:
        refused = plain.request(method, path)
        assert (refused.status_code, refused.headers.get_list("allow")) == (405, [allowed]), method
        if method != "HEAD":
            check_error(refused, 405)
