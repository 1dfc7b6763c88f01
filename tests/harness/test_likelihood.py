"""Likelihoods, judged by a full softmax over one text at a time."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mars_ray.evaluation import agreement
from mars_ray.harness.likelihood import Likelihood, Scored, likelihoods
from mars_ray.progress import ProgressLine
from tests.factories.token_rows import MASK_ID, VOCABULARY
from tests.harness.harness_samples import judged_slowly

Text = tuple[tuple[int, ...], tuple[int, ...]]


def judged(network: PreTrainedModel, texts: list[Text], mask_id: int = MASK_ID) -> list[Likelihood]:
    scored = [Scored(tokens=context + continuation, judged=len(continuation)) for context, continuation in texts]
    with ProgressLine("judge", total=len(texts)) as progress:
        return likelihoods(network, scored, mask_id, progress)


def greedy_next(network: PreTrainedModel, context: list[int], mask_id: int) -> int:
    with torch.no_grad():
        logits_V = network(input_ids=torch.tensor([context])).logits[0, -1]
    logits_V[mask_id] = -torch.inf
    return int(logits_V.argmax())


tokens = st.integers(0, MASK_ID - 1)
texts = st.lists(
    st.tuples(st.lists(tokens, min_size=1, max_size=9), st.lists(tokens, min_size=1, max_size=6)), max_size=6
)


@given(drawn=texts, likely=st.integers(0, 3), positions=st.sampled_from([1, 30, 10_000]))
def test_likelihoods_are_those_of_a_softmax_at_each_token(
    network: PreTrainedModel, drawn: list[tuple[list[int], list[int]]], likely: int, positions: int
) -> None:
    for context, continuation in drawn[:likely]:  # greedy for some tokens, to the end for others
        for place in range(len(continuation)):
            continuation[place] = greedy_next(network, [*context, *continuation[:place]], MASK_ID)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "POSITIONS_PER_FORWARD", positions)
        found = judged(network, [(tuple(context), tuple(continuation)) for context, continuation in drawn])
    slowly = [judged_slowly(network, *each, MASK_ID) for each in drawn]
    assert [each.logprob for each in found] == pytest.approx([each.logprob for each in slowly], abs=1e-3)
    assert [each.greedy for each in found] == [each.greedy for each in slowly]


def test_the_mask_token_has_no_probability(network: PreTrainedModel) -> None:
    context = (3, 1, 4)
    best = greedy_next(network, list(context), MASK_ID)
    second = greedy_next(network, list(context), best)
    assert judged(network, [(context, (second,))], mask_id=best)[0].greedy
    assert judged(network, [(context, (best,))], mask_id=best)[0].logprob == -math.inf
    all_others = judged(network, [(context, (token,)) for token in range(VOCABULARY) if token != best], mask_id=best)
    assert sum(math.exp(each.logprob) for each in all_others) == pytest.approx(1, abs=1e-4)
