"""Masks that know the token before them, against one mask after the other."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mars_ray.adapter.sampler_head import SamplerHead
from mars_ray.engine.execution.cpu_runner import FusedMaskSampler
from mars_ray.engine.execution.model_runner import ForwardOutput, MaskRow
from mars_ray.engine.execution.torch_runner import MaskSampler
from mars_ray.engine.kernels.families import KernelError
from tests.adapter.samplers import corrected_by_hand

V, H = 2100, 32


def _fused(*given: Any) -> Any:
    try:
        return FusedMaskSampler(*given)
    except KernelError as reason:
        pytest.skip(f"no kernels here: {reason}")


@pytest.mark.parametrize("sampler", [MaskSampler, _fused])
@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_each_mask_is_corrected_for_the_likeliest_token_before_it(sampler: Any, lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    words, outputs = torch.randn(V, H), torch.randn(V, H)
    head = SamplerHead(H, 16).requires_grad_(False)
    torch.nn.init.normal_(head.write.weight)
    rows, start = list[MaskRow](), len(lengths)  # first what each row stands behind, then the rows
    for behind, length in enumerate(lengths):
        rows.append(MaskRow(behind, range(start, start := start + length)))
    logits_MV, hidden_MH = torch.randn(start, V), torch.randn(start, H)
    best = logits_MV.softmax(-1).max(-1)
    output = ForwardOutput(best.indices.tolist(), best.values.tolist(), logits_MV.clone(), hidden_MH)
    sampler(head, words, outputs).correct(output, rows)

    network: Any = SimpleNamespace(
        get_input_embeddings=lambda: SimpleNamespace(weight=words),
        get_output_embeddings=lambda: SimpleNamespace(weight=outputs),
    )
    expected_MV, tokens = logits_MV.clone(), best.indices.tolist()
    for row in rows:
        before = tokens[row.behind]
        for pick in row.masks:
            here = slice(pick, pick + 1)
            expected_MV[here] = corrected_by_hand(
                network, head, logits_MV[here], hidden_MH[here], torch.tensor([before])
            )
            largest = logits_MV[pick].topk(32).indices
            before = tokens[pick] = int(largest[expected_MV[pick, largest].argmax()])
    torch.testing.assert_close(output.logits_MV, expected_MV, atol=1e-4, rtol=1e-4)
    assert output.tokens == tokens
    torch.testing.assert_close(
        torch.tensor(output.confidences), expected_MV.softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    )
