"""A lossless adapter in vLLM's model runner V2, on small networks with random weights."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
if find_spec("vllm") is None:
    pytest.skip("vLLM is missing: run make test-vllm", allow_module_level=True)

from tests.vllm.interpreted import LLM  # noqa: E402, I001

from tests.vllm.causal_reference import decode_causally  # noqa: E402
from tests.vllm.small_adapters import MASK, adapter_of, base_of, choices_with, ratio_of  # noqa: E402
from tests.vllm.small_networks import BLOCK, MAX_TOKENS, decode, prompts, small_engine  # noqa: E402


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_of(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapter_of(base, tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def mars(base: Path, adapter: Path) -> LLM:
    return small_engine(base, {"adapter": str(adapter)})


@pytest.fixture(scope="module")
def stock(base: Path) -> Iterator[list[list[int]]]:
    """Tokens of stock vLLM, whose engine lives on: its end would end what all engines of a process share."""
    llm = small_engine(base, None)
    yield decode(llm)


def test_exact_mode_returns_the_tokens_of_stock_vllm_in_fewer_steps(mars, stock):
    before = mars.collective_rpc("mars_record")[0]["lookahead"]
    assert decode(mars, {"mode": "exact"}) == stock
    after = mars.collective_rpc("mars_record")[0]["lookahead"]
    gained = {name: after[name] - before[name] for name in ("tokens", "forwards", "drafts", "right")}
    assert gained["tokens"] > gained["forwards"]
    assert 0 < gained["right"] < gained["drafts"]


def test_one_token_at_a_time_the_network_answers_as_without_an_adapter(mars, stock):
    assert decode(mars, {"mode": "ar"}) == stock


@pytest.mark.parametrize("threshold", [0.8, 0.0])
def test_a_threshold_keeps_the_drafts_that_the_network_finds_likely_enough(base, adapter, mars, stock, threshold):
    choices, ratio = choices_with(base, adapter), ratio_of(base)
    rule: dict[str, Any] = {"masks": BLOCK - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS, "ratio": ratio}
    plain = [decode_causally(choices, ids, threshold=threshold, **rule) for ids in prompts()]
    before = mars.collective_rpc("mars_record")[0]["lookahead"]
    answers = decode(mars, {"threshold": threshold})
    after = mars.collective_rpc("mars_record")[0]["lookahead"]
    assert answers == [answer.tokens for answer in plain]
    assert answers != stock
    assert after["forwards"] - before["forwards"] == sum(answer.forwards - 1 for answer in plain)
    assert after["accepted"] - before["accepted"] == sum(answer.kept for answer in plain)


@pytest.mark.parametrize("limits", [{"logit_bias": {1: 5.0}}, {"min_tokens": 3}, {"logprobs": 1}])
def test_drafts_are_not_kept_where_the_sampler_excludes_tokens(mars, limits):
    assert decode(mars, {"threshold": 0.0}, **limits) == decode(mars, {"mode": "ar"}, **limits)


def test_it_takes_the_forwards_of_the_plain_rule(base, adapter, mars):
    rule: dict[str, Any] = {"threshold": 1.0, "masks": BLOCK - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS}
    with_head, headless = (
        sum(
            decode_causally(choices_with(base, adapter, reads_sampler=reads), ids, **rule).forwards for ids in prompts()
        )
        for reads in (True, False)
    )
    before = mars.collective_rpc("mars_record")[0]["lookahead"]["forwards"]
    decode(mars, {"mode": "exact"})
    forwards = mars.collective_rpc("mars_record")[0]["lookahead"]["forwards"] - before
    assert with_head != headless
    assert forwards == with_head - len(prompts())  # a forward over a prompt does not count
