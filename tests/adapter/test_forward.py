"""The training forward against a decoder that puts masks behind a prefix, one block at a time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from mars_ray.adapter.forward import mask_logits
from mars_ray.adapter.gated_lora import GatedLoRA
from mars_ray.adapter.loss import AdapterLoss, heldout_masks
from mars_ray.adapter.mask_streams import mask_streams
from mars_ray.method.heldout import HeldoutLookahead
from mars_ray.method.loss import label_weights
from mars_ray.method.streams import IGNORE, PackedRows, random_phases
from tests.adapter.samplers import corrected_by_hand
from tests.factories.token_rows import packed

Adapted = tuple[PreTrainedModel, GatedLoRA]
MARKS = [[[False] * 3 + [True] * 9, [False, True, True, False, True, True]], [[False] * 2 + [True] * 5]]
examples = st.lists(st.booleans(), min_size=1, max_size=12)
rows = st.lists(st.lists(examples, min_size=1, max_size=3), min_size=1, max_size=2)


@contextmanager
def masks_stand(network: PreTrainedModel, adapter: GatedLoRA, count: int) -> Iterator[None]:
    """Show the last tokens of a forward as masks of one block."""

    def embed(_module: Any, _args: Any, out: Tensor) -> Tensor:
        return torch.cat([out[:, : out.shape[1] - count], adapter.masks(torch.arange(count))[None]], dim=1)

    hook = network.get_input_embeddings().register_forward_hook(embed)
    try:
        yield
    finally:
        hook.remove()


def by_hand(
    network: PreTrainedModel, adapter: GatedLoRA, rows: PackedRows, block: int, phase_RT: Tensor
) -> Iterator[Any]:
    """Yield row, position in it, offset, logits of the mask and of the base, in one plain forward for each mask."""
    network.set_attn_implementation("sdpa")
    for r in range(len(rows.tokens_RT)):
        for number in range(int(rows.example_RT[r].max()) + 1):
            place = (rows.example_RT[r] == number).nonzero()[:, 0]
            ids, marks = rows.tokens_RT[r, place], rows.response_RT[r, place].tolist()
            phase, start = int(phase_RT[r, place[0]]), 0
            for t in range(len(ids) - 1):
                if not marks[t]:
                    continue
                if t == 0 or not marks[t - 1] or (t + phase) % block == 0:
                    start = t
                if not marks[t + 1]:
                    continue
                masks = t + 1 - start
                with torch.no_grad():
                    base = network(input_ids=ids[None]).logits[0, t]
                    where = torch.arange(start, t + 1)
                    with masks_stand(network, adapter, masks), adapter.at(where):
                        mask = network(input_ids=ids[None, : t + 1]).logits[0, t]
                yield r, int(place[t]), t - start, mask, base


@given(layout=rows, block=st.integers(2, 5), seed=st.integers(0, 9))
def test_masks_see_what_a_decoder_shows_them_and_learn_what_the_base_says(
    adapted: Adapted, layout: list, block: int, seed: int
) -> None:
    network, adapter = adapted
    packed_rows = packed(layout)
    phase_RT = random_phases(packed_rows, block, torch.Generator().manual_seed(seed))
    expected = list(by_hand(network, adapter, packed_rows, block, phase_RT))
    streams = mask_streams(packed_rows, masks=block, phase_RT=phase_RT, decay=0.5)
    assert int((streams.noisy_RS & (streams.label_RS != IGNORE)).sum()) == len(expected)
    if not expected:
        return
    AdapterLoss(network, adapter, 1.0)
    found = mask_logits(network, adapter, streams)
    width = streams.tokens_RS.shape[1]
    clean = packed_rows.tokens_RT.shape[1]
    by_place = {
        (int(slot) // width, int(streams.twin_RS.flatten()[slot]) - (width - clean)): number
        for number, slot in enumerate(streams.noisy_slot_M)
    }
    assert len(by_place) == len(expected)
    for r, t, offset, mask, base in expected:
        number = by_place[r, t]
        slot = streams.noisy_slot_M[number]
        assert int(streams.tokens_RS.flatten()[slot]) == offset
        assert float(streams.weight_RS.flatten()[slot]) == 0.5**offset
        assert int(streams.label_RS.flatten()[slot]) == int(packed_rows.tokens_RT[r, t + 1])
        torch.testing.assert_close(found.logits_MV[number], mask, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(found.teacher_MV[number], base, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_the_sampler_head_changes_the_loss_as_it_changes_the_logits(adapted: Adapted, distill: float) -> None:
    network, adapter = adapted
    streams = mask_streams(packed(MARKS), masks=4)
    with torch.no_grad():
        loss = float(AdapterLoss(network, adapter, distill)(streams)[0])
        found = mask_logits(network, adapter, streams)
        label_M = streams.label_RS.flatten()[streams.noisy_slot_M]
        corrected_MV = corrected_by_hand(network, adapter.sampler, found.logits_MV, found.hidden_MH, found.before_M)
        target_MV = torch.lerp(one_hot(label_M, 64).float(), found.teacher_MV.softmax(-1), distill)
    assert not torch.allclose(corrected_MV, found.logits_MV)
    assert loss == pytest.approx(-float((target_MV * corrected_MV.log_softmax(-1)).sum()), rel=1e-4)


def test_only_the_adapter_learns_and_all_of_it_does(adapted: Adapted) -> None:
    network, adapter = adapted
    loss = AdapterLoss(network, adapter, 1.0)
    mask_loss, base_loss = loss(mask_streams(packed(MARKS), masks=4))
    assert not base_loss.requires_grad
    mask_loss.backward()
    assert all(parameter.grad is None for parameter in network.parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapter.parameters())
    assert {id(parameter) for parameter in loss.parameters()} == {id(parameter) for parameter in adapter.parameters()}


@pytest.mark.parametrize("distill", [0.0, 0.5, 1.0])
def test_the_loss_is_that_of_base_and_data_mixed(adapted: Adapted, distill: float) -> None:
    network, adapter = adapted
    nn.init.zeros_(adapter.sampler.write.weight)
    packed_rows = packed(MARKS)
    streams = mask_streams(packed_rows, masks=4)
    with torch.no_grad():
        mask_loss, base_loss = map(float, AdapterLoss(network, adapter, distill)(streams))
    phase_RT = torch.zeros_like(packed_rows.position_RT)
    expected = plain = 0.0
    for r, t, _, mask, base in by_hand(network, adapter, packed_rows, 4, phase_RT):
        label = int(packed_rows.tokens_RT[r, t + 1])
        target = distill * base.softmax(-1)
        target[label] += 1 - distill
        expected -= float(target @ mask.log_softmax(-1))
        plain -= float(base.log_softmax(-1)[label])
    assert (mask_loss, base_loss) == pytest.approx((expected, plain), rel=1e-4)


def test_the_loss_with_total_variation_alone_is_a_total_variation(adapted: Adapted) -> None:
    streams = mask_streams(packed(MARKS), masks=4)
    with torch.no_grad():
        loss = float(AdapterLoss(*adapted, 1.0, 1.0)(streams)[0])
        found = mask_logits(*adapted, streams)
    apart_M = (found.logits_MV.softmax(-1) - found.teacher_MV.softmax(-1)).abs().sum(-1) / 2
    assert loss == pytest.approx(float(apart_M.sum()), rel=1e-4)


def test_both_streams_weigh_what_the_loss_counts(adapted: Adapted) -> None:
    weights = label_weights(mask_streams(packed(MARKS), masks=4))
    assert weights.tolist() == [14.0, 14.0]  # 8 + 1 + 1 + 4 masks whose next token is of the response


def test_rows_without_a_mask_bring_nothing(adapted: Adapted) -> None:
    mask_loss, base_loss = AdapterLoss(*adapted, 1.0)(mask_streams(packed([[[False, False, True]]]), masks=4))
    mask_loss.backward()
    assert (float(mask_loss.detach()), float(base_loss)) == (0.0, 0.0)


def test_rows_without_a_mask_show_nothing_ahead(adapted: Adapted) -> None:
    network, adapter = adapted
    AdapterLoss(network, adapter, 1.0)
    assert heldout_masks(network, adapter, mask_streams(packed([[[False, False, True]]]), masks=4)) == []


def test_agreement_counts_runs_from_the_first_mask(adapted: Adapted) -> None:
    network, adapter = adapted
    nn.init.zeros_(adapter.sampler.write.weight)
    packed_rows = packed(MARKS)
    phase_RT = torch.zeros_like(packed_rows.position_RT)
    told = [
        (offset, bool(mask.argmax() == base.argmax()))
        for _, _, offset, mask, base in by_hand(network, adapter, packed_rows, 4, phase_RT)
    ]
    AdapterLoss(network, adapter, 1.0)
    found = HeldoutLookahead.of(heldout_masks(network, adapter, mask_streams(packed_rows, masks=4)))
    runs = unbroken = 0
    for offset, agrees in told:
        unbroken = agrees and (unbroken or offset == 0)
        runs += unbroken
    assert found.tokens_per_forward == pytest.approx(1 + runs / sum(offset == 0 for offset, _ in told))
    for offset, share in enumerate(found.by_offset):
        at = [agrees for each, agrees in told if each == offset]
        assert share == pytest.approx(sum(at) / len(at))
