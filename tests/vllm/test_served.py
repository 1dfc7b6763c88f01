"""`vllm serve` with the configuration of docs/vllm.md, over HTTP, on Triton's interpreter."""

from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

from tests.vllm.vllm_server import answer, rpc, serving, start, tokens_per_forward  # noqa: E402, I001

from openai import BadRequestError  # noqa: E402

from tests.store_server import free_port  # noqa: E402

SETTINGS = {"threshold": 0.95}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(SETTINGS) as started:
        yield started


def test_exact_mode_says_the_same_as_one_token_at_a_time_and_in_fewer_steps(url):
    text, gained = tokens_per_forward(url, mode="exact")
    assert gained > 1.5
    assert text == answer(url, mode="ar") != ""


def test_a_request_sets_its_threshold(url):
    _, verified = tokens_per_forward(url, threshold=1)
    _, trusted = tokens_per_forward(url, threshold=0.3)
    assert trusted > verified


def test_the_threshold_of_the_server_changes_while_it_runs(url):
    rpc(url, "set_mars_threshold", 1.0)
    _, verified = tokens_per_forward(url)
    rpc(url, "set_mars_threshold", 0.3)
    _, trusted = tokens_per_forward(url)
    assert trusted > verified


@pytest.mark.parametrize(
    ("xargs", "message"),
    [
        ({"threshold": 1.5}, "threshold is 1.5"),
        ({"threshold": "high"}, "threshold is 'high'"),
        ({"mode": "fast"}, "mode is 'fast'; choose one of ar, threshold, exact."),
        ({"block": 0}, "block is 0"),
    ],
)
def test_wrong_xargs_are_a_bad_request_named_in_one_line(url, xargs, message):
    with pytest.raises(BadRequestError) as error:
        answer(url, **xargs)
    body: Any = error.value.body
    said = body["message"]
    assert message in said
    assert "\n" not in said


def test_a_configuration_that_cannot_work_ends_the_start_with_the_reason():
    with start(free_port(), SETTINGS, "--max-num-batched-tokens", "64") as server:
        log, _ = server.communicate(timeout=300)
    assert server.returncode != 0
    assert "max_num_batched_tokens is 64; 4 sequences with 31 positions each need 124." in log
