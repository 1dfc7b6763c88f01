"""Llama and Qwen3 in vLLM's model runner V2, on small networks with random weights."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import LLM  # noqa: E402, I001

from mars_ray.model.card import write_card  # noqa: E402
from tests.factories.cards import model_card  # noqa: E402
from tests.vllm.causal_reference import choices_of, decode_causally  # noqa: E402
from tests.vllm.small_networks import BLOCK, MASK, MAX_TOKENS, decode, prompts, small_engine, small_network  # noqa: E402


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    small_network(request.param).save_pretrained(folder)
    write_card(model_card(block=BLOCK, mask_token_id=MASK), folder)
    return folder


@pytest.fixture(scope="module")
def mars(folder: Path) -> LLM:
    return small_engine(folder, {})


@pytest.fixture(scope="module")
def stock(folder: Path) -> Iterator[list[list[int]]]:
    """Tokens of stock vLLM, whose engine lives on: its end would end what all engines of a process share."""
    llm = small_engine(folder, None)
    yield decode(llm)


def test_exact_mode_returns_the_tokens_of_stock_vllm(mars, stock):
    before = mars.collective_rpc("mars_record")[0]["lookahead"]
    tokens = decode(mars, {"mode": "exact"})
    after = mars.collective_rpc("mars_record")[0]["lookahead"]
    assert 0 < after["right"] - before["right"] < after["drafts"] - before["drafts"]
    assert tokens == stock


@pytest.mark.parametrize("threshold", [0.8, 0.5])
def test_a_threshold_returns_the_tokens_of_the_plain_rule(folder, mars, threshold):
    choices = choices_of(folder, MASK)
    rule = {"threshold": threshold, "masks": BLOCK - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS}
    answers = [decode_causally(choices, ids, **rule) for ids in prompts()]
    assert sum(answer.accepted for answer in answers) > 0
    assert decode(mars, {"threshold": threshold}) == [answer.tokens for answer in answers]
