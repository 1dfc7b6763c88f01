"""The sampler head: which logits it corrects, and what all of them come to."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.adapter.sampler_head import CANDIDATES, Candidates, SamplerHead, likeliest


@given(vocabulary=st.integers(3, 5000), seed=st.integers(0, 2**31))
def test_the_likeliest_tokens_are_those_of_a_sort(vocabulary: int, seed: int) -> None:
    logits_MV = torch.randn(3, vocabulary, generator=torch.Generator().manual_seed(seed))
    logit_MC, token_MC = likeliest(logits_MV)
    count = min(CANDIDATES, vocabulary)
    assert torch.equal(logit_MC, logits_MV.sort(dim=-1, descending=True).values[:, :count])
    assert torch.equal(logits_MV.gather(1, token_MC), logit_MC)


def test_a_new_head_corrects_nothing() -> None:
    head, states = SamplerHead(6, 4), torch.randn(5, 6)
    assert not head.correction(head.read(states), states, torch.randn(5, 3, 6)).any()


def test_the_total_is_that_of_the_corrected_logits() -> None:
    logits_MV = 2 * torch.randn(4, 300)
    logit_MC, token_MC = likeliest(logits_MV)
    corrected_MC = logit_MC + torch.randn(4, CANDIDATES)
    found = Candidates(token_MC, logit_MC, corrected_MC).log_total(logits_MV.logsumexp(-1))
    torch.testing.assert_close(found, logits_MV.scatter(1, token_MC, corrected_MC).logsumexp(-1))
