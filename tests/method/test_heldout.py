"""The lookahead of a model on held-out rows, against a decoder that stands at each block."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from mars_ray.method.heldout import HeldoutLookahead, heldout_masks
from mars_ray.method.streams import mars_streams
from tests.factories.token_rows import MASK_ID, packed


@torch.no_grad()
def test_a_mask_counts_if_exact_mode_would_accept_its_token(network: PreTrainedModel) -> None:
    marks = [False, False] + [True] * 10
    rows, block = packed([[marks]], seed=2), 4
    ids = rows.tokens_RT[0].tolist()
    network = copy.deepcopy(network)
    network.lm_head.weight[3:] = 0  # few tokens to choose from, so that masks and tokens agree at times
    clean = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0].argmax(-1)
    accepted = places = 0
    right: list[list[bool]] = [[] for _ in range(block - 1)]
    for start in range(0, 12, block):
        first = max(start, 2)  # where the masks of the block begin
        masks = [place for place in range(first, start + block) if place < 11]
        logits = network(input_ids=torch.tensor([ids[:first] + [MASK_ID] * len(masks)]), use_cache=False).logits[0]
        places += bool(masks)
        run = True
        for offset, place in enumerate(masks[: block - 1]):
            agrees = bool(logits[place].argmax() == clean[place])
            right[offset].append(agrees)
            run = run and agrees
            accepted += run
    streams = mars_streams(rows, block=block, mask_id=MASK_ID)
    measured = HeldoutLookahead.of(heldout_masks(network, streams, block=block))
    assert measured.tokens_per_forward == pytest.approx(1 + accepted / places)
    assert 0 < sum(map(sum, right)) < sum(map(len, right))
    assert measured.by_offset == pytest.approx([sum(each) / len(each) for each in right])
