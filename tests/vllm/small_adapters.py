"""An adapter all of whose parts act, on a small network with random weights, and the plain rule for both."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mars_ray.adapter.folder import load_adapter, save_adapter
from mars_ray.adapter.gated_lora import new_adapter
from tests.adapter.samplers import corrected_by_hand
from tests.factories.cards import adapter_card
from tests.vllm.causal_reference import Choices, Ratio
from tests.vllm.small_networks import BLOCK, small_network

MASK = -1
"""Marks a mask in the plain rule; the base has no mask token."""


def base_of(architecture: str, folder: Path) -> Path:
    """Write a checkpoint without a card."""
    small_network(architecture).save_pretrained(folder)
    return folder


def adapter_of(base: Path, folder: Path) -> Path:
    """Write an adapter that leaves out some of the layers that vLLM joins to one."""
    names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    lora = new_adapter(small_network_in(base), rank=3, alpha=6.0, masks=BLOCK - 2, names=names)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in lora.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_adapter(lora, adapter_card(base, block=BLOCK), folder, dtype=torch.float32)
    return folder


def small_network_in(folder: Path) -> Any:
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


def ratio_of(base: Path) -> Ratio:
    """How likely the base finds an id, compared with its most likely one, in transformers without a cache."""
    network = small_network_in(base)

    @torch.inference_mode()
    def ratio(before: list[int], token: int) -> float:
        logits_V = network(torch.tensor([before]), use_cache=False).logits[0, -1]
        return float((logits_V[token] - logits_V.max()).exp())

    return ratio
