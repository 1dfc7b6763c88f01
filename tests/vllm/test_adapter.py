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

import torch  # noqa: E402

from mars_ray.adapter.folder import load_adapter, save_adapter  # noqa: E402
from mars_ray.adapter.gated_lora import new_adapter  # noqa: E402
from mars_ray.model.digest import weights_digest  # noqa: E402
from tests.adapter.samplers import corrected_by_hand  # noqa: E402
from tests.factories.cards import adapter_card  # noqa: E402
from tests.vllm.causal_reference import Choices, decode_causally  # noqa: E402
from tests.vllm.small_networks import BLOCK, MAX_TOKENS, decode, prompts, small_engine, small_network  # noqa: E402

MASK = -1
"""Marks a mask in the plain rule; the base has no mask token."""


@pytest.fixture(scope="module", params=["qwen2", "llama"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without a card."""
    folder = tmp_path_factory.mktemp("base")
    small_network(request.param).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter all of whose parts act. It leaves out some of the layers that vLLM joins to one."""
    names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = new_adapter(small_network_in(base), rank=3, alpha=6.0, masks=BLOCK - 2, names=names)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    folder = tmp_path_factory.mktemp("adapter")
    save_adapter(lora, adapter_card(weights_digest(base), block=BLOCK), folder, dtype=torch.float32)
    return folder


def small_network_in(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()


def choices_with(base: Path, adapter: Path, *, reads_sampler: bool = True) -> Choices:
    """The choices of the base at tokens and of the adapter at masks, in transformers without a cache."""
    network = small_network_in(base)
    lora = load_adapter(adapter, base).lora
    lora.attach(network)
    hidden: list[torch.Tensor] = []
    network.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0]))

    @torch.inference_mode()
    def choices(ids: list[int], count: int) -> list[tuple[int, float]]:
        ids_P = torch.tensor(ids)
        where_M = (ids_P == MASK).nonzero().flatten()
        embedded_PH = network.get_input_embeddings()(ids_P.clamp(min=0))
        embedded_PH[where_M] = lora.masks(torch.arange(len(where_M)))
        with lora.at(where_M):
            logits_PV = network(inputs_embeds=embedded_PH[None], use_cache=False).logits[0]
        for place in where_M.tolist() if reads_sampler else ():
            before_1 = logits_PV[place - 1].argmax()[None]
            row = logits_PV[place][None]
            logits_PV[place] = corrected_by_hand(network, lora.sampler, row, hidden[-1][place][None], before_1)[0]
        sure = logits_PV[-count:].softmax(dim=-1).max(dim=-1)
        return list(zip(sure.indices.tolist(), sure.values.tolist(), strict=True))

    return choices


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


@pytest.mark.parametrize("threshold", [0.8, 0.5])
def test_a_threshold_returns_the_tokens_of_the_plain_rule(base, adapter, mars, threshold):
    rule = {"threshold": threshold, "masks": BLOCK - 1, "mask_id": MASK, "max_tokens": MAX_TOKENS}
    choices = choices_with(base, adapter)
    answers = [decode_causally(choices, ids, **rule).tokens for ids in prompts()]
    headless = choices_with(base, adapter, reads_sampler=False)
    assert answers[:4] != [decode_causally(headless, ids, **rule).tokens for ids in prompts()[:4]]
    assert decode(mars, {"threshold": threshold}) == answers
