"""Low-rank products stand at masks and nowhere else."""

import pytest
import torch
from transformers import PreTrainedModel

from mars_ray.adapter.gated_lora import GatedLoRA, linears_of
from mars_ray.errors import AdapterError

Adapted = tuple[PreTrainedModel, GatedLoRA]
TOKENS = torch.tensor([[5, 9, 2, 7, 7, 1]])


def test_without_masks_the_network_is_the_base_bit_for_bit(network: PreTrainedModel, adapted: Adapted) -> None:
    assert torch.equal(adapted[0](input_ids=TOKENS).logits, network(input_ids=TOKENS).logits)


def test_at_some_positions_a_layer_adds_its_products_there_and_leaves_the_others_bit_for_bit(adapted: Adapted) -> None:
    network, adapter = adapted
    name = "model.layers.1.mlp.down_proj"
    linear, pair = network.get_submodule(name), adapter.factors[name]
    x = torch.randn(6, linear.in_features)
    plain = linear(x)
    with adapter.at(torch.tensor([1, 4])):
        gated, batched = linear(x), linear(x[None])[0]
    expected = plain.clone()
    for m in (1, 4):
        expected[m] += 2.0 * (pair.b @ (pair.a @ x[m]))
    torch.testing.assert_close(gated, expected)
    assert torch.equal(gated, batched)
    assert torch.equal(gated[[0, 2, 3, 5]], plain[[0, 2, 3, 5]])


def test_two_adapters_stand_in_one_batch_each_at_its_positions(adapted: Adapted) -> None:
    network, one = adapted
    other = GatedLoRA(one.shape, one.mask_embedding_KH.shape[1])
    for pair in other.factors.values():
        torch.nn.init.normal_(pair.b)
    other.attach(network)
    linear = network.get_submodule("model.layers.0.self_attn.q_proj")
    x = torch.randn(3, linear.in_features)
    with one.at(torch.tensor([0])), other.at(torch.tensor([2])):
        both = linear(x)
    with one.at(None):
        first = linear(x)
    with other.at(None):
        last = linear(x)
    torch.testing.assert_close(both, torch.stack([first[0], linear(x)[1], last[2]]))


def test_masks_far_behind_share_the_last_embedding(adapted: Adapted) -> None:
    _, adapter = adapted
    masks = adapter.masks(torch.tensor([0, 2, 9]))
    assert torch.equal(masks, adapter.mask_embedding_KH[[0, 2, 2]])


def test_an_adapter_of_another_network_names_the_layer_that_is_missing(adapted: Adapted) -> None:
    _, adapter = adapted
    with pytest.raises(AdapterError, match=r"model\.layers\.0"):
        adapter.attach(torch.nn.Linear(2, 2))


def test_layers_are_taken_by_name_and_never_the_output_embedding(network: PreTrainedModel) -> None:
    assert {name.rpartition(".")[2] for name in linears_of(network, None)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert {name.rpartition(".")[2] for name in linears_of(network, ["q_proj"])} == {"q_proj"}
    with pytest.raises(AdapterError, match="'c_attn'; the linear layers of the network are q_proj, k_proj"):
        linears_of(network, ["q_proj", "c_attn"])
